//! Executes runs on one or several threads, and counts what all of them do.

use super::forward::{LaneRunner, RoundTrips, sender_of};
use super::options::{RawMode, RawRun};
use super::ports::{RawPort, RawPorts};
use super::report::{Interval, PortCount, RawReport};
use crate::machine::pin_thread;
use crate::measurement::{Quantiles, new_histogram};
use anyhow::anyhow;
use dpdk::{Eal, ExternalRegion};
use nix::sys::signalfd::SignalFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Turns of a thread between two publications of its counts.
const TURNS_PER_PUBLICATION: u32 = 64;

/// The threads of a run: the calling one, which also reports, and further ones.
pub(super) struct RawRunner {
    lanes: Vec<LaneRunner>,
    /// Keep the memory of generated payload readable for the ports' devices.
    _regions: Vec<ExternalRegion>,
    /// Counts of the threads other than the first.
    published: Vec<PublishedCounts>,
    ports: RawPorts,
    signals: SignalFd,
    is_stopped: bool,
}

/// Counts of one thread for each port, which others may read at any time.
struct PublishedCounts(Vec<[AtomicU64; 5]>);

impl PublishedCounts {
    fn new(ports: usize) -> PublishedCounts {
        PublishedCounts((0..ports).map(|_| Default::default()).collect())
    }

    fn publish(&self, counts: &[PortCount]) {
        for (cells, PortCount { rx, tx }) in self.0.iter().zip(counts) {
            let values = [rx.frames, rx.bytes, tx.frames, tx.bytes, tx.dropped];
            for (cell, value) in cells.iter().zip(values) {
                // Independent counts: no order is needed.
                cell.store(value, Ordering::Relaxed);
            }
        }
    }

    fn add_to(&self, counts: &mut [PortCount]) {
        for (cells, PortCount { rx, tx }) in self.0.iter().zip(counts) {
            let sums = [
                &mut rx.frames,
                &mut rx.bytes,
                &mut tx.frames,
                &mut tx.bytes,
                &mut tx.dropped,
            ];
            for (cell, sum) in cells.iter().zip(sums) {
                *sum += cell.load(Ordering::Relaxed);
            }
        }
    }
}

impl RawRunner {
    pub(super) fn new(mut ports: RawPorts, signals: SignalFd) -> anyhow::Result<RawRunner> {
        let lanes = ports.take_lanes().into_iter().map(LaneRunner::new);
        let lanes = lanes.collect::<anyhow::Result<Vec<_>>>()?;
        let takes_references = |port: &RawPort| port.description.takes_references;
        let mut regions = Vec::new();
        if ports.list.iter().all(takes_references) {
            for lane in &lanes {
                regions.extend(ports.map_memory(lane.memory())?);
            }
        }
        let published = (1..lanes.len()).map(|_| PublishedCounts::new(ports.list.len()));
        Ok(RawRunner {
            published: published.collect(),
            lanes,
            _regions: regions,
            ports,
            signals,
            is_stopped: false,
        })
    }

    /// The ports, in the order of the counts.
    pub(super) fn ports(&self) -> &[RawPort] {
        &self.ports.list
    }

    /// Cores of the threads.
    pub(super) fn cores(&self) -> Vec<usize> {
        self.lanes.iter().map(LaneRunner::core).collect()
    }

    /// Returns true if a signal requested the end.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// True if DPDK's memory is in hugepages.
    pub(super) fn has_hugepages(&self) -> bool {
        self.ports.dpdk.hugepages
    }

