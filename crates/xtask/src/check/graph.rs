//! The dependency graph, reduced to what the rules ask about.

use std::collections::{BTreeMap, VecDeque};

use anyhow::{Context as _, Result};
use cargo_metadata::{DependencyKind, Metadata};

/// One package.
#[derive(Clone, Debug)]
pub(crate) struct Package {
    /// Its name; several versions of one package share it.
    pub(crate) name: String,
    /// Whether it is a member of this workspace.
    pub(crate) ours: bool,
    /// Its licence as it declares it.
    pub(crate) licence: Option<String>,
    /// What it depends on to be built: positions in the graph.
    pub(crate) needs: Vec<usize>,
}

/// Packages, and which needs which. Dependencies for tests only are left out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    /// The packages.
    pub(crate) packages: Vec<Package>,
}

impl Graph {
    /// Takes over what Cargo resolved.
    pub(crate) fn from_metadata(metadata: &Metadata) -> Result<Self> {
        let resolve = metadata.resolve.as_ref().context("cargo metadata resolved nothing")?;
        let position: BTreeMap<_, _> =
            resolve.nodes.iter().enumerate().map(|(at, node)| (&node.id, at)).collect();
        let mut packages = Vec::new();
        for node in &resolve.nodes {
            let package = &metadata[&node.id];
            let built = node.deps.iter().filter(|dependency| {
                dependency.dep_kinds.iter().any(|kind| kind.kind != DependencyKind::Development)
            });
            packages.push(Package {
                name: package.name.to_string(),
                ours: metadata.workspace_members.contains(&node.id),
                licence: package.license.clone(),
                needs: built.filter_map(|dependency| position.get(&dependency.pkg).copied()).collect(),
            });
        }
        Ok(Self { packages })
    }

    /// The positions of the workspace's members.
    pub(crate) fn ours(&self) -> impl Iterator<Item = usize> {
        (0..self.packages.len()).filter(|&at| self.packages[at].ours)
    }

    /// The position of the member with this name.
    pub(crate) fn member(&self, name: &str) -> Option<usize> {
        self.ours().find(|&at| self.packages[at].name == name)
    }

    /// The shortest way from one package to another that has a property; itself does not count.
    pub(crate) fn path_to(&self, from: usize, wanted: impl Fn(&Package) -> bool) -> Option<Path> {
        self.breadth_first([from])
            .into_iter()
            .find_map(|(at, path)| (at != from && wanted(&self.packages[at])).then_some(path))
    }

    /// Everything that the starting points need, themselves included, each with the shortest way to it.
    pub(crate) fn breadth_first(&self, from: impl IntoIterator<Item = usize>) -> Vec<(usize, Path)> {
        let mut came_from: BTreeMap<usize, Option<usize>> = BTreeMap::new();
        let mut queue = VecDeque::new();
        for start in from {
            came_from.insert(start, None);
            queue.push_back(start);
        }
        let mut found = Vec::new();
        while let Some(at) = queue.pop_front() {
            let way = std::iter::successors(Some(at), |at| came_from.get(at).copied().flatten());
            let mut names: Vec<_> = way.map(|at| self.packages[at].name.clone()).collect();
            names.reverse();
            found.push((at, Path(names)));
            for &next in &self.packages[at].needs {
                came_from.entry(next).or_insert_with(|| {
                    queue.push_back(next);
                    Some(at)
                });
            }
        }
        found
    }
}

/// A way through the graph, by names.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Path(pub(crate) Vec<String>);

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join(" → "))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A graph from `name: needed needed`, a line each; names that begin with `semel-`, and `xtask`, are ours.
    pub(crate) fn graph(text: &str) -> Graph {
        let mut graph = Graph::default();
        let at = |name: &str, graph: &mut Graph| {
            graph.packages.iter().position(|package| package.name == name).unwrap_or_else(|| {
                let ours = name.starts_with("semel-") || name == "xtask";
                let licence = Some("MIT".to_owned());
                graph.packages.push(Package { name: name.to_owned(), ours, licence, needs: Vec::new() });
                graph.packages.len() - 1
            })
        };
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let (name, needs) = line.trim().split_once(':').unwrap();
            let from = at(name, &mut graph);
            for need in needs.split_whitespace() {
                let to = at(need, &mut graph);
                graph.packages[from].needs.push(to);
            }
        }
        graph
    }

    #[test]
    fn finds_the_shortest_way() {
        let graph = graph("semel-a: x y\nx: y\ny: z\nz: semel-a");
        let path = graph.path_to(0, |package| package.name == "z").unwrap();
        assert_eq!(path.to_string(), "semel-a → y → z");
        assert_eq!(graph.path_to(0, |package| package.name == "semel-a"), None);
    }

    #[test]
    fn reaches_each_package_once_even_in_a_circle() {
        let graph = graph("semel-a: x\nx: semel-a y\ny: x");
        assert_eq!(graph.breadth_first([0]).len(), 3);
    }
}
