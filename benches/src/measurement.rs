//! Raw results of a transfer, and the units of results.

use crate::live::LiveView;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Options of one measurement run.
pub struct RunOptions {
    /// Duration.
    pub time: Duration,
    /// Also count messages in intervals of this length.
    pub interval: Option<Duration>,
    /// Silence before each round trip.
    pub pause: Option<Duration>,
    /// Live view updated during the run.
    pub live: Option<LiveView>,
}

/// Microseconds at three quantiles, and the longest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// The median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// The longest.
    #[serde(default)]
    pub max: f64,
}

impl From<&Histogram<u64>> for Quantiles {
    /// Converts from nanoseconds.
    fn from(histogram: &Histogram<u64>) -> Quantiles {
        let us = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
        Quantiles {
            p50: us(0.5),
            p99: us(0.99),
            p999: us(0.999),
            max: us(1.0),
        }
    }
}

/// Raw results of a transfer.
#[derive(Debug, Clone)]
pub struct Measurement {
    /// Messages completed while the time was measured.
    pub messages: u64,
    /// Payload bytes of these messages.
    pub bytes: u64,
    /// Measured time, without the warm-up.
    pub time: Duration,
    /// All messages, including those of the warm-up.
    pub all_messages: u64,
    /// Total time, including the warm-up.
    pub whole_time: Duration,
    /// Latency in nanoseconds: of a round trip, or from posting to completion.
    pub latency: Histogram<u64>,
    /// Messages whose data was verified.
    pub verified: u64,
    /// Messages completed in each interval, if requested.
    pub series: Vec<u64>,
}

impl Measurement {
    /// Adds the results of another thread that measured at the same time.
    pub fn merge(&mut self, other: &Measurement) -> anyhow::Result<()> {
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.time = self.time.max(other.time);
        self.all_messages += other.all_messages;
        self.whole_time = self.whole_time.max(other.whole_time);
        self.verified += other.verified;
        for (own, others) in self.series.iter_mut().zip(&other.series) {
            *own += others;
        }
        self.latency.add(&other.latency).map_err(anyhow::Error::new)
    }
}

/// A histogram for times from a nanosecond to a minute, to three digits.
pub fn new_histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(anyhow::Error::new)
}

/// Gigabits per second of `bytes` in `time`.
pub fn gigabits_per_second(bytes: u64, time: Duration) -> f64 {
    bytes as f64 * 8.0 / time.as_secs_f64() / 1e9
}

/// Formats a number of bytes: 65536 as "64 KiB".
pub fn format_bytes(size: u32) -> String {
    match size {
        _ if size >= 1 << 20 && size.is_multiple_of(1 << 20) => format!("{} MiB", size >> 20),
        _ if size >= 1 << 10 && size.is_multiple_of(1 << 10) => format!("{} KiB", size >> 10),
        _ => format!("{size} B"),
    }
}
