//! Certificates of a test's own, and servers that show them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// An authority, which certifies servers.
pub(crate) struct Authority {
    pub(crate) pem: String,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut about = rcgen::CertificateParams::new(Vec::new()).unwrap();
        about.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let pem = about.self_signed(&key).unwrap().pem();
        Self { pem, issuer: rcgen::Issuer::new(about, key) }
    }

    /// Makes a certificate of this name and its key, both PEM.
    pub(crate) fn certify(&self, name: &str) -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let about = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        (about.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// How a connection becomes one over TLS.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Opening {
    /// By a handshake at once.
    Handshake,
    /// As Postgres has it: the client asks first.
    Asked,
    /// As a Postgres without TLS has it: the client asks and is told that there is none.
    Denied,
}

/// Ends TLS in front of a server that knows none.
#[derive(Clone, Debug)]
pub(crate) struct Front {
    pub(crate) address: SocketAddr,
    served: Arc<AtomicUsize>,
}

impl Front {
    /// Shows a certificate and its key, and passes on to the server `behind` what is then said.
    pub(crate) async fn start(
        behind: SocketAddr,
        opening: Opening,
        (certificate, key): (String, String),
    ) -> Self {
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let mut config = builder.with_single_cert(vec![certificate], key).unwrap();
        if opening == Opening::Handshake {
            config.alpn_protocols = vec![b"h2".to_vec()];
        }
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let front = Self { address: listener.local_addr().unwrap(), served: Arc::default() };
        let served = Arc::clone(&front.served);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, served) = (acceptor.clone(), Arc::clone(&served));
                tokio::spawn(async move { serve(stream, behind, opening, acceptor, &served).await });
            }
        });
        front
    }

    /// How many connections said something beyond the handshake.
    pub(crate) fn served(&self) -> usize {
        self.served.load(Ordering::SeqCst)
    }
}

/// Serves one connection; whoever does not trust us ends it.
async fn serve(
    mut stream: TcpStream,
    behind: SocketAddr,
    opening: Opening,
    acceptor: TlsAcceptor,
    served: &AtomicUsize,
) -> Option<()> {
    if opening != Opening::Handshake {
        // SSLRequest: eight bytes, answered by one.
        let mut asked = [0; 8];
        stream.read_exact(&mut asked).await.ok()?;
        stream.write_all(if opening == Opening::Asked { b"S" } else { b"N" }).await.ok()?;
    }
    if opening == Opening::Denied {
        let mut first = [0];
        stream.read_exact(&mut first).await.ok()?;
        served.fetch_add(1, Ordering::SeqCst);
        return None;
    }
    let mut stream = acceptor.accept(stream).await.ok()?;
    let mut first = [0];
    stream.read_exact(&mut first).await.ok()?;
    served.fetch_add(1, Ordering::SeqCst);
    let mut onward = TcpStream::connect(behind).await.ok()?;
    onward.write_all(&first).await.ok()?;
    copy_bidirectional(&mut stream, &mut onward).await.ok()?;
    Some(())
}
