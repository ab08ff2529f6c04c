//! A request's trace, from its header to the consumer's message; and its id, in its answer and in the log.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_core::trace::TraceContext;
use semel_tests::services::Services;
use semel_tests::system::{Place, Running};
use semel_tests::wait::eventually;
use serde_json::json;

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const SOON: Duration = Duration::from_secs(30);

/// Asks for something with a `traceparent`; returns the id that the answer names the request by.
async fn ask(
    place: &Place,
    api: &Running,
    path: &str,
    key: &str,
    amount: i64,
    trace: &str,
) -> Result<String> {
    let address = api.address.context("no address")?;
    let mut body = json!({ "reference": key, "amount": amount, "currency": "EUR" });
    if path == "/v1/payments" {
        body["source"] = json!("tok_good");
    }
    let answer = reqwest::Client::new()
        .post(format!("http://{address}{path}"))
        .bearer_auth(&place.token)
        .header("Idempotency-Key", key)
        .header("traceparent", trace)
        .json(&body)
        .send()
        .await?;
    let id = answer.headers().get("request-id").context("no id")?.to_str()?.to_owned();
    ensure!(answer.status().as_u16() == if amount > 0 { 201 } else { 400 }, "{}", answer.text().await?);
    Ok(id)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_goes_from_the_request_to_the_message_and_a_malformed_one_does_not() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let tap = place.tap().await?;
    let _provider = place.provider("provider", &[]).await?;
    let api = place.api("api", &[]).await?;
    let _relay = place.relay("relay", &[]).await?;
    ask(&place, &api, "/v1/orders", "order", 100, TRACE).await?;
    ask(&place, &api, "/v1/payments", "payment", 100, TRACE).await?;
    ask(&place, &api, "/v1/orders", "malformed", 100, &TRACE.replace("00-", "00_")).await?;
    let messages = eventually("three messages", SOON, || {
        let messages = tap.messages().map_err(|error| error.to_string());
        let outcome = messages.and_then(|all| if all.len() == 3 { Ok(all) } else { Err(format!("{all:?}")) });
        async { outcome }
    })
    .await?;
    for message in messages {
        let expected = (message.payload["reference"] != "malformed").then_some(TRACE);
        let trace = message.headers.get("traceparent").map(String::as_str);
        assert_eq!(trace, expected, "{message:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_found_in_the_log_by_the_id_of_its_answer() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let api = place.api("api", &[("SEMEL_LOG_FORMAT", "json")]).await?;
    let id = ask(&place, &api, "/v1/orders", "refused", 0, TRACE).await?;
    let line = api.daemon.wait_for_line("the refusal", SOON, |line| line.contains(&id)).await?;
    let line: serde_json::Value = serde_json::from_str(&line)?;
    assert_eq!(line["problem"], "request-invalid", "{line}");
    assert_eq!(line["span"]["id"], id.as_str(), "{line}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_goes_on_through_the_ledger_into_its_log_and_its_own_events() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let env = [("SEMEL_LOG_FORMAT", "json"), ("SEMEL_LOG", "info,semel_ledger=debug")];
    let ledger = place.ledger("ledger", &env).await?;
    let tap = place.tap().await?;
    let api = place.api("api", &[]).await?;
    let _relays = [place.relay("relay", &[]).await?, place.ledger_relay("ledger-relay", &[]).await?];
    ask(&place, &api, "/v1/orders", "order", 100, TRACE).await?;

    let asked: TraceContext = TRACE.parse()?;
    let line = ledger.daemon.wait_for_line("the booking", SOON, |line| line.contains("booked")).await?;
    let line: serde_json::Value = serde_json::from_str(&line)?;
    assert_eq!(line["span"]["trace_id"], asked.trace_id(), "{line}");
    let posted = eventually("the ledger's own event", SOON, || {
        let messages = tap.messages().map_err(|error| error.to_string());
        let posted = messages.and_then(|all| {
            let posted = all.iter().find(|message| message.event_type == "LedgerPosted").cloned();
            posted.ok_or_else(|| format!("{all:?}"))
        });
        async { posted }
    })
    .await?;
    let goes_on: TraceContext = posted.headers.get("traceparent").context("no traceparent")?.parse()?;
    assert_eq!(goes_on.trace_id(), asked.trace_id());
    assert_ne!(goes_on.span_id(), asked.span_id());
    assert_eq!(
        line["span"]["span_id"],
        goes_on.span_id(),
        "the event follows from the span that the line stands in"
    );
    Ok(())
}
