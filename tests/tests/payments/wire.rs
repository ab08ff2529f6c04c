//! The wire between one API and its database, where one statement or its answer is lost while both sides believe the
//! connection open.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};
use semel_tests::proxy::{Direction, Proxy, Rule, Verdict};
use semel_tests::system::Place;
use semel_tests::wait::eventually;

/// What is lost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Loss {
    /// The statement: it never arrives, and nothing after it.
    Statement,
    /// Its answer: it is executed and committed, and the client never hears of it.
    Answer,
    /// Its answer, by a reset that the client notices; once.
    AnswerByReset,
}

/// A way to the database on which the first statement that holds a text is lost, or its answer.
pub(crate) struct Wire {
    proxy: Proxy,
    pub(crate) url: String,
    happened: Arc<AtomicBool>,
}

impl Wire {
    /// The way of a process that makes one request, and so has one connection in use at a time.
    pub(crate) async fn to(place: &Place, text: &str, loss: Loss) -> Result<Self> {
        let mut url = reqwest::Url::parse(&place.payments.url())?;
        let target = format!("{}:{}", url.host_str().context("no host")?, url.port().context("no port")?);
        let target: SocketAddr = tokio::net::lookup_host(target).await?.next().context("no address")?;
        let (seen, happened) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (text, told) = (text.as_bytes().to_vec(), Arc::clone(&happened));
        let rules = move |direction| {
            let (seen, happened) = (Arc::clone(&seen), Arc::clone(&told));
            let rule: Box<dyn Rule> = match direction {
                Direction::ToServer => {
                    Box::new(Forth { text: text.clone(), tail: Vec::new(), loss, seen, happened })
                }
                Direction::ToClient => Box::new(Back { loss, seen, happened }),
            };
            Some(rule)
        };
        let proxy = Proxy::start_with(target, rules).await?;
        url.set_ip_host(proxy.addr().ip()).ok().context("no host in the URL")?;
        url.set_port(Some(proxy.addr().port())).ok().context("no port in the URL")?;
        Ok(Self { proxy, url: url.to_string(), happened })
    }

    /// Waits until it is lost.
    pub(crate) async fn has_lost(&self) -> Result<()> {
        let look =
            || async { if self.happened.load(Ordering::SeqCst) { Ok(()) } else { Err(self.proxy.counts()) } };
        eventually("a statement or its answer to be lost", Duration::from_secs(30), look).await
    }
}

/// Reads what goes to the database. The text stands among the statement's arguments, which come with the order to execute.
struct Forth {
    text: Vec<u8>,
    /// The end of what went before: the text may lie across two pieces.
    tail: Vec<u8>,
    loss: Loss,
    seen: Arc<AtomicBool>,
    happened: Arc<AtomicBool>,
}

impl Rule for Forth {
    fn judge(&mut self, pending: &[u8]) -> Verdict {
        self.tail.extend_from_slice(pending);
        if self.tail.windows(self.text.len()).any(|bytes| bytes == self.text) {
            self.seen.store(true, Ordering::SeqCst);
        }
        self.tail.drain(..self.tail.len().saturating_sub(self.text.len() - 1));
        if self.loss == Loss::Statement && self.seen.load(Ordering::SeqCst) {
            self.happened.store(true, Ordering::SeqCst);
            return Verdict::Drop(pending.len());
        }
        Verdict::Forward(pending.len())
    }
}

/// Reads what comes back. The database sends nothing of a statement's answer before it has committed.
struct Back {
    loss: Loss,
    seen: Arc<AtomicBool>,
    happened: Arc<AtomicBool>,
}

impl Rule for Back {
    fn judge(&mut self, pending: &[u8]) -> Verdict {
        let seen = self.seen.load(Ordering::SeqCst);
        match self.loss {
            Loss::Answer if seen => {
                self.happened.store(true, Ordering::SeqCst);
                Verdict::Drop(pending.len())
            }
            Loss::AnswerByReset if seen && !self.happened.swap(true, Ordering::SeqCst) => Verdict::Cut(0),
            _ => Verdict::Forward(pending.len()),
        }
    }
}
