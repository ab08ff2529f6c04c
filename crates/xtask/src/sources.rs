//! The project's own files: what git tracks, or would.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::workspace::{self, Workspace};

/// Lists the project's files, relative to the root, sorted.
///
/// Files that are not committed yet are among them, ignored ones are not. Without git, everything but `target`.
pub(crate) fn files(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    if !workspace.root.join(".git").exists() {
        let mut found = BTreeSet::new();
        walk(&workspace.root, &workspace.root, &mut found)?;
        return Ok(found.into_iter().collect());
    }
    let mut git = std::process::Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(&workspace.root);
    let listed = workspace::read(&mut git)?;
    let listed: BTreeSet<PathBuf> = listed.split_terminator('\0').map(PathBuf::from).collect();
    // A file that was deleted but not yet removed from the index is still listed.
    Ok(listed.into_iter().filter(|path| workspace.root.join(path).is_file()).collect())
}

/// Lists the Rust files among the project's files.
pub(crate) fn rust_files(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let mut files = files(workspace)?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    Ok(files)
}

fn walk(root: &Path, folder: &Path, found: &mut BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))? {
        let path = entry?.path();
        let relative = path.strip_prefix(root)?;
        if path.is_symlink() || relative == Path::new("target") {
            continue;
        }
        if path.is_dir() {
            walk(root, &path, found)?;
        } else {
            found.insert(relative.to_owned());
        }
    }
    Ok(())
}
