//! The relay over a real database and a real broker, pass by pass and as a process.

mod drain;
mod events;
mod held;
mod plans;
mod processes;
mod troubles;
mod yard;
