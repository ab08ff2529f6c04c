//! Stripe's webhook: events that the provider sends by itself.
//!
//! Promise: an event is answered with 2xx once it is written down, or known to change nothing; with 4xx when it is not to be
//! believed, and then it leaves nothing; and with 5xx when it could not be written down, so that it is sent again.
//!
//! Stripe disables an endpoint that keeps refusing its events. So one that is believed is refused only when it is no event, or
//! of the other mode; what an event tells that cannot be read is told in the log instead.
//!
//! The sender has no credential: the signature over the body is one, and until the body is here anybody may be the sender. So
//! these requests have places of their own, few, and their bodies little time. The route is none of a client's, so the description
//! of the API does not tell of it, and it exists only where its secrets are configured.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use http::{HeaderMap, StatusCode};
use semel_payments::hearing::{Ear, Heard};
use semel_payments::provider::Provider;
use semel_payments::provider::stripe::objects::Event;
use semel_payments::provider::stripe::webhook::{InvalidSignature, Secrets, Signed};
use tracing::Instrument as _;

use crate::arrival::Arrival;
use crate::body;
use crate::error::ApiError;
use crate::state::Api;

/// Route of Stripe's events.
pub(crate) const STRIPE: &str = "/v1/webhooks/stripe";

/// Bytes of an event at most. An intent has up to 25 kB of metadata, its charge as many, and an update tells what was before.
pub(crate) const MAX_BYTES: usize = 256 * 1024;
/// How long its body may take, from a sender who may be anybody until it is here.
const BODY_WITHIN: Duration = Duration::from_secs(3);
/// How long the sender is kept waiting; it gives up after ten seconds or more, and sends again.
const ANSWER_WITHIN: Duration = Duration::from_secs(8);

const SIGNATURE: &str = "stripe-signature";

/// What is needed to believe Stripe's events.
#[derive(Clone, Debug)]
pub struct Webhooks {
    /// The signing secrets of our endpoint.
    pub secrets: Secrets,
    /// Whether events are about real money.
    pub livemode: bool,
}

pub(crate) fn routes<P: Provider>(ear: Ear<P>, secrets: Secrets) -> Router<Api> {
    Router::new().route(STRIPE, post(hear::<P>)).layer(Extension(Arc::new((ear, secrets))))
}

async fn hear<P: Provider>(
    State(api): State<Api>,
    Extension(Arrival { place, .. }): Extension<Arrival>,
    Extension(hooks): Extension<Arc<(Ear<P>, Secrets)>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let signed = Signed::read(signature(&parts.headers)?, SystemTime::now()).map_err(ApiError::Signature)?;
    let body = body::read_bounded(body, MAX_BYTES, BODY_WITHIN).await?;
    hooks.1.verify(&signed, &body).map_err(ApiError::Signature)?;
    let event: Event = serde_json::from_slice(&body).map_err(ApiError::NoEvent)?;
    // A task of its own: a sender that goes away ends the waiting, and not what is half done.
    let work = async move {
        let heard = hooks.0.hear(&api.pool, &event).await;
        if matches!(heard, Ok(Heard::Settled)) {
            api.hints.give();
        }
        drop(place);
        heard
    };
    let task = api.life.spawn(work.in_current_span());
    match tokio::time::timeout(ANSWER_WITHIN, task).await {
        Ok(Ok(heard)) => Ok(heard.map(|_| StatusCode::OK.into_response())?),
        Ok(Err(_)) => Err(ApiError::Panicked),
        Err(_) => Err(ApiError::DatabaseTooSlow),
    }
}

/// Returns the one line that holds the signatures.
fn signature(headers: &HeaderMap) -> Result<&str, ApiError> {
    let mut lines = headers.get_all(SIGNATURE).iter();
    match (lines.next().and_then(|line| line.to_str().ok()), lines.next()) {
        (Some(line), None) => Ok(line),
        _ => Err(ApiError::Signature(InvalidSignature::Malformed)),
    }
}
