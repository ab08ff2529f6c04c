//! The supervisor of child processes. The children are shells.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use semel_tests::net::{free_port, unique_name};
use semel_tests::pid::ProcessId;
use semel_tests::process::{Daemon, DaemonCommand};
use semel_tests::wait::eventually;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;

use super::DEADLINE;

fn shell(script: &str) -> DaemonCommand {
    Daemon::command(&unique_name("shell"), "/bin/sh").args(["-c", script])
}

async fn start(script: &str) -> Daemon {
    shell(script).start().await.unwrap()
}

/// Says "tick" for ever.
const CLOCK: &str = "while :; do echo tick; sleep 0.01; done";

#[tokio::test]
async fn captures_both_streams_in_memory_and_in_a_file() {
    let daemon = start("echo out; echo err >&2; printf 'no end'").await;
    let status = daemon.wait_exit(DEADLINE).await.unwrap();
    assert!(status.success());
    assert!(!daemon.is_running());
    let mut lines = daemon.lines();
    lines.sort();
    assert_eq!(lines, ["err", "no end", "out"]);
    let file = std::fs::read_to_string(daemon.log()).unwrap();
    assert!(lines.iter().all(|line| file.contains(line)));
}

#[tokio::test]
async fn passes_on_only_what_it_is_told() {
    let daemon = shell("echo \"$SEMEL_ONE|$SEMEL_TWO|$CARGO_MANIFEST_DIR\"");
    let daemon = daemon.env("SEMEL_ONE", "1").envs([("SEMEL_TWO", "2")]).start().await.unwrap();
    daemon.wait_exit(DEADLINE).await.unwrap();
    assert_eq!(daemon.lines(), ["1|2|"]);
}

#[tokio::test]
async fn waits_for_a_line_that_was_said_and_for_one_to_come() {
    let daemon = start("echo first; sleep 0.1; echo second 2; sleep 600").await;
    let said = daemon.wait_for_line("the second line", DEADLINE, |line| line.starts_with("second"));
    assert_eq!(said.await.unwrap(), "second 2");
    let said = daemon.wait_for_line("the first line", DEADLINE, |line| line == "first");
    assert_eq!(said.await.unwrap(), "first");
}

#[tokio::test]
async fn says_how_it_ended_when_a_line_never_comes() {
    let daemon = start("echo the reason; exit 3").await;
    let error = daemon.wait_for_line("a miracle", DEADLINE, |line| line == "miracle").await.unwrap_err();
    let error = error.to_string();
    assert!(error.contains("ended (exit status: 3) without a miracle"), "{error}");
    assert!(error.ends_with("the reason"), "{error}");
}

#[tokio::test]
async fn terminates_in_order() {
    let daemon = start("trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.01; done").await;
    daemon.wait_for_line("its start", DEADLINE, |line| line == "up").await.unwrap();
    daemon.terminate().unwrap();
    assert_eq!(daemon.wait_exit(DEADLINE).await.unwrap().code(), Some(7));
    assert_eq!(daemon.lines(), ["up", "bye"]);
    assert!(daemon.terminate().unwrap_err().to_string().contains("has ended (exit status: 7)"));
}

#[tokio::test]
async fn kills_with_all_that_was_started() {
    let daemon = start("sleep 600 & echo $!; wait").await;
    let child = daemon.wait_for_line("the child's number", DEADLINE, |_| true).await.unwrap();
    let child = ProcessId::of(child.parse().unwrap()).unwrap();
    daemon.kill().await.unwrap();
    child.wait_gone("the child", DEADLINE).await.unwrap();
}

