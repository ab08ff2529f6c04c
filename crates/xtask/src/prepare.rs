//! `.sqlx`: the committed facts about each SQL query, so that building needs no database.
//!
//! They are made by compiling the crates against a throw-away Postgres that holds every migration set. Nothing of ours
//! is built for it: the query data is what a build needs, and may be stale.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use cargo_metadata::MetadataCommand;

use crate::workspace::{self, Workspace};
use crate::{bed, output, sources};

mod postgres;

use postgres::Postgres;

const MACROS: [&str; 4] = ["query!(", "query_as!(", "query_scalar!(", "query_file"];

/// File name → content.
type Queries = BTreeMap<String, Vec<u8>>;

/// Renews `.sqlx`; untouched if anything fails.
pub(crate) fn write(workspace: &Workspace) -> Result<()> {
    let folder = workspace.root.join(".sqlx");
    let (committed, fresh) = (load(&folder)?, describe_queries(workspace)?);
    fs::create_dir_all(&folder)?;
    for (name, content) in fresh.iter().filter(|(name, content)| committed.get(*name) != Some(*content)) {
        fs::write(folder.join(name), content).with_context(|| format!("writing .sqlx/{name}"))?;
    }
    for name in committed.keys().filter(|name| !fresh.contains_key(*name)) {
        fs::remove_file(folder.join(name)).with_context(|| format!("removing .sqlx/{name}"))?;
    }
    let differences = differences(&committed, &fresh);
    for line in &differences {
        output::say(line);
    }
    output::say(&format!("==> .sqlx holds {} queries, {} changed", fresh.len(), differences.len()));
    Ok(())
}

/// Names the files of `.sqlx` that `write` would change.
pub(crate) fn stale(workspace: &Workspace) -> Result<Vec<String>> {
    let committed = load(&workspace.root.join(".sqlx"))?;
    let differences = differences(&committed, &describe_queries(workspace)?);
    Ok(differences.into_iter().map(|line| format!("{line}: run `cargo xtask prepare`")).collect())
}

fn differences(committed: &Queries, fresh: &Queries) -> Vec<String> {
    let of_fresh = fresh.iter().filter_map(|(name, content)| match committed.get(name) {
        None => Some(format!(".sqlx/{name} is missing")),
        Some(old) if old != content => Some(format!(".sqlx/{name} is stale")),
        Some(_) => None,
    });
    let gone = committed.keys().filter(|name| !fresh.contains_key(*name));
    of_fresh.chain(gone.map(|name| format!(".sqlx/{name} belongs to no query"))).collect()
}

fn describe_queries(workspace: &Workspace) -> Result<Queries> {
    let packages = packages(workspace)?;
    if packages.is_empty() {
        return Ok(Queries::new());
    }
    let scratch = workspace.target.join("prepare");
    let folder = scratch.join("queries");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;

    let tools = postgres_tools(workspace)?;
    let postgres = output::step("starting a throw-away Postgres with every migration set", || {
        let postgres = Postgres::start(tools)?;
        for file in migrations(&workspace.root.join("migrations"))? {
            postgres.apply(&file)?;
        }
        Ok(postgres)
    })?;
    output::step("asking it about every query", || {
        // The macros write their data while they expand, and Cargo does not expand again what is up to date.
        workspace::run(workspace.cargo("clean").args(["--workspace", "--target-dir"]).arg(&scratch))?;
        let mut check = workspace.bare_cargo();
        // Beats the committed `.cargo/config.toml`, which keeps every other build away from databases.
        check.args(["--config", "env.SQLX_OFFLINE.value='false'"]);
        check.args(["check", "--all-targets", "--all-features", "--target-dir"]).arg(&scratch);
        check.args(packages.iter().flat_map(|package| ["--package", package]));
        check.env("DATABASE_URL", postgres.url()).env("SQLX_OFFLINE_DIR", &folder);
        workspace::run(&mut check)
    })?;
    load(&folder)
}

fn postgres_tools(workspace: &Workspace) -> Result<PathBuf> {
    if let Some(found) = postgres::tools() {
        return Ok(found);
    }
    output::say("==> there is no Postgres here: the test bed installs one");
    let installed = bed::build_all(workspace).and_then(|()| bed::start_services(workspace));
    let found = installed.map(|_| postgres::tools());
    let advice = "install PostgreSQL 15 or newer, or say by SEMEL_POSTGRES_BIN where its programs are";
    found.and_then(|found| found.context("there is still no initdb")).context(advice)
}

fn load(folder: &Path) -> Result<Queries> {
    if !folder.exists() {
        return Ok(Queries::new());
    }
    let mut queries = Queries::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("query-") {
            queries.insert(name, fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
        }
    }
    Ok(queries)
}

/// The packages that have a query in one of their files.
fn packages(workspace: &Workspace) -> Result<Vec<String>> {
    let metadata = MetadataCommand::new().current_dir(&workspace.root).no_deps().exec()?;
    let mut packages = Vec::new();
    let files = sources::rust_files(workspace)?;
    for package in metadata.packages.iter().filter(|p| p.dependencies.iter().any(|d| d.name == "sqlx")) {
        let folder = package.manifest_path.parent().context("a manifest lies in no folder")?;
        let folder = folder.strip_prefix(&workspace.root)?;
        for file in files.iter().filter(|file| file.starts_with(folder)) {
            let text = fs::read_to_string(workspace.root.join(file))?;
            if MACROS.iter().any(|call| text.contains(call)) {
                packages.push(package.name.to_string());
                break;
            }
        }
    }
    Ok(packages)
}

/// The migrations of every set, in the order of their names; the sets' tables do not refer to each other's.
fn migrations(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = |folder: &Path| -> Result<Vec<_>> {
        let entries = fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))?;
        let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    };
    let mut files = Vec::new();
    for set in list(folder)?.iter().filter(|path| path.is_dir()) {
        files.extend(list(set)?.into_iter().filter(|path| path.extension().is_some_and(|e| e == "sql")));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_missing_stale_and_orphaned_query_data_apart() {
        let committed = Queries::from([("a".into(), b"1".to_vec()), ("b".into(), b"1".to_vec())]);
        let fresh = Queries::from([("b".into(), b"2".to_vec()), ("c".into(), b"1".to_vec())]);
        assert_eq!(
            differences(&committed, &fresh),
            [".sqlx/b is stale", ".sqlx/c is missing", ".sqlx/a belongs to no query"]
        );
        assert!(differences(&fresh, &fresh).is_empty());
    }
}
