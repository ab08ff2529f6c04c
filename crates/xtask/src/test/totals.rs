//! The sum over all test programs, read from the line that each ends with.

use std::fmt;

/// How many tests passed, failed and were skipped.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Totals {
    /// Passed.
    pub(crate) passed: u64,
    /// Failed.
    pub(crate) failed: u64,
    /// Marked as ignored, and so not run.
    pub(crate) skipped: u64,
}

impl Totals {
    /// Adds a line of output, if it is one that a test program ends with:
    /// `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
    pub(crate) fn add(&mut self, line: &str) {
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
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
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
            "test tells ... ok",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.02s",
        ] {
            totals.add(line);
        }
        assert_eq!(totals.to_string(), "15 passed, 2 failed, 1 skipped");
    }

    #[test]
    fn says_nothing_of_skipped_tests_when_there_are_none() {
        assert_eq!(Totals { passed: 1, failed: 0, skipped: 0 }.to_string(), "1 passed, 0 failed");
    }
}
