//! A Terminate that arrives: what it ends, and which work request it blames.

use crate::ddp::{
    ControlOctets, Msn, QN_TERMINATE, TaggedHeader, UNTAGGED_HDR_LEN, UntaggedHeader,
};
use crate::environment::{QpEnv, QpEvent};
use crate::mpa::fpdu::LEN_FIELD;
use crate::queue_pair::error_mapping::{event_of, status_of};
use crate::queue_pair::{InMessage, QueuePair, RdmapState};
use crate::rdmap::RdmapOpcode;
use crate::rdmap::terminate::{self, ReceivedTerminate, TerminateCode};
use crate::stream::RxStream;
use siw_shm::Opcode;

impl QueuePair {
    /// The peer's Terminate ends the stream; none goes back (RFC 5040 section 4.8).
    pub(crate) fn terminate_arrived<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &impl RxStream,
        h: &UntaggedHeader,
        len: u32,
    ) {
        let mut b = [0; terminate::MAX_TERMINATE_LEN];
        let n = (len as usize).min(b.len());
        rx.peek(LEN_FIELD + UNTAGGED_HDR_LEN, &mut b[..n]);
        let sound = h.qn == QN_TERMINATE && h.msn == Msn::FIRST && h.mo == 0 && h.control.is_last();
        let parsed = ReceivedTerminate::parse(&b[..n]).ok().filter(|_| sound);
        self.state = RdmapState::Terminate;
        self.in_message = InMessage::None;
        let Some(t) = parsed else {
            // Conformance 78: a malformed Terminate is an error of this stream all the same.
            self.local_error = Some(TerminateCode::RDMAP_UNSPECIFIED);
            env.post_event(QpEvent::QpFatal);
            return;
        };
        self.received = Some(t.code);
        env.post_event(event_of(t.code));
        self.blame(&t);
        self.complete_ready(env);
    }

    /// Finds the work request that a Terminate is about: by the header that it quotes, else the
    /// oldest that is not finished.
    fn blame(&mut self, t: &ReceivedTerminate) {
        let status = status_of(t.code);
        let Some(hdr) = t.ddp else {
            if let Some(e) = self.sq.iter_mut().find(|e| !e.acked || !e.answered) {
                e.status = status;
            }
            return;
        };
        let c = ControlOctets {
            ddp: hdr[0],
            rdmap: hdr[1],
        };
        let (th, uh) = (TaggedHeader::parse(&hdr), UntaggedHeader::parse(&hdr));
        let hit =
            |e: &crate::queue_pair::send_queue::Entry| match RdmapOpcode::from_wire(c.opcode()) {
                Some(RdmapOpcode::Write) => {
                    matches!(e.opcode, Opcode::Write | Opcode::WriteWithImm)
                        && e.rkey == th.stag
                        && th.to.wrapping_sub(e.remote_addr) < u64::from(e.length.max(1))
                }
                Some(RdmapOpcode::ReadRequest) => {
                    matches!(e.opcode, Opcode::Read | Opcode::ReadWithInv)
                        && match t.read.filter(|_| t.swapped) {
                            // siw quotes the length of the read for its MSN (siw_send_terminate).
                            Some(r) => !e.answered && e.rkey == r.src_stag,
                            None => uh.msn.0.wrapping_sub(e.msn) < u32::from(e.parts),
                        }
                }
                Some(
                    RdmapOpcode::Send
                    | RdmapOpcode::SendInv
                    | RdmapOpcode::SendSe
                    | RdmapOpcode::SendSeInv,
                ) => match e.opcode {
                    Opcode::Send | Opcode::SendWithInv => e.msn == uh.msn.0,
                    Opcode::SendWithImm => e.msn.wrapping_add(1) == uh.msn.0,
                    _ => false,
                },
                Some(RdmapOpcode::Immediate | RdmapOpcode::ImmediateSe) => {
                    matches!(e.opcode, Opcode::WriteWithImm | Opcode::SendWithImm)
                        && e.parts > 0
                        && e.msn == uh.msn.0
                }
                Some(RdmapOpcode::AtomicRequest) => e.opcode.is_atomic() && e.msn == uh.msn.0,
                _ => false,
            };
        if let Some(e) = self.sq.iter_mut().find(|e| hit(e)) {
            e.status = status;
            // Whatever the acknowledgement says, the peer did not do it.
            e.acked = false;
        }
    }
}
