//! The demo: a whole system, real requests, real faults, and at the end the question whether all places agree.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use reqwest::StatusCode;
use semel_proto::provider::v1::happening::What;
use semel_proto::provider::v1::{Call, FaultKind, Reason};
use sqlx::Row as _;
use uuid::Uuid;

use crate::client::{Acknowledged, Answer, Client, Intent, Payment, Refund, ToldPayment, ToldRefund};
use crate::output::say;
use crate::progress::Progress;
use crate::provider::Fault;
use crate::proxy::{self, Direction, Proxy};
use crate::reconcile::{Sources, reconcile};
use crate::services::Services;
use crate::system::{Shape, System};
use crate::wait::eventually;

/// The aggregates whose 2,000 events a relay dies among.
const AGGREGATES: usize = 100;
/// Events of each of them.
const VERSIONS: usize = 20;

/// Runs the demo; the exit code tells whether all places agree.
///
/// # Errors
///
/// A step did not show what it is there to show.
pub async fn run(root: &Path) -> Result<ExitCode> {
    let began = Instant::now();
    let services = Services::find_or_start(root, Progress::Stderr).await?;
    let starting = System::start(&services, Shape { apis: 2, relays: 2, env: &[("SEMEL_SEND_WINDOW", "5")] });
    let system = Progress::Stderr
        .step("starting provider, 2 APIs, 2 relays, reaper, ledger and its relay", starting)
        .await?;
    say(format_args!(
        "Semel runs: 2 APIs, 2 relays, a reaper, a ledger with its own database and relay, and a simulated payment provider.\n"
    ));

    let mut story =
        Story { system, acknowledged: Vec::new(), told: Vec::new(), refunds: Vec::new(), step: 0 };
    story.tell().await?;
    let settling = story.system.place.settled(Duration::from_mins(1));
    Progress::Stderr.step("waiting for every event to be published and booked", settling).await?;
    let Story { system, acknowledged, told, refunds, .. } = story;
    let sources = system.sources_with_refunds(acknowledged, told, refunds).await?;
    let code = verdict(&sources);
    let stopping = system.stop();
    Progress::Stderr.step("stopping the daemons, each with exit code 0", stopping).await?;
    say(format_args!("The demo took {:.0} s.", began.elapsed().as_secs_f64()));
    Ok(code)
}

/// Compares the places, prints what they say, and tells by the exit code whether they agree.
#[must_use]
pub fn verdict(sources: &Sources) -> ExitCode {
    let events: BTreeSet<Uuid> = sources.tap.iter().map(|message| message.event_id).collect();
    say(format_args!("Reconciliation, each place read on its own:"));
    let (orders, told, refunds) =
        (sources.acknowledged.len(), sources.told.len(), sources.told_refunds.len());
    say(format_args!("  the client was told of  {orders:>5} orders, {told} payments and {refunds} refunds"));
    let (orders, payments, refunds) = (sources.orders.len(), sources.payments.len(), sources.refunds.len());
    say(format_args!(
        "  the API stored          {orders:>5} orders, {payments} payments and {refunds} refunds"
    ));
    let made = |kind: &str| sources.provider.iter().filter(|line| line.kind == kind).count();
    say(format_args!(
        "  the provider made       {:>5} charges and {} refunds",
        made("charge"),
        made("refund")
    ));
    say(format_args!("  the outboxes hold       {:>5} events", sources.outbox.len()));
    say(format_args!(
        "  the broker routed       {:>5} events in {} messages",
        events.len(),
        sources.tap.len()
    ));
    say(format_args!("  the ledger made         {:>5} bookings", sources.ledger.len()));
    let differences = reconcile(sources);
    if differences.is_empty() {
        say(format_args!("All places agree: nothing lost, nothing doubled, nothing out of order.\n"));
        return ExitCode::SUCCESS;
    }
    say(format_args!("The places disagree:"));
    for difference in differences.iter().take(50) {
        say(format_args!("  {difference}"));
    }
    if differences.len() > 50 {
        say(format_args!("  and {} more", differences.len() - 50));
    }
    ExitCode::FAILURE
}

struct Story {
    system: System,
    acknowledged: Vec<Acknowledged>,
    told: Vec<ToldPayment>,
    refunds: Vec<ToldRefund>,
    step: usize,
}

