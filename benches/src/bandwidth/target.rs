//! The target of a bandwidth measurement: receives SENDs, posts its receives again,
//! and compares what arrived. Stepped by `bandwidth.rs`.

use crate::control_line::{OFF_CREDITS, batch};
use crate::end::{End, check};
use crate::pattern;
use crate::plan::Op;
use siw::Wc;

/// Completions taken at once.
pub(super) const POLL: usize = 32;

/// The answering end.
pub(super) struct Target<'a> {
    pub(super) end: &'a End,
    /// The initiator is another process and has to be told of credits.
    pub(super) remote: bool,
    pub(super) lanes: Vec<Received>,
    pub(super) verified: u64,
    pub(super) wrong: u64,
    pub(super) first_wrong: Option<String>,
}

#[derive(Clone, Copy)]
pub(super) struct Received {
    pub(super) messages: u64,
    pub(super) posted: u64,
    /// Credits the peer has been told of.
    pub(super) told: u64,
}

pub(super) fn describe(op: Op, qp: u32, message: u64, at: usize) -> String {
    format!(
        "{} message {message} on queue pair {qp} has wrong data from byte {at} on",
        op.name().to_uppercase()
    )
}

impl<'a> Target<'a> {
    pub(super) fn new(end: &'a End, remote: bool) -> Result<Self, String> {
        let plan = &end.plan;
        let posted = match plan.op {
            Op::Send => u64::from(plan.target_slots()),
            _ => 0,
        };
        if plan.verify && plan.op == Op::Read {
            for qp in 0..plan.qps {
                for slot in 0..u64::from(plan.target_slots()) {
                    let off = end.offset(qp, slot);
                    pattern::fill(&end.data, off, plan.size as usize, qp, slot)
                        .map_err(|e| e.to_string())?;
                }
            }
        }
        let lane = Received {
            messages: 0,
            posted,
            told: posted,
        };
        Ok(Target {
            end,
            remote,
            lanes: vec![lane; plan.qps as usize],
            verified: 0,
            wrong: 0,
            first_wrong: None,
        })
    }

    /// Takes what came, and posts its receives again.
    #[inline]
    pub(super) fn step(&mut self) -> Result<usize, String> {
        if self.end.plan.op != Op::Send {
            return Ok(0);
        }
        let mut wcs = [Wc::default(); POLL];
        let n = self.end.recv_cq.poll(&mut wcs).map_err(|e| e.to_string())?;
        for wc in &wcs[..n] {
            check(wc, "receive")?;
            let qp = wc.wr_id as u32;
            let lane = &mut self.lanes[qp as usize];
            let message = lane.messages;
            lane.messages += 1;
            if wc.byte_len != self.end.plan.size {
                return Err(format!(
                    "message {message} on queue pair {qp} has {} bytes, {} were sent",
                    wc.byte_len, self.end.plan.size
                ));
            }
            if self.end.plan.verify {
                self.compare(qp, message, message)?;
            }
            let lane = &mut self.lanes[qp as usize];
            self.end.receive(qp, lane.posted, 1)?;
            lane.posted += 1;
            if self.remote {
                self.tell(qp)?;
            }
        }
        Ok(n)
    }

    #[cold]
    pub(super) fn compare(&mut self, qp: u32, slot: u64, message: u64) -> Result<(), String> {
        let off = self.end.offset(qp, slot);
        let size = self.end.plan.size as usize;
        let wrong =
            pattern::mismatch(&self.end.data, off, size, qp, message).map_err(|e| e.to_string())?;
        self.verified += 1;
        if let Some(at) = wrong {
            self.wrong += 1;
            let op = self.end.plan.op;
            self.first_wrong
                .get_or_insert_with(|| describe(op, qp, message, at));
        }
        Ok(())
    }

    /// Tells a peer in another process of its new credits.
    pub(super) fn tell(&mut self, qp: u32) -> Result<(), String> {
        let batch = batch(&self.end.plan);
        let lane = &mut self.lanes[qp as usize];
        let new = (lane.posted - lane.told) / batch;
        if new == 0 {
            return Ok(());
        }
        let told = lane.told + new * batch;
        let first = u64::from(self.end.plan.target_slots());
        let value = ((told - first) / batch) as u8;
        // A full queue: with the next message.
        if self.end.signal_peer(qp, OFF_CREDITS as u64, &[value])? {
            lane.told = told;
        }
        Ok(())
    }
}
