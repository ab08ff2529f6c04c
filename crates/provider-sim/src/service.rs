//! The provider's gRPC service: reads requests, and refuses with `INVALID_ARGUMENT` what the contract does not allow.

use std::sync::Arc;

use semel_proto::provider::v1::payment_provider_server::PaymentProvider;
use semel_proto::provider::v1::{
    CancelChargeRequest, Charge, ChargeOrder, ChargeRequest, GetChargeRequest, GetRefundRequest,
    ListChargesRequest, ListChargesResponse, ListRefundsRequest, ListRefundsResponse, Refund, RefundRequest,
};
use time::OffsetDateTime;
use tonic::{Request, Response, Status};

use crate::asks::{CancelAsk, GetAsk, GetRefundAsk, ListAsk, ListRefundsAsk};
use crate::clock;
use crate::counter::Counter;
use crate::desk::{ChargeAsk, RefundAsk};

const LONGEST_TEXT: usize = 255;
const LARGEST_AMOUNT: i64 = 1_000_000_000_000;
const LARGEST_PAGE: i32 = 100;
const USUAL_PAGE: usize = 50;

/// The service over a counter.
#[derive(Clone, Debug)]
pub(crate) struct Provider(pub(crate) Arc<Counter>);

#[tonic::async_trait]
impl PaymentProvider for Provider {
    async fn charge(&self, request: Request<ChargeRequest>) -> Result<Response<Charge>, Status> {
        let ChargeRequest { key, order, not_after } = request.into_inner();
        let ask = ChargeAsk {
            key: read_key(key, "key")?,
            order: read_order(order)?,
            not_after: read_time(not_after)?,
        };
        self.0.serve(ask).await.map(Response::new)
    }

    async fn get_charge(&self, request: Request<GetChargeRequest>) -> Result<Response<Charge>, Status> {
        let key = read_key(request.into_inner().key, "key")?;
        self.0.serve(GetAsk(key)).await.map(Response::new)
    }

    async fn cancel_charge(&self, request: Request<CancelChargeRequest>) -> Result<Response<Charge>, Status> {
        let key = read_key(request.into_inner().key, "key")?;
        self.0.serve(CancelAsk(key)).await.map(Response::new)
    }

    async fn refund(&self, request: Request<RefundRequest>) -> Result<Response<Refund>, Status> {
        let RefundRequest { key, charge_key, amount, not_after } = request.into_inner();
        let (key, charge_key) = (read_key(key, "key")?, read_key(charge_key, "charge_key")?);
        let not_after = read_time(not_after)?;
        let ask = RefundAsk { key, charge_key, amount: read_amount(amount)?, not_after };
        self.0.serve(ask).await.map(Response::new)
    }

    async fn get_refund(&self, request: Request<GetRefundRequest>) -> Result<Response<Refund>, Status> {
        let key = read_key(request.into_inner().key, "key")?;
        self.0.serve(GetRefundAsk(key)).await.map(Response::new)
    }

    async fn list_charges(
        &self,
        request: Request<ListChargesRequest>,
    ) -> Result<Response<ListChargesResponse>, Status> {
        let ListChargesRequest { page_size, page_token, created_since } = request.into_inner();
        let ask = read_list(page_size, &page_token, created_since)?;
        self.0.serve(ask).await.map(Response::new)
    }

    async fn list_refunds(
        &self,
        request: Request<ListRefundsRequest>,
    ) -> Result<Response<ListRefundsResponse>, Status> {
        let ListRefundsRequest { page_size, page_token, created_since } = request.into_inner();
        let ask = read_list(page_size, &page_token, created_since)?;
        self.0.serve(ListRefundsAsk(ask)).await.map(Response::new)
    }
}

fn read_list(size: i32, token: &str, since: Option<prost_types::Timestamp>) -> Result<ListAsk, Status> {
    let from = match token {
        "" => 0,
        token => token.parse().map_err(|_| Status::invalid_argument("page_token is none of ours"))?,
    };
    Ok(ListAsk { from, most: read_page_size(size)?.unwrap_or(USUAL_PAGE), since: read_time(since)? })
}

fn read_key(key: String, field: &str) -> Result<String, Status> {
    let plain = key.bytes().all(|byte| byte.is_ascii_graphic());
    if key.is_empty() || key.len() > LONGEST_TEXT || !plain {
        let rule = format!("{field} must be 1 to {LONGEST_TEXT} printable ASCII characters without blanks");
        return Err(Status::invalid_argument(rule));
    }
    Ok(key)
}

fn read_order(order: Option<ChargeOrder>) -> Result<ChargeOrder, Status> {
    let order = order.ok_or_else(|| Status::invalid_argument("order is missing"))?;
    read_amount(order.amount)?;
    if order.currency.len() != 3 || !order.currency.bytes().all(|byte| byte.is_ascii_uppercase()) {
        return Err(Status::invalid_argument("order.currency must be three upper-case letters"));
    }
    if order.source.is_empty() || order.source.len() > LONGEST_TEXT {
        return Err(Status::invalid_argument("order.source must be 1 to 255 bytes"));
    }
    if order.reference.len() > LONGEST_TEXT {
        return Err(Status::invalid_argument("order.reference must be at most 255 bytes"));
    }
    Ok(order)
}

fn read_amount(amount: i64) -> Result<i64, Status> {
    if !(1..=LARGEST_AMOUNT).contains(&amount) {
        return Err(Status::invalid_argument("amount must be 1 to 10^12"));
    }
    Ok(amount)
}

fn read_time(time: Option<prost_types::Timestamp>) -> Result<Option<OffsetDateTime>, Status> {
    let read = |time| clock::instant(&time).ok_or_else(|| Status::invalid_argument("a timestamp is no time"));
    time.map(read).transpose()
}

/// Reads the size of a page; `None` when the usual one is meant.
pub(crate) fn read_page_size(size: i32) -> Result<Option<usize>, Status> {
    let size = usize::try_from(size).ok().filter(|_| size <= LARGEST_PAGE);
    let size = size.ok_or_else(|| Status::invalid_argument("page_size must be 0 to 100"))?;
    Ok((size > 0).then_some(size))
}
