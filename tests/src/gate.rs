//! A failpoint at which a daemon waits until the test lets it go on.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::net::unique_name;
use crate::wait::eventually;

/// How long a daemon may take to come to its failpoint.
const COMES: Duration = Duration::from_mins(1);

/// A failpoint at which a daemon waits. It waits for a minute at most, and, while it is frozen, for as long as it is.
#[derive(Debug)]
pub struct Gate {
    failpoint: String,
    plan: String,
    log: PathBuf,
    open: PathBuf,
}

impl Gate {
    /// Closes a gate at this failpoint, for a daemon that is still to be started with [`Gate::env`].
    #[must_use]
    pub fn at(failpoint: &str) -> Self {
        let name = unique_name("semel_gate");
        let path = |ending: &str| std::env::temp_dir().join(format!("{name}.{ending}"));
        let (log, open) = (path("log"), path("open"));
        let plan = format!("{failpoint}=wait({})", open.display());
        Self { failpoint: failpoint.to_owned(), plan, log, open }
    }

    /// What the daemon is started with.
    ///
    /// # Errors
    ///
    /// The folder of temporary files has a name that is no text.
    pub fn env(&self) -> Result<[(&str, &str); 2]> {
        let log = self.log.to_str().context("the path of the failpoint's log is no text")?;
        Ok([("SEMEL_FAILPOINTS", &self.plan), ("SEMEL_FAILPOINT_LOG", log)])
    }

    /// Waits until the daemon has come to the failpoint so often.
    ///
    /// # Errors
    ///
    /// It has not, within a minute.
    pub async fn wait_for(&self, times: usize) -> Result<()> {
        let what = format!("{} to be reached {times} times", self.failpoint);
        let look = || async {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let reached = log.lines().filter(|line| line.starts_with(&self.failpoint)).count();
            if reached >= times { Ok(()) } else { Err(reached) }
        };
        eventually(&what, COMES, look).await
    }

    /// Lets the daemon go on, now and whenever it comes again.
    ///
    /// # Errors
    ///
    /// The file that says so cannot be written.
    pub fn open(&self) -> Result<()> {
        std::fs::write(&self.open, b"").with_context(|| format!("writing {}", self.open.display()))
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // They may never have come to be.
        let _ = (std::fs::remove_file(&self.log), std::fs::remove_file(&self.open));
    }
}
