//! Strict order per aggregate, pipelined across aggregates.
//!
//! A wave takes the first event of every aggregate; the next wave takes the next one of those that were confirmed. So no
//! event is on its way while an earlier one of its aggregate is not known to be safe, and a batch of a thousand aggregates
//! still fills the channel.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

use semel_core::outbox::drain::PendingEvent;

/// The events of a batch, queued per aggregate.
#[derive(Debug)]
pub(crate) struct Waves {
    aggregates: Vec<VecDeque<PendingEvent>>,
    /// Which aggregate each event of the last wave belongs to.
    on_their_way: Vec<usize>,
}

/// What became of one event of a wave.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fate {
    /// It is safe with the broker: its aggregate goes on.
    Safe,
    /// It is not, or not known to be: its aggregate stops here for this batch.
    Stopped,
}

impl Waves {
    /// Queues events, which are in id order.
    #[must_use]
    pub(crate) fn new(events: Vec<PendingEvent>) -> Self {
        let mut names: HashMap<(&str, &str), usize> = HashMap::with_capacity(events.len());
        let mut places = Vec::with_capacity(events.len());
        for event in &events {
            let next = names.len();
            places.push(*names.entry((&event.aggregate_type, &event.aggregate_id)).or_insert(next));
        }
        let mut aggregates = Vec::new();
        aggregates.resize_with(names.len(), VecDeque::new);
        for (event, place) in events.into_iter().zip(places) {
            aggregates[place].push_back(event);
        }
        Self { aggregates, on_their_way: Vec::new() }
    }

    /// Takes the next wave, at most `limit` events; empty when the batch is done.
    ///
    /// Aggregates with the most events left go first, so that there are no more waves than the longest queue has events.
    pub(crate) fn next_wave(&mut self, limit: usize) -> Vec<PendingEvent> {
        let mut ready: Vec<usize> =
            (0..self.aggregates.len()).filter(|&at| !self.aggregates[at].is_empty()).collect();
        ready.sort_by_key(|&at| Reverse(self.aggregates[at].len()));
        ready.truncate(limit);
        self.on_their_way.clear();
        let mut wave = Vec::with_capacity(ready.len());
        for at in ready {
            if let Some(event) = self.aggregates[at].pop_front() {
                self.on_their_way.push(at);
                wave.push(event);
            }
        }
        wave
    }

    /// Takes in what became of the last wave, in its order.
    pub(crate) fn settle(&mut self, fates: &[Fate]) {
        for (at, fate) in std::mem::take(&mut self.on_their_way).into_iter().zip(fates) {
            match fate {
                Fate::Safe => {}
                Fate::Stopped => self.aggregates[at].clear(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::OffsetDateTime;
    use uuid::Uuid;

    fn event(id: i64, aggregate: &str) -> PendingEvent {
        PendingEvent {
            event_id: Uuid::from_u128(u128::try_from(id).unwrap()),
            id,
            lane: 0,
            aggregate_type: "order".to_owned(),
            aggregate_id: aggregate.to_owned(),
            aggregate_version: None,
            event_type: "OrderPlaced".to_owned(),
            payload: "{}".to_owned(),
            headers: sqlx::types::Json(std::collections::BTreeMap::new()),
            created_at: OffsetDateTime::UNIX_EPOCH,
        }
    }

    fn ids(wave: &[PendingEvent]) -> Vec<i64> {
        let mut ids: Vec<i64> = wave.iter().map(|event| event.id).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn a_wave_holds_one_event_per_aggregate_and_the_next_follows_only_after_a_confirm() {
        let mut waves =
            Waves::new(vec![event(1, "a"), event(2, "a"), event(3, "b"), event(4, "a"), event(5, "b")]);
        assert_eq!(ids(&waves.next_wave(10)), [1, 3]);
        waves.settle(&[Fate::Safe, Fate::Safe]);
        assert_eq!(ids(&waves.next_wave(10)), [2, 5]);
        waves.settle(&[Fate::Safe, Fate::Safe]);
        assert_eq!(ids(&waves.next_wave(10)), [4]);
        waves.settle(&[Fate::Safe]);
        assert!(waves.next_wave(10).is_empty());
    }

    #[test]
    fn an_aggregate_stops_at_its_failed_event_while_others_go_on() {
        let mut waves =
            Waves::new(vec![event(1, "a"), event(2, "b"), event(3, "a"), event(4, "b"), event(5, "a")]);
        // "a" has more left, so it is first in the wave.
        assert_eq!(waves.next_wave(10).iter().map(|event| event.id).collect::<Vec<_>>(), [1, 2]);
        waves.settle(&[Fate::Stopped, Fate::Safe]);
        assert_eq!(ids(&waves.next_wave(10)), [4]);
        waves.settle(&[Fate::Safe]);
        assert!(waves.next_wave(10).is_empty());
    }

    #[test]
    fn a_limited_wave_leaves_the_rest_for_the_next() {
        let mut waves = Waves::new((1..=5).map(|id| event(id, &format!("a{id}"))).collect());
        let mut seen = Vec::new();
        for size in [2, 2, 1, 0] {
            let wave = ids(&waves.next_wave(2));
            assert_eq!(wave.len(), size);
            seen.extend(wave);
            waves.settle(&vec![Fate::Safe; size]);
        }
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3, 4, 5]);
    }
}
