//! The API as others call it: gRPC from Python, by what the interface says alone, and HTTP by curl.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::net::unique_name;
use semel_tests::polyglot::Language;
use semel_tests::process::Daemon;
use semel_tests::services::{Services, on_path};
use semel_tests::skip::skip;
use semel_tests::system::{Place, Running};
use serde_json::{Value, json};

/// How long a caller may take.
const LIMIT: Duration = Duration::from_mins(1);

/// An API with a provider, and who calls it.
struct Stage {
    place: Place,
    api: Running,
    _provider: Running,
    descriptors: PathBuf,
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.descriptors);
    }
}

impl Stage {
    async fn start(name: &str) -> Result<Self> {
        let place = Place::make(&Services::from_env()?).await?;
        let provider = place.provider(&format!("{name}-provider"), &[]).await?;
        let api = place.api(&format!("{name}-api"), &[]).await?;
        let descriptors = std::env::temp_dir().join(unique_name("semel_descriptors"));
        std::fs::write(&descriptors, semel_proto::API_DESCRIPTORS)?;
        Ok(Self { place, api, _provider: provider, descriptors })
    }

    fn address(&self) -> Result<String> {
        Ok(self.api.address.context("an API without an address")?.to_string())
    }

    /// Describes a call of the payments service with this credential and key.
    fn call(&self, method: &str, key: Option<&str>, request: &Value) -> Value {
        let mut metadata = vec![("authorization", format!("Bearer {}", self.place.token))];
        metadata.extend(key.map(|key| ("idempotency-key", key.to_owned())));
        json!({ "method": format!("semel.payments.v1.Payments/{method}"), "request": request, "metadata": metadata })
    }

    /// Has Python make these calls; returns what each was answered.
    async fn python(&self, calls: &[Value]) -> Result<Vec<Value>> {
        let script = Language::Python.install().await?.script("polyglot-call", "call");
        let arguments = script.arg(&self.descriptors).arg(json!(calls).to_string());
        let caller = arguments.env("ADDRESS", self.address()?).start().await?;
        let status = caller.wait_exit(LIMIT).await?;
        ensure!(status.success(), "the caller left with {status}: {}", caller.lines().join("\n"));
        let answers: Vec<Value> =
            caller.lines().iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        ensure!(answers.len() == calls.len(), "{}", caller.lines().join("\n"));
        Ok(answers)
    }

    /// Has curl place this order over one version of HTTP; returns status, header lines in small letters, and body.
    async fn curl(&self, version: &str, key: &str, order: &Value) -> Result<(String, Vec<String>, String)> {
        let program = on_path("curl").context("curl was found a moment ago")?;
        let url = format!("http://{}/v1/orders", self.address()?);
        let curl = Daemon::command("polyglot-curl", program)
            .args(["--silent", "--show-error", "--include", "--noproxy", "*", "--max-time", "30", version])
            .args(["--header", &format!("Authorization: Bearer {}", self.place.token)])
            .args(["--header", &format!("Idempotency-Key: {key}")])
            .args(["--json", &order.to_string(), &url])
            .start()
            .await?;
        let status = curl.wait_exit(LIMIT).await?;
        let lines = curl.lines();
        ensure!(status.success(), "curl left with {status}: {}", lines.join("\n"));
        let end = lines.iter().position(|line| line.trim().is_empty()).context("no end of the head")?;
        let head = lines[1..end].iter().map(|line| line.trim().to_lowercase()).collect();
        let status = lines[0].split(' ').nth(1).unwrap_or_default().to_owned();
        Ok((status, head, lines[end + 1..].join("\n")))
    }
}

fn order(amount: i64) -> Value {
    json!({ "reference": "A-1 Übergröße", "amount": amount, "currency": "EUR" })
}

fn header<'a>(head: &'a [String], name: &str) -> Option<&'a str> {
    head.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[tokio::test]
