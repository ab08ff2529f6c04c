//! `dead list`, `show`, `replay` and `discard`.

use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use semel_core::options::text;
use semel_core::shown::{instant, lines, one_line, pretty};
use serde_json::{Value, json};
use time::OffsetDateTime;

use super::{Outcome, age, count, say};
use crate::dead::{DeadError, DeadLetters, Decision, Fate, Filter, Letter, Verdict, Which};

/// What is done about dead letters.
#[derive(Args, Clone, Debug)]
pub struct DeadCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Debug, Subcommand)]
enum Action {
    /// List dead letters, the oldest first. Changes nothing.
    List {
        #[command(flatten)]
        filter: FilterOptions,
        /// Most letters to list.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000), value_name = "COUNT")]
        limit: u64,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show a dead letter, and whether its event took effect. Changes nothing.
    Show(Show),
    /// Put letters back into the consumer's own queue, as if they had never failed. Leaves an audit entry for each.
    Replay(Replay),
    /// Drop letters for good. Leaves an audit entry for each.
    Discard(Decide),
}

#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("one").required(true).args(["message_id", "position"]))]
struct Show {
    /// The message's id, which is its event's.
    message_id: Option<String>,
    /// Its place in the list, for a message without id.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "NUMBER")]
    position: Option<u64>,
    /// Show the payload, too. It may hold what belongs into no log.
    #[arg(long)]
    payload: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Which letters are meant.
#[derive(Args, Clone, Debug)]
struct FilterOptions {
    /// Dead for one of these reasons: `invalid`, `permanent`, `exhausted`, `stale`, or the broker's own, such as `delivery_limit`.
    #[arg(long, value_delimiter = ',', value_name = "REASONS")]
    dead_reason: Vec<String>,
    /// Of this type.
    #[arg(long, value_name = "NAME")]
    event_type: Option<String>,
    /// Of aggregates of this type.
    #[arg(long, value_name = "NAME")]
    aggregate_type: Option<String>,
    /// Of the aggregate of this id.
    #[arg(long, value_name = "ID")]
    aggregate_id: Option<String>,
    /// Failed last longer ago than this, such as 90s, 15m, 6h or 2d.
    #[arg(long, value_parser = age, value_name = "AGE")]
    older_than: Option<Duration>,
    /// Failed last within this time.
    #[arg(long, value_parser = age, value_name = "AGE")]
    newer_than: Option<Duration>,
}

impl FilterOptions {
    fn filter(&self) -> Filter {
        Filter {
            reasons: self.dead_reason.clone(),
            event_type: self.event_type.clone(),
            aggregate_type: self.aggregate_type.clone(),
            aggregate_id: self.aggregate_id.clone(),
            older_than: self.older_than,
            newer_than: self.newer_than,
        }
    }
}

#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("which").required(true).multiple(true).args([
    "message_id", "dead_reason", "event_type", "aggregate_type", "aggregate_id", "older_than", "newer_than", "all",
]))]
struct Decide {
    /// The message's id, which is its event's.
    #[arg(conflicts_with_all = ["dead_reason", "event_type", "aggregate_type", "aggregate_id", "older_than", "newer_than", "all"])]
    message_id: Option<String>,
    #[command(flatten)]
    filter: FilterOptions,
    /// All letters.
    #[arg(long, conflicts_with_all = ["dead_reason", "event_type", "aggregate_type", "aggregate_id", "older_than", "newer_than"])]
    all: bool,
    /// Most letters to decide about; no bound by default.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "COUNT")]
    limit: Option<u64>,
    /// Say which letters it would be, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Why you decide so.
    #[arg(long, value_parser = text::<4096>, required_unless_present = "dry_run", value_name = "TEXT")]
    reason: Option<String>,
    /// Who decides.
    #[arg(long, env = "USER", value_parser = text::<255>, required_unless_present = "dry_run", value_name = "NAME")]
    actor: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Clone, Debug)]
struct Replay {
    #[command(flatten)]
    decide: Decide,
    /// Replay also what is older than the consumer remembers: if its event did take effect, it does so once more.
    #[arg(long)]
    force: bool,
    /// Hours for which the consumer remembers what took effect, as set for the reaper.
    #[arg(long, env = "SEMEL_REAPER_PROCESSED_RETENTION_HOURS", default_value_t = 720, value_parser = clap::value_parser!(u64).range(1..=87_600), value_name = "HOURS")]
    processed_retention_hours: u64,
}

