//! Keyed requests: read, executed by the engine in a task of its own, and answered.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use http::{HeaderName, HeaderValue};
use semel_core::failpoint;
use semel_core::idempotency::engine::{self, Answer, Hindrance, Operation, Terms};
use semel_core::idempotency::{ClientId, Command, Scope, StoredResponse};
use serde::de::DeserializeOwned;
use time::{OffsetDateTime, UtcOffset};
use tracing::Instrument as _;
use uuid::Uuid;

use crate::arrival::Arrival;
use crate::error::ApiError;
use crate::front::ANSWER_WITHIN;
use crate::json::InvalidBody;
use crate::state::Api;
use crate::{body, json, key};

const EXPIRES: HeaderName = HeaderName::from_static("idempotency-key-expires");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
const ORIGINAL: HeaderName = HeaderName::from_static("original-request-id");

/// When to ask again about work that takes longer than a client is kept waiting.
const RETRY_UNFINISHED: Duration = Duration::from_secs(1);

/// Reads the request for a new resource, and executes its command or answers from what was stored.
pub(crate) async fn create<O>(
    api: &Api,
    arrival: Arrival,
    client: ClientId,
    request: Request,
    operation: O,
    location: fn(Uuid) -> String,
) -> Result<Response, ApiError>
where
    O: Operation + 'static,
{
    create_with(api, arrival, client, request, operation, location, |command| command).await
}

/// As [`create`], where the body is not all of the command: `command` adds what the path says.
pub(crate) async fn create_with<O, B>(
    api: &Api,
    arrival: Arrival,
    client: ClientId,
    request: Request,
    operation: O,
    location: fn(Uuid) -> String,
    command: impl FnOnce(B) -> O::Command,
) -> Result<Response, ApiError>
where
    O: Operation + 'static,
    B: DeserializeOwned,
{
    let (head, body) = request.into_parts();
    body::expect_json(&head.headers)?;
    let body = body::read(body).await?;
    let key = key::from_headers(&head.headers)?;
    if head.uri.query().is_some() {
        // What is not read is not hashed either, and its sender may mean something by it.
        let reason = "a POST takes no parameters".to_owned();
        return Err(ApiError::Query(InvalidBody { field: String::new(), reason }));
    }
    let command = command(json::parse(&body).map_err(ApiError::Body)?);
    let scope = Scope { client, operation: O::Command::OPERATION, key };
    run(api, arrival, operation, scope, command, location).await?.written()
}

/// Executes the command, or answers from what was stored.
///
/// The work is a task that a stop waits for; this future only waits for it. Dropping it, because the client went away,
/// ends nothing.
pub(crate) async fn run<O>(
    api: &Api,
    arrival: Arrival,
    operation: O,
    scope: Scope,
    command: O::Command,
    location: fn(Uuid) -> String,
) -> Result<Kept, ApiError>
where
    O: Operation + 'static,
{
    let resource_id = operation.resource_id(&scope);
    let (pool, retention, hints) = (api.pool.clone(), api.settings.key_retention, api.hints.clone());
    let admission = Arc::clone(&api.admission);
    let work = async move {
        failpoint!(crate::failpoints::BEFORE_EXECUTE);
        let Arrival { request, place } = arrival;
        let terms = Terms { retention, admission: Some(&admission) };
        let answer = engine::run(&pool, &operation, &scope, &command, &request, terms).await;
        failpoint!(crate::failpoints::AFTER_COMMIT);
        // Here and not where the answer is sent: this task ends whether or not the client is still there.
        if matches!(answer, Ok(Answer::Fresh { .. })) {
            hints.give();
        }
        drop(place);
        answer
    };
    let task = api.life.spawn(work.in_current_span());
    let answer = match tokio::time::timeout(ANSWER_WITHIN, task).await {
        Ok(Ok(answer)) => answer?,
        Ok(Err(_)) => return Err(ApiError::Panicked),
        Err(_) => return Err(ApiError::Unknown { resource_id, retry_after: RETRY_UNFINISHED }),
    };
    failpoint!(crate::failpoints::BEFORE_RESPOND);
    kept(answer, location)
}

