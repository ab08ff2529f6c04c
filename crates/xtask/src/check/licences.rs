//! The licences of everything that we build upon.

use std::collections::BTreeMap;

use super::graph::Graph;

/// Licences that oblige whoever ships a binary to no more than a notice.
const ALLOWED: [&str; 11] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Zlib",
];

/// Names every package whose licence is not one of the allowed.
pub(crate) fn faults(graph: &Graph) -> Vec<String> {
    let mut faults = BTreeMap::new();
    for (at, path) in graph.breadth_first(graph.ours()) {
        let package = &graph.packages[at];
        let verdict = match package.licence.as_deref() {
            None => Err("no licence".to_owned()),
            Some(text) if package.ours || allows(text) == Some(true) => Ok(()),
            Some(text) => Err(format!("the licence {text}")),
        };
        if let Err(what) = verdict {
            faults.entry(path.to_string()).or_insert(format!("`allowed licences`: {path} has {what}"));
        }
    }
    faults.into_values().collect()
}

/// Whether an SPDX expression can be satisfied by allowed licences alone; none if it is no expression.
fn allows(text: &str) -> Option<bool> {
    // Before SPDX, packages wrote a slash for OR.
    let text = text.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = text.split_whitespace().collect::<Vec<_>>().into_iter().peekable();
    let verdict = any(&mut words)?;
    words.next().is_none().then_some(verdict)
}

type Words<'a> = std::iter::Peekable<std::vec::IntoIter<&'a str>>;

fn any(words: &mut Words<'_>) -> Option<bool> {
    let mut verdict = all(words)?;
    while words.next_if_eq(&"OR").is_some() {
        verdict |= all(words)?;
    }
    Some(verdict)
}

fn all(words: &mut Words<'_>) -> Option<bool> {
    let mut verdict = one(words)?;
    while words.next_if_eq(&"AND").is_some() {
        verdict &= one(words)?;
    }
    Some(verdict)
}

fn one(words: &mut Words<'_>) -> Option<bool> {
    let word = words.next()?;
    if word == "(" {
        let verdict = any(words)?;
        return (words.next()? == ")").then_some(verdict);
    }
    if ["OR", "AND", "WITH", ")"].contains(&word) {
        return None;
    }
    if words.next_if_eq(&"WITH").is_some() {
        let name = format!("{word} WITH {}", words.next()?);
        return Some(ALLOWED.contains(&name.as_str()));
    }
    Some(ALLOWED.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::graph;
    use super::*;

    #[test]
    fn reads_expressions() {
        for (text, verdict) in [
            ("MIT", Some(true)),
            ("GPL-3.0-only", Some(false)),
            ("MIT OR GPL-3.0-only", Some(true)),
            ("MIT AND GPL-3.0-only", Some(false)),
            ("Unlicense/MIT", Some(true)),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", Some(true)),
            ("GPL-2.0-only OR MIT AND ISC", Some(true)),
            ("(GPL-2.0-only OR MIT) AND AGPL-3.0", Some(false)),
            ("Apache-2.0 WITH LLVM-exception OR GPL-2.0-only", Some(true)),
            ("GPL-2.0-only WITH Classpath-exception-2.0", Some(false)),
            ("(MIT", None),
            ("MIT ISC", None),
            ("MIT OR", None),
            ("", None),
        ] {
            assert_eq!(allows(text), verdict, "{text}");
        }
    }

    #[test]
    fn names_the_package_and_the_way_to_it() {
        let mut graph = graph("semel-core: sqlx\nsqlx: viral\nsemel-api: bare");
        let mut set = |name: &str, licence: Option<&str>| {
            let package = graph.packages.iter_mut().find(|package| package.name == name);
            package.unwrap().licence = licence.map(str::to_owned);
        };
        set("viral", Some("AGPL-3.0-only"));
        set("bare", None);
        assert_eq!(
            faults(&graph),
            [
                "`allowed licences`: semel-api → bare has no licence",
                "`allowed licences`: semel-core → sqlx → viral has the licence AGPL-3.0-only"
            ]
        );
    }
}
