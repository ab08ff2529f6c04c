//! Free ports and unique names.

use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};

/// Ports are taken from below the range that the kernel gives to outgoing connections: a server that
/// is down for a moment would otherwise lose its port to one of them. It also keeps RabbitMQ's
/// distribution port, by default the AMQP port plus 20,000, within 65,535.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// How many ports are tried before giving up.
const TRIES: usize = 200;

/// Ports handed out by this process, so that two tests in parallel never get the same.
static TAKEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// Finds a TCP port on 127.0.0.1 that nobody listens on, and that this process has not handed out.
///
/// Another process may take it before its user does: who starts a server on it tries again.
///
/// # Errors
///
/// No port was free.
pub fn free_port() -> Result<u16> {
    let mut guard = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let taken = guard.get_or_insert_default();
    (0..TRIES)
        .map(|_| fastrand::u16(PORTS))
        .find(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() && taken.insert(port))
        .with_context(|| format!("no free port on 127.0.0.1 in {PORTS:?} after {TRIES} tries"))
}

/// Makes a name that nobody else uses: `<prefix>_<pid>_<random>`.
///
/// The process id tells a later run which databases and virtual hosts were left behind.
#[must_use]
pub fn unique_name(prefix: &str) -> String {
    let random: String = (0..8).map(|_| fastrand::alphanumeric().to_ascii_lowercase()).collect();
    format!("{prefix}_{}_{random}", std::process::id())
}

/// Reads the process id out of a name made by [`unique_name`].
#[must_use]
pub fn owner_of(name: &str) -> Option<i32> {
    let mut parts = name.rsplit('_');
    let random = parts.next()?;
    let pid = parts.next()?.parse().ok()?;
    (random.len() == 8 && parts.next().is_some()).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hands_out_no_port_twice() {
        let ports: HashSet<u16> = (0..50).map(|_| free_port().unwrap()).collect();
        assert_eq!(ports.len(), 50);
    }

    #[test]
    fn finds_the_owner_of_a_unique_name() {
        assert_eq!(owner_of(&unique_name("orders_of_test")), i32::try_from(std::process::id()).ok());
        assert_eq!(owner_of("postgres"), None);
        assert_eq!(owner_of("semel_dev"), None);
        assert_eq!(owner_of("12_abcdefgh"), None);
    }
}
