//! `semel-ledger dead` and `parked`: what people see, and what they decide; and what the ledger tells of its balances.

use std::process::Output;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::net::free_port;
use semel_tests::process::binary;
use semel_tests::services::Services;
use semel_tests::system::{Place, Running};
use semel_tests::wait::eventually;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Executor as _, Row as _};

const SOON: Duration = Duration::from_mins(1);
const WHY: [&str; 4] = ["--actor", "ada", "--reason", "the account is open again"];

/// A ledger that refuses the client `acme`, for as long as its database says so, and its dead letters.
struct Desk {
    place: Place,
    ledger: Running,
    _relays: [Running; 2],
}

impl Desk {
    async fn with_dead(orders: u32) -> Result<Self> {
        let place = Place::make(&Services::from_env()?).await?;
        let ledger = place.ledger("ledger", &[]).await?;
        let relays = [place.relay("relay", &[]).await?, place.ledger_relay("ledger-relay", &[]).await?];
        let desk = Self { place, ledger, _relays: relays };
        desk.books("ALTER TABLE ledger_transactions ADD CONSTRAINT closed CHECK (client_id <> 'acme')")
            .await?;
        let insert = format!(
            "INSERT INTO outbox (event_id, aggregate_type, aggregate_id, event_type, payload)
             SELECT md5(n::TEXT)::UUID, 'order', n::TEXT, 'OrderPlaced', jsonb_build_object(
                 'order_id', md5(n::TEXT)::UUID, 'client_id', 'acme', 'amount', n, 'currency', 'EUR', 'card', 's3cret')
             FROM generate_series(1, {orders}) AS n"
        );
        desk.place.payments.connect().await?.execute(AssertSqlSafe(insert)).await?;
        desk.ledger_counted("dead", orders).await?;
        Ok(desk)
    }

    async fn books(&self, statement: &'static str) -> Result<()> {
        self.place.books.connect().await?.execute(statement).await?;
        Ok(())
    }

    async fn reopen(&self) -> Result<()> {
        self.books("ALTER TABLE ledger_transactions DROP CONSTRAINT closed").await
    }

    async fn ledger_counted(&self, outcome: &str, expected: u32) -> Result<()> {
        let label = format!("outcome=\"{outcome}\"");
        let look = || async {
            let seen = self.ledger.metric("semel_inbox_messages_total", &label).await;
            let seen = seen.map_err(|error| error.to_string())?;
            if seen >= f64::from(expected) { Ok(()) } else { Err(format!("{seen} of {expected}")) }
        };
        eventually(&format!("the ledger to count {outcome}"), SOON, look).await
    }

    async fn dead(&self, arguments: &[&str], env: &[(&str, &str)]) -> Result<Output> {
        command(&self.place, &[&["dead"], arguments].concat(), env).await
    }

