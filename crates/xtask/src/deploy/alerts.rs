//! The alerts: promtool takes them, their tests pass, each has tests and a runbook, and asks for what daemons emit.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::{Faults, said, unknown};
use crate::workspace::Workspace;

#[derive(Deserialize)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
struct Rule {
    alert: Option<String>,
    record: Option<String>,
    expr: String,
    #[serde(default)]
    annotations: Annotations,
}

#[derive(Default, Deserialize)]
struct Annotations {
    summary: Option<String>,
    runbook_url: Option<String>,
}

#[derive(Deserialize)]
struct Tests {
    tests: Vec<Test>,
}

#[derive(Deserialize)]
struct Test {
    name: String,
}

/// Checks the rules that are shipped.
pub(super) fn faults(workspace: &Workspace, promtool: &Path, known: &BTreeSet<String>) -> Result<Faults> {
    let folder = workspace.root.join("deploy/prometheus");
    let (rules, tests) = (folder.join("alerts.yml"), folder.join("alerts-test.yml"));
    let mut faults = said(Command::new(promtool).args(["check", "rules"]).arg(&rules))?;
    faults.extend(said(Command::new(promtool).args(["test", "rules"]).arg(&tests))?);
    let read = |path| fs::read_to_string(path).with_context(|| format!("reading {}", Path::display(path)));
    let runbooks = workspace.root.join("docs/runbooks");
    faults.extend(judge(&read(&rules)?, &read(&tests)?, known, &|name| {
        runbooks.join(format!("{name}.md")).is_file()
    })?);
    Ok(faults)
}

fn judge(
    rules: &str,
    tests: &str,
    known: &BTreeSet<String>,
    has_runbook: &dyn Fn(&str) -> bool,
) -> Result<Faults> {
    let rules: Rules = serde_saphyr::from_str(rules).context("reading the alerts")?;
    let tests: Tests = serde_saphyr::from_str(tests).context("reading the alerts' tests")?;
    let tested: BTreeSet<_> = tests.tests.into_iter().map(|test| test.name).collect();
    let mut faults = Faults::new();
    for rule in rules.groups.into_iter().flat_map(|group| group.rules) {
        let name = rule.alert.clone().or(rule.record).unwrap_or_default();
        faults.extend(unknown(&name, &rule.expr, known));
        let Some(alert) = rule.alert else { continue };
        for case in ["fires", "is silent"] {
            if !tested.contains(&format!("{alert} {case}")) {
                faults.push(format!("{alert}: no test is named `{alert} {case}`"));
            }
        }
        let page = rule.annotations.runbook_url.as_deref().and_then(|url| url.rsplit('/').next());
        match page {
            Some(page) if has_runbook(page) => {}
            Some(page) => faults.push(format!("{alert}: there is no runbook docs/runbooks/{page}.md")),
            None => faults.push(format!("{alert}: it has no runbook_url")),
        }
        if rule.annotations.summary.is_none() {
            faults.push(format!("{alert}: it has no summary"));
        }
    }
    Ok(faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &str = "groups: [{ rules: [{ alert: A, expr: 'up == 0', annotations: { summary: s, runbook_url: 'https://x/a' } }] }]";
    const TESTS: &str = "tests: [{ name: A fires }, { name: A is silent }]";

    fn judged(rules: &str, tests: &str) -> Faults {
        judge(rules, tests, &BTreeSet::from(["up".into()]), &|page| page == "a").unwrap()
    }

    #[test]
    fn an_alert_has_tests_a_runbook_and_metrics_that_exist() {
        assert_eq!(judged(RULES, TESTS), [""; 0]);
        assert_eq!(
            judged(&RULES.replace("x/a", "x/b"), TESTS),
            [format!("A: there is no runbook docs/runbooks/{}.md", "b")]
        );
        assert_eq!(judged(&RULES.replace("runbook_url", "link"), TESTS), ["A: it has no runbook_url"]);
        assert_eq!(judged(&RULES.replace("up ==", "upp =="), TESTS), ["A: no binary emits upp"]);
        assert_eq!(judged(RULES, "tests: [{ name: A fires }]"), ["A: no test is named `A is silent`"]);
    }
}
