//! Where the broker is: over TLS with an authority of one's own, and at one of several addresses.

use anyhow::{Context as _, Result, ensure};
use semel_tests::client::Intent;
use semel_tests::net::free_port;
use semel_tests::process::{Daemon, binary};
use semel_tests::services::Services;
use semel_tests::skip::skip;
use semel_tests::system::{Place, READY};

/// Why a test is skipped.
const NO_TLS: &str = "a given broker may have no TLS";

#[tokio::test(flavor = "multi_thread")]
async fn relay_and_ledger_work_over_tls_certified_by_an_authority_of_our_own() -> Result<()> {
    let services = Services::from_env()?;
    let Some(broker) = services.rabbitmq.private() else {
        return Ok(skip("relay_and_ledger_work_over_tls_certified_by_an_authority_of_our_own", NO_TLS)?);
    };
    let place = Place::make(&services).await?;
    let (url, authority) = (broker.over_tls(&place.vhost.url())?, broker.authority().display().to_string());
    let env = [("AMQP_URL", url.as_str()), ("AMQP_CA_FILE", authority.as_str())];
    let _ledger = place.ledger("ledger", &env).await?;
    let _relay = place.relay("relay", &env).await?;
    let api = place.api("api", &[]).await?;
    place.client(&api)?.place_until_final(&Intent::new("over-tls", 100)).await?;
    let booked = || async {
        let mut connection = place.books.connect().await.map_err(|error| error.to_string())?;
        let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM ledger_transactions");
        match count.fetch_one(&mut connection).await {
            Ok(1) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    semel_tests::wait::eventually("the booking", READY, booked).await?;
    Ok(())
}

/// Starts a relay that cannot reach its broker, and returns the line that says why.
async fn refusal(place: &Place, env: &[(&str, &str)]) -> Result<String> {
    let admin = free_port()?;
    let relay = Daemon::command("refused", binary("semel-relay")?)
        .envs(place.environment())
        .env("DATABASE_URL", place.payments.url())
        .env("SEMEL_ADMIN_LISTEN", format!("127.0.0.1:{admin}"))
        .envs(env.iter().copied())
        .start()
        .await?;
    relay.wait_for_line("the refusal", READY, |line| line.contains("the broker is away")).await?;
    let ready = reqwest::get(format!("http://127.0.0.1:{admin}/readyz")).await?;
    ensure!(ready.status() == 503, "ready without a broker");
    let lines = relay.lines();
    lines.into_iter().find(|line| line.contains("the broker is away")).context("the line is gone")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_certified_by_a_stranger_or_for_another_name_is_refused() -> Result<()> {
    let services = Services::from_env()?;
    let Some(broker) = services.rabbitmq.private() else {
        return Ok(skip("a_broker_that_is_certified_by_a_stranger_or_for_another_name_is_refused", NO_TLS)?);
    };
    let place = Place::make(&services).await?;
    let url = broker.over_tls(&place.vhost.url())?;
    let line = refusal(&place, &[("AMQP_URL", &url)]).await?;
    ensure!(line.contains("localhost") && line.contains("UnknownIssuer"), "{line}");
    let elsewhere = url.replacen("localhost", "127.0.0.1", 1);
    let authority = broker.authority().display().to_string();
    let line = refusal(&place, &[("AMQP_URL", &elsewhere), ("AMQP_CA_FILE", &authority)]).await?;
    ensure!(line.contains("not valid for name"), "{line}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn several_addresses_are_tried_in_turn_and_the_password_of_none_is_shown() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    let nobody = format!("amqp://app:s3cret@127.0.0.1:{}/x", free_port()?);
    let both = format!("{nobody},{},{nobody}", place.vhost.url());
    let relay = place.relay("relay", &[("AMQP_URL", &both)]).await?;
    let ledger = place.ledger("ledger", &[("AMQP_URL", &both)]).await?;
    for daemon in [&relay.daemon, &ledger.daemon] {
        ensure!(!daemon.lines().join("\n").contains("s3cret"), "{} shows the password", daemon.name());
    }
    let other = format!("amqp://app:s3cret@localhost:{}/x", free_port()?);
    let line = refusal(&place, &[("AMQP_URL", &format!("{nobody},{other}"))]).await?;
    ensure!(line.contains("app@127.0.0.1:") && line.contains("app@localhost:"), "{line}");
    ensure!(!line.contains("s3cret"), "{line}");
    Ok(())
}

#[tokio::test]
async fn a_file_of_authorities_that_holds_none_is_a_clear_exit() -> Result<()> {
    let place = Place::make(&Services::from_env()?).await?;
    for (file, reason) in [("/dev/null", "no certificate"), ("/nowhere/ca.pem", "/nowhere/ca.pem")] {
        for program in ["semel-relay", "semel-ledger"] {
            let daemon = Daemon::command(program, binary(program)?)
                .arg("--check")
                .envs(place.environment())
                .env("DATABASE_URL", place.books.url())
                .env("AMQP_CA_FILE", file)
                .start()
                .await?;
            ensure!(!daemon.wait_exit(READY).await?.success(), "{program} takes {file}");
            let said = daemon.lines().join("\n");
            ensure!(said.contains("--amqp-ca-file") && said.contains(reason), "{program}: {said}");
        }
    }
    Ok(())
}
