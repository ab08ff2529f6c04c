//! Rules for the project's files, whatever is in them.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::workspace::Workspace;
use crate::{output, sources};

/// Longer Rust files are reported, not refused: look for the second subject.
const LONG: usize = 600;

// In pieces, so that the rules do not find themselves.
const NOTES: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];
const REGISTRIES: [&str; 6] = [
    concat!("crates", ".io"),
    concat!("pypi", ".org"),
    concat!("pythonhosted", ".org"),
    concat!("npmjs", ".org"),
    concat!("npmjs", ".com"),
    concat!("proxy.golang", ".org"),
];
const UNSAFE: &str = concat!("un", "safe");

/// Names every file that breaks a rule.
pub(crate) fn faults(workspace: &Workspace) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    for path in sources::files(workspace)? {
        let bytes =
            fs::read(workspace.root.join(&path)).with_context(|| format!("reading {}", path.display()))?;
        // What is not text has no words.
        let text = String::from_utf8(bytes).unwrap_or_default();
        faults.extend(judge(&path, &text));
        let lines = text.lines().count();
        if is_rust(&path) && lines > LONG {
            output::say(&format!("warning: {} has {lines} lines: look for a second subject", path.display()));
        }
    }
    Ok(faults)
}

fn judge(path: &Path, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if path.file_name() == Some(OsStr::new("mod.rs")) {
        faults.push(format!("{}: a module is `name.rs`, never `mod.rs`", path.display()));
    }
    // Cargo writes its registry's address there itself.
    let is_lock = path == Path::new("Cargo.lock");
    for (number, line) in text.lines().enumerate() {
        let place = || format!("{}:{}", path.display(), number + 1);
        for note in NOTES.iter().filter(|note| has_word(line, note)) {
            faults.push(format!("{}: {note} is no way to keep a promise", place()));
        }
        for host in REGISTRIES.iter().filter(|host| !is_lock && line.contains(*host)) {
            faults.push(format!("{}: names the package registry {host}", place()));
        }
        if is_rust(path) && !line.trim_start().starts_with("//") && has_word(line, UNSAFE) {
            faults.push(format!("{}: {UNSAFE} code", place()));
        }
    }
    if path.file_name() == Some(OsStr::new("Cargo.toml"))
        && text.contains("[package]")
        && !text.contains("[lints]\nworkspace = true")
    {
        faults.push(format!("{}: does not take over the workspace's lints", path.display()));
    }
    faults
}

fn is_rust(path: &Path) -> bool {
    path.extension() == Some(OsStr::new("rs"))
}

/// Whether a line holds a word on its own, not as a part of a longer one.
fn has_word(line: &str, word: &str) -> bool {
    let inside = |character: Option<char>| character.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| {
        !inside(line[..at].chars().next_back()) && !inside(line[at + word.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults_of(path: &str, text: &str) -> Vec<String> {
        judge(Path::new(path), text)
    }

    #[test]
    fn stays_silent_about_ordinary_files() {
        assert_eq!(
            faults_of("src/a.rs", &format!("// {UNSAFE}?\n#![forbid({UNSAFE}_code)]\nfn a() {{}}")),
            [""; 0]
        );
        assert_eq!(
            faults_of("docs/a.md", &format!("{UNSAFE}; {}NT; https://docs.rs/sqlx", NOTES[0])),
            [""; 0]
        );
        assert_eq!(faults_of("Cargo.lock", &format!("source = \"{}\"", REGISTRIES[0])), [""; 0]);
        assert_eq!(faults_of("Cargo.toml", "[workspace]\n"), [""; 0]);
    }

    #[test]
    fn refuses_what_the_rules_forbid() {
        let notes = format!("// {}: later\n# {}", NOTES[0], NOTES[1]);
        assert_eq!(faults_of("a.py", &notes).len(), 2);
        let host = format!("\nsee https://static.{}/x", REGISTRIES[0]);
        assert_eq!(
            faults_of("README.md", &host),
            [format!("README.md:2: names the package registry {}", REGISTRIES[0])]
        );
        let code = format!("    {UNSAFE} {{ call() }}");
        assert_eq!(faults_of("src/a.rs", &code), [format!("src/a.rs:1: {UNSAFE} code")]);
        assert_eq!(faults_of("src/a/mod.rs", ""), ["src/a/mod.rs: a module is `name.rs`, never `mod.rs`"]);
        assert_eq!(
            faults_of("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"),
            ["crates/a/Cargo.toml: does not take over the workspace's lints"]
        );
    }
}
