//! The program itself: killed, stopped, and in doubt about its address.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use futures_util::future::join_all;
use semel_provider_sim::book::Kind;

use crate::rig::{Client, Scratch, eventually};

struct Program {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Program {
    fn start(book: &Scratch, listen: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_semel-provider-sim"));
        command.args(["--listen", listen, "--admin-listen", "127.0.0.1:0", "--log-format", "text"]);
        command.arg("--book").arg(&book.0).env_remove("SEMEL_LOG").stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (said, stderr) = (Arc::clone(&lines), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                said.lock().unwrap().push(line);
            }
        });
        Self { child, lines }
    }

    /// The address in the line that says so.
    async fn client(&self) -> Client {
        let address = eventually("the program to serve", async || {
            let lines = self.lines.lock().unwrap();
            let line = lines.iter().find(|line| line.contains("serves"))?;
            let (_, rest) = line.split_once("listen=")?;
            rest.split_whitespace().next().map(str::to_owned)
        })
        .await;
        Client::connect(format!("http://{address}")).await
    }

    async fn exit(&mut self) -> ExitStatus {
        let child = Mutex::new(&mut self.child);
        eventually("the program to leave", async || child.lock().unwrap().try_wait().unwrap()).await
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[tokio::test]
async fn what_was_answered_before_sigkill_is_known_after_it() {
    let book = Scratch::new();
    let mut program = Program::start(&book, "127.0.0.1:0");
    let client = program.client().await;
    let calls: Vec<_> = (0..200).map(|number| client.charging(&format!("k{number}"))).collect();
    eventually("some of them to be answered", async || {
        (calls.iter().filter(|call| call.is_finished()).count() > 20).then_some(())
    })
    .await;
    program.child.kill().unwrap();
    program.exit().await;
    let answers: Vec<_> = join_all(calls).await.into_iter().filter_map(|call| call.unwrap().ok()).collect();
    assert!(!answers.is_empty());

    let again = Program::start(&book, "127.0.0.1:0");
    let client = again.client().await;
    for answer in answers {
        assert_eq!(client.charge(&answer.key).await.unwrap(), answer);
    }
    let mut keys: Vec<_> = book
        .entries()
        .into_iter()
        .filter(|entry| entry.kind == Kind::Charge)
        .map(|entry| entry.key)
        .collect();
    let lines = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), lines, "no key was charged twice");
}

#[tokio::test]
async fn sigterm_is_a_clean_exit() {
    let book = Scratch::new();
    let mut program = Program::start(&book, "127.0.0.1:0");
    let client = program.client().await;
    client.charge("k").await.unwrap();
    let kill = Command::new("kill").args(["-TERM", &program.child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert!(program.exit().await.success());
    assert_eq!(book.entries().len(), 1);
}

#[tokio::test]
async fn a_taken_address_or_book_ends_it_with_the_reason() {
    let book = Scratch::new();
    let first = Program::start(&book, "127.0.0.1:0");
    drop(first.client().await);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for (listen, why) in [
        (taken.local_addr().unwrap().to_string(), "--listen"),
        ("127.0.0.1:0".to_owned(), "in use by another process"),
    ] {
        let mut second = Program::start(&book, &listen);
        assert_eq!(second.exit().await.code(), Some(1));
        eventually(why, async || {
            second.lines.lock().unwrap().iter().any(|line| line.contains(why)).then_some(())
        })
        .await;
    }
}
