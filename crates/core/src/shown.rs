//! How commands show what they found: as JSON, or in lines for people.

use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// JSON for people and programs, with a line end.
#[must_use]
pub fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// One line per value that is there, each with its path.
#[must_use]
pub fn lines(value: &Value) -> String {
    fn collect(path: &str, value: &Value, lines: &mut Vec<String>) {
        let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        match value {
            Value::Null => {}
            Value::Object(members) => {
                members.iter().for_each(|(name, value)| collect(&below(name), value, lines));
            }
            Value::Array(values) => {
                values
                    .iter()
                    .enumerate()
                    .for_each(|(at, value)| collect(&below(&at.to_string()), value, lines));
            }
            Value::String(value) => lines.push(format!("{path}: {}\n", one_line(value))),
            value => lines.push(format!("{path}: {value}\n")),
        }
    }
    let mut lines = Vec::new();
    collect("", value, &mut lines);
    lines.concat()
}

/// Text that cannot break a line, whoever wrote it.
#[must_use]
pub fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// An instant in RFC 3339; empty for years that no row of ours holds.
#[must_use]
pub fn instant(at: OffsetDateTime) -> String {
    at.format(&Rfc3339).unwrap_or_default()
}

/// A number of seconds in the unit that a person would choose.
#[must_use]
pub fn age(seconds: i64) -> String {
    match seconds {
        ..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ages_are_for_people() {
        let ages = [0, 119, 120, 7199, 7200, 172_799, 172_800].map(age);
        assert_eq!(ages, ["0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 d"]);
    }

    #[test]
    fn lines_name_what_is_there() {
        let value = json!({"a": {"b": 1, "c": null}, "d": [{"e": "x\ny"}]});
        assert_eq!(lines(&value), "a.b: 1\nd.0.e: x y\n");
    }
}
