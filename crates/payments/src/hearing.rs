//! Hearing what the provider tells by itself: Stripe's events.
//!
//! Promise: an event is evidence, and nothing else. What is definitive, and about a payment or refund of ours by key, name,
//! amount, currency and mode, is written down once, however often and in whatever order events come, and alone settles
//! nothing: whoever holds the key's lease does, by the same steps as after a crash. When nobody holds it, that is
//! tried at once, so that a client need not wait for the next pass. Money that has moved under a key of ours, and is not what
//! is known of it, is told as a contradiction.
//!
//! How: the entry's identity is derived from the event's, so that a repeat inserts none. An entry about success is made
//! where no other name is on record. One that moved no money only if the name is the one that is written down: of a key that
//! the provider has forgotten there may be another charge or refund. So a refund that nobody has heard of as made is never
//! settled as failed by an event; recovery asks.
//!
//! In a crash the entry is there or not. If it is, recovery finds it; if not, the event was not acknowledged, and comes again.
//! A contradiction is told before the event is acknowledged, and by each repeat again: rather twice than never.
//! Nothing here asks the provider anything.

use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use semel_core::database;
use semel_core::derive;
use semel_core::disposition::chain;
use semel_core::idempotency::Scope;
use semel_core::idempotency::engine::{LEASE, Proceeded};
use semel_core::idempotency::store::{self, Fence};
use semel_core::lines::Lines;
use semel_core::metrics::{Label, Metric};
use sqlx::PgPool;
use uuid::Uuid;

use crate::driven::Driven;
use crate::evidence::{self, Witness};
use crate::metrics::CONTRADICTIONS;
use crate::payments::create::MakePayment;
use crate::provider::Provider;
use crate::provider::stripe::classify::{self, Asked, AskedRefund};
use crate::provider::stripe::objects::{Event, IntentStatus, Name, PaymentIntent, Refund, RefundStatus};
use crate::provider::stripe::webhook::About;
use crate::{payments, refunds};

/// Counter of the provider's events; label `outcome`.
pub const EVENTS: &str = "semel_provider_events_total";

/// When recovery looks again at what could not be settled by an event.
const AGAIN_IN: Duration = Duration::from_secs(2);

/// What came of an event.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Heard {
    /// It was written down, and the payment or refund is settled.
    Settled,
    /// It was written down, and changes nothing now: whoever is at work finds it, or all is settled.
    Recorded,
    /// It had been written down before.
    Repeated,
    /// Money has moved under a key of ours that is not what is known of it.
    Contradicting,
    /// It says nothing definitive about what it names.
    Undecided,
    /// It is about no payment or refund of ours, or of a connected account.
    Foreign,
    /// Its object is not what its type says.
    Unreadable,
    /// It is of a type that says nothing about payments or refunds.
    Ignored,
}

impl Heard {
    const ALL: [Self; 8] = [
        Self::Settled,
        Self::Recorded,
        Self::Repeated,
        Self::Contradicting,
        Self::Undecided,
        Self::Foreign,
        Self::Unreadable,
        Self::Ignored,
    ];

    const fn label(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Recorded => "recorded",
            Self::Repeated => "repeated",
            Self::Contradicting => "contradicting",
            Self::Undecided => "undecided",
            Self::Foreign => "foreign",
            Self::Unreadable => "unreadable",
            Self::Ignored => "ignored",
        }
    }
}

/// Why an event was not heard.
#[derive(Debug, thiserror::Error)]
pub enum Unheard {
    /// It is about test money where there is real money, or the other way round.
    #[error("an event of the other mode, live or test")]
    OtherMode,
    /// The database failed; it is to be sent again.
    #[error("writing down what the provider told")]
    Database(#[from] sqlx::Error),
}

const OUTCOMES: [&str; Heard::ALL.len()] = {
    let mut labels = [""; Heard::ALL.len()];
    let mut at = 0;
    while at < labels.len() {
        labels[at] = Heard::ALL[at].label();
        at += 1;
    }
    labels
};

/// The metrics of whoever hears.
pub const METRICS: [Metric; 1] = [Metric::counter(
    EVENTS,
    "Events of the provider's webhook by what came of them; those that were refused are in `semel_http_problems_total`.",
)
.with(&[Label::of("outcome", &OUTCOMES)])];

/// Whoever hears.
#[derive(Clone, Debug)]
pub struct Ear<P> {
    payments: MakePayment<P>,
    livemode: bool,
    retention: Duration,
    lines: Arc<Lines<Heard>>,
}

impl<P: Provider> Ear<P> {
    /// Hears of what is paid so, in this mode; a key that is completed is replayed for so long.
    #[must_use]
    pub fn new(payments: MakePayment<P>, livemode: bool, retention: Duration) -> Self {
        Self { payments, livemode, retention, lines: Arc::default() }
    }

