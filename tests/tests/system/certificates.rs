//! The database over TLS: each daemon believes it by its certificate alone, and says nothing to any other.

#[allow(
    dead_code,
    clippy::unwrap_used,
    reason = "the API's tests have it too, for their provider; a certificate that cannot be made fails them"
)]
#[path = "../../../crates/api/tests/http/authority.rs"]
mod authority;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use semel_tests::net::{free_port, unique_name};
use semel_tests::process::{Daemon, binary};
use semel_tests::services::{Database, Services};
use semel_tests::system::{Place, READY};
use semel_tests::wait::eventually;

use authority::{Authority, Front, Opening};

/// A file that goes with its value.
struct Pem(PathBuf);

impl Pem {
    fn new(text: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(unique_name("semel_authority"));
        std::fs::write(&path, text)?;
        Ok(Self(path))
    }
}

impl Drop for Pem {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A database's URL by way of this front, asked for by the name `localhost`, whoever this authority certifies.
fn by_way_of(database: &Database, front: &Front, authority: &Pem) -> Result<String> {
    let (place, name) = place_and_name(database)?;
    let user = place.rsplit_once('@').map_or("postgres", |(user, _)| user);
    let (port, pem) = (front.address.port(), authority.0.display());
    Ok(format!("postgres://{user}@localhost:{port}/{name}?sslmode=verify-full&sslrootcert={pem}"))
}

/// What stands between `://` and the database's name, and that name.
fn place_and_name(database: &Database) -> Result<(String, String)> {
    let url = database.url();
    let url = url.split('?').next().unwrap_or_default();
    let (_, rest) = url.split_once("://").context("no URL")?;
    let (place, name) = rest.rsplit_once('/').context("no database")?;
    Ok((place.to_owned(), name.to_owned()))
}

/// Where a database's server listens.
async fn server(database: &Database) -> Result<SocketAddr> {
    let (place, _) = place_and_name(database)?;
    let place = place.rsplit('@').next().unwrap_or_default().to_owned();
    tokio::net::lookup_host(&place).await?.next().with_context(|| format!("no address of {place}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_reaper_and_ledger_believe_a_database_by_its_certificate_alone() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let (authority, stranger) = (Authority::new(), Authority::new());
    let (trusted, other) = (Pem::new(&authority.pem)?, Pem::new(&stranger.pem)?);
    let server = server(&place.payments).await?;
    let right = Front::start(server, Opening::Asked, authority.certify("localhost")).await;
    let misnamed = Front::start(server, Opening::Asked, authority.certify("elsewhere")).await;
    let plain = Front::start(server, Opening::Denied, authority.certify("localhost")).await;
    let daemons =
        [("semel-relay", &place.payments), ("semel-reaper", &place.payments), ("semel-ledger", &place.books)];
    for (program, database) in daemons {
        for (what, front, authority, is_believed) in [
            ("the right one", &right, &trusted, true),
            ("another authority's", &right, &other, false),
            ("another name's", &misnamed, &trusted, false),
            ("none", &plain, &trusted, false),
        ] {
            let before = front.served();
            let url = by_way_of(database, front, authority)?;
            let admin = free_port()?;
            let daemon = Daemon::command(&format!("{program}-tls"), binary(program)?)
                .envs(place.environment())
                .env("DATABASE_URL", url)
                .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
                .start()
                .await?;
            if is_believed {
                daemon.wait_ready(admin, READY).await?;
                ensure!(front.served() > before, "{program}, {what}: it was not asked past its certificate");
                daemon.terminate()?;
                ensure!(daemon.wait_exit(READY).await?.success(), "{program} does not stop");
                continue;
            }
            // It waits and says for what, or leaves and says why.
            let told = || async {
                let lines = daemon.lines().join("\n");
                let is_told = lines.contains("certificate") || lines.contains("TLS");
                (!daemon.is_running() || is_told).then_some(())
            };
            eventually("the daemon to say what is wrong", READY, told).await?;
            ensure!(front.served() == before, "{program}, {what}: something was said to a stranger");
            if daemon.is_running() {
                daemon.kill().await?;
            } else {
                ensure!(!daemon.wait_exit(READY).await?.success(), "{program}, {what}: it left content");
            }
            ensure!(front.served() == before, "{program}, {what}: something was said to a stranger");
        }
    }
    Ok(())
}
