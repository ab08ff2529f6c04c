//! The calls of `semel.payments.v1.Payments`.

use axum::Router;
use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::post;
use prost::Message;
use semel_core::credentials::Scopes;
use semel_core::idempotency::engine::Operation;
use semel_core::idempotency::{ClientId, Command, Scope};
use semel_payments::orders::{self, CreateOrder};
use semel_payments::payments::create::MakePayment;
use semel_payments::payments::{self, CreatePayment};
use semel_payments::provider::chosen::Chosen;
use semel_payments::refunds::create::MakeRefund;
use semel_payments::refunds::{self, CreateRefund};
use semel_proto::payments::v1;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::unary::{self, Call};
use super::{messages, status};
use crate::arrival::Arrival;
use crate::error::ApiError;
use crate::front::in_time;
use crate::routes::parse_id;
use crate::state::Api;
use crate::{key, keyed, keys, listing};

pub(crate) const CREATE_ORDER: &str = "/semel.payments.v1.Payments/CreateOrder";
pub(crate) const GET_ORDER: &str = "/semel.payments.v1.Payments/GetOrder";
pub(crate) const LIST_ORDERS: &str = "/semel.payments.v1.Payments/ListOrders";
pub(crate) const CREATE_PAYMENT: &str = "/semel.payments.v1.Payments/CreatePayment";
pub(crate) const GET_PAYMENT: &str = "/semel.payments.v1.Payments/GetPayment";
pub(crate) const LIST_PAYMENTS: &str = "/semel.payments.v1.Payments/ListPayments";
pub(crate) const CREATE_REFUND: &str = "/semel.payments.v1.Payments/CreateRefund";
pub(crate) const GET_REFUND: &str = "/semel.payments.v1.Payments/GetRefund";
pub(crate) const LIST_REFUNDS: &str = "/semel.payments.v1.Payments/ListRefunds";
pub(crate) const GET_IDEMPOTENCY_KEY: &str = "/semel.payments.v1.Payments/GetIdempotencyKey";

/// The calls. Without a provider there are none about payments and refunds.
pub(crate) fn routes(make_payment: Option<MakePayment<Chosen>>) -> Router<Api> {
    let routes = Router::new()
        .route(CREATE_ORDER, post(create_order))
        .route(GET_ORDER, post(get_order))
        .route(LIST_ORDERS, post(list_orders))
        .route(GET_IDEMPOTENCY_KEY, post(get_idempotency_key));
    let Some(make_payment) = make_payment else { return routes };
    let payments = Router::new()
        .route(CREATE_PAYMENT, post(create_payment))
        .route(GET_PAYMENT, post(get_payment))
        .route(LIST_PAYMENTS, post(list_payments))
        .route(CREATE_REFUND, post(create_refund))
        .route(GET_REFUND, post(get_refund))
        .route(LIST_REFUNDS, post(list_refunds));
    routes.merge(payments.layer(Extension(MakeRefund::of(&make_payment))).layer(Extension(make_payment)))
}

/// Who calls.
type Caller = (Extension<Arrival>, Extension<ClientId>);

async fn create_order(
    State(api): State<Api>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let command = |message: v1::CreateOrderRequest| {
        let v1::CreateOrderRequest { reference, amount, currency } = message;
        Ok(CreateOrder { reference, amount, currency })
    };
    let operation = api.place_order.clone();
    create(&api, caller, request, operation, command, crate::orders::location, messages::order).await
}

async fn get_order(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    request: Request,
) -> Result<Response, ApiError> {
    let v1::GetOrderRequest { id } = Call::receive(request).await?.read()?;
    let order = in_time(orders::find(&api.pool, &client, parse_id(&id)?)).await?;
    Ok(unary::reply(&messages::order(order.ok_or(ApiError::NotFound)?)))
}

async fn list_orders(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    request: Request,
) -> Result<Response, ApiError> {
    let v1::ListOrdersRequest { limit, cursor } = Call::receive(request).await?.read()?;
    let page = listing::page_of(given(limit), some(&cursor))?;
    let (found, next) = in_time(orders::list(&api.pool, &client, page)).await?;
    Ok(unary::reply(&v1::ListOrdersResponse {
        orders: found.into_iter().map(messages::order).collect(),
        next_cursor: next.map(|next| next.to_string()).unwrap_or_default(),
    }))
}

