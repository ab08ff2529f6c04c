//! Who may depend on whom. `ARCHITECTURE.md` says why; each message names its rule and the way that breaks it.

use anyhow::Result;
use cargo_metadata::{CargoOpt, MetadataCommand};

use super::graph::{Graph, Package};
use super::{alone, licences};
use crate::bed::PROGRAMS;
use crate::workspace::Workspace;

/// For each member, the members that it may depend on. The tests may depend on anything.
const MAY_DEPEND_ON: [(&str, &[&str]); 11] = [
    ("xtask", &[]),
    ("semel-core", &[]),
    ("semel-broker", &[]),
    ("semel-proto", &[]),
    ("semel-payments", &["semel-proto", "semel-core"]),
    ("semel-api", &["semel-payments", "semel-proto", "semel-core"]),
    ("semel-reaper", &["semel-payments", "semel-core"]),
    ("semel-relay", &["semel-broker", "semel-core"]),
    ("semel-consumer-kit", &["semel-broker", "semel-core"]),
    ("semel-ledger", &["semel-consumer-kit", "semel-core"]),
    ("semel-provider-sim", &["semel-proto", "semel-core"]),
];

const TESTS: &str = "semel-tests";

/// Each member, and what must not be in anything that it needs.
const KNOWS_NO: [(&str, &str, &[&str]); 3] = [
    ("semel-core", "broker", &["lapin", "amq-protocol"]),
    ("semel-core", "web framework", &["axum"]),
    ("semel-core", "gRPC server", &["tonic"]),
];

/// What would be a second TLS stack, or a second crypto provider beside ring.
const OTHER_TLS: [&str; 9] = [
    "aws-lc-rs",
    "aws-lc-sys",
    "boring",
    "native-tls",
    "openssl",
    "openssl-sys",
    "rustls-graviola",
    "rustls-openssl",
    "rustls-rustcrypto",
];

/// Names every broken rule of this workspace.
pub(crate) fn faults(workspace: &Workspace) -> Result<Vec<String>> {
    let metadata = MetadataCommand::new()
        .current_dir(&workspace.root)
        // What a feature can bring in, somebody will bring in.
        .features(CargoOpt::AllFeatures)
        .other_options(["--locked".to_owned()])
        .exec()?;
    let graph = Graph::from_metadata(&metadata)?;
    let rules = [members, daemons, absences, broker_client, tls, licences::faults];
    let mut faults: Vec<String> = rules.iter().flat_map(|rule| rule(&graph)).collect();
    faults.extend(alone::faults(workspace, &metadata)?);
    Ok(faults.into_iter().map(|fault| format!("dependency rule {fault}")).collect())
}

fn members(graph: &Graph) -> Vec<String> {
    let mut faults = Vec::new();
    for from in graph.ours().map(|at| &graph.packages[at]).filter(|package| package.name != TESTS) {
        let Some((_, allowed)) = MAY_DEPEND_ON.iter().find(|(name, _)| *name == from.name) else {
            faults.push(format!(
                "`every crate has its place`: {} is not in MAY_DEPEND_ON of crates/xtask/src/check/dependencies.rs",
                from.name
            ));
            continue;
        };
        let needed = from.needs.iter().map(|&at| &graph.packages[at]).filter(|package| package.ours);
        for to in needed.filter(|to| !allowed.contains(&to.name.as_str())) {
            let allowed =
                if allowed.is_empty() { "nothing of ours".to_owned() } else { allowed.join(" and ") };
            faults.push(format!("`{} depends on {allowed}`: {0} → {}", from.name, to.name));
        }
    }
    faults
}

fn daemons(graph: &Graph) -> Vec<String> {
    let is_daemon = |package: &Package| package.ours && PROGRAMS.contains(&package.name.as_str());
    let paths = PROGRAMS.iter().filter_map(|name| graph.path_to(graph.member(name)?, is_daemon));
    paths.map(|path| format!("`no daemon depends on a daemon`: {path}")).collect()
}

