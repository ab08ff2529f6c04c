//! Problems as gRPC has them: a status whose details say in types what the problem document says in JSON.
//!
//! Of both kinds, those that are told and gone, and those that are final and stored. A status is a function of the problem
//! alone, so that a replay says what the first answer said.

use std::collections::HashMap;

use semel_core::idempotency::StoredResponse;
use semel_payments::problem::ProblemBase;
use semel_proto::payments::DOMAIN;
use serde_json::{Map, Value};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::error::ApiError;
use crate::problem::{self, Problem};

/// Members that every problem has.
const REGISTERED: [&str; 5] = ["type", "title", "status", "detail", "instance"];

/// Returns the status that tells of a problem.
pub(crate) fn of(problem: &Problem, base: &ProblemBase) -> Status {
    let suffix = problem.kind.suffix();
    let mut details = ErrorDetails::with_error_info(reason(suffix), DOMAIN, metadata(&problem.members));
    if let Some(wait) = problem.retry_after {
        details.set_retry_info(Some(problem::in_seconds(wait)));
    }
    let text = |error: &Value, name: &str| error[name].as_str().unwrap_or_default().to_owned();
    for error in problem.members.get("errors").and_then(Value::as_array).into_iter().flatten() {
        details.add_bad_request_violation(text(error, "field"), text(error, "reason"));
    }
    if problem.kind.is_linked() {
        details.add_help_link("describes the problem", base.of(suffix));
    }
    Status::with_error_details(problem.code(), problem.detail.clone(), details)
}

/// Returns the status that tells of a stored refusal.
pub(crate) fn stored(response: &StoredResponse) -> Result<Status, ApiError> {
    let problem: Map<String, Value> =
        serde_json::from_slice(&response.body).map_err(|_| ApiError::Unreadable)?;
    let text = |name: &str| problem.get(name).and_then(Value::as_str).ok_or(ApiError::Unreadable);
    let suffix = text("type")?.rsplit('/').next().unwrap_or_default();
    let mut metadata = metadata(&problem);
    let location = response.headers.iter().find(|(name, _)| name == "location");
    if let Some((_, resource_id)) = location.and_then(|(_, location)| location.rsplit_once('/')) {
        metadata.insert("resource_id".to_owned(), resource_id.to_owned());
    }
    let details = ErrorDetails::with_error_info(reason(suffix), DOMAIN, metadata);
    Ok(Status::with_error_details(Code::FailedPrecondition, text("detail")?, details))
}

/// `payment-declined` as error infos write it, `PAYMENT_DECLINED`.
fn reason(suffix: &str) -> String {
    suffix.replace('-', "_").to_ascii_uppercase()
}

/// Flattens the members that a problem adds; those of an object are named after it, `payment_status`.
fn metadata(members: &Map<String, Value>) -> HashMap<String, String> {
    let mut flat = HashMap::new();
    for (name, value) in members.iter().filter(|(name, _)| !REGISTERED.contains(&name.as_str())) {
        if let Value::Object(inner) = value {
            flat.extend(
                inner.iter().filter_map(|(of, value)| Some((format!("{name}_{of}"), scalar(value)?))),
            );
        }
        flat.extend(scalar(value).map(|value| (name.clone(), value)));
    }
    flat
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::problem::Kind;

    #[test]
    fn a_status_tells_what_the_problem_does() {
        let problem = Problem::new(Kind::OutcomeUnknown, "Ask again.")
            .with("resource_id", json!("r-1"))
            .retry_after(Duration::from_millis(1500));
        let status = of(&problem, &ProblemBase::DEFAULT.parse().unwrap());
        let details = status.get_error_details();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "Ask again."));
        let info = details.error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("OUTCOME_UNKNOWN", "payments.semel"));
        assert_eq!(info.metadata, HashMap::from([("resource_id".to_owned(), "r-1".to_owned())]));
        // Whole seconds, as the header has it.
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(Duration::from_secs(2)));
        assert!(details.bad_request().is_none() && details.help().is_none(), "{details:?}");
    }

    #[test]
    fn a_status_tells_of_a_stored_refusal_without_the_words_of_http() {
        let body = json!({
            "type": "https://semel.example/errors/payment-declined", "title": "t", "status": 402, "detail": "No.",
            "instance": "/v1/payments/r-1",
            "payment": { "id": "r-1", "status": "declined", "amount": 5, "nothing": null },
        });
        let response = StoredResponse {
            code: 402,
            headers: vec![("location".to_owned(), "/v1/payments/r-1".to_owned())],
            body: body.to_string().into_bytes(),
        };
        let status = stored(&response).unwrap();
        assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "No."));
        let info = status.get_details_error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("PAYMENT_DECLINED", "payments.semel"));
        let told = [
            ("resource_id", "r-1"),
            ("payment_id", "r-1"),
            ("payment_status", "declined"),
            ("payment_amount", "5"),
        ];
        assert_eq!(info.metadata, told.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        assert!(status.get_details_retry_info().is_none(), "it is final");
        assert!(matches!(
            stored(&StoredResponse { body: b"{}".to_vec(), ..response }),
            Err(ApiError::Unreadable)
        ));
    }
}
