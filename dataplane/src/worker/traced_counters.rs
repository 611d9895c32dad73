//! Counters that a trace compares before and after each step.

use siw_tcp::StackStats;

use super::drop_reasons::{DropCounts, DropReason};
use crate::trace::TraceStep;

/// Drops of frames, with their names in the statistics and their meanings.
const TX_REFUSED: &str = "TX_REFUSED";
const HOST_QUEUE_FULL: &str = "HOST_QUEUE_FULL";

/// Counters of a worker at one moment.
pub(super) struct TracedCounters {
    pub ports: Vec<PortCounters>,
    pub drops: DropCounts,
    /// Counters of requests and completions, with their names in the statistics.
    pub work: [(&'static str, u64); 5],
}

/// Counters of a port.
pub(super) struct PortCounters {
    pub tcp: StackStats,
    pub refused: u64,
    pub host_dropped: u64,
}

/// Counters that moved, with the amounts.
pub(super) fn moved(
    before: impl Iterator<Item = (&'static str, u64)>,
    after: impl Iterator<Item = (&'static str, u64)>,
) -> impl Iterator<Item = (&'static str, u64)> {
    let pairs = before.zip(after);
    pairs.filter_map(|((name, before), (_, after))| {
        let count = after.saturating_sub(before);
        (count > 0).then_some((name, count))
    })
}

impl TracedCounters {
    /// Counters of a port that moved since an earlier moment.
    pub fn port_steps(&self, before: &TracedCounters, port: usize) -> Vec<TraceStep> {
        let (Some(before), Some(after)) = (before.ports.get(port), self.ports.get(port)) else {
            return Vec::new();
        };
        let tcp = moved(before.tcp.mib_counters(), after.tcp.mib_counters());
        let tcp = tcp.map(|(name, count)| TraceStep {
            name,
            count,
            drop: StackStats::is_drop(name).then(|| StackStats::meaning_of(name)),
        });
        let frames = |counters: &PortCounters| {
            [
                (TX_REFUSED, counters.refused),
                (HOST_QUEUE_FULL, counters.host_dropped),
            ]
        };
        let frames = moved(frames(before).into_iter(), frames(after).into_iter());
        let frames = frames.map(|(name, count)| TraceStep {
            name,
            count,
            drop: Some("frames that the port or the kernel did not take"),
        });
        tcp.chain(frames).collect()
    }

    /// Counters of the worker that moved since an earlier moment.
    pub fn work_steps(&self, before: &TracedCounters) -> Vec<TraceStep> {
        let work = moved(before.work.into_iter(), self.work.into_iter());
        let work = work.map(|(name, count)| TraceStep {
            name,
            count,
            drop: None,
        });
        let named = |counts: &DropCounts| -> Vec<(DropReason, u64)> { counts.iter().collect() };
        let drops = named(&before.drops).into_iter().zip(named(&self.drops));
        let drops = drops.filter_map(|((reason, before), (_, after))| {
            let count = after.saturating_sub(before);
            (count > 0).then_some(TraceStep {
                name: reason.name(),
                count,
                drop: Some(reason.meaning()),
            })
        });
        work.chain(drops).collect()
    }
}