impl Story {
    async fn tell(&mut self) -> Result<()> {
        self.an_order_and_its_retry().await?;
        self.twenty_at_once().await?;
        self.a_key_reused().await?;
        self.an_answer_lost().await?;
        self.an_api_killed().await?;
        self.a_relay_killed().await?;
        self.a_message_twice().await?;
        let payment = self.a_payment_and_its_retry().await?;
        self.a_refund_and_its_retry(&payment).await?;
        self.a_declined_card().await?;
        self.a_charge_whose_answer_is_lost().await?;
        self.an_api_killed_while_the_provider_charges().await?;
        self.a_stuck_payment_rolled_back().await
    }

    fn title(&mut self, title: &str) {
        self.step += 1;
        say(format_args!("{}. {title}", self.step));
    }

    fn note(&mut self, intent: &Intent, answer: &Answer) -> Result<Acknowledged> {
        let order = answer.acknowledged(&intent.key)?;
        self.acknowledged.push(order.clone());
        Ok(order)
    }

    async fn an_order_and_its_retry(&mut self) -> Result<()> {
        self.title("An order, and its retry");
        let intent = Intent::new("demo-1", 1250);
        let first = self.system.client(0)?.place(&intent).await?;
        let order = self.note(&intent, &first)?;
        say(format_args!("   POST /v1/orders → {} {}", first.status, String::from_utf8_lossy(&first.body)));
        ensure!(!first.is_replay(), "the first answer is marked as a replay");
        let again = self.system.client(1)?.place(&intent).await?;
        ensure!(
            again.is_replay() && again.body == first.body && again.status == first.status,
            "no faithful replay"
        );
        let read = self.system.client(0)?.order(order.order_id).await?;
        ensure!(read.status == StatusCode::OK, "the order cannot be read: {}", read.status);
        say(format_args!(
            "   the same request to the other API → {}, the same {} bytes, Idempotent-Replayed: true\n",
            again.status,
            again.body.len()
        ));
        Ok(())
    }

    async fn twenty_at_once(&mut self) -> Result<()> {
        self.title("20 requests at once under one key");
        let intent = Intent::new("demo-20", 2000);
        let clients = [self.system.client(0)?, self.system.client(1)?];
        let mut requests = tokio::task::JoinSet::new();
        for number in 0..20 {
            let (client, intent) = (clients[number % 2].clone(), intent.clone());
            requests.spawn(async move { client.place_until_final(&intent).await });
        }
        let answers = requests.join_all().await.into_iter().collect::<Result<Vec<_>>>()?;
        let orders: BTreeSet<Uuid> = answers
            .iter()
            .map(|answer| Ok(answer.acknowledged(&intent.key)?.order_id))
            .collect::<Result<_>>()?;
        let fresh = answers.iter().filter(|answer| !answer.is_replay()).count();
        ensure!(orders.len() == 1 && fresh == 1, "{} orders, {fresh} fresh answers", orders.len());
        self.note(&intent, &answers[0])?;
        say(format_args!(
            "   1 executed, 19 replayed; all name the order {}\n",
            orders.first().context("no order")?
        ));
        Ok(())
    }

    async fn a_key_reused(&mut self) -> Result<()> {
        self.title("A key reused for another amount");
        let mut intent = Intent::new("demo-reused", 500);
        let first = self.system.client(0)?.place(&intent).await?;
        self.note(&intent, &first)?;
        intent.amount = 900;
        let refused = self.system.client(0)?.place(&intent).await?;
        ensure!(refused.status == StatusCode::UNPROCESSABLE_ENTITY, "expected 422, got {}", refused.status);
        say(format_args!(
            "   500, then 900 under the same key → {}: {}\n",
            refused.status,
            refused.problem().unwrap_or_default()
        ));
        Ok(())
    }

    async fn an_answer_lost(&mut self) -> Result<()> {
        self.title("An answer lost on the way");
        let api = self.system.apis[0].address.context("no address")?;
        let proxy = Proxy::start(api).await?;
        proxy.set(Direction::ToClient, proxy::Fault::CutAfter(0));
        let intent = Intent::new("demo-lost", 700);
        let client = Client::new(proxy.addr(), &self.system.place.token)?;
        let lost = client.place(&intent).await;
        ensure!(lost.is_err(), "an answer arrived through a cut connection");
        say(format_args!("   the order was sent, the connection broke before the answer"));
        let again = self.system.client(1)?.place_until_final(&intent).await?;
        let order = self.note(&intent, &again)?;
        let count = self.count("SELECT count(*) FROM orders WHERE reference = 'demo-lost'").await?;
        ensure!(count == 1, "{count} orders");
        let how = if again.is_replay() { "replayed" } else { "executed" };
        say(format_args!("   the retry → {}, {how}; 1 order: {}\n", again.status, order.order_id));
        Ok(())
    }