    /// Hears an event that is known to be the provider's.
    ///
    /// # Errors
    ///
    /// When nothing of it was written down though something may have to be.
    pub async fn hear(&self, pool: &PgPool, event: &Event) -> Result<Heard, Unheard> {
        // Also of the other mode: an endpoint for connected accounts is told of both.
        let heard = if event.account.is_some() {
            Heard::Foreign
        } else if event.livemode == self.livemode {
            match event.about() {
                Ok(About::Charge(intent)) => self.charge(pool, event, &intent).await?,
                Ok(About::Refund(refund)) => self.refund(pool, event, &refund).await?,
                Ok(About::Other) => Heard::Ignored,
                Err(error) => self.unreadable(event, &error),
            }
        } else {
            return Err(Unheard::OtherMode);
        };
        counter!(EVENTS, "outcome" => heard.label()).increment(1);
        tracing::debug!(
            event = event.id.as_str(),
            kind = event.kind.as_str(),
            outcome = heard.label(),
            "heard"
        );
        Ok(heard)
    }

    async fn charge(
        &self,
        pool: &PgPool,
        event: &Event,
        intent: &PaymentIntent,
    ) -> Result<Heard, sqlx::Error> {
        let Some(key) = intent.metadata.key.as_ref().map(Name::as_str) else { return Ok(Heard::Foreign) };
        let told = database::call(pool, async |c| payments::hearing::find(c, key).await).await?;
        let Some(told) = told else { return Ok(self.foreign(event, intent.id.as_str(), key)) };
        let asked = Asked {
            reference: told.reference.as_deref(),
            key,
            amount: told.amount,
            currency: &told.currency,
            livemode: self.livemode,
        };
        let entry = evidence::Heard {
            witness: Witness::Webhook,
            payment_id: told.payment_id,
            refund_id: None,
            provider_key: key,
            outcome: "succeeded",
            provider_reference: Some(intent.id.as_str()),
            code: None,
            fence: Fence(0),
        };
        let id = Some(self.answer_id(event));
        let verdict = payments::recovery::definitive(&classify::charged(intent, &asked));
        let has_moved = intent.status == IntentStatus::Succeeded && intent.livemode == self.livemode;
        let Some(verdict) = verdict else {
            if !has_moved {
                return Ok(undecided(event, told.payment_id));
            }
            let is_another = told.reference.is_some_and(|known| known != intent.id.as_str());
            // What is open would be settled by it.
            if is_another && told.open.is_none() {
                database::call(pool, async |c| evidence::append(c, &entry, id).await).await?;
            }
            return Ok(contradicting(event, &entry));
        };
        if !has_moved && told.reference.is_none() {
            return Ok(undecided(event, told.payment_id));
        }
        let entry = evidence::Heard {
            outcome: verdict.outcome(),
            provider_reference: verdict.reference(),
            code: verdict.decline_code(),
            ..entry
        };
        let is_new = database::call(pool, async |c| evidence::append(c, &entry, id).await).await?;
        // By a repeat, too: the one before may have come no farther than its entry.
        payments::settle::tell_contradiction(pool, told.payment_id, &verdict).await?;
        Ok(self.settle(pool, told.payment_id, told.open, is_new).await)
    }

