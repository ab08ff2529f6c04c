//! The chart: Helm takes it with each of its example values, Kubernetes takes what it renders, and wrong values are refused.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::tools::Tools;
use super::{Faults, options, said};
use crate::workspace::Workspace;

/// The oldest Kubernetes that the chart says it is for, and the newest whose schemas can be had.
const KUBERNETES: [&str; 2] = ["1.30", "1.37"];
/// Kinds of other people's operators; the schemas of Kubernetes do not have them.
const FOREIGN: [&str; 3] = ["ScaledObject", "PodMonitor", "PrometheusRule"];

/// Values that are refused beside the smallest ones, and what is said then.
const REFUSED: [(&[&str], &str); 15] = [
    (&["namespace="], "/namespace"),
    (&["groups.payments.secret="], "groups.payments.secret: name the secret"),
    (&["broker.secret="], "broker.secret: name the secret"),
    (&["relya.workers=3"], "additional properties 'relya' not allowed"),
    (&["relay.workers=four"], "got string, want integer"),
    (&["relay.replicas=17"], "17 relays of 4 workers are more than the 64 lanes"),
    (&["api.group=orders"], "groups.orders: there is no such group"),
    (&["api.env.PATH=/"], "does not match pattern"),
    (&["ledger.enabled=true", "ledger.group=payments"], "the ledger has one of its own"),
    (&["relay.autoscaling.by=hpa"], "enable monitoring.podMonitor"),
    (&["groups.payments.relay.autoscaling.by=keda"], "enable monitoring.podMonitor"),
    (&["provider.kind=grpc"], "provider.url: say where"),
    (&["provider.kind=stripe"], "provider.stripe.secret: name the secret"),
    (&["provider.url=https://p:1"], "are for provider.kind grpc"),
    (&["provider.stripe.secret=semel-stripe"], "is for provider.kind stripe"),
];

pub(super) struct Chart<'a> {
    tools: &'a Tools,
    helm: PathBuf,
    folder: PathBuf,
}

impl<'a> Chart<'a> {
    pub(super) fn of(workspace: &Workspace, tools: &'a Tools) -> Result<Self> {
        Ok(Self { tools, helm: tools.helm()?, folder: workspace.root.join("deploy/helm/semel") })
    }

    /// The example values, by name.
    fn examples(&self) -> Result<Vec<PathBuf>> {
        let folder = fs::read_dir(self.folder.join("ci")).context("listing the example values")?;
        let mut files = folder.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        files.sort();
        Ok(files)
    }

    /// Renders the manifests; the error is what Helm says.
    fn render(&self, values: &Path, set: &[&str]) -> Result<Result<String, String>> {
        let mut command = Command::new(&self.helm);
        command
            .args(["template", "semel"])
            .arg(&self.folder)
            .args(["--namespace", "payments", "--values"])
            .arg(values);
        for value in set {
            command.args(["--set", value]);
        }
        let output = command.output().context("starting helm")?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) })
    }

    /// What the schemas of Kubernetes say against manifests.
    fn validate(&self, name: &str, manifests: &str) -> Result<Faults> {
        let file = self.tools.scratch(&format!("{name}.yaml"), manifests)?;
        let mut faults = Faults::new();
        for version in KUBERNETES {
            let mut command = Command::new(self.tools.kubernetes_validate()?);
            let output = command.args(["-k", version, "--strict"]).arg(&file).output()?;
            let said = String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr);
            let foreign =
                |line: &str| FOREIGN.iter().any(|kind| line.contains(&format!("schema for kind {kind} ")));
            let told = said.lines().filter(|line| !line.starts_with("INFO") && !foreign(line));
            faults.extend(told.map(|line| format!("{name}, Kubernetes {version}: {line}")));
            if faults.is_empty() && !output.status.success() {
                faults.push(format!("{name}, Kubernetes {version}: {said}"));
            }
        }
        Ok(faults)
    }
}

