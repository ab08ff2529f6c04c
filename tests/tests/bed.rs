//! The test bed's own tests: what the other tests stand on.

#![expect(clippy::unwrap_used, reason = "what several tests share is test code too")]

#[path = "bed/command.rs"]
mod command;
#[path = "bed/daemon.rs"]
mod daemon;
#[path = "bed/servers.rs"]
mod servers;
#[path = "bed/services.rs"]
mod services;

use std::time::Duration;

/// How long a condition may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(30);