    async fn an_api_killed(&mut self) -> Result<()> {
        self.title("An API killed (SIGKILL) in mid-flight");
        let client = self.system.client(0)?;
        let intents: Vec<Intent> =
            (0..200).map(|n| Intent::new(&format!("demo-kill-{n}"), 1000 + n)).collect();
        let (told, mut answered) = tokio::sync::mpsc::unbounded_channel();
        let mut requests = tokio::task::JoinSet::new();
        for intent in intents.clone() {
            let (client, told) = (client.clone(), told.clone());
            requests.spawn(async move {
                let answer = client.place(&intent).await;
                let _ = told.send(());
                (intent, answer)
            });
        }
        for _ in 0..20 {
            answered.recv().await.context("no request ended")?;
        }
        self.system.apis[0].daemon.kill().await?;
        let outcomes = requests.join_all().await;
        let survived = outcomes.iter().filter(|(_, answer)| answer.is_ok()).count();
        let executed = self.count("SELECT count(*) FROM orders WHERE reference LIKE 'demo-kill-%'").await?;
        say(format_args!(
            "   of 200 requests in flight {survived} were answered and {executed} had been executed when it died"
        ));
        let other = self.system.client(1)?;
        let mut replayed = 0;
        for (intent, before) in outcomes {
            let answer = other.place_until_final(&intent).await?;
            if let Ok(before) = before.and_then(|answer| answer.acknowledged(&intent.key)) {
                ensure!(
                    before == answer.acknowledged(&intent.key)?,
                    "another answer than before for {}",
                    intent.reference
                );
            }
            replayed += usize::from(answer.is_replay());
            self.note(&intent, &answer)?;
        }
        let orders = self.count("SELECT count(*) FROM orders WHERE reference LIKE 'demo-kill-%'").await?;
        ensure!(orders == 200, "{orders} orders for 200 keys");
        self.system.apis[0] = self.system.place.api("api-1-again", &[]).await?;
        say(format_args!(
            "   all 200 retried at the other API: {replayed} replayed, {} executed; 200 orders\n",
            200 - replayed
        ));
        Ok(())
    }

    async fn a_relay_killed(&mut self) -> Result<()> {
        self.title("A relay killed in the middle of 2,000 events of 100 aggregates");
        let mut connection = self.system.place.payments.connect().await?;
        for version in 1..=VERSIONS {
            // Another service, which writes the outbox by the plain INSERT that is its contract.
            sqlx::query(
                "INSERT INTO outbox (aggregate_type, aggregate_id, aggregate_version, event_type, payload)
                 SELECT 'shipment', 'shipment-' || n, $1, 'ShipmentMoved', jsonb_build_object('stop', $1::BIGINT)
                 FROM generate_series(1, $2::BIGINT) AS n",
            )
            .bind(i64::try_from(version)?)
            .bind(i64::try_from(AGGREGATES)?)
            .execute(&mut connection)
            .await?;
            if version == VERSIONS / 2 {
                let tap = &self.system.tap;
                let begun = || async move { (tap.count("shipment") > 0).then_some(()) };
                eventually("the first of them to be routed", Duration::from_secs(30), begun).await?;
                self.system.relays[0].daemon.kill().await?;
                say(format_args!("   killed when {} had been routed", self.system.tap.count("shipment")));
            }
        }
        let total = AGGREGATES * VERSIONS;
        let (tap, wanted) = (&self.system.tap, total);
        let all = || async move {
            let messages = tap.messages().map_err(|error| error.to_string())?;
            let ids: BTreeSet<Uuid> = messages
                .iter()
                .filter(|message| message.aggregate_type == "shipment")
                .map(|message| message.event_id)
                .collect();
            if ids.len() == wanted { Ok(()) } else { Err(format!("{} of {wanted}", ids.len())) }
        };
        eventually("all 2,000 events to be routed", Duration::from_mins(1), all).await?;
        let repeated = self.system.tap.count("shipment").saturating_sub(total);
        say(format_args!(
            "   all {total} arrived by the other relay, {repeated} of them twice, each aggregate in order\n"
        ));
        Ok(())
    }

