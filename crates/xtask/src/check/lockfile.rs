//! `Cargo.lock` is committed, and says what the manifests say.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::workspace::{self, Workspace};

/// Names what is wrong with the lock file.
pub(crate) fn faults(workspace: &Workspace) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    if workspace.root.join(".git").exists() {
        let mut git = Command::new("git");
        git.args(["ls-files", "--", "Cargo.lock"]).current_dir(&workspace.root);
        if Path::new(workspace::read(&mut git)?.trim()) != Path::new("Cargo.lock") {
            faults.push("Cargo.lock is not committed".to_owned());
        }
    }
    let mut metadata = workspace.cargo("metadata");
    metadata.args(["--locked", "--format-version", "1"]);
    if workspace::read(&mut metadata).is_err() {
        faults.push(
            "Cargo.lock is out of step with the manifests: run `cargo metadata` and commit it".to_owned(),
        );
    }
    Ok(faults)
}
