//! The subcommand `events`: events that are set aside, and what a person decides about them.
//!
//! Standard output holds results alone, those of a decision as they are committed; a refusal is an error, and leaves with
//! 1. Decisions are made in bounded transactions, so one that is broken off leaves what it has told as decided.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write as _;
use std::time::Duration;

use semel_core::database::{self, CALL_LIMIT, within};
use semel_core::failpoint;
use semel_core::outbox::operator::{self, Decision, Dossier, SetAside, State, Verdict};
use semel_core::schema::{self, ENGINE};
use semel_core::shown::{age, instant, lines, one_line, pretty};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};
use uuid::Uuid;

#[cfg(feature = "failpoints")]
use crate::failpoints;
use crate::options::{Decide, EventsAction, Options};

const NAME: &str = "semel-relay events";
/// Most events that one transaction decides about.
const PAGE: i64 = 500;
/// Those that failed by their own fault.
const FAILED: [State; 2] = [State::Held, State::Dead];
const ALL: [State; 3] = [State::Held, State::Waiting, State::Dead];

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

pub(crate) async fn run(action: &EventsAction, options: &Options) -> Outcome<()> {
    let url = options.database.url()?;
    schema::verify(&url, NAME, &[&ENGINE]).await?;
    let mut connection = database::connect(&url, NAME).await?;
    match action {
        EventsAction::List { filter, limit, json } => {
            let events = operator::list(&mut connection, &filter.filter(&ALL), None, *limit).await?;
            if events.is_empty() {
                tracing::info!("no such event is set aside");
            }
            if i64::try_from(events.len()).is_ok_and(|count| count == *limit) {
                tracing::warn!(limit, "there may be more: raise --limit");
            }
            say(&if *json { pretty(&events.iter().map(event_json).collect()) } else { table(&events) })
        }
        EventsAction::Show { event_id, json } => {
            let dossier =
                operator::show(&mut connection, *event_id).await?.ok_or(Refused::NoEvent(*event_id))?;
            let value = dossier_json(&dossier);
            say(&if *json { pretty(&value) } else { lines(&value) })
        }
        EventsAction::Retry(decide) => Desk { connection, verdict: Verdict::Retry, decide }.run().await,
        EventsAction::Discard(decide) => Desk { connection, verdict: Verdict::Discard, decide }.run().await,
    }
}

/// Why a decision is not carried out.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("there is no event {0}")]
    NoEvent(Uuid),
    #[error("event {event_id} is {state}: only one that is set aside can be decided about")]
    NotSetAside { event_id: Uuid, state: String },
    #[error("event {event_id} has not failed: it waits behind event {first}, so retry that one")]
    Waiting { event_id: Uuid, first: Uuid },
    #[error("event {0} is the first of its aggregate and has not failed: it is being tried")]
    BeingTried(Uuid),
    #[error("event {0} has changed meanwhile: look at it again")]
    Changed(Uuid),
    #[error(
        "a relay has been at work on lane {lane} for longer than {} s: nothing of it is changed; try again, or wait longer \
         with --wait",
        wait.as_secs()
    )]
    Busy { lane: i16, wait: Duration },
}

/// A decision on its way.
struct Desk<'a> {
    connection: PgConnection,
    verdict: Verdict,
    decide: &'a Decide,
}

