//! Deliveries that wait behind one of their aggregate that is being handled.
//!
//! A lane is there while a task works on it, so there is one task per aggregate at most. What is held is bounded by the
//! prefetch: none of it is acknowledged.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::aggregate::Aggregate;

#[derive(Debug)]
pub(crate) struct Lanes<D>(Mutex<HashMap<Aggregate, VecDeque<D>>>);

/// Whether a lane has a task.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Lane {
    /// It has one, which comes to the delivery.
    Busy,
    /// It is new and needs one.
    Idle,
}

impl<D> Default for Lanes<D> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<D> Lanes<D> {
    /// Puts a delivery behind those of its aggregate.
    pub(crate) fn join(&self, aggregate: &Aggregate, delivery: D) -> Lane {
        let mut lanes = self.lock();
        if let Some(lane) = lanes.get_mut(aggregate) {
            lane.push_back(delivery);
            return Lane::Busy;
        }
        lanes.insert(aggregate.clone(), VecDeque::from([delivery]));
        Lane::Idle
    }

    /// Takes the next delivery out of a lane; an empty one is gone, and its task ends.
    pub(crate) fn next(&self, aggregate: &Aggregate) -> Option<D> {
        let mut lanes = self.lock();
        let next = lanes.get_mut(aggregate)?.pop_front();
        if next.is_none() {
            lanes.remove(aggregate);
        }
        next
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Aggregate, VecDeque<D>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_worked_by_one_task_until_it_is_empty() {
        let aggregate = |id| Aggregate::of(Some("order"), Some(id)).unwrap().unwrap();
        let (seven, eight) = (aggregate("7"), aggregate("8"));
        let lanes = Lanes::default();
        assert_eq!(lanes.join(&seven, 1), Lane::Idle);
        assert_eq!(lanes.join(&eight, 2), Lane::Idle);
        assert_eq!(lanes.next(&seven), Some(1));
        // Its task is at work with what it took.
        assert_eq!(lanes.join(&seven, 3), Lane::Busy);
        assert_eq!((lanes.next(&seven), lanes.next(&seven)), (Some(3), None));
        assert_eq!(lanes.join(&seven, 4), Lane::Idle);
    }
}
