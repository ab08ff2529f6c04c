//! `docs/reference`: a page per daemon, made from its own `--help`, one of their metrics, and the API's description of itself; the
//! dashboards, and the table of the chart's values.

mod chart;
pub(crate) mod dashboards;
mod metrics;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::bed::{self, PROGRAMS};
use crate::output;
use crate::workspace::{self, Workspace};

const MARK: &str = "<!-- Made from the program's own --help by `cargo xtask generate`: change it there. -->";

/// Writes the pages.
pub(crate) fn write(workspace: &Workspace) -> Result<()> {
    for (path, page) in pages(workspace)? {
        if fs::read_to_string(&path).is_ok_and(|current| current == page) {
            continue;
        }
        fs::create_dir_all(path.parent().unwrap_or(&workspace.root))?;
        fs::write(&path, page).with_context(|| format!("writing {}", path.display()))?;
        output::say(&format!("wrote {}", workspace.relative(&path)));
    }
    Ok(())
}

/// Names the pages that differ from what `write` would write.
pub(crate) fn stale(workspace: &Workspace) -> Result<Vec<String>> {
    let pages = pages(workspace)?;
    let stale = pages.iter().filter(|(path, page)| fs::read_to_string(path).ok().as_ref() != Some(*page));
    Ok(stale
        .map(|(path, _)| format!("{} is stale: run `cargo xtask generate`", workspace.relative(path)))
        .collect())
}

fn pages(workspace: &Workspace) -> Result<BTreeMap<PathBuf, String>> {
    bed::build_daemons(workspace)?;
    let folder = workspace.root.join("docs/reference");
    let page = |daemon: &str| Ok((folder.join(format!("{daemon}.md")), page(workspace, daemon)?));
    let mut pages: BTreeMap<_, _> = PROGRAMS.into_iter().map(page).collect::<Result<_>>()?;
    pages.insert(folder.join("openapi.json"), openapi(workspace)?);
    pages.insert(folder.join("metrics.md"), metrics::page(workspace)?);
    pages.extend(dashboards::pages(workspace)?);
    pages.extend([chart::page(workspace)?]);
    Ok(pages)
}

fn openapi(workspace: &Workspace) -> Result<String> {
    let mut command = Command::new(workspace.program("semel-api"));
    workspace::read(command.arg("openapi").env_clear())
}

fn page(workspace: &Workspace, daemon: &str) -> Result<String> {
    let help = |path: &[&str]| {
        let mut command = Command::new(workspace.program(daemon));
        // Without the environment, since clap prints the values that it finds there.
        let text = workspace::read(command.args(path).arg("--help").env_clear())?;
        if text.trim().is_empty() {
            bail!("`{}` prints nothing", workspace::describe(&command));
        }
        Ok(text)
    };
    let main = help(&[])?;
    let mut page = format!("{MARK}\n\n# {daemon}\n\n{}", block(&main));
    for subcommand in subcommands(&main) {
        let text = help(&[subcommand])?;
        write!(page, "\n## {daemon} {subcommand}\n\n{}", block(&text))?;
        for nested in subcommands(&text) {
            write!(page, "\n### {daemon} {subcommand} {nested}\n\n{}", block(&help(&[subcommand, nested])?))?;
        }
    }
    Ok(page)
}

fn block(help: &str) -> String {
    let lines: Vec<_> = help.trim().lines().map(str::trim_end).collect();
    format!("```text\n{}\n```\n", lines.join("\n"))
}

/// The subcommands that a help text lists, without `help` itself.
fn subcommands(help: &str) -> Vec<&str> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let list = list.take_while(|line| !line.is_empty());
    // A description that is wrapped onto a line of its own is indented further.
    let names = list.filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "Drains.\n\nUsage: semel-relay [OPTIONS] [COMMAND]\n\nCommands:\n  migrate  Applies\n             more words\n  help     Print this\n\nOptions:\n  --x  y   \n";

    #[test]
    fn finds_the_subcommands_of_a_help_text() {
        assert_eq!(subcommands(HELP), ["migrate"]);
        assert!(subcommands("Usage: x\n\nOptions:\n  -h\n").is_empty());
    }

    #[test]
    fn renders_help_without_trailing_blanks() {
        assert_eq!(block(" a  \n\n  b \n\n"), "```text\na\n\n  b\n```\n");
    }
}
