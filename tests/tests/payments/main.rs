//! Payments and refunds over real processes: whatever dies, freezes, is late or is restored, money moves once and everybody is told so.

mod audit;
mod canceling;
mod crashes;
mod frozen;
mod outage;
mod parallel;
mod refunds;
mod restore;
mod rollback;
mod stops;
mod stripe;
mod support;
mod wire;