async fn python_calls_the_api_by_its_interface_alone() -> Result<()> {
    let stage = Stage::start("python").await?;
    let payment =
        |source: &str| json!({ "reference": "A-1", "amount": 1250, "currency": "EUR", "source": source });
    let unauthenticated = json!({
        "method": "semel.payments.v1.Payments/CreateOrder", "request": order(1200),
        "metadata": [["authorization", "Bearer nobody"], ["idempotency-key", "k"]],
    });
    let mut doubled = stage.call("CreateOrder", Some("k"), &order(1200));
    doubled["metadata"].as_array_mut().context("an array")?.push(json!(["idempotency-key", "k"]));
    let answers = stage
        .python(&[
            json!({ "method": "grpc.health.v1.Health/Check", "request": {}, "metadata": [] }),
            stage.call("CreateOrder", Some("k"), &order(1200)),
            stage.call("CreateOrder", Some("k"), &order(1200)),
            stage.call("CreateOrder", Some("k"), &order(1300)),
            stage.call("CreateOrder", None, &order(1200)),
            doubled,
            unauthenticated,
            stage.call("CreateOrder", Some("bad"), &order(0)),
            stage.call("CreatePayment", Some("k"), &payment("tok_good")),
            stage.call("CreatePayment", Some("declined"), &payment("tok_declined")),
            stage.call("CreatePayment", Some("declined"), &payment("tok_declined")),
            stage.call("GetIdempotencyKey", Some("k"), &json!({ "operation": "orders.create" })),
            stage.call("ListOrders", None, &json!({ "limit": 10 })),
        ])
        .await?;
    let [
        health,
        first,
        again,
        other,
        missing,
        doubled,
        nobody,
        bad,
        paid,
        declined,
        declined_again,
        told,
        listed,
    ] = answers.as_slice()
    else {
        anyhow::bail!("{answers:?}");
    };
    assert_eq!(health["message"]["status"], "SERVING");
    assert_eq!((&first["code"], &first["message"]["status"]), (&json!("OK"), &json!("STATUS_PLACED")));
    assert_eq!(first["message"]["reference"], "A-1 Übergröße");
    assert!(first["metadata"]["idempotency-key-expires"].is_string(), "{first}");
    assert_eq!(first["metadata"]["idempotent-replayed"], Value::Null);
    assert_eq!(
        (&again["message"], &again["metadata"]["idempotent-replayed"]),
        (&first["message"], &json!("true"))
    );
    assert_eq!(again["metadata"]["original-request-id"], first["metadata"]["request-id"]);
    for (answer, code, reason) in [
        (other, "FAILED_PRECONDITION", "IDEMPOTENCY_KEY_REUSED"),
        (missing, "INVALID_ARGUMENT", "IDEMPOTENCY_KEY_MISSING"),
        (doubled, "INVALID_ARGUMENT", "IDEMPOTENCY_KEY_INVALID"),
        (nobody, "UNAUTHENTICATED", "UNAUTHENTICATED"),
        (bad, "INVALID_ARGUMENT", "REQUEST_INVALID"),
        (declined, "FAILED_PRECONDITION", "PAYMENT_DECLINED"),
    ] {
        let info = &answer["details"]["ErrorInfo"];
        let said = [&answer["code"], &info["reason"], &info["domain"]];
        assert_eq!(said, [code, reason, "payments.semel"], "{answer}");
        assert_eq!(answer["details"]["RetryInfo"], Value::Null, "{answer}");
        assert!(answer["metadata"]["request-id"].is_string(), "{answer}");
    }
    assert_eq!(bad["details"]["BadRequest"]["field_violations"][0]["field"], "amount");
    assert_eq!(paid["message"]["status"], "STATUS_SUCCEEDED");
    assert_eq!(declined["details"]["ErrorInfo"]["metadata"]["payment_decline_code"], "card_declined");
    assert_eq!(declined_again["details"], declined["details"]);
    assert_eq!(declined_again["metadata"]["idempotent-replayed"], "true");
    assert_eq!(
        (&told["message"]["state"], &told["message"]["http_status"]),
        (&json!("STATE_COMPLETED"), &json!(201))
    );
    assert_eq!(listed["message"]["orders"], json!([first["message"]]));
    refunds(&stage, paid["message"]["id"].as_str().context("no id")?).await
}

