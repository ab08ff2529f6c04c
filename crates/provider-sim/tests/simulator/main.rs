//! The simulator over its own gRPC: the contract, the ordered faults, the book, and the process.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers of tests fail by panicking, too")]

mod book;
mod contract;
mod faults;
mod late;
mod process;
mod rig;
