//! Pages of a client's own resources, the newest first.
//!
//! A page begins behind a place, not at a number: what is made meanwhile shifts nothing, and a late page costs as much as
//! the first one.

use std::fmt;
use std::str::FromStr;

use time::OffsetDateTime;
use uuid::Uuid;

/// Most entries of a page.
pub const MAX_LIMIT: u32 = 100;

const END_OF_TIME: OffsetDateTime = time::macros::datetime!(9999-12-31 23:59:59 UTC);

/// Which page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Entries at most, 1 to [`MAX_LIMIT`].
    pub limit: u32,
    /// Behind which entry it begins; none for the first page.
    pub after: Option<Cursor>,
}

/// The place of an entry, as text that means nothing to clients.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Cursor {
    /// When the entry was made, to the microsecond.
    pub created_at: OffsetDateTime,
    /// Its id.
    pub id: Uuid,
}

impl Page {
    /// Returns the place to continue from: for the first page one before all entries, so that one plan serves all pages.
    pub(crate) fn place(&self) -> Cursor {
        self.after.unwrap_or(Cursor { created_at: END_OF_TIME, id: Uuid::max() })
    }

    /// Returns how many rows are read: one more than asked for, which tells whether there is another page.
    pub(crate) fn rows(&self) -> i64 {
        i64::from(self.limit.clamp(1, MAX_LIMIT)) + 1
    }

    /// Returns the entries of the page without the one that only shows that there is another page, and then the last one's
    /// place.
    pub(crate) fn cut<T>(&self, read: impl Iterator<Item = (Cursor, T)>) -> (Vec<T>, Option<Cursor>) {
        let limit = usize::try_from(self.rows() - 1).unwrap_or(usize::MAX);
        let (mut places, mut entries): (Vec<Cursor>, Vec<T>) = read.unzip();
        if entries.len() <= limit {
            return (entries, None);
        }
        entries.truncate(limit);
        places.truncate(limit);
        (entries, places.pop())
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}{}", self.created_at.unix_timestamp_nanos() / 1000, self.id.simple())
    }
}

/// Text that is no cursor of ours.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("is no cursor: take it from `next_cursor` of the page before")]
pub struct InvalidCursor;

impl FromStr for Cursor {
    type Err = InvalidCursor;

    fn from_str(text: &str) -> Result<Self, InvalidCursor> {
        let (micros, id) = text.split_at_checked(32).ok_or(InvalidCursor)?;
        let micros = i64::from_str_radix(micros, 16).map_err(|_| InvalidCursor)?;
        let created_at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000);
        let cursor = Self {
            created_at: created_at.map_err(|_| InvalidCursor)?,
            id: Uuid::try_parse(id).map_err(|_| InvalidCursor)?,
        };
        if cursor.to_string() == text { Ok(cursor) } else { Err(InvalidCursor) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_reads_what_it_writes_and_nothing_else() {
        let created_at = OffsetDateTime::from_unix_timestamp_nanos(1_700_000_000_123_456_000).unwrap();
        let cursor = Cursor { created_at, id: Uuid::from_u128(7) };
        let text = cursor.to_string();
        assert_eq!(text.parse::<Cursor>().unwrap(), cursor);
        let upper = text.to_uppercase();
        let far = format!("{}{}", "f".repeat(32), &text[32..]);
        for other in
            ["", "1", &text[1..], &format!("{text}0"), &text.replace('0', "x"), &far, "é", &"é".repeat(32)]
        {
            assert!(other.parse::<Cursor>().is_err(), "{other}");
        }
        assert!(upper.parse::<Cursor>().is_err(), "{upper}");
    }
}
