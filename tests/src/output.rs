//! A command's result on the standard output stream, as opposed to its progress.

use std::fmt::Display;
use std::io::Write as _;

/// Says one line.
pub fn say(line: impl Display) {
    // A closed stream is no reason to fail what is being told.
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}