impl Desk<'_> {
    async fn run(mut self) -> Outcome<()> {
        let mut told = Vec::new();
        let result = match self.decide.event_id {
            Some(event_id) => self.one(event_id, &mut told).await,
            None => self.many(&mut told).await,
        };
        if told.is_empty() && result.is_ok() {
            tracing::info!("no such event is set aside");
        }
        // What was decided before a failure is decided.
        if self.decide.json && (result.is_ok() || !told.is_empty()) {
            let value = json!({ "decision": self.word(), "dry_run": self.decide.dry_run, "event_ids": told });
            say(&pretty(&value))?;
        }
        result
    }

    async fn one(&mut self, event_id: Uuid, told: &mut Vec<Uuid>) -> Outcome<()> {
        let event =
            operator::show(&mut self.connection, event_id).await?.ok_or(Refused::NoEvent(event_id))?;
        let is_set_aside = ["held", "waiting", "dead"].contains(&event.state.as_str());
        if !is_set_aside {
            return Err(Refused::NotSetAside { event_id, state: event.state }.into());
        }
        if self.verdict == Verdict::Retry && event.state == "waiting" {
            return Err(match event.first_of_chain.filter(|&first| first != event_id) {
                Some(first) => Refused::Waiting { event_id, first },
                None => Refused::BeingTried(event_id),
            }
            .into());
        }
        if self.decide(event.lane, &[event_id], &ALL, told).await? == 0 {
            return Err(Refused::Changed(event_id).into());
        }
        Ok(())
    }

    async fn many(&mut self, told: &mut Vec<Uuid>) -> Outcome<()> {
        let mut filter = self.decide.filter.filter(&FAILED);
        if self.verdict == Verdict::Retry {
            // What only waits has nothing to retry.
            filter.states.retain(|state| *state != State::Waiting);
        }
        let mut after: Option<SetAside> = None;
        loop {
            let mut page = operator::list(&mut self.connection, &filter, after.as_ref(), PAGE).await?;
            let mut by_lane: BTreeMap<i16, Vec<Uuid>> = BTreeMap::new();
            for event in &page {
                by_lane.entry(event.lane).or_default().push(event.event_id);
            }
            for (lane, events) in by_lane {
                self.decide(lane, &events, &filter.states, told).await?;
            }
            let is_last = i64::try_from(page.len()).is_ok_and(|count| count < PAGE);
            after = page.pop();
            if is_last || after.is_none() {
                return Ok(());
            }
        }
    }

    /// Decides about events of one lane, in a transaction of its own; returns about how many.
    async fn decide(
        &mut self,
        lane: i16,
        events: &[Uuid],
        states: &[State],
        told: &mut Vec<Uuid>,
    ) -> Outcome<usize> {
        let decided = if self.decide.dry_run {
            events.to_vec()
        } else {
            let wait = Duration::from_secs(self.decide.wait);
            let mut tx = within(CALL_LIMIT, self.connection.begin()).await?;
            // The lock and the decision are two statements: the second sees what the lane's last owner committed.
            if !within(wait + CALL_LIMIT, operator::take_lane(&mut tx, lane, wait)).await? {
                return Err(Refused::Busy { lane, wait }.into());
            }
            let action = match self.verdict {
                Verdict::Retry => "events retry",
                Verdict::Discard => "events discard",
            };
            let decision = Decision {
                verdict: self.verdict,
                states,
                actor: self.decide.actor.as_deref().unwrap_or_default(),
                action,
                reason: self.decide.reason.as_deref().unwrap_or_default(),
            };
            let decided = within(CALL_LIMIT, operator::decide(&mut tx, events, &decision)).await?;
            failpoint!(failpoints::BEFORE_DECISION);
            within(CALL_LIMIT, tx.commit()).await?;
            decided
        };
        if !self.decide.json {
            let word = self.word();
            let would = if self.decide.dry_run { "would be " } else { "" };
            let lines: Vec<String> = decided.iter().map(|id| format!("{id} {would}{word}\n")).collect();
            say(&lines.concat())?;
        }
        let count = decided.len();
        told.extend(decided);
        Ok(count)
    }

    fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Retry => "retried",
            Verdict::Discard => "discarded",
        }
    }
}

fn say(text: &str) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

fn table(events: &[SetAside]) -> String {
    let row = |id: &str, state: &str, attempts: &str, since: &str, what: &str, error: &str| {
        format!("{id:36}  {state:7}  {attempts:>8}  {since:>8}  {what:40}  {error}").trim_end().to_owned()
            + "\n"
    };
    let mut rows: Vec<_> = events
        .iter()
        .map(|event| {
            let what =
                format!("{}/{} {}", event.aggregate_type, one_line(&event.aggregate_id), event.event_type);
            let error = one_line(event.last_error.as_deref().unwrap_or_default());
            let (id, attempts) = (event.event_id.to_string(), event.attempts.to_string());
            row(&id, &event.state, &attempts, &age(event.held_s), &what, &error)
        })
        .collect();
    if !rows.is_empty() {
        rows.insert(0, row("EVENT", "STATE", "ATTEMPTS", "SINCE", "WHAT", "ERROR"));
    }
    rows.concat()
}

fn event_json(event: &SetAside) -> Value {
    json!({
        "event_id": event.event_id,
        "outbox_id": event.id,
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "event_type": event.event_type,
        "state": event.state,
        "is_skipped": event.is_skipped,
        "attempts": event.attempts,
        "last_error": event.last_error,
        "created_at": instant(event.created_at),
        "set_aside_seconds": event.held_s,
    })
}

fn dossier_json(event: &Dossier) -> Value {
    json!({
        "event_id": event.event_id,
        "state": event.state,
        "outbox_id": event.id,
        "lane": event.lane,
        "aggregate_type": event.aggregate_type,
        "aggregate_id": event.aggregate_id,
        "aggregate_version": event.aggregate_version,
        "event_type": event.event_type,
        "payload_bytes": event.payload_bytes,
        "attempts": event.attempts,
        "first_error": event.first_error,
        "last_error": event.last_error,
        "created_at": instant(event.created_at),
        "published_at": event.published_at.map(instant),
        "held_at": event.held_at.map(instant),
        "dead_at": event.dead_at.map(instant),
        "skipped_at": event.skipped_at.map(instant),
        "discarded_at": event.discarded_at.map(instant),
        "discarded_by": event.discarded_by,
        "discard_reason": event.discard_reason,
        "next_attempt_at": event.next_attempt_at.map(instant),
        "first_of_chain": event.first_of_chain,
        "waiting_behind": event.waiting_behind,
    })
}