    async fn refund(&self, pool: &PgPool, event: &Event, refund: &Refund) -> Result<Heard, sqlx::Error> {
        let Some(key) = refund.metadata.key.as_ref().map(Name::as_str) else { return Ok(Heard::Foreign) };
        let told = database::call(pool, async |c| refunds::hearing::find(c, key).await).await?;
        let Some(told) = told else { return Ok(self.foreign(event, refund.id.as_str(), key)) };
        let asked = AskedRefund {
            intent: told.charge.as_deref().unwrap_or_default(),
            key,
            amount: told.amount,
            currency: &told.currency,
        };
        let entry = evidence::Heard {
            witness: Witness::Webhook,
            payment_id: told.payment_id,
            refund_id: Some(told.refund_id),
            provider_key: key,
            outcome: "succeeded",
            provider_reference: Some(refund.id.as_str()),
            code: None,
            fence: Fence(0),
        };
        let id = Some(self.answer_id(event));
        let verdict = refunds::recovery::definitive(&classify::refunded(refund, &asked));
        let has_moved = refund.status == Some(RefundStatus::Succeeded);
        let name = told.reference.as_deref();
        let is_another = name.is_some_and(|known| known != refund.id.as_str());
        let verdict = match verdict {
            None if !has_moved => return Ok(undecided(event, told.refund_id)),
            Some(_) if !has_moved && (is_another || name.is_none()) => {
                return Ok(undecided(event, told.refund_id));
            }
            Some(verdict) if !is_another => verdict,
            _ => {
                // What is open would be settled by it.
                if is_another && told.open.is_none() {
                    database::call(pool, async |c| evidence::append(c, &entry, id).await).await?;
                }
                return Ok(contradicting(event, &entry));
            }
        };
        let entry = evidence::Heard {
            outcome: verdict.outcome(),
            provider_reference: verdict.reference(),
            code: verdict.failure_code(),
            ..entry
        };
        let is_new = database::call(pool, async |c| evidence::append(c, &entry, id).await).await?;
        refunds::settle::tell_contradiction(pool, told.payment_id, told.refund_id, &verdict).await?;
        Ok(self.settle(pool, told.refund_id, told.open, is_new).await)
    }

    fn answer_id(&self, event: &Event) -> Uuid {
        derive::from_told(&self.payments.namespace, "stripe", event.id.as_str())
    }

    /// Drives on what is open and in nobody's hands, now that there is evidence. What fails here recovery does later.
    async fn settle(&self, pool: &PgPool, id: Uuid, open: Option<(Scope, Fence)>, is_new: bool) -> Heard {
        let otherwise = if is_new { Heard::Recorded } else { Heard::Repeated };
        let Some((scope, seen)) = open else { return otherwise };
        match self.drive(pool, &scope, seen).await {
            Ok(true) => Heard::Settled,
            Ok(false) => otherwise,
            Err(error) => {
                tracing::warn!(resource = %id, "what the provider told is driven on later: {}", chain(&error));
                otherwise
            }
        }
    }

    async fn drive(&self, pool: &PgPool, scope: &Scope, seen: Fence) -> Result<bool, sqlx::Error> {
        let taken = database::call(pool, async |c| store::take_over(c, scope, seen, LEASE).await).await?;
        let Some(fence) = taken else { return Ok(false) };
        let driven = Driven::new(self.payments.clone());
        let proceeded = driven.proceed(pool, scope, fence, self.retention).await;
        if proceeded.is_err() {
            // Else the client's retry, which finds the evidence, would be kept away for as long as the lease lasts.
            let freed =
                database::call(pool, async |c| store::postpone(c, scope, fence, AGAIN_IN).await).await;
            if let Err(error) = freed {
                tracing::debug!("a lease is left to end by itself: {}", chain(&error));
            }
        }
        Ok(matches!(proceeded?, Proceeded::Completed { .. }))
    }

    /// Whoever else uses the account, or a database that lost its tail: the audit tells of it by its list.
    fn foreign(&self, event: &Event, reference: &str, key: &str) -> Heard {
        if let Some(left_out) = self.lines.take(Heard::Foreign) {
            tracing::warn!(
                event = event.id.as_str(),
                kind = event.kind.as_str(),
                reference,
                provider_key = key,
                left_out,
                "the provider tells of what nobody here has asked for"
            );
        }
        Heard::Foreign
    }

    /// The same again would be as unreadable, so it is not asked for.
    fn unreadable(&self, event: &Event, error: &serde_json::Error) -> Heard {
        if let Some(left_out) = self.lines.take(Heard::Unreadable) {
            tracing::warn!(
                event = event.id.as_str(),
                kind = event.kind.as_str(),
                left_out,
                "the provider tells of what cannot be read: {error}"
            );
        }
        Heard::Unreadable
    }
}

/// Money has moved under a key of ours, and by another name, of another charge or of another amount.
fn contradicting(event: &Event, heard: &evidence::Heard<'_>) -> Heard {
    counter!(CONTRADICTIONS).increment(1);
    tracing::error!(
        event = event.id.as_str(),
        kind = event.kind.as_str(),
        payment = %heard.payment_id,
        refund = heard.refund_id.map(tracing::field::display),
        provider_key = heard.provider_key,
        reference = heard.provider_reference,
        "the provider has moved money under a key of ours, and not as it was asked"
    );
    Heard::Contradicting
}

fn undecided(event: &Event, id: Uuid) -> Heard {
    tracing::debug!(event = event.id.as_str(), kind = event.kind.as_str(), resource = %id, "nothing definitive");
    Heard::Undecided
}
