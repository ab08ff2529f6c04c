//! `docs/reference/metrics.md`: one table of what all programs emit, made from what each says of itself.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::bed::PROGRAMS;
use crate::workspace::{self, Workspace};

const HEAD: &str = "<!-- Made from each program's subcommand `metrics` by `cargo xtask generate`: change it there. -->

# Metrics

Every program serves these at `GET /metrics` of its admin address. What the values of the labels mean, and how to ask for
what: [metrics](../metrics.md).

| name | type | labels | from | meaning |
|---|---|---|---|---|
";

/// A row, and which programs have it.
struct Row {
    /// Name, type and labels.
    metric: String,
    meaning: String,
    from: Vec<&'static str>,
}

/// Makes the page.
pub(super) fn page(workspace: &Workspace) -> Result<String> {
    let mut rows = Vec::new();
    for program in PROGRAMS {
        let mut command = Command::new(workspace.program(program));
        add(&mut rows, program, &workspace::read(command.arg("metrics").env_clear())?)?;
    }
    Ok(render(&rows))
}

fn add(rows: &mut Vec<Row>, program: &'static str, said: &str) -> Result<()> {
    ensure!(!said.trim().is_empty(), "`{program} metrics` prints nothing");
    for line in said.lines() {
        let row = line.strip_suffix(" |").and_then(|line| line.rsplit_once(" | "));
        let (metric, meaning) = row.with_context(|| format!("`{program} metrics` prints {line:?}"))?;
        match rows.iter_mut().find(|row| row.metric == metric && row.meaning == meaning) {
            Some(row) => row.from.push(program),
            None => {
                rows.push(Row { metric: metric.into(), meaning: meaning.into(), from: vec![program] });
            }
        }
    }
    Ok(())
}

fn render(rows: &[Row]) -> String {
    let mut page = HEAD.to_owned();
    for Row { metric, meaning, from } in rows {
        let from = if from.len() == PROGRAMS.len() { "all".to_owned() } else { from.join(", ") };
        let _ = writeln!(page, "{metric} | {from} | {meaning} |");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_programs_say_alike_is_one_row() {
        let mut rows = Vec::new();
        add(&mut rows, "semel-relay", "| `a` | gauge |  | The a. |\n| `b` | counter |  | The b. |\n")
            .unwrap();
        add(&mut rows, "semel-reaper", "| `a` | gauge |  | The a. |\n").unwrap();
        let page = render(&rows);
        assert!(page.ends_with(
            "| `a` | gauge |  | semel-relay, semel-reaper | The a. |\n| `b` | counter |  | semel-relay | The b. |\n"
        ));
        assert!(add(&mut rows, "semel-relay", "no row\n").is_err());
        assert!(add(&mut rows, "semel-relay", "").is_err());
    }
}
