use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::*;

const DEADLINE: Duration = Duration::from_secs(10);

/// A server on its own, and both ends of one connection through the proxy before it.
struct Bench {
    proxy: Proxy,
    server: TcpListener,
    client: TcpStream,
    served: TcpStream,
}

impl Bench {
    async fn new() -> Self {
        Self::with(|_| None).await
    }

    async fn with(rules: impl Rules) -> Self {
        let server = bind().await.unwrap();
        let proxy = Proxy::start_with(server.local_addr().unwrap(), rules).await.unwrap();
        let client = TcpStream::connect(proxy.addr()).await.unwrap();
        let accepted = within(server.accept()).await.unwrap();
        Self { proxy, server, client, served: accepted.0 }
    }

    async fn connect(&mut self) {
        self.client = TcpStream::connect(self.proxy.addr()).await.unwrap();
        self.served = within(self.server.accept()).await.unwrap().0;
    }

    async fn dropped(&self, bytes: u64) {
        eventually("bytes to vanish", DEADLINE, || async {
            let counts = self.proxy.counts();
            if counts.dropped == bytes { Ok(()) } else { Err(counts) }
        })
        .await
        .unwrap();
    }
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(DEADLINE, future).await.expect("an end within the deadline")
}

async fn read(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    within(stream.read_exact(&mut bytes)).await.unwrap();
    bytes
}

/// What a stream holds to its end, and how it ends.
async fn rest(stream: &mut TcpStream) -> (Vec<u8>, Option<ErrorKind>) {
    let mut bytes = Vec::new();
    let end = within(stream.read_to_end(&mut bytes)).await;
    (bytes, end.err().map(|error| error.kind()))
}

/// Whether nothing at all arrives, not even an end, for a moment.
async fn is_silent(stream: &mut TcpStream) -> bool {
    timeout(Duration::from_millis(50), stream.read_u8()).await.is_err()
}

const RESET: (Vec<u8>, Option<ErrorKind>) = (Vec::new(), Some(ErrorKind::ConnectionReset));

#[tokio::test]
async fn passes_bytes_both_ways_and_counts_them() {
    let mut bench = Bench::new().await;
    let long = vec![7; 300_000];
    let sending = async { bench.client.write_all(&long).await.unwrap() };
    let ((), received) = tokio::join!(sending, read(&mut bench.served, long.len()));
    assert_eq!(received, long);
    bench.served.write_all(b"pong").await.unwrap();
    assert_eq!(read(&mut bench.client, 4).await, b"pong");
    let counts = Counts { accepted: 1, open: 1, to_server: 300_000, to_client: 4, dropped: 0 };
    assert_eq!(bench.proxy.counts(), counts);
}

#[tokio::test]
async fn passes_the_end_of_one_direction() {
    let mut bench = Bench::new().await;
    bench.client.shutdown().await.unwrap();
    assert_eq!(rest(&mut bench.served).await, (vec![], None));
    bench.served.write_all(b"answer").await.unwrap();
    bench.served.shutdown().await.unwrap();
    assert_eq!(rest(&mut bench.client).await, (b"answer".to_vec(), None));
    assert_eq!(bench.proxy.sever().await, 0);
}

#[tokio::test]
async fn resets_a_client_when_the_server_is_gone() {
    let server = bind().await.unwrap();
    let proxy = Proxy::start(server.local_addr().unwrap()).await.unwrap();
    drop(server);
    let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
    assert_eq!(rest(&mut client).await, RESET);
}

#[tokio::test]
async fn delays_one_direction_but_not_the_other() {
    let mut bench = Bench::new().await;
    let delay = Duration::from_millis(150);
    bench.proxy.set(Direction::ToServer, Fault::Delay(delay));
    let began = Instant::now();
    bench.client.write_all(b"ping").await.unwrap();
    bench.served.write_all(b"pong").await.unwrap();
    read(&mut bench.client, 4).await;
    read(&mut bench.served, 4).await;
    assert!(began.elapsed() >= delay);
}

#[tokio::test]
async fn holds_bytes_back_until_healed() {
    let mut bench = Bench::new().await;
    bench.proxy.set_both(Fault::Stall);
    bench.client.write_all(b"ping").await.unwrap();
    bench.client.shutdown().await.unwrap();
    assert!(is_silent(&mut bench.served).await);
    bench.proxy.heal().await.unwrap();
    assert_eq!(rest(&mut bench.served).await, (b"ping".to_vec(), None));
}

#[tokio::test]
async fn swallows_bytes_and_the_end_of_the_stream() {
    let mut bench = Bench::new().await;
    bench.proxy.set(Direction::ToServer, Fault::BlackHole);
    bench.client.write_all(b"ping").await.unwrap();
    bench.dropped(4).await;
    bench.served.write_all(b"pong").await.unwrap();
    assert_eq!(read(&mut bench.client, 4).await, b"pong");
    bench.client.shutdown().await.unwrap();
    assert!(is_silent(&mut bench.served).await);
    // A stream with a gap does not go on.
    bench.proxy.heal().await.unwrap();
    assert_eq!(rest(&mut bench.served).await, RESET);
    bench.connect().await;
    bench.client.write_all(b"ping").await.unwrap();
    assert_eq!(read(&mut bench.served, 4).await, b"ping");
}

