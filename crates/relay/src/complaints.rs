//! What is said of events that could not be published: counts and an example, never a line per event.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use semel_core::outbox::held::{Failure, Held};
use uuid::Uuid;

/// At most one line of each kind in this time.
const QUIET: Duration = Duration::from_secs(1);

/// Failures that are not told yet.
#[derive(Debug, Default)]
pub(crate) struct Complaints {
    failed: BTreeMap<&'static str, u64>,
    example: Option<Failure>,
    dead: u64,
    dead_example: Option<Uuid>,
    told: Option<Instant>,
}

impl Complaints {
    /// Notes an attempt that failed.
    pub(crate) fn failed(&mut self, outcome: &'static str, failure: &Failure) {
        *self.failed.entry(outcome).or_default() += 1;
        self.example.get_or_insert_with(|| failure.clone());
    }

    /// Notes what became of events that failed.
    pub(crate) fn held(&mut self, held: &[Held]) {
        for event in held.iter().filter(|event| event.is_dead) {
            self.dead += 1;
            self.dead_example.get_or_insert(event.event_id);
        }
    }

    /// Tells what is not told yet, unless something was told just now.
    pub(crate) fn tell(&mut self) {
        if self.told.is_some_and(|told| told.elapsed() < QUIET) {
            return;
        }
        if let Some(example) = self.example.take() {
            let count = |outcome| self.failed.get(outcome).copied().unwrap_or_default();
            tracing::warn!(
                returned = count("returned"),
                nacked = count("nacked"),
                refused = count("refused"),
                unknown = count("unknown"),
                event_id = %example.event_id,
                "events could not be published and are set aside, such as this one: {}",
                example.error
            );
            self.failed.clear();
            self.told = Some(Instant::now());
        }
        if let Some(event_id) = self.dead_example.take() {
            tracing::error!(
                dead = self.dead,
                %event_id,
                "events were given up on and wait for a person, such as this one: see `semel-relay events list`"
            );
            self.dead = 0;
            self.told = Some(Instant::now());
        }
    }
}
