//! Where the broker is, who we are there, and whom we trust to say that it is it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use lapin::uri::AMQPUri;
use secrecy::{ExposeSecret, SecretString};

/// Seconds between heartbeats; a peer that is silent for two of them is taken for dead
/// (RabbitMQ documentation, "Heartbeats": 5 to 20 seconds are optimal, below 5 gives false positives).
const HEARTBEAT: u16 = 6;

/// Most addresses of one broker.
const MAX_ADDRESSES: usize = 16;

/// One or more `amqp://` or `amqps://` URLs of one broker, separated by commas, held as a secret and shown without their
/// passwords.
///
/// They are the members of a cluster: whoever connects tries them in turn.
#[derive(Clone)]
pub struct BrokerUrl {
    addresses: Vec<Address>,
    /// Certificates of authorities that are trusted beside those of the machine, as PEM.
    authorities: Option<Arc<str>>,
}

/// One address of the broker.
#[derive(Clone)]
pub(crate) struct Address {
    /// Without the password.
    uri: AMQPUri,
    password: SecretString,
    /// `user@host:port/vhost`.
    shown: String,
}

/// Why a broker URL was refused; never contains any part of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "write the RabbitMQ URL as amqp://user:password@host:port/vhost (amqps:// for TLS; percent-encode \
     special characters, and the vhost `/` as %2f or not at all): {reason}"
)]
pub struct BrokerUrlError {
    reason: String,
}

impl BrokerUrl {
    /// Trusts these authorities, too, to certify an `amqps://` broker: PEM, as in a CA file.
    ///
    /// # Errors
    ///
    /// When there is no certificate in it.
    pub fn with_authorities(mut self, pem: &str) -> Result<Self, NoCertificate> {
        if !pem.contains("-----BEGIN CERTIFICATE-----") {
            return Err(NoCertificate);
        }
        self.authorities = Some(pem.into());
        Ok(self)
    }

    pub(crate) fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    pub(crate) fn authorities(&self) -> Option<&str> {
        self.authorities.as_deref()
    }
}

/// A file of authorities that holds none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it holds no certificate in PEM form")]
pub struct NoCertificate;

impl Address {
    /// What the client library needs, password included.
    pub(crate) fn uri(&self) -> AMQPUri {
        let mut uri = self.uri.clone();
        self.password.expose_secret().clone_into(&mut uri.authority.userinfo.password);
        uri
    }
}

impl FromStr for BrokerUrl {
    type Err = BrokerUrlError;

    fn from_str(urls: &str) -> Result<Self, BrokerUrlError> {
        let addresses = split(urls).into_iter().map(str::parse).collect::<Result<Vec<_>, _>>()?;
        if addresses.len() > MAX_ADDRESSES {
            return Err(BrokerUrlError { reason: format!("there are more than {MAX_ADDRESSES} addresses") });
        }
        Ok(Self { addresses, authorities: None })
    }
}

/// Splits a list at the commas before a URL; a user or password may have others.
fn split(urls: &str) -> Vec<&str> {
    let (mut parts, mut rest, mut from) = (Vec::new(), urls, 0);
    while let Some(comma) = rest[from..].find(',').map(|at| from + at) {
        let next = rest[comma + 1..].trim_start();
        if next.starts_with("amqp://") || next.starts_with("amqps://") {
            parts.push(rest[..comma].trim());
            (rest, from) = (next, 0);
        } else {
            from = comma + 1;
        }
    }
    parts.push(rest.trim());
    parts
}

impl FromStr for Address {
    type Err = BrokerUrlError;

    fn from_str(url: &str) -> Result<Self, BrokerUrlError> {
        let mut uri = parse(url).map_err(|reason| BrokerUrlError { reason })?;
        let password = std::mem::take(&mut uri.authority.userinfo.password).into();
        let authority = &uri.authority;
        let vhost = if uri.vhost == "/" { "" } else { uri.vhost.as_str() };
        let host = if authority.host.contains(':') {
            format!("[{}]", authority.host)
        } else {
            authority.host.clone()
        };
        let shown = format!("{}@{host}:{}/{vhost}", authority.userinfo.username, authority.port);
        Ok(Self { uri, password, shown })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Display for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<&str> = self.addresses.iter().map(|address| address.shown.as_str()).collect();
        f.write_str(&shown.join(", "))
    }
}

impl fmt::Debug for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BrokerUrl({self})")
    }
}

