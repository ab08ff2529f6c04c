//! Where things lie in the workspace.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Names a folder of our programs, instead of those that cargo builds into.
pub const BIN_DIR: &str = "SEMEL_BIN_DIR";

/// Finds the workspace that the current folder, or else this very program, lies in.
///
/// # Errors
///
/// There is none.
pub fn root() -> Result<PathBuf> {
    let is_root = |dir: &Path| {
        fs::read_to_string(dir.join("Cargo.toml")).is_ok_and(|text| text.contains("[workspace]"))
    };
    let find = |start: PathBuf| start.ancestors().find(|dir| is_root(dir)).map(Path::to_path_buf);
    let here = env::current_dir().ok().and_then(find);
    here.or_else(|| env::current_exe().ok().and_then(find))
        .context("the current folder is in no cargo workspace; go there, or name it with --root")
}

/// The folder that cargo builds into.
#[must_use]
pub fn target_dir(root: &Path) -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

/// Finds one of our programs: in [`BIN_DIR`] if that is set, else where cargo builds it with
/// failpoints, else where cargo builds it.
///
/// # Errors
///
/// It was not built.
pub fn binary(name: &str) -> Result<PathBuf> {
    if let Some(dir) = env::var_os(BIN_DIR) {
        let path = PathBuf::from(dir).join(name);
        return path.is_file().then_some(path).with_context(|| format!("{BIN_DIR} holds no {name}"));
    }
    let target = target_dir(&root()?);
    for profile in ["failpoints/debug", "debug"] {
        let path = target.join(profile).join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    bail!("{name} was not built: run `cargo xtask test` or `cargo xtask demo`, which build it")
}
