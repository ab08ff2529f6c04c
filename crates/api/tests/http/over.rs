//! The same request over either protocol, and what both tell of its answer, in the words of HTTP.

use semel_proto::payments::v1;
use serde_json::Value;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::bed::Server;
use crate::client::Answer;
use crate::grpc::call::{self, Call, Reply};

/// A protocol.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Over {
    Http,
    Grpc,
}

/// What was told.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Told {
    /// The kind of problem; none where it was made.
    pub(crate) problem: Option<String>,
    /// What was made, or what is told of.
    pub(crate) resource_id: Option<String>,
    pub(crate) is_replay: bool,
    /// In seconds.
    pub(crate) retry_after: Option<u64>,
    pub(crate) expires: Option<String>,
}

impl Over {
    pub(crate) const BOTH: [Self; 2] = [Self::Http, Self::Grpc];

    /// Places an order, as the client whose token the server's is.
    pub(crate) async fn order(self, server: &Server, key: &str, amount: i64) -> Told {
        match self {
            Self::Http => answered(&server.order(key, amount).send(server.address).await),
            Self::Grpc => {
                let reply = call::order(server, key, amount).send(server).await;
                replied(&reply, |reply| reply.message::<v1::Order>().id)
            }
        }
    }

    /// Makes a payment.
    pub(crate) async fn payment(self, server: &Server, key: &str, amount: i64) -> Told {
        match self {
            Self::Http => answered(&server.payment(key, amount).send(server.address).await),
            Self::Grpc => {
                let reply = call::payment(server, key, amount).send(server).await;
                replied(&reply, |reply| reply.message::<v1::Payment>().id)
            }
        }
    }

    /// Asks how a key stands; returns its state and what it makes, or the kind of problem.
    pub(crate) async fn state(
        self,
        server: &Server,
        operation: &str,
        key: &str,
    ) -> Result<(String, String), String> {
        match self {
            Self::Http => {
                let ask = server.get(&format!("/v1/idempotency-keys/{operation}"));
                let answer = ask.header("Idempotency-Key", key).send(server.address).await;
                let told = answer.json();
                answered(&answer).problem.map_or(Ok(()), Err)?;
                Ok((text(&told["state"]).unwrap(), text(&told["resource_id"]).unwrap()))
            }
            Self::Grpc => {
                let request = v1::GetIdempotencyKeyRequest { operation: operation.to_owned() };
                let call = Call::new(server, "GetIdempotencyKey", &request).with("idempotency-key", key);
                let reply = call.send(server).await;
                replied(&reply, |_| String::new()).problem.map_or(Ok(()), Err)?;
                let told: v1::IdempotencyKey = reply.message();
                let state = told.state().as_str_name().strip_prefix("STATE_").unwrap().to_lowercase();
                Ok((state, told.resource_id))
            }
        }
    }

    /// Asks for a page of the client's refunds; returns their ids, and where the next page begins.
    pub(crate) async fn refunds(
        self,
        server: &Server,
        limit: u32,
        cursor: Option<&str>,
    ) -> Result<(Vec<String>, Option<String>), String> {
        match self {
            Self::Http => {
                let cursor = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
                let answer =
                    server.get(&format!("/v1/refunds?limit={limit}{cursor}")).send(server.address).await;
                answered(&answer).problem.map_or(Ok(()), Err)?;
                let page = answer.json();
                let refunds = page["refunds"].as_array().unwrap();
                let ids = refunds.iter().map(|refund| text(&refund["id"]).unwrap()).collect();
                Ok((ids, text(&page["next_cursor"])))
            }
            Self::Grpc => {
                let cursor = cursor.unwrap_or_default().to_owned();
                let request = v1::ListRefundsRequest { payment_id: String::new(), limit, cursor };
                let reply = Call::new(server, "ListRefunds", &request).send(server).await;
                replied(&reply, |_| String::new()).problem.map_or(Ok(()), Err)?;
                let page: v1::ListRefundsResponse = reply.message();
                let next = (!page.next_cursor.is_empty()).then_some(page.next_cursor);
                Ok((page.refunds.into_iter().map(|refund| refund.id).collect(), next))
            }
        }
    }

    /// Asks for a page of orders or payments; returns the kind of problem, if there is one.
    pub(crate) async fn list(self, server: &Server, what: &str) -> Option<String> {
        match self {
            Self::Http => answered(&server.get(&format!("/v1/{what}")).send(server.address).await).problem,
            Self::Grpc => {
                let call = match what {
                    "orders" => Call::new(server, "ListOrders", &v1::ListOrdersRequest::default()),
                    _ => Call::new(server, "ListPayments", &v1::ListPaymentsRequest::default()),
                };
                replied(&call.send(server).await, |_| String::new()).problem
            }
        }
    }
}

impl Told {
    /// Checks that something was made, now and not before; returns its id.
    pub(crate) fn expect_made(&self) -> &str {
        assert_eq!((self.problem.as_deref(), self.is_replay), (None, false), "{self:?}");
        self.resource_id.as_deref().unwrap()
    }

    /// Checks that this is a problem of this kind, and that it says when to ask again if it ever does.
    pub(crate) fn expect_problem(&self, kind: &str) {
        assert_eq!(self.problem.as_deref(), Some(kind), "{self:?}");
        let passes = [
            "rate-limited",
            "request-in-progress",
            "outcome-unknown",
            "needs-attention",
            "temporarily-unavailable",
        ];
        assert_eq!(self.retry_after.is_some(), passes.contains(&kind), "{self:?}");
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn answered(answer: &Answer) -> Told {
    let body = answer.json();
    let problem = text(&body["type"]);
    Told {
        problem: problem.map(|kind| kind.rsplit('/').next().unwrap().to_owned()),
        resource_id: text(&body["id"]).or_else(|| text(&body["resource_id"])).or_else(|| {
            answer.header("location").and_then(|location| location.rsplit('/').next()).map(str::to_owned)
        }),
        is_replay: answer.header("idempotent-replayed") == Some("true"),
        retry_after: answer.header("retry-after").map(|wait| wait.parse().unwrap()),
        expires: answer.header("idempotency-key-expires").map(str::to_owned),
    }
}

fn replied(reply: &Reply, made: fn(&Reply) -> String) -> Told {
    let is_replay = reply.metadata("idempotent-replayed") == Some("true");
    let expires = reply.metadata("idempotency-key-expires").map(str::to_owned);
    if reply.status.code() == Code::Ok {
        let resource_id = Some(made(reply));
        return Told { problem: None, resource_id, is_replay, retry_after: None, expires };
    }
    let details = reply.status.get_error_details();
    let info = details.error_info().unwrap();
    let delay = details.retry_info().map(|info| info.retry_delay.unwrap().as_secs());
    Told {
        problem: Some(info.reason.to_lowercase().replace('_', "-")),
        resource_id: info.metadata.get("resource_id").cloned(),
        is_replay,
        retry_after: delay,
        expires,
    }
}