/// Gives back 500 of a payment of 1250, and then asks for more than is left.
async fn refunds(stage: &Stage, payment: &str) -> Result<()> {
    let refund = |key: &str, amount: i64| {
        stage.call("CreateRefund", Some(key), &json!({ "payment_id": payment, "amount": amount }))
    };
    let list = stage.call("ListRefunds", None, &json!({ "payment_id": payment, "limit": 10 }));
    let calls = [refund("r", 500), refund("r", 500), refund("r", 501), refund("more", 1000), list];
    let answers = stage.python(&calls).await?;
    let [first, again, other, more, listed] = answers.as_slice() else { anyhow::bail!("{answers:?}") };
    assert_eq!(first["message"]["status"], "STATUS_SUCCEEDED", "{first}");
    // As JSON has whole numbers of 64 bits.
    assert_eq!(
        (&first["message"]["amount"], &first["message"]["payment_id"]),
        (&json!("500"), &json!(payment))
    );
    assert_eq!(again["message"], first["message"]);
    assert_eq!(again["metadata"]["idempotent-replayed"], "true");
    for (answer, reason) in [(other, "IDEMPOTENCY_KEY_REUSED"), (more, "REFUND_EXCEEDS_PAYMENT")] {
        let said = [&answer["code"], &answer["details"]["ErrorInfo"]["reason"]];
        assert_eq!(said, ["FAILED_PRECONDITION", reason], "{answer}");
    }
    let refunds = listed["message"]["refunds"].as_array().context("no list")?;
    let stand: Vec<_> = refunds.iter().map(|refund| &refund["status"]).collect();
    assert_eq!(stand, ["STATUS_REFUSED", "STATUS_SUCCEEDED"]);
    let get = stage.call("GetRefund", None, &json!({ "id": first["message"]["id"] }));
    assert_eq!(stage.python(&[get]).await?[0]["message"], first["message"]);
    Ok(())
}

#[tokio::test]
async fn curl_and_python_replay_each_others_orders() -> Result<()> {
    if on_path("curl").is_none() {
        return Ok(skip("curl_and_python_replay_each_others_orders", "there is no curl")?);
    }
    let stage = Stage::start("curl").await?;
    let (status, head, body) = stage.curl("--http1.1", "curl", &order(1200)).await?;
    assert_eq!((status.as_str(), header(&head, "idempotent-replayed")), ("201", None), "{head:?} {body}");
    let placed: Value = serde_json::from_str(&body)?;
    let (status, again, bytes) = stage.curl("--http2-prior-knowledge", "curl", &order(1200)).await?;
    assert_eq!((status.as_str(), header(&again, "idempotent-replayed")), ("201", Some("true")), "{again:?}");
    assert_eq!(bytes, body);
    for name in ["location", "content-type", "idempotency-key-expires"] {
        assert_eq!(header(&again, name), header(&head, name), "{name}");
    }
    let (status, _, problem) = stage.curl("--http1.1", "curl", &order(1300)).await?;
    assert_eq!(status, "422");
    assert!(problem.contains("/idempotency-key-reused\""), "{problem}");

    let calls = ["curl", "python"].map(|key| stage.call("CreateOrder", Some(key), &order(1200)));
    let [replayed, fresh] = &stage.python(&calls).await?[..] else { anyhow::bail!("two answers") };
    assert_eq!(replayed["message"]["id"], placed["id"]);
    assert_eq!(replayed["metadata"]["original-request-id"].as_str(), header(&head, "request-id"));
    let (status, head, body) = stage.curl("--http1.1", "python", &order(1200)).await?;
    assert_eq!((status.as_str(), header(&head, "idempotent-replayed")), ("201", Some("true")), "{head:?}");
    assert_eq!(header(&head, "original-request-id"), fresh["metadata"]["request-id"].as_str());
    assert_eq!(serde_json::from_str::<Value>(&body)?["id"], fresh["message"]["id"]);
    Ok(())
}
