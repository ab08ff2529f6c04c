//! The names of the simulator's metrics.

use semel_core::metrics::{Label, Metric};

/// Counter of calls that came in; label `call`.
pub const CALLS: &str = "semel_simulator_calls_total";
/// Counter of ordered faults that a call met.
pub const FAULTS: &str = "semel_simulator_faults_total";
/// Counter of lines written to the book.
pub const LINES: &str = "semel_simulator_book_lines_total";

/// The simulator's metrics.
pub const METRICS: [Metric; 3] = [
    Metric::counter(CALLS, "Calls that came in, refused ones too; a call appears with its first.")
        .with(&[Label::open("call")]),
    Metric::counter(FAULTS, "Ordered faults that a call met."),
    Metric::counter(LINES, "Lines written to the book since the start."),
];
