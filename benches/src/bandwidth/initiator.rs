//! The initiator of a bandwidth measurement: keeps `depth` messages in flight on each
//! QP and times them. Driven by [`super::measure_bandwidth`].

use super::target::{BandwidthTarget, POLL_BATCH, describe_mismatch};
use crate::control_line::{CREDITS_OFFSET, receives_per_credit};
use crate::end::{TransferEnd, check_completion};
use crate::measurement::new_histogram;
use crate::pattern;
use crate::plan::Operation;
use anyhow::bail;
use hdrhistogram::Histogram;
use siw::{Error, SendData, SendWr, Sge, Wc, WrFlags};
use std::time::{Duration, Instant};

/// Maximum time between the completion of a message and the visibility of its data.
const PLACEMENT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum work requests in one call of `post_send`.
const POST_BATCH: usize = 16;

/// Progress of one queue pair; all counts are of messages since the start.
pub(super) struct InitiatorQueuePair {
    pub(super) posted: u64,
    pub(super) completed: u64,
    /// Messages that may be posted in all, limited by the target's posted receives.
    pub(super) allowed: u64,
    /// The last credit count read, modulo 256.
    pub(super) credit: u8,
    /// Time at which the message in each slot was posted.
    pub(super) since: Vec<Instant>,
}

/// The end that posts the messages.
pub(super) struct BandwidthInitiator<'a> {
    pub(super) end: &'a TransferEnd,
    pub(super) queue_pairs: Vec<InitiatorQueuePair>,
    /// QPs with fewer messages in flight than allowed, for lack of credits or send queue room.
    pub(super) waiting: Vec<u32>,
    pub(super) latency: Histogram<u64>,
    pub(super) messages: u64,
    pub(super) verified: u64,
    pub(super) inline: [u8; siw_shm::wqe::MAX_INLINE],
    /// Reused poll buffer: zeroing it for each poll takes as long as a message.
    completions: Box<[Wc]>,
}

impl<'a> BandwidthInitiator<'a> {
    pub(super) fn new(end: &'a TransferEnd, now: Instant) -> anyhow::Result<Self> {
        let plan = &end.plan;
        let allowed = match plan.op.takes_receive() {
            true => u64::from(plan.target_slots()),
            false => u64::MAX,
        };
        Ok(BandwidthInitiator {
            end,
            queue_pairs: (0..plan.qps)
                .map(|_| InitiatorQueuePair {
                    posted: 0,
                    completed: 0,
                    allowed,
                    credit: 0,
                    since: vec![now; plan.initiator_slots() as usize],
                })
                .collect(),
            waiting: Vec::with_capacity(plan.qps as usize),
            latency: new_histogram()?,
            messages: 0,
            verified: 0,
            inline: [0x5a; siw_shm::wqe::MAX_INLINE],
            completions: vec![Wc::default(); POLL_BATCH].into(),
        })
    }

    /// Posts to every queue pair as [`post_messages`](Self::post_messages) does.
    pub(super) fn post_to_all(&mut self, now: Instant, more: bool) -> anyhow::Result<()> {
        for qp in 0..self.end.plan.qps {
            self.post_messages(qp, now, more)?;
        }
        Ok(())
    }

    /// Polls completions, and posts again if `more` is set.
    #[inline]
    pub(super) fn poll_and_post(
        &mut self,
        now: Instant,
        more: bool,
        target: Option<&BandwidthTarget>,
    ) -> anyhow::Result<usize> {
        let mut wcs = std::mem::take(&mut self.completions);
        let completions = self.end.send_cq.poll(&mut wcs)?;
        let mut last = None;
        for wc in &wcs[..completions] {
            check_completion(wc, self.end.plan.op.json_name())?;
            let qp = wc.wr_id as u32;
            if last != Some(qp)
                && let Some(before) = last.replace(qp)
                && more
            {
                self.post_messages(before, now, true)?;
            }
            self.record_completion(qp, now, target)?;
        }
        if more {
            if let Some(qp) = last {
                self.post_messages(qp, now, true)?;
            }
        } else if self.end.plan.cq_mod > 1 {
            self.post_to_all(now, false)?;
        }
        if !self.waiting.is_empty() {
            self.post_waiting(now, more, target)?;
        }
        self.completions = wcs;
        Ok(completions)
    }

