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
    #[serde(default)]
    alert_rule_test: Vec<Asked>,
}

/// What is asked of an alert at some time.
#[derive(Deserialize)]
struct Asked {
    alertname: String,
    #[serde(default)]
    exp_alerts: Vec<serde_json::Value>,
}

impl Test {
    /// Whether it asks for this alert, and each time for some, or each time for none.
    fn asks(&self, alert: &str, fires: bool) -> bool {
        let mut asked = self.alert_rule_test.iter().filter(|asked| asked.alertname == alert).peekable();
        asked.peek().is_some() && asked.all(|asked| asked.exp_alerts.is_empty() != fires)
    }
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
    let mut faults = Faults::new();
    for rule in rules.groups.into_iter().flat_map(|group| group.rules) {
        let name = rule.alert.clone().or(rule.record).unwrap_or_default();
        faults.extend(unknown(&name, &rule.expr, known));
        let Some(alert) = rule.alert else { continue };
        for (case, fires) in [("fires", true), ("is silent", false)] {
            match tests.tests.iter().find(|test| test.name == format!("{alert} {case}")) {
                None => faults.push(format!("{alert}: no test is named `{alert} {case}`")),
                Some(test) if !test.asks(&alert, fires) => {
                    faults.push(format!("{alert}: the test `{alert} {case}` does not ask for that"));
                }
                Some(_) => {}
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
    const TESTS: &str = "tests: [{ name: A fires, alert_rule_test: [{ alertname: A, exp_alerts: [{}] }] }, { name: A is silent, alert_rule_test: [{ alertname: A, exp_alerts: [] }] }]";

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
        let loud = TESTS.split_once(", { name: A is").unwrap().0.to_owned() + "]";
        assert_eq!(judged(RULES, &loud), ["A: no test is named `A is silent`"]);
    }

    #[test]
    fn a_test_asks_for_what_its_name_says() {
        let said = |case| format!("A: the test `A {case}` does not ask for that");
        assert_eq!(judged(RULES, &TESTS.replace("[{}]", "[]")), [said("fires")]);
        assert_eq!(judged(RULES, &TESTS.replace("exp_alerts: []", "exp_alerts: [{}]")), [said("is silent")]);
        let other = TESTS.replace("alertname: A", "alertname: B");
        assert_eq!(judged(RULES, &other).len(), 2, "of another alert");
        assert_eq!(judged(RULES, "tests: [{ name: A fires }, { name: A is silent }]").len(), 2, "of none");
    }
}
