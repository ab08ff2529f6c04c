//! A client of the API that speaks gRPC, and keeps to the same habits: a key per intent, and retries under the same key.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use semel_proto::payments::v1::payments_client::PaymentsClient;
use semel_proto::payments::v1::{self, CreatePaymentRequest};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::client::Payment;

/// A client with one credential, calling one address.
#[derive(Clone, Debug)]
pub struct Caller {
    channel: Channel,
    token: String,
    patience: Duration,
}

/// A payment as a call was told of it.
#[derive(Clone, Debug)]
pub struct Called {
    /// The payment.
    pub payment: v1::Payment,
    /// Whether this repeats an earlier answer.
    pub is_replay: bool,
}

impl Caller {
    /// Calls `address` with a bearer token, and waits this long for each answer. It connects with its first call.
    ///
    /// # Errors
    ///
    /// The address is none.
    pub fn with_patience(address: SocketAddr, token: &str, patience: Duration) -> Result<Self> {
        let channel = Endpoint::from_shared(format!("http://{address}"))?.connect_lazy();
        Ok(Self { channel, token: token.to_owned(), patience })
    }

    /// Asks once for a payment.
    ///
    /// # Errors
    ///
    /// It was refused, or no answer arrived; whether money moved may be unknown.
    pub async fn pay(&self, payment: &Payment) -> Result<Called, Status> {
        let mut request = Request::new(CreatePaymentRequest {
            reference: payment.reference.clone(),
            amount: payment.amount,
            currency: "EUR".to_owned(),
            source: payment.source.clone(),
        });
        let metadata = request.metadata_mut();
        let text = |text: String| text.parse().map_err(|_| Status::invalid_argument("no metadata"));
        metadata.insert("authorization", text(format!("Bearer {}", self.token))?);
        metadata.insert("idempotency-key", text(payment.key.clone())?);
        request.set_timeout(self.patience);
        let answer = PaymentsClient::new(self.channel.clone()).create_payment(request).await?;
        let is_replay = answer.metadata().get("idempotent-replayed").is_some_and(|value| value == "true");
        Ok(Called { payment: answer.into_inner(), is_replay })
    }

    /// Asks for a payment until it is told of one, for at most a minute and a half.
    ///
    /// # Errors
    ///
    /// It was refused for good, or is not told in time.
    pub async fn pay_until_told(&self, payment: &Payment) -> Result<Called> {
        let deadline = Instant::now() + Duration::from_secs(90);
        loop {
            match self.pay(payment).await {
                Ok(called) => return Ok(called),
                Err(status) => {
                    let passes =
                        [Code::Unavailable, Code::Aborted, Code::DeadlineExceeded].contains(&status.code());
                    ensure!(passes, "refused for good: {status}");
                    ensure!(Instant::now() < deadline, "not told in time; the last was {status}");
                }
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}
