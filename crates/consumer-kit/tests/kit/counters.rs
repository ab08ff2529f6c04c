//! A metrics recorder that tests can read; counters of different consumers do not mix.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Once};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use semel_consumer_kit::metrics::{MESSAGES, PARKED};

/// By consumer and outcome.
type Counts = HashMap<(String, String), Arc<AtomicU64>>;

static COUNTERS: LazyLock<Mutex<Counts>> = LazyLock::new(Mutex::default);
static PARKED_EVENTS: LazyLock<Mutex<HashMap<String, Arc<AtomicU64>>>> = LazyLock::new(Mutex::default);
static INSTALLED: Once = Once::new();

struct Counters;

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let label = |name| {
            let found = key.labels().find(|label| label.key() == name);
            found.map(|label| label.value().to_owned()).unwrap_or_default()
        };
        if key.name() != MESSAGES {
            return Counter::noop();
        }
        let mut counters = COUNTERS.lock().unwrap();
        Counter::from_arc(Arc::clone(counters.entry((label("consumer"), label("outcome"))).or_default()))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let Some(consumer) = key.labels().find(|_| key.name() == PARKED) else { return Gauge::noop() };
        let mut gauges = PARKED_EVENTS.lock().unwrap();
        Gauge::from_arc(Arc::clone(gauges.entry(consumer.value().to_owned()).or_default()))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

pub(crate) fn install() {
    INSTALLED.call_once(|| metrics::set_global_recorder(Counters).unwrap());
}

/// The consumer's messages by outcome, in the order effect, duplicate, retried, dead, invalid.
pub(crate) fn of(consumer: &str) -> [u64; 5] {
    let counters = COUNTERS.lock().unwrap();
    ["effect", "duplicate", "retried", "dead", "invalid"].map(|outcome| {
        let counter = counters.get(&(consumer.to_owned(), outcome.to_owned()));
        counter.expect("every counter is there from the start").load(Ordering::Relaxed)
    })
}

/// How many of the consumer's messages were parked.
pub(crate) fn parked(consumer: &str) -> u64 {
    let counters = COUNTERS.lock().unwrap();
    counters[&(consumer.to_owned(), "parked".to_owned())].load(Ordering::Relaxed)
}

/// How many events are parked, as the consumer has told last.
pub(crate) fn backlog(consumer: &str) -> Option<f64> {
    let gauges = PARKED_EVENTS.lock().unwrap();
    gauges.get(consumer).map(|gauge| f64::from_bits(gauge.load(Ordering::Relaxed)))
}
