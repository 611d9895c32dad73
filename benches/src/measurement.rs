//! Raw results of a transfer, and the units of results.

use crate::live::LiveView;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// End of one measurement run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunLimits {
    /// After this time.
    Time(Duration),
    /// After this number of messages.
    Messages(u64),
}

/// Longest warm-up before a run.
const WARM_UP: Duration = Duration::from_millis(300);

impl RunLimits {
    /// Duration of the warm-up.
    pub fn warm_up(self) -> Duration {
        match self {
            RunLimits::Time(time) => (time / 4).min(WARM_UP),
            RunLimits::Messages(_) => WARM_UP,
        }
    }

    /// Returns true if `elapsed` or `messages` reach the limit.
    #[inline]
    pub fn is_over(self, elapsed: Duration, messages: u64) -> bool {
        match self {
            RunLimits::Time(time) => elapsed >= time,
            RunLimits::Messages(limit) => messages >= limit,
        }
    }

    /// Elapsed time, and the whole time, estimated from the messages if they limit the run.
    pub fn progress(self, elapsed: Duration, messages: u64) -> (Duration, Duration) {
        match self {
            RunLimits::Time(time) => (elapsed, time),
            RunLimits::Messages(limit) => {
                let whole = limit as f64 / messages.max(1) as f64;
                (elapsed, elapsed.mul_f64(whole.clamp(1.0, 1e6)))
            }
        }
    }
}

/// Options of one measurement run.
pub struct RunOptions {
    /// Its end.
    pub limits: RunLimits,
    /// Also count messages in intervals of this length.
    pub interval: Option<Duration>,
    /// Silence before each round trip.
    pub pause: Option<Duration>,
    /// Live view updated during the run.
    pub live: Option<LiveView>,
}

/// Microseconds at three quantiles, and statistics of all values.
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
    /// The shortest.
    #[serde(default)]
    pub min: f64,
    /// The average.
    #[serde(default)]
    pub avg: f64,
    /// The standard deviation.
    #[serde(default)]
    pub stddev: f64,
}

impl From<&Histogram<u64>> for Quantiles {
    /// Converts from nanoseconds.
    fn from(histogram: &Histogram<u64>) -> Quantiles {
        let us = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
        // The histogram has three digits, so that further ones mean nothing.
        let rounded = |ns: f64| ns.round() / 1e3;
        let lowest = match histogram.is_empty() {
            true => 0,
            false => histogram.min(),
        };
        Quantiles {
            p50: us(0.5),
            p99: us(0.99),
            p999: us(0.999),
            max: us(1.0),
            min: lowest as f64 / 1e3,
            avg: rounded(histogram.mean()),
            stddev: rounded(histogram.stdev()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_by_time_or_by_messages() {
        let seconds = Duration::from_secs;
        let by_time = RunLimits::Time(seconds(2));
        assert!(by_time.is_over(seconds(2), 0) && !by_time.is_over(seconds(1), u64::MAX));
        assert_eq!(by_time.progress(seconds(1), 9), (seconds(1), seconds(2)));
        let by_messages = RunLimits::Messages(100);
        assert!(by_messages.is_over(Duration::ZERO, 100) && !by_messages.is_over(seconds(9), 99));
        assert_eq!(
            by_messages.progress(seconds(1), 25),
            (seconds(1), seconds(4))
        );
    }

    #[test]
    fn statistics_are_in_microseconds() {
        let mut histogram = new_histogram().unwrap();
        assert_eq!(Quantiles::from(&histogram).min, 0.0);
        for ns in [1000, 3000] {
            histogram.record(ns).unwrap();
        }
        let Quantiles {
            min, avg, stddev, ..
        } = Quantiles::from(&histogram);
        let is_near = |value: f64, expected: f64| (value - expected).abs() < 0.01;
        assert!(is_near(min, 1.0) && is_near(avg, 2.0) && is_near(stddev, 1.0));
    }
}
