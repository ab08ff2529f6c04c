//! Logs and metrics of a daemon.

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use metrics_process::Collector;
use metrics_util::MetricKindMask;
use std::sync::LazyLock;
use std::time::Duration;
use tracing_subscriber::EnvFilter;

use crate::metrics::{Label, Metric};
use crate::options::{LogFormat, LogOptions};

/// Buckets of durations, in seconds: from a local commit to a provider that is about to time out.
const SECONDS: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0];
/// Buckets of counts of events.
const EVENTS: [f64; 8] = [1.0, 5.0, 10.0, 50.0, 100.0, 250.0, 500.0, 1000.0];

/// Gauges that nobody refreshed for this long are gone: absent is better than wrong.
const GAUGES_LAST: Duration = Duration::from_mins(1);

const BUILD_INFO: &str = "semel_build_info";

/// The metrics of every daemon.
pub const METRICS: [Metric; 9] = [
    Metric::gauge(BUILD_INFO, "1, with the version as label.").with(&[Label::open("version")]),
    Metric::counter("process_cpu_seconds_total", "Processor time."),
    Metric::gauge("process_resident_memory_bytes", "Resident memory."),
    Metric::gauge("process_virtual_memory_bytes", "Virtual memory."),
    Metric::gauge("process_virtual_memory_max_bytes", "Most virtual memory that the process may have."),
    Metric::gauge("process_open_fds", "Open file descriptors."),
    Metric::gauge("process_max_fds", "Most file descriptors that the process may open."),
    Metric::gauge("process_threads", "Threads."),
    Metric::gauge("process_start_time_seconds", "Unix time of the start."),
];

static PROCESS: LazyLock<Collector> = LazyLock::new(|| {
    let collector = Collector::default();
    collector.describe();
    collector
});

/// Starts logging to standard error, one line per record.
///
/// A panic is one line too, with its place but without its message, which may quote what a client sent. It stands in the
/// span of the work that panicked.
pub fn start_logs(options: &LogOptions) {
    // Checked already, when the options were read.
    let filter = EnvFilter::new(&options.log_filter);
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second call, in a test, keeps the first one's subscriber.
    let _ = match options.log_format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => builder.with_ansi(false).try_init(),
    };
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(place, "panicked");
    }));
}

/// Installs the metrics recorder of this process.
///
/// # Errors
///
/// When one is installed already.
pub fn start_metrics(version: &'static str) -> Result<PrometheusHandle, BuildError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_events".to_owned()), &EVENTS)?
        .idle_timeout(MetricKindMask::GAUGE, Some(GAUGES_LAST))
        .install_recorder()?;
    METRICS[0].describe();
    let upkeep = handle.clone();
    tokio::spawn(async move {
        // Without it histograms keep every sample until somebody scrapes.
        let mut tick = tokio::time::interval(Duration::from_secs(5));
        loop {
            tick.tick().await;
            metrics::gauge!(BUILD_INFO, "version" => version).set(1.0);
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

/// Reads this process's memory, processor time and file descriptors.
pub(crate) fn refresh_process_metrics() {
    PROCESS.collect();
}
