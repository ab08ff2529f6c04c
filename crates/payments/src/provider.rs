//! The provider port: what a payment provider must offer, and what its answers mean.
//!
//! Every answer is classified once, in the adapter. A call that got no answer may have been executed: that is
//! [`Answer::Unknown`], and never an error that could be taken for "nothing happened".

pub mod breaker;
pub mod chosen;
pub mod grpc;
pub mod stripe;

use std::fmt;
use std::time::{Duration, SystemTime};

use semel_core::idempotency::InvalidCommand;

/// How long a call to the provider may take.
pub const DEADLINE: Duration = Duration::from_secs(10);
/// What is kept clear of a provider's horizon, beside its deadline.
pub const MARGIN: Duration = Duration::from_mins(1);

/// What a provider promises; declared by its adapter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Promises {
    /// Whether the same key with the same order is executed once.
    pub dedup: Dedup,
    /// Whether it can be asked what happened.
    pub look_up: LookUp,
    /// Whether a key can be fenced, so that no charge with it can ever succeed.
    pub fence: Fencing,
}

/// For how long a provider recognises a key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Dedup {
    /// For ever.
    ForEver,
    /// For this long after the key's first use.
    For(Duration),
    /// Not at all: there is exactly one send, ever.
    None,
}

impl Dedup {
    /// Says whether a send at this age, or all sends of a window this long, stay clear of the horizon behind which the
    /// provider forgets a key.
    #[must_use]
    pub fn is_clear_of_horizon(self, age: Duration) -> bool {
        match self {
            Self::For(horizon) => age + DEADLINE + MARGIN < horizon,
            Self::ForEver | Self::None => true,
        }
    }
}

/// Whether a provider can be asked what happened.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LookUp {
    /// By the key.
    ByKey,
    /// By the reference that a charge was prepared under: it moves no money before that is committed. Refunds by the key.
    ByReference,
    /// It cannot.
    None,
}

/// Whether a key can be fenced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fencing {
    /// By canceling it, for ever; a charge that is prepared by its reference.
    Cancel,
    /// It cannot.
    None,
}

/// What the provider said.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Answer {
    /// The money has moved. Final.
    Succeeded {
        /// The provider's own name for the charge or refund, at most 255 bytes.
        reference: String,
    },
    /// No money has moved, and none will under this key. Final.
    Declined {
        /// The provider's own name for the attempt, if it gave one.
        reference: Option<String>,
        /// Why, at most 63 bytes.
        code: String,
    },
    /// No charge with this key can ever succeed. Final.
    Fenced,
    /// Being worked on: ask again later.
    InProgress,
    /// Nothing is known of the key, which proves nothing: a request may be under way.
    NotFound,
    /// This call has executed nothing; an earlier one may have.
    NotExecuted {
        /// Why.
        reason: String,
    },
    /// Whether it was executed is not known.
    Unknown {
        /// Why.
        reason: String,
    },
    /// The key was used with another order, or what is asked for contradicts what the provider has on record: for a person.
    Mismatch {
        /// The provider's words.
        reason: String,
    },
}

impl Answer {
    /// The label of the answer in metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => "succeeded",
            Self::Declined { .. } => "declined",
            Self::Fenced => "fenced",
            Self::InProgress => "in_progress",
            Self::NotFound => "not_found",
            Self::NotExecuted { .. } => "not_executed",
            Self::Unknown { .. } => "unknown",
            Self::Mismatch { .. } => "mismatch",
        }
    }
}

/// What became of the preparation of a charge.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Prepared {
    /// It has this name at the provider, at most 255 bytes.
    Reference(String),
    /// It will never have one under its key.
    Never {
        /// Why.
        reason: String,
    },
    /// It has none so far.
    Answered(Answer),
}

/// A list of the provider.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum List {
    /// Of what it charged.
    Charges,
    /// Of what it gave back, by the time of the refund.
    Refunds,
}

/// A charge, or a refund, that the provider lists as succeeded.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ListedMove {
    /// The idempotency key that it was made under; empty when it was made without one of ours.
    pub key: String,
    /// The provider's own name for it.
    pub reference: String,
    /// In minor units.
    pub amount: i64,
    /// ISO 4217 code.
    pub currency: String,
}

/// What the provider said when asked for a list.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Listed {
    /// A page of it.
    Page {
        /// The charges or refunds on it that succeeded.
        moves: Vec<ListedMove>,
        /// Names the next page; none on the last.
        next: Option<String>,
    },
    /// It has no such list.
    Unsupported,
    /// It did not answer, or not with a list.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A charge to send: the stored request, byte for byte, and what the answer must agree with.
#[derive(Clone, Eq, PartialEq)]
pub struct StoredCharge {
    /// The idempotency key towards the provider.
    pub key: String,
    /// The encoded order.
    pub request: Vec<u8>,
    /// The amount in it.
    pub amount: i64,
    /// The currency in it.
    pub currency: String,
    /// What it was prepared as; committed before it is charged.
    pub reference: Option<String>,
}

