//! One direction of one connection.

use std::io;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::link::Link;
use super::{Direction, Fault, Rule, Verdict};

/// How much is read at a time, and how many such pieces may be under way: what a delay can hold.
const PIECE: usize = 16 << 10;
const PIECES: usize = 256;
/// How much a rule may hold back before the connection is cut: a decoder that lost its way.
const HELD_BACK: usize = 16 << 20;
/// A throttled direction moves this many times per second.
const THROTTLE_STEPS: u32 = 20;

/// The connection ends with a reset.
#[derive(Debug)]
pub(super) struct Broken;

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self
    }
}

/// Bytes under way; none at all is the end of the stream.
struct Piece {
    due: Instant,
    bytes: Bytes,
}

/// Carries the bytes of one direction of one connection.
pub(super) struct Pump<'a> {
    link: &'a Link,
    direction: Direction,
    rule: Option<Box<dyn Rule>>,
    faults: watch::Receiver<Fault>,
    /// How many bytes arrived under the present fault.
    passed: u64,
    /// Whether bytes vanished, so that what follows must not arrive.
    lost: bool,
}

impl<'a> Pump<'a> {
    pub(super) fn new(link: &'a Link, direction: Direction) -> Self {
        let faults = link.fault(direction).subscribe();
        Self { link, direction, rule: link.rule(direction), faults, passed: 0, lost: false }
    }

    /// Carries all bytes from one side to the other, to the end of the stream.
    pub(super) async fn run(self, from: ReadHalf<'_>, to: WriteHalf<'_>) -> Result<(), Broken> {
        let (queue, pieces) = mpsc::channel(PIECES);
        let faults = self.faults.clone();
        tokio::try_join!(read(from, queue, faults), self.write(pieces, to))?;
        Ok(())
    }

    async fn write(mut self, mut pieces: mpsc::Receiver<Piece>, mut to: WriteHalf<'_>) -> Result<(), Broken> {
        let mut pending = BytesMut::new();
        loop {
            let piece = tokio::select! {
                piece = pieces.recv() => piece.ok_or(Broken)?,
                // A stream with a gap ends as soon as bytes could pass again.
                _ = self.faults.changed(), if self.lost => return Err(Broken),
            };
            sleep_until(piece.due).await;
            let at_end = piece.bytes.is_empty();
            let Some(mut rule) = self.rule.take() else {
                if at_end {
                    return self.finish(to).await;
                }
                self.forward(piece.bytes, &mut to).await?;
                continue;
            };
            pending.extend_from_slice(&piece.bytes);
            if at_end {
                self.forward(pending.freeze(), &mut to).await?;
                return self.finish(to).await;
            }
            while !pending.is_empty() {
                match rule.judge(&pending) {
                    Verdict::Forward(0) => break,
                    Verdict::Forward(count) => self.forward(take(&mut pending, count), &mut to).await?,
                    Verdict::Drop(count) => self.link.count_dropped(take(&mut pending, count.max(1)).len()),
                    Verdict::Cut(count) => {
                        self.forward(take(&mut pending, count), &mut to).await?;
                        return Err(Broken);
                    }
                }
            }
            if pending.len() > HELD_BACK {
                return Err(Broken);
            }
            self.rule = Some(rule);
        }
    }

    /// Lets bytes pass as the present fault has it.
    async fn forward(&mut self, mut bytes: Bytes, to: &mut WriteHalf<'_>) -> Result<(), Broken> {
        while bytes.has_remaining() {
            let all = bytes.len();
            match self.fault()? {
                Fault::Pass | Fault::Delay(_) => self.pass(&mut bytes, all, to).await?,
                Fault::Stall => self.changed().await?,
                Fault::BlackHole => {
                    self.link.count_dropped(all);
                    self.lost = true;
                    bytes.clear();
                }
                Fault::Throttle(rate) => {
                    let step = rate.div_ceil(THROTTLE_STEPS).max(1);
                    self.pass(&mut bytes, step as usize, to).await?;
                    sleep(Duration::from_secs(step.into()) / rate.max(1)).await;
                }
                Fault::Slice(size) => {
                    self.pass(&mut bytes, size.max(1), to).await?;
                    // What is written at once may still arrive at once.
                    tokio::task::yield_now().await;
                }
                Fault::CutAfter(limit) => {
                    let left = limit.saturating_sub(self.passed);
                    self.pass(&mut bytes, usize::try_from(left).unwrap_or(all), to).await?;
                    if self.passed >= limit {
                        return Err(Broken);
                    }
                }
            }
        }
        Ok(())
    }

    /// Lets the end of the stream pass, if the present fault lets anything pass.
    async fn finish(mut self, mut to: WriteHalf<'_>) -> Result<(), Broken> {
        loop {
            match self.fault()? {
                Fault::BlackHole => {
                    self.lost = true;
                    self.changed().await?;
                }
                Fault::Stall => self.changed().await?,
                _ => return Ok(to.shutdown().await?),
            }
        }
    }

    async fn pass(
        &mut self,
        bytes: &mut Bytes,
        at_most: usize,
        to: &mut WriteHalf<'_>,
    ) -> Result<(), Broken> {
        let piece = bytes.split_to(at_most.min(bytes.len()));
        to.write_all(&piece).await?;
        self.passed += piece.len() as u64;
        self.link.count_arrived(self.direction, piece.len());
        Ok(())
    }

    fn fault(&mut self) -> Result<Fault, Broken> {
        if self.faults.has_changed().map_err(|_| Broken)? {
            if self.lost {
                return Err(Broken);
            }
            self.passed = 0;
        }
        Ok(*self.faults.borrow_and_update())
    }

    async fn changed(&mut self) -> Result<(), Broken> {
        self.faults.changed().await.map_err(|_| Broken)?;
        self.passed = 0;
        if self.lost { Err(Broken) } else { Ok(()) }
    }
}

/// Reads one side to its end, and notes of each piece when it is due at the other.
async fn read(
    mut from: ReadHalf<'_>,
    queue: mpsc::Sender<Piece>,
    faults: watch::Receiver<Fault>,
) -> Result<(), Broken> {
    loop {
        let mut bytes = BytesMut::with_capacity(PIECE);
        let read = from.read_buf(&mut bytes).await;
        let fault = *faults.borrow();
        if read.is_err() && fault != Fault::BlackHole {
            return Err(Broken);
        }
        let delay = match fault {
            Fault::Delay(delay) => delay,
            _ => Duration::ZERO,
        };
        let at_end = bytes.is_empty();
        queue.send(Piece { due: Instant::now() + delay, bytes: bytes.freeze() }).await.map_err(|_| Broken)?;
        if at_end {
            return Ok(());
        }
    }
}

fn take(pending: &mut BytesMut, count: usize) -> Bytes {
    pending.split_to(count.min(pending.len())).freeze()
}
