use std::collections::BTreeSet;
use std::time::Duration;

use axum::body::Body;
use http::Request;
use http_body_util::BodyExt as _;
use semel_core::lifecycle::Lifecycle;
use semel_payments::orders::{CreateOrder, Order};
use semel_payments::payments::create::MakePayment;
use semel_payments::payments::{CreatePayment, Payment};
use semel_payments::problem::FINAL_KINDS;
use semel_payments::provider::Dedup;
use semel_payments::provider::grpc::GrpcProvider;
use semel_payments::refunds::Refund;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tower::ServiceExt as _;
use uuid::Uuid;

use super::*;
use crate::json;
use crate::problem::Kind;
use crate::refunds::Asking;
use crate::state::Settings;

const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];

fn base() -> ProblemBase {
    ProblemBase::DEFAULT.parse().unwrap()
}

fn whole() -> Value {
    document(Payments::Made, &base())
}

/// Every operation, with its method and path.
fn operations(document: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            assert!(METHODS.contains(&method.as_str()), "{method}");
            found.push((format!("{method} {path}"), operation));
        }
    }
    found
}

fn api(payments: Payments) -> Api {
    let settings = Settings {
        namespace: "test".parse().unwrap(),
        key_retention: Duration::from_hours(1),
        problem_base: base(),
    };
    let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy("postgres://nobody@127.0.0.1:1/x").unwrap();
    let api = Api::new(pool, settings.clone(), Lifecycle::new());
    if payments == Payments::NotMade {
        return api;
    }
    let provider = GrpcProvider::new("http://127.0.0.1:1", Dedup::ForEver).unwrap();
    api.with_payments(MakePayment::new(settings.namespace, provider.into(), settings.problem_base))
}

/// The paths that the router has, as it shows itself: `paths: {RouteId(0): "/v1/orders", …}`. Those of gRPC are described
/// elsewhere.
fn routed(payments: Payments) -> BTreeSet<String> {
    let shown = format!("{:?}", crate::routes::router(api(payments)));
    let paths = shown.split("RouteId(").filter_map(|part| part.split_once("): \"")?.1.split('"').next());
    let is_http = |path: &&str| path.starts_with("/v1/") || *path == OPENAPI;
    paths.filter(is_http).map(str::to_owned).collect()
}

