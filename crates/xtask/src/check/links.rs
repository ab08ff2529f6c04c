//! Where documents lead: each relative link of a Markdown file to a file and heading that are there, and each runbook that
//! is named anywhere, by an alert or a chart, to its page.

use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::Result;

use crate::sources;
use crate::workspace::Workspace;

/// The folder of the runbooks, as it is named by whoever links to one.
const RUNBOOKS: &str = "docs/runbooks/";
/// What may stand in the name of a page.
const NAME: fn(char) -> bool = |c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');

/// Names each link that leads nowhere.
pub(crate) fn faults(workspace: &Workspace) -> Result<Vec<String>> {
    let files = sources::files(workspace)?;
    let mut faults = Vec::new();
    for path in &files {
        // What is not text links to nothing.
        let Ok(text) = fs::read_to_string(workspace.root.join(path)) else { continue };
        let place = path.display();
        for name in runbooks(&text) {
            if !workspace.root.join(RUNBOOKS).join(name).is_file() {
                faults.push(format!("{place}: there is no {RUNBOOKS}{name}"));
            }
        }
        if !is_page(path) {
            continue;
        }
        for link in relative_links(&text) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { beside(path, file) };
            let linked = workspace.root.join(&target);
            let leads = if heading.is_empty() {
                linked.exists()
            } else {
                fs::read_to_string(linked).is_ok_and(|text| headings(&text).any(|known| known == heading))
            };
            if !leads {
                faults.push(format!("{place}: {link} leads nowhere"));
            }
        }
    }
    let list = fs::read_to_string(workspace.root.join(RUNBOOKS).join("README.md")).unwrap_or_default();
    for page in files.iter().filter(|path| path.parent() == Some(Path::new(RUNBOOKS.trim_end_matches('/')))) {
        let name = page.file_name().unwrap_or_default().to_string_lossy();
        if name != "README.md" && !list.contains(&format!("]({name})")) {
            faults.push(format!("{RUNBOOKS}README.md: does not lead to {name}"));
        }
    }
    Ok(faults)
}

fn is_page(path: &Path) -> bool {
    path.extension() == Some(OsStr::new("md"))
}

/// The pages of runbooks that a text names by their path. One whose name is made at run time is not known here.
fn runbooks(text: &str) -> impl Iterator<Item = &str> {
    text.split(RUNBOOKS).skip(1).filter_map(|rest| {
        let end = rest.find(|c| !NAME(c)).unwrap_or(rest.len());
        let name = rest[..end].trim_end_matches('.');
        is_page(Path::new(name)).then_some(name)
    })
}

/// The targets of a Markdown text's links to files beside it.
fn relative_links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| {
        let target = rest.split(')').next()?;
        (!target.contains("://") && !target.starts_with("mailto:") && !target.contains(char::is_whitespace))
            .then_some(target)
    })
}

/// Where a link leads that stands in this file.
fn beside(file: &Path, link: &str) -> PathBuf {
    let mut target = file.parent().unwrap_or(Path::new("")).to_path_buf();
    for component in Path::new(link).components() {
        match component {
            Component::ParentDir => {
                target.pop();
            }
            Component::CurDir => {}
            component => target.push(component),
        }
    }
    target
}

/// The headings of a Markdown text, as links name them.
fn headings(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter(|line| line.starts_with('#')).map(|line| {
        let words = line.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_runbooks_that_are_named() {
        let base = concat!("docs/run", "books/");
        let text =
            format!("url: https://h/{base}a-b.md\n\"{base}c.md#x\" {base}{{{{ name }}}}.md see {base}d.md.");
        assert_eq!(runbooks(&text).collect::<Vec<_>>(), ["a-b.md", "c.md", "d.md"]);
    }

    #[test]
    fn follows_links_to_files_and_headings() {
        let text = "[a](b.md) [c](../d.md#e-f) [g](#h) [i](https://j/k) `x[0](y z)`";
        assert_eq!(relative_links(text).collect::<Vec<_>>(), ["b.md", "../d.md#e-f", "#h"]);
        assert_eq!(beside(Path::new("docs/errors/a.md"), "../b.md"), Path::new("docs/b.md"));
        assert_eq!(beside(Path::new("README.md"), "./docs/b.md"), Path::new("docs/b.md"));
        let text = "# The one rule: lock `first`, insert\n\ntext\n## In 2 words_\n";
        assert_eq!(headings(text).collect::<Vec<_>>(), ["the-one-rule-lock-first-insert", "in-2-words_"]);
    }
}