    /// Counts the `cq_mod` messages that one completion of the QP stands for. Records the latency
    /// of the last of them, which requested the completion.
    #[inline]
    pub(super) fn record_completion(
        &mut self,
        qp: u32,
        now: Instant,
        target: Option<&BandwidthTarget>,
    ) -> anyhow::Result<()> {
        let queue_pair = &mut self.queue_pairs[qp as usize];
        let first = queue_pair.completed;
        let count = u64::from(self.end.plan.cq_mod);
        let last = first + count - 1;
        let slots = queue_pair.since.len() as u64;
        let posted = queue_pair.since[(last % slots) as usize];
        self.latency
            .saturating_record((now - posted).as_nanos() as u64);
        queue_pair.completed += count;
        self.messages += count;
        if self.end.plan.verify {
            for message in first..=last {
                self.verify_message(qp, message, target.map(|target| target.end))?;
            }
        }
        Ok(())
    }

    /// Verifies the data of a completed message where this process can see it.
    #[cold]
    pub(super) fn verify_message(
        &mut self,
        qp: u32,
        message: u64,
        target: Option<&TransferEnd>,
    ) -> anyhow::Result<()> {
        let plan = &self.end.plan;
        if plan.op.is_atomic() {
            let offset = self.end.slot_offset(qp, message);
            if self.end.read_word(offset)? != plan.value_before(message) {
                bail!(describe_mismatch(plan.op, qp, message, 0));
            }
            self.verified += 1;
            return Ok(());
        }
        let (end, want) = match (plan.op, target) {
            (Operation::Write, Some(target)) => (target, message),
            (Operation::Read, _) => (self.end, message % u64::from(plan.target_slots())),
            _ => return Ok(()),
        };
        let size = plan.size as usize;
        let deadline = Instant::now() + PLACEMENT_TIMEOUT;
        loop {
            let offset = end.slot_offset(qp, message);
            match pattern::find_mismatch(&end.data, offset, size, qp, want)? {
                None => break,
                // A WRITE completes when it is acknowledged, which may be before its data is
                // placed.
                Some(_) if plan.op == Operation::Write && Instant::now() < deadline => {}
                Some(at) => bail!(describe_mismatch(plan.op, qp, message, at)),
            }
        }
        self.verified += 1;
        Ok(())
    }

