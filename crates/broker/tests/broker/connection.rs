//! Connecting, and failing to.

use std::error::Error as _;

use semel_broker::{BrokerUrl, Connection, Disposition, Error};
use tokio::net::TcpListener;

use crate::forwarder::Forwarder;
use crate::support::{SOON, raw_url, url, within};

/// `AMQP_URL` with one part replaced.
fn changed(user: &str, password: &str, vhost: &str) -> BrokerUrl {
    let url = raw_url();
    let (scheme, rest) = url.split_once("://").unwrap();
    let authority = rest.split(['/', '?']).next().unwrap();
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{scheme}://{user}:{password}@{host}/{vhost}").parse().unwrap()
}

#[tokio::test]
async fn opens_and_closes() {
    let connection = Connection::open(&url(), "broker tests").await.unwrap();
    assert!(connection.is_open());
    assert!(!connection.is_blocked());
    within("a close", SOON, connection.close()).await;
}

#[tokio::test]
async fn a_wrong_password_is_fatal_and_not_shown() {
    let error = Connection::open(&changed("guest", "hunter2", "%2f"), "broker tests").await.unwrap_err();
    assert!(matches!(error, Error::Login { .. }), "{error:?}");
    assert_eq!(error.disposition(), Disposition::Fatal);
    let text = format!("{error} {error:?} {}", error.source().unwrap());
    assert!(text.contains("guest@") && text.contains("ACCESS_REFUSED"), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
}

#[tokio::test]
async fn an_unknown_vhost_is_fatal() {
    let raw = raw_url();
    let credentials =
        raw.split_once("://").unwrap().1.rsplit_once('@').map_or("guest:guest", |(user, _)| user);
    let (user, password) = credentials.split_once(':').unwrap();
    let error =
        Connection::open(&changed(user, password, "no%20such%20vhost"), "broker tests").await.unwrap_err();
    assert!(matches!(error, Error::VirtualHost { .. }), "{error:?}");
    assert_eq!(error.disposition(), Disposition::Fatal);
    assert!(error.to_string().contains("no such vhost"), "{error}");
}

#[tokio::test]
async fn an_unreachable_port_can_be_retried() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let url: BrokerUrl = format!("amqp://{address}").parse().unwrap();
    let error = within("the refusal", SOON, Connection::open(&url, "broker tests")).await.unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
    assert_eq!(error.disposition(), Disposition::Retry);
}

#[tokio::test]
async fn tls_to_a_plain_port_can_be_retried() {
    let url: BrokerUrl = raw_url().replacen("amqp://", "amqps://", 1).parse().unwrap();
    let error = within("the refusal", SOON, Connection::open(&url, "broker tests")).await.unwrap_err();
    assert_eq!(error.disposition(), Disposition::Retry, "{error:?}");
}

#[tokio::test]
async fn a_frozen_line_does_not_hold_up_the_close() {
    let forwarder = Forwarder::start().await;
    let connection = Connection::open(&forwarder.url("heartbeat=10"), "broker tests").await.unwrap();
    forwarder.freeze();
    within("a close on a frozen line", SOON, connection.close()).await;
}
