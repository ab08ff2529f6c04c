//! A system to play with: everything runs until Ctrl-C.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};

use crate::output::say;
use crate::progress::Progress;
use crate::services::Services;
use crate::system::{Shape, System};

/// Starts everything, says how to try it, and stops it on Ctrl-C.
///
/// # Errors
///
/// A service or a daemon fails.
pub async fn run(root: &Path) -> Result<ExitCode> {
    let services = Services::find_or_start(root, Progress::Stderr).await?;
    let starting = System::start(&services, Shape { apis: 1, relays: 2, env: &[] });
    let system =
        Progress::Stderr.step("starting API, 2 relays, reaper, ledger and its relay", starting).await?;
    let api = system.apis[0].address.context("no address")?;
    let token = &system.place.token;
    say(format_args!("API            http://{api}"));
    say(format_args!("credential     {token}"));
    say(format_args!("payments       {}", system.place.payments.url()));
    say(format_args!("ledger         {}", system.place.books.url()));
    say(format_args!("RabbitMQ       {}", system.place.vhost.url()));
    if let Some(management) = services.rabbitmq.management() {
        say(format_args!("management UI  {}", management.url()));
    }
    let named = [
        ("api", &system.apis[0]),
        ("relay", &system.relays[0]),
        ("relay", &system.relays[1]),
        ("reaper", &system.reaper),
        ("ledger", &system.ledger),
    ];
    for (name, running) in named {
        say(format_args!("{name:<14} http://127.0.0.1:{}/metrics", running.admin));
    }
    say(format_args!("\nPlace an order, twice:"));
    say(format_args!(
        "  curl -i http://{api}/v1/orders -H 'Authorization: Bearer {token}' -H 'Idempotency-Key: my-first-order' \
         -H 'Content-Type: application/json' -d '{{\"reference\":\"A-1\",\"amount\":1250,\"currency\":\"EUR\"}}'"
    ));
    say(format_args!("Write an event as any service may, and see it published:"));
    say(format_args!(
        "  psql '{0}' -c \"INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('shipment', 's-1', \
         'ShipmentMoved', '{{}}')\"\n  psql '{0}' -c \"SELECT id, event_type, published_at FROM outbox ORDER BY id\"",
        system.place.payments.url()
    ));
    say(format_args!("\nCtrl-C ends it."));
    tokio::signal::ctrl_c().await.context("waiting for Ctrl-C")?;
    Progress::Stderr.step("stopping", system.stop()).await?;
    Ok(ExitCode::SUCCESS)
}
