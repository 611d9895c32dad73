//! Finds the work request that a received Terminate refers to.

use super::Requester;
use super::work_request_queue::SendEntry;
use crate::ddp::{ControlOctets, MAX_HDR_LEN, TaggedHeader, UntaggedHeader};
use crate::queue_pair::error_mapping::completion_status;
use crate::rdmap::RdmapOpcode;
use crate::rdmap::terminate::ReceivedTerminate;
use siw_shm::Opcode;

impl Requester {
    /// Fails the work request that a Terminate refers to: the one whose header it quotes, or else the
    /// oldest that is not finished on the wire. A finished one may still be in the queue, behind others
    /// or because its payload is referenced.
    pub fn on_terminate(&mut self, terminate: &ReceivedTerminate) {
        let Some(quoted) = terminate.ddp else {
            let status = completion_status(terminate.code, None);
            if let Some(entry) = self.queue.iter_mut().find(|entry| !entry.is_done()) {
                entry.status = status;
            }
            return;
        };
        let status = completion_status(terminate.code, quoted_opcode(&quoted));
        let is_quoted = |entry: &&mut SendEntry| is_quoted(entry, &quoted, terminate);
        if let Some(entry) = self.queue.iter_mut().find(is_quoted) {
            entry.status = status;
            // The peer did not execute it, even if TCP acknowledged it.
            entry.is_acked = false;
        }
    }
}

fn quoted_opcode(quoted: &[u8; MAX_HDR_LEN]) -> Option<RdmapOpcode> {
    let control = ControlOctets {
        ddp: quoted[0],
        rdmap: quoted[1],
    };
    RdmapOpcode::from_wire(control.opcode())
}

/// Returns whether the quoted DDP header belongs to a segment of this work request.
fn is_quoted(entry: &SendEntry, quoted: &[u8; MAX_HDR_LEN], terminate: &ReceivedTerminate) -> bool {
    let Some(opcode) = quoted_opcode(quoted) else {
        return false;
    };
    let msn = UntaggedHeader::parse(quoted).msn.0;
    match opcode {
        RdmapOpcode::Write => {
            let header = TaggedHeader::parse(quoted);
            matches!(entry.opcode, Opcode::Write | Opcode::WriteWithImm)
                && entry.rkey == header.stag
                && header.to.wrapping_sub(entry.remote_addr) < u64::from(entry.length.max(1))
        }
        RdmapOpcode::ReadRequest => {
            matches!(entry.opcode, Opcode::Read | Opcode::ReadWithInv)
                && match terminate.read.filter(|_| terminate.is_siw_order) {
                    // Linux siw quotes the length of the Read in the place of the MSN (PROTOCOL.md
                    // section 7.1).
                    Some(read) => !entry.is_answered && entry.rkey == read.src_stag,
                    None => msn.wrapping_sub(entry.msn) < u32::from(entry.messages_sent),
                }
        }
        RdmapOpcode::Send | RdmapOpcode::SendInv | RdmapOpcode::SendSe | RdmapOpcode::SendSeInv => {
            match entry.opcode {
                Opcode::Send | Opcode::SendWithInv => entry.msn == msn,
                Opcode::SendWithImm => entry.msn.wrapping_add(1) == msn,
                _ => false,
            }
        }
        RdmapOpcode::Immediate | RdmapOpcode::ImmediateSe => {
            matches!(entry.opcode, Opcode::WriteWithImm | Opcode::SendWithImm)
                && entry.messages_sent > 0
                && entry.msn == msn
        }
        RdmapOpcode::AtomicRequest => entry.opcode.is_atomic() && entry.msn == msn,
        _ => false,
    }
}
