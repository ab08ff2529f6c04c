//! The result of a run: rows with figures, floors and goals, as a table and as JSON.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection, Row as _};

use crate::services::Services;

/// What a figure counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Unit {
    PerSecond,
    RequestsPerSecond,
    Milliseconds,
    PercentOfCore,
    Mebibytes,
    StatementsPerSecond,
    Events,
}

/// What is to be reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// The ratio to the floor.
    RatioAtLeast(f64),
    /// The ratio to the floor.
    RatioAtMost(f64),
    /// The figure itself.
    AtMost(f64),
    /// Nothing: it is told for comparison.
    None,
}

/// One figure, the best of its samples.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) value: f64,
    pub(crate) samples: Vec<f64>,
}

/// One line of the table.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) unit: Unit,
    pub(crate) figure: Figure,
    /// What the figure is compared with, and what that is.
    pub(crate) floor: Option<(&'static str, Figure)>,
    pub(crate) goal: Goal,
}

/// What the figures were measured on.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    cores: usize,
    postgres: String,
    settings: Vec<(String, String)>,
    rabbitmq: String,
}

/// Everything that a run has found.
#[derive(Debug)]
pub(crate) struct Report {
    machine: Machine,
    quick: bool,
    lines: Vec<Line>,
    notes: Vec<String>,
    faults: Vec<String>,
    pub(crate) took: Duration,
}

impl Figure {
    /// One measurement.
    pub(crate) fn one(value: f64) -> Self {
        Self { value, samples: vec![value] }
    }

    /// The greatest of several: the best rate, the worst time.
    pub(crate) fn greatest(samples: &[f64]) -> Self {
        Self { value: super::statistics::greatest(samples), samples: samples.to_vec() }
    }

    /// A duration in milliseconds.
    pub(crate) fn milliseconds(time: Duration) -> Self {
        Self::one(time.as_secs_f64() * 1000.0)
    }
}

impl Machine {
    /// Asks the services for their versions, and Postgres for what its speed depends on.
    pub(crate) async fn ask(services: &Services) -> Result<Self> {
        let mut connection = PgConnection::connect(services.postgres.admin_url("postgres").as_str())
            .await
            .context("connecting to Postgres")?;
        let names = ["server_version", "fsync", "synchronous_commit", "shared_buffers"];
        let mut settings = Vec::new();
        for name in names {
            let row = sqlx::query("SELECT current_setting($1)").bind(name).fetch_one(&mut connection).await;
            settings.push((name.to_owned(), row.context("asking Postgres for a setting")?.try_get(0)?));
        }
        let (_, postgres): (String, String) = settings.remove(0);
        let rabbitmq = match services.rabbitmq.management() {
            Some(management) => management.version().await?,
            None => "of unknown version".to_owned(),
        };
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        Ok(Self { cores, postgres, settings, rabbitmq })
    }

    fn line(&self) -> String {
        let settings: Vec<_> = self.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let Self { cores, postgres, rabbitmq, .. } = self;
        format!("{cores} cores; Postgres {postgres} ({}); RabbitMQ {rabbitmq}", settings.join(", "))
    }
}

impl Line {
    fn ratio(&self) -> Option<f64> {
        let (_, floor) = self.floor.as_ref()?;
        (floor.value > 0.0).then(|| self.figure.value / floor.value)
    }

    /// Whether the goal is met; `None` without a goal.
    fn met(&self) -> Option<bool> {
        match self.goal {
            Goal::RatioAtLeast(bound) => Some(self.ratio().is_some_and(|ratio| ratio >= bound)),
            Goal::RatioAtMost(bound) => Some(self.ratio().is_some_and(|ratio| ratio <= bound)),
            Goal::AtMost(bound) => Some(self.figure.value <= bound),
            Goal::None => None,
        }
    }

    fn cells(&self) -> [String; 7] {
        let (floor, what) = match &self.floor {
            Some((what, floor)) => (self.unit.tell(floor.value), (*what).to_owned()),
            None => (String::new(), String::new()),
        };
        let goal = match self.goal {
            Goal::RatioAtLeast(bound) => format!("ratio ≥ {bound}"),
            Goal::RatioAtMost(bound) => format!("ratio ≤ {bound}"),
            Goal::AtMost(bound) => format!("≤ {}", self.unit.tell(bound)),
            Goal::None => String::new(),
        };
        let verdict = self.met().map_or("", |met| if met { "met" } else { "MISSED" });
        let ratio = self.ratio().map(|ratio| format!("{ratio:.2}")).unwrap_or_default();
        [self.name.clone(), self.unit.tell(self.figure.value), ratio, goal, verdict.to_owned(), floor, what]
    }

    fn json(&self) -> Value {
        let goal = match self.goal {
            Goal::RatioAtLeast(bound) => json!({"ratio_at_least": bound}),
            Goal::RatioAtMost(bound) => json!({"ratio_at_most": bound}),
            Goal::AtMost(bound) => json!({"at_most": bound}),
            Goal::None => Value::Null,
        };
        let floor = self
            .floor
            .as_ref()
            .map(|(what, floor)| json!({"what": what, "value": floor.value, "samples": floor.samples}));
        json!({
            "name": self.name, "unit": self.unit.name(), "value": self.figure.value, "samples": self.figure.samples,
            "floor": floor, "ratio": self.ratio(), "goal": goal, "met": self.met(),
        })
    }
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::PerSecond => "events/s",
            Self::RequestsPerSecond => "requests/s",
            Self::Milliseconds => "ms",
            Self::PercentOfCore => "% of a core",
            Self::Mebibytes => "MiB",
            Self::StatementsPerSecond => "statements/s",
            Self::Events => "events",
        }
    }

    fn tell(self, value: f64) -> String {
        let precision = match self {
            Self::PerSecond | Self::RequestsPerSecond | Self::Events => 0,
            Self::PercentOfCore => 2,
            Self::Milliseconds | Self::Mebibytes | Self::StatementsPerSecond => 1,
        };
        format!("{value:.precision$} {}", self.name())
    }
}