#[tokio::test]
async fn refuses_new_connections_but_keeps_open_ones() {
    let mut bench = Bench::new().await;
    bench.proxy.refuse().await.unwrap();
    let refused = TcpStream::connect(bench.proxy.addr()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    bench.client.write_all(b"ping").await.unwrap();
    assert_eq!(read(&mut bench.served, 4).await, b"ping");
    bench.proxy.heal().await.unwrap();
    bench.connect().await;
    assert_eq!(bench.proxy.counts().accepted, 2);
}

#[tokio::test]
async fn severs_all_connections_and_takes_new_ones() {
    let mut bench = Bench::new().await;
    assert_eq!(bench.proxy.sever().await, 1);
    assert_eq!(rest(&mut bench.client).await, RESET);
    assert_eq!(rest(&mut bench.served).await, RESET);
    assert_eq!(bench.proxy.counts().open, 0);
    bench.connect().await;
    bench.client.write_all(b"ping").await.unwrap();
    assert_eq!(read(&mut bench.served, 4).await, b"ping");
}

#[tokio::test]
async fn cuts_after_so_many_bytes_of_each_connection() {
    let mut bench = Bench::new().await;
    bench.client.write_all(b"before").await.unwrap();
    assert_eq!(read(&mut bench.served, 6).await, b"before");
    bench.proxy.set(Direction::ToServer, Fault::CutAfter(3));
    for _ in 0..2 {
        bench.client.write_all(b"abcdef").await.unwrap();
        assert_eq!(rest(&mut bench.served).await, (b"abc".to_vec(), RESET.1));
        assert_eq!(rest(&mut bench.client).await, RESET);
        bench.connect().await;
    }
}

#[tokio::test]
async fn throttles_to_a_rate() {
    let mut bench = Bench::new().await;
    bench.proxy.set(Direction::ToServer, Fault::Throttle(20_000));
    let began = Instant::now();
    bench.client.write_all(&[7; 10_000]).await.unwrap();
    assert_eq!(read(&mut bench.served, 10_000).await, [7; 10_000]);
    assert!(began.elapsed() >= Duration::from_millis(400));
}

#[tokio::test]
async fn slices_without_changing_a_byte() {
    let mut bench = Bench::new().await;
    bench.proxy.set_both(Fault::Slice(1));
    let bytes: Vec<u8> = (0..=255).collect();
    bench.client.write_all(&bytes).await.unwrap();
    assert_eq!(read(&mut bench.served, 256).await, bytes);
}

/// A protocol of lines. Cuts before the line `cut`, loses the line `lose`, and keeps the answer to the
/// line `mute` from arriving.
struct ByLine {
    muted: Arc<AtomicBool>,
}

impl Rule for ByLine {
    fn judge(&mut self, pending: &[u8]) -> Verdict {
        let Some(end) = pending.iter().position(|&byte| byte == b'\n') else { return Verdict::Forward(0) };
        match &pending[..end] {
            b"cut" => Verdict::Cut(0),
            b"lose" => Verdict::Drop(end + 1),
            line => {
                self.muted.store(line == b"mute", Ordering::Release);
                Verdict::Forward(end + 1)
            }
        }
    }
}

/// Cuts before the answer to a line that said so.
struct Mute {
    muted: Arc<AtomicBool>,
}

impl Rule for Mute {
    fn judge(&mut self, pending: &[u8]) -> Verdict {
        let muted = self.muted.load(Ordering::Acquire);
        if muted { Verdict::Cut(0) } else { Verdict::Forward(pending.len()) }
    }
}

fn by_line() -> impl Rules {
    let muted = Arc::new(AtomicBool::new(false));
    move |direction| {
        let muted = muted.clone();
        let rule: Box<dyn Rule> = match direction {
            Direction::ToServer => Box::new(ByLine { muted }),
            Direction::ToClient => Box::new(Mute { muted }),
        };
        Some(rule)
    }
}

#[tokio::test]
async fn lets_a_rule_decode_frames_and_cut_before_one() {
    let mut bench = Bench::with(by_line()).await;
    bench.client.write_all(b"one\nlose\ntwo\nth").await.unwrap();
    assert_eq!(read(&mut bench.served, 8).await, b"one\ntwo\n");
    assert!(is_silent(&mut bench.served).await);
    bench.client.write_all(b"ree\ncut\nfour\n").await.unwrap();
    assert_eq!(rest(&mut bench.served).await, (b"three\n".to_vec(), RESET.1));
    bench.dropped(5).await;
}

#[tokio::test]
async fn lets_a_rule_cut_the_answer_to_a_frame_that_arrived() {
    let mut bench = Bench::with(by_line()).await;
    bench.client.write_all(b"mute\n").await.unwrap();
    assert_eq!(read(&mut bench.served, 5).await, b"mute\n");
    bench.served.write_all(b"done\n").await.unwrap();
    assert_eq!(rest(&mut bench.client).await, RESET);
}
