//! A daemon that cannot start says so in one clear line, and leaves or waits.

use std::net::TcpListener;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use semel_tests::net::free_port;
use semel_tests::process::{Daemon, binary};
use semel_tests::services::{Permissions, Services};
use semel_tests::system::{Place, READY};
use sqlx::Executor as _;

const DAEMONS: [&str; 4] = ["semel-api", "semel-relay", "semel-reaper", "semel-ledger"];
/// It has neither database nor broker.
const SIMULATOR: &str = "semel-provider-sim";

/// The database that a daemon works on.
fn database_of<'a>(place: &'a Place, program: &str) -> &'a semel_tests::services::Database {
    if program == "semel-ledger" { &place.books } else { &place.payments }
}

/// Starts a daemon with everything right but for what `env` says.
async fn start(place: &Place, program: &str, env: &[(&str, &str)]) -> Result<(Daemon, u16)> {
    let admin = free_port()?;
    let daemon = Daemon::command(program, binary(program)?)
        .envs(place.environment())
        .env("DATABASE_URL", database_of(place, program).url())
        .env("SEMEL_API_LISTEN", format!("127.0.0.1:{}", free_port()?))
        .env("SEMEL_PROVIDER_LISTEN", place.provider.to_string())
        .env("SEMEL_PROVIDER_BOOK", &place.book)
        .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
        .envs(env.iter().copied())
        .start()
        .await?;
    Ok((daemon, admin))
}

/// Checks that a daemon has left with a failure, and returns the one line that says why.
async fn last_word(daemon: &Daemon) -> Result<String> {
    let status: ExitStatus = daemon.wait_exit(READY).await?;
    ensure!(status.code() == Some(1), "{} left with {status}: {:?}", daemon.name(), daemon.lines());
    let lines = daemon.lines();
    let errors: Vec<&String> = lines.iter().filter(|line| line.contains("ERROR")).collect();
    ensure!(errors.len() == 1, "{}: not one error line but {lines:?}", daemon.name());
    Ok(errors[0].clone())
}

#[tokio::test]
async fn a_wrong_database_password_is_a_clear_exit_that_does_not_show_it() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    if services.postgres.private().is_none() {
        // A given server may let anybody in.
        return Ok(());
    }
    for program in DAEMONS {
        let url = database_of(&place, program).url_as(semel_tests::services::ROLE, "wr0ng-secret");
        let (daemon, _) = start(&place, program, &[("DATABASE_URL", &url)]).await?;
        let line = last_word(&daemon).await?;
        ensure!(line.contains("refuses") && line.contains("password"), "{program}: {line}");
        ensure!(!daemon.lines().join("\n").contains("wr0ng-secret"), "{program} shows the password");
    }
    Ok(())
}

#[tokio::test]
async fn a_wrong_broker_password_is_a_clear_exit_that_does_not_show_it() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    let url = place.vhost.url_as("guest", "wr0ng-secret");
    for program in ["semel-relay", "semel-ledger"] {
        let (daemon, _) = start(&place, program, &[("AMQP_URL", &url)]).await?;
        let line = last_word(&daemon).await?;
        ensure!(line.contains("refuses the login"), "{program}: {line}");
        ensure!(!daemon.lines().join("\n").contains("wr0ng-secret"), "{program} shows the password");
    }
    Ok(())
}

#[tokio::test]
async fn a_broker_that_is_away_is_waited_for() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    let url = format!("amqp://guest:guest@127.0.0.1:{}/x", free_port()?);
    for program in ["semel-relay", "semel-ledger"] {
        let (daemon, admin) = start(&place, program, &[("AMQP_URL", &url)]).await?;
        daemon
            .wait_for_line("what it waits for", READY, |line| line.contains("cannot connect to RabbitMQ"))
            .await?;
        assert_not_ready_but_alive(admin).await?;
        daemon.terminate()?;
        ensure!(daemon.wait_exit(READY).await?.success(), "{program} does not stop while it waits");
    }
    Ok(())
}

#[tokio::test]
async fn a_database_that_is_away_is_waited_for() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    let url = format!("postgres://semel:secret@127.0.0.1:{}/nowhere", free_port()?);
    for program in DAEMONS {
        let (daemon, admin) = start(&place, program, &[("DATABASE_URL", &url)]).await?;
        daemon
            .wait_for_line("what it waits for", READY, |line| line.contains("waiting for the database"))
            .await?;
        assert_not_ready_but_alive(admin).await?;
        daemon.terminate()?;
        ensure!(daemon.wait_exit(READY).await?.success(), "{program} does not stop while it waits");
    }
    Ok(())
}

