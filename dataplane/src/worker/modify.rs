//! State changes of queue pairs that their consumer requests (ibv_modify_qp(3)), and the answer to
//! ibv_query_qp(3): only the worker knows the true state.

use siw_iwarp::{DrainState, RdmapState, TerminateCode};
use siw_shm::control;
use siw_tcp::Instant;

use super::Worker;
use super::messages::{Event, ModifyTarget, QpInfo};
use super::slots::QpSlot;
use super::worker_qp::WorkerQp;
use crate::ids::{CommandToken, Qpn};

impl Worker {
    /// Executes a requested change, and answers with the queue pair's state and the reason of a
    /// refusal.
    pub(super) fn modify_queue_pair(
        &mut self,
        now: Instant,
        qpn: Qpn,
        to: Option<ModifyTarget>,
        token: CommandToken,
    ) {
        let found = self.queue_pairs.find(qpn);
        let refused = match (to, found) {
            (Some(to), Some(slot)) => self.move_to(now, slot, to).err(),
            // The queue pair will be installed with the new rights.
            (Some(ModifyTarget::DenyAccess(_)), None) => None,
            (Some(_), None) => Some("its connection has just failed"),
            (None, _) => None,
        };
        let info = found
            .and_then(|slot| self.queue_pairs.get(slot))
            .map(queue_pair_info)
            .unwrap_or_default();
        let info = Box::new(QpInfo { refused, ..info });
        self.post_event(Event::QpInfo { qpn, token, info });
    }

    fn move_to(
        &mut self,
        now: Instant,
        slot: QpSlot,
        to: ModifyTarget,
    ) -> Result<(), &'static str> {
        let moved = match to {
            ModifyTarget::Error => {
                self.end_in_error(now, slot);
                return Ok(());
            }
            ModifyTarget::Closing => {
                self.disconnect_queue_pair(now, slot);
                return Ok(());
            }
            ModifyTarget::DenyAccess(denied) => {
                self.with_queue_pair(slot, |protocol, _| protocol.deny_access(denied));
                return Ok(());
            }
            ModifyTarget::SendQueueDrain => {
                self.with_queue_pair(slot, |protocol, view| protocol.drain_send_queue(view))
            }
            ModifyTarget::ReadyToSend => {
                self.with_queue_pair(slot, |protocol, _| protocol.resume_send_queue())
            }
            ModifyTarget::Terminate => self.with_queue_pair(slot, |protocol, _| {
                let is_rts = protocol.state() == RdmapState::Rts;
                protocol.send_terminate(TerminateCode::LOCAL_CATASTROPHIC);
                is_rts
            }),
        };
        if moved != Some(true) {
            return Err("only a queue pair in RTS can move to this state");
        }
        self.mark_ready(slot);
        self.report_and_follow(now, slot);
        Ok(())
    }
}

fn queue_pair_info(queue_pair: &WorkerQp) -> QpInfo {
    let protocol = &queue_pair.protocol;
    let (ird, ord) = protocol.read_depths();
    QpInfo {
        state: consumer_state(queue_pair),
        drained: protocol.drain_state() == DrainState::Drained,
        ird,
        ord,
        mulpdu: protocol.mulpdu(),
        refused: None,
    }
}

/// The state in the consumer's terms.
fn consumer_state(queue_pair: &WorkerQp) -> control::QpState {
    let protocol = &queue_pair.protocol;
    let is_draining = protocol.drain_state() != DrainState::Inactive;
    match protocol.state() {
        RdmapState::Idle => control::QpState::Idle,
        RdmapState::Rts if is_draining => control::QpState::Sqd,
        RdmapState::Rts if protocol.is_awaiting_first_fpdu() => control::QpState::Rtr,
        RdmapState::Rts => control::QpState::Rts,
        // The consumer learns from its next send that the peer has left.
        RdmapState::Closing if protocol.is_paired() => control::QpState::Rts,
        RdmapState::Closing => control::QpState::Closing,
        RdmapState::Terminate => control::QpState::Terminate,
        RdmapState::Error => control::QpState::Error,
    }
}
