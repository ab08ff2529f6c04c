//! A client of the API as its users write one: a key per intent, and retries under the same key.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

/// A client with one credential, talking to one address.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    token: String,
}

/// The intent to place an order.
#[derive(Clone, Debug)]
pub struct Intent {
    /// The key under which it is asked for, however often.
    pub key: String,
    /// The client's own name for the order.
    pub reference: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// An order that the API acknowledged.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Acknowledged {
    /// The key.
    pub key: String,
    /// The order's id as answered.
    pub order_id: Uuid,
    /// The amount as answered.
    pub amount: i64,
    /// The currency as answered.
    pub currency: String,
}

/// An answer of the API.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, byte for byte.
    pub body: Vec<u8>,
}

impl Intent {
    /// An order of this amount in euros, under a key of its own.
    #[must_use]
    pub fn new(reference: &str, amount: i64) -> Self {
        let key = Uuid::new_v4().to_string();
        Self { key, reference: reference.to_owned(), amount, currency: "EUR".to_owned() }
    }
}

impl Answer {
    /// Whether it repeats an earlier answer.
    #[must_use]
    pub fn is_replay(&self) -> bool {
        self.headers.get("idempotent-replayed").is_some_and(|value| value == "true")
    }

    /// The last part of a problem's type.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let body: Value = serde_json::from_slice(&self.body).ok()?;
        let kind = body.get("type")?.as_str()?;
        kind.rsplit('/').next().map(|name| name.trim_end_matches(".md").to_owned())
    }

    /// The order that a final answer acknowledges.
    ///
    /// # Errors
    ///
    /// The answer is no acknowledgement.
    pub fn acknowledged(&self, key: &str) -> Result<Acknowledged> {
        let text = String::from_utf8_lossy(&self.body);
        ensure!(self.status == StatusCode::CREATED, "expected 201, got {}: {text}", self.status);
        let order: Value = serde_json::from_slice(&self.body)?;
        Ok(Acknowledged {
            key: key.to_owned(),
            order_id: order["id"].as_str().and_then(|id| id.parse().ok()).context("no id")?,
            amount: order["amount"].as_i64().context("no amount")?,
            currency: order["currency"].as_str().context("no currency")?.to_owned(),
        })
    }
}

impl Client {
    /// Talks to `http://address` with a bearer token.
    ///
    /// # Errors
    ///
    /// The HTTP client could not be made.
    pub fn new(address: std::net::SocketAddr, token: &str) -> Result<Self> {
        let http = reqwest::Client::builder().timeout(Duration::from_secs(10)).no_proxy().build()?;
        Ok(Self { http, base: format!("http://{address}"), token: token.to_owned() })
    }

    /// Asks once for an order.
    ///
    /// # Errors
    ///
    /// No answer arrived; whether the order was placed is unknown.
    pub async fn place(&self, intent: &Intent) -> Result<Answer> {
        let body = json!({
            "reference": intent.reference, "amount": intent.amount, "currency": intent.currency,
        });
        let request =
            self.http.post(format!("{}/v1/orders", self.base)).header("idempotency-key", &intent.key);
        answer(request.bearer_auth(&self.token).json(&body)).await
    }

    /// Asks for an order until the answer is final, at most 20 times, waiting as the API asks.
    ///
    /// # Errors
    ///
    /// No final answer came.
    pub async fn place_until_final(&self, intent: &Intent) -> Result<Answer> {
        let mut last = None;
        for _ in 0..20 {
            match self.place(intent).await {
                Ok(answer) if !answer.headers.contains_key("retry-after") => return Ok(answer),
                outcome => last = Some(outcome.map(|answer| answer.status)),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("no final answer for {}; the last was {last:?}", intent.reference)
    }

    /// Reads an order.
    ///
    /// # Errors
    ///
    /// No answer arrived.
    pub async fn order(&self, id: Uuid) -> Result<Answer> {
        answer(self.http.get(format!("{}/v1/orders/{id}", self.base)).bearer_auth(&self.token)).await
    }
}

async fn answer(request: reqwest::RequestBuilder) -> Result<Answer> {
    let response = request.send().await?;
    let (status, headers) = (response.status(), response.headers().clone());
    Ok(Answer { status, headers, body: response.bytes().await?.to_vec() })
}