impl DeadCommand {
    /// Does it, and tells of it on standard output.
    ///
    /// # Errors
    ///
    /// When broker or database cannot be used, or what is asked for is refused.
    pub async fn run(&self, letters: DeadLetters) -> Outcome<()> {
        match &self.action {
            Action::List { filter, limit, json } => list(&letters, &filter.filter(), *limit, *json).await,
            Action::Show(asked) => show(&letters, asked).await,
            Action::Replay(replay) => {
                let retention = Duration::from_hours(replay.processed_retention_hours);
                decide(&letters.retention(retention), &replay.decide, Verdict::Replay, replay.force).await
            }
            Action::Discard(asked) => decide(&letters, asked, Verdict::Discard, false).await,
        }
    }
}

async fn list(letters: &DeadLetters, filter: &Filter, limit: u64, as_json: bool) -> Outcome<()> {
    let seen = letters.list(filter, count(limit)).await?;
    if seen.letters.is_empty() {
        tracing::info!("there is no such dead letter");
    }
    if let Some(bound) = seen.bound {
        tracing::warn!("{bound}");
    }
    let all = &seen.letters;
    say(&if as_json { pretty(&all.iter().map(summary).collect()) } else { table(all) })
}

async fn show(letters: &DeadLetters, asked: &Show) -> Outcome<()> {
    let which = match (&asked.message_id, asked.position) {
        (Some(id), _) => Which::Id(id.clone()),
        (None, position) => Which::Position(count(position.unwrap_or_default())),
    };
    let Some((letter, payload)) = letters.show(&which).await? else {
        let queue = format!("{}.dead", letters.queue());
        return Err(DeadError::NoLetter { letter: which.to_string(), queue }.into());
    };
    let took_effect_at = letters.took_effect_at(&letter).await?;
    let payload = asked.payload.then(|| String::from_utf8_lossy(&payload).into_owned());
    let value = dossier(&letter, took_effect_at, payload.as_deref());
    say(&if asked.json { pretty(&value) } else { lines(&value) })
}

/// A letter that is too old.
#[derive(Debug, thiserror::Error)]
#[error(
    "{count} letters are older than the consumer remembers, and stay: an event of theirs that did take effect would do so \
     once more; --force replays them"
)]
struct TooOld {
    count: usize,
}

async fn decide(letters: &DeadLetters, asked: &Decide, verdict: Verdict, is_forced: bool) -> Outcome<()> {
    let decision = Decision {
        verdict,
        message_id: asked.message_id.as_deref(),
        filter: asked.filter.filter(),
        limit: asked.limit.map_or(usize::MAX, count),
        is_forced,
        is_dry_run: asked.dry_run,
        actor: asked.actor.as_deref().unwrap_or_default(),
        reason: asked.reason.as_deref().unwrap_or_default(),
    };
    let (mut told, mut too_old, mut unsaid) = (Vec::new(), Vec::new(), None);
    let decided = letters
        .decide(&decision, &mut |letter, fate| match fate {
            Fate::TooOld => too_old.push(name(letter)),
            Fate::Done | Fate::DoneAndKept => {
                if !asked.json {
                    let line =
                        format!("{} {}\n", one_line(letter.name()), word(verdict, asked.dry_run, fate));
                    // The decision is carried out, whether or not anybody hears of it.
                    unsaid = say(&line).err();
                }
                told.push(name(letter));
            }
        })
        .await;
    for id in &too_old {
        tracing::warn!(letter = id.as_str(), "older than the consumer remembers: it stays");
    }
    // What was decided before a failure is decided.
    if asked.json && (decided.is_ok() || !told.is_empty()) {
        let decision = word(verdict, false, Fate::Done);
        let all =
            json!({ "decision": decision, "dry_run": asked.dry_run, "letters": told, "too_old": too_old });
        say(&pretty(&all))?;
    }
    let decided = decided?;
    if decided.done + decided.too_old == 0 {
        tracing::info!("there is no such dead letter");
    }
    if let Some(bound) = decided.bound {
        tracing::warn!("{bound}");
    }
    if decided.too_old > 0 {
        return Err(TooOld { count: decided.too_old }.into());
    }
    unsaid.map_or(Ok(()), Err)
}

