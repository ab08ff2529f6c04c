//! The provider's calls as the fault layer sees them: each knows its key, how the desk executes it, and how its answer can be
//! spoilt.

use semel_proto::provider::v1::{Call, Charge, ListChargesResponse, ListRefundsResponse, Refund};
use time::OffsetDateTime;

use crate::desk::{ChargeAsk, Desk, Done, Manner, RefundAsk, Refusal};

/// A call.
pub(crate) trait Ask: Clone + Send + Sync + 'static {
    /// What it is answered.
    type Answer: Answer;
    /// Which call it is.
    const CALL: Call;

    /// Returns its key; empty when it has none.
    fn key(&self) -> &str;

    /// Executes it.
    fn execute(
        self,
        desk: &mut Desk,
        manner: Manner,
        now: OffsetDateTime,
    ) -> Result<Done<Self::Answer>, Refusal>;

    /// Claims its key, so that it is in use until it is executed; false when it need not or may not start.
    ///
    /// Only what moves money has something to claim: a fence does not wait for a charge, and a look-up waits for nobody.
    fn claim(&self, _: &mut Desk, _: OffsetDateTime) -> bool {
        true
    }
}

/// An answer that faults can spoil.
pub(crate) trait Answer: Default + Send + 'static {
    /// Makes it an answer that makes no sense.
    fn garbage() -> Self {
        Self::default()
    }

    /// Makes it the answer for another key.
    fn for_another_key(&mut self);

    /// Makes it the answer for another amount.
    fn with_another_amount(&mut self);
}

/// `GetCharge`.
#[derive(Clone, Debug)]
pub(crate) struct GetAsk(pub(crate) String);

/// `CancelCharge`.
#[derive(Clone, Debug)]
pub(crate) struct CancelAsk(pub(crate) String);

/// `GetRefund`.
#[derive(Clone, Debug)]
pub(crate) struct GetRefundAsk(pub(crate) String);

/// `ListCharges`.
#[derive(Clone, Debug)]
pub(crate) struct ListAsk {
    /// The index of the first that may be on the page.
    pub(crate) from: usize,
    pub(crate) most: usize,
    pub(crate) since: Option<OffsetDateTime>,
}

/// `ListRefunds`.
#[derive(Clone, Debug)]
pub(crate) struct ListRefundsAsk(pub(crate) ListAsk);

impl Ask for ChargeAsk {
    type Answer = Charge;
    const CALL: Call = Call::Charge;

    fn key(&self) -> &str {
        &self.key
    }

    fn execute(self, desk: &mut Desk, manner: Manner, now: OffsetDateTime) -> Result<Done<Charge>, Refusal> {
        desk.charge(&self, manner, now)
    }

    fn claim(&self, desk: &mut Desk, now: OffsetDateTime) -> bool {
        desk.claim_charge(self, now)
    }
}

impl Ask for GetAsk {
    type Answer = Charge;
    const CALL: Call = Call::Get;

    fn key(&self) -> &str {
        &self.0
    }

    fn execute(self, desk: &mut Desk, _: Manner, now: OffsetDateTime) -> Result<Done<Charge>, Refusal> {
        desk.get(&self.0, now)
    }
}

impl Ask for CancelAsk {
    type Answer = Charge;
    const CALL: Call = Call::Cancel;

    fn key(&self) -> &str {
        &self.0
    }

    fn execute(self, desk: &mut Desk, _: Manner, now: OffsetDateTime) -> Result<Done<Charge>, Refusal> {
        desk.cancel(&self.0, now)
    }
}

impl Ask for RefundAsk {
    type Answer = Refund;
    const CALL: Call = Call::Refund;

    fn key(&self) -> &str {
        &self.key
    }

    fn execute(self, desk: &mut Desk, manner: Manner, now: OffsetDateTime) -> Result<Done<Refund>, Refusal> {
        desk.refund(&self, manner, now)
    }

    fn claim(&self, desk: &mut Desk, now: OffsetDateTime) -> bool {
        desk.claim_refund(self, now)
    }
}

impl Ask for GetRefundAsk {
    type Answer = Refund;
    const CALL: Call = Call::GetRefund;

    fn key(&self) -> &str {
        &self.0
    }

    fn execute(self, desk: &mut Desk, _: Manner, _: OffsetDateTime) -> Result<Done<Refund>, Refusal> {
        desk.get_refund(&self.0)
    }
}

impl Ask for ListAsk {
    type Answer = ListChargesResponse;
    const CALL: Call = Call::List;

    fn key(&self) -> &'static str {
        ""
    }

    fn execute(
        self,
        desk: &mut Desk,
        _: Manner,
        _: OffsetDateTime,
    ) -> Result<Done<ListChargesResponse>, Refusal> {
        Ok(desk.list(self.from, self.most, self.since))
    }
}

impl Ask for ListRefundsAsk {
    type Answer = ListRefundsResponse;
    const CALL: Call = Call::ListRefunds;

    fn key(&self) -> &'static str {
        ""
    }

    fn execute(
        self,
        desk: &mut Desk,
        _: Manner,
        _: OffsetDateTime,
    ) -> Result<Done<ListRefundsResponse>, Refusal> {
        Ok(desk.list_refunds(self.0.from, self.0.most, self.0.since))
    }
}

impl Answer for Charge {
    fn for_another_key(&mut self) {
        self.key.push_str("-other");
    }

    fn with_another_amount(&mut self) {
        self.amount += 1;
    }
}

impl Answer for Refund {
    fn for_another_key(&mut self) {
        self.key.push_str("-other");
    }

    fn with_another_amount(&mut self) {
        self.amount += 1;
    }
}

impl Answer for ListChargesResponse {
    fn garbage() -> Self {
        Self { charges: vec![Charge::default()], next_page_token: String::new() }
    }

    /// A list is for no key.
    fn for_another_key(&mut self) {}

    /// A list is for no amount.
    fn with_another_amount(&mut self) {}
}

impl Answer for ListRefundsResponse {
    fn garbage() -> Self {
        Self { refunds: vec![Refund::default()], next_page_token: String::new() }
    }

    /// A list is for no key.
    fn for_another_key(&mut self) {}

    /// A list is for no amount.
    fn with_another_amount(&mut self) {}
}