/// Anyone may ask for it, on any number of streams that do not take it.
#[tokio::test]
async fn all_answers_share_one_document() {
    let api = api(Payments::Made);
    let router = routes(&api).with_state(api);
    let answer = async || {
        let request = Request::get(OPENAPI).body(Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        response.into_body().frame().await.unwrap().unwrap().into_data().unwrap()
    };
    let (one, other) = (answer().await, answer().await);
    assert!(one.len() > 10_000);
    assert_eq!(one.as_ptr(), other.as_ptr());
}

#[tokio::test]
async fn every_route_is_described_and_nothing_else() {
    for payments in [Payments::Made, Payments::NotMade] {
        let document = document(payments, &base());
        let described: BTreeSet<_> = document["paths"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(described, routed(payments));
    }
}

#[test]
fn every_kind_of_problem_is_described_and_answered_somewhere() {
    let document = whole();
    let mut answered = String::new();
    for (_, operation) in operations(&document) {
        answered += &operation["responses"].to_string();
    }
    answered += &document["components"]["responses"].to_string();
    let kinds = Kind::ALL.into_iter().filter(|kind| kind.is_of_http());
    for page in kinds.map(Kind::suffix).chain(FINAL_KINDS.map(|kind| kind.page)) {
        let schema = &document["components"]["schemas"][page];
        assert_eq!(schema["properties"]["type"]["const"], base().of(page));
        assert!(answered.contains(&format!("#/components/schemas/{page}\"")), "{page} is answered nowhere");
    }
}

#[test]
fn every_answer_is_described_by_its_status_and_names_its_request() {
    let document = whole();
    for (name, operation) in operations(&document) {
        let responses = operation["responses"].as_object().unwrap();
        assert!(!responses.contains_key("default"), "{name}");
        for (status, response) in responses {
            assert!(
                status.parse::<u16>().is_ok_and(|status| (200..600).contains(&status)),
                "{name} {status}"
            );
            assert!(response["headers"]["Request-Id"].is_object(), "{name} {status}");
            let kind = if status.starts_with('2') { "application/json" } else { "application/problem+json" };
            assert!(response["content"][kind]["schema"].is_object(), "{name} {status}");
        }
    }
}

#[test]
fn every_reference_leads_somewhere() {
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        if let Some(to) = value.get("$ref") {
            found.insert(to.as_str().unwrap().to_owned());
        }
        let children: Vec<&Value> = match value {
            Value::Object(members) => members.values().collect(),
            Value::Array(items) => items.iter().collect(),
            _ => Vec::new(),
        };
        for child in children {
            references(child, found);
        }
    }
    for payments in [Payments::Made, Payments::NotMade] {
        let document = document(payments, &base());
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        assert!(found.len() > 20);
        for to in found {
            let place = to.strip_prefix('#').unwrap();
            assert!(document.pointer(place).is_some(), "{to}");
        }
    }
    let document = whole();
    let ids: BTreeSet<_> =
        operations(&document).iter().map(|(_, one)| one["operationId"].to_string()).collect();
    for (name, operation) in operations(&document) {
        let responses = operation["responses"].as_object().unwrap().values();
        for link in responses.filter_map(|response| response["links"].as_object()).flat_map(Map::values) {
            assert!(ids.contains(&link["operationId"].to_string()), "{name}: {link}");
        }
    }
}

/// Checks that a type takes the example of its schema, and none without a field or with another one.
fn expect_command<T: DeserializeOwned>(document: &Value, name: &str, example: &Value) {
    let schema = &document["components"]["schemas"][name];
    let parse = |value: &Value| json::parse::<T>(value.to_string().as_bytes());
    assert!(parse(example).is_ok(), "{name}");
    assert_eq!(schema["additionalProperties"], false);
    let described: BTreeSet<_> = schema["properties"].as_object().unwrap().keys().collect();
    assert_eq!(described, example.as_object().unwrap().keys().collect(), "{name}");
    for field in schema["required"].as_array().unwrap() {
        let mut without = example.clone();
        without.as_object_mut().unwrap().remove(field.as_str().unwrap()).unwrap();
        assert!(parse(&without).is_err(), "{name} is taken without {field}");
    }
}

/// Checks that a value is written with the fields of its schema, the optional ones given.
fn expect_written(document: &Value, name: &str, value: impl Serialize) {
    let written = serde_json::to_value(value).unwrap();
    let schema = &document["components"]["schemas"][name];
    let described: BTreeSet<_> = schema["properties"].as_object().unwrap().keys().collect();
    assert_eq!(described, written.as_object().unwrap().keys().collect(), "{name}");
    let status = &schema["properties"]["status"];
    if let Some(words) = status["enum"].as_array() {
        assert!(words.contains(&written["status"]), "{name}");
    }
}

#[test]
fn what_is_described_is_what_is_read_and_written() {
    let document = whole();
    expect_command::<CreateOrder>(&document, "CreateOrder", &orders::example());
    expect_command::<CreatePayment>(&document, "CreatePayment", &payments::example());
    // The path names the payment.
    expect_command::<Asking>(&document, "CreateRefund", &refunds::example());
    let (reference, currency) = ("A".to_owned(), "EUR".to_owned());
    let refund = Refund {
        id: Uuid::nil(),
        payment_id: Uuid::nil(),
        status: "failed".to_owned(),
        amount: 1,
        currency: currency.clone(),
        failure_code: Some("card_expired".to_owned()),
    };
    expect_written(&document, "Refund", refund);
    let order = Order {
        id: Uuid::nil(),
        status: "placed".to_owned(),
        reference: reference.clone(),
        amount: 1,
        currency: currency.clone(),
    };
    expect_written(&document, "Order", order);
    let decline_code = Some("card_declined".to_owned());
    let status = "declined".to_owned();
    expect_written(
        &document,
        "Payment",
        Payment { id: Uuid::nil(), status, reference, amount: 1, currency, decline_code },
    );
}
