//! The initiator of a bandwidth measurement: keeps `depth` messages in flight on each
//! QP and times them. Stepped by `bandwidth.rs`.

use super::target::{POLL, Target, describe};
use crate::control_line::{OFF_CREDITS, batch};
use crate::end::{End, check};
use crate::measurement::histogram;
use crate::pattern;
use crate::plan::Op;
use hdrhistogram::Histogram;
use siw::{Error, SendData, SendWr, Sge, Wc};
use std::time::{Duration, Instant};

/// How long placed data may take to be seen after its message completed.
const PLACED: Duration = Duration::from_secs(1);
/// Work requests posted at once.
const POST: usize = 16;

pub(super) struct Lane {
    pub(super) posted: u64,
    pub(super) completed: u64,
    /// Messages that may have been posted in all.
    pub(super) allowed: u64,
    pub(super) credit: u8,
    /// When the message in each slot was posted.
    pub(super) since: Vec<Instant>,
}

/// The posting end.
pub(super) struct Initiator<'a> {
    pub(super) end: &'a End,
    pub(super) lanes: Vec<Lane>,
    /// QPs that could not post all they may: for want of credits or slots.
    pub(super) waiting: Vec<u32>,
    pub(super) latency: Histogram<u64>,
    pub(super) messages: u64,
    pub(super) verified: u64,
    pub(super) inline: [u8; siw_shm::wqe::MAX_INLINE],
}

impl<'a> Initiator<'a> {
    pub(super) fn new(end: &'a End, now: Instant) -> Result<Self, String> {
        let plan = &end.plan;
        let allowed = match plan.op {
            Op::Send => u64::from(plan.target_slots()),
            _ => u64::MAX,
        };
        Ok(Initiator {
            end,
            lanes: (0..plan.qps)
                .map(|_| Lane {
                    posted: 0,
                    completed: 0,
                    allowed,
                    credit: 0,
                    since: vec![now; plan.slots() as usize],
                })
                .collect(),
            waiting: Vec::with_capacity(plan.qps as usize),
            latency: histogram()?,
            messages: 0,
            verified: 0,
            inline: [0x5a; siw_shm::wqe::MAX_INLINE],
        })
    }

    /// Fills the queues for the first time.
    pub(super) fn start(&mut self, now: Instant) -> Result<(), String> {
        for qp in 0..self.end.plan.qps {
            self.post(qp, now)?;
        }
        Ok(())
    }

    /// Takes completions, and posts again if `more`.
    #[inline]
    pub(super) fn step(
        &mut self,
        now: Instant,
        more: bool,
        target: Option<&Target>,
    ) -> Result<usize, String> {
        let mut wcs = [Wc::default(); POLL];
        let n = self.end.send_cq.poll(&mut wcs).map_err(|e| e.to_string())?;
        let mut last = None;
        for wc in &wcs[..n] {
            check(wc, self.end.plan.op.name())?;
            let qp = wc.wr_id as u32;
            if last != Some(qp)
                && let Some(before) = last.replace(qp)
                && more
            {
                self.post(before, now)?;
            }
            self.completed(qp, now, target)?;
        }
        if more {
            if let Some(qp) = last {
                self.post(qp, now)?;
            }
            if !self.waiting.is_empty() {
                self.retry(now, target)?;
            }
        }
        Ok(n)
    }

    #[inline]
    pub(super) fn completed(
        &mut self,
        qp: u32,
        now: Instant,
        target: Option<&Target>,
    ) -> Result<(), String> {
        let lane = &mut self.lanes[qp as usize];
        let message = lane.completed;
        let slots = lane.since.len() as u64;
        let posted = lane.since[(message % slots) as usize];
        self.latency
            .saturating_record((now - posted).as_nanos() as u64);
        lane.completed += 1;
        self.messages += 1;
        if self.end.plan.verify {
            self.verify(qp, message, target.map(|t| t.end))?;
        }
        Ok(())
    }

