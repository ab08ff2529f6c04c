//! The public port over TLS, certified by authorities of a test's own.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http_body_util::BodyExt as _;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use semel_api::{Door, Tls, TlsFiles};
use semel_proto::payments::v1::payments_client::PaymentsClient;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
use tonic_types::StatusExt as _;

use crate::authority::Authority;
use crate::bed::{Database, Server, until, with_database};
use crate::client::{Answer, exchange, read_answer};
use crate::connections::stall;
use crate::grpc::call::order_of;

/// A certificate and its key on the disk.
struct Files(TlsFiles, PathBuf);

impl Files {
    fn new((certificate, key): (String, String)) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(uuid::Uuid::new_v4().to_string());
        fs::create_dir(&folder).unwrap();
        let files = TlsFiles { certificate: folder.join("server.pem"), key: folder.join("server.key") };
        fs::write(&files.certificate, certificate).unwrap();
        fs::write(&files.key, key).unwrap();
        Self(files, folder)
    }

    fn load(&self) -> Tls {
        Tls::load(self.0.clone()).unwrap()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.1);
    }
}

async fn serve(db: &Database, files: &Files) -> Server {
    db.serve_changed(None, |api| api, Door::default().with_tls(files.load())).await
}

/// Shakes hands with a server as `name`, trusting this authority alone.
async fn connect(
    server: &Server,
    authority: &Authority,
    name: &'static str,
    protocol: &[u8],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let stream = TcpStream::connect(server.address).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(name).unwrap(), stream).await
}

async fn ask(server: &Server, authority: &Authority, bytes: &[u8]) -> Answer {
    let mut stream = connect(server, authority, "localhost", b"http/1.1").await.unwrap();
    stream.write_all(bytes).await.unwrap();
    read_answer(stream).await.unwrap()
}

