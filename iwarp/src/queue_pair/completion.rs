//! Completions: in posting order, exactly one each, and the flush (RFC 5040 section 6, protocol.md
//! section 4).

use crate::environment::{ExtBufRef, FpduKind, FpduRecord, QpEnv};
use crate::queue_pair::error_mapping::vendor;
use crate::queue_pair::send_queue::Entry;
use crate::queue_pair::{DrainState, QueuePair, RdmapState};
use siw_shm::{Opcode, Wc, WcFlags, WcOpcode, WcStatus};

impl QueuePair {
    /// TCP got every byte of this record acknowledged. Records come back in the order in which they
    /// were handed out.
    #[inline]
    pub fn on_record_acked<E: QpEnv>(&mut self, env: &mut E, rec: &FpduRecord) {
        if !rec.is_last {
            return;
        }
        match rec.kind {
            FpduKind::Request | FpduKind::Immediate => {
                // Immediate Data is the last message of WRITE_WITH_IMM, the first of SEND_WITH_IMM.
                let immediate = rec.kind == FpduKind::Immediate;
                if let Some(e) = self.sq.get_mut(rec.slot)
                    && immediate == (e.opcode == Opcode::WriteWithImm)
                {
                    e.acked = true;
                    self.complete_ready(env);
                }
            }
            FpduKind::Response => {
                if let Some(e) = self.inbound.get_mut(rec.slot) {
                    e.acked = true;
                    self.retire_responses(env);
                }
            }
            FpduKind::Rtr | FpduKind::Terminate => {}
        }
    }

    /// Completes what only waited for the port to release buffers. True: some still wait.
    pub fn poll_releases<E: QpEnv>(&mut self, env: &mut E) -> bool {
        self.complete_ready(env);
        self.retire_responses(env);
        self.zombies.retain(|&o| {
            let keep = !env.is_released(o);
            if !keep {
                env.free_ext_buf_ref(o);
            }
            keep
        });
        self.is_awaiting_release()
    }

    /// Something only waits for the port: call [`poll_releases`](Self::poll_releases) from time to
    /// time, and before the queue pair is dropped until this is false.
    #[inline]
    pub fn is_awaiting_release(&self) -> bool {
        !self.zombies.is_empty()
            || self.sq.front().is_some_and(is_done)
            || self.inbound.acked_front().is_some()
    }

    /// Pops finished work requests off the front.
    #[inline]
    pub(crate) fn complete_ready<E: QpEnv>(&mut self, env: &mut E) {
        self.complete_front(env);
        if self.drain == DrainState::Draining {
            self.check_drained(env);
        }
    }

    #[inline]
    fn complete_front<E: QpEnv>(&mut self, env: &mut E) {
        // After the first failure only the flush completes anything.
        while !self.send_failed
            && let Some(e) = self.sq.front()
        {
            if e.status == WcStatus::SUCCESS && !(is_done(e) && is_released(env, e.owner)) {
                return;
            }
            let status = e.status;
            self.finish_front(env, status);
        }
    }

    #[inline]
    fn finish_front<E: QpEnv>(&mut self, env: &mut E, status: WcStatus) {
        let Some(e) = self.sq.pop_front() else { return };
        self.drop_owner(env, e.owner);
        self.send_failed |= status != WcStatus::SUCCESS;
        if status == WcStatus::SUCCESS && !e.signaled() && !self.attr.sq_sig_all {
            env.complete_send(None);
            return;
        }
        let cqe = Wc {
            wr_id: e.wr_id,
            qp_num: self.attr.qpn,
            status,
            opcode: WcOpcode::from(e.opcode),
            byte_len: e.length,
            vendor_err: self.vendor_err(status),
            ..Wc::default()
        };
        env.complete_send(Some(&cqe));
    }

    fn drop_owner<E: QpEnv>(&mut self, env: &mut E, owner: ExtBufRef) {
        if owner == ExtBufRef::NONE {
            return;
        }
        if env.is_released(owner) {
            env.free_ext_buf_ref(owner);
        } else {
            self.zombies.push(owner);
        }
    }

