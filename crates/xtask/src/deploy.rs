//! `cargo xtask deploy-check`: what can be known of `deploy` without a cluster.
//!
//! The alerts, the dashboards, the chart with each of its example values, the Dockerfile and the compose file, each by the tool
//! that its users' programs are made with ([`tools`]). A tool that cannot be had is said, and leaves a step out; where `CI` is
//! set, that is a failure.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};

use crate::generate::dashboards;
use crate::output;
use crate::workspace::Workspace;

mod alerts;
mod chart;
mod options;
mod promql;
mod tools;

use tools::Tools;

/// What a step comes to: what is wrong.
type Faults = Vec<String>;
type Step<'a> = Box<dyn Fn() -> Result<Faults> + 'a>;

/// Runs every step and sums up.
pub(crate) fn run(workspace: &Workspace) -> Result<ExitCode> {
    let tools = Tools::here()?;
    let known = known_metrics(workspace)?;
    let deploy = workspace.root.join("deploy");
    let steps: [(&str, Step<'_>); 6] = [
        ("alerts", Box::new(|| alerts::faults(workspace, &tools.promtool()?, &known))),
        ("dashboards", Box::new(|| dashboard_faults(workspace, &tools, &known))),
        ("chart", Box::new(|| chart::faults(workspace, &tools))),
        ("rules of the chart", Box::new(|| chart::rule_faults(workspace, &tools))),
        (
            "scrape configuration",
            Box::new(|| {
                let mut command = Command::new(tools.promtool()?);
                said(command.args(["check", "config"]).arg(deploy.join("prometheus/prometheus.yml")))
            }),
        ),
        (
            "Dockerfile and compose file",
            Box::new(|| {
                let mut faults =
                    options::faults(workspace, &fs::read_to_string(deploy.join("compose/compose.yaml"))?)?;
                let dockerfile = fs::read_to_string(deploy.join("docker/Dockerfile"))?;
                let toolchain = fs::read_to_string(workspace.root.join("rust-toolchain.toml"))?;
                faults.extend(compiler_faults(&dockerfile, &toolchain));
                let mut command = Command::new(tools.hadolint()?);
                faults.extend(said(command.arg(deploy.join("docker/Dockerfile")))?);
                Ok(faults)
            }),
        ),
    ];
    let (mut faults, mut left_out) = (0, 0);
    for (name, step) in steps {
        match output::step(name, step) {
            Ok(found) => {
                for fault in &found {
                    output::say(&format!("error: {fault}"));
                }
                faults += found.len();
            }
            Err(error) if error.is::<tools::Missing>() => {
                output::say(&format!("not checked: {name}: {error:#}"));
                left_out += 1;
            }
            Err(error) => {
                output::failure(&error);
                faults += 1;
            }
        }
    }
    output::say(&format!("==> deploy-check: {faults} faults, {left_out} steps left out"));
    let strict = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
    Ok(if faults > 0 || (strict && left_out > 0) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Where Helm is, for the tests that render the chart.
pub(crate) fn helm() -> Result<std::path::PathBuf> {
    Tools::here()?.helm()
}

/// The metrics that a running system has: ours, and the one that Prometheus makes.
fn known_metrics(workspace: &Workspace) -> Result<BTreeSet<String>> {
    let path = workspace.root.join("docs/reference/metrics.md");
    let page = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let mut known = BTreeSet::from(["up".to_owned()]);
    for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
        let mut cells = row.split(" | ");
        let (Some(name), Some(kind)) = (cells.next(), cells.next()) else { continue };
        let name = name.trim_end_matches('`');
        match kind {
            "histogram" => known.extend(["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}"))),
            _ => {
                known.insert(name.to_owned());
            }
        }
    }
    Ok(known)
}

/// Images are built by the compiler that everything is tested with.
fn compiler_faults(dockerfile: &str, toolchain: &str) -> Faults {
    let channel = toolchain.lines().find_map(|line| line.strip_prefix("channel = \"")?.strip_suffix('"'));
    let built = dockerfile.lines().find_map(|line| line.strip_prefix("ARG RUST="));
    if channel.is_some() && built == channel {
        return Faults::new();
    }
    let said = |version: Option<&str>| version.unwrap_or("none").to_owned();
    vec![format!("the Dockerfile takes Rust {}, rust-toolchain.toml {}", said(built), said(channel))]
}

/// The metrics of an expression that nobody emits.
fn unknown(place: &str, expr: &str, known: &BTreeSet<String>) -> Faults {
    let metrics = promql::metrics(expr).into_iter().filter(|metric| !known.contains(metric));
    metrics.map(|metric| format!("{place}: no binary emits {metric}")).collect()
}

fn dashboard_faults(workspace: &Workspace, tools: &Tools, known: &BTreeSet<String>) -> Result<Faults> {
    let promtool = tools.promtool()?;
    let mut faults = Faults::new();
    let mut rules = String::from("groups: [{ name: dashboards, rules: [");
    for dashboard in dashboards::read(workspace)? {
        for query in dashboard.queries() {
            faults.extend(unknown(&format!("dashboard {}", dashboard.uid), &query.expr, known));
            // The query as it is once its variables are filled in.
            let expr = query
                .expr
                .replace("$__rate_interval", "5m")
                .replace("$namespace", ".*")
                .replace("$group", ".+");
            writeln!(rules, "{{ record: q, expr: {} }},", serde_json::Value::from(expr))?;
        }
    }
    let file = tools.scratch("dashboards.yml", &(rules + "]}]\n"))?;
    // Many queries under one name are as good here, and told as duplicates.
    faults.extend(said(Command::new(promtool).args(["check", "rules", "--lint=none"]).arg(file))?);
    Ok(faults)
}

/// What a checker says that does not like what it sees.
fn said(command: &mut Command) -> Result<Faults> {
    let name =
        Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("starting {name}"))?;
    if output.status.success() {
        return Ok(Faults::new());
    }
    let said = [output.stdout, output.stderr].concat();
    Ok(vec![format!("{name}: {}", String::from_utf8_lossy(&said).trim())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_that_no_binary_emits_is_a_fault() {
        let known = known_metrics(&Workspace::locate().unwrap()).unwrap();
        assert!(known.contains("semel_outbox_claim_seconds_bucket"));
        assert!(!known.contains("semel_outbox_claim_seconds"), "a histogram has no series of its own name");
        let fine = "max by (group) (semel_outbox_pending_events{group=~\"$group\"}) > 0";
        assert_eq!(unknown("here", fine, &known), [""; 0]);
        let typo = fine.replace("pending", "pendign");
        assert_eq!(unknown("here", &typo, &known), ["here: no binary emits semel_outbox_pendign_events"]);
    }

    #[test]
    fn images_are_built_by_the_compiler_of_the_tests() {
        let toolchain = "[toolchain]\nchannel = \"1.95.0\"\n";
        assert_eq!(compiler_faults("ARG RUST=1.95.0\nFROM rust:${RUST}\n", toolchain), [""; 0]);
        let said = "the Dockerfile takes Rust 1.95, rust-toolchain.toml 1.95.0";
        assert_eq!(compiler_faults("ARG RUST=1.95\n", toolchain), [said]);
    }

    #[test]
    fn every_query_of_the_dashboards_is_of_metrics_that_exist() {
        let workspace = Workspace::locate().unwrap();
        let known = known_metrics(&workspace).unwrap();
        let dashboards = dashboards::read(&workspace).unwrap();
        assert_eq!(dashboards.len(), 5);
        for query in dashboards.iter().flat_map(dashboards::Dashboard::queries) {
            assert_eq!(unknown("", &query.expr, &known), [""; 0]);
        }
    }
}