    async fn a_message_twice(&mut self) -> Result<()> {
        self.title("A message delivered twice");
        self.system.place.settled(Duration::from_secs(30)).await?;
        let messages = self.system.tap.messages()?;
        let message = messages
            .iter()
            .find(|message| message.event_type == "OrderPlaced")
            .context("no order was routed")?;
        let before = self.system.ledger.metric("semel_inbox_messages_total", "outcome=\"duplicate\"").await?;
        crate::tap::send_again(&self.system.place.vhost.url(), &self.system.place.queue, message).await?;
        let ledger = &self.system.ledger;
        let counted = || async move {
            let now = ledger.metric("semel_inbox_messages_total", "outcome=\"duplicate\"").await.ok()?;
            (now > before).then_some(())
        };
        eventually("the ledger to meet the second copy", Duration::from_secs(30), counted).await?;
        let mut books = self.system.place.books.connect().await?;
        let bookings: i64 = sqlx::query("SELECT count(*) FROM ledger_transactions WHERE event_id = $1")
            .bind(message.event_id)
            .fetch_one(&mut books)
            .await?
            .try_get(0)?;
        ensure!(bookings == 1, "{bookings} bookings of one order");
        say(format_args!(
            "   the second copy of {} was counted as a duplicate; 1 booking\n",
            message.event_id
        ));
        Ok(())
    }

    fn note_payment(&mut self, payment: &Payment, answer: &Answer) -> Result<ToldPayment> {
        let told = answer.told(&payment.key)?;
        self.told.push(told.clone());
        Ok(told)
    }

    /// How many charges the provider's book holds.
    fn charges(&self) -> Result<usize> {
        let book = self.system.place.control()?.book()?;
        Ok(book.iter().filter(|line| line.kind == "charge").count())
    }

    async fn a_payment_and_its_retry(&mut self) -> Result<ToldPayment> {
        self.title("A payment, and its retry");
        let payment = Payment::new("demo-pay", 4200);
        let first = self.system.client(0)?.pay(&payment).await?;
        let told = self.note_payment(&payment, &first)?;
        let again = self.system.client(1)?.pay(&payment).await?;
        ensure!(
            told.status == "succeeded" && again.is_replay() && again.body == first.body,
            "no faithful replay"
        );
        ensure!(self.charges()? == 1, "{} charges", self.charges()?);
        say(format_args!(
            "   charged: {}; the retry → {}, replayed; 1 charge in the provider's book\n",
            told.payment_id, again.status
        ));
        Ok(told)
    }

    async fn a_refund_and_its_retry(&mut self, payment: &ToldPayment) -> Result<()> {
        self.title("A refund, its retry, and one that is too large");
        let (refund, rest) = (Refund::new(payment.payment_id, 1200), payment.amount - 1200);
        let first = self.system.client(0)?.refund(&refund).await?;
        let told = first.told_refund(&refund.key)?;
        let again = self.system.client(1)?.refund(&refund).await?;
        ensure!(
            told.status == "succeeded" && again.is_replay() && again.body == first.body,
            "no faithful replay"
        );
        let excess = Refund::new(payment.payment_id, rest + 1);
        let refused = self.system.client(1)?.refund(&excess).await?;
        ensure!(refused.status == StatusCode::CONFLICT, "expected 409, got {}", refused.status);
        self.refunds.extend([told, refused.told_refund(&excess.key)?]);
        let book = self.system.place.control()?.book()?;
        let given: Vec<i64> =
            book.iter().filter(|line| line.kind == "refund").map(|line| line.amount).collect();
        ensure!(given == [1200], "the provider gave {given:?} back");
        say(format_args!(
            "   1200 of {} given back; the retry → {}, replayed; {} more → {}: {}; 1 refund in the provider's book\n",
            payment.amount,
            again.status,
            rest + 1,
            refused.status,
            refused.problem().unwrap_or_default()
        ));
        Ok(())
    }

    async fn a_declined_card(&mut self) -> Result<()> {
        self.title("A declined card");
        let mut payment = Payment::new("demo-declined", 300);
        "tok_declined".clone_into(&mut payment.source);
        let answer = self.system.client(0)?.pay(&payment).await?;
        let again = self.system.client(1)?.pay(&payment).await?;
        ensure!(
            answer.status == StatusCode::PAYMENT_REQUIRED && again.body == answer.body,
            "got {}",
            answer.status
        );
        self.note_payment(&payment, &answer)?;
        say(format_args!(
            "   {}: {}, final and replayed\n",
            answer.status,
            answer.problem().unwrap_or_default()
        ));
        Ok(())
    }

