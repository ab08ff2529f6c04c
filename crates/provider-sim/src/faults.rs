//! The ordered faults: which one a call meets. Pure; what a fault then does is `counter`'s.

use std::collections::HashMap;
use std::time::Duration;

use semel_proto::provider::v1::{Call, FaultKind};

mod order;

pub(crate) use order::read;

/// How many faults can be ordered at a time.
const MOST_FAULTS: usize = 1000;
/// How many keys can be stuck at a time.
const MOST_STUCK: usize = 10_000;

/// What goes wrong, with what it needs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Fault {
    AnswerLost,
    AnswerUnavailable,
    Refuse,
    /// With a delay, a hold, or both: whichever comes first.
    ApplyLate {
        delay: Option<Duration>,
        hold: Option<String>,
    },
    Flapping,
    Decline {
        code: String,
    },
    Sticky {
        applied: bool,
    },
    InUse,
    HoldBefore {
        hold: String,
    },
    HoldAfter {
        hold: String,
    },
    Garbage,
    WrongKey,
    WrongAmount,
    Outage,
    Latency {
        delay: Duration,
    },
}

impl Fault {
    /// As it is named outside.
    pub(crate) fn kind(&self) -> FaultKind {
        match self {
            Self::AnswerLost => FaultKind::AnswerLost,
            Self::AnswerUnavailable => FaultKind::AnswerUnavailable,
            Self::Refuse => FaultKind::Refuse,
            Self::ApplyLate { .. } => FaultKind::ApplyLate,
            Self::Flapping => FaultKind::Flapping,
            Self::Decline { .. } => FaultKind::Decline,
            Self::Sticky { .. } => FaultKind::Sticky500,
            Self::InUse => FaultKind::InUse,
            Self::HoldBefore { .. } => FaultKind::HoldBeforeApply,
            Self::HoldAfter { .. } => FaultKind::HoldAfterApply,
            Self::Garbage => FaultKind::Garbage,
            Self::WrongKey => FaultKind::WrongKey,
            Self::WrongAmount => FaultKind::WrongAmount,
            Self::Outage => FaultKind::Outage,
            Self::Latency { .. } => FaultKind::Latency,
        }
    }

    /// The hold at which it waits.
    pub(crate) fn hold(&self) -> Option<&str> {
        match self {
            Self::ApplyLate { hold, .. } => hold.as_deref(),
            Self::HoldBefore { hold } | Self::HoldAfter { hold } => Some(hold),
            _ => None,
        }
    }
}

/// A fault that was ordered.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Rule {
    pub(crate) fault: Fault,
    /// `None`: any.
    pub(crate) call: Option<Call>,
    /// `None`: any.
    pub(crate) key: Option<String>,
    /// How often it still acts; `None`: until it is lifted.
    pub(crate) left: Option<u32>,
}

impl Rule {
    fn matches(&self, call: Call, key: &str) -> bool {
        matches!(self.fault, Fault::Outage)
            || (self.call.is_none_or(|wanted| wanted == call)
                && self.key.as_ref().is_none_or(|wanted| wanted == key))
    }
}

/// A fault that a call met, by its number.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Hit {
    pub(crate) number: u64,
    pub(crate) fault: Fault,
}

/// All ordered faults.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    rules: Vec<Standing>,
    /// Keys that are answered INTERNAL for ever, and the fault that did it.
    stuck: HashMap<(Call, String), u64>,
    last: u64,
}

#[derive(Debug)]
struct Standing {
    number: u64,
    rule: Rule,
    /// How many calls it matched.
    met: u64,
}

/// There are as many faults as there may be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct TooMany;

impl Plan {
    /// Adds a fault, and returns its number.
    pub(crate) fn add(&mut self, rule: Rule) -> Result<u64, TooMany> {
        if self.rules.len() >= MOST_FAULTS {
            return Err(TooMany);
        }
        self.last += 1;
        self.rules.push(Standing { number: self.last, rule, met: 0 });
        Ok(self.last)
    }

    /// Takes a fault back, or all of them.
    pub(crate) fn lift(&mut self, number: Option<u64>) {
        self.rules.retain(|standing| number.is_some_and(|number| standing.number != number));
        self.stuck.retain(|_, stuck_by| number.is_some_and(|number| *stuck_by != number));
    }

    /// Returns what a call meets, in the order in which it acts: latencies, then one fault at most.
    pub(crate) fn meet(&mut self, call: Call, key: &str) -> Vec<Hit> {
        let mut hits: Vec<_> = self.latencies(call, key).collect();
        hits.extend(self.first(call, key));
        self.rules.retain(|standing| standing.rule.left != Some(0));
        hits
    }

    fn latencies(&mut self, call: Call, key: &str) -> impl Iterator<Item = Hit> {
        let matching = self.rules.iter_mut().filter(move |standing| standing.rule.matches(call, key));
        matching.filter(|standing| matches!(standing.rule.fault, Fault::Latency { .. })).map(Standing::act)
    }

    fn first(&mut self, call: Call, key: &str) -> Option<Hit> {
        if let Some(&number) = self.stuck.get(&(call, key.to_owned())) {
            return Some(Hit { number, fault: Fault::Sticky { applied: false } });
        }
        for standing in &mut self.rules {
            let rule = &standing.rule;
            if !rule.matches(call, key) || matches!(rule.fault, Fault::Latency { .. }) {
                continue;
            }
            standing.met += 1;
            if rule.fault == Fault::Flapping && standing.met.is_multiple_of(2) {
                continue;
            }
            let hit = standing.act();
            if matches!(hit.fault, Fault::Sticky { .. }) && self.stuck.len() < MOST_STUCK {
                self.stuck.insert((call, key.to_owned()), hit.number);
            }
            return Some(hit);
        }
        None
    }
}

impl Standing {
    fn act(&mut self) -> Hit {
        self.rule.left = self.rule.left.map(|left| left.saturating_sub(1));
        Hit { number: self.number, fault: self.rule.fault.clone() }
    }
}

#[cfg(test)]
mod tests;
