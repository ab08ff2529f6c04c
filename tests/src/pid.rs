//! Processes that are named by more than a number.
//!
//! A process id is used again once its process is gone. Together with the time of its start it is
//! not, so a server remembered in a file is never confused with a stranger. A process that has ended
//! but was not reaped counts as gone.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::wait::eventually;

/// One process: its id, and when it was started, in clock ticks since the machine was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    pid: i32,
    started: u64,
}

impl ProcessId {
    /// Names the process that has this id now.
    #[must_use]
    pub fn of(pid: i32) -> Option<Self> {
        Stat::read(pid).map(|stat| Self { pid, started: stat.started })
    }

    /// The process id.
    #[must_use]
    pub fn pid(self) -> i32 {
        self.pid
    }

    /// Whether it runs, be it frozen or not.
    #[must_use]
    pub fn is_running(self) -> bool {
        Stat::read(self.pid).is_some_and(|stat| stat.started == self.started && stat.state != 'Z')
    }

    /// Whether it stands still because of a SIGSTOP.
    #[must_use]
    pub fn is_frozen(self) -> bool {
        Stat::read(self.pid).is_some_and(|stat| stat.started == self.started && stat.state == 'T')
    }

    /// How much memory it has resident.
    ///
    /// # Errors
    ///
    /// It is gone.
    pub fn resident_bytes(self) -> Result<u64> {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.pid)).context("reading its memory")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().context("reading VmRSS")?;
        Ok(kibibytes * 1024)
    }

    /// Sends a signal; says whether the process was still there.
    ///
    /// # Errors
    ///
    /// The process is another user's.
    pub fn signal(self, signal: Signal) -> Result<bool> {
        let Some(pid) = Pid::from_raw(self.pid).filter(|_| self.is_running()) else { return Ok(false) };
        match kill_process(pid, signal) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(error) => Err(error).with_context(|| format!("sending {signal:?} to process {}", self.pid)),
        }
    }

    /// Kills it and all processes that descend from it, and waits until they are gone.
    ///
    /// # Errors
    ///
    /// A process is another user's, or still there at the deadline.
    pub async fn kill_tree(self, what: &str, deadline: Duration) -> Result<()> {
        // The children of another that has its number by now are not ours to kill.
        if !self.is_running() {
            return Ok(());
        }
        let family = self.descendants();
        self.signal(Signal::KILL)?;
        for child in &family {
            child.signal(Signal::KILL)?;
        }
        self.wait_gone(what, deadline).await?;
        for child in family {
            child.wait_gone(what, deadline).await?;
        }
        Ok(())
    }

    /// Waits until it is gone.
    ///
    /// # Errors
    ///
    /// It still runs at the deadline.
    pub async fn wait_gone(self, what: &str, deadline: Duration) -> Result<()> {
        let what = format!("{what} (process {}) to end", self.pid);
        eventually(&what, deadline, || async { (!self.is_running()).then_some(()) }).await
    }

    /// All processes below this one, the nearest first.
    fn descendants(self) -> Vec<Self> {
        let all: Vec<(i32, Stat)> = all().filter_map(|pid| Some((pid, Stat::read(pid)?))).collect();
        let mut family = vec![self];
        let mut next = 0;
        while let Some(parent) = family.get(next).map(|process| process.pid) {
            let children = all.iter().filter(|(_, stat)| stat.parent == parent);
            family.extend(children.map(|&(pid, stat)| Self { pid, started: stat.started }));
            next += 1;
        }
        family.split_off(1)
    }
}

/// The ids of all processes.
pub(crate) fn all() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// What `/proc/<pid>/stat` says (proc(5)).
#[derive(Clone, Copy)]
struct Stat {
    state: char,
    parent: i32,
    started: u64,
}

impl Stat {
    fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The program's name is in parentheses and may itself hold spaces and parentheses.
        let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
        Some(Self {
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
            started: fields.nth(17)?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn me() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    #[test]
    fn knows_a_process_from_a_later_one_with_its_number() {
        let now = ProcessId::of(me()).unwrap();
        assert!(now.is_running());
        assert!(!ProcessId { started: now.started + 1, ..now }.is_running());
    }

    #[tokio::test]
    async fn kills_a_process_and_its_children() {
        let mut shell = Command::new("sh");
        let mut shell = shell.args(["-c", "sleep 600 & sleep 600 & wait"]).spawn().unwrap();
        let parent = ProcessId::of(i32::try_from(shell.id()).unwrap()).unwrap();
        let children = eventually("both children", Duration::from_secs(10), || async {
            Some(parent.descendants()).filter(|children| children.len() == 2)
        });
        let children = children.await.unwrap();
        parent.kill_tree("the shell", Duration::from_secs(10)).await.unwrap();
        assert!(!parent.is_running() && !children.iter().any(|child| child.is_running()));
        shell.wait().unwrap();
    }
}
