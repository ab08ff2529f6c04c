//! Rules that read a direction of a connection, and may cut it at a place that they know.

use super::Direction;

/// What a rule says of the bytes at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The first of them, this many, go on. The rule is asked again about the rest at once, or with 0
    /// once there are more.
    Forward(usize),
    /// The first of them, this many, vanish.
    Drop(usize),
    /// The first of them, this many, go on; then the connection is reset.
    Cut(usize),
}

/// Reads one direction of one connection from its beginning.
///
/// A decoder of frames forwards whole frames and holds back the beginning of the next. To cut before
/// a frame arrives it says `Cut(0)` at that frame; to cut an answer it tells the rule of the other
/// direction, with which it shares what it has seen.
pub trait Rule: Send + 'static {
    /// Judges all bytes that were neither forwarded nor dropped yet; there is at least one.
    ///
    /// What it holds back at the end of the stream is forwarded.
    fn judge(&mut self, pending: &[u8]) -> Verdict;
}

/// Makes the rules of each new connection.
pub trait Rules: Send + Sync + 'static {
    /// Makes the rule of one direction, if that shall have one. Asked once for each direction of each
    /// connection, first [`Direction::ToServer`].
    fn rule(&self, direction: Direction) -> Option<Box<dyn Rule>>;
}

impl<F> Rules for F
where
    F: Fn(Direction) -> Option<Box<dyn Rule>> + Send + Sync + 'static,
{
    fn rule(&self, direction: Direction) -> Option<Box<dyn Rule>> {
        self(direction)
    }
}
