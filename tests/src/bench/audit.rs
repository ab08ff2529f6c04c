//! What arrived, held against what was written: nothing lost, nothing out of order.
//!
//! Each aggregate's events are numbered 1, 2, 3 … by their `aggregate_version`, so the numbers alone tell whether one is
//! missing and whether one was overtaken.

use std::collections::HashMap;

/// What has arrived, per aggregate.
#[derive(Clone, Debug, Default)]
pub(crate) struct Audit {
    aggregates: HashMap<String, Seen>,
    /// Different events.
    pub(crate) events: usize,
    /// Deliveries of events that had arrived before.
    pub(crate) repeats: usize,
    /// Events whose first delivery came after that of a later event of their aggregate.
    pub(crate) overtaken: usize,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    highest: usize,
    /// By version, from 1.
    versions: Vec<bool>,
}

impl Audit {
    /// Takes in one delivery.
    pub(crate) fn arrived(&mut self, aggregate: &str, version: usize) {
        let seen = match self.aggregates.get_mut(aggregate) {
            Some(seen) => seen,
            None => self.aggregates.entry(aggregate.to_owned()).or_default(),
        };
        if seen.versions.len() <= version {
            seen.versions.resize(version + 1, false);
        }
        if std::mem::replace(&mut seen.versions[version], true) {
            self.repeats += 1;
            return;
        }
        self.events += 1;
        if version < seen.highest {
            self.overtaken += 1;
        }
        seen.highest = seen.highest.max(version);
    }

    /// Says what is wrong, if anything is: `expected` events were written.
    pub(crate) fn faults(&self, expected: usize) -> Vec<String> {
        let mut faults = Vec::new();
        if self.events != expected {
            faults.push(format!("{} of {expected} events arrived", self.events));
        }
        if self.overtaken > 0 {
            faults
                .push(format!("{} events were overtaken by a later one of their aggregate", self.overtaken));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn audit(deliveries: &[(&str, usize)]) -> Audit {
        let mut audit = Audit::default();
        for &(aggregate, version) in deliveries {
            audit.arrived(aggregate, version);
        }
        audit
    }

    #[test]
    fn repeats_are_no_fault() {
        let audit = audit(&[("a", 1), ("a", 2), ("b", 1), ("a", 1), ("a", 2), ("a", 3)]);
        assert_eq!((audit.events, audit.repeats, audit.overtaken), (4, 2, 0));
        assert_eq!(audit.faults(4), [""; 0]);
    }

    #[test]
    fn an_event_that_comes_after_a_later_one_was_overtaken() {
        let audit = audit(&[("a", 1), ("a", 3), ("a", 2), ("b", 1)]);
        assert_eq!(audit.faults(4), ["1 events were overtaken by a later one of their aggregate"]);
    }

    #[test]
    fn a_missing_event_is_told() {
        assert_eq!(audit(&[("a", 1), ("a", 3)]).faults(3), ["2 of 3 events arrived"]);
    }
}
