//! Hearing what the provider tells by itself: Stripe's events.
//!
//! Promise: an event is evidence, and nothing else. What is definitive, and about a payment or refund of ours by key, name,
//! amount, currency and mode, is written down once, however often and in whatever order events come, and alone settles
//! nothing: whoever holds the key's lease does, by the same steps as after a crash. When nobody holds it, that is
//! tried at once, so that a client need not wait for the next pass.
//!
//! How: the entry's identity is derived from the event's, so that a repeat inserts none. An entry about success is made
//! whatever is known of the charge's name. One that moved no money only if the name is the one that is written down: of a
//! key that the provider has forgotten there may be another charge.
//!
//! In a crash the entry is there or not. If it is, recovery finds it; if not, the event was not acknowledged, and comes again.
//! Nothing here asks the provider anything.

use std::time::Duration;

use metrics::counter;
use semel_core::database;
use semel_core::derive;
use semel_core::disposition::chain;
use semel_core::idempotency::Scope;
use semel_core::idempotency::engine::{LEASE, Proceeded};
use semel_core::idempotency::store::{self, Fence};
use semel_core::metrics::{Label, Metric};
use sqlx::PgPool;
use uuid::Uuid;

use crate::driven::Driven;
use crate::evidence::{self, Witness};
use crate::payments::create::MakePayment;
use crate::provider::Provider;
use crate::provider::stripe::classify::{self, Asked, AskedRefund};
use crate::provider::stripe::objects::{Event, Name, PaymentIntent, Refund};
use crate::provider::stripe::webhook::About;
use crate::{payments, refunds};

/// Counter of the provider's events; label `outcome`.
pub const EVENTS: &str = "semel_provider_events_total";

/// What came of an event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Heard {
    /// It was written down, and the payment or refund is settled.
    Settled,
    /// It was written down, and changes nothing now: whoever is at work finds it, or all is settled.
    Recorded,
    /// It had been written down before.
    Repeated,
    /// It says nothing definitive about what it names.
    Undecided,
    /// It is about no payment or refund of ours.
    Foreign,
    /// It is of a type that says nothing about payments or refunds.
    Ignored,
}

impl Heard {
    const ALL: [Self; 6] =
        [Self::Settled, Self::Recorded, Self::Repeated, Self::Undecided, Self::Foreign, Self::Ignored];

    const fn label(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Recorded => "recorded",
            Self::Repeated => "repeated",
            Self::Undecided => "undecided",
            Self::Foreign => "foreign",
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
    /// Its object is not what its type says.
    #[error("an event that cannot be read")]
    Unreadable(#[source] serde_json::Error),
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
}

impl<P: Provider> Ear<P> {
    /// Hears of what is paid so, in this mode; a key that is completed is replayed for so long.
    #[must_use]
    pub fn new(payments: MakePayment<P>, livemode: bool, retention: Duration) -> Self {
        Self { payments, livemode, retention }
    }

    /// Hears an event that is known to be the provider's.
    ///
    /// # Errors
    ///
    /// When nothing of it was written down though something may have to be.
    pub async fn hear(&self, pool: &PgPool, event: &Event) -> Result<Heard, Unheard> {
        if event.livemode != self.livemode {
            return Err(Unheard::OtherMode);
        }
        let heard = match event.about().map_err(Unheard::Unreadable)? {
            About::Charge(intent) => self.charge(pool, event, &intent).await?,
            About::Refund(refund) => self.refund(pool, event, &refund).await?,
            About::Other => Heard::Ignored,
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
        let Some(told) = told else { return Ok(foreign(event, intent.id.as_str(), key)) };
        let asked = Asked {
            reference: told.reference.as_deref(),
            key,
            amount: told.amount,
            currency: &told.currency,
            livemode: self.livemode,
        };
        let answer = classify::charged(intent, &asked);
        let Some(verdict) = payments::recovery::definitive(&answer) else {
            return Ok(undecided(event, told.payment_id));
        };
        let has_moved = matches!(verdict, payments::settle::Verdict::Succeeded { .. });
        if !has_moved && told.reference.is_none() {
            return Ok(undecided(event, told.payment_id));
        }
        let entry = evidence::Heard {
            witness: Witness::Webhook,
            payment_id: told.payment_id,
            refund_id: None,
            provider_key: key,
            outcome: verdict.outcome(),
            provider_reference: verdict.reference(),
            code: verdict.decline_code(),
            fence: Fence(0),
        };
        let id = Some(self.answer_id(event));
        let is_new = database::call(pool, async |c| evidence::append(c, &entry, id).await).await?;
        if is_new {
            payments::settle::tell_contradiction(pool, told.payment_id, &verdict).await?;
        }
        Ok(self.settle(pool, told.payment_id, told.open, is_new).await)
    }

    async fn refund(&self, pool: &PgPool, event: &Event, refund: &Refund) -> Result<Heard, sqlx::Error> {
        let Some(key) = refund.metadata.key.as_ref().map(Name::as_str) else { return Ok(Heard::Foreign) };
        let told = database::call(pool, async |c| refunds::hearing::find(c, key).await).await?;
        let Some(told) = told else { return Ok(foreign(event, refund.id.as_str(), key)) };
        let asked = AskedRefund {
            intent: told.charge.as_deref().unwrap_or_default(),
            key,
            amount: told.amount,
            currency: &told.currency,
        };
        let answer = classify::refunded(refund, &asked);
        let Some(verdict) = refunds::recovery::definitive(&answer) else {
            return Ok(undecided(event, told.refund_id));
        };
        let entry = evidence::Heard {
            witness: Witness::Webhook,
            payment_id: told.payment_id,
            refund_id: Some(told.refund_id),
            provider_key: key,
            outcome: verdict.outcome(),
            provider_reference: verdict.reference(),
            code: verdict.failure_code(),
            fence: Fence(0),
        };
        let id = Some(self.answer_id(event));
        let is_new = database::call(pool, async |c| evidence::append(c, &entry, id).await).await?;
        if is_new {
            refunds::settle::tell_contradiction(pool, told.payment_id, told.refund_id, &verdict).await?;
        }
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
        let proceeded = driven.proceed(pool, scope, fence, self.retention).await?;
        Ok(matches!(proceeded, Proceeded::Completed { .. }))
    }
}

/// Whoever else uses the account, or a database that lost its tail: the audit tells of it by its list.
fn foreign(event: &Event, reference: &str, key: &str) -> Heard {
    tracing::warn!(
        event = event.id.as_str(),
        kind = event.kind.as_str(),
        reference,
        provider_key = key,
        "the provider tells of what nobody here has asked for"
    );
    Heard::Foreign
}

fn undecided(event: &Event, id: Uuid) -> Heard {
    tracing::debug!(event = event.id.as_str(), kind = event.kind.as_str(), resource = %id, "nothing definitive");
    Heard::Undecided
}
