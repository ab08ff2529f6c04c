//! What the documents promise is held against the tests that they name, and the contract's table against the contract.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::sources;
use crate::workspace::Workspace;

/// The documents that name tests, as `file.rs::name`.
const DOCUMENTS: [&str; 2] = ["docs/guarantees.md", CONFORMANCE];
/// The contract of idempotency keys, line by line.
const CONFORMANCE: &str = "docs/conformance.md";
/// How many rules it has.
const RULES: usize = 23;
/// A folder with a page per kind of problem.
const PROBLEMS: &str = "docs/errors";

/// Names each promise whose test is not there, and each line of the contract that is missing.
pub(crate) fn faults(workspace: &Workspace) -> Result<Vec<String>> {
    let read =
        |path: &str| fs::read_to_string(workspace.root.join(path)).with_context(|| format!("reading {path}"));
    let mut faults = Vec::new();
    for document in DOCUMENTS {
        for (file, name) in named(&read(document)?) {
            let source = fs::read_to_string(workspace.root.join(file)).unwrap_or_default();
            if !is_test(&source, name) {
                faults.push(format!("{document}: there is no test {file}::{name}"));
            }
        }
    }
    let conformance = read(CONFORMANCE)?;
    faults.extend(
        missing_rules(&conformance).into_iter().map(|rule| format!("{CONFORMANCE}: rule {rule} is missing")),
    );
    faults.extend(
        empty_cells(&conformance).into_iter().map(|line| format!("{CONFORMANCE}: a cell is empty: {line}")),
    );
    for path in sources::files(workspace)?.iter().filter(|path| path.parent() == Some(Path::new(PROBLEMS))) {
        let kind = path.file_stem().unwrap_or_default().to_string_lossy();
        if kind != "README" && !conformance.contains(&format!("`{kind}`")) {
            faults.push(format!("{CONFORMANCE}: no answer is a {kind}"));
        }
    }
    Ok(faults)
}

/// The tests that a text names, in backticks.
fn named(text: &str) -> BTreeSet<(&str, &str)> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter_map(|quoted| quoted.split_once("::").filter(|(file, _)| is_rust(file))).collect()
}

fn is_rust(file: &str) -> bool {
    Path::new(file).extension().is_some_and(|extension| extension == "rs")
}

/// Whether a function of this name is there, and is run as a test.
fn is_test(source: &str, name: &str) -> bool {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let is_it = |line: &str| {
        let function = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
        function.and_then(|rest| rest.split(['(', '<']).next()) == Some(name)
    };
    let found = lines.iter().position(|line| is_it(line));
    found.is_some_and(|at| {
        let attributes = lines[..at].iter().rev().take_while(|line| line.starts_with("#["));
        let attributes: Vec<_> = attributes.collect();
        let is_run =
            attributes.iter().any(|line| line.starts_with("#[test]") || line.starts_with("#[tokio::test"));
        is_run && !attributes.iter().any(|line| line.starts_with("#[ignore"))
    })
}

/// The rules without a line, or whose line says nothing of tests over HTTP.
fn missing_rules(conformance: &str) -> Vec<usize> {
    let has_line = |rule: usize| {
        conformance.lines().any(|line| {
            let mut cells = line.trim_start_matches('|').split(" | ");
            let (number, tests) = (cells.next(), cells.nth(1));
            number.is_some_and(|cell| cell.trim() == rule.to_string())
                && tests.is_some_and(|cell| !cell.trim_matches(['|', ' ']).is_empty())
        })
    };
    (1..=RULES).filter(|&rule| !has_line(rule)).collect()
}

/// What stands first in each line of a table with an empty cell: where there is no test, the cell says why.
fn empty_cells(conformance: &str) -> Vec<&str> {
    let lines = conformance.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'));
    let lines = lines.filter(|line| !line.trim_start().starts_with("| rule "));
    let is_empty = |line: &&str| line.split('|').any(|cell| cell.trim().is_empty());
    lines.filter(is_empty).map(|line| line.split('|').next().unwrap_or_default().trim()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_tests_that_a_text_names() {
        let text = "| a | `x/y.rs::one`<br>`x/y.rs::two` | `Path::of` and `z.rs` |";
        assert_eq!(named(text), [("x/y.rs", "one"), ("x/y.rs", "two")].into());
    }

    #[test]
    fn a_test_is_a_function_that_is_run() {
        let source = "#[test]\nfn one() {}\n\n    #[tokio::test(flavor = \"multi_thread\")]\n    async fn two() -> Result<()> {\n\
                      fn three() {}\n#[test]\n#[ignore]\nfn four() {}\n#[test]\nfn sixth() {}";
        let is = |name| is_test(source, name);
        assert_eq!(
            [is("one"), is("two"), is("three"), is("four"), is("six")],
            [true, true, false, false, false]
        );
    }

    #[test]
    fn each_rule_has_a_line_that_names_something() {
        let lines: Vec<_> = (1..=RULES).map(|rule| format!("| {rule} | so it is | `a.rs::b` | |")).collect();
        let whole = lines.join("\n");
        assert_eq!(missing_rules(&whole), [0_usize; 0]);
        assert_eq!(missing_rules(&whole.replace("| 7 | so it is | `a.rs::b` |", "| 7 | so it is | |")), [7]);
        assert_eq!(missing_rules(&whole.replace("| 23 |", "| 24 |")), [23]);
    }

    #[test]
    fn a_cell_without_a_test_says_why() {
        let page = "text\n\n| | rule | tests |\n|---|---|---|\n| 1 | so it is | `a.rs::b` |\n| 2 | so | the engine's |";
        assert_eq!(empty_cells(page), [""; 0]);
        assert_eq!(empty_cells(&page.replace("the engine's", "")), ["2"]);
        assert_eq!(empty_cells(&page.replace(" the engine's ", "")), ["2"]);
    }
}
