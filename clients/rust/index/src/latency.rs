//! How long calls took, in the buckets of the index in Python.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// In microseconds.
const BOUNDS: [u64; 17] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 10_000_000, 30_000_000,
];

/// Durations of one call.
#[derive(Default)]
pub struct Latency {
    counts: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Latency {
    /// Counts from now until what it returns is dropped: however the call ends, its caller's leave included.
    pub fn begin(&self) -> Running<'_> {
        Running { latency: self, began: Instant::now() }
    }

    fn add(&self, took: Duration) {
        let at = BOUNDS.partition_point(|bound| Duration::from_micros(*bound) < took);
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The samples of ``name``, with ``labels``, in the text that Prometheus reads.
    pub fn write(&self, text: &mut String, name: &str, labels: &str) {
        let mut sum = 0;
        let bounds = BOUNDS.iter().map(|bound| format!("{:?}", *bound as f64 / 1e6)).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&self.counts) {
            sum += count.load(Ordering::Relaxed);
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {sum}");
        }
        let seconds = self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        let _ = writeln!(text, "{name}_count{{{labels}}} {sum}\n{name}_sum{{{labels}}} {seconds}");
    }
}

/// A call that runs.
pub struct Running<'a> {
    latency: &'a Latency,
    began: Instant,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.latency.add(self.began.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_counts_in_its_bucket_and_in_all_above() {
        let latency = Latency::default();
        for microseconds in [100, 101, 40_000_000] {
            latency.add(Duration::from_micros(microseconds));
        }
        let mut text = String::new();
        latency.write(&mut text, "x", "method=\"m\"");
        let line = |wanted: &str| assert!(text.lines().any(|line| line == wanted), "{wanted} is not in\n{text}");
        line("x_bucket{method=\"m\",le=\"0.0001\"} 1");
        line("x_bucket{method=\"m\",le=\"0.00025\"} 2");
        line("x_bucket{method=\"m\",le=\"30.0\"} 2");
        line("x_bucket{method=\"m\",le=\"+Inf\"} 3");
        line("x_count{method=\"m\"} 3");
        line("x_sum{method=\"m\"} 40.000201");
    }
}
