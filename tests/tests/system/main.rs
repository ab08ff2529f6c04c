//! Whole systems of real processes: how they start, stop, crash, and whether all places agree afterwards.

mod brokers;
mod certificates;
mod consumers;
mod crashes;
mod hints;
mod letters;
mod links;
mod reconciliation;
mod starts;
mod stops;
mod traces;
