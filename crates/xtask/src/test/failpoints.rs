//! Failpoints are for tests alone: the plain daemons must not hold so much as their names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::bed::{DAEMONS, PROGRAMS};
use crate::sources;
use crate::workspace::{Workspace, describe};

/// The environment variable that orders faults: every program with failpoints holds its name.
const VARIABLE: &str = "SEMEL_FAILPOINTS";

/// Names each plain program that holds a failpoint, the simulator among them: it is built from the same crates.
///
/// The daemons built with failpoints are searched as well: if none were found even there, the search itself is broken.
pub(crate) fn leaks(workspace: &Workspace) -> Result<Vec<String>> {
    let names = names_in_sources(workspace)?;
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let mut sought: Vec<&str> = names.iter().map(String::as_str).collect();
    sought.push(VARIABLE);

    let mut seen = BTreeSet::new();
    for daemon in DAEMONS {
        seen.extend(search(&workspace.programs_with_failpoints().join(daemon), &sought)?);
    }
    let unseen: Vec<_> = sought.iter().filter(|name| !seen.contains(**name)).copied().collect();
    if !unseen.is_empty() {
        bail!("no daemon built with failpoints holds {}: is the feature passed on?", unseen.join(", "));
    }

    let mut leaks = Vec::new();
    for daemon in PROGRAMS {
        let found = search(&workspace.program(daemon), &sought)?;
        if !found.is_empty() {
            let found = found.into_iter().collect::<Vec<_>>().join(", ");
            leaks.push(format!("{daemon}, built without failpoints, holds {found}"));
        }
    }
    Ok(leaks)
}

/// The names that stand in a program's bytes. `grep`, since searching in an unoptimised program of our own takes a minute.
fn search(program: &Path, names: &[&str]) -> Result<BTreeSet<String>> {
    let mut grep = Command::new("grep");
    grep.args(["--text", "--only-matching", "--fixed-strings"]).env("LC_ALL", "C");
    grep.args(names.iter().flat_map(|name| ["-e", name])).arg(program);
    let output = grep.output().context("starting grep")?;
    // 0: found, 1: not found.
    if !matches!(output.status.code(), Some(0 | 1)) {
        bail!("`{}` failed: {}", describe(&grep), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

fn names_in_sources(workspace: &Workspace) -> Result<BTreeSet<String>> {
    let files = sources::rust_files(workspace)?.into_iter();
    let files = files.filter(|path| path.starts_with("crates") && !path.starts_with("crates/xtask"));
    let mut texts = Vec::new();
    for path in files {
        let text = fs::read_to_string(workspace.root.join(&path))
            .with_context(|| format!("reading {}", path.display()))?;
        texts.push((path.display().to_string(), text));
    }
    names(&texts)
}

/// The names passed to `failpoint!`, literally or as a constant of the same crate.
fn names(files: &[(String, String)]) -> Result<BTreeSet<String>> {
    let mut constants = BTreeMap::new();
    for (path, text) in files {
        constants
            .extend(text.lines().filter_map(constant).map(|(name, value)| ((package(path), name), value)));
    }
    let mut names = BTreeSet::new();
    for (path, text) in files {
        let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        let code = code.join("\n");
        for (_, rest) in code.match_indices("failpoint!(").map(|(at, call)| code.split_at(at + call.len())) {
            let argument = rest.split(')').next().unwrap_or_default().trim().trim_start_matches('&');
            let last = argument.rsplit("::").next().unwrap_or_default();
            let name = literal(argument).or_else(|| constants.get(&(package(path), last)).copied());
            let name = name.with_context(|| {
                format!("{path}: failpoint!({argument}) names neither a string nor a constant of its crate")
            })?;
            names.insert(name.to_owned());
        }
    }
    Ok(names)
}

/// The crate's folder: `relay` of `crates/relay/src/worker.rs`.
fn package(path: &str) -> &str {
    path.split('/').nth(1).unwrap_or_default()
}

fn literal(text: &str) -> Option<&str> {
    text.strip_prefix('"')?.strip_suffix('"')
}

/// `pub const NAME: &str = "value";` as name and value.
fn constant(line: &str) -> Option<(&str, &str)> {
    let (_, rest) = line.split_once("const ")?;
    let (name, rest) = rest.split_once(':')?;
    let (_, value) = rest.split_once('=')?;
    Some((name.trim(), literal(value.trim().strip_suffix(';')?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names_of(files: &[(&str, &str)]) -> Result<BTreeSet<String>> {
        let files: Vec<_> =
            files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        names(&files)
    }

    #[test]
    fn finds_literal_and_constant_names() {
        let found = names_of(&[
            ("crates/relay/src/failpoints.rs", "pub const AFTER: &str = \"relay.after\";"),
            ("crates/ledger/src/failpoints.rs", "pub const AFTER: &str = \"ledger.after\";"),
            (
                "crates/relay/src/worker.rs",
                "failpoint!(\"api.before\");\n// failpoint!(\"no.such\");\nx(); failpoint!(points::AFTER);",
            ),
        ]);
        assert_eq!(found.unwrap(), ["api.before".to_owned(), "relay.after".to_owned()].into());
    }

    #[test]
    fn refuses_a_name_that_it_cannot_know() {
        let error = names_of(&[("crates/api/src/a.rs", "failpoint!(name)")]).unwrap_err().to_string();
        assert!(error.contains("failpoint!(name)"), "{error}");
    }

    #[test]
    fn finds_a_name_in_a_programs_bytes() {
        let file = std::env::temp_dir().join(format!("xtask-grep-{}", std::process::id()));
        fs::write(&file, b"\0\xffrelay.after\0api_before\n").unwrap();
        let found = search(&file, &["relay.after", "api.before"]);
        fs::remove_file(&file).unwrap();
        assert_eq!(found.unwrap(), ["relay.after".to_owned()].into());
        assert!(search(&file, &["x"]).is_err(), "a missing program is no clean program");
    }
}
