//! The relay over a real database and a real broker, pass by pass and as a process.

mod drain;
mod events;
mod floors;
mod held;
mod memory;
mod order;
mod plans;
mod processes;
mod refused;
mod shared;
mod silent;
mod stuck;
mod troubles;
mod yard;
