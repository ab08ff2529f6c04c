use super::*;

const OLD: &str = "whsec_0123456789abcdef";
const NEW: &str = "whsec_fedcba9876543210";
const BODY: &[u8] = br#"{"id":"evt_1"}"#;
const AT: u64 = 1_700_000_000;

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn sign(secret: &str, at: &str, body: &[u8]) -> String {
    hex(&digest(&SecretString::from(secret), at, body))
}

fn header(secret: &str) -> String {
    format!("t={AT},v1={}", sign(secret, &AT.to_string(), BODY))
}

fn verify(secrets: &str, header: &str, body: &[u8], now: u64) -> Result<(), InvalidSignature> {
    let signed = Signed::read(header, UNIX_EPOCH + Duration::from_secs(now))?;
    secrets.parse::<Secrets>().unwrap().verify(&signed, body)
}

#[test]
fn signs_as_others_do() {
    // RFC 4231, test case 2, of which `.` is no part: key "Jefe", "what do ya want for nothing?".
    let mut mac = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
    mac.update(b"what do ya want for nothing?");
    assert_eq!(
        hex(&mac.finalize().into_bytes()),
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    );
    // By Python's hmac, of "1700000000." and the body.
    assert_eq!(
        header(OLD),
        format!("t={AT},v1=dea1657bd5053cb0f8a75ebf0bd3d22e0cdeb79563b44db6b88864e522fb8bc4")
    );
}

#[test]
fn believes_what_one_of_our_secrets_has_signed() {
    assert_eq!(verify(OLD, &header(OLD), BODY, AT), Ok(()));
    let both = format!("{OLD}\n{NEW}");
    for signed in [OLD, NEW] {
        assert_eq!(verify(&both, &header(signed), BODY, AT), Ok(()), "while one replaces the other");
    }
    let (old, new) = (sign(OLD, &AT.to_string(), BODY), sign(NEW, &AT.to_string(), BODY));
    assert_eq!(verify(NEW, &format!("t={AT},v1={old},v1={new},v0={old}"), BODY, AT), Ok(()));
}

#[test]
fn believes_nothing_else() {
    let wrong = Err(InvalidSignature::Wrong);
    assert_eq!(verify(NEW, &header(OLD), BODY, AT), wrong);
    for body in [&b""[..], br#"{"id":"evt_2"}"#, br#"{"id":"evt_1"} "#, br#"{"id":"evt_1""#] {
        assert_eq!(verify(OLD, &header(OLD), body, AT), wrong, "{body:?}");
    }
    // What was signed is the timestamp as it stands there.
    let moved = header(OLD).replace(&AT.to_string(), &(AT + 1).to_string());
    assert_eq!(verify(OLD, &moved, BODY, AT), wrong);
    let padded = header(OLD).replace(&AT.to_string(), &format!("0{AT}"));
    assert_eq!(verify(OLD, &padded, BODY, AT), wrong);
    // Of another scheme.
    let other = header(OLD).replace("v1=", "v0=");
    assert_eq!(verify(OLD, &format!("{other},v1={}", "0".repeat(64)), BODY, AT), wrong);
}

#[test]
fn believes_nothing_old_and_nothing_from_the_future() {
    for (now, believed) in [
        (AT - 301, Err(InvalidSignature::OutOfTime)),
        (AT - 300, Ok(())),
        (AT + 300, Ok(())),
        (AT + 301, Err(InvalidSignature::OutOfTime)),
    ] {
        assert_eq!(verify(OLD, &header(OLD), BODY, now), believed, "{now}");
    }
    let far = u64::MAX.to_string();
    let header = format!("t={far},v1={}", sign(OLD, &far, BODY));
    assert_eq!(verify(OLD, &header, BODY, AT), Err(InvalidSignature::OutOfTime));
}

#[test]
fn a_header_is_read_strictly() {
    let (at, good) = (AT.to_string(), sign(OLD, &AT.to_string(), BODY));
    for header in [
        String::new(),
        "t".to_owned(),
        format!("v1={good}"),
        format!("t={at}"),
        format!("t={at},v1="),
        format!("t={at},v1={}", &good[1..]),
        format!("t={at},v1={good}0"),
        format!("t={at},v1={}", good.to_uppercase()),
        format!("t={at},v1={}é", &good[2..]),
        format!("t={at},t={at},v1={good}"),
        format!("t=+{at},v1={good}"),
        format!("t= {at},v1={good}"),
        format!("t=,v1={good}"),
        format!("t=99999999999999999999,v1={good}"),
        format!("t={at},v1={good},"),
        format!("t={at}{}", format!(",v1={good}").repeat(9)),
    ] {
        assert_eq!(verify(OLD, &header, BODY, AT), Err(InvalidSignature::Malformed), "{header}");
    }
}

#[test]
fn nothing_prints_a_secret() {
    let secrets: Secrets = format!("{OLD} {NEW}").parse().unwrap();
    assert_eq!(format!("{secrets:?}"), "Secrets(2)");
    for text in ["", "whsec_", "whsec_short", "s3cret_0123456789abcdef", &format!("{OLD} {OLD} {NEW}")] {
        let error = text.parse::<Secrets>().unwrap_err().to_string();
        assert!(!error.contains("short") && !error.contains("s3cret") && !error.contains(OLD), "{error}");
    }
}

fn about(kind: &str, object: &serde_json::Value) -> Result<About, serde_json::Error> {
    let event = serde_json::json!({
        "id": "evt_1", "type": kind, "livemode": false, "created": AT, "data": { "object": object }, "new": {},
    });
    serde_json::from_str::<Event>(&event.to_string()).unwrap().about()
}

#[test]
fn an_event_is_about_a_charge_a_refund_or_something_else() {
    let intent = serde_json::json!({
        "id": "pi_1", "status": "succeeded", "amount": 5, "currency": "eur", "livemode": false,
    });
    let refund = serde_json::json!({ "id": "re_1", "status": "succeeded", "amount": 5, "currency": "eur" });
    for kind in ["payment_intent.succeeded", "payment_intent.canceled", "payment_intent.new"] {
        assert!(matches!(about(kind, &intent), Ok(About::Charge(_))), "{kind}");
    }
    for kind in ["refund.created", "refund.updated", "refund.failed", "charge.refund.updated"] {
        assert!(matches!(about(kind, &refund), Ok(About::Refund(_))), "{kind}");
    }
    for kind in ["charge.refunded", "charge.succeeded", "customer.created"] {
        assert!(matches!(about(kind, &intent), Ok(About::Other)), "{kind}");
    }
    assert!(about("payment_intent.succeeded", &serde_json::json!({ "id": 7 })).is_err());
}
