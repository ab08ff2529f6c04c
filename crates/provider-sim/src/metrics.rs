//! The names of the simulator's metrics.

use metrics::{counter, describe_counter};

/// Counter of calls that came in; label `call`.
pub const CALLS: &str = "semel_simulator_calls_total";
/// Counter of ordered faults that a call met.
pub const FAULTS: &str = "semel_simulator_faults_total";
/// Counter of lines written to the book.
pub const LINES: &str = "semel_simulator_book_lines_total";

/// Describes the metrics and sets the counters without labels to 0.
pub fn describe() {
    describe_counter!(CALLS, "Calls that came in, refused ones too.");
    describe_counter!(FAULTS, "Ordered faults that a call met.");
    describe_counter!(LINES, "Lines written to the book.");
    counter!(FAULTS).increment(0);
    counter!(LINES).increment(0);
}
