//! The HTTP API of RabbitMQ's management plugin.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use reqwest::{Client, Method, StatusCode, Url};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// How long one request may take: creating a virtual host on a busy machine takes seconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// A connection to the broker.
#[derive(Clone, Debug, Deserialize)]
pub struct Connection {
    /// The name by which it is closed: both addresses.
    pub name: String,
    /// The virtual host that it is in.
    pub vhost: String,
    /// Its user.
    pub user: String,
    /// `running`, `blocked`, `blocking` or `flow`; missing until the first report.
    #[serde(default)]
    pub state: String,
    /// What the client says of itself.
    #[serde(default)]
    pub client_properties: Value,
}

impl Connection {
    /// The name that the client gave its connection, if it gave one.
    #[must_use]
    pub fn client_name(&self) -> Option<&str> {
        self.client_properties.get("connection_name")?.as_str()
    }
}

/// A queue with its counts as they are now.
#[derive(Clone, Debug, Deserialize)]
pub struct Queue {
    /// Its name.
    pub name: String,
    /// All messages: ready and unacknowledged.
    #[serde(default)]
    pub messages: u64,
    /// Messages that wait for a consumer.
    #[serde(default)]
    pub messages_ready: u64,
    /// Messages that a consumer holds.
    #[serde(default)]
    pub messages_unacknowledged: u64,
}

/// What a user may do in a virtual host: regular expressions over names.
#[derive(Clone, Debug, Serialize)]
pub struct Permissions {
    /// Resources to declare and delete.
    pub configure: String,
    /// Resources to publish to and to bind.
    pub write: String,
    /// Resources to consume from and to bind to.
    pub read: String,
}

impl Permissions {
    /// Everything.
    #[must_use]
    pub fn all() -> Self {
        Self { configure: ".*".to_owned(), write: ".*".to_owned(), read: ".*".to_owned() }
    }
}

/// A client of the management API.
#[derive(Clone, Debug)]
pub struct Management {
    base: Url,
    http: Client,
}

impl Management {
    /// Makes a client for a URL that holds the user and the password.
    ///
    /// # Errors
    ///
    /// The URL cannot be parsed.
    pub fn new(url: &str) -> Result<Self> {
        let base = Url::parse(url).context("the management API's URL cannot be parsed")?;
        let http = Client::builder().no_proxy().timeout(DEADLINE).build().context("making an HTTP client")?;
        Ok(Self { base, http })
    }

    /// The URL, with the user and the password.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.base
    }

    /// Sends a request to `/api/<path>`, and decodes the answer. Each element of the path is encoded.
    ///
    /// # Errors
    ///
    /// There is no answer, or it is neither a success nor the 404 of a deletion.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: Option<Value>,
    ) -> Result<T> {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("api").extend(path);
        }
        let what = format!("{method} /api/{}", path.join("/"));
        let deletion = method == Method::DELETE;
        let request = self.http.request(method, url);
        let request = match body {
            Some(body) => request.json(&body),
            None => request,
        };
        let answer =
            request.send().await.map_err(reqwest::Error::without_url).with_context(|| what.clone())?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(reqwest::Error::without_url).with_context(|| what.clone())?;
        let gone = deletion && status == StatusCode::NOT_FOUND;
        if !status.is_success() && !gone {
            bail!("{what}: {status}: {}", String::from_utf8_lossy(&body));
        }
        let body: &[u8] = if status.is_success() && !body.is_empty() { &body } else { b"null" };
        serde_json::from_slice(body).with_context(|| format!("decoding the answer to {what}"))
    }

    /// The broker's version, as a sign of life.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn version(&self) -> Result<String> {
        let overview: Value = self.call(Method::GET, &["overview"], None).await?;
        Ok(overview["rabbitmq_version"].as_str().unwrap_or("of unknown version").to_owned())
    }

    /// Whether this user is an administrator, who may make virtual hosts and users.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn is_administrator(&self) -> Result<bool> {
        let me: Value = self.call(Method::GET, &["whoami"], None).await?;
        // A list since 3.9, a string with commas before.
        Ok(me["tags"].to_string().contains("administrator"))
    }

    /// The names of all virtual hosts.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn vhosts(&self) -> Result<Vec<String>> {
        let vhosts: Vec<Named> = self.call(Method::GET, &["vhosts"], None).await?;
        Ok(vhosts.into_iter().map(|vhost| vhost.name).collect())
    }

    /// Makes a virtual host, if it is not there, and lets this user do everything in it.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn create_vhost(&self, vhost: &str) -> Result<()> {
        let () = self.call(Method::PUT, &["vhosts", vhost], Some(json!({}))).await?;
        let me: Named = self.call(Method::GET, &["whoami"], None).await?;
        self.set_permissions(vhost, &me.name, &Permissions::all()).await
    }

    /// Deletes a virtual host with its queues; its connections are closed. One that is gone is fine.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn delete_vhost(&self, vhost: &str) -> Result<()> {
        self.call(Method::DELETE, &["vhosts", vhost], None).await
    }

    /// All connections of a virtual host. A new one is listed within half a second.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn connections(&self, vhost: &str) -> Result<Vec<Connection>> {
        self.call(Method::GET, &["vhosts", vhost, "connections"], None).await
    }

    /// Closes a connection by force. One that is gone is fine.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn close_connection(&self, name: &str) -> Result<()> {
        self.call(Method::DELETE, &["connections", name], None).await
    }

    /// Closes all listed connections of a virtual host by force; says how many.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn close_connections(&self, vhost: &str) -> Result<usize> {
        let connections = self.connections(vhost).await?;
        for connection in &connections {
            self.close_connection(&connection.name).await?;
        }
        Ok(connections.len())
    }

    /// Makes a user without any permission, or gives one another password.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn create_user(&self, user: &str, password: &str) -> Result<()> {
        let body = json!({ "password": password, "tags": "" });
        self.call(Method::PUT, &["users", user], Some(body)).await
    }

    /// Deletes a user. One that is gone is fine.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn delete_user(&self, user: &str) -> Result<()> {
        self.call(Method::DELETE, &["users", user], None).await
    }

    /// Sets what a user may do in a virtual host.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn set_permissions(&self, vhost: &str, user: &str, permissions: &Permissions) -> Result<()> {
        self.call(Method::PUT, &["permissions", vhost, user], Some(json!(permissions))).await
    }

    /// Takes from a user every right in a virtual host.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn clear_permissions(&self, vhost: &str, user: &str) -> Result<()> {
        self.call(Method::DELETE, &["permissions", vhost, user], None).await
    }

    /// All queues of a virtual host with their message counts.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn queues(&self, vhost: &str) -> Result<Vec<Queue>> {
        self.call(Method::GET, &["queues", vhost], None).await
    }

    /// Deletes an exchange. One that is gone is fine.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn delete_exchange(&self, vhost: &str, exchange: &str) -> Result<()> {
        self.call(Method::DELETE, &["exchanges", vhost, exchange], None).await
    }

    /// Deletes a queue with its messages. One that is gone is fine.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub async fn delete_queue(&self, vhost: &str, queue: &str) -> Result<()> {
        self.call(Method::DELETE, &["queues", vhost, queue], None).await
    }
}

#[derive(Deserialize)]
struct Named {
    name: String,
}
