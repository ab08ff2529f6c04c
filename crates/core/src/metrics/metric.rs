//! What is known of a metric before it has a value: its name, its labels, what it means.
//!
//! Each crate has its metrics as constants of this kind. From them a daemon's recorder gets its descriptions and its counters
//! that stand at 0, and the daemon's subcommand `metrics` prints them, from which `docs/reference/metrics.md` is made.

use std::fmt;

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram};

/// A metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// What becomes of its value.
    pub kind: Kind,
    /// The labels that it has.
    pub labels: &'static [Label],
    /// What it means.
    pub meaning: &'static str,
}

/// What becomes of a metric's value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// It grows, and starts at 0.
    Counter,
    /// It is what it is at the moment.
    Gauge,
    /// How often values were how large.
    Histogram,
}

/// A label, and its values.
#[derive(Clone, Copy, Debug)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// All that it may have; none where somebody outside decides.
    pub values: &'static [&'static str],
}

impl Label {
    /// A label with these values.
    #[must_use]
    pub const fn of(name: &'static str, values: &'static [&'static str]) -> Self {
        Self { name, values }
    }

    /// A label whose values are not known here.
    #[must_use]
    pub const fn open(name: &'static str) -> Self {
        Self { name, values: &[] }
    }
}

impl Metric {
    /// A counter without labels.
    #[must_use]
    pub const fn counter(name: &'static str, meaning: &'static str) -> Self {
        Self { name, kind: Kind::Counter, labels: &[], meaning }
    }

    /// A gauge without labels.
    #[must_use]
    pub const fn gauge(name: &'static str, meaning: &'static str) -> Self {
        Self { name, kind: Kind::Gauge, labels: &[], meaning }
    }

    /// A histogram without labels.
    #[must_use]
    pub const fn histogram(name: &'static str, meaning: &'static str) -> Self {
        Self { name, kind: Kind::Histogram, labels: &[], meaning }
    }

    /// The same with labels.
    #[must_use]
    pub const fn with(mut self, labels: &'static [Label]) -> Self {
        self.labels = labels;
        self
    }

    /// Tells the recorder of it, and sets a counter whose labels are all known to 0, for each combination of them.
    pub fn describe(&self) {
        let Self { name, meaning, .. } = *self;
        match (self.kind, name.ends_with("_seconds")) {
            (Kind::Counter, _) => describe_counter!(name, meaning),
            (Kind::Gauge, true) => describe_gauge!(name, Unit::Seconds, meaning),
            (Kind::Gauge, false) => describe_gauge!(name, meaning),
            (Kind::Histogram, true) => describe_histogram!(name, Unit::Seconds, meaning),
            (Kind::Histogram, false) => describe_histogram!(name, meaning),
        }
        if self.kind == Kind::Counter {
            for labels in self.combinations() {
                counter!(name, labels).increment(0);
            }
        }
    }

    /// Every combination of the labels' values; none where one is open.
    fn combinations(&self) -> Vec<Vec<metrics::Label>> {
        self.labels.iter().fold(vec![Vec::new()], |made, label| {
            let with = |value: &'static str| {
                let added = metrics::Label::from_static_parts(label.name, value);
                made.iter().map(move |labels| {
                    let mut labels = labels.clone();
                    labels.push(added.clone());
                    labels
                })
            };
            label.values.iter().copied().flat_map(with).collect()
        })
    }
}

/// Tells the recorder of metrics.
pub fn describe(metrics: &[Metric]) {
    metrics.iter().for_each(Metric::describe);
}

/// A row of a table in Markdown: name, type, labels, meaning.
impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let labels = self.labels.iter().map(|label| match label.values {
            [] => format!("`{}`", label.name),
            values => format!("`{}` = `{}`", label.name, values.join("`, `")),
        });
        let labels = labels.collect::<Vec<_>>().join("; ");
        write!(f, "| `{}` | {kind} | {labels} | {} |", self.name, self.meaning)
    }
}

/// The rows of these metrics, a line each.
#[must_use]
pub fn table<'a>(metrics: impl IntoIterator<Item = &'a Metric>) -> String {
    metrics.into_iter().map(|metric| metric.to_string() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_names_the_labels_and_their_values() {
        const CALLS: Metric = Metric::counter("semel_calls_total", "Calls.")
            .with(&[Label::of("call", &["get", "list"]), Label::open("consumer")]);
        assert_eq!(
            table(&[CALLS, Metric::gauge("semel_up", "Up.")]),
            "| `semel_calls_total` | counter | `call` = `get`, `list`; `consumer` | Calls. |\n\
             | `semel_up` | gauge |  | Up. |\n"
        );
    }

    #[test]
    fn every_combination_of_known_values_is_made_and_none_of_open_ones() {
        const KNOWN: [Label; 2] = [Label::of("a", &["1", "2"]), Label::of("b", &["1", "2", "3"])];
        const OPEN: [Label; 2] = [KNOWN[0], Label::open("b")];
        let counter = Metric::counter("semel_calls_total", "Calls.");
        let count = |labels: &'static [Label]| counter.with(labels).combinations().len();
        assert_eq!(count(&[]), 1);
        assert_eq!(count(&KNOWN), 6);
        assert_eq!(count(&OPEN), 0);
    }
}
