//! `deploy/grafana/dashboards`: what Grafana reads, made from the short `deploy/grafana/dashboards.yml`.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::workspace::Workspace;

/// A dashboard is this many columns wide.
const WIDTH: u32 = 24;
/// Columns and lines of a panel: three stand side by side.
const PANEL: (u32, u32) = (8, 7);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Dashboard {
    pub(crate) uid: String,
    title: String,
    pub(crate) panels: Vec<Panel>,
}

#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub(crate) enum Panel {
    Row { row: String },
    Graph { title: String, unit: Option<String>, queries: Vec<Query> },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Query {
    pub(crate) expr: String,
    legend: String,
}

impl Dashboard {
    /// Its queries, as Grafana sends them but for its variables.
    pub(crate) fn queries(&self) -> impl Iterator<Item = &Query> {
        self.panels.iter().flat_map(|panel| match panel {
            Panel::Row { .. } => &[][..],
            Panel::Graph { queries, .. } => queries,
        })
    }
}

/// Reads the source.
pub(crate) fn read(workspace: &Workspace) -> Result<Vec<Dashboard>> {
    let path = workspace.root.join("deploy/grafana/dashboards.yml");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    serde_saphyr::from_str(&text).with_context(|| format!("reading {}", path.display()))
}

/// Makes the files.
pub(super) fn pages(workspace: &Workspace) -> Result<Vec<(PathBuf, String)>> {
    let folder = workspace.root.join("deploy/grafana/dashboards");
    let pages = read(workspace)?.into_iter().map(|dashboard| {
        Ok((folder.join(format!("{}.json", dashboard.uid)), format!("{:#}\n", render(&dashboard))))
    });
    pages.collect()
}

fn render(dashboard: &Dashboard) -> Value {
    let mut panels = Vec::new();
    let (mut x, mut y) = (0, 0);
    for panel in &dashboard.panels {
        let id = panels.len() + 1;
        match panel {
            Panel::Row { row } => {
                // Below the panels of the row before, if there are any.
                y += if x > 0 { PANEL.1 } else { 0 };
                let place = json!({ "x": 0, "y": y, "w": WIDTH, "h": 1 });
                panels.push(json!({
                    "id": id, "type": "row", "title": row, "collapsed": false, "panels": [], "gridPos": place,
                }));
                (x, y) = (0, y + 1);
            }
            Panel::Graph { title, unit, queries } => {
                panels.push(graph(id, title, unit.as_deref().unwrap_or("short"), queries, (x, y)));
                x += PANEL.0;
                if x == WIDTH {
                    (x, y) = (0, y + PANEL.1);
                }
            }
        }
    }
    json!({
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["semel"],
        "schemaVersion": 38,
        "editable": true,
        "refresh": "30s",
        "time": { "from": "now-1h", "to": "now" },
        "links": [{ "type": "dashboards", "tags": ["semel"], "title": "Semel", "asDropdown": true, "keepTime": true, "includeVars": true }],
        "templating": { "list": [
            { "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source" },
            // All of them is also what has no such label.
            {
                "name": "namespace", "type": "query", "label": "Namespace", "datasource": source(),
                "query": { "query": "label_values(semel_build_info, namespace)", "refId": "namespace" },
                "includeAll": true, "allValue": ".*", "multi": true, "refresh": 2, "sort": 1,
                "current": { "selected": true, "text": ["All"], "value": ["$__all"] },
            },
            {
                "name": "group", "type": "query", "label": "Group", "datasource": source(),
                "query": { "query": "label_values(semel_build_info{namespace=~\"$namespace\"}, group)", "refId": "group" },
                "includeAll": true, "multi": true, "refresh": 2, "sort": 1,
                "current": { "selected": true, "text": ["All"], "value": ["$__all"] },
            },
        ] },
        "panels": panels,
    })
}

fn graph(id: usize, title: &str, unit: &str, queries: &[Query], (x, y): (u32, u32)) -> Value {
    let targets = queries.iter().zip('A'..).map(|(query, letter)| {
        json!({ "refId": letter.to_string(), "datasource": source(), "expr": query.expr, "legendFormat": query.legend })
    });
    json!({
        "id": id,
        "type": "timeseries",
        "title": title,
        "datasource": source(),
        "gridPos": { "x": x, "y": y, "w": PANEL.0, "h": PANEL.1 },
        "fieldConfig": { "defaults": { "unit": unit, "min": 0 }, "overrides": [] },
        "options": { "legend": { "displayMode": "list", "placement": "bottom" }, "tooltip": { "mode": "multi" } },
        "targets": targets.collect::<Vec<_>>(),
    })
}

fn source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "
- uid: one
  title: One
  panels:
    - row: First
    - { title: A, queries: [{ expr: up, legend: '' }] }
    - row: Second
    - { title: B, unit: s, queries: [{ expr: up, legend: this }, { expr: down, legend: that }] }
";

    #[test]
    fn a_row_begins_below_the_panels_before_it() {
        let dashboards: Vec<Dashboard> = serde_saphyr::from_str(SOURCE).unwrap();
        assert_eq!(dashboards[0].queries().count(), 3);
        let made = render(&dashboards[0]);
        let places = made["panels"].as_array().unwrap().iter().map(|panel| panel["gridPos"]["y"].clone());
        assert_eq!(places.collect::<Vec<_>>(), [0, 1, 8, 9]);
        assert_eq!(made["panels"][3]["targets"][1]["refId"], "B");
        assert_eq!(made["panels"][3]["fieldConfig"]["defaults"]["unit"], "s");
    }

    #[test]
    fn a_misspelt_member_is_an_error() {
        assert!(serde_saphyr::from_str::<Vec<Dashboard>>(&SOURCE.replace("unit:", "units:")).is_err());
    }
}
