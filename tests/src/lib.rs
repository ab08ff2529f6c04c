//! The test bed, and the tests over real processes.
//!
//! It gives a demo, a test or a developer's session everything that is not ours: a Postgres and a
//! RabbitMQ ([`services`]), our daemons as child processes ([`process`]), faults on the wire between
//! them ([`proxy`]), and waiting on a condition instead of for a time ([`wait`]).
//!
//! It promises that what it starts ends: a daemon with its [`process::Daemon`] or with the test that
//! started it, a database and a virtual host with their value, the private servers with
//! `semel-bed services down`. Linux only: liveness is read from `/proc`.

pub mod bed;
pub mod bench;
pub mod calls;
pub mod client;
pub mod demo;
pub mod dev;
pub mod fuzz;
pub mod gate;
pub mod kubelet;
pub mod net;
pub mod output;
pub mod payments;
pub mod pid;
pub mod polyglot;
pub mod process;
pub mod progress;
pub mod prometheus;
pub mod provider;
pub mod proxy;
pub mod reconcile;
pub mod services;
pub mod skip;
pub mod stripe;
pub mod system;
pub mod tap;
pub mod wait;
pub mod workspace;