/// Checks the chart.
pub(super) fn faults(workspace: &Workspace, tools: &Tools) -> Result<Faults> {
    let chart = Chart::of(workspace, tools)?;
    let mut faults = Faults::new();
    for values in chart.examples()? {
        let name = values.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut lint = Command::new(&chart.helm);
        lint.args(["lint", "--strict", "--quiet"]).arg(&chart.folder).arg("--values").arg(&values);
        faults.extend(said(&mut lint)?.into_iter().map(|fault| format!("{name}: {fault}")));
        match chart.render(&values, &[])? {
            Ok(manifests) => {
                faults.extend(chart.validate(&name, &manifests)?);
                faults.extend(
                    options::faults(workspace, &manifests)?
                        .into_iter()
                        .map(|fault| format!("{name}: {fault}")),
                );
                if manifests.contains("kind: Secret\n") {
                    faults.push(format!("{name}: it makes a secret; secrets are given by reference"));
                }
            }
            Err(said) => faults.push(format!("{name}: {said}")),
        }
    }
    let minimal = chart.folder.join("ci/minimal-values.yaml");
    for (set, expected) in REFUSED {
        match chart.render(&minimal, set)? {
            Ok(_) => faults.push(format!("the chart takes {}", set.join(" "))),
            Err(said) if said.contains(expected) => {}
            Err(said) => {
                faults.push(format!("of {} the chart does not say {expected:?}: {said}", set.join(" ")));
            }
        }
    }
    Ok(faults)
}

/// Checks what the chart makes of the alerts: they pass through templates, which may break an expression.
pub(super) fn rule_faults(workspace: &Workspace, tools: &Tools) -> Result<Faults> {
    let chart = Chart::of(workspace, tools)?;
    let promtool = tools.promtool()?;
    let (mut faults, mut checked) = (Faults::new(), 0);
    for values in chart.examples()? {
        let name = values.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        // What does not render is told by the other step.
        let Ok(manifests) = chart.render(&values, &[])? else { continue };
        for rules in rules(&manifests)? {
            let file = tools.scratch(&format!("{name}-rules.yml"), &rules)?;
            faults.extend(said(Command::new(&promtool).args(["check", "rules"]).arg(file))?);
            checked += 1;
        }
    }
    if checked == 0 {
        faults.push("no example has a PrometheusRule".to_owned());
    }
    Ok(faults)
}