fn word(verdict: Verdict, is_dry_run: bool, fate: Fate) -> &'static str {
    match (verdict, is_dry_run, fate) {
        (Verdict::Replay, true, _) => "would be replayed",
        (Verdict::Discard, true, _) => "would be discarded",
        (Verdict::Replay, false, Fate::DoneAndKept) => "replayed, and still here",
        (Verdict::Replay, false, _) => "replayed",
        (Verdict::Discard, false, _) => "discarded",
    }
}

fn name(letter: &Letter) -> String {
    letter.name().to_owned()
}

fn table(letters: &[Letter]) -> String {
    let row = |cells: [&str; 6]| {
        let [position, id, reason, failed_at, what, error] = cells;
        format!("{position:>5}  {id:36}  {reason:14}  {failed_at:20}  {what:40}  {error}")
            .trim_end()
            .to_owned()
            + "\n"
    };
    let mut rows: Vec<_> = letters
        .iter()
        .map(|letter| {
            let text = |value: &Option<String>| one_line(value.as_deref().unwrap_or("-"));
            let what = format!(
                "{}/{} {}",
                text(&letter.aggregate_type),
                text(&letter.aggregate_id),
                text(&letter.event_type)
            );
            row([
                &letter.position.to_string(),
                &text(&letter.message_id),
                &one_line(&letter.reason),
                &letter.failed_at.map(whole_seconds).unwrap_or_default(),
                &what,
                &one_line(error(letter).unwrap_or_default()),
            ])
        })
        .collect();
    if !rows.is_empty() {
        rows.insert(0, row(["PLACE", "MESSAGE", "REASON", "FAILED", "WHAT", "ERROR"]));
    }
    rows.concat()
}

fn whole_seconds(at: OffsetDateTime) -> String {
    instant(at.replace_nanosecond(0).unwrap_or(at))
}

/// What went wrong, unless it may quote the payload.
fn error(letter: &Letter) -> Option<&str> {
    if letter.reason == "invalid" { None } else { letter.error.as_deref() }
}

fn summary(letter: &Letter) -> Value {
    json!({
        "position": letter.position,
        "message_id": letter.message_id,
        "event_type": letter.event_type,
        "aggregate_type": letter.aggregate_type,
        "aggregate_id": letter.aggregate_id,
        "reason": letter.reason,
        "error": error(letter),
        "attempts": letter.attempts,
        "failed_at": letter.failed_at.map(instant),
        "created_at": letter.created_at.map(instant),
        "payload_bytes": letter.payload_bytes,
    })
}

fn dossier(letter: &Letter, took_effect_at: Option<OffsetDateTime>, payload: Option<&str>) -> Value {
    json!({
        "message_id": letter.message_id,
        "event_id": letter.event_id,
        "event_type": letter.event_type,
        "aggregate_type": letter.aggregate_type,
        "aggregate_id": letter.aggregate_id,
        "aggregate_version": letter.aggregate_version,
        "reason": letter.reason,
        "error": letter.error,
        "consumer": letter.consumer,
        "attempts": letter.attempts,
        "first_failed_at": letter.first_failed_at.map(instant),
        "failed_at": letter.failed_at.map(instant),
        "created_at": letter.created_at.map(instant),
        "took_effect_at": took_effect_at.map(instant),
        "exchange": letter.exchange,
        "routing_key": letter.routing_key,
        "traceparent": letter.trace_context,
        "payload_bytes": letter.payload_bytes,
        "payload": payload,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        dead: DeadCommand,
    }

    fn parsed(arguments: &str) -> Result<Program, clap::Error> {
        Program::try_parse_from(std::iter::once("dead").chain(arguments.split_whitespace()))
    }

    #[test]
    fn a_decision_names_its_letters_and_its_reason() {
        for good in [
            "list",
            "list --dead-reason invalid,permanent --newer-than 2d --limit 5 --json",
            "show 7",
            "show --position 3 --payload",
            "replay 7 --reason r --actor a",
            "replay --event-type A --older-than 1h --reason r --actor a --force",
            "replay --all --dry-run",
            "discard --all --limit 9 --reason r --actor a",
        ] {
            assert!(parsed(good).is_ok(), "{good}");
        }
        for bad in [
            "show",
            "show 7 --position 3",
            "list --limit 0",
            "replay --reason r --actor a",
            "replay 7 --actor a",
            "replay 7 --all --reason r --actor a",
            "replay --all --event-type A --reason r --actor a",
            "discard 7 --force --reason r --actor a",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