    async fn printed(&self, arguments: &[&str]) -> Result<String> {
        let output = self.dead(arguments, &[]).await?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    /// How many bookings there are, and of how many events.
    async fn bookings(&self) -> Result<(i64, i64)> {
        let count = "SELECT count(*), count(DISTINCT event_id) FROM ledger_transactions";
        let row = sqlx::query(count).fetch_one(&mut self.place.books.connect().await?).await?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }

    async fn each_is_booked_once(&self, orders: i64) -> Result<()> {
        let look = || async {
            match self.bookings().await.map_err(|error| error.to_string())? {
                (_, events) if events == orders => Ok(()),
                seen => Err(format!("{seen:?}")),
            }
        };
        eventually("the bookings", SOON, look).await?;
        ensure!(self.bookings().await? == (orders, orders), "booked twice: {:?}", self.bookings().await?);
        Ok(())
    }
}

/// Runs the program as a person would.
async fn command(place: &Place, arguments: &[&str], env: &[(&str, &str)]) -> Result<Output> {
    let mut command = tokio::process::Command::new(binary("semel-ledger")?);
    command.env_clear().envs(place.environment()).envs(env.iter().copied()).kill_on_drop(true);
    command.env("DATABASE_URL", place.books.url()).args(arguments);
    Ok(tokio::time::timeout(SOON, command.output()).await??)
}

#[tokio::test]
async fn a_person_sees_replays_and_discards_dead_letters_and_leaves_a_trace() -> Result<()> {
    let desk = Desk::with_dead(4).await?;
    let tap = desk.place.tap().await?;
    let all: Value = serde_json::from_str(&desk.printed(&["list", "--json"]).await?)?;
    let ids: Vec<String> = all
        .as_array()
        .context("a list")?
        .iter()
        .filter_map(|letter| Some(letter["message_id"].as_str()?.to_owned()))
        .collect();
    assert_eq!(ids.len(), 4, "{all}");
    assert_eq!(all[0]["reason"], "permanent");
    ensure!(all[0]["error"].as_str().is_some_and(|error| error.contains("closed")), "{all}");
    let text = desk.printed(&["list", "--limit", "2"]).await?;
    assert_eq!(text.lines().count(), 3, "{text}");
    assert_eq!(desk.printed(&["list", "--dead-reason", "invalid", "--json"]).await?, "[]\n");
    let shown = desk.printed(&["show", &ids[0]]).await?;
    ensure!(
        shown.contains("reason: permanent") && shown.contains("routing_key: order.OrderPlaced"),
        "{shown}"
    );
    ensure!(!format!("{all}{text}{shown}").contains("s3cret"), "a payload is shown that nobody asked for");
    ensure!(desk.printed(&["show", &ids[0], "--payload", "--json"]).await?.contains("s3cret"));

    assert_eq!(desk.dead(&["replay", "--all"], &[]).await?.status.code(), Some(2), "without a reason");
    let dry = desk.printed(&["replay", "--all", "--dry-run"]).await?;
    assert_eq!(dry.lines().filter(|line| line.ends_with(" would be replayed")).count(), 4, "{dry}");
    let nobody = desk.dead(&[&["replay", "nobody"], &WHY[..]].concat(), &[]).await?;
    assert_eq!((nobody.status.code(), nobody.stdout.as_slice()), (Some(1), &b""[..]), "{nobody:?}");

    desk.reopen().await?;
    let gone = desk.printed(&[&["discard", &ids[3]], &WHY[..]].concat()).await?;
    assert_eq!(gone, format!("{} discarded\n", ids[3]));
    let one = desk.printed(&[&["replay", &ids[0]], &WHY[..]].concat()).await?;
    assert_eq!(one, format!("{} replayed\n", ids[0]));
    let rest =
        desk.printed(&[&["replay", "--event-type", "OrderPlaced", "--json"], &WHY[..]].concat()).await?;
    let rest: Value = serde_json::from_str(&rest)?;
    assert_eq!(rest["letters"], Value::from(&ids[1..3]), "{rest}");
    desk.each_is_booked_once(3).await?;
    assert_eq!(desk.printed(&["list"]).await?, "");
    let audit = "SELECT action, count(*) FROM operator_actions WHERE actor = 'ada'
                 AND reason = 'the account is open again' GROUP BY 1 ORDER BY 1";
    let audit = sqlx::query(audit).fetch_all(&mut desk.place.books.connect().await?).await?;
    let audit: Vec<(String, i64)> =
        audit.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Result<_>>()?;
    assert_eq!(audit, [("dead discard".to_owned(), 1), ("dead replay".to_owned(), 3)]);
    // Whoever consumes the ledger's own events hears of each booking.
    let heard = || async {
        let heard = tap.messages().map_err(|error| error.to_string())?;
        let posted = heard.iter().filter(|message| message.event_type == "LedgerPosted").count();
        if posted == 3 { Ok(()) } else { Err(format!("{posted}")) }
    };
    eventually("three bookings to be told of", SOON, heard).await
}

#[tokio::test]
async fn a_replay_that_is_killed_loses_nothing_and_books_nothing_twice() -> Result<()> {
    for (failpoint, reached) in [("dead.before_replay", 0), ("dead.before_ack", 16)] {
        let desk = Desk::with_dead(40).await?;
        desk.reopen().await?;
        let fault = format!("{failpoint}=abort");
        let killed =
            desk.dead(&[&["replay", "--all"], &WHY[..]].concat(), &[("SEMEL_FAILPOINTS", &fault)]).await?;
        ensure!(!killed.status.success() && killed.stdout.is_empty(), "{killed:?}");
        desk.ledger_counted("effect", reached).await?;
        let left = || async {
            let again = desk.printed(&["list", "--limit", "100", "--json"]).await;
            let again: Value = serde_json::from_str(&again.map_err(|error| error.to_string())?)
                .map_err(|error| error.to_string())?;
            let count = again.as_array().map_or(0, Vec::len);
            if count == 40 { Ok(()) } else { Err(format!("{count} letters")) }
        };
        eventually("all letters to be back", SOON, left).await?;
        let again = desk.printed(&[&["replay", "--all"], &WHY[..]].concat()).await?;
        assert_eq!(again.lines().count(), 40, "{again}");
        desk.each_is_booked_once(40).await?;
        desk.ledger_counted("duplicate", reached).await?;
    }
    Ok(())
}

#[tokio::test]
async fn balances_are_told_at_an_address_of_their_own() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let address = format!("127.0.0.1:{}", free_port()?);
    let ledger = place.ledger("ledger", &[("SEMEL_LEDGER_BALANCES_LISTEN", &address)]).await?;
    let _relay = place.relay("relay", &[]).await?;
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
        SELECT 'order', n::TEXT, 'OrderPlaced', jsonb_build_object(
            'order_id', md5(n::TEXT)::UUID, 'client_id', 'acme', 'amount', n, 'currency', 'EUR')
        FROM generate_series(1, 4) AS n";
    place.payments.connect().await?.execute(insert).await?;
    let get = async |path: &str| -> Result<(u16, Value)> {
        let answer = reqwest::get(format!("http://{address}{path}")).await?;
        Ok((answer.status().as_u16(), answer.json().await?))
    };
    let look = || async {
        let (status, first) = get("/balances?limit=1").await.map_err(|error| error.to_string())?;
        if first["balances"][0]["balance"] == 10 { Ok(first) } else { Err(format!("{status} {first}")) }
    };
    let first = eventually("four orders to be booked", SOON, look).await?;
    assert_eq!(first["balances"][0]["account"], "receivables");
    let (_, second) = get(first["next"].as_str().context("a next page")?).await?;
    assert_eq!(
        (&second["balances"][0]["account"], &second["balances"][0]["balance"]),
        (&"sales".into(), &(-10).into())
    );
    let (_, third) = get(second["next"].as_str().context("a next page")?).await?;
    assert_eq!((&third["balances"], &third["next"]), (&Value::Array(Vec::new()), &Value::Null));
    assert_eq!(get("/balances?limit=x").await?.0, 400);
    assert_eq!(get("/metrics").await?.0, 404);
    // And nowhere else.
    let admin = reqwest::get(format!("http://127.0.0.1:{}/balances", ledger.admin)).await?;
    assert_eq!(admin.status().as_u16(), 404);
    Ok(())
}