/// Parses more strictly than the library, which ignores unknown parameters and turns an IPv6
/// address or a missing host into `localhost`. A password with an unescaped `/`, `?` or `#` must
/// not end up in what is shown, so leftovers of one are refused.
fn parse(url: &str) -> Result<AMQPUri, String> {
    let rest = url
        .strip_prefix("amqp://")
        .or_else(|| url.strip_prefix("amqps://"))
        .ok_or("it does not start with amqp:// or amqps://")?;
    if rest.contains('#') {
        return Err("it contains a `#`".into());
    }
    let (before_query, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = before_query.split_once('/').unwrap_or((before_query, "%2f"));
    if path.contains('@') || query.contains('@') {
        return Err("it contains an `@` after the host".into());
    }
    if path.is_empty() {
        return Err("its vhost is empty: leave the last `/` out, or write %2f after it".into());
    }
    if path.contains('/') {
        return Err("it contains a second `/` after the host".into());
    }
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let name = parameter.split_once('=').map_or(parameter, |(name, _)| name);
        if !["auth_mechanism", "channel_max", "frame_max", "heartbeat"].contains(&name) {
            return Err(
                "it has an unknown parameter; known are auth_mechanism, channel_max, frame_max and heartbeat"
                    .into(),
            );
        }
    }
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    if host.is_empty() || host.starts_with(':') {
        return Err("it names no host".into());
    }

    // What is left for the library to complain about quotes no part of the URL but a parameter.
    let mut uri: AMQPUri = url.parse()?;
    if let Some((address, _)) = host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        address.clone_into(&mut uri.authority.host);
    }
    uri.query.heartbeat.get_or_insert(HEARTBEAT);
    Ok(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(url: &str) -> String {
        url.parse::<BrokerUrl>().unwrap().to_string()
    }

    #[test]
    fn shows_everything_but_the_password() {
        assert_eq!(shown("amqp://app:s3cret@mq.example:5673/orders"), "app@mq.example:5673/orders");
        assert_eq!(shown("amqps://mq.example"), "guest@mq.example:5671/");
        let url: BrokerUrl = "amqp://app:s3cret@mq.example/%2f".parse().unwrap();
        assert_eq!(format!("{url:?}"), "BrokerUrl(app@mq.example:5672/)");
    }

    #[test]
    fn heartbeat_is_six_seconds_unless_given() {
        let heartbeat = |url: &str| url.parse::<Address>().unwrap().uri().query.heartbeat;
        assert_eq!(heartbeat("amqp://localhost"), Some(6));
        assert_eq!(heartbeat("amqp://localhost?heartbeat=5"), Some(5));
        assert_eq!(heartbeat("amqp://localhost/%2f?heartbeat=5&frame_max=9000"), Some(5));
    }

    #[test]
    fn keeps_credentials_and_ipv6_hosts() {
        let uri = "amqp://a%40b:p%2Fw@[2001:db8::1]:5673/v%2fh".parse::<Address>().unwrap().uri();
        assert_eq!(uri.authority.userinfo.username, "a@b");
        assert_eq!(uri.authority.userinfo.password, "p/w");
        assert_eq!(uri.authority.host, "2001:db8::1");
        assert_eq!(uri.authority.port, 5673);
        assert_eq!(uri.vhost, "v/h");
        assert_eq!(shown("amqp://u:p@[::1]"), "u@[::1]:5672/");
    }

    #[test]
    fn several_addresses_are_shown_without_any_password() {
        let list = "amqp://u:hunter,2@a/v, amqps://u:hunter2@b:5671/v,amqp://u:hunter2@c";
        assert_eq!(shown(list), "u@a:5672/v, u@b:5671/v, u@c:5672/");
        let one = "amqp://u:p@a,amqp:b".parse::<BrokerUrl>();
        assert!(one.is_err(), "a comma in a host: {one:?}");
        let error = "amqp://u:hunter2@a,amqp://u:hunter2@".parse::<BrokerUrl>().unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{error}");
        let many = vec!["amqp://u:hunter2@a"; 17].join(",");
        assert!(many.parse::<BrokerUrl>().unwrap_err().to_string().contains("more than 16"));
    }

    #[test]
    fn a_file_without_a_certificate_is_refused() {
        let url: BrokerUrl = "amqps://mq.example".parse().unwrap();
        assert_eq!(url.clone().with_authorities("-----BEGIN PRIVATE KEY-----").unwrap_err(), NoCertificate);
        assert!(url.with_authorities("-----BEGIN CERTIFICATE-----").is_ok());
    }

    #[test]
    fn refuses_in_one_line_without_quoting_the_password() {
        for url in [
            "",
            "localhost",
            "user:hunter2@localhost",
            "hunter2",
            "http://user:hunter2@localhost",
            "amqp:user:hunter2@localhost",
            "amqp://user:hunter2@",
            "amqp://user:hunter2@:5672",
            "amqp://",
            "amqp:///vhost",
            "amqp://user:hunter2@localhost/",
            "amqp://user:hunter2@localhost/a/b",
            "amqp://user:hunter2@localhost:99999",
            "amqp://user:hunter2@localhost:port",
            "amqp://user:hunter2@localhost?heartbeat=soon",
            "amqp://user:hunter2@localhost?heartbaet=5",
            "amqp://user:hunter2@localhost?auth_mechanism=magic",
            "amqp://user:12#hunter2@localhost",
            "amqp://user:12/hunter2@localhost",
            "amqp://user:12?hunter2@localhost",
            "amqp://user:hunter2/12@localhost",
            "amqp://user:hunter2%ff%fe@localhost",
            "amqp://user:hunter2@local host",
        ] {
            let text = url.parse::<BrokerUrl>().expect_err(url).to_string();
            assert!(text.starts_with("write the RabbitMQ URL as amqp://"), "{text}");
            assert!(!text.contains("hunter2"), "{text}");
            assert!(!text.contains('\n'), "{text}");
        }
    }
}