fn kept(answer: Answer, location: fn(Uuid) -> String) -> Result<Kept, ApiError> {
    match answer {
        Answer::Fresh { response, expires_at } => Ok(Kept { response, expires_at, replay_of: None }),
        Answer::Replayed { response, expires_at, original_request } => {
            Ok(Kept { response, expires_at, replay_of: Some(original_request) })
        }
        Answer::InProgress { retry_after } => Err(ApiError::InProgress { retry_after }),
        Answer::Mismatch => Err(ApiError::KeyReused),
        Answer::Expired { resource_id } => {
            let location = HeaderValue::try_from(location(resource_id)).map_err(http::Error::from)?;
            Err(ApiError::KeyExpired { resource_id, location })
        }
        Answer::Limited { retry_after } => Err(ApiError::Limited { retry_after }),
        Answer::Invalid(invalid) => Err(ApiError::Command(invalid)),
        Answer::Hindered(Hindrance::Missing) => Err(ApiError::NotFound),
        Answer::Hindered(Hindrance::Passing { retry_after }) => Err(ApiError::Unsettled { retry_after }),
        Answer::Unknown { resource_id, retry_after } => Err(ApiError::Unknown { resource_id, retry_after }),
        Answer::NeedsAttention { resource_id } => Err(ApiError::NeedsAttention { resource_id }),
        Answer::Unavailable | Answer::Hindered(Hindrance::Busy) => Err(ApiError::Unavailable),
        Answer::Unreadable => Err(ApiError::Unreadable),
    }
}

/// A final answer, kept with the key.
#[derive(Debug)]
pub(crate) struct Kept {
    /// As it is kept, which is as HTTP has it.
    pub(crate) response: StoredResponse,
    expires_at: OffsetDateTime,
    /// The request that executed it, where that was another one.
    replay_of: Option<Uuid>,
}

impl Kept {
    /// Writes it as it is: status, header lines and body bytes, and what is told beside it.
    fn written(self) -> Result<Response, ApiError> {
        let mut response = Response::builder().status(self.response.code);
        for (name, value) in &self.response.headers {
            response = response.header(name, value);
        }
        for (name, value) in self.about()? {
            response = response.header(name, value);
        }
        Ok(response.body(Body::from(self.response.body))?)
    }

    /// What is told beside it: until when it is replayed, and whether it was.
    pub(crate) fn about(&self) -> Result<Vec<(HeaderName, HeaderValue)>, ApiError> {
        let expires = HeaderValue::try_from(http_date(self.expires_at)).map_err(http::Error::from)?;
        let mut about = vec![(EXPIRES, expires)];
        if let Some(original) = self.replay_of {
            let original = HeaderValue::try_from(original.to_string()).map_err(http::Error::from)?;
            about.extend([(REPLAYED, HeaderValue::from_static("true")), (ORIGINAL, original)]);
        }
        Ok(about)
    }
}

/// Writes an instant as HTTP does (IMF-fixdate, RFC 9110), rounded down to the second.
fn http_date(instant: OffsetDateTime) -> String {
    let at = instant.to_offset(UtcOffset::UTC);
    let (weekday, month) = (at.weekday().to_string(), at.month().to_string());
    let (hour, minute, second) = at.to_hms();
    format!(
        "{}, {:02} {} {} {hour:02}:{minute:02}:{second:02} GMT",
        &weekday[..3],
        at.day(),
        &month[..3],
        at.year()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_instants_as_http_does() {
        let instant = OffsetDateTime::from_unix_timestamp(784_111_777).unwrap();
        assert_eq!(http_date(instant), "Sun, 06 Nov 1994 08:49:37 GMT");
        let elsewhere = instant.to_offset(UtcOffset::from_hms(11, 0, 0).unwrap());
        assert_eq!(http_date(elsewhere), http_date(instant));
    }

    #[test]
    fn sends_a_stored_response_as_it_is() {
        let response = StoredResponse {
            code: 201,
            headers: [("link", "<a>, <b>"), ("link", "<c>"), ("content-type", "x/y")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .to_vec(),
            body: b"\xff\x00".to_vec(),
        };
        let expires_at = OffsetDateTime::UNIX_EPOCH;
        let sent = Kept { response, expires_at, replay_of: Some(Uuid::nil()) }.written().unwrap();
        assert_eq!(sent.status(), 201);
        let links: Vec<_> = sent.headers().get_all("link").iter().collect();
        assert_eq!(links, ["<a>, <b>", "<c>"]);
        assert_eq!(sent.headers()["idempotent-replayed"], "true");
    }
}
