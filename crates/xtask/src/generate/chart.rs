//! `deploy/helm/semel/README.md`: a table of the chart's values, made from `values.yaml` and the comments in it.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use crate::workspace::Workspace;

const HEAD: &str = "<!-- Made from values.yaml by `cargo xtask generate`: change it there. -->

# The chart semel

[docs/deploy.md](../../../docs/deploy.md) walks through an installation; [docs/scaling.md](../../../docs/scaling.md) says how many of
what. Two secrets and the namespace are enough:

```sh
helm install semel deploy/helm/semel --set namespace=prod,groups.payments.secret=semel-payments,broker.secret=semel-broker
```

A value that is not in this table, or of another type, is refused.

| value | default | meaning |
|---|---|---|
";

/// Makes the page.
pub(super) fn page(workspace: &Workspace) -> Result<(PathBuf, String)> {
    let folder = workspace.root.join("deploy/helm/semel");
    let values = fs::read_to_string(folder.join("values.yaml")).context("reading the chart's values")?;
    Ok((folder.join("README.md"), HEAD.to_owned() + &table(&values)?))
}

/// A row per value that holds no others. Its meaning is the comment above it, or that above what holds it.
fn table(values: &str) -> Result<String> {
    let mut table = String::new();
    // The names on the way to a line, each with its indentation.
    let mut path: Vec<(usize, &str)> = Vec::new();
    let mut comment = String::new();
    let mut lines = values.lines().peekable();
    while let Some(line) = lines.next() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        if let Some(said) = text.strip_prefix("# ") {
            comment = if comment.is_empty() { said.to_owned() } else { comment + " " + said };
            continue;
        }
        let Some((name, value)) = text.split_once(':').filter(|(name, _)| !name.starts_with('-')) else {
            comment.clear();
            continue;
        };
        path.retain(|(other, _)| *other < indent);
        path.push((indent, name));
        let name = path.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(".");
        let mut value = value.trim().to_owned();
        if value.is_empty() {
            let below = lines.peek().map_or("", |next| next.trim_start());
            if below.starts_with("- ") {
                below.trim_start_matches("- ").clone_into(&mut value);
            } else {
                // It holds others, whose own comments say what they mean.
                if name.ends_with("resources") {
                    "see values.yaml".clone_into(&mut value);
                    "What a pod asks for, and may take of memory at most.".clone_into(&mut comment);
                } else {
                    comment.clear();
                    continue;
                }
            }
        } else if path.iter().any(|(_, name)| *name == "resources") {
            comment.clear();
            continue;
        }
        ensure!(!comment.is_empty(), "values.yaml: no comment says what {name} means");
        let shown = if value.starts_with("see ") { value } else { format!("`{value}`") };
        writeln!(table, "| `{name}` | {shown} | {comment} |")?;
        comment.clear();
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_a_value_its_default_and_the_comment_above() {
        let values = "# The name.\nname: \"\"\n\n# Of many.\ngroups:\n  one:\n    # Its\n    # secret.\n    secret: a\n    resources:\n      limits: { memory: 1Mi }\n\
                      # Peers.\npeers:\n  - all\n";
        assert_eq!(
            table(values).unwrap(),
            "| `name` | `\"\"` | The name. |\n| `groups.one.secret` | `a` | Its secret. |\n\
             | `groups.one.resources` | see values.yaml | What a pod asks for, and may take of memory at most. |\n\
             | `peers` | `all` | Peers. |\n"
        );
        assert!(table("name: 1\n").is_err());
    }
}
