//! The sum over all test programs, read from the line that each ends with.

use std::fmt;

/// How many tests passed, failed and were skipped.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Totals {
    /// Passed.
    pub(crate) passed: u64,
    /// Failed.
    pub(crate) failed: u64,
    /// Marked as ignored, and so not run; or ended by saying that the services at hand do not allow it.
    pub(crate) skipped: u64,
    /// How many of these are among the passed ones.
    pub(crate) told: u64,
}

/// How the line of a test begins that does not run with the services at hand. The test program counts it as passed.
const SKIPPED: &str = "skipped: ";

impl Totals {
    /// Adds a line of output, if it is one that a test program ends with:
    /// `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
    pub(crate) fn add(&mut self, line: &str) {
        if line.starts_with(SKIPPED) {
            self.skipped += 1;
            self.told += 1;
        }
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for count in counts.split(';') {
            let mut words = count.split_whitespace();
            let Some(number) = words.next().and_then(|word| word.parse::<u64>().ok()) else { continue };
            match words.next() {
                Some("passed") => self.passed += number,
                Some("failed") => self.failed += number,
                Some("ignored") => self.skipped += number,
                _ => {}
            }
        }
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed.saturating_sub(self.told), self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_test_programs() {
        let mut totals = Totals::default();
        for line in [
            "running 6 tests",
            "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.00s",
            "skipped: tells: the server lets anybody in",
            "test tells ... ok",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.02s",
        ] {
            totals.add(line);
        }
        assert_eq!(totals.to_string(), "14 passed, 2 failed, 2 skipped");
    }

    #[test]
    fn knows_a_skipped_test_by_what_the_tests_say() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/src/skip.rs");
        let source = std::fs::read_to_string(path).unwrap();
        assert!(source.contains(&format!("pub const SKIPPED: &str = {SKIPPED:?};")), "{source}");
    }

    #[test]
    fn says_nothing_of_skipped_tests_when_there_are_none() {
        assert_eq!(Totals { passed: 1, ..Totals::default() }.to_string(), "1 passed, 0 failed");
    }
}
