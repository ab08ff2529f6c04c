//! `parked list`, `show`, `retry` and `discard`.
//!
//! Each event is decided about in a transaction of its own, which also writes that down; so a command that is broken off leaves
//! what it has told as decided.

use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use semel_core::database::{CALL_LIMIT, Failure, Loan, failure, within};
use semel_core::inbox::operator::{self, Filter, Waiting};
use semel_core::inbox::order::{self, Place};
use semel_core::inbox::parked;
use semel_core::operators::{self, Action as Deed};
use semel_core::options::text;
use semel_core::schema::{self, ENGINE, INBOX};
use semel_core::shown::{instant, lines, one_line, pretty};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};
use uuid::Uuid;

use super::{Outcome, age, say};

/// Events that are read at a time.
const PAGE: i64 = 500;

/// What is done about parked events.
#[derive(Args, Clone, Debug)]
pub struct ParkedCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Debug, Subcommand)]
enum Action {
    /// List parked events, by aggregate and in their order.
    List {
        #[command(flatten)]
        filter: FilterOptions,
        /// Most events to list.
        #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=10_000), value_name = "COUNT")]
        limit: i64,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show a parked event.
    Show {
        /// The event's id.
        event_id: Uuid,
        /// Show the payload, too. It may hold what belongs into no log.
        #[arg(long)]
        payload: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Try events that failed again, at once and as if they had never failed. Leaves an audit entry for each.
    Retry(Decide),
    /// Drop events for good; their aggregates' later events go on. Leaves an audit entry for each.
    Discard(Decide),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Reason {
    /// Its handling failed.
    Failed,
    /// An earlier event of its aggregate is parked.
    Behind,
    /// It was delivered before, and may be one that ends its process.
    Redelivered,
}

impl Reason {
    const fn label(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Behind => "behind",
            Self::Redelivered => "redelivered",
        }
    }
}

/// Which events are meant. Unless a reason is named, or one event is, a decision is about those that failed.
#[derive(Args, Clone, Debug)]
struct FilterOptions {
    /// Parked for this reason.
    #[arg(long, value_name = "REASON")]
    parked_reason: Option<Reason>,
    /// Of this type.
    #[arg(long, value_name = "NAME")]
    event_type: Option<String>,
    /// Of aggregates of this type.
    #[arg(long, value_name = "NAME")]
    aggregate_type: Option<String>,
    /// Of the aggregate of this id.
    #[arg(long, value_name = "ID")]
    aggregate_id: Option<String>,
    /// Parked longer ago than this, such as 90s, 15m, 6h or 2d.
    #[arg(long, value_parser = age, value_name = "AGE")]
    older_than: Option<Duration>,
}

impl FilterOptions {
    fn filter(&self, otherwise: Option<Reason>) -> Filter {
        Filter {
            reason: self.parked_reason.or(otherwise).map(|reason| reason.label().to_owned()),
            event_type: self.event_type.clone(),
            aggregate_type: self.aggregate_type.clone(),
            aggregate_id: self.aggregate_id.clone(),
            older_than: self.older_than,
        }
    }
}

#[derive(Args, Clone, Debug)]
#[command(group = ArgGroup::new("which").required(true).multiple(true).args([
    "event_id", "parked_reason", "event_type", "aggregate_type", "aggregate_id", "older_than", "all",
]))]
struct Decide {
    /// The event's id.
    #[arg(conflicts_with_all = ["parked_reason", "event_type", "aggregate_type", "aggregate_id", "older_than", "all"])]
    event_id: Option<Uuid>,
    #[command(flatten)]
    filter: FilterOptions,
    /// All events that failed.
    #[arg(long, conflicts_with_all = ["parked_reason", "event_type", "aggregate_type", "aggregate_id", "older_than"])]
    all: bool,
    /// Most events to decide about; no bound by default.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "COUNT")]
    limit: Option<u64>,
    /// Say which events it would be, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Why you decide so.
    #[arg(long, value_parser = text::<4096>, required_unless_present = "dry_run", value_name = "TEXT")]
    reason: Option<String>,
    /// Who decides.
    #[arg(long, env = "USER", value_parser = text::<255>, required_unless_present = "dry_run", value_name = "NAME")]
    actor: Option<String>,
    /// Seconds to wait for a consumer that is at work on the events' aggregate.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600), value_name = "SECONDS")]
    wait: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What is done with events.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Verdict {
    Retry,
    Discard,
}

/// Why a decision is not carried out.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("no event {0} is parked")]
    NoEvent(Uuid),
    #[error("event {0} has not failed: it waits behind another of its aggregate, so retry the first")]
    Behind(Uuid),
    #[error(
        "a consumer has been at work on the aggregate of event {0} for too long: wait longer with --wait"
    )]
    Busy(Uuid),
}

