//! What happened, in order, and how many calls came in. In memory, bounded.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::counter;
use semel_proto::provider::v1::{Call, CountCallsResponse, Happening, ListHappeningsResponse};

use crate::clock::{Clock, timestamp};
use crate::metrics::CALLS;

/// How many happenings are kept.
const KEPT: usize = 50_000;

/// The history; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct History {
    clock: Clock,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    happenings: VecDeque<Happening>,
    last: u64,
    calls: CountCallsResponse,
}

impl History {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { clock, inner: Arc::default() }
    }

    /// Adds a happening; sequence and time are given here.
    pub(crate) fn push(&self, happening: Happening) {
        let mut inner = self.inner();
        inner.last += 1;
        let (sequence, at) = (inner.last, Some(timestamp(self.clock.now())));
        inner.happenings.push_back(Happening { sequence, at, ..happening });
        if inner.happenings.len() > KEPT {
            inner.happenings.pop_front();
        }
    }

    /// Returns a page of what came after a sequence, of one key or of any.
    pub(crate) fn list(&self, after: u64, key: &str, most: usize) -> ListHappeningsResponse {
        let inner = self.inner();
        let from = inner.happenings.partition_point(|happening| happening.sequence <= after);
        let wanted =
            inner.happenings.range(from..).filter(|happening| key.is_empty() || happening.key == key);
        let happenings = wanted.take(most).cloned().collect();
        ListHappeningsResponse { happenings, forgotten: inner.last - inner.happenings.len() as u64 }
    }

    /// Counts a call that came in.
    pub(crate) fn count(&self, call: Call) {
        counter!(CALLS, "call" => label(call)).increment(1);
        let calls = &mut self.inner().calls;
        let count = match call {
            Call::Charge => &mut calls.charge,
            Call::Get => &mut calls.get,
            Call::Cancel => &mut calls.cancel,
            Call::Refund => &mut calls.refund,
            Call::GetRefund => &mut calls.get_refund,
            Call::List | Call::Unspecified => &mut calls.list,
            Call::ListRefunds => &mut calls.list_refunds,
        };
        *count += 1;
    }

    pub(crate) fn calls(&self) -> CountCallsResponse {
        self.inner().calls
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn label(call: Call) -> &'static str {
    match call {
        Call::Charge => "charge",
        Call::Get => "get",
        Call::Cancel => "cancel",
        Call::Refund => "refund",
        Call::GetRefund => "get_refund",
        Call::List | Call::Unspecified => "list",
        Call::ListRefunds => "list_refunds",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_newest_and_lists_by_page_and_key() {
        let history = History::new(Clock::default());
        for number in 0..=KEPT {
            let key = if number % 2 == 0 { "even" } else { "odd" };
            history.push(Happening { key: key.to_owned(), ..Happening::default() });
        }
        let page = history.list(0, "", 2);
        assert_eq!(page.forgotten, 1);
        assert_eq!(page.happenings.iter().map(|happening| happening.sequence).collect::<Vec<_>>(), [2, 3]);
        let page = history.list(3, "odd", 2);
        assert_eq!(page.happenings.iter().map(|happening| happening.sequence).collect::<Vec<_>>(), [4, 6]);
        assert!(history.list(u64::MAX, "", 2).happenings.is_empty());
    }

    #[test]
    fn counts_each_call_on_its_own() {
        let history = History::new(Clock::default());
        history.count(Call::Charge);
        history.count(Call::Charge);
        history.count(Call::GetRefund);
        let expected = CountCallsResponse { charge: 2, get_refund: 1, ..CountCallsResponse::default() };
        assert_eq!(history.calls(), expected);
    }
}