async fn assert_not_ready_but_alive(admin: u16) -> Result<()> {
    let status = |path: &'static str| async move {
        Ok::<_, anyhow::Error>(
            reqwest::get(format!("http://127.0.0.1:{admin}{path}")).await?.status().as_u16(),
        )
    };
    ensure!(status("/readyz").await? == 503, "ready without what it needs");
    ensure!(status("/livez").await? == 200, "not alive, and so restarted for nothing");
    Ok(())
}

#[tokio::test]
async fn a_missing_schema_is_waited_for_and_used_once_it_is_made() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    for program in DAEMONS {
        let empty = services.create_database("empty").await?;
        let (daemon, admin) = start(&place, program, &[("DATABASE_URL", &empty.url())]).await?;
        daemon
            .wait_for_line("what it waits for", READY, |line| line.contains("run the subcommand `migrate`"))
            .await?;
        assert_not_ready_but_alive(admin).await?;
        let migrate = Daemon::command("migrate", binary(program)?)
            .arg("migrate")
            .envs(place.environment())
            .env("DATABASE_URL", empty.url())
            .start()
            .await?;
        ensure!(migrate.wait_exit(READY).await?.success(), "{program} migrate: {:?}", migrate.lines());
        daemon.wait_ready(admin, READY).await?;
        daemon.terminate()?;
        ensure!(daemon.wait_exit(READY).await?.success(), "{program} does not stop");
    }
    Ok(())
}