impl ParkedCommand {
    /// Does it for the consumer of that name, and tells of it on standard output.
    ///
    /// # Errors
    ///
    /// When the database cannot be used, or what is asked for is refused.
    pub async fn run(&self, consumer: &str, pool: &PgPool) -> Outcome<()> {
        schema::verify_in(pool, &[&ENGINE, &INBOX]).await?;
        let mut loan = Loan::take(pool).await?;
        match &self.action {
            Action::List { filter, limit, json } => {
                let filter = filter.filter(None);
                let events =
                    within(CALL_LIMIT, operator::list(&mut loan, consumer, &filter, None, *limit)).await?;
                if events.is_empty() {
                    tracing::info!("no such event is parked");
                }
                if i64::try_from(events.len()).is_ok_and(|count| count == *limit) {
                    tracing::warn!(limit, "there may be more: raise --limit");
                }
                say(&if *json { pretty(&events.iter().map(shown).collect()) } else { table(&events) })
            }
            Action::Show { event_id, payload, json } => {
                let event = find(&mut loan, consumer, *event_id).await?;
                let mut value = shown(&event);
                if *payload {
                    let bytes = within(CALL_LIMIT, operator::payload(&mut loan, event.parked_id)).await?;
                    value["payload"] = bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).into();
                }
                say(&if *json { pretty(&value) } else { lines(&value) })
            }
            Action::Retry(decide) => {
                Desk { connection: &mut loan, consumer, verdict: Verdict::Retry, decide, told: Vec::new() }
                    .run()
                    .await
            }
            Action::Discard(decide) => {
                Desk { connection: &mut loan, consumer, verdict: Verdict::Discard, decide, told: Vec::new() }
                    .run()
                    .await
            }
        }
    }
}

async fn find(connection: &mut PgConnection, consumer: &str, event_id: Uuid) -> Outcome<Waiting> {
    let found = within(CALL_LIMIT, operator::find(connection, consumer, event_id)).await?;
    Ok(found.ok_or(Refused::NoEvent(event_id))?)
}

/// A decision on its way.
struct Desk<'a> {
    connection: &'a mut PgConnection,
    consumer: &'a str,
    verdict: Verdict,
    decide: &'a Decide,
    told: Vec<Uuid>,
}

impl Desk<'_> {
    async fn run(mut self) -> Outcome<()> {
        let result = match self.decide.event_id {
            Some(event_id) => self.one(event_id).await,
            None => self.many().await,
        };
        if self.told.is_empty() && result.is_ok() {
            tracing::info!("no such event is parked");
        }
        // What was decided before a failure is decided.
        if self.decide.json && (result.is_ok() || !self.told.is_empty()) {
            let value =
                json!({ "decision": self.word(), "dry_run": self.decide.dry_run, "event_ids": self.told });
            say(&pretty(&value))?;
        }
        result
    }

    async fn one(&mut self, event_id: Uuid) -> Outcome<()> {
        let event = find(self.connection, self.consumer, event_id).await?;
        if self.verdict == Verdict::Retry && event.next_attempt_at.is_none() {
            return Err(Refused::Behind(event_id).into());
        }
        if !self.decide(&event).await? {
            return Err(Refused::NoEvent(event_id).into());
        }
        Ok(())
    }

    async fn many(&mut self) -> Outcome<()> {
        let filter = self.decide.filter.filter(Some(Reason::Failed));
        let limit = self.decide.limit.unwrap_or(u64::MAX);
        let mut after: Option<Waiting> = None;
        loop {
            let list = operator::list(self.connection, self.consumer, &filter, after.as_ref(), PAGE);
            let mut page = within(CALL_LIMIT, list).await?;
            for event in &page {
                if u64::try_from(self.told.len()).is_ok_and(|count| count >= limit) {
                    tracing::warn!(limit, "there may be more: raise --limit");
                    return Ok(());
                }
                // What only waits has nothing to retry, and what is gone nothing to be decided about.
                if self.verdict == Verdict::Discard || event.next_attempt_at.is_some() {
                    self.decide(event).await?;
                }
            }
            let is_last = i64::try_from(page.len()).is_ok_and(|count| count < PAGE);
            after = page.pop();
            if is_last {
                return Ok(());
            }
        }
    }

    /// Says whether the event was still there.
    async fn decide(&mut self, event: &Waiting) -> Outcome<bool> {
        if !self.decide.dry_run && !self.carry_out(event).await? {
            return Ok(false);
        }
        if !self.decide.json {
            let would = if self.decide.dry_run { "would be " } else { "" };
            say(&format!("{} {would}{}\n", event.event_id, self.word()))?;
        }
        self.told.push(event.event_id);
        Ok(true)
    }

    async fn carry_out(&mut self, event: &Waiting) -> Outcome<bool> {
        let wait = Duration::from_secs(self.decide.wait);
        let mut tx = within(CALL_LIMIT, self.connection.begin()).await?;
        let is_there = match self.verdict {
            // It changes nothing but its own row, and whoever is trying it finds that.
            Verdict::Retry => within(CALL_LIMIT, operator::retry(&mut tx, event.parked_id)).await?,
            Verdict::Discard => {
                let place =
                    Place { consumer: self.consumer, kind: &event.aggregate_type, id: &event.aggregate_id };
                let millis = wait.as_millis();
                let patience =
                    format!("SET LOCAL lock_timeout = {millis}; SET LOCAL statement_timeout = {millis}");
                within(CALL_LIMIT, tx.execute(AssertSqlSafe(patience))).await?;
                match within(wait + CALL_LIMIT, order::lock(&mut tx, place)).await {
                    Err(error) if failure(&error) == Failure::LockTimeout => {
                        return Err(Refused::Busy(event.event_id).into());
                    }
                    locked => locked?,
                }
                within(CALL_LIMIT, parked::remove(&mut tx, place, event.parked_id)).await?
            }
        };
        if !is_there {
            within(CALL_LIMIT, tx.rollback()).await?;
            return Ok(false);
        }
        let subject = format!("{}: {} {}", self.consumer, event.event_id, what(event));
        let deed = Deed {
            actor: self.decide.actor.as_deref().unwrap_or_default(),
            action: match self.verdict {
                Verdict::Retry => "parked retry",
                Verdict::Discard => "parked discard",
            },
            subject: &subject[..subject.floor_char_boundary(1024)],
            reason: self.decide.reason.as_deref().unwrap_or_default(),
        };
        within(CALL_LIMIT, operators::record(&mut tx, &deed)).await?;
        within(CALL_LIMIT, tx.commit()).await?;
        Ok(true)
    }

    fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Retry => "retried",
            Verdict::Discard => "discarded",
        }
    }
}