/// Every `PrometheusRule`, as the file of rules that the operator makes of it.
fn rules(manifests: &str) -> Result<Vec<String>> {
    let manifests: Vec<Value> = serde_saphyr::from_multiple(manifests).context("reading the manifests")?;
    let rules = manifests.iter().filter(|one| one["kind"] == "PrometheusRule");
    Ok(rules.map(|one| one["spec"].to_string()).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The chart and its smallest values; nothing, said, where a tool cannot be had.
    fn with_chart(test: &str, look: impl FnOnce(&Chart<'_>, &Path)) {
        let workspace = Workspace::locate().unwrap();
        let tools = Tools::here().unwrap();
        match Chart::of(&workspace, &tools) {
            Ok(chart) => {
                let values = chart.folder.join("ci/minimal-values.yaml");
                look(&chart, &values);
            }
            Err(error) => crate::output::skip(test, &format!("{error:#}")),
        }
    }

    #[test]
    fn an_unknown_value_is_refused() {
        with_chart("an_unknown_value_is_refused", |chart, values| {
            assert!(chart.render(values, &[]).unwrap().is_ok());
            let said = chart.render(values, &["relya.workers=3"]).unwrap().unwrap_err();
            assert!(said.contains("'relya' not allowed"), "{said}");
        });
    }

    #[test]
    fn a_manifest_that_the_schema_refuses_is_a_fault() {
        with_chart("a_manifest_that_the_schema_refuses_is_a_fault", |chart, values| {
            let manifests = chart.render(values, &[]).unwrap().unwrap();
            assert_eq!(chart.validate("fine", &manifests).unwrap(), [""; 0]);
            let misspelt = manifests.replacen("terminationGracePeriodSeconds", "terminationGracePeriod", 1);
            let faults = chart.validate("misspelt", &misspelt).unwrap();
            assert!(faults.iter().any(|fault| fault.contains("terminationGracePeriod")), "{faults:?}");
        });
    }

    #[test]
    fn a_job_that_runs_something_else_is_another_job() {
        with_chart("a_job_that_runs_something_else_is_another_job", |chart, values| {
            let jobs = |set: &[&str]| {
                let set = [&["firstClient=acme"], set].concat();
                let manifests = chart.render(values, &set).unwrap().unwrap();
                let jobs = manifests.split("---\n").filter(|one| one.contains("kind: Job\n"));
                let names = jobs.map(|job| {
                    job.lines().find_map(|line| line.strip_prefix("  name: ")).unwrap().to_owned()
                });
                names.collect::<BTreeSet<_>>()
            };
            let before = jobs(&[]);
            assert_eq!((before.len(), jobs(&[])), (2, before.clone()));
            // What of a Job cannot be changed.
            for change in ["image.tag=v2", "labels.team=a", "migration.resources.limits.memory=1Gi"] {
                assert!(jobs(&[change]).is_disjoint(&before), "{change}");
            }
        });
    }

    #[test]
    fn stripe_is_given_to_api_and_reaper_alone() {
        with_chart("stripe_is_given_to_api_and_reaper_alone", |chart, values| {
            let stripe = values.with_file_name("stripe-values.yaml");
            let manifests = chart.render(&stripe, &[]).unwrap().unwrap();
            let with = |text: &str| {
                let those = manifests.split("---\n").filter(|one| one.contains(text));
                let names =
                    those.map(|one| one.lines().find_map(|line| line.strip_prefix("  name: ")).unwrap());
                names.collect::<Vec<_>>()
            };
            let mut paying = with("value: \"/etc/semel/stripe/api-key\"");
            paying.sort_unstable();
            assert_eq!(paying, ["semel-api", "semel-reaper-payments"]);
            assert_eq!(with("SEMEL_STRIPE_LIVEMODE, value: \"true\"").len(), 2);
            assert_eq!(with("SEMEL_STRIPE_WEBHOOK_SECRET_FILE"), ["semel-api"]);
            assert_eq!(with("--with-payments").len(), 1);
            assert_eq!(with("values: [\"api\",\"reaper\"]"), ["semel-provider"]);
        });
    }

    #[test]
    fn what_an_autoscaler_goes_by_is_recorded_without_alerts() {
        with_chart("what_an_autoscaler_goes_by_is_recorded_without_alerts", |chart, values| {
            let rules = |set: &[&str]| {
                let set = [&["monitoring.podMonitor.enabled=true"], set].concat();
                let manifests = chart.render(values, &set).unwrap().unwrap();
                let count = |what| manifests.matches(what).count();
                (count("record: semel_relay_demand_events"), count("alert: Semel"))
            };
            assert_eq!(rules(&[]), (0, 0));
            assert_eq!(rules(&["relay.autoscaling.by=hpa"]), (1, 0));
            assert_eq!(rules(&["relay.autoscaling.by=hpa", "monitoring.elsewhere=true"]), (0, 0));
            let (records, alerts) = rules(&["monitoring.alerts.enabled=true"]);
            assert!(records == 1 && alerts > 20, "{records} {alerts}");
        });
    }

    #[test]
    fn rules_are_taken_out_of_the_manifests() {
        let manifests = "kind: Job\n---\nkind: PrometheusRule\nspec: { groups: [{ name: a, rules: [] }] }\n";
        assert_eq!(rules(manifests).unwrap(), [r#"{"groups":[{"name":"a","rules":[]}]}"#]);
    }

    #[test]
    fn without_a_number_of_replicas_an_autoscaler_decides() {
        with_chart("without_a_number_of_replicas_an_autoscaler_decides", |chart, values| {
            let set = ["relay.autoscaling.by=keda", "monitoring.podMonitor.enabled=true"];
            let manifests = chart.render(values, &set).unwrap().unwrap();
            let relay = manifests
                .split("---\n")
                .find(|one| one.contains("kind: Deployment") && one.contains("name: semel-relay-payments"));
            assert!(!relay.unwrap().contains("replicas:"));
            assert!(manifests.contains("maxReplicaCount: 16"));
            assert!(manifests.contains("ignoreNullValues: \"false\""));
        });
    }
}