    /// Executes one run. `on_interval` is called with the counts of each interval.
    pub(super) fn run(
        &mut self,
        run: &RawRun,
        mut on_interval: impl FnMut(&[RawPort], &Interval),
    ) -> anyhow::Result<RawReport> {
        let ports = &self.ports.list;
        let mbps = ports[sender_of(run.mode, ports.len())]
            .description
            .link_mbps;
        let rate = run
            .offered
            .map(|offered| offered.frames_per_second(run.size, mbps));
        // Each thread offers its share.
        let share = rate.transpose()?.map(|rate| rate / self.lanes.len() as f64);
        let mut trips = RoundTrips {
            times: new_histogram()?,
            lost: 0,
        };
        let (eal, published) = (&self.ports.dpdk.eal, &self.published);
        let Some((first, others)) = self.lanes.split_first_mut() else {
            return Err(anyhow!("no core runs"));
        };
        let counts_with = |own: &[PortCount]| sum_counts(ports, own, published);
        let before = counts_with(first.counts());
        let mut series = Vec::new();
        let stop = &AtomicBool::new(false);
        let (begin, end) = std::thread::scope(|scope| {
            let pairs = others.iter_mut().zip(published);
            let threads: Vec<_> = pairs
                .map(|(lane, counts)| {
                    scope.spawn(move || run_lane(lane, run, share, eal, counts, stop))
                })
                .collect();
            let begin = Instant::now();
            let mut last = (begin, before.clone());
            first.begin(run, share);
            loop {
                first.turn(run, &mut trips);
                let now = Instant::now();
                let is_over = run.time.is_some_and(|time| now - begin >= time);
                if is_over || now - last.0 >= run.interval {
                    let counts = counts_with(first.counts());
                    let interval = Interval::between(&last, (now, &counts), begin);
                    on_interval(ports, &interval);
                    series.push(interval.directions());
                    last = (now, counts);
                    self.is_stopped |= matches!(self.signals.read_signal(), Ok(Some(_)));
                    let has_failed = threads.iter().any(|thread| thread.is_finished());
                    if is_over || self.is_stopped || has_failed {
                        break;
                    }
                }
            }
            stop.store(true, Ordering::Relaxed);
            let end = Instant::now();
            first.receive_rest(self.is_stopped);
            for thread in threads {
                let outcome = thread.join();
                outcome.unwrap_or_else(|_| Err(anyhow!("a thread of the run panicked")))?;
            }
            anyhow::Ok((begin, end))
        })?;
        let counts = counts_with(first.counts());
        let whole = Interval::between(&(begin, before), (end, &counts), begin);
        let mut report = RawReport::new(run, ports, &whole);
        report.series = series;
        if run.mode == RawMode::PingPong {
            report.round_trip_us = (!trips.times.is_empty()).then(|| Quantiles::from(&trips.times));
            report.lost = trips.lost;
        }
        Ok(report)
    }
}

/// Executes a run on a thread other than the first, until `stop` is set.
fn run_lane(
    lane: &mut LaneRunner,
    run: &RawRun,
    frames_per_second: Option<f64>,
    eal: &Eal,
    published: &PublishedCounts,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    // The calling thread, whose cores this one inherits, has only one.
    pin_thread(lane.core())?;
    let _registered = eal.register_thread()?;
    // Round trips are measured on one thread only.
    let mut no_trips = RoundTrips {
        times: new_histogram()?,
        lost: 0,
    };
    lane.begin(run, frames_per_second);
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..TURNS_PER_PUBLICATION {
            lane.turn(run, &mut no_trips);
        }
        published.publish(lane.counts());
    }
    lane.receive_rest(false);
    published.publish(lane.counts());
    Ok(())
}

/// Counts of all threads, including received frames that the drivers lost.
fn sum_counts(
    ports: &[RawPort],
    own: &[PortCount],
    published: &[PublishedCounts],
) -> Vec<PortCount> {
    let mut counts = own.to_vec();
    for others in published {
        others.add_to(&mut counts);
    }
    for (port, count) in ports.iter().zip(&mut counts) {
        if let Ok(counters) = port.port.read_counters() {
            count.rx.dropped = counters.rx_missed + counters.rx_no_buffer;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::report::FrameCount;

    #[test]
    fn counts_of_several_threads_add_up() {
        let direction = |frames| FrameCount {
            frames,
            bytes: 10 * frames,
            dropped: frames / 2,
        };
        let count = PortCount {
            rx: direction(4),
            tx: direction(6),
        };
        let published = PublishedCounts::new(1);
        published.publish(&[count]);
        let mut sum = vec![count];
        published.add_to(&mut sum);
        published.publish(&[count]);
        assert_eq!((sum[0].rx.frames, sum[0].rx.bytes), (8, 80));
        assert_eq!((sum[0].tx.frames, sum[0].tx.dropped), (12, 6));
        // Losses at reception are counted by the port, not by threads.
        assert_eq!(sum[0].rx.dropped, 2);
    }
}
