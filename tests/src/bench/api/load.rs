//! The load: connections over loopback that each send the next request when the last one is answered.
//!
//! It shares the processors with what it measures, so it does next to nothing: a request is a template with a key in it, and
//! of an answer only what is checked is read.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::super::statistics::float;
use super::stage::CONNECTIONS;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// The keys that a connection sends.
#[derive(Clone, Debug)]
pub(super) enum Keys {
    /// New ones, that begin so.
    Fresh(String),
    /// Those that an earlier load sent as new, again and again; and how many each connection has of them.
    Known(String, Vec<usize>),
}

/// Who is asked for what, and for how long.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) address: SocketAddr,
    pub(super) token: String,
    /// `/v1/orders`.
    pub(super) path: &'static str,
    pub(super) body: &'static str,
    pub(super) window: Duration,
}

/// What came of it. All answers were created or replayed, as was to be.
#[derive(Clone, Debug, Default)]
pub(super) struct Answered {
    /// Answers per second within the window.
    pub(super) rate: f64,
    /// How long each of them took.
    pub(super) latencies: Vec<Duration>,
    /// How many answers each connection had, those after the window too.
    pub(super) by_connection: Vec<usize>,
}

impl Answered {
    pub(super) fn count(&self) -> usize {
        self.by_connection.iter().sum()
    }
}

impl Load {
    /// Keeps all connections busy for the window, and awaits the last answers.
    pub(super) async fn send(&self, keys: &Keys) -> Result<Answered> {
        let mut connections = JoinSet::new();
        let mut streams = Vec::new();
        for _ in 0..CONNECTIONS {
            let stream = TcpStream::connect(self.address).await.context("connecting to the API")?;
            stream.set_nodelay(true).context("having small requests sent at once")?;
            streams.push(stream);
        }
        let (load, until) = (self.clone(), Instant::now() + self.window);
        for (number, stream) in streams.into_iter().enumerate() {
            let connection = Connection { stream, buffer: Vec::with_capacity(4096) };
            let (load, keys) = (load.clone(), keys.clone());
            connections
                .spawn(async move { (number, load.keep_busy(connection, number, &keys, until).await) });
        }
        let mut answered = Answered { by_connection: vec![0; CONNECTIONS], ..Answered::default() };
        while let Some(ended) = connections.join_next().await {
            let (number, outcome) = ended.context("a connection's task panicked")?;
            let (latencies, count) = outcome?;
            answered.latencies.extend(latencies);
            answered.by_connection[number] = count;
        }
        answered.rate = float(answered.latencies.len()) / self.window.as_secs_f64();
        Ok(answered)
    }

    /// Returns the latencies of the answers within the time, and the count of all.
    async fn keep_busy(
        &self,
        mut connection: Connection,
        number: usize,
        keys: &Keys,
        until: Instant,
    ) -> Result<(Vec<Duration>, usize)> {
        let (mut latencies, mut count) = (Vec::new(), 0);
        let known = match keys {
            Keys::Fresh(_) => None,
            Keys::Known(_, counts) => Some(counts.get(number).copied().unwrap_or_default()),
        };
        ensure!(known != Some(0), "a connection has no known key to send");
        let (Keys::Fresh(run) | Keys::Known(run, _)) = keys;
        loop {
            let sent = Instant::now();
            if sent >= until {
                return Ok((latencies, count));
            }
            let key = known.map_or(count, |known| count % known);
            let request = self.request(&format!("{run}-{number}-{key}"));
            let answer = tokio::time::timeout(PATIENCE, connection.ask(request.as_bytes())).await;
            let is_replay = answer.with_context(|| format!("no answer within {PATIENCE:?}"))??;
            ensure!(is_replay == known.is_some(), "a request under key {run}-{number}-{key} was mistaken");
            count += 1;
            let answered = Instant::now();
            if answered <= until {
                latencies.push(answered - sent);
            }
        }
    }

    fn request(&self, key: &str) -> String {
        let Self { address, token, path, body, .. } = self;
        let length = body.len();
        format!(
            "POST {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n\
             idempotency-key: {key}\r\ncontent-length: {length}\r\n\r\n{body}"
        )
    }
}

struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    /// Sends a request, and says whether its answer, which is to be 201, is a replay.
    async fn ask(&mut self, request: &[u8]) -> Result<bool> {
        self.stream.write_all(request).await.context("sending a request")?;
        self.buffer.clear();
        loop {
            if let Some(answer) = Answer::parse(&self.buffer)? {
                ensure!(answer.status == 201, "{}", String::from_utf8_lossy(&self.buffer));
                return Ok(answer.is_replay);
            }
            let read = self.stream.read_buf(&mut self.buffer).await.context("reading an answer")?;
            ensure!(read > 0, "the API has closed a connection");
        }
    }
}

#[derive(Debug, Eq, PartialEq)]
struct Answer {
    status: u16,
    is_replay: bool,
}

impl Answer {
    /// Reads an answer that is whole; none if there is more to come.
    fn parse(bytes: &[u8]) -> Result<Option<Self>> {
        let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
        let head = std::str::from_utf8(&bytes[..end]).context("a head that is no text")?;
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let status = status.with_context(|| format!("no status in {head}"))?;
        let (mut length, mut is_replay) = (None, false);
        for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
            if name.eq_ignore_ascii_case("content-length") {
                length = value.parse::<usize>().ok();
            } else if name.eq_ignore_ascii_case("idempotent-replayed") {
                is_replay = value == "true";
            }
        }
        let length = length.with_context(|| format!("no length in {head}"))?;
        match bytes.len().cmp(&(end + 4 + length)) {
            std::cmp::Ordering::Less => Ok(None),
            std::cmp::Ordering::Equal => Ok(Some(Self { status, is_replay })),
            std::cmp::Ordering::Greater => bail!("more than an answer: {}", String::from_utf8_lossy(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_when_it_is_whole() {
        let text = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\nidempotent-replayed: true\r\n\r\n{}";
        for length in 0..text.len() {
            assert_eq!(Answer::parse(&text[..length]).unwrap(), None);
        }
        assert_eq!(Answer::parse(text).unwrap(), Some(Answer { status: 201, is_replay: true }));
        assert!(Answer::parse(&[text.as_slice(), b"H"].concat()).is_err());
        assert!(Answer::parse(b"HTTP/1.1 201 Created\r\n\r\n").is_err());
    }
}
