//! Completions of send work requests, in posting order and exactly one each, and the flush (RFC 5040
//! section 6, PROTOCOL.md section 5).

use super::Requester;
use super::work_request_queue::SendEntry;
use crate::environment::{ExtBufRef, QpEnv, RingFault};
use crate::queue_pair::state::{FLUSHES_PER_TURN, QpInitAttr, StreamErrors};
use siw_shm::{Opcode, Wc, WcOpcode, WcStatus};

/// Fields of the queue pair that completions need in addition to the queue itself.
pub(crate) struct CompletionContext<'a> {
    pub attr: &'a QpInitAttr,
    pub errors: &'a StreamErrors,
}

/// Returns whether the work request is finished on the wire and its memory is no longer read.
#[inline]
fn may_complete<E: QpEnv>(env: &mut E, entry: &SendEntry) -> bool {
    entry.is_done() && (entry.ext_buf_ref == ExtBufRef::NONE || env.is_released(entry.ext_buf_ref))
}

/// The completion of a work request.
#[inline(always)]
fn completion(entry: &SendEntry, status: WcStatus, context: &CompletionContext<'_>) -> Wc {
    Wc {
        wr_id: entry.wr_id,
        qp_num: context.attr.qpn,
        status,
        opcode: WcOpcode::from(entry.opcode),
        byte_len: entry.length,
        vendor_err: context.errors.vendor_error(status),
        ..Wc::default()
    }
}

impl Requester {
    /// Completes the finished work requests at the front.
    #[inline]
    pub fn complete_ready<E: QpEnv>(&mut self, env: &mut E, context: &mut CompletionContext<'_>) {
        // After the first failure, only the flush completes work requests.
        if self.has_failed {
            return;
        }
        let entries = self.queue.iter();
        let finished = entries
            .take_while(|entry| entry.status == WcStatus::SUCCESS && may_complete(env, entry));
        let finished = finished.count();
        if finished > 0 {
            self.complete_first(env, context, finished);
        }
        let status = self.queue.front().map(|entry| entry.status);
        if let Some(failure) = status.filter(|status| *status != WcStatus::SUCCESS) {
            self.complete_front(env, context, failure);
        }
    }

    /// Completes the first `count` work requests with success.
    #[inline(always)]
    fn complete_first<E: QpEnv>(
        &mut self,
        env: &mut E,
        context: &CompletionContext<'_>,
        count: usize,
    ) {
        env.announce_completions(count as u32);
        let reports_all = context.attr.sq_sig_all;
        for entry in self.queue.iter().take(count) {
            if entry.ext_buf_ref != ExtBufRef::NONE {
                env.free_ext_buf_ref(entry.ext_buf_ref);
            }
            if entry.is_signaled() || reports_all {
                let cqe = completion(entry, WcStatus::SUCCESS, context);
                env.complete_send(Some(&cqe));
            } else {
                env.complete_send(None);
            }
        }
        self.queue.remove_first(count);
    }

    #[inline(never)]
    fn complete_front<E: QpEnv>(
        &mut self,
        env: &mut E,
        context: &mut CompletionContext<'_>,
        status: WcStatus,
    ) {
        let Some(entry) = self.queue.front() else {
            return;
        };
        if entry.ext_buf_ref != ExtBufRef::NONE {
            env.free_ext_buf_ref(entry.ext_buf_ref);
        }
        self.has_failed |= status != WcStatus::SUCCESS;
        if status == WcStatus::SUCCESS && !entry.is_signaled() && !context.attr.sq_sig_all {
            self.queue.remove_front();
            env.complete_send(None);
            return;
        }
        let cqe = completion(entry, status, context);
        self.queue.remove_front();
        env.complete_send(Some(&cqe));
    }

    /// Status of flushed work requests: the first one may report the lost peer.
    fn flush_status(&self) -> WcStatus {
        if self.has_lost_peer && !self.has_failed {
            WcStatus::RETRY_EXC_ERR
        } else {
            WcStatus::WR_FLUSH_ERR
        }
    }

    /// Completes all work requests that were taken out of the ring: those finished before the failure
    /// with success, the failing one with its status, all others with WR_FLUSH_ERR; then the requests
    /// in the ring, within the budget. Returns whether a work request failed.
    pub fn flush<E: QpEnv>(&mut self, env: &mut E, context: &mut CompletionContext<'_>) -> bool {
        self.current = None;
        self.quiescing = None;
        self.invalidated_reads.clear();
        self.outstanding.clear();
        // The cause has been reported, or belongs to one of the flushed work requests.
        let mut is_cause_reported = self.has_failed;
        while let Some(entry) = self.queue.front() {
            let status = match entry.status {
                WcStatus::SUCCESS if entry.is_done() && !self.has_failed => WcStatus::SUCCESS,
                failure if failure != WcStatus::SUCCESS && !is_cause_reported => {
                    is_cause_reported = true;
                    failure
                }
                _ => self.flush_status(),
            };
            self.complete_front(env, context, status);
        }
        self.has_unflushed = false;
        // Bounded, because a client may post as fast as its requests are flushed.
        for _ in 0..FLUSHES_PER_TURN {
            let (wr_id, opcode, status) = match env.next_send() {
                Ok(Some(wqe)) => (wqe.wr_id, wqe.opcode, self.flush_status()),
                Err(RingFault::InvalidRequest { wr_id }) => {
                    (wr_id, Opcode::Send, WcStatus::LOC_QP_OP_ERR)
                }
                // The daemon disconnects a client whose ring has invalid indices.
                Ok(None) | Err(RingFault::InvalidIndex) => return self.has_failed,
            };
            self.has_failed = true;
            let cqe = Wc {
                wr_id,
                qp_num: context.attr.qpn,
                status,
                opcode: WcOpcode::from(opcode),
                vendor_err: context.errors.vendor_error(status),
                ..Wc::default()
            };
            env.complete_send(Some(&cqe));
        }
        self.has_unflushed = true;
        self.has_failed
    }
}
