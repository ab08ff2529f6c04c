//! The settings that manifests give are settings that the daemons have.

use std::collections::BTreeSet;
use std::fs;

use anyhow::Result;

use super::Faults;
use crate::bed::PROGRAMS;
use crate::workspace::Workspace;

/// Names every variable of ours in a text that no program reads.
pub(super) fn faults(workspace: &Workspace, text: &str) -> Result<Faults> {
    let mut known = BTreeSet::new();
    for program in PROGRAMS {
        let page = fs::read_to_string(workspace.root.join(format!("docs/reference/{program}.md")))?;
        known.extend(variables(&page).map(str::to_owned));
    }
    let unknown = variables(text).filter(|name| !known.contains(*name)).collect::<BTreeSet<_>>();
    Ok(unknown.into_iter().map(|name| format!("no program reads {name}")).collect())
}

fn variables(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
    words.filter(|word| ["SEMEL_", "AMQP_", "DATABASE_"].iter().any(|prefix| word.starts_with(prefix)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_a_fault() {
        let workspace = Workspace::locate().unwrap();
        let text =
            "- { name: SEMEL_RELAY_WORKERS, value: 4 }\n  DATABASE_URL_FILE: /x\n  SEMEL_RELAY_WORKER: 3";
        assert_eq!(faults(&workspace, text).unwrap(), ["no program reads SEMEL_RELAY_WORKER"]);
    }
}
