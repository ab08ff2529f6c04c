//! Parking a message: its event is written to `parked_events`, so that the message can be acknowledged and its aggregate's
//! order is kept all the same.

use semel_broker::Delivery;
use semel_core::database::{Failure, Loan, failure, within};
use semel_core::inbox::order::{self, Standing};
use semel_core::inbox::parked::{self, NewParked, Reason};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use crate::aggregate::Aggregate;
use crate::consumer::Shared;
use crate::copies::{Original, shortened, storable};
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
    /// It cannot be parked for now: as many are as may be, or the database answers that it cannot.
    NotNow(Error),
    /// No message could be made of it again: it would stand in its aggregate's way for ever.
    Unfit(String),
}

/// Parks an event, unless there is nothing behind which it would have to wait. `frame_max` is what a message's headers may take.
///
/// # Errors
///
/// When the connection is lost, or the outcome of the commit is unknown.
///
/// # Cancel safety
///
/// Not cancel safe: runs in a task that nobody cuts off.
pub(crate) async fn park<H>(
    shared: &Shared<H>,
    delivery: &Delivery,
    aggregate: &Aggregate,
    why: Why<'_>,
    frame_max: usize,
) -> Result<Parking, Error> {
    let failed = |source| Error::Database { attempted: "park an event", source };
    let mut loan = Loan::take(&shared.pool).await.map_err(failed)?;
    // Whoever holds the aggregate's lock holds it for as long as a handler's transaction may take.
    let patience = shared.settings.attempt_limit();
    let limit = patience + shared.settings.answer_limit;
    let begin = loan.begin_with(AssertSqlSafe(begin_statement(patience)));
    let mut tx = within(limit, begin).await.map_err(failed)?;
    let parking = within(limit * 2, park_in(&mut tx, shared, delivery, aggregate, why, frame_max)).await;
    let parking = match parking {
        Ok(Parking::Parked) => within(limit, tx.commit()).await.map(|()| Parking::Parked),
        Err(error) if failure(&error) == Failure::Unknown => {
            drop(tx);
            Err(error)
        }
        other => within(limit, tx.rollback()).await.and(other),
    };
    match parking {
        Ok(parking) => {
            loan.give_back();
            Ok(parking)
        }
        Err(error) if failure(&error) == Failure::Unknown => Err(failed(error)),
        // It is rolled back. To end the session would cost all that is in work a delivery. The connection is not given back: it
        // may lead to a server that was demoted.
        Err(error) => Ok(Parking::NotNow(failed(error))),
    }
}

async fn park_in<H>(
    tx: &mut PgConnection,
    shared: &Shared<H>,
    delivery: &Delivery,
    aggregate: &Aggregate,
    why: Why<'_>,
    frame_max: usize,
) -> Result<Parking, sqlx::Error> {
    let settings = &shared.settings;
    // Only events are parked.
    let Ok(received) = &delivery.envelope else { return Ok(Parking::Clear) };
    let place = aggregate.place(&settings.name);
    // Before the lock, for which others wait.
    let is_full = parked::is_full(tx, &settings.name, i64::from(settings.parked_limit)).await?;
    order::lock(tx, place).await?;
    match order::look(tx, place, received.event_id).await? {
        Standing { is_processed: true, .. } => return Ok(Parking::Processed),
        Standing { is_parked: true, .. } => return Ok(Parking::Parked),
        Standing { has_parked: false, .. } if matches!(why, Why::Behind) => return Ok(Parking::Clear),
        Standing { .. } => {}
    }
    let original = Original::from(delivery);
    let error = match why {
        Why::Failed(error) => storable(error),
        Why::Behind | Why::Redelivered => String::new(),
    };
    let stored = original.copy.to_stored().map_err(|error| error.to_string());
    let properties = match stored.and_then(|stored| original.copy.fits(frame_max).map(|()| stored)) {
        Ok(properties) => properties,
        Err(reason) => return Ok(Parking::Unfit(reason)),
    };
    if is_full {
        return Ok(Parking::NotNow(Error::ParkedFull { limit: settings.parked_limit }));
    }
    let event_type = received.event_type.as_deref().map(storable);
    let event = NewParked {
        event_id: received.event_id,
        version: received.aggregate_version,
        event_type: event_type.as_deref(),
        exchange: &storable(&original.exchange),
        routing_key: &storable(&original.routing_key),
        properties: &properties,
        payload: &delivery.body,
        reason: match why {
            Why::Failed(_) => Reason::Failed(parked::Failure {
                error: shortened(&error),
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