    /// Posts messages up to the QP's limit in flight. Without `more`, stops at the next message
    /// that requests a completion.
    #[inline]
    pub(super) fn post_messages(
        &mut self,
        qp: u32,
        now: Instant,
        more: bool,
    ) -> anyhow::Result<()> {
        let plan = &self.end.plan;
        let size = plan.size as usize;
        let cq_mod = u64::from(plan.cq_mod);
        let queue_pair = &mut self.queue_pairs[qp as usize];
        loop {
            let mut room = u64::from(plan.depth) - (queue_pair.posted - queue_pair.completed);
            if !more {
                room = room.min(queue_pair.posted.next_multiple_of(cq_mod) - queue_pair.posted);
            }
            let count = room
                .min(queue_pair.allowed - queue_pair.posted)
                .min(POST_BATCH as u64) as usize;
            if count == 0 {
                if room > 0 && !self.waiting.contains(&qp) {
                    self.waiting.push(qp);
                }
                return Ok(());
            }
            let count = if plan.verify { 1 } else { count };
            let peer = self.end.peers[qp as usize];
            let sges: [Sge; POST_BATCH] = std::array::from_fn(|index| {
                let offset = self.end.slot_offset(qp, queue_pair.posted + index as u64);
                self.end.data.sge(offset, size)
            });
            if plan.verify {
                let offset = self.end.slot_offset(qp, queue_pair.posted);
                prepare_message(self.end, qp, queue_pair.posted, offset, &mut self.inline)?;
            }
            let inline = &self.inline[..if plan.inline { size } else { 0 }];
            let list: [SendWr; POST_BATCH] = std::array::from_fn(|index| {
                let slot = (queue_pair.posted + index as u64) % u64::from(plan.target_slots());
                let remote = peer.addr + slot * plan.slot_stride() as u64;
                let sge = std::slice::from_ref(&sges[index]);
                let data = if plan.inline {
                    SendData::Inline(inline)
                } else {
                    SendData::Sges(sge)
                };
                let id = u64::from(qp);
                let number = queue_pair.posted + index as u64 + 1;
                let flags = match number.is_multiple_of(cq_mod) {
                    true => WrFlags::SIGNALED,
                    false => WrFlags::NONE,
                };
                let wr = match plan.op {
                    Operation::Write => SendWr::write(id, data, remote, peer.rkey),
                    Operation::WriteImm => {
                        SendWr::write_with_imm(id, data, remote, peer.rkey, number as u32 - 1)
                    }
                    Operation::Read => SendWr::read(id, sge, remote, peer.rkey),
                    Operation::Send => SendWr::send(id, data),
                    Operation::FetchAdd => SendWr::fetch_add(id, sges[index], remote, peer.rkey, 1),
                    Operation::CompareSwap => {
                        let message = queue_pair.posted + index as u64;
                        let old = plan.value_before(message);
                        let new = old.wrapping_add(1);
                        SendWr::cmp_swap(id, sges[index], remote, peer.rkey, old, new)
                    }
                };
                wr.with_flags(flags)
            });
            let done = match self.end.qps[qp as usize].post_send(&list[..count]) {
                Ok(()) => count,
                Err(error) if matches!(error.error, Error::QueueFull) => error.index,
                Err(error) => bail!("queue pair {qp}: {error}"),
            };
            let slots = queue_pair.since.len() as u64;
            for _ in 0..done {
                queue_pair.since[(queue_pair.posted % slots) as usize] = now;
                queue_pair.posted += 1;
            }
            if done < count {
                self.waiting.push(qp);
                return Ok(());
            }
        }
    }

    /// Rechecks the credits of QPs that ran out of them.
    #[cold]
    pub(super) fn post_waiting(
        &mut self,
        now: Instant,
        more: bool,
        target: Option<&BandwidthTarget>,
    ) -> anyhow::Result<()> {
        let mut waiting = std::mem::take(&mut self.waiting);
        let slots = u64::from(self.end.plan.target_slots());
        for qp in waiting.drain(..) {
            let queue_pair = &mut self.queue_pairs[qp as usize];
            match target {
                Some(target) => queue_pair.allowed = target.queue_pairs[qp as usize].posted,
                None => {
                    let seen = self.end.control_byte(qp, CREDITS_OFFSET)?;
                    let new_credits = u64::from(seen.wrapping_sub(queue_pair.credit));
                    queue_pair.credit = seen;
                    queue_pair.allowed = (queue_pair.allowed
                        + new_credits * receives_per_credit(&self.end.plan))
                    .min(queue_pair.completed + 2 * slots);
                }
            }
            self.post_messages(qp, now, more)?;
        }
        Ok(())
    }

    /// Messages posted but not completed, over all QPs.
    pub(super) fn in_flight(&self) -> u64 {
        self.queue_pairs
            .iter()
            .map(|queue_pair| queue_pair.posted - queue_pair.completed)
            .sum()
    }
}

/// Writes the next message to its source slot. For a READ or an atomic operation, writes different
/// bytes to the sink, so that a message that places nothing is detected.
fn prepare_message(
    end: &TransferEnd,
    qp: u32,
    message: u64,
    offset: usize,
    inline: &mut [u8],
) -> anyhow::Result<()> {
    let size = end.plan.size as usize;
    if end.plan.inline {
        pattern::write_bytes(qp, message, 0, &mut inline[..size]);
        return Ok(());
    }
    let message = match end.plan.op.has_response() {
        true => u64::MAX,
        false => message,
    };
    pattern::fill_memory(&end.data, offset, size, qp, message).map_err(anyhow::Error::new)
}