async fn create_payment(
    State(api): State<Api>,
    Extension(make_payment): Extension<MakePayment<Chosen>>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let command = |message: v1::CreatePaymentRequest| {
        let v1::CreatePaymentRequest { reference, amount, currency, source } = message;
        Ok(CreatePayment { reference, amount, currency, source })
    };
    create(&api, caller, request, make_payment, command, crate::payments::location, messages::payment).await
}

async fn get_payment(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    request: Request,
) -> Result<Response, ApiError> {
    let v1::GetPaymentRequest { id } = Call::receive(request).await?.read()?;
    let payment = in_time(payments::find(&api.pool, &client, parse_id(&id)?)).await?;
    Ok(unary::reply(&messages::payment(payment.ok_or(ApiError::NotFound)?)))
}

async fn list_payments(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    request: Request,
) -> Result<Response, ApiError> {
    let v1::ListPaymentsRequest { limit, cursor } = Call::receive(request).await?.read()?;
    let page = listing::page_of(given(limit), some(&cursor))?;
    let (found, next) = in_time(payments::list(&api.pool, &client, page)).await?;
    Ok(unary::reply(&v1::ListPaymentsResponse {
        payments: found.into_iter().map(messages::payment).collect(),
        next_cursor: next.map(|next| next.to_string()).unwrap_or_default(),
    }))
}

async fn create_refund(
    State(api): State<Api>,
    Extension(make_refund): Extension<MakeRefund<Chosen>>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let command = |message: v1::CreateRefundRequest| {
        let v1::CreateRefundRequest { payment_id, amount } = message;
        Ok(CreateRefund { payment_id: parse_id(&payment_id)?, amount })
    };
    create(&api, caller, request, make_refund, command, refunds::location, messages::refund).await
}

async fn get_refund(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    request: Request,
) -> Result<Response, ApiError> {
    let v1::GetRefundRequest { id } = Call::receive(request).await?.read()?;
    let refund = in_time(refunds::find(&api.pool, &client, parse_id(&id)?)).await?;
    Ok(unary::reply(&messages::refund(refund.ok_or(ApiError::NotFound)?)))
}

async fn list_refunds(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    request: Request,
) -> Result<Response, ApiError> {
    let v1::ListRefundsRequest { payment_id, limit, cursor } = Call::receive(request).await?.read()?;
    let payment_id = some(&payment_id).map(parse_id).transpose()?;
    let page = listing::page_of(given(limit), some(&cursor))?;
    let (found, next) = crate::refunds::page(&api, &client, payment_id, page).await?;
    Ok(unary::reply(&v1::ListRefundsResponse {
        refunds: found.into_iter().map(messages::refund).collect(),
        next_cursor: next.map(|next| next.to_string()).unwrap_or_default(),
    }))
}

async fn get_idempotency_key(
    State(api): State<Api>,
    Extension(client): Extension<ClientId>,
    Extension(scopes): Extension<Scopes>,
    request: Request,
) -> Result<Response, ApiError> {
    let call = Call::receive(request).await?;
    let v1::GetIdempotencyKeyRequest { operation } = call.read()?;
    let told = keys::told_of(&api, client, &scopes, &operation, &call.metadata).await?;
    Ok(unary::reply(&messages::key(&told)))
}

/// Reads the call for a new resource, and executes its command or answers from what was stored.
async fn create<O, Asked, Resource, Told>(
    api: &Api,
    caller: Caller,
    request: Request,
    operation: O,
    command: fn(Asked) -> Result<O::Command, ApiError>,
    location: fn(Uuid) -> String,
    told: fn(Resource) -> Told,
) -> Result<Response, ApiError>
where
    O: Operation + 'static,
    Asked: Message + Default,
    Resource: DeserializeOwned,
    Told: Message,
{
    let (Extension(arrival), Extension(client)) = caller;
    let call = Call::receive(request).await?;
    let key = key::from_headers(&call.metadata)?;
    let command = command(call.read()?)?;
    let scope = Scope { client, operation: O::Command::OPERATION, key };
    let kept = keyed::run(api, arrival, operation, scope, command, location).await?;
    let mut response = if kept.response.code < 300 {
        // What cannot be read was written by a newer binary.
        let made = serde_json::from_slice(&kept.response.body).map_err(|_| ApiError::Unreadable)?;
        unary::reply(&told(made))
    } else {
        status::stored(&kept.response)?.into_http()
    };
    response.headers_mut().extend(kept.about()?);
    Ok(response)
}

/// A number that is there: the encoding does not tell 0 from none.
fn given(number: u32) -> Option<u32> {
    (number > 0).then_some(number)
}

/// A text that is there.
fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}
