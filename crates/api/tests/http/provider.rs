//! A provider of payments on a socket of its own: it charges honestly, unless a test says otherwise.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use futures_util::StreamExt as _;
use semel_proto::provider::v1::charge::Status as Stands;
use semel_proto::provider::v1::payment_provider_server::{PaymentProvider, PaymentProviderServer};
use semel_proto::provider::v1::{
    CancelChargeRequest, Charge, ChargeRequest, GetChargeRequest, GetRefundRequest, ListChargesRequest,
    ListChargesResponse, ListRefundsRequest, ListRefundsResponse, Reason, Refund, RefundRequest, refund,
};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// What the next charge or refund does instead of the honest thing.
#[derive(Clone, Debug)]
pub(crate) enum Script {
    /// Declines.
    Decline,
    /// Charges, and answers that something is wrong.
    LoseAnswer,
    /// Refuses the key.
    Mismatch,
    /// Refuses, since the charge was fenced.
    Fence,
    /// Charges, and answers once there is a permit.
    Hold(Arc<Semaphore>),
}

/// The provider; clones are the same one.
#[derive(Clone, Debug)]
pub(crate) struct Provider {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    charges: usize,
    charged: HashMap<String, Charge>,
    scripts: VecDeque<Script>,
    refunds: usize,
    refunded: HashMap<String, Refund>,
    refund_scripts: VecDeque<Script>,
}

impl Provider {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let provider = Self { address: listener.local_addr().unwrap(), state: Arc::default() };
        let service = PaymentProviderServer::new(provider.clone());
        tokio::spawn(
            Server::builder().add_service(service).serve_with_incoming(TcpIncoming::from(listener).boxed()),
        );
        provider
    }

    /// Returns one that nobody answers for.
    pub(crate) fn nowhere(&self) -> Self {
        Self { address: ([127, 0, 0, 1], 1).into(), ..self.clone() }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Has the next charge do this.
    pub(crate) fn then(&self, script: Script) {
        self.state.lock().unwrap().scripts.push_back(script);
    }

    /// How often it was asked to charge.
    pub(crate) fn charges(&self) -> usize {
        self.state.lock().unwrap().charges
    }

    /// How many charges there are.
    pub(crate) fn charged(&self) -> usize {
        self.state.lock().unwrap().charged.len()
    }

    /// Has the next refund do this.
    pub(crate) fn then_refund(&self, script: Script) {
        self.state.lock().unwrap().refund_scripts.push_back(script);
    }

    /// How often it was asked to refund.
    pub(crate) fn refunds(&self) -> usize {
        self.state.lock().unwrap().refunds
    }

    /// How much was given back.
    pub(crate) fn refunded(&self) -> i64 {
        let state = self.state.lock().unwrap();
        let given = |refund: &&Refund| refund.status() == refund::Status::Succeeded;
        state.refunded.values().filter(given).map(|refund| refund.amount).sum()
    }

    fn book_refund(&self, request: &RefundRequest, stands: refund::Status) -> Refund {
        let mut state = self.state.lock().unwrap();
        let failure = if stands == refund::Status::Failed { "account_closed" } else { "" };
        let refund = Refund {
            key: request.key.clone(),
            reference: format!("re_{}", request.key),
            charge_key: request.charge_key.clone(),
            amount: request.amount,
            currency: state.charged[&request.charge_key].currency.clone(),
            status: stands.into(),
            failure_code: failure.to_owned(),
            ..Refund::default()
        };
        state.refunded.entry(request.key.clone()).or_insert(refund).clone()
    }

    fn book(&self, request: &ChargeRequest, stands: Stands) -> Charge {
        let order = request.order.clone().unwrap();
        let charge = Charge {
            key: request.key.clone(),
            reference: format!("ch_{}", request.key),
            amount: order.amount,
            currency: order.currency,
            status: stands.into(),
            decline_code: if stands == Stands::Declined { "card_declined".to_owned() } else { String::new() },
            ..Charge::default()
        };
        self.state.lock().unwrap().charged.entry(request.key.clone()).or_insert(charge).clone()
    }
}

#[tonic::async_trait]
impl PaymentProvider for Provider {
    async fn charge(&self, request: Request<ChargeRequest>) -> Result<Response<Charge>, Status> {
        let request = request.into_inner();
        let script = {
            let mut state = self.state.lock().unwrap();
            state.charges += 1;
            state.scripts.pop_front()
        };
        match script {
            None => Ok(Response::new(self.book(&request, Stands::Succeeded))),
            Some(Script::Decline) => Ok(Response::new(self.book(&request, Stands::Declined))),
            Some(Script::LoseAnswer) => {
                self.book(&request, Stands::Succeeded);
                Err(Status::internal("lost"))
            }
            Some(Script::Mismatch) => Err(Reason::KeyMismatch.refuse("another order")),
            Some(Script::Fence) => Err(Reason::Fenced.refuse("canceled")),
            Some(Script::Hold(released)) => {
                let charge = self.book(&request, Stands::Succeeded);
                released.acquire().await.unwrap().forget();
                Ok(Response::new(charge))
            }
        }
    }

    async fn get_charge(&self, _: Request<GetChargeRequest>) -> Result<Response<Charge>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn cancel_charge(&self, _: Request<CancelChargeRequest>) -> Result<Response<Charge>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn refund(&self, request: Request<RefundRequest>) -> Result<Response<Refund>, Status> {
        let request = request.into_inner();
        let script = {
            let mut state = self.state.lock().unwrap();
            state.refunds += 1;
            state.refund_scripts.pop_front()
        };
        match script {
            None => Ok(Response::new(self.book_refund(&request, refund::Status::Succeeded))),
            Some(Script::Decline) => Ok(Response::new(self.book_refund(&request, refund::Status::Failed))),
            Some(Script::LoseAnswer) => {
                self.book_refund(&request, refund::Status::Succeeded);
                Err(Status::internal("lost"))
            }
            Some(Script::Mismatch) => Err(Reason::ExceedsCharge.refuse("another has been at it")),
            Some(Script::Fence) => Err(Reason::Fenced.refuse("canceled")),
            Some(Script::Hold(released)) => {
                let refund = self.book_refund(&request, refund::Status::Succeeded);
                released.acquire().await.unwrap().forget();
                Ok(Response::new(refund))
            }
        }
    }

    async fn get_refund(&self, _: Request<GetRefundRequest>) -> Result<Response<Refund>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn list_charges(
        &self,
        _: Request<ListChargesRequest>,
    ) -> Result<Response<ListChargesResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn list_refunds(
        &self,
        _: Request<ListRefundsRequest>,
    ) -> Result<Response<ListRefundsResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}
