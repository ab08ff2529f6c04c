//! Parking a message: its event is written to `parked_events`, so that the message can be acknowledged and its aggregate's
//! order is kept all the same.

use semel_broker::Delivery;
use semel_core::database::{Loan, within};
use semel_core::inbox::order::{self, Standing};
use semel_core::inbox::parked::{self, Failure, NewParked, Reason};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use crate::aggregate::Aggregate;
use crate::consumer::Shared;
use crate::copies::{Original, shortened};
use crate::error::Error;
use crate::transaction::begin_statement;

/// Why an event is to be parked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Why<'a> {
    /// It failed.
    Failed(&'a str),
    /// An earlier event of its aggregate is parked.
    Behind,
    /// It was delivered before.
    Redelivered,
}

/// What became of the wish to park an event.
#[derive(Debug)]
pub(crate) enum Parking {
    /// It is parked, maybe since an earlier delivery.
    Parked,
    /// It has taken effect meanwhile, in another process.
    Processed,
    /// Nothing of its aggregate is parked any more, behind which it would have to wait.
    Clear,
    /// As many are parked as may be.
    Full(Error),
}

/// Parks an event, unless there is nothing behind which it would have to wait.
///
/// # Cancel safety
///
/// Not cancel safe: runs in a task that nobody cuts off.
pub(crate) async fn park<H>(
    shared: &Shared<H>,
    delivery: &Delivery,
    aggregate: &Aggregate,
    why: Why<'_>,
) -> Result<Parking, Error> {
    let failed = |source| Error::Database { attempted: "park an event", source };
    let mut loan = Loan::take(&shared.pool).await.map_err(failed)?;
    // Whoever holds the aggregate's lock holds it for as long as a handler's transaction may take.
    let patience = shared.settings.attempt_limit();
    let limit = patience + shared.settings.answer_limit;
    let begin = loan.begin_with(AssertSqlSafe(begin_statement(patience)));
    let mut tx = within(limit, begin).await.map_err(failed)?;
    let parking =
        within(limit * 2, park_in(&mut tx, shared, delivery, aggregate, why)).await.map_err(failed)?;
    match parking {
        Parking::Parked => within(limit, tx.commit()).await.map_err(failed)?,
        _ => within(limit, tx.rollback()).await.map_err(failed)?,
    }
    loan.give_back();
    Ok(parking)
}

async fn park_in<H>(
    tx: &mut PgConnection,
    shared: &Shared<H>,
    delivery: &Delivery,
    aggregate: &Aggregate,
    why: Why<'_>,
) -> Result<Parking, sqlx::Error> {
    let settings = &shared.settings;
    // Only events are parked.
    let Ok(received) = &delivery.envelope else { return Ok(Parking::Clear) };
    let place = aggregate.place(&settings.name);
    order::lock(tx, place).await?;
    match order::look(tx, place, received.event_id).await? {
        Standing { is_processed: true, .. } => return Ok(Parking::Processed),
        Standing { is_parked: true, .. } => return Ok(Parking::Parked),
        Standing { has_parked: false, .. } if matches!(why, Why::Behind) => return Ok(Parking::Clear),
        Standing { .. } => {}
    }
    if parked::is_full(tx, &settings.name, i64::from(settings.parked_limit)).await? {
        return Ok(Parking::Full(Error::ParkedFull { limit: settings.parked_limit }));
    }
    let original = Original::from(delivery);
    let event_type = received.event_type.as_deref().map(storable);
    let event = NewParked {
        event_id: received.event_id,
        version: received.aggregate_version,
        event_type: event_type.as_deref(),
        exchange: &storable(&original.exchange),
        routing_key: &storable(&original.routing_key),
        properties: &original.copy.to_stored(),
        payload: &delivery.body,
        reason: match why {
            Why::Failed(error) => Reason::Failed(Failure {
                error: shortened(error),
                attempts: i32::try_from(original.failures.saturating_add(1)).unwrap_or(i32::MAX),
                retry_in: shared.copies.delay(original.failures),
            }),
            Why::Behind => Reason::Behind,
            Why::Redelivered => Reason::Redelivered,
        },
    };
    parked::park(tx, place, &event).await?;
    Ok(Parking::Parked)
}

/// Without zero bytes, which no text of the database may hold. The properties have the text as it was.
fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}
