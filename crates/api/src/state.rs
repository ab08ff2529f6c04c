//! What all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use semel_core::credentials::Authenticator;
use semel_core::derive::Namespace;
use semel_core::idempotency::admission::Admission;
use semel_core::lifecycle::Lifecycle;
use semel_core::lines::Lines;
use semel_core::outbox::hint::Hints;
use semel_payments::orders::PlaceOrder;
use semel_payments::payments::create::MakePayment;
use semel_payments::problem::ProblemBase;
use semel_payments::provider::chosen::Chosen;
use sqlx::PgPool;
use tokio::sync::Semaphore;

use crate::problem::Kind;
use crate::webhooks::Webhooks;

/// Requests at work at a time; those beyond are told to come back.
const MAX_REQUESTS: usize = 512;
/// Webhook requests at work at a time, beside those. Their sender proves who it is by the whole body alone: whoever sends none
/// stands in nobody's way but theirs, and Stripe sends again.
const MAX_WEBHOOKS: usize = 16;

/// How requests are answered.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The deployment's name.
    pub namespace: Namespace,
    /// For how long a completed key is replayed.
    pub key_retention: Duration,
    /// What the `type` of a problem begins with.
    pub problem_base: ProblemBase,
}

/// What all requests share; clones share it.
#[derive(Clone, Debug)]
pub struct Api {
    pub(crate) pool: PgPool,
    pub(crate) authenticator: Arc<Authenticator>,
    pub(crate) place_order: PlaceOrder,
    pub(crate) make_payment: Option<MakePayment<Chosen>>,
    pub(crate) webhooks: Option<Webhooks>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) life: Lifecycle,
    pub(crate) hints: Hints,
    pub(crate) places: Arc<Semaphore>,
    pub(crate) webhook_places: Arc<Semaphore>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) lines: Arc<Lines<Kind>>,
    open: Arc<AtomicBool>,
}

impl Api {
    /// Answers from this database; until [`Api::open`], every request is told to come back.
    #[must_use]
    pub fn new(pool: PgPool, settings: Settings, life: Lifecycle) -> Self {
        Self {
            authenticator: Arc::new(Authenticator::new(pool.clone())),
            place_order: PlaceOrder::new(settings.namespace.clone()),
            make_payment: None,
            webhooks: None,
            settings: Arc::new(settings),
            places: Arc::new(Semaphore::new(MAX_REQUESTS)),
            webhook_places: Arc::new(Semaphore::new(MAX_WEBHOOKS)),
            admission: Arc::default(),
            lines: Arc::default(),
            open: Arc::new(AtomicBool::new(false)),
            hints: Hints::default(),
            pool,
            life,
        }
    }

    /// Serves payments, too; without this their routes do not exist.
    #[must_use]
    pub fn with_payments(mut self, make_payment: MakePayment<Chosen>) -> Self {
        self.make_payment = Some(make_payment);
        self
    }

    /// Hears Stripe's events about payments, too; without this their route does not exist.
    #[must_use]
    pub fn with_webhooks(mut self, webhooks: Webhooks) -> Self {
        self.webhooks = Some(webhooks);
        self
    }

    /// Bounds what new requests a client may begin; without this nothing does.
    #[must_use]
    pub fn with_admission(mut self, admission: Admission) -> Self {
        self.admission = Arc::new(admission);
        self
    }

    /// Tells relays of what is committed; without this they find it by polling.
    #[must_use]
    pub fn with_hints(mut self, hints: Hints) -> Self {
        self.hints = hints;
        self
    }

    /// Says that the database has a schema that this binary can use.
    pub fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }
}
