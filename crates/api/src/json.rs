//! Reading a command from JSON: what is wrong and where, but never what the client sent.

use serde::de::DeserializeOwned;
use serde_json::error::Category;

/// A body that is no such command.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{field}: {reason}")]
pub(crate) struct InvalidBody {
    /// Path of the field; empty for the body as a whole.
    pub(crate) field: String,
    /// What is wrong with it.
    pub(crate) reason: String,
}

impl InvalidBody {
    fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }
}

/// Reads one JSON object and nothing after it.
///
/// Doubled and unknown fields, floats for whole numbers and deep nesting are refused by the types that it is read into.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, InvalidBody> {
    // An array would be read as the fields in order.
    if body.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return Err(InvalidBody::new("", "must be a JSON object"));
    }
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| invalid(error.path().iter().map(ToString::to_string).collect(), error.inner()))?;
    reader.end().map_err(|error| invalid(Vec::new(), &error))?;
    Ok(value)
}

fn invalid(mut path: Vec<String>, error: &serde_json::Error) -> InvalidBody {
    if error.classify() != Category::Data {
        return InvalidBody::new(
            "",
            format!("is not JSON at line {}, column {}", error.line(), error.column()),
        );
    }
    // The library tells these apart only in its text. What it quotes of the body is dropped.
    let text = error.to_string();
    if text.starts_with("unknown field ") {
        let name = path.pop().unwrap_or_default();
        if !is_presentable(&name) {
            return InvalidBody::new(path.join("."), "has a field that is not known here");
        }
        path.push(name);
        return InvalidBody::new(path.join("."), "is not known here");
    }
    // Names of these are our own.
    let named = |kind: &str| Some(text.strip_prefix(kind)?.split_once('`')?.0.to_owned());
    if let Some(name) = named("missing field `") {
        path.push(name);
        return InvalidBody::new(path.join("."), "is missing");
    }
    if let Some(name) = named("duplicate field `") {
        if path.last() != Some(&name) {
            path.push(name);
        }
        return InvalidBody::new(path.join("."), "must stand there once");
    }
    let expected = text.rsplit_once(", expected ").map_or("", |(_, expected)| expected);
    let expected = expected.split_once(" at line ").map_or(expected, |(expected, _)| expected);
    let reason = match expected {
        "" => "is not acceptable".to_owned(),
        "i64" | "u64" | "i32" | "u32" => "must be a whole number that fits".to_owned(),
        expected => format!("must be {expected}"),
    };
    InvalidBody::new(path.join("."), reason)
}

/// Says whether a name that the client made up may be shown: one that looks like a field's, not like data.
fn is_presentable(name: &str) -> bool {
    name.len() <= 63
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.bytes().all(|b| b.is_ascii_alphabetic() || b == b'_')
}

#[cfg(test)]
mod tests {
    use semel_payments::orders::CreateOrder;

    use super::*;

    fn refused(body: impl AsRef<[u8]>) -> (String, String) {
        let error = parse::<CreateOrder>(body.as_ref()).unwrap_err();
        (error.field, error.reason)
    }

    #[test]
    fn names_the_field_and_what_is_wrong() {
        for (body, field, reason) in [
            (r#"{"reference":"A","amount":1}"#, "currency", "is missing"),
            (
                r#"{"reference":"A","amount":1.0,"currency":"EUR"}"#,
                "amount",
                "must be a whole number that fits",
            ),
            (
                r#"{"reference":"A","amount":1e2,"currency":"EUR"}"#,
                "amount",
                "must be a whole number that fits",
            ),
            (
                r#"{"reference":"A","amount":"1","currency":"EUR"}"#,
                "amount",
                "must be a whole number that fits",
            ),
            (r#"{"amount":99999999999999999999}"#, "amount", "must be a whole number that fits"),
            (r#"{"amount":9223372036854775808}"#, "amount", "must be a whole number that fits"),
            (r#"{"reference":null}"#, "reference", "must be a string"),
            (r#"{"amount":1,"amount":1}"#, "amount", "must stand there once"),
            (r#"{"amount":1,"note":1}"#, "note", "is not known here"),
            (r#"{"4111111111111111":1}"#, "", "has a field that is not known here"),
            (r#"{"a`b":1}"#, "", "has a field that is not known here"),
            ("[\"A\",1,\"EUR\"]", "", "must be a JSON object"),
            ("", "", "must be a JSON object"),
            ("null", "", "must be a JSON object"),
            ("{", "", "is not JSON at line 1, column 1"),
            (r#"{"reference":"A","amount":1,"currency":"EUR"} x"#, "", "is not JSON at line 1, column 47"),
        ] {
            assert_eq!(refused(body), (field.to_owned(), reason.to_owned()), "{body}");
        }
    }

    #[test]
    fn refuses_bytes_that_are_no_text_and_nesting_without_end() {
        refused(b"{\"reference\":\"\xff\"}");
        refused("\u{feff}{}");
        let deep = "[".repeat(30_000);
        assert_eq!(refused(format!("{{\"reference\":{deep}")).0, "reference");
        assert_eq!(refused(format!("{{\"unknown\":{deep}")).0, "unknown");
    }

    #[test]
    fn shows_nothing_of_what_the_client_sent() {
        for body in [
            r#"{"reference":4242,"amount":1}"#,
            r#"{"amount":"4242"}"#,
            r#"{"reference":"4242""#,
            r#"{"amount":", expected 4242"}"#,
            r#"{"x4242":1}"#,
        ] {
            let (field, reason) = refused(body);
            assert!(!format!("{field} {reason}").contains("4242"), "{body}: {field} {reason}");
        }
    }

    #[test]
    fn white_space_and_the_order_of_fields_do_not_matter() {
        let plain = parse::<CreateOrder>(br#"{"reference":"A","amount":1,"currency":"EUR"}"#).unwrap();
        let spaced =
            parse::<CreateOrder>(b"\r\n { \"currency\" : \"EUR\",\t\"amount\":1, \"reference\":\"A\" } \n")
                .unwrap();
        assert_eq!(plain, spaced);
    }
}
