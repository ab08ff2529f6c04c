//! The relay over a real database and a real broker, pass by pass and as a process.

mod drain;
mod floors;
mod order;
mod plans;
mod processes;
mod stuck;
mod yard;
