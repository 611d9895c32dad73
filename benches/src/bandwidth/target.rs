//! The target of a bandwidth measurement: receives messages, reposts its receives, and verifies the
//! data. Driven by [`super::measure_bandwidth`] and [`super::serve_bandwidth`].

use crate::control_line::{CREDITS_OFFSET, receives_per_credit};
use crate::end::{TransferEnd, check_completion};
use crate::pattern;
use crate::plan::Operation;
use anyhow::bail;
use siw::Wc;

/// Maximum completions per poll.
pub(super) const POLL_BATCH: usize = 32;

/// The end that receives the messages, or whose memory is the target of WRITEs and READs.
pub(super) struct BandwidthTarget<'a> {
    pub(super) end: &'a TransferEnd,
    /// The initiator is another process and needs credits.
    pub(super) remote: bool,
    pub(super) queue_pairs: Vec<TargetQueuePair>,
    /// Messages whose data was verified.
    pub(super) verified: u64,
    /// Verified messages with wrong data.
    pub(super) wrong: u64,
    pub(super) first_wrong: Option<String>,
    /// Reused poll buffer, as in the initiator.
    completions: Box<[Wc]>,
}

/// Progress of one queue pair.
#[derive(Clone, Copy)]
pub(super) struct TargetQueuePair {
    /// Messages received: SENDs, or WRITEs with immediate data.
    pub(super) messages: u64,
    /// Receives posted.
    pub(super) posted: u64,
    /// Receives announced to the initiator by credits.
    pub(super) announced: u64,
}

/// Error text for a message whose data is wrong from byte `at` on.
pub(super) fn describe_mismatch(op: Operation, qp: u32, message: u64, at: usize) -> String {
    format!(
        "{} message {message} on queue pair {qp} has wrong data from byte {at} on",
        op.json_name().to_uppercase()
    )
}

impl<'a> BandwidthTarget<'a> {
    pub(super) fn new(end: &'a TransferEnd, remote: bool) -> anyhow::Result<Self> {
        let plan = &end.plan;
        let posted = match plan.op.takes_receive() {
            true => u64::from(plan.target_slots()),
            false => 0,
        };
        if plan.verify && plan.op == Operation::Read {
            for qp in 0..plan.qps {
                for slot in 0..u64::from(plan.target_slots()) {
                    let offset = end.slot_offset(qp, slot);
                    pattern::fill_memory(&end.data, offset, plan.size as usize, qp, slot)?;
                }
            }
        }
        let queue_pair = TargetQueuePair {
            messages: 0,
            posted,
            announced: posted,
        };
        Ok(BandwidthTarget {
            end,
            remote,
            queue_pairs: vec![queue_pair; plan.qps as usize],
            verified: 0,
            wrong: 0,
            first_wrong: None,
            completions: vec![Wc::default(); POLL_BATCH].into(),
        })
    }

    /// Polls completions, and posts a new receive for each.
    #[inline]
    pub(super) fn poll_and_repost(&mut self) -> anyhow::Result<usize> {
        if !self.end.plan.op.takes_receive() {
            return Ok(0);
        }
        let mut wcs = std::mem::take(&mut self.completions);
        let completions = self.end.recv_cq.poll(&mut wcs)?;
        for wc in &wcs[..completions] {
            check_completion(wc, "receive")?;
            let qp = wc.wr_id as u32;
            let queue_pair = &mut self.queue_pairs[qp as usize];
            let message = queue_pair.messages;
            queue_pair.messages += 1;
            if wc.byte_len != self.end.plan.size {
                bail!(
                    "message {message} on queue pair {qp} has {} bytes, {} were sent",
                    wc.byte_len,
                    self.end.plan.size
                );
            }
            if self.end.plan.op == Operation::WriteImm && wc.imm != message as u32 {
                bail!(
                    "message {message} on queue pair {qp} has immediate data {}",
                    wc.imm
                );
            }
            if self.end.plan.verify {
                self.compare_message(qp, message, message)?;
            }
            let queue_pair = &mut self.queue_pairs[qp as usize];
            self.end.post_receives(qp, queue_pair.posted, 1)?;
            queue_pair.posted += 1;
            if self.remote {
                self.announce_credits(qp)?;
            }
        }
        self.completions = wcs;
        Ok(completions)
    }

    /// Verifies the data of message `message`, in slot `slot`.
    #[cold]
    pub(super) fn compare_message(
        &mut self,
        qp: u32,
        slot: u64,
        message: u64,
    ) -> anyhow::Result<()> {
        let offset = self.end.slot_offset(qp, slot);
        let size = self.end.plan.size as usize;
        let wrong = pattern::find_mismatch(&self.end.data, offset, size, qp, message)?;
        self.verified += 1;
        if let Some(at) = wrong {
            self.wrong += 1;
            let op = self.end.plan.op;
            self.first_wrong
                .get_or_insert_with(|| describe_mismatch(op, qp, message, at));
        }
        Ok(())
    }

    /// Sends the number of posted receives to an initiator in another process.
    pub(super) fn announce_credits(&mut self, qp: u32) -> anyhow::Result<()> {
        let batch = receives_per_credit(&self.end.plan);
        let queue_pair = &mut self.queue_pairs[qp as usize];
        let new_credits = (queue_pair.posted - queue_pair.announced) / batch;
        if new_credits == 0 {
            return Ok(());
        }
        let announced = queue_pair.announced + new_credits * batch;
        let first = u64::from(self.end.plan.target_slots());
        let value = ((announced - first) / batch) as u8;
        // If the send queue is full, the next message tries again.
        if self.end.signal_peer(qp, CREDITS_OFFSET as u64, &[value])? {
            queue_pair.announced = announced;
        }
        Ok(())
    }
}
