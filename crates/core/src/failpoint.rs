//! Named places where a test makes a process fail.
//!
//! Off by default, and compiled out unless the feature `failpoints` is on: [`failpoint!`](crate::failpoint!) then expands
//! to nothing, and no name reaches the binary. With the feature, `SEMEL_FAILPOINTS` says what happens where:
//!
//! ```text
//! SEMEL_FAILPOINTS="relay.after_confirm=3*off->abort;api.before_commit=delay(200)"
//! ```
//!
//! Terms are joined by `->`; `N*` repeats a term N times, and the last term without a count lasts for ever. Actions:
//! `off`, `panic`, `abort` (SIGKILL to oneself, no destructor runs), `stop` (SIGSTOP to oneself), `delay(ms)` and
//! `wait(path)` (until that file exists, at most a minute). Each hit is appended to the file `SEMEL_FAILPOINT_LOG` before
//! it acts, so that a test knows that its fault happened.

/// Passes a named failpoint; expands to nothing without the feature `failpoints`. Awaits, so it stands in async code.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! failpoint {
    ($name:expr) => {
        $crate::failpoint::hit($name).await
    };
}

/// Passes a named failpoint; expands to nothing without the feature `failpoints`.
#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! failpoint {
    ($name:expr) => {};
}

#[cfg(feature = "failpoints")]
pub use active::hit;

#[cfg(feature = "failpoints")]
mod active {
    use std::collections::{HashMap, VecDeque};
    use std::io::Write as _;
    use std::path::PathBuf;
    use std::sync::{LazyLock, Mutex, PoisonError};
    use std::time::{Duration, Instant};

    use rustix::process::{Signal, getpid, kill_process};

    #[derive(Clone, Debug, PartialEq)]
    enum Action {
        Off,
        Panic,
        Abort,
        Stop,
        Delay(Duration),
        Wait(PathBuf),
    }

    #[derive(Clone, Debug, PartialEq)]
    struct Term {
        left: Option<u32>,
        action: Action,
    }

    type Plan = HashMap<String, VecDeque<Term>>;

    static PLAN: LazyLock<Mutex<Plan>> = LazyLock::new(|| {
        let text = std::env::var("SEMEL_FAILPOINTS").unwrap_or_default();
        #[expect(clippy::panic, reason = "a test that mistypes its fault must not pass without it")]
        let plan = parse(&text).unwrap_or_else(|error| panic!("SEMEL_FAILPOINTS: {error}"));
        Mutex::new(plan)
    });

    /// Passes the named failpoint, and does there what the plan says.
    ///
    /// # Panics
    ///
    /// Where the plan says so, and when the plan cannot be read.
    #[expect(clippy::panic, reason = "panicking is one of the faults to order")]
    pub async fn hit(name: &str) {
        let Some(action) = next(name) else { return };
        record(name, &action);
        match action {
            Action::Off => {}
            Action::Panic => panic!("failpoint {name}"),
            Action::Abort => {
                let _ = kill_process(getpid(), Signal::KILL);
            }
            Action::Stop => {
                let _ = kill_process(getpid(), Signal::STOP);
            }
            Action::Delay(time) => tokio::time::sleep(time).await,
            Action::Wait(path) => {
                let deadline = Instant::now() + Duration::from_mins(1);
                while !path.exists() && Instant::now() < deadline {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        }
    }

    fn next(name: &str) -> Option<Action> {
        let mut plan = PLAN.lock().unwrap_or_else(PoisonError::into_inner);
        let terms = plan.get_mut(name)?;
        let term = terms.front_mut()?;
        let action = term.action.clone();
        if let Some(left) = &mut term.left {
            *left -= 1;
            if *left == 0 {
                terms.pop_front();
            }
        }
        Some(action)
    }

    fn record(name: &str, action: &Action) {
        let Ok(path) = std::env::var("SEMEL_FAILPOINT_LOG") else { return };
        let line = format!("{name} {action:?} {}\n", std::process::id());
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }

    fn parse(text: &str) -> Result<Plan, String> {
        let entries = text.split(';').map(str::trim).filter(|entry| !entry.is_empty());
        entries
            .map(|entry| {
                let (name, terms) = entry.split_once('=').ok_or_else(|| format!("{entry:?} has no '='"))?;
                let terms: Result<_, String> = terms.split("->").map(term).collect();
                Ok((name.to_owned(), terms?))
            })
            .collect()
    }

    fn term(text: &str) -> Result<Term, String> {
        let (left, action) = match text.split_once('*') {
            Some((count, action)) => {
                let count = count.parse().ok().filter(|&n| n > 0);
                (Some(count.ok_or_else(|| format!("{text:?} has no count before '*'"))?), action)
            }
            None => (None, text),
        };
        let argument = |name: &str| action.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')');
        let action = match action {
            "off" => Action::Off,
            "panic" => Action::Panic,
            "abort" => Action::Abort,
            "stop" => Action::Stop,
            _ => {
                let delay = argument("delay").and_then(|ms| ms.parse().ok()).map(Duration::from_millis);
                let wait = argument("wait").map(PathBuf::from);
                match (delay, wait) {
                    (Some(time), _) => Action::Delay(time),
                    (None, Some(path)) => Action::Wait(path),
                    (None, None) => return Err(format!("{action:?} is no action")),
                }
            }
        };
        Ok(Term { left, action })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn reads_counts_sequences_and_arguments() {
            let plan = parse("a=2*off->abort; b=delay(20) ;c=wait(/tmp/go)").unwrap();
            assert_eq!(
                plan["a"],
                [Term { left: Some(2), action: Action::Off }, Term { left: None, action: Action::Abort }]
            );
            assert_eq!(plan["b"], [Term { left: None, action: Action::Delay(Duration::from_millis(20)) }]);
            assert_eq!(plan["c"], [Term { left: None, action: Action::Wait("/tmp/go".into()) }]);
        }

        #[test]
        fn refuses_what_it_does_not_know() {
            for text in ["a", "a=explode", "a=0*abort", "a=x*abort", "a=delay(soon)"] {
                assert!(parse(text).is_err(), "{text}");
            }
        }
    }
}
