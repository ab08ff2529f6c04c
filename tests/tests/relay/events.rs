//! `semel-relay events`: what people see of set-aside events, and what they decide.

use std::process::Output;
use std::time::Duration;

use anyhow::{Result, ensure};
use semel_core::outbox::drain;
use semel_tests::process::binary;
use semel_tests::tap::Tap;
use semel_tests::wait::eventually;
use serde_json::Value;
use sqlx::{Connection as _, Row as _};
use tokio::sync::Mutex;

use crate::yard::{Relay, Yard, arrived, first_deliveries};

const SOON: Duration = Duration::from_mins(1);
const WHY: [&str; 4] = ["--actor", "ada", "--reason", "asked the author"];

/// Runs the program as a person would.
async fn events(yard: &Yard, arguments: &[&str]) -> Result<Output> {
    run(yard, arguments, &[]).await
}

async fn run(yard: &Yard, arguments: &[&str], env: &[(&str, &str)]) -> Result<Output> {
    let mut command = tokio::process::Command::new(binary("semel-relay")?);
    command.env_clear().envs(env.iter().copied());
    command.args(["--database-url", &yard.database.url(), "events"]).args(arguments).kill_on_drop(true);
    Ok(tokio::time::timeout(SOON, command.output()).await??)
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn refused(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Aggregates `b1` to `b<count>`, each with a dead event and two that wait behind it, and `r1`, whose first is retried.
async fn with_dead(count: i64) -> Result<(Yard, Tap)> {
    let yard = Yard::new().await?;
    let tap = yard.tap(&["thing.Happened"]).await?;
    yard.execute(&format!(
        "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
         SELECT 'thing', 'b' || n, v, CASE v WHEN 1 THEN 'Unheard' ELSE 'Happened' END, '{{}}'
         FROM generate_series(1, {count}) AS n, generate_series(1, 3) AS v ORDER BY v"
    ))
    .await?;
    let mut config = yard.config(1)?;
    (config.held.max_attempts, config.batch) = (1, 5000);
    let mut relay = Relay::new(&config);
    relay.connect().await?;
    while yard.count("published_at IS NULL AND held_at IS NULL").await? > 0 {
        relay.pass().await?;
    }
    assert_eq!(yard.count("dead_at IS NOT NULL").await?, count);
    Ok((yard, tap))
}

async fn id(yard: &Yard, aggregate: &str, version: i64) -> Result<String> {
    let query = "SELECT event_id::TEXT FROM outbox WHERE aggregate_id = $1 AND aggregate_version = $2";
    let row = sqlx::query(query).bind(aggregate).bind(version).fetch_one(&mut yard.connect().await?).await?;
    Ok(row.try_get(0)?)
}

#[tokio::test]
async fn lists_and_shows_what_is_set_aside() -> Result<()> {
    let (yard, _tap) = with_dead(3).await?;
    let (dead, follower) = (id(&yard, "b1", 1).await?, id(&yard, "b1", 2).await?);
    let all: Value = serde_json::from_str(&printed(&events(&yard, &["list", "--json"]).await?))?;
    assert_eq!(all.as_array().map(Vec::len), Some(9));
    assert_eq!((&all[0]["event_id"], &all[0]["state"]), (&Value::from(dead.as_str()), &Value::from("dead")));
    assert!(all[0]["last_error"].as_str().is_some_and(|error| error.contains("NO_ROUTE")), "{all}");
    let text = printed(&events(&yard, &["list", "--state", "dead", "--limit", "2"]).await?);
    assert_eq!(text.lines().count(), 3, "{text}");
    assert_eq!(printed(&events(&yard, &["list", "--event-type", "Nothing"]).await?), "");
    assert_eq!(printed(&events(&yard, &["list", "--older-than", "1h", "--json"]).await?), "[]\n");

    let shown = printed(&events(&yard, &["show", &follower]).await?);
    ensure!(
        shown.contains("state: waiting") && shown.contains(&format!("first_of_chain: {dead}")),
        "{shown}"
    );
    let shown: Value = serde_json::from_str(&printed(&events(&yard, &["show", &dead, "--json"]).await?))?;
    assert_eq!((&shown["attempts"], &shown["waiting_behind"]), (&Value::from(1), &Value::from(2)));
    let nobody = uuid::Uuid::new_v4().to_string();
    ensure!(refused(&events(&yard, &["show", &nobody]).await?).contains("there is no event"));
    Ok(())
}

#[tokio::test]
async fn a_person_retries_and_discards_and_leaves_a_trace() -> Result<()> {
    let (yard, tap) = with_dead(4).await?;
    let heard = yard.vhost.scoped("heard");
    let heard =
        Tap::open(&yard.vhost.url(), &yard.exchange, &heard, &["thing.Unheard", "thing.Happened"]).await?;
    let (first, second) = (id(&yard, "b1", 1).await?, id(&yard, "b2", 1).await?);
    let follower = id(&yard, "b1", 2).await?;

    let dry = printed(&events(&yard, &["discard", "--all", "--dry-run"]).await?);
    assert_eq!(
        dry.lines().filter(|line| line.ends_with(" would be discarded")).count(),
        4,
        "followers are not meant"
    );
    assert_eq!(
        yard.count("discarded_at IS NOT NULL OR dead_at IS NULL AND first_error IS NOT NULL").await?,
        0
    );
    let waits = refused(&events(&yard, &[&["retry", &follower], &WHY[..]].concat()).await?);
    ensure!(waits.contains(&first), "{waits}");

    assert_eq!(
        printed(&events(&yard, &[&["retry", &first], &WHY[..]].concat()).await?),
        format!("{first} retried\n")
    );
    let said = printed(&events(&yard, &[&["discard", &second, "--json"], &WHY[..]].concat()).await?);
    let said: Value = serde_json::from_str(&said)?;
    assert_eq!(said["event_ids"], Value::from(vec![second.clone()]));
    let again = refused(&events(&yard, &[&["discard", &second], &WHY[..]].concat()).await?);
    ensure!(again.contains("is discarded"), "{again}");
    let rest = printed(&events(&yard, &[&["retry", "--event-type", "Unheard"], &WHY[..]].concat()).await?);
    assert_eq!(rest.lines().count(), 3, "{rest}");

    let mut relay = Relay::new(&yard.config(1)?);
    relay.connect().await?;
    let relay = Mutex::new(relay);
    let none = || async {
        relay.lock().await.pass().await.map_err(|error| error.to_string())?;
        match yard.count("published_at IS NULL AND discarded_at IS NULL").await {
            Ok(0) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    eventually("the rest to be published", SOON, none).await?;
    arrived(&heard, 11).await?;
    assert_eq!(first_deliveries(&heard, "b1")?, [1, 2, 3]);
    assert_eq!(first_deliveries(&heard, "b2")?, [2, 3]);
    arrived(&tap, 8).await?;
    let kept = "discarded_by = 'ada' AND discard_reason = 'asked the author' AND discarded_at IS NOT NULL";
    assert_eq!(yard.count(kept).await?, 1);
    let actions = "SELECT action, count(*) FROM operator_actions WHERE actor = 'ada' GROUP BY 1 ORDER BY 1";
    let actions = sqlx::query(actions).fetch_all(&mut yard.connect().await?).await?;
    let actions: Vec<(String, i64)> =
        actions.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Result<_>>()?;
    assert_eq!(actions, [("events discard".to_owned(), 1), ("events retry".to_owned(), 4)]);
    Ok(())
}

#[tokio::test]
async fn a_lane_that_a_relay_works_on_is_waited_for_and_not_for_ever() -> Result<()> {
    let (yard, _tap) = with_dead(1).await?;
    let dead = id(&yard, "b1", 1).await?;
    let mut connection = yard.connect().await?;
    let mut owner = connection.begin().await?;
    let lanes: Vec<i16> = (0..drain::LANES).collect();
    assert_eq!(drain::take_lanes(&mut owner, &lanes, 64).await?.len(), 64);
    let busy = refused(&events(&yard, &[&["discard", &dead, "--wait", "1"], &WHY[..]].concat()).await?);
    ensure!(busy.contains("a relay has been at work on lane"), "{busy}");
    owner.rollback().await?;
    printed(&events(&yard, &[&["discard", &dead], &WHY[..]].concat()).await?);
    Ok(())
}

#[tokio::test]
async fn killed_before_its_commit_a_decision_was_not_made() -> Result<()> {
    let (yard, _tap) = with_dead(1).await?;
    let dead = id(&yard, "b1", 1).await?;
    let arguments = [&["discard", &dead], &WHY[..]].concat();
    let killed = run(&yard, &arguments, &[("SEMEL_FAILPOINTS", "relay.before_decision=abort")]).await?;
    ensure!(!killed.status.success() && killed.stdout.is_empty(), "{killed:?}");
    assert_eq!(yard.count("discarded_at IS NOT NULL OR EXISTS (SELECT FROM operator_actions)").await?, 0);
    assert_eq!(printed(&events(&yard, &arguments).await?), format!("{dead} discarded\n"));
    Ok(())
}

#[tokio::test]
async fn two_relays_and_people_at_once_keep_the_order_and_send_each_event_once() -> Result<()> {
    let (yard, _tap) = with_dead(60).await?;
    let heard = yard.vhost.scoped("heard");
    let heard =
        Tap::open(&yard.vhost.url(), &yard.exchange, &heard, &["thing.Unheard", "thing.Happened"]).await?;
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (yard_ref, stop_ref) = (&yard, &stop);
    let relay = async |config| {
        let mut relay = Relay::new(&config);
        relay.connect().await?;
        while !stop_ref.load(std::sync::atomic::Ordering::Relaxed) {
            relay.pass().await?;
        }
        anyhow::Ok(())
    };
    let people = async {
        let outcome = async {
            for aggregate in 1..=60 {
                let event = id(yard_ref, &format!("b{aggregate}"), 1).await?;
                let word = if aggregate % 3 == 0 { "discard" } else { "retry" };
                if aggregate % 10 == 1 {
                    // While its chain comes to life, it grows.
                    for version in 4..=8 {
                        let mut connection = yard_ref.connect().await?;
                        yard_ref
                            .insert(&mut connection, &format!("b{aggregate}"), version, "Happened")
                            .await?;
                    }
                }
                printed(&events(yard_ref, &[&[word, &event], &WHY[..]].concat()).await?);
            }
            let none = || async {
                match yard_ref.count("published_at IS NULL AND discarded_at IS NULL").await {
                    Ok(0) => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            };
            eventually("all to be published or discarded", SOON, none).await
        }
        .await;
        stop_ref.store(true, std::sync::atomic::Ordering::Relaxed);
        outcome
    };
    tokio::try_join!(relay(yard.config(1)?), relay(yard.config(1)?), people)?;
    let messages = usize::try_from(yard.count("published_at IS NOT NULL").await?)?;
    arrived(&heard, messages).await?;
    for aggregate in 1..=60 {
        let last = if aggregate % 10 == 1 { 8 } else { 3 };
        let first = if aggregate % 3 == 0 { 2 } else { 1 };
        let name = format!("b{aggregate}");
        assert_eq!(first_deliveries(&heard, &name)?, (first..=last).collect::<Vec<_>>(), "{name}");
    }
    assert_eq!(heard.messages()?.len(), messages, "an event was sent twice without a crash");
    Ok(())
}
