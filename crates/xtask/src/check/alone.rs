//! What a user's service takes from us: consumer-kit over core, without what only daemons need.
//!
//! In the workspace's own resolution the daemons turn core's feature `daemon` on for everybody, so this asks how
//! consumer-kit declares core, and what it needs when it is resolved alone: with all of its features but `command`, which is
//! for those who do want a command line.

use anyhow::Result;
use cargo_metadata::{DependencyKind, Metadata};

use crate::workspace::{self, Workspace};

const RULE: &str = "`consumer-kit takes core without its daemon feature`";
const KIT: &str = "semel-consumer-kit";
const CORE: &str = "semel-core";

/// What the feature brings in and a library must not.
const OF_DAEMONS: [&str; 4] =
    ["clap", "metrics-exporter-prometheus", "metrics-process", "tracing-subscriber"];

/// Names every way in which the kit brings a daemon's dependencies along.
pub(crate) fn faults(workspace: &Workspace, metadata: &Metadata) -> Result<Vec<String>> {
    let kits = metadata.workspace_packages().into_iter().filter(|package| package.name == KIT);
    let cores = kits.flat_map(|kit| &kit.dependencies);
    let cores = cores.filter(|needed| needed.name == CORE && needed.kind != DependencyKind::Development);
    let features: Vec<&str> = cores.flat_map(|core| &core.features).map(String::as_str).collect();

    let mut tree = workspace.cargo("tree");
    tree.args(["--package", KIT, "--features", "failpoints", "--edges", "normal,build", "--prefix", "none"]);
    let tree = workspace::read(tree.args(["--format", "{p}", "--locked"]))?;
    let needed: Vec<&str> = tree.lines().filter_map(|line| line.split_whitespace().next()).collect();
    Ok(judge(&features, &needed))
}

fn judge(features: &[&str], needed: &[&str]) -> Vec<String> {
    let mut faults = Vec::new();
    if features.contains(&"daemon") {
        faults.push(format!("{RULE}: its Cargo.toml turns the feature on"));
    }
    let unwanted = OF_DAEMONS.iter().filter(|name| needed.contains(name));
    faults.extend(unwanted.map(|name| format!("{RULE}: resolved alone, {KIT} needs {name}")));
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_silent_about_the_plain_library() {
        assert_eq!(judge(&["failpoints"], &["semel-core", "sqlx", "metrics"]), [""; 0]);
    }

    #[test]
    fn tells_of_the_declared_feature() {
        assert_eq!(
            judge(&["daemon"], &[]),
            ["`consumer-kit takes core without its daemon feature`: its Cargo.toml turns the feature on"]
        );
    }

    #[test]
    fn tells_of_what_a_daemon_alone_needs() {
        assert_eq!(
            judge(&[], &["semel-core", "clap", "metrics-exporter-prometheus"]),
            [
                "`consumer-kit takes core without its daemon feature`: resolved alone, semel-consumer-kit needs clap",
                "`consumer-kit takes core without its daemon feature`: resolved alone, semel-consumer-kit needs \
                 metrics-exporter-prometheus"
            ]
        );
    }
}
