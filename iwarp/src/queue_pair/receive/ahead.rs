//! Responses behind a message that waits for a receive work request. The message waits, not the
//! stream: a consumer that posts its receives only after a Read has completed would otherwise wait for
//! ever. Responses and the Terminate are processed where they lie in the stream, and skipped when the
//! stream reaches them. Writes are placed on the way: a Read completes after the payload of every Write
//! that precedes its response is in memory. A Write that cannot be placed stops the processing; its
//! error is found when the stream reaches it. All other messages keep their order behind the waiting
//! one.
//!
//! The window bounds the stream behind the message.

use crate::ddp::ControlOctets;
use crate::environment::QpEnv;
use crate::mpa::fpdu::{FpduSource, PlainStream};
use crate::queue_pair::QueuePair;
use crate::queue_pair::state::RdmapState;
use crate::rdmap::RdmapOpcode;
use crate::rdmap::terminate::OffendingSegment;
use crate::stream::{RxStream, StreamTail};

/// Maximum number of FPDUs examined behind one waiting message: each is searched from the start of the
/// stream.
const EXAMINED_MAX: u32 = 4096;

impl QueuePair {
    /// Processes the responses in `rx` behind the waiting message at its start.
    #[cold]
    pub(super) fn process_ahead<E: QpEnv>(&mut self, env: &mut E, rx: &impl RxStream) {
        let start = self.receive.out_of_order.position;
        let mut ahead = self.receive.ahead.take().unwrap_or_default();
        if ahead.waiting_at != start {
            (ahead.waiting_at, ahead.examined) = (start, 0);
            ahead.examined_to = ahead.examined_to.max(start);
        }
        let mut behind = StreamTail {
            rx,
            start: (ahead.examined_to - start) as usize,
        };
        let mut source = PlainStream(&mut behind);
        while ahead.examined < EXAMINED_MAX
            && matches!(self.state, RdmapState::Rts | RdmapState::Closing)
            && let Some(fpdu) = source.next_fpdu()
        {
            // An error is reported when the stream reaches it.
            if source.verify(&fpdu, self.crc).is_err() {
                break;
            }
            let control = ControlOctets {
                ddp: fpdu.hdr[0],
                rdmap: fpdu.hdr[1],
            };
            let opcode = RdmapOpcode::from_wire(control.opcode());
            let is_ahead = matches!(
                opcode,
                Some(
                    RdmapOpcode::ReadResponse
                        | RdmapOpcode::AtomicResponse
                        | RdmapOpcode::Terminate
                )
            );
            if opcode == Some(RdmapOpcode::Write) {
                let (keys, position) = (env.keys(), ahead.examined_to);
                let receive = &mut self.receive;
                if !receive.place_write_ahead(keys, &self.attr, &source, &fpdu, position) {
                    break;
                }
            } else if is_ahead {
                if let Err(error) = self.process_segment(env, &source, &fpdu) {
                    let offender = OffendingSegment {
                        ulpdu_len: fpdu.ulpdu_len,
                        hdr: fpdu.hdr,
                        read: error.read,
                    };
                    self.fail_stream(env, error.code, Some(&offender));
                    break;
                }
                ahead.processed.push_back(ahead.examined_to);
            }
            source.take(&fpdu);
            ahead.examined += 1;
            ahead.examined_to += fpdu.stream_len as u64;
        }
        self.receive.ahead = Some(ahead);
    }
}
