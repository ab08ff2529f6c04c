//! What stands in `deploy`, at work: the daemons as the chart runs them, and Prometheus as it ships.

mod kubelet;
mod prometheus;
mod roles;
