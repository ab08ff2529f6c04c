//! A RabbitMQ: a private one, or one that the user gave.

mod private;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use reqwest::Url;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

pub use self::private::PrivateRabbitMq;
use super::management::Management;
use super::vhost::Vhost;
use crate::net::owner_of;
use crate::pid::ProcessId;
use crate::progress::Progress;

const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// Where the management API is looked for beside a given broker.
const MANAGEMENT_PORT: u16 = 15_672;

/// A RabbitMQ server to make virtual hosts in.
#[derive(Clone, Debug)]
pub struct RabbitMq {
    pub(super) url: Url,
    pub(super) management: Option<Management>,
    pub(super) private: Option<PrivateRabbitMq>,
}

impl RabbitMq {
    /// The private server behind this, which may be stopped and killed.
    #[must_use]
    pub fn private(&self) -> Option<&PrivateRabbitMq> {
        self.private.as_ref()
    }

    /// The management API; none where a broker was given without one that we may administrate.
    #[must_use]
    pub fn management(&self) -> Option<&Management> {
        self.management.as_ref()
    }

    /// The URL of a virtual host for the server's user.
    #[must_use]
    pub fn url(&self, vhost: &str) -> String {
        vhost_url(&self.url, vhost).into()
    }

    /// Makes a virtual host that is deleted with its value. The prefix is a word of at most 30 bytes.
    ///
    /// # Errors
    ///
    /// The management API does not answer.
    pub async fn create_vhost(&self, prefix: &str) -> Result<Vhost> {
        Vhost::create(self, prefix).await
    }

    /// Finds or makes a virtual host of this very name, which stays.
    ///
    /// # Errors
    ///
    /// The management API does not answer.
    pub async fn lasting_vhost(&self, name: &str) -> Result<Vhost> {
        Vhost::lasting(self, name).await
    }

    /// Takes the broker that the user gave, and looks for its management API.
    pub(super) async fn given(url: &str, management: Option<String>, progress: Progress) -> Result<Self> {
        let url = Url::parse(url).context("AMQP_URL cannot be parsed")?;
        ensure!(url.host_str().is_some(), "AMQP_URL names no host");
        let connecting = lapin::Connection::connect(url.as_str(), lapin::ConnectionProperties::default());
        let connected = tokio::time::timeout(CONNECT_DEADLINE, connecting).await;
        connected
            .context("the broker of AMQP_URL did not answer in time")?
            .context("connecting to AMQP_URL")?;
        let found = find_management(&url, management).await;
        if let Err(reason) = &found {
            progress.say(format_args!(
                "no virtual hosts can be made in the RabbitMQ of AMQP_URL, so unique names in its own are used; \
                 set AMQP_MANAGEMENT_URL to the management API of an administrator ({reason:#})"
            ));
        }
        Ok(Self { url, management: found.ok(), private: None })
    }

    /// The virtual host of the URL; `/` if it names none.
    pub(super) fn given_vhost(&self) -> String {
        let path = self.url.path().trim_start_matches('/');
        match path {
            "" | "%2f" | "%2F" => "/".to_owned(),
            name => name.to_owned(),
        }
    }

    /// Checks that the server answers.
    pub(super) async fn check(&self) -> Result<String> {
        let version = match &self.management {
            Some(management) => management.version().await?,
            None => "of unknown version".to_owned(),
        };
        if self.url.scheme() == "amqp" {
            greet(self.url.host_str().unwrap_or_default(), self.url.port().unwrap_or(5672)).await?;
        }
        Ok(version)
    }

    /// Deletes the virtual hosts that processes which are gone left behind in a private server.
    pub(super) async fn sweep(&self) -> Result<()> {
        let Some(management) = &self.management else { return Ok(()) };
        for name in management.vhosts().await? {
            if owner_of(&name).is_some_and(|owner| ProcessId::of(owner).is_none()) {
                management.delete_vhost(&name).await?;
            }
        }
        Ok(())
    }
}

/// The URL of another virtual host of the same broker.
pub(super) fn vhost_url(base: &Url, vhost: &str) -> Url {
    let mut url = base.clone();
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.clear().push(vhost);
    }
    url
}

async fn find_management(amqp: &Url, given: Option<String>) -> Result<Management> {
    let management = match given {
        Some(url) => Management::new(&url)?,
        None => Management::new(beside(amqp)?.as_str())?,
    };
    let asking = tokio::time::timeout(CONNECT_DEADLINE, management.is_administrator()).await;
    ensure!(asking.context("no answer in time")??, "its user is no administrator");
    Ok(management)
}

/// The URL at which a broker's management API is by default, for the same user.
fn beside(amqp: &Url) -> Result<Url> {
    ensure!(amqp.scheme() == "amqp", "the broker is reached over TLS");
    let mut url = Url::parse("http://localhost/").context("a constant URL")?;
    let user = if amqp.username().is_empty() { "guest" } else { amqp.username() };
    let password = amqp.password().unwrap_or("guest");
    url.set_host(amqp.host_str()).context("the host of AMQP_URL")?;
    let set = [url.set_port(Some(MANAGEMENT_PORT)), url.set_username(user), url.set_password(Some(password))];
    ensure!(set.iter().all(Result::is_ok), "AMQP_URL is unlike an HTTP URL");
    Ok(url)
}

/// Opens a connection as far as the broker's greeting: the method Connection.Start in channel 0.
async fn greet(host: &str, port: u16) -> Result<()> {
    let greeting = async {
        let mut stream = TcpStream::connect((host, port)).await?;
        stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
        stream.read_u8().await
    };
    let greeting = tokio::time::timeout(CONNECT_DEADLINE, greeting).await;
    let first = greeting.context("no AMQP greeting in time")?.context("waiting for the AMQP greeting")?;
    ensure!(first == 1, "no AMQP broker listens on port {port}");
    Ok(())
}
