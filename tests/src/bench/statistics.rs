//! Numbers about many measurements.

use std::time::Duration;

/// A count as a number to calculate with.
#[expect(clippy::cast_precision_loss, reason = "counts of a benchmark lie far below 2^53")]
pub(crate) fn float(count: usize) -> f64 {
    count as f64
}

/// The value that a share of the measurements does not exceed, by the nearest rank; `None` without measurements.
pub(crate) fn percentile(measured: &[Duration], percent: usize) -> Option<Duration> {
    let mut sorted = measured.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// The greatest of the measurements.
pub(crate) fn greatest(measured: &[f64]) -> f64 {
    measured.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_one_of_the_measurements() {
        let measured: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(percentile(&measured, 50), Some(Duration::from_millis(100)));
        assert_eq!(percentile(&measured, 99), Some(Duration::from_millis(198)));
        assert_eq!(percentile(&measured, 100), Some(Duration::from_millis(200)));
        assert_eq!(percentile(&measured[..1], 50), Some(Duration::from_millis(200)));
        assert_eq!(percentile(&[], 50), None);
    }
}
