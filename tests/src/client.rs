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

/// The intent to make a payment.
#[derive(Clone, Debug)]
pub struct Payment {
    /// The key under which it is asked for, however often.
    pub key: String,
    /// The client's own name for it.
    pub reference: String,
    /// In minor units.
    pub amount: i64,
    /// The token to charge.
    pub source: String,
}

/// What a client was finally told of a payment.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ToldPayment {
    /// The key.
    pub key: String,
    /// The payment's id as answered.
    pub payment_id: Uuid,
    /// `succeeded`, `declined` or `canceled`, as answered.
    pub status: String,
    /// The amount as answered.
    pub amount: i64,
    /// The currency as answered.
    pub currency: String,
}

/// The intent to give money of a payment back.
#[derive(Clone, Debug)]
pub struct Refund {
    /// The key under which it is asked for, however often.
    pub key: String,
    /// The payment.
    pub payment_id: Uuid,
    /// In minor units.
    pub amount: i64,
}

/// What a client was finally told of a refund.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ToldRefund {
    /// The key.
    pub key: String,
    /// The refund's id as answered.
    pub refund_id: Uuid,
    /// The payment's.
    pub payment_id: Uuid,
    /// `succeeded`, `failed` or `refused`, as answered.
    pub status: String,
    /// The amount as answered.
    pub amount: i64,
    /// The currency as answered.
    pub currency: String,
}

impl Refund {
    /// A refund of this amount of a payment, under a key of its own.
    #[must_use]
    pub fn new(payment_id: Uuid, amount: i64) -> Self {
        Self { key: Uuid::new_v4().to_string(), payment_id, amount }
    }
}

impl Payment {
    /// A payment of this amount in euros by a good card, under a key of its own.
    #[must_use]
    pub fn new(reference: &str, amount: i64) -> Self {
        let key = Uuid::new_v4().to_string();
        Self { key, reference: reference.to_owned(), amount, source: "tok_good".to_owned() }
    }
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

impl Answer {
    /// What a final answer tells of a payment.
    ///
    /// # Errors
    ///
    /// The answer is not final.
    pub fn told(&self, key: &str) -> Result<ToldPayment> {
        let text = String::from_utf8_lossy(&self.body);
        ensure!([201, 402, 424].contains(&self.status.as_u16()), "not final: {}: {text}", self.status);
        let body: Value = serde_json::from_slice(&self.body)?;
        let payment = if self.status == StatusCode::CREATED { &body } else { &body["payment"] };
        Ok(ToldPayment {
            key: key.to_owned(),
            payment_id: payment["id"].as_str().and_then(|id| id.parse().ok()).context("no id")?,
            status: payment["status"].as_str().context("no status")?.to_owned(),
            amount: payment["amount"].as_i64().context("no amount")?,
            currency: payment["currency"].as_str().context("no currency")?.to_owned(),
        })
    }
}

impl Answer {
    /// What a final answer tells of a refund.
    ///
    /// # Errors
    ///
    /// The answer is not final.
    pub fn told_refund(&self, key: &str) -> Result<ToldRefund> {
        let text = String::from_utf8_lossy(&self.body);
        ensure!([201, 402, 409].contains(&self.status.as_u16()), "not final: {}: {text}", self.status);
        let body: Value = serde_json::from_slice(&self.body)?;
        let refund = if self.status == StatusCode::CREATED { &body } else { &body["refund"] };
        let id = |name: &str| refund[name].as_str().and_then(|id| id.parse().ok());
        Ok(ToldRefund {
            key: key.to_owned(),
            refund_id: id("id").with_context(|| format!("no id: {text}"))?,
            payment_id: id("payment_id").context("no payment")?,
            status: refund["status"].as_str().context("no status")?.to_owned(),
            amount: refund["amount"].as_i64().context("no amount")?,
            currency: refund["currency"].as_str().context("no currency")?.to_owned(),
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
        Self::with_patience(address, token, Duration::from_secs(20))
    }

    /// As [`Client::new`], and waits this long for an answer.
    ///
    /// # Errors
    ///
    /// The HTTP client could not be made.
    pub fn with_patience(address: std::net::SocketAddr, token: &str, patience: Duration) -> Result<Self> {
        let http = reqwest::Client::builder().timeout(patience).no_proxy().build()?;
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

    /// Asks once for a payment.
    ///
    /// # Errors
    ///
    /// No answer arrived; whether money moved is unknown.
    pub async fn pay(&self, payment: &Payment) -> Result<Answer> {
        let body = json!({
            "reference": payment.reference, "amount": payment.amount, "currency": "EUR", "source": payment.source,
        });
        let request =
            self.http.post(format!("{}/v1/payments", self.base)).header("idempotency-key", &payment.key);
        answer(request.bearer_auth(&self.token).json(&body)).await
    }

    /// Asks for a payment until the answer is final, for at most a minute and a half.
    ///
    /// # Errors
    ///
    /// No final answer came.
    pub async fn pay_until_final(&self, payment: &Payment) -> Result<Answer> {
        until_final(&payment.reference, || self.pay(payment)).await
    }

    /// Asks once for a refund.
    ///
    /// # Errors
    ///
    /// No answer arrived; whether money was given back is unknown.
    pub async fn refund(&self, refund: &Refund) -> Result<Answer> {
        let path = format!("{}/v1/payments/{}/refunds", self.base, refund.payment_id);
        let request = self.http.post(path).header("idempotency-key", &refund.key);
        answer(request.bearer_auth(&self.token).json(&json!({ "amount": refund.amount }))).await
    }

    /// Asks for a refund until the answer is final, for at most a minute and a half.
    ///
    /// # Errors
    ///
    /// No final answer came.
    pub async fn refund_until_final(&self, refund: &Refund) -> Result<Answer> {
        until_final(&refund.key, || self.refund(refund)).await
    }

    /// Reads a payment.
    ///
    /// # Errors
    ///
    /// No answer arrived.
    pub async fn payment(&self, id: Uuid) -> Result<Answer> {
        answer(self.http.get(format!("{}/v1/payments/{id}", self.base)).bearer_auth(&self.token)).await
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

/// Asks until the answer is final, for at most a minute and a half.
async fn until_final<F: Future<Output = Result<Answer>>>(what: &str, ask: impl Fn() -> F) -> Result<Answer> {
    let deadline = std::time::Instant::now() + Duration::from_secs(90);
    loop {
        let outcome = ask().await;
        if let Ok(answer) = &outcome
            && !answer.headers.contains_key("retry-after")
        {
            return outcome;
        }
        let last = outcome.map(|answer| String::from_utf8_lossy(&answer.body).into_owned());
        ensure!(std::time::Instant::now() < deadline, "no final answer for {what}; the last was {last:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn answer(request: reqwest::RequestBuilder) -> Result<Answer> {
    let response = request.send().await?;
    let (status, headers) = (response.status(), response.headers().clone());
    Ok(Answer { status, headers, body: response.bytes().await?.to_vec() })
}