impl Report {
    pub(crate) fn new(machine: Machine, quick: bool) -> Self {
        Self {
            machine,
            quick,
            lines: Vec::new(),
            notes: Vec::new(),
            faults: Vec::new(),
            took: Duration::ZERO,
        }
    }

    pub(crate) fn line(&mut self, line: Line) {
        self.lines.push(line);
    }

    /// Something worth knowing beside the figures.
    pub(crate) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Something that must not be, whatever the figures are.
    pub(crate) fn fault(&mut self, fault: String) {
        crate::progress::Progress::Stderr.say(format_args!("FAULT: {fault}"));
        self.faults.push(fault);
    }

    pub(crate) fn is_faulty(&self) -> bool {
        !self.faults.is_empty()
    }

    /// How many goals were missed.
    pub(crate) fn missed(&self) -> usize {
        self.lines.iter().filter(|line| line.met() == Some(false)).count()
    }

    /// The report for people.
    pub(crate) fn table(&self) -> String {
        let head = ["", "figure", "ratio", "goal", "", "compared with", ""].map(str::to_owned);
        let rows: Vec<_> = std::iter::once(head).chain(self.lines.iter().map(Line::cells)).collect();
        let width =
            |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
        let widths: [usize; 7] = std::array::from_fn(width);
        let mut text = format!("\n{}\n\n", self.machine.line());
        for row in &rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[column] - cell.chars().count());
                // Numbers stand to the right.
                let cell = if [1, 2, 5].contains(&column) { pad + cell } else { cell.clone() + &pad };
                line += &cell;
                line += "  ";
            }
            text += line.trim_end();
            text.push('\n');
        }
        for (title, lines) in [("Notes", &self.notes), ("FAULTS", &self.faults)] {
            if !lines.is_empty() {
                let _ = write!(text, "\n{title}:\n");
                for line in lines {
                    let _ = writeln!(text, "  {line}");
                }
            }
        }
        let goals = self.lines.iter().filter(|line| line.met().is_some()).count();
        let quick = if self.quick { " A quick run: good for trying, not for comparing." } else { "" };
        let (met, seconds) = (goals - self.missed(), self.took.as_secs());
        let _ =
            write!(text, "\n{met} of {goals} goals met, {} faults, {seconds} s.{quick}", self.faults.len());
        text
    }

    /// The report for programs.
    pub(crate) fn json(&self) -> Value {
        let settings: Value =
            self.machine.settings.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
        json!({
            "machine": {
                "cores": self.machine.cores, "postgres": self.machine.postgres, "settings": settings,
                "rabbitmq": self.machine.rabbitmq,
            },
            "quick": self.quick, "seconds": self.took.as_secs_f64(),
            "rows": self.lines.iter().map(Line::json).collect::<Vec<_>>(),
            "notes": self.notes, "faults": self.faults,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(lines: &[(f64, Option<f64>, Goal)]) -> Report {
        let machine = Machine {
            cores: 2,
            postgres: "15".to_owned(),
            settings: vec![("fsync".to_owned(), "off".to_owned())],
            rabbitmq: "3.10".to_owned(),
        };
        let mut report = Report::new(machine, false);
        for &(value, floor, goal) in lines {
            report.line(Line {
                name: "drain".to_owned(),
                unit: Unit::PerSecond,
                figure: Figure::one(value),
                floor: floor.map(|floor| ("bare publisher", Figure::greatest(&[1.0, floor]))),
                goal,
            });
        }
        report
    }

    #[test]
    fn judges_the_ratio_or_the_figure() {
        let lines = [
            (90.0, Some(100.0), Goal::RatioAtLeast(0.9)),
            (89.0, Some(100.0), Goal::RatioAtLeast(0.9)),
            (110.0, Some(100.0), Goal::RatioAtMost(1.2)),
            (5.0, None, Goal::AtMost(4.0)),
            (5.0, None, Goal::RatioAtLeast(0.1)),
            (5.0, Some(4.0), Goal::None),
        ];
        let report = report(&lines);
        let met: Vec<_> = report.lines.iter().map(Line::met).collect();
        assert_eq!(met, [Some(true), Some(false), Some(true), Some(false), Some(false), None]);
        assert_eq!(report.missed(), 3);
    }

    #[test]
    fn prints_a_table_that_can_be_read() {
        let mut report = report(&[(90.0, Some(100.0), Goal::RatioAtLeast(0.95))]);
        report.fault("one event is lost".to_owned());
        let table = report.table();
        for part in [
            "90 events/s",
            "0.90",
            "ratio ≥ 0.95",
            "MISSED",
            "100 events/s",
            "bare publisher",
            "one event is lost",
        ] {
            assert!(table.contains(part), "{part} is missing in {table}");
        }
        assert!(table.ends_with("0 of 1 goals met, 1 faults, 0 s."), "{table}");
        let json = report.json();
        assert_eq!(json["rows"][0]["floor"]["samples"], json!([1.0, 100.0]));
        assert_eq!(json["rows"][0]["met"], json!(false));
    }
}