#[tokio::test]
async fn freezes_and_continues() {
    let daemon = start(CLOCK).await;
    let ticks = async |more_than| {
        eventually("ticks", DEADLINE, || async {
            Some(daemon.lines().len()).filter(|&ticks| ticks > more_than)
        })
        .await
        .unwrap()
    };
    ticks(1).await;
    daemon.freeze().await.unwrap();
    assert!(daemon.id().is_frozen());
    assert!(daemon.is_running());
    daemon.cont().unwrap();
    let frozen_at = daemon.lines().len();
    ticks(frozen_at + 2).await;
    assert!(!daemon.id().is_frozen());
    // One that is frozen can still be killed.
    daemon.freeze().await.unwrap();
    daemon.kill().await.unwrap();
}

#[tokio::test]
async fn does_not_outlive_its_value() {
    let daemon = start("sleep 600 & echo $!; wait").await;
    let child = daemon.wait_for_line("the child's number", DEADLINE, |_| true).await.unwrap();
    let child = ProcessId::of(child.parse().unwrap()).unwrap();
    let parent = daemon.id();
    drop(daemon);
    parent.wait_gone("the daemon", DEADLINE).await.unwrap();
    child.wait_gone("the child", DEADLINE).await.unwrap();
}

/// Set for the test that is to be killed.
const VICTIM: &str = "SEMEL_TEST_VICTIM";

#[tokio::test]
async fn does_not_outlive_a_killed_test() {
    // The test that is killed is this one, run once more by itself.
    if std::env::var_os(VICTIM).is_some() {
        let daemon = start(CLOCK).await;
        println!("\ndaemon {}", daemon.id().pid());
        return std::future::pending().await;
    }
    let mut test = tokio::process::Command::from(Command::new(std::env::current_exe().unwrap()));
    test.args(["--exact", "daemon::does_not_outlive_a_killed_test", "--nocapture"]).env(VICTIM, "1");
    let mut test = test.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(test.stdout.take().unwrap()).lines();
    let daemon = tokio::time::timeout(DEADLINE, async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if let Some(pid) = line.strip_prefix("daemon ") {
                return ProcessId::of(pid.parse().unwrap());
            }
        }
        None
    });
    let daemon = daemon.await.unwrap().expect("the killed test's daemon");
    assert!(daemon.is_running());
    test.kill().await.unwrap();
    daemon.wait_gone("the killed test's daemon", DEADLINE).await.unwrap();
}

#[tokio::test]
async fn waits_until_it_is_ready() {
    let daemon = start("sleep 600").await;
    let admin = TcpListener::bind(("127.0.0.1", free_port().unwrap())).await.unwrap();
    let port = admin.local_addr().unwrap().port();
    let asked = AtomicBool::new(false);
    let answering = async {
        loop {
            let (mut stream, _) = admin.accept().await.unwrap();
            let mut request = [0; 1024];
            let read = stream.read(&mut request).await.unwrap();
            assert!(request[..read].starts_with(b"GET /readyz HTTP/1.1\r\n"));
            let status =
                if asked.swap(true, Ordering::Relaxed) { "200 OK" } else { "503 Service Unavailable" };
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    };
    tokio::select! {
        ready = daemon.wait_ready(port, DEADLINE) => ready.unwrap(),
        () = answering => {}
    }
    assert!(asked.into_inner());
}

#[tokio::test]
async fn says_why_it_never_got_ready() {
    let daemon = start("echo 'no such database' >&2; exit 1").await;
    let error = format!("{:#}", daemon.wait_ready(free_port().unwrap(), DEADLINE).await.unwrap_err());
    assert!(error.contains("no such database"), "{error}");
    assert!(error.contains("ended while starting (exit status: 1)"), "{error}");
}

#[tokio::test]
async fn names_a_program_that_is_missing() {
    let error = Daemon::command("ghost", "/nowhere/ghost").start().await.unwrap_err();
    assert_eq!(format!("{error:#}"), "starting ghost: there is no program /nowhere/ghost");
}

#[tokio::test]
async fn never_signals_a_stranger() {
    let daemon = start("exit 0").await;
    let id = daemon.id();
    daemon.wait_exit(DEADLINE).await.unwrap();
    assert!(!id.signal(Signal::KILL).unwrap());
}