fn absences(graph: &Graph) -> Vec<String> {
    let paths = KNOWS_NO.iter().filter_map(|(member, what, names)| {
        let path = graph.path_to(graph.member(member)?, |package| names.contains(&package.name.as_str()))?;
        let member = member.trim_start_matches("semel-");
        Some(format!("`{member} knows no {what}`: {path}"))
    });
    paths.collect()
}

fn broker_client(graph: &Graph) -> Vec<String> {
    let others = graph.ours().map(|at| &graph.packages[at]);
    let others = others.filter(|package| !["semel-broker", TESTS].contains(&package.name.as_str()));
    let direct = others.filter(|package| package.needs.iter().any(|&at| graph.packages[at].name == "lapin"));
    direct.map(|package| format!("`only broker knows lapin`: {} → lapin", package.name)).collect()
}

fn tls(graph: &Graph) -> Vec<String> {
    let everything = graph.breadth_first(graph.ours());
    let named = |name: &str| everything.iter().find(|(at, _)| graph.packages[*at].name == name);
    let others = OTHER_TLS.iter().filter_map(|name| named(name));
    let mut faults: Vec<_> =
        others.map(|(_, path)| format!("`one TLS stack, rustls with ring`: {path}")).collect();
    if named("rustls").is_some() && named("ring").is_none() {
        faults.push("`one TLS stack, rustls with ring`: rustls is here, and ring is not".to_owned());
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::graph;
    use super::*;

    /// The shape that the rules are for: all of them must stay silent.
    const GOOD: &str = "
        xtask: clap
        semel-core: sqlx clap
        semel-broker: lapin
        semel-proto: tonic
        semel-payments: semel-proto semel-core
        semel-api: semel-payments semel-proto semel-core axum tonic
        semel-reaper: semel-payments semel-core
        semel-relay: semel-broker semel-core
        semel-consumer-kit: semel-broker semel-core
        semel-ledger: semel-consumer-kit semel-core
        semel-provider-sim: semel-proto semel-core tonic
        semel-tests: semel-api semel-relay semel-provider-sim semel-broker lapin
        lapin: rustls
        sqlx: rustls
        rustls: ring";

    fn after(line: &str, rule: fn(&Graph) -> Vec<String>) -> Vec<String> {
        rule(&graph(&format!("{GOOD}\n{line}")))
    }

    #[test]
    fn stay_silent_about_the_intended_shape() {
        for rule in [members, daemons, absences, broker_client, tls] {
            assert_eq!(rule(&graph(GOOD)), [""; 0]);
        }
    }

    #[test]
    fn members_depend_on_what_they_may_only() {
        for (line, fault) in [
            (
                "semel-core: semel-broker",
                "`semel-core depends on nothing of ours`: semel-core → semel-broker",
            ),
            ("xtask: semel-core", "`xtask depends on nothing of ours`: xtask → semel-core"),
            (
                "semel-broker: semel-core",
                "`semel-broker depends on nothing of ours`: semel-broker → semel-core",
            ),
            ("semel-proto: semel-core", "`semel-proto depends on nothing of ours`: semel-proto → semel-core"),
            (
                "semel-provider-sim: semel-payments",
                "`semel-provider-sim depends on semel-proto and semel-core`: semel-provider-sim → semel-payments",
            ),
            (
                "semel-payments: semel-broker",
                "`semel-payments depends on semel-proto and semel-core`: semel-payments → semel-broker",
            ),
            (
                "semel-relay: semel-payments",
                "`semel-relay depends on semel-broker and semel-core`: semel-relay → semel-payments",
            ),
            (
                "semel-api: semel-broker",
                "`semel-api depends on semel-payments and semel-proto and semel-core`: semel-api → semel-broker",
            ),
            (
                "semel-ledger: semel-broker",
                "`semel-ledger depends on semel-consumer-kit and semel-core`: semel-ledger → semel-broker",
            ),
        ] {
            assert_eq!(after(line, members), [fault]);
        }
    }

    #[test]
    fn a_new_member_must_be_given_its_place() {
        let faults = after("semel-new: serde", members);
        assert!(
            faults[0].starts_with("`every crate has its place`: semel-new is not in MAY_DEPEND_ON"),
            "{faults:?}"
        );
    }

    #[test]
    fn no_daemon_depends_on_a_daemon_even_by_a_detour() {
        assert_eq!(
            after("semel-payments: semel-relay", daemons),
            [
                "`no daemon depends on a daemon`: semel-api → semel-payments → semel-relay",
                "`no daemon depends on a daemon`: semel-reaper → semel-payments → semel-relay"
            ]
        );
        assert_eq!(
            after("semel-relay: semel-provider-sim", daemons),
            ["`no daemon depends on a daemon`: semel-relay → semel-provider-sim"],
            "the simulator is a stranger to them, too"
        );
    }

    #[test]
    fn core_knows_neither_broker_nor_web_framework_nor_grpc_server() {
        for (line, fault) in [
            ("sqlx: lapin", "`core knows no broker`: semel-core → sqlx → lapin"),
            ("semel-core: axum", "`core knows no web framework`: semel-core → axum"),
            ("clap: tonic", "`core knows no gRPC server`: semel-core → clap → tonic"),
        ] {
            assert_eq!(after(line, absences), [fault]);
        }
    }

    #[test]
    fn only_broker_and_the_tests_use_lapin_directly() {
        assert_eq!(
            after("semel-relay: lapin", broker_client),
            ["`only broker knows lapin`: semel-relay → lapin"]
        );
    }

    /// The manifests and sources of this workspace, in a folder that goes with the value.
    struct WorkspaceCopy(Workspace);

    impl WorkspaceCopy {
        fn make() -> Self {
            let ours = Workspace::locate().unwrap();
            let root = std::env::temp_dir().join(format!("semel-dependency-rules-{}", std::process::id()));
            std::fs::create_dir_all(&root).unwrap();
            let tops = ["Cargo.toml", "Cargo.lock", ".cargo", "crates", "tests"];
            for top in tops {
                copy(&ours.root.join(top), &root.join(top));
            }
            let target = root.join("target");
            Self(Workspace { root, intermediate: target.clone(), target })
        }

        /// Adds a dependency, as who writes it and builds would.
        fn depend(&self, member: &str, on: &str) {
            let path = self.0.root.join("crates").join(member).join("Cargo.toml");
            let manifest = std::fs::read_to_string(&path).unwrap();
            let changed =
                manifest.replacen("[dependencies]\n", &format!("[dependencies]\n{on}.workspace = true\n"), 1);
            assert_ne!(manifest, changed);
            std::fs::write(path, changed).unwrap();
            crate::workspace::read(self.0.cargo("metadata").args(["--format-version=1", "--offline"]))
                .unwrap();
        }
    }

    impl Drop for WorkspaceCopy {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0.root);
        }
    }

    fn copy(from: &std::path::Path, to: &std::path::Path) {
        if !from.is_dir() {
            std::fs::copy(from, to).unwrap();
            return;
        }
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let name = entry.unwrap().file_name();
            copy(&from.join(&name), &to.join(&name));
        }
    }

    #[test]
    fn a_forbidden_dependency_in_a_manifest_is_found() {
        let copy = WorkspaceCopy::make();
        assert_eq!(faults(&copy.0).unwrap(), [""; 0]);
        copy.depend("core", "lapin");
        let found = faults(&copy.0).unwrap();
        let told = found.iter().any(|fault| fault.contains("`core knows no broker`: semel-core → lapin"));
        assert!(told, "{found:?}");
    }

    #[test]
    fn rustls_with_ring_is_the_only_tls_stack() {
        assert_eq!(
            after("rustls: aws-lc-rs", tls),
            ["`one TLS stack, rustls with ring`: semel-core → sqlx → rustls → aws-lc-rs"]
        );
        assert_eq!(
            after("axum: native-tls", tls),
            ["`one TLS stack, rustls with ring`: semel-api → axum → native-tls"]
        );
        assert_eq!(
            tls(&graph("semel-core: rustls")),
            ["`one TLS stack, rustls with ring`: rustls is here, and ring is not"]
        );
    }
}
