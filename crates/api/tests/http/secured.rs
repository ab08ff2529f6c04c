//! Database and provider over TLS: only the right certificate is believed, and to no other is anything said.

use std::fs;
use std::path::PathBuf;

use semel_api::Door;
use semel_core::database::{self, DatabaseUrl};
use semel_payments::payments::create::MakePayment;
use semel_payments::problem::ProblemBase;
use semel_payments::provider::Dedup;
use semel_payments::provider::chosen::Chosen;
use semel_payments::provider::grpc::GrpcProvider;

use crate::authority::{Authority, Front, Opening};
use crate::bed::{Database, Server, with_database};
use crate::provider::Provider;

/// A file that goes with its value.
struct Pem(PathBuf);

impl Pem {
    fn new(text: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.pem", uuid::Uuid::new_v4()));
        fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for Pem {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Returns a server whose database is behind this front, which it asks for by this name, trusting this authority.
async fn behind(db: &Database, front: &Front, name: &str, authority: &Pem) -> Server {
    let options = db.pool.connect_options();
    let (user, database) = (options.get_username(), options.get_database().unwrap());
    let password = db.password();
    let (port, pem) = (front.address.port(), authority.0.display());
    let url = format!(
        "postgres://{user}:{password}@{name}:{port}/{database}?sslmode=verify-full&sslrootcert={pem}"
    );
    let url: DatabaseUrl = url.parse().unwrap();
    Server::start(database::pool(&url, "semel-test", 2), db.token("acme").await).await
}

#[tokio::test]
async fn a_database_is_believed_by_its_certificate_alone() {
    with_database(async |db: Database| {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let (trusted, other) = (Pem::new(&authority.pem), Pem::new(&stranger.pem));
        let server = db.server().await;
        let right = Front::start(server, Opening::Asked, authority.certify("localhost")).await;
        let good = behind(&db, &right, "localhost", &trusted).await;
        assert_eq!(good.order("k", 1200).send(good.address).await.status, 201);
        assert!(right.served() > 0, "it was asked past its certificate");

        let misnamed = Front::start(server, Opening::Asked, authority.certify("elsewhere")).await;
        let plain = Front::start(server, Opening::Denied, authority.certify("localhost")).await;
        for (front, authority) in [(&right, &other), (&misnamed, &trusted), (&plain, &trusted)] {
            let before = front.served();
            let bad = behind(&db, front, "localhost", authority).await;
            let answer = bad.order("bad", 1200).send(bad.address).await;
            answer.expect_problem(503, "temporarily-unavailable");
            assert_eq!(front.served(), before, "something was said to a stranger");
        }
        assert_eq!(db.rows().await, (1, 1, 1));
    })
    .await;
}

#[tokio::test]
async fn a_provider_is_believed_by_its_certificate_alone() {
    with_database(async |db: Database| {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let provider = Provider::start().await;
        let right =
            Front::start(provider.address(), Opening::Handshake, authority.certify("localhost")).await;
        let misnamed =
            Front::start(provider.address(), Opening::Handshake, authority.certify("elsewhere")).await;
        let through = async |front: &Front, authority: &Authority| {
            let url = format!("https://localhost:{}", front.address.port());
            let port = GrpcProvider::certified_by(&url, Some(&authority.pem), Dedup::ForEver).unwrap();
            let problems: ProblemBase = ProblemBase::DEFAULT.parse().unwrap();
            let make = MakePayment::<Chosen>::new("test".parse().unwrap(), port.into(), problems);
            db.serve_changed(None, |api| api.with_payments(make), Door::default()).await
        };
        let server = through(&right, &authority).await;
        assert_eq!(server.payment("k", 1250).send(server.address).await.status, 201);
        assert_eq!((provider.charges(), right.served()), (1, 1));

        for (number, (front, authority)) in
            [(&right, &stranger), (&misnamed, &authority)].into_iter().enumerate()
        {
            let before = front.served();
            let server = through(front, authority).await;
            let answer = server.payment(&format!("bad-{number}"), 1250).send(server.address).await;
            answer.expect_problem(503, "outcome-unknown");
            assert_eq!((provider.charges(), front.served()), (1, before), "something was said to a stranger");
        }
    })
    .await;
}

#[tokio::test]
async fn without_a_certificate_nobody_speaks_to_a_provider_that_should_have_one() {
    with_database(async |db: Database| {
        let provider = Provider::start().await;
        let url = format!("https://localhost:{}", provider.address().port());
        let authority = Authority::new();
        let port = GrpcProvider::certified_by(&url, Some(&authority.pem), Dedup::ForEver).unwrap();
        let make = MakePayment::<Chosen>::new(
            "test".parse().unwrap(),
            port.into(),
            ProblemBase::DEFAULT.parse().unwrap(),
        );
        let server = db.serve_changed(None, |api| api.with_payments(make), Door::default()).await;
        let answer = server.payment("k", 1250).send(server.address).await;
        answer.expect_problem(503, "outcome-unknown");
        assert_eq!(provider.charges(), 0);
    })
    .await;
}