#[tokio::test]
async fn a_client_that_trusts_the_authority_is_answered_over_both_protocols() {
    with_database(async |db: Database| {
        let authority = Authority::new();
        let files = Files::new(authority.certify("localhost"));
        let server = serve(&db, &files).await;
        let first = ask(&server, &authority, &server.order("k", 1200).bytes()).await;
        assert_eq!(first.status, 201, "{first:?}");

        let stream = connect(&server, &authority, "localhost", b"h2").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
        let (mut sender, connection) =
            http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        let _connection = tokio::spawn(connection);
        let request = http::Request::post("https://localhost/v1/orders")
            .header("authorization", format!("Bearer {}", server.token))
            .header("idempotency-key", "k")
            .header("content-type", "application/json")
            .body(Body::from(r#"{"reference":"A-1","amount":1200,"currency":"EUR"}"#))
            .unwrap();
        let again = sender.send_request(request).await.unwrap();
        assert_eq!(
            (again.status().as_u16(), &again.headers()["idempotent-replayed"]),
            (201, &"true".parse().unwrap())
        );
        assert_eq!(again.into_body().collect().await.unwrap().to_bytes(), first.body);
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_client_sees_when_the_certificate_is_anothers() {
    with_database(async |db: Database| {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let files = Files::new(authority.certify("localhost"));
        let server = serve(&db, &files).await;
        for (trusted, name) in [(&stranger, "localhost"), (&authority, "elsewhere")] {
            let error = connect(&server, trusted, name, b"http/1.1").await.unwrap_err();
            assert!(error.to_string().contains("invalid peer certificate"), "{name}: {error}");
        }
        let answer = ask(&server, &authority, &server.get("/v1/nothing").bytes()).await;
        answer.expect_problem(404, "not-found");
    })
    .await;
}

/// Calls as others do, by a library that trusts this authority alone.
async fn call(server: &Server, trusted: &Authority, name: &str) -> Result<String, tonic::Status> {
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&trusted.pem)).domain_name(name);
    let endpoint =
        Endpoint::from_shared(format!("https://{}", server.address)).unwrap().tls_config(tls).unwrap();
    place_over(endpoint, server).await
}

async fn place_over(endpoint: Endpoint, server: &Server) -> Result<String, tonic::Status> {
    let mut request = tonic::Request::new(order_of(1200));
    request.metadata_mut().insert("authorization", format!("Bearer {}", server.token).parse().unwrap());
    request.metadata_mut().insert("idempotency-key", "k".parse().unwrap());
    let placed = PaymentsClient::new(endpoint.connect_lazy()).create_order(request).await?;
    Ok(placed.into_inner().id)
}

#[tokio::test]
async fn a_call_is_answered_over_tls_and_never_made_where_the_certificate_is_anothers() {
    with_database(async |db: Database| {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let files = Files::new(authority.certify("localhost"));
        let server = serve(&db, &files).await;
        let plain = Endpoint::from_shared(format!("http://{}", server.address)).unwrap();
        for refused in [
            call(&server, &stranger, "localhost").await,
            call(&server, &authority, "elsewhere").await,
            place_over(plain, &server).await,
        ] {
            let status = refused.unwrap_err();
            // The library's own word: it has no reason of ours.
            assert!(status.get_details_error_info().is_none(), "{status:?}");
        }
        assert_eq!(db.rows().await, (0, 0, 0));
        let placed = call(&server, &authority, "localhost").await.unwrap();
        let again = ask(&server, &authority, &server.order("k", 1200).bytes()).await;
        assert_eq!(
            (again.header("idempotent-replayed"), &again.json()["id"]),
            (Some("true"), &placed.into())
        );
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn plain_text_is_refused_where_there_is_a_certificate() {
    with_database(async |db: Database| {
        let authority = Authority::new();
        let files = Files::new(authority.certify("localhost"));
        let server = serve(&db, &files).await;
        assert_eq!(exchange(server.address, &server.order("k", 1200).bytes()).await, None);
        assert_eq!(exchange(server.address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await, None);
        assert_eq!(db.rows().await, (0, 0, 0));
    })
    .await;
}

#[tokio::test]
async fn a_handshake_that_does_not_arrive_ends_the_connection() {
    with_database(async |db: Database| {
        let authority = Authority::new();
        let files = Files::new(authority.certify("localhost"));
        let server = serve(&db, &files).await;
        // The second one is the beginning of a handshake.
        let stream = connect(&server, &authority, "localhost", b"http/1.1").await.unwrap();
        let (nothing, beginning, no_head) = tokio::join!(
            stall(&server, b""),
            stall(&server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
            read_answer(stream),
        );
        assert_eq!((nothing, beginning, no_head), (Vec::new(), Vec::new(), None));
    })
    .await;
}

#[tokio::test]
async fn a_certificate_that_was_renewed_on_the_disk_is_shown_to_new_connections() {
    with_database(async |db: Database| {
        let authority = Authority::new();
        let files = Files::new(authority.certify("localhost"));
        let tls = files.load();
        let server = db.serve_changed(None, |api| api, Door::default().with_tls(tls.clone())).await;
        server.life.spawn(tls.renew_every(Duration::from_millis(5), server.life.clone()));
        let shown = async || {
            let stream = connect(&server, &authority, "localhost", b"http/1.1").await.unwrap();
            stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
        };
        let before = shown().await;
        let kept = connect(&server, &authority, "localhost", b"http/1.1").await.unwrap();
        let (certificate, key) = authority.certify("localhost");
        // Half of it, as a look in between would find it: whoever connects is still served.
        fs::write(&files.0.certificate, certificate).unwrap();
        for _ in 0..20 {
            assert_eq!(shown().await, before);
        }
        fs::write(&files.0.key, key).unwrap();
        until("the new certificate", async || (shown().await != before).then_some(())).await;

        let mut kept = kept;
        kept.write_all(&server.get("/v1/nothing").bytes()).await.unwrap();
        read_answer(kept).await.unwrap().expect_problem(404, "not-found");
    })
    .await;
}