/// Shows no request: it holds the source.
impl fmt::Debug for StoredCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredCharge")
            .field("key", &self.key)
            .field("amount", &self.amount)
            .field("currency", &self.currency)
            .field("reference", &self.reference)
            .finish_non_exhaustive()
    }
}

/// A charge of which money is to be given back.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Charged {
    /// The key that it was made under.
    pub key: String,
    /// The provider's own name for it.
    pub reference: String,
}

/// A refund to send: the stored request, byte for byte, and what the answer must agree with.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StoredRefund {
    /// The refund's own idempotency key towards the provider.
    pub key: String,
    /// The encoded request, which names the charge.
    pub request: Vec<u8>,
    /// The amount in it.
    pub amount: i64,
    /// The charge's currency.
    pub currency: String,
}

/// A payment provider. No layer below an adapter repeats a call.
pub trait Provider: Clone + Send + Sync + 'static {
    /// Returns the name that is stored with what is begun with it, at most 63 bytes: kind and mode, such as `stripe:live`.
    /// What has another name is never asked about it.
    fn name(&self) -> &'static str;

    /// Returns what it promises.
    fn promises(&self) -> Promises;

    /// Says what of a payment is nothing for this provider, beyond what no payment may be.
    ///
    /// # Errors
    ///
    /// With the field that is not acceptable.
    fn accepts(&self, _currency: &str, _source: &str) -> Result<(), InvalidCommand> {
        Ok(())
    }

    /// Encodes an order as it is stored and sent: a pure function of its arguments, free of time and attempt.
    fn encode(&self, amount: i64, currency: &str, source: &str, reference: &str) -> Vec<u8>;

    /// Says whether calls have a chance at the moment.
    fn is_open(&self) -> bool;

    /// Prepares a charge that is looked up by its reference: moves no money, and for one key yields one reference for as long
    /// as the provider recognises it. Nobody else asks for it.
    fn prepare(
        &self,
        _charge: &StoredCharge,
        _not_after: SystemTime,
    ) -> impl Future<Output = Prepared> + Send {
        async { Prepared::Never { reason: "the provider knows no preparation".to_owned() } }
    }

    /// Moves the money, at most once per key; the provider refuses to start after this time.
    fn charge(&self, charge: &StoredCharge, not_after: SystemTime) -> impl Future<Output = Answer> + Send;

    /// Asks what happened.
    fn get(&self, charge: &StoredCharge) -> impl Future<Output = Answer> + Send;

    /// Fences the key. Only [`Answer::Fenced`] proves that it is; every other answer proves nothing by itself.
    fn cancel(&self, charge: &StoredCharge) -> impl Future<Output = Answer> + Send;

    /// Encodes a refund as it is stored and sent: a pure function of its arguments, free of time and attempt.
    fn encode_refund(&self, charge: &Charged, amount: i64) -> Vec<u8>;

    /// Gives money of a charge back, at most once per key; the provider refuses to start after this time.
    fn refund(&self, refund: &StoredRefund, not_after: SystemTime) -> impl Future<Output = Answer> + Send;

    /// Asks what happened to a refund. There is no fence for one.
    fn get_refund(&self, refund: &StoredRefund) -> impl Future<Output = Answer> + Send;

    /// Lists a page of what was charged or given back since then; the first page, or the one that the page before named.
    /// Not every provider can.
    fn list(
        &self,
        _list: List,
        _since: SystemTime,
        _page: Option<&str>,
    ) -> impl Future<Output = Listed> + Send {
        async { Listed::Unsupported }
    }
}

/// Returns how the names begin that this provider gives to what it charges, or gives back; none where that is not known.
pub(crate) fn prefix_of_names(provider: &str, list: List) -> Option<&'static str> {
    provider.starts_with("stripe:").then_some(match list {
        List::Charges => "pi_",
        List::Refunds => "re_",
    })
}

/// Returns a success by this name; without one nothing is known.
fn succeeded(reference: &str) -> Answer {
    match clean(reference, 255) {
        reference if reference.is_empty() => {
            Answer::Unknown { reason: "the provider gave it no name".to_owned() }
        }
        reference => Answer::Succeeded { reference },
    }
}

/// Returns a decline, with what is kept of the provider's words.
fn declined(reference: &str, code: &str) -> Answer {
    let code = clean(code, 63);
    let code = if code.is_empty() { "declined".to_owned() } else { code };
    let reference = Some(clean(reference, 255)).filter(|reference| !reference.is_empty());
    Answer::Declined { reference, code }
}

/// Cuts a string of the provider to what fits, without control characters.
fn clean(text: &str, bytes: usize) -> String {
    let mut clean = String::new();
    for c in text.chars().filter(|c| !c.is_control()) {
        if clean.len() + c.len_utf8() > bytes {
            break;
        }
        clean.push(c);
    }
    clean
}