/// What happened to what.
fn what(event: &Waiting) -> String {
    let event_type = event.event_type.as_deref().unwrap_or("-");
    one_line(&format!("{}/{} {event_type}", event.aggregate_type, event.aggregate_id))
}

fn table(events: &[Waiting]) -> String {
    let row = |id: &str, reason: &str, attempts: &str, next: &str, what: &str, error: &str| {
        format!("{id:36}  {reason:6}  {attempts:>8}  {next:20}  {what:40}  {error}").trim_end().to_owned()
            + "\n"
    };
    let mut rows: Vec<_> = events
        .iter()
        .map(|event| {
            let next = event.next_attempt_at.map(|at| instant(at.replace_nanosecond(0).unwrap_or(at)));
            let error = one_line(event.error.as_deref().unwrap_or_default());
            let (id, attempts) = (event.event_id.to_string(), event.attempts.to_string());
            row(&id, &event.reason, &attempts, &next.unwrap_or_default(), &what(event), &error)
        })
        .collect();
    if !rows.is_empty() {
        rows.insert(0, row("EVENT", "REASON", "ATTEMPTS", "NEXT", "WHAT", "ERROR"));
    }
    rows.concat()
}

fn shown(event: &Waiting) -> Value {
    json!({
        "event_id": event.event_id,
        "event_type": event.event_type,
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "aggregate_version": event.aggregate_version,
        "reason": event.reason,
        "error": event.error,
        "attempts": event.attempts,
        "parked_at": instant(event.parked_at),
        "first_failed_at": event.first_failed_at.map(instant),
        "last_failed_at": event.last_failed_at.map(instant),
        "next_attempt_at": event.next_attempt_at.map(instant),
        "payload_bytes": event.payload_bytes,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        parked: ParkedCommand,
    }

    #[test]
    fn a_decision_names_its_events_and_its_reason() {
        let parsed = |arguments: &str| {
            Program::try_parse_from(std::iter::once("parked").chain(arguments.split_whitespace()))
        };
        let id = Uuid::nil();
        for good in [
            "list --parked-reason behind --limit 5 --json".to_owned(),
            format!("show {id} --payload"),
            format!("retry {id} --reason r --actor a"),
            "discard --event-type A --older-than 1h --reason r --actor a --limit 2".to_owned(),
            "retry --all --dry-run".to_owned(),
        ] {
            assert!(parsed(&good).is_ok(), "{good}");
        }
        for bad in [
            format!("retry {id} --actor a"),
            format!("retry {id} --all --reason r --actor a"),
            "discard --reason r --actor a".to_owned(),
        ] {
            assert!(parsed(&bad).is_err(), "{bad}");
        }
    }
}