    async fn a_charge_whose_answer_is_lost(&mut self) -> Result<()> {
        self.title("The provider charges, and its answer is lost");
        let before = self.charges()?;
        let control = self.system.place.control()?;
        control.order(Fault::new(FaultKind::AnswerUnavailable, Call::Charge).times(1)).await?;
        let payment = Payment::new("demo-answer-lost", 5100);
        let unknown = self.system.client(0)?.pay(&payment).await?;
        ensure!(unknown.status == StatusCode::SERVICE_UNAVAILABLE, "expected 503, got {}", unknown.status);
        say(format_args!("   {}: {}", unknown.status, unknown.problem().unwrap_or_default()));
        let answer = self.system.client(1)?.pay_until_final(&payment).await?;
        let told = self.note_payment(&payment, &answer)?;
        let charges = self.charges()? - before;
        ensure!(charges == 1 && told.status == "succeeded", "{charges} charges, {}", told.status);
        say(format_args!(
            "   the retry → {} {}; the same request under the same key; 1 charge\n",
            answer.status, told.status
        ));
        Ok(())
    }

    async fn an_api_killed_while_the_provider_charges(&mut self) -> Result<()> {
        self.title("An API killed while the provider holds its answer");
        let before = self.charges()?;
        let control = self.system.place.control()?;
        let fault = control
            .order(Fault::new(FaultKind::HoldAfterApply, Call::Charge).times(1).hold("answer"))
            .await?;
        let payment = Payment::new("demo-pay-kill", 6400);
        let (client, sent) = (self.system.client(0)?, payment.clone());
        let asking = tokio::spawn(async move { client.pay(&sent).await });
        control.wait_for_hits(fault, 1).await?;
        self.system.apis[0].daemon.kill().await?;
        ensure!(asking.await?.is_err(), "an answer came from an API that was killed before it");
        control.release("answer").await?;
        let began = Instant::now();
        let answer = self.system.client(1)?.pay_until_final(&payment).await?;
        let told = self.note_payment(&payment, &answer)?;
        let charges = self.charges()? - before;
        ensure!(charges == 1 && told.status == "succeeded", "{charges} charges, {}", told.status);
        self.system.apis[0] = self.system.place.api("api-1-once-more", &[]).await?;
        say(format_args!(
            "   charged, and nobody there to write it down; after {:.0} s, its lease being dead, the payment was driven on: \
             {}; 1 charge\n",
            began.elapsed().as_secs_f64(),
            told.status
        ));
        Ok(())
    }

    async fn a_stuck_payment_rolled_back(&mut self) -> Result<()> {
        self.title("A payment stuck past its send window, rolled back behind a fence");
        let before = self.charges()?;
        let control = self.system.place.control()?;
        let fault =
            control.order(Fault::new(FaultKind::ApplyLate, Call::Charge).times(1).hold("late")).await?;
        let payment = Payment::new("demo-rolled-back", 7700);
        let unknown = self.system.client(0)?.pay(&payment).await?;
        ensure!(unknown.status == StatusCode::SERVICE_UNAVAILABLE, "expected 503, got {}", unknown.status);
        control.wait_for_hits(fault, 1).await?;
        say(format_args!(
            "   the request dawdles on its way: {}: {}",
            unknown.status,
            unknown.problem().unwrap_or_default()
        ));
        let answer = self.system.client(1)?.pay_until_final(&payment).await?;
        let told = self.note_payment(&payment, &answer)?;
        ensure!(told.status == "canceled", "the payment is {}", told.status);
        say(format_args!(
            "   asked, not found, fenced: {}: {}",
            answer.status,
            answer.problem().unwrap_or_default()
        ));
        let released = control.release("late").await?;
        let key = self.provider_key(told.payment_id).await?;
        let refused = || async {
            let happenings = control.happenings(&key).await.map_err(|error| error.to_string())?;
            let fenced = happenings
                .iter()
                .any(|happening| happening.what() == What::Refused && happening.reason() == Reason::Fenced);
            if fenced { Ok(()) } else { Err(format!("{happenings:?}")) }
        };
        eventually("the late charge to meet the fence", Duration::from_secs(30), refused).await?;
        ensure!(released == 1 && self.charges()? == before, "the late charge went through");
        say(format_args!("   its late charge arrived then, and was refused by the fence; 0 charges\n"));
        Ok(())
    }

    async fn provider_key(&self, payment_id: Uuid) -> Result<String> {
        let mut connection = self.system.place.payments.connect().await?;
        let query = sqlx::query("SELECT provider_key FROM payments WHERE payment_id = $1").bind(payment_id);
        Ok(query.fetch_one(&mut connection).await?.try_get(0)?)
    }

    async fn count(&self, query: &'static str) -> Result<i64> {
        let mut connection = self.system.place.payments.connect().await?;
        Ok(sqlx::query(query).fetch_one(&mut connection).await?.try_get(0)?)
    }
}
