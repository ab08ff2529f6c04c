//! Which metrics an expression in `PromQL` asks for. It is for promtool to say whether it is one.

use std::collections::BTreeSet;

/// Words that stand where a metric could.
const WORDS: [&str; 19] = [
    "and",
    "or",
    "unless",
    "offset",
    "bool",
    "inf",
    "nan",
    "sum",
    "min",
    "max",
    "avg",
    "count",
    "group",
    "stddev",
    "stdvar",
    "topk",
    "bottomk",
    "quantile",
    "count_values",
];
/// Words that a list of labels follows.
const LISTS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];

/// The names of the metrics.
pub(super) fn metrics(expr: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut rest = expr;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' | '\'' | '`' => quoted(rest, first),
            '{' => until(rest, '}'),
            '[' => until(rest, ']'),
            // A number, or a duration.
            '0'..='9' => rest.find(|c: char| !c.is_alphanumeric() && c != '.').unwrap_or(rest.len()),
            c if is_name(c) => {
                let end = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
                let name = &rest[..end];
                let after = rest[end..].trim_start();
                if LISTS.contains(&name) {
                    end + until(&rest[end..], ')')
                } else {
                    if !after.starts_with('(') && !WORDS.contains(&name) {
                        found.insert(name.to_owned());
                    }
                    end
                }
            }
            c => c.len_utf8(),
        };
        rest = &rest[length..];
    }
    found
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// How far it is to the end of a string, its quotes included.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// How far it is to an end outside of strings, that end included.
fn until(text: &str, end: char) -> usize {
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        match c {
            '"' | '\'' => at += quoted(&text[at..], c),
            c if c == end => return at + 1,
            c => at += c.len_utf8(),
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(expr: &str) -> Vec<String> {
        metrics(expr).into_iter().collect()
    }

    #[test]
    fn finds_metrics_and_nothing_else() {
        assert_eq!(
            names("max by (group) (a_b{x=\"c}d\", y=~'e'}) > 10 and deriv(f[15m:30s]) > 0"),
            ["a_b", "f"]
        );
        assert_eq!(
            names("(count by (g) (up{d=~\"r|s\"}) unless on (g) (max by (g) (up2) == 1)) or absent(up3)"),
            ["up", "up2", "up3"]
        );
        assert_eq!(names("histogram_quantile(0.99, sum by (g, le) (rate(h_bucket[5m])))"), ["h_bucket"]);
        assert_eq!(names("a == 0 and ignoring (state) b{x='1'} > 0"), ["a", "b"]);
        assert_eq!(names("time() - max(c) offset 5m"), ["c"]);
    }
}
