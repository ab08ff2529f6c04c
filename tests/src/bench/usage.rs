//! What a process uses, as `/proc` tells it.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::param::clock_ticks_per_second;

/// Processor time of a process (proc(5)), to a hundredth of a second.
pub(crate) fn processor_time(pid: i32) -> Result<Duration> {
    let stat =
        fs::read_to_string(format!("/proc/{pid}/stat")).context("reading a process's processor time")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace().collect();
    let field = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    let (user, system) = field(11).zip(field(12)).context("reading /proc/<pid>/stat")?;
    Ok(Duration::from_micros((user + system) * 1_000_000 / clock_ticks_per_second()))
}
