//! State changes of queue pairs that their consumer asks for (ibv_modify_qp(3)), and the answer
//! to ibv_query_qp(3): the worker alone knows the true state.

use siw_iwarp::{DrainState, RdmapState, TerminateCode};
use siw_shm::control;
use siw_tcp::Instant;

use super::Worker;
use super::messages::{Event, ModifyTarget, QpInfo};
use super::worker_qp::WorkerQp;
use crate::ids::{CommandToken, Qpn};

impl Worker {
    /// Answers with what became of the queue pair, and why not what was asked.
    pub(super) fn modify(
        &mut self,
        now: Instant,
        qpn: Qpn,
        to: Option<ModifyTarget>,
        token: CommandToken,
    ) {
        let found = self.qps.find(qpn);
        let refused = match (to, found) {
            (Some(to), Some(slot)) => self.move_to(now, slot, to).err(),
            (Some(_), None) => Some("its connection failed just now"),
            (None, _) => None,
        };
        let info = found
            .and_then(|slot| self.qps.get(slot))
            .map(info)
            .unwrap_or_default();
        let info = Box::new(QpInfo { refused, ..info });
        self.post_event(Event::QpInfo { qpn, token, info });
    }

    fn move_to(&mut self, now: Instant, slot: u32, to: ModifyTarget) -> Result<(), &'static str> {
        match to {
            ModifyTarget::Error => {
                self.end_in_error(now, slot);
                return Ok(());
            }
            ModifyTarget::Closing => {
                self.disconnect(now, slot);
                return Ok(());
            }
            _ => {}
        }
        let moved = self.with_qp(slot, |qp, env| match to {
            ModifyTarget::SendQueueDrain => qp.drain_send_queue(env),
            ModifyTarget::ReadyToSend => qp.resume_send_queue(),
            ModifyTarget::Terminate => {
                let rts = qp.state() == RdmapState::Rts;
                qp.send_terminate(TerminateCode::LOCAL_CATASTROPHIC);
                rts
            }
            ModifyTarget::Error | ModifyTarget::Closing => true,
        });
        if moved != Some(true) {
            return Err("only a queue pair in RTS can be moved there");
        }
        self.make_ready(slot);
        self.after_slow(now, slot);
        Ok(())
    }
}

fn info(qp: &WorkerQp) -> QpInfo {
    let (ird, ord) = qp.qp.read_depths();
    QpInfo {
        state: consumer_state(qp),
        drained: qp.qp.drain_state() == DrainState::Drained,
        ird,
        ord,
        mulpdu: qp.qp.mulpdu(),
        refused: None,
    }
}

/// The state in the consumer's terms.
fn consumer_state(qp: &WorkerQp) -> control::QpState {
    match qp.qp.state() {
        RdmapState::Idle => control::QpState::Idle,
        RdmapState::Rts if qp.qp.drain_state() != DrainState::Inactive => control::QpState::Sqd,
        RdmapState::Rts if qp.qp.is_awaiting_first_fpdu() => control::QpState::Rtr,
        RdmapState::Rts => control::QpState::Rts,
        RdmapState::Closing => control::QpState::Closing,
        RdmapState::Terminate => control::QpState::Terminate,
        RdmapState::Error => control::QpState::Error,
    }
}