    fn vendor_err(&self, status: WcStatus) -> u32 {
        if status == WcStatus::SUCCESS {
            return 0;
        }
        self.received.or(self.local_error).map_or(0, vendor)
    }

    fn retire_responses<E: QpEnv>(&mut self, env: &mut E) {
        while let Some(e) = self.inbound.acked_front() {
            let owner = e.owner;
            if !is_released(env, owner) {
                return;
            }
            self.inbound.pop_front();
            if owner != ExtBufRef::NONE {
                env.free_ext_buf_ref(owner);
            }
        }
    }

    /// The Send that is being received ends with `status`. `imm`: immediate data or the STag that was
    /// invalidated, as `flags` say.
    pub(crate) fn finish_recv<E: QpEnv>(
        &mut self,
        env: &mut E,
        status: WcStatus,
        flags: WcFlags,
        imm: u32,
    ) {
        if !self.recv.active {
            return;
        }
        self.recv.active = false;
        let cqe = Wc {
            wr_id: self.recv.wr_id,
            qp_num: self.attr.qpn,
            status,
            opcode: WcOpcode::RECV,
            flags,
            byte_len: self.recv.received,
            imm,
            vendor_err: self.vendor_err(status),
            ..Wc::default()
        };
        env.complete_recv(&cqe);
    }

    /// Flushes what is (still, or anew) in the queues. Call it on a doorbell in ERROR; does nothing
    /// in other states.
    pub fn flush_queues<E: QpEnv>(&mut self, env: &mut E) {
        if self.state == RdmapState::Error {
            self.flush_send(env);
            self.flush_recv(env);
        }
    }

    /// Send queue: what is finished before everything else succeeds, the failing work request gets its
    /// status, all others WR_FLUSH_ERR. True: something did not succeed.
    pub(crate) fn flush_send<E: QpEnv>(&mut self, env: &mut E) -> bool {
        self.cur = None;
        self.in_message = crate::queue_pair::InMessage::None;
        self.outbound.clear();
        // Told already, or still among those that are flushed.
        let mut cause_told = self.send_failed;
        while let Some(e) = self.sq.front() {
            let status = match e.status {
                WcStatus::SUCCESS if is_done(e) && !self.send_failed => WcStatus::SUCCESS,
                s if s != WcStatus::SUCCESS && !cause_told => {
                    cause_told = true;
                    s
                }
                _ => WcStatus::WR_FLUSH_ERR,
            };
            self.finish_front(env, status);
        }
        while let Some(e) = self.inbound.pop_front() {
            self.drop_owner(env, e.owner);
        }
        // A ring in nonsense state ends the flush: its client is beyond help.
        while let Ok(Some(w)) = env.next_send() {
            self.send_failed = true;
            let cqe = Wc {
                wr_id: w.wr_id,
                qp_num: self.attr.qpn,
                status: WcStatus::WR_FLUSH_ERR,
                opcode: WcOpcode::from(w.opcode),
                vendor_err: self.vendor_err(WcStatus::WR_FLUSH_ERR),
                ..Wc::default()
            };
            env.complete_send(Some(&cqe));
        }
        self.send_failed
    }

    pub(crate) fn flush_recv<E: QpEnv>(&mut self, env: &mut E) {
        self.finish_recv(env, WcStatus::WR_FLUSH_ERR, WcFlags::NONE, 0);
        while let Ok(Some(w)) = env.next_flushed_recv() {
            let cqe = Wc {
                wr_id: w.wr_id,
                qp_num: self.attr.qpn,
                status: WcStatus::WR_FLUSH_ERR,
                opcode: WcOpcode::RECV,
                vendor_err: self.vendor_err(WcStatus::WR_FLUSH_ERR),
                ..Wc::default()
            };
            env.complete_recv(&cqe);
        }
    }
}

/// Nothing more happens to it on the wire.
#[inline]
fn is_done(e: &Entry) -> bool {
    e.acked && (!e.opcode.awaits_response() || e.answered)
}

#[inline]
fn is_released<E: QpEnv>(env: &E, owner: ExtBufRef) -> bool {
    owner == ExtBufRef::NONE || env.is_released(owner)
}