#[tokio::test]
async fn a_schema_that_is_too_old_or_too_new_is_refused_and_a_compatible_newer_one_accepted() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    for program in DAEMONS {
        let mut connection = database_of(&place, program).connect().await?;
        let versions = [
            ("UPDATE schema_versions SET version = 9, compatible_from = 9", "deploy a newer binary"),
            ("UPDATE schema_versions SET version = 0, compatible_from = 0", "run the subcommand `migrate`"),
        ];
        connection
            .execute("ALTER TABLE schema_versions DROP CONSTRAINT IF EXISTS schema_versions_ordered")
            .await?;
        for (change, advice) in versions {
            connection.execute(change).await?;
            let (daemon, _) = start(&place, program, &[]).await?;
            let line = last_word(&daemon).await?;
            ensure!(line.contains("schema set") && line.contains(advice), "{program}: {line}");
        }
        connection.execute("UPDATE schema_versions SET version = 9, compatible_from = 1").await?;
        let (daemon, admin) = start(&place, program, &[]).await?;
        daemon.wait_ready(admin, READY).await?;
        daemon.terminate()?;
        ensure!(daemon.wait_exit(READY).await?.success(), "{program} does not stop");
        connection.execute("UPDATE schema_versions SET version = 1, compatible_from = 1").await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_taken_port_is_a_clear_exit_that_names_the_option() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let mut cases: Vec<_> = DAEMONS.map(|program| (program, "SEMEL_ADMIN_LISTEN", "--admin-listen")).into();
    cases.push(("semel-api", "SEMEL_API_LISTEN", "--listen"));
    cases.push((SIMULATOR, "SEMEL_ADMIN_LISTEN", "--admin-listen"));
    cases.push((SIMULATOR, "SEMEL_PROVIDER_LISTEN", "--listen"));
    for (program, variable, option) in cases {
        let (daemon, _) = start(&place, program, &[(variable, &address)]).await?;
        let line = last_word(&daemon).await?;
        ensure!(
            line.contains(&address) && line.contains(option) && line.contains("in use"),
            "{program}: {line}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_book_that_is_none_is_a_clear_exit_that_leaves_it_as_it_is() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    std::fs::write(&place.book, "dear diary\n")?;
    let (daemon, _) = start(&place, SIMULATOR, &[]).await?;
    let line = last_word(&daemon).await?;
    ensure!(line.contains(&place.book.display().to_string()), "{line}");
    assert_eq!(std::fs::read_to_string(&place.book)?, "dear diary\n");
    Ok(())
}

#[tokio::test]
async fn a_missing_setting_is_named_and_check_tells_without_starting() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    for program in DAEMONS {
        let bare = Daemon::command(program, binary(program)?).env("SEMEL_NAMESPACE", "test").start().await?;
        let status = bare.wait_exit(READY).await?;
        ensure!(!status.success(), "{program} starts without a database");
        let said = bare.lines().join("\n");
        ensure!(said.contains("DATABASE_URL") || said.contains("AMQP_URL"), "{program}: {said}");

        let checked = Daemon::command(program, binary(program)?)
            .arg("--check")
            .envs(place.environment())
            .env("DATABASE_URL", "postgres://semel:secret@127.0.0.1:1/nowhere")
            .start()
            .await?;
        ensure!(checked.wait_exit(READY).await?.success(), "{program} --check: {:?}", checked.lines());
    }
    Ok(())
}

#[tokio::test]
async fn a_relay_whose_batches_may_outlast_the_servers_patience_is_refused() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let patience = "options=-c%20idle_in_transaction_session_timeout%3D4s";
    let impatient = format!("{}?{patience}", place.payments.url());
    let cases: [&[(&str, &str)]; 2] = [
        &[("SEMEL_RELAY_BATCH_SECONDS", "14"), ("SEMEL_RELAY_CONFIRM_SECONDS", "14")],
        &[("DATABASE_URL", &impatient)],
    ];
    for env in cases {
        let (relay, _) = start(&place, "semel-relay", env).await?;
        let line = last_word(&relay).await?;
        for option in ["--batch-seconds", "--confirm-seconds", "idle_in_transaction_session_timeout"] {
            ensure!(line.contains(option), "{option} is not named: {line}");
        }
    }
    let short = [
        ("DATABASE_URL", impatient.as_str()),
        ("SEMEL_RELAY_BATCH_SECONDS", "1"),
        ("SEMEL_RELAY_CONFIRM_SECONDS", "0"),
    ];
    let (relay, _) = start(&place, "semel-relay", &short).await?;
    ensure!(relay.wait_exit(READY).await?.code() == Some(2), "a broker without any time is taken");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_waits_while_its_database_takes_no_writes_and_goes_on_at_one_that_does() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let tap = place.tap().await?;
    let relay = place.relay("relay", &[]).await?;
    let mut admin = place.payments.connect().await?;
    let alter = |what: &str, value: &str| {
        let database = place.payments.name();
        sqlx::AssertSqlSafe(format!(
            "ALTER DATABASE \"{database}\" {what} default_transaction_read_only{value}"
        ))
    };
    admin.execute(alter("SET", " = on")).await?;
    place.payments.terminate_sessions().await?;
    relay.daemon.wait_for_line("what it waits for", READY, |line| line.contains("takes no writes")).await?;
    let mut admin = place.payments.connect().await?;
    admin.execute("SET default_transaction_read_only = off").await?;
    let insert = "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload)
                  VALUES ('shipment', 's1', 'ShipmentMoved', '{}')";
    admin.execute(insert).await?;
    let seen = relay.daemon.lines().iter().filter(|line| line.contains("takes no writes")).count();
    let asked_again = || async {
        let now = relay.daemon.lines().iter().filter(|line| line.contains("takes no writes")).count();
        (now > seen).then_some(())
    };
    semel_tests::wait::eventually("it to ask again", READY, asked_again).await?;
    assert_eq!(tap.count("shipment"), 0, "published what it cannot mark");
    assert_not_ready_but_alive(relay.admin).await?;
    admin.execute(alter("RESET", "")).await?;
    let arrived = || async { (tap.count("shipment") == 1).then_some(()) };
    semel_tests::wait::eventually("the event", READY, arrived).await
}

#[tokio::test]
async fn a_broker_user_without_permission_is_told_and_waited_for() -> Result<()> {
    let services = Services::from_env()?;
    let place = Place::make(&services).await?;
    let Some(management) = services.rabbitmq.management().filter(|_| services.are_private()) else {
        return Ok(());
    };
    let user = semel_tests::net::unique_name("nobody");
    management.create_user(&user, "secret").await?;
    let none = Permissions { configure: "^$".to_owned(), write: "^$".to_owned(), read: "^$".to_owned() };
    management.set_permissions(place.vhost.name(), &user, &none).await?;
    let url = place.vhost.url_as(&user, "secret");
    let (relay, admin) = start(&place, "semel-relay", &[("AMQP_URL", &url)]).await?;
    relay
        .wait_for_line("the refusal", Duration::from_secs(30), |line| {
            line.contains("the broker is away") && line.contains("ACCESS_REFUSED")
        })
        .await
        .context("a relay without permission")?;
    assert_not_ready_but_alive(admin).await?;
    management.set_permissions(place.vhost.name(), &user, &Permissions::all()).await?;
    relay.wait_ready(admin, READY).await?;
    management.delete_user(&user).await?;
    Ok(())
}
