//! The TCP socket under a connection, kept so that it can be cut.
//!
//! The client library runs every connection on a thread of its own, and that thread ends only when
//! the broker answers or the socket dies: a handshake that is given up, or a close that a blocked
//! connection cannot send, would leave thread, buffers (8 MiB) and socket behind. Cutting the
//! socket ends all three at once.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Owns the right to a socket's life: dropping it cuts the socket.
#[derive(Debug, Default)]
pub(crate) struct OwnedSocket(Socket);

impl OwnedSocket {
    pub(crate) fn handle(&self) -> Socket {
        self.0.clone()
    }

    pub(crate) fn cut(&self) {
        self.0.cut();
    }

    pub(crate) fn is_cut(&self) -> bool {
        matches!(*self.0.lock(), State::Cut)
    }
}

impl Drop for OwnedSocket {
    fn drop(&mut self) {
        self.0.cut();
    }
}

/// A socket that may not be connected yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Socket(Arc<Mutex<State>>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Connecting,
    Open(TcpStream),
    Cut,
}

impl Socket {
    /// Remembers a freshly connected socket; fails if it is no longer wanted.
    pub(crate) fn attach(&self, socket: &impl AsFd) -> io::Result<()> {
        let mut state = self.lock();
        if matches!(*state, State::Cut) {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "given up while connecting"));
        }
        *state = State::Open(TcpStream::from(socket.as_fd().try_clone_to_owned()?));
        Ok(())
    }

    fn cut(&self) {
        if let State::Open(socket) = std::mem::replace(&mut *self.lock(), State::Cut) {
            // It fails only on a socket that is closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