    /// Compares what a completed message brought, where this process can see it.
    #[cold]
    pub(super) fn verify(
        &mut self,
        qp: u32,
        message: u64,
        target: Option<&End>,
    ) -> Result<(), String> {
        let plan = &self.end.plan;
        let (end, want) = match (plan.op, target) {
            (Op::Write, Some(target)) => (target, message),
            (Op::Read, _) => (self.end, message % u64::from(plan.target_slots())),
            _ => return Ok(()),
        };
        let size = plan.size as usize;
        let deadline = Instant::now() + PLACED;
        loop {
            let off = end.offset(qp, message);
            match pattern::mismatch(&end.data, off, size, qp, want).map_err(|e| e.to_string())? {
                None => break,
                // ACKed is not placed: a WRITE may complete a little earlier.
                Some(_) if plan.op == Op::Write && Instant::now() < deadline => {}
                Some(at) => return Err(describe(plan.op, qp, message, at)),
            }
        }
        self.verified += 1;
        Ok(())
    }

    /// Posts as many messages as the QP may have in flight.
    #[inline]
    pub(super) fn post(&mut self, qp: u32, now: Instant) -> Result<(), String> {
        let plan = &self.end.plan;
        let size = plan.size as usize;
        let lane = &mut self.lanes[qp as usize];
        loop {
            let room = u64::from(plan.depth) - (lane.posted - lane.completed);
            let n = room.min(lane.allowed - lane.posted).min(POST as u64) as usize;
            if n == 0 {
                if room > 0 && !self.waiting.contains(&qp) {
                    self.waiting.push(qp);
                }
                return Ok(());
            }
            let n = if plan.verify { 1 } else { n };
            let peer = self.end.peers[qp as usize];
            let sges: [Sge; POST] = std::array::from_fn(|i| {
                let off = self.end.offset(qp, lane.posted + i as u64);
                self.end.data.sge(off, size)
            });
            if plan.verify {
                let off = self.end.offset(qp, lane.posted);
                prepare(self.end, qp, lane.posted, off, &mut self.inline)?;
            }
            let inline = &self.inline[..if plan.inline { size } else { 0 }];
            let list: [SendWr; POST] = std::array::from_fn(|i| {
                let slot = (lane.posted + i as u64) % u64::from(plan.target_slots());
                let remote = peer.addr + slot * plan.stride() as u64;
                let sge = std::slice::from_ref(&sges[i]);
                let data = if plan.inline {
                    SendData::Inline(inline)
                } else {
                    SendData::Sges(sge)
                };
                let id = u64::from(qp);
                match plan.op {
                    Op::Write => SendWr::write(id, data, remote, peer.rkey),
                    Op::Read => SendWr::read(id, sge, remote, peer.rkey),
                    Op::Send => SendWr::send(id, data),
                }
            });
            let done = match self.end.qps[qp as usize].post_send(&list[..n]) {
                Ok(()) => n,
                Err(e) if matches!(e.error, Error::QueueFull) => e.index,
                Err(e) => return Err(format!("queue pair {qp}: {e}")),
            };
            let slots = lane.since.len() as u64;
            for _ in 0..done {
                lane.since[(lane.posted % slots) as usize] = now;
                lane.posted += 1;
            }
            if done < n {
                self.waiting.push(qp);
                return Ok(());
            }
        }
    }

    /// Looks for new credits of QPs that ran out of them.
    #[cold]
    pub(super) fn retry(&mut self, now: Instant, target: Option<&Target>) -> Result<(), String> {
        let mut waiting = std::mem::take(&mut self.waiting);
        let slots = u64::from(self.end.plan.target_slots());
        for qp in waiting.drain(..) {
            let lane = &mut self.lanes[qp as usize];
            match target {
                Some(t) => lane.allowed = t.lanes[qp as usize].posted,
                None => {
                    let seen = self.end.control_byte(qp, OFF_CREDITS)?;
                    let new = u64::from(seen.wrapping_sub(lane.credit));
                    lane.credit = seen;
                    lane.allowed = (lane.allowed + new * batch(&self.end.plan))
                        .min(lane.completed + 2 * slots);
                }
            }
            self.post(qp, now)?;
        }
        Ok(())
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.lanes.iter().map(|l| l.posted - l.completed).sum()
    }
}

/// Puts the bytes of the next message where it is sent from; a READ's sink gets
/// bytes that the message does not have.
fn prepare(end: &End, qp: u32, message: u64, off: usize, inline: &mut [u8]) -> Result<(), String> {
    let size = end.plan.size as usize;
    if end.plan.inline {
        pattern::bytes(qp, message, 0, &mut inline[..size]);
        return Ok(());
    }
    let message = match end.plan.op {
        Op::Read => u64::MAX,
        _ => message,
    };
    pattern::fill(&end.data, off, size, qp, message).map_err(|e| e.to_string())
}
