//! Growing, jittered, bounded waits.

use std::time::Duration;

/// A wait that doubles from `shortest` to `longest`, each time with jitter.
#[derive(Clone, Debug)]
pub struct Backoff {
    shortest: Duration,
    longest: Duration,
    next: Duration,
    /// The share of each step that is left to chance.
    jitter: f64,
}

impl Backoff {
    /// Starts at `shortest`; never waits longer than `longest`.
    #[must_use]
    pub fn new(shortest: Duration, longest: Duration) -> Self {
        Self { shortest, longest: longest.max(shortest), next: shortest, jitter: 0.5 }
    }

    /// The wait between attempts to reach a service that is away: 250 ms to 5 s.
    #[must_use]
    pub fn for_service() -> Self {
        Self::new(Duration::from_millis(250), Duration::from_secs(5))
    }

    /// Leaves less to chance, for waits whose mean counts: a tenth of each step.
    #[must_use]
    pub fn steady(self) -> Self {
        Self { jitter: 0.1, ..self }
    }

    /// Returns the next wait: half of the current step to the whole of it, or as [`Backoff::steady`] says.
    pub fn next_wait(&mut self) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(self.longest);
        step.mul_f64(1.0 - self.jitter * fastrand::f64())
    }

    /// Starts over at the shortest wait.
    pub fn reset(&mut self) {
        self.next = self.shortest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_with_jitter_up_to_the_longest() {
        let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(40));
        for step in [10, 20, 40, 40, 40] {
            let wait = backoff.next_wait();
            assert!(
                wait >= Duration::from_millis(step) / 2 && wait <= Duration::from_millis(step),
                "{wait:?}"
            );
        }
        backoff.reset();
        assert!(backoff.next_wait() <= Duration::from_millis(10));
    }

    #[test]
    fn a_steady_wait_is_never_much_shorter_than_its_step() {
        let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_millis(250)).steady();
        for _ in 0..1000 {
            let wait = backoff.next_wait();
            assert!((225..=250).contains(&wait.as_millis()), "{wait:?}");
        }
    }
}