#[tokio::test]
async fn a_person_sees_retries_and_discards_parked_events_and_leaves_a_trace() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let mut books = place.books.connect().await?;
    // Of two orders, one with two followers, that failed and wait for an hour.
    let park = "INSERT INTO parked_events (consumer, event_id, aggregate_type, aggregate_id, event_type, exchange, routing_key,
            properties, payload, reason, error, attempts, first_failed_at, last_failed_at, next_attempt_at)
        SELECT 'ledger', md5(n::TEXT)::UUID, 'order', CASE n WHEN 4 THEN 'b' ELSE 'a' END, 'OrderPlaced', 'e', 'k', '{}',
            's3cret', CASE WHEN n IN (1, 4) THEN 'failed' ELSE 'behind' END, CASE WHEN n IN (1, 4) THEN 'closed' END,
            CASE WHEN n IN (1, 4) THEN 7 ELSE 0 END, failed_at, failed_at, failed_at + INTERVAL '1 hour'
        FROM generate_series(1, 4) AS n, LATERAL (SELECT CASE WHEN n IN (1, 4) THEN now() END) AS at (failed_at)
        ORDER BY n";
    books.execute(park).await?;
    let run = async |arguments: &[&str]| -> Result<String> {
        let output = command(&place, &[&["parked"], arguments].concat(), &[]).await?;
        ensure!(output.status.success(), "{output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let all: Value = serde_json::from_str(&run(&["list", "--json"]).await?)?;
    let ids: Vec<&str> =
        all.as_array().context("a list")?.iter().filter_map(|event| event["event_id"].as_str()).collect();
    assert_eq!(ids.len(), 4, "{all}");
    assert_eq!((&all[0]["error"], &all[1]["reason"]), (&"closed".into(), &"behind".into()));
    assert_eq!(run(&["list", "--aggregate-id", "b"]).await?.lines().count(), 2);
    let shown = run(&["show", ids[0]]).await?;
    ensure!(shown.contains("attempts: 7") && !format!("{all}{shown}").contains("s3cret"), "{shown}");
    ensure!(run(&["show", ids[0], "--payload", "--json"]).await?.contains("s3cret"));

    let behind = command(&place, &[&["parked", "retry", ids[1]], &WHY[..]].concat(), &[]).await?;
    assert_eq!((behind.status.code(), behind.stdout.as_slice()), (Some(1), &b""[..]), "{behind:?}");
    let dry = run(&["retry", "--all", "--dry-run"]).await?;
    assert_eq!(dry, format!("{} would be retried\n{} would be retried\n", ids[0], ids[3]));
    let states = async |books: &mut sqlx::PgConnection| -> Result<Vec<(String, i32, Option<bool>)>> {
        let states =
            "SELECT event_id::TEXT, attempts, next_attempt_at <= clock_timestamp() FROM parked_events
            ORDER BY parked_id";
        Ok(sqlx::query_as(states).fetch_all(books).await?)
    };
    let state = |id: &str, attempts, due| (id.to_owned(), attempts, due);
    let [a, b, c, d] = [ids[0], ids[1], ids[2], ids[3]];
    let untouched =
        [state(a, 7, Some(false)), state(b, 0, None), state(c, 0, None), state(d, 7, Some(false))];
    assert_eq!(states(&mut books).await?, untouched);
    assert_eq!(run(&[&["retry", a], &WHY[..]].concat()).await?, format!("{a} retried\n"));
    assert_eq!(states(&mut books).await?[0], state(a, 0, Some(true)));
    // The next one of the aggregate comes after it.
    assert_eq!(run(&[&["discard", a], &WHY[..]].concat()).await?, format!("{a} discarded\n"));
    assert_eq!(states(&mut books).await?[..2], [state(b, 0, Some(true)), state(c, 0, None)]);
    let rest: Value =
        serde_json::from_str(&run(&[&["discard", "--all", "--json"], &WHY[..]].concat()).await?)?;
    assert_eq!(rest["event_ids"], Value::from(vec![d]), "followers are not meant");
    let audit = "SELECT action, count(*) FROM operator_actions WHERE actor = 'ada' GROUP BY 1 ORDER BY 1";
    let audit: Vec<(String, i64)> = sqlx::query_as(audit).fetch_all(&mut books).await?;
    assert_eq!(audit, [("parked discard".to_owned(), 2), ("parked retry".to_owned(), 1)]);
    Ok(())
}
