//! What a daemon said.

use std::collections::VecDeque;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use tokio::fs::File;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWriteExt as _, BufReader};
use tokio::sync::watch;

/// How many lines are kept in memory; the file has them all.
const KEPT: usize = 50_000;
/// A longer line is cut into several.
const LINE_LIMIT: usize = 64 << 10;

/// The lines of one daemon, shared by those who write and those who wait.
#[derive(Clone, Debug)]
pub(super) struct Lines {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    kept: Mutex<Kept>,
    /// How many lines there were so far; tells those who wait.
    count: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    lines: VecDeque<String>,
    /// How many were dropped before the first that is kept.
    dropped: u64,
}

impl Lines {
    pub(super) fn new(path: PathBuf) -> Self {
        let shared = Shared { path, kept: Mutex::default(), count: watch::Sender::new(0) };
        Self { shared: Arc::new(shared) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.shared.path
    }

    pub(super) fn all(&self) -> Vec<String> {
        self.kept().lines.iter().cloned().collect()
    }

    /// Reads a stream to its end, into memory and into the file.
    pub(super) async fn fill(self, stream: impl AsyncRead + Unpin, mut file: File) -> Result<()> {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        loop {
            let available = reader.fill_buf().await.context("reading what a daemon says")?;
            let end = available.iter().position(|&byte| byte == b'\n');
            let taken = end.map_or(available.len(), |end| end + 1).min(LINE_LIMIT - line.len());
            line.extend_from_slice(&available[..taken]);
            reader.consume(taken);
            if taken == 0 || line.ends_with(b"\n") || line.len() == LINE_LIMIT {
                if !line.is_empty() {
                    self.push(&line);
                    // One write per line, so that those of the two streams do not mix.
                    file.write_all(&line).await.context("writing a daemon's log")?;
                    file.flush().await.context("writing a daemon's log")?;
                    line.clear();
                }
                if taken == 0 {
                    return Ok(());
                }
            }
        }
    }

    /// Finds a line, old or new, unless `ended` comes first.
    pub(super) async fn find<T>(
        &self,
        mut pred: impl FnMut(&str) -> bool,
        ended: impl Future<Output = T>,
    ) -> Result<String, T> {
        // Watch before looking, so that no line falls between the two.
        let mut count = self.shared.count.subscribe();
        let mut next = 0;
        tokio::pin!(ended);
        loop {
            count.mark_unchanged();
            if let Some(line) = self.scan(&mut next, &mut pred) {
                return Ok(line);
            }
            tokio::select! {
                changed = count.changed() => debug_assert!(changed.is_ok(), "the sender is in self"),
                reason = &mut ended => return self.scan(&mut next, &mut pred).ok_or(reason),
            }
        }
    }

    fn scan(&self, next: &mut u64, pred: &mut impl FnMut(&str) -> bool) -> Option<String> {
        let kept = self.kept();
        let skip = usize::try_from(next.saturating_sub(kept.dropped)).unwrap_or(usize::MAX);
        let found = kept.lines.iter().skip(skip).find(|line| pred(line)).cloned();
        *next = kept.dropped + kept.lines.len() as u64;
        found
    }

    fn push(&self, line: &[u8]) {
        let text = String::from_utf8_lossy(line).trim_end().to_owned();
        let mut kept = self.kept();
        if kept.lines.len() == KEPT {
            kept.lines.pop_front();
            kept.dropped += 1;
        }
        kept.lines.push_back(text);
        drop(kept);
        self.shared.count.send_modify(|count| *count += 1);
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn filled(bytes: &[u8]) -> Lines {
        let lines = Lines::new("/dev/null".into());
        let file = File::options().write(true).open("/dev/null").await.unwrap();
        lines.clone().fill(bytes, file).await.unwrap();
        lines
    }

    #[tokio::test]
    async fn keeps_a_last_line_without_an_end() {
        assert_eq!(filled(b"one\n\ntwo").await.all(), ["one", "", "two"]);
    }

    #[tokio::test]
    async fn cuts_a_line_without_end() {
        let lines = filled(&vec![b'x'; 2 * LINE_LIMIT + 1]).await.all();
        assert_eq!(lines.iter().map(String::len).collect::<Vec<_>>(), [LINE_LIMIT, LINE_LIMIT, 1]);
    }

    #[tokio::test]
    async fn keeps_the_last_of_many_lines() {
        let text: String = (0..KEPT + 2).flat_map(|number| [number.to_string(), "\n".to_owned()]).collect();
        let lines = filled(text.as_bytes()).await;
        assert_eq!(lines.all().len(), KEPT);
        assert_eq!(lines.all()[0], "2");
        assert_eq!(lines.find(|line| line == "1", async { "ended" }).await, Err("ended"));
    }
}
