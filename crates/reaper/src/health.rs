//! Readiness: the reaper is ready while it can work.

use semel_core::admin::Health;
use semel_core::disposition::chain;
use semel_core::lifecycle::{Lifecycle, Pass, Work};

/// Work whose passes tell whether the process is ready.
#[derive(Debug)]
pub(crate) struct Telling<W> {
    pub(crate) work: W,
    pub(crate) health: Health,
    pub(crate) life: Lifecycle,
}

impl<W: Work> Work for Telling<W> {
    type Error = W::Error;

    async fn run_once(&mut self) -> Result<Pass, W::Error> {
        let pass = self.work.run_once().await;
        match &pass {
            // Once it stops it is not ready any more, whatever its last pass came to.
            Ok(_) if !self.life.is_stopping() => self.health.ready(),
            Ok(_) => {}
            Err(error) => self.health.not_ready(format!("waiting for the database: {}", chain(error))),
        }
        pass
    }
}
