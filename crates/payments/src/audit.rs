//! The reverse audit: what the provider says it charged and gave back, against the payments and refunds that it was asked for.
//!
//! Payment and refund are committed before their requests go out, so what was listed before this is asked cannot precede
//! them.

use sqlx::PgPool;

use crate::provider::{List, ListedMove};
use crate::{payments, refunds};

/// Why a charge or refund is nobody's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Orphan {
    /// None was ever asked for under its key.
    Unknown,
    /// What was asked for under its key was settled without it.
    SettledWithout,
    /// What was asked for under its key was settled by another: the provider has done it twice.
    SettledByAnother,
    /// What was asked for under its key is of another amount.
    OtherAmount,
}

/// Returns those of these succeeded charges, or refunds, that nothing of ours accounts for.
///
/// # Errors
///
/// When the database fails.
pub async fn orphans(
    pool: &PgPool,
    list: List,
    moves: Vec<ListedMove>,
) -> Result<Vec<(ListedMove, Orphan)>, sqlx::Error> {
    let found = match list {
        List::Charges => payments::audit::orphans(pool, &moves).await?,
        List::Refunds => refunds::audit::orphans(pool, &moves).await?,
    };
    let mut moves: Vec<_> = moves.into_iter().map(Some).collect();
    let found = found.into_iter().filter_map(|suspect| {
        let place = usize::try_from(suspect.place).ok()?.checked_sub(1)?;
        let why = match suspect {
            Suspect { unknown: true, .. } => Orphan::Unknown,
            Suspect { without: true, .. } => Orphan::SettledWithout,
            Suspect { another: true, .. } => Orphan::SettledByAnother,
            Suspect { .. } => Orphan::OtherAmount,
        };
        Some((moves.get_mut(place)?.take()?, why))
    });
    Ok(found.collect())
}

/// What a table says of an entry of the list that it does not account for.
#[derive(Debug)]
pub(crate) struct Suspect {
    /// The entry's place in the page, from 1 on.
    pub(crate) place: i64,
    /// There is no row of its key.
    pub(crate) unknown: bool,
    /// The row was settled without money.
    pub(crate) without: bool,
    /// The row was settled by another.
    pub(crate) another: bool,
}

/// A page by column, as the statements take it.
pub(crate) struct Columns {
    pub(crate) keys: Vec<String>,
    pub(crate) references: Vec<String>,
    pub(crate) amounts: Vec<i64>,
    pub(crate) currencies: Vec<String>,
}

impl Columns {
    pub(crate) fn of(moves: &[ListedMove]) -> Self {
        Self {
            keys: moves.iter().map(|listed| listed.key.clone()).collect(),
            references: moves.iter().map(|listed| listed.reference.clone()).collect(),
            amounts: moves.iter().map(|listed| listed.amount).collect(),
            currencies: moves.iter().map(|listed| listed.currency.clone()).collect(),
        }
    }
}
