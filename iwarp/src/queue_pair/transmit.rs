//! Transmit side of a queue pair: selects the next FPDU and builds its bytes.

use super::fpdu_builder::FpduBuilder;
use super::requester::{PLACEHOLDER_STAG, PreparedRequest};
use super::state::{BuildError, RdmapState};
use super::transmitter::OpenMessage;
use super::{LINES_FOR_RECEIVING, LINES_FOR_SENDING, QueuePair};
use crate::ddp::{ControlOctets, TAGGED_HDR_LEN, TaggedHeader, UNTAGGED_HDR_LEN};
use crate::environment::QpEnv;
use crate::mpa::RtrKind;
use crate::rdmap::terminate::{TerminateCode, TerminatePayload};
use crate::rdmap::{READ_REQUEST_LEN, RdmapOpcode, ReadRequestHeader};
use crate::record::{FpduKind, FpduRecord, FpduRun, FrameBuilder, OutgoingFpdu};
use siw_memory::KeyReader;
use siw_shm::prefetch::prefetch_lines;
use std::ops::Range;

impl QueuePair {
    /// Returns the next FPDU that may be sent; TCP sets PSH when it ends a message
    /// ([`FpduRecord::is_last`]). `room`: bytes that TCP accepts now; an FPDU is never cut to fit.
    /// `None`: nothing to send, no room, or a wait (for ORD, a fence, the initiator's first FPDU).
    /// Takes work requests out of the ring as needed.
    ///
    /// Why it is fast: the whole path of a request to TCP is inlined into the caller's loop, so
    /// neither the request nor the record passes through memory between calls.
    #[inline(always)]
    pub fn next_record<E: QpEnv>(&mut self, env: &mut E, room: usize) -> Option<OutgoingFpdu> {
        match self.state {
            RdmapState::Rts if !self.may_send => return None,
            RdmapState::Rts => {
                if self.is_rtr_pending {
                    return self.next_ready_to_receive(room);
                }
                let next = match self.transmitter.open_message {
                    OpenMessage::None => self.start_message(env, room),
                    _ => self.continue_message(env, room),
                };
                if next.is_some() || self.state != RdmapState::Terminate {
                    return next;
                }
            }
            RdmapState::Closing => return self.continue_message(env, room),
            _ => {}
        }
        self.next_terminate(room)
    }

    /// Prefetches the cache lines of `self` that sending a message and completing it access.
    #[inline]
    pub fn prefetch_send_state(&self) {
        prefetch_lines((&raw const *self).cast(), LINES_FOR_SENDING);
    }

    /// Prefetches the cache lines of `self` that receiving a Write accesses.
    #[inline]
    pub fn prefetch_receive_state(&self) {
        prefetch_lines((&raw const *self).cast(), LINES_FOR_RECEIVING.0);
        prefetch_lines((&raw const self.receive).cast(), LINES_FOR_RECEIVING.1);
    }

    /// Prefetches the memory outside `self` that completing the oldest work request touches.
    #[inline]
    pub fn prefetch_for_completing(&self) {
        self.requester.prefetch_for_completing();
    }

    /// For a queue pair without outstanding work requests: prefetches the memory outside `self` that
    /// [`next_records`](Self::next_records) touches.
    #[inline]
    pub fn prefetch_for_sending(&mut self) {
        self.requester.prefetch_for_sending();
    }

    /// Passes up to `most` FPDUs to `push`, in the order of [`next_record`](Self::next_record), while
    /// they fit into `room`. `push` also gets the length of the message that the run ends, or of each of the
    /// messages; `None` if it ends none with payload. `true`: more could follow at once.
    #[inline(always)]
    pub fn next_records<E: QpEnv>(
        &mut self,
        env: &mut E,
        mut room: usize,
        most: u32,
        mut push: impl FnMut(FpduRun, Option<u32>),
    ) -> bool {
        let mut left = most;
        let mut may_be_run = true;
        while room > 0 {
            if left == 0 {
                return true;
            }
            let next = may_be_run.then(|| self.next_run(env, room, left)).flatten();
            let run = match next {
                Some((run, has_next)) => {
                    may_be_run = has_next;
                    run
                }
                None => {
                    may_be_run = true;
                    let Some(fpdu) = self.next_record(env, room) else {
                        return std::mem::take(&mut self.transmitter.has_yielded);
                    };
                    fpdu.record.into()
                }
            };
            left -= u32::from(run.count());
            room = room.saturating_sub(run.unit_len() as usize * usize::from(run.count()));
            push(run, self.transmitter.take_ended());
        }
        false
    }

    /// Returns a run of FPDUs, if the next FPDUs can be produced together. `false` with a run: the
    /// request after them, if any, is of another kind.
    #[inline(always)]
    fn next_run<E: QpEnv>(
        &mut self,
        env: &mut E,
        room: usize,
        most: u32,
    ) -> Option<(FpduRun, bool)> {
        if self.state != RdmapState::Rts || self.is_rtr_pending || !self.may_send {
            return None;
        }
        let tx = &mut self.transmitter;
        match tx.open_message {
            OpenMessage::Request => {
                let run = self.requester.take_full_segments(tx, room, most)?;
                Some((run, true))
            }
            OpenMessage::None if !self.responder.has_unsent() && !tx.has_markers() => {
                tx.forget_lead();
                let attr = &self.attr;
                self.requester.take_messages(env, attr, tx, room, most)
            }
            _ => None,
        }
    }

    /// Returns and clears the yield flag: the last [`next_record`](Self::next_record) returned `None`
    /// because the budget of one turn was used up. Call it again after other queue pairs had their
    /// turn.
    pub fn take_yielded(&mut self) -> bool {
        std::mem::take(&mut self.transmitter.has_yielded)
    }

    /// Returns the next segment of the message in progress.
    #[inline]
    fn continue_message<E: QpEnv>(&mut self, env: &mut E, room: usize) -> Option<OutgoingFpdu> {
        match self.transmitter.open_message {
            OpenMessage::Request => self.requester.next_segment(&mut self.transmitter, room),
            OpenMessage::Response => self.next_response(env, room),
            OpenMessage::None if self.answers_after_fin => self.next_response(env, room),
            OpenMessage::None => None,
        }
    }

    /// Starts the next message; responses and requests share the stream message by message.
    #[inline(always)]
    fn start_message<E: QpEnv>(&mut self, env: &mut E, room: usize) -> Option<OutgoingFpdu> {
        let has_response = self.responder.has_unsent();
        if !has_response {
            self.transmitter.forget_lead();
        } else if self.transmitter.is_responses_turn() {
            return self.next_response(env, room);
        }
        let (requester, mut context) = self.requester_with_context();
        match requester.prepare_request(env, &mut context) {
            Ok(PreparedRequest::Ready) => {
                return self.requester.next_segment(&mut self.transmitter, room);
            }
            Ok(PreparedRequest::Nothing) => self.transmitter.forget_lead(),
            Ok(PreparedRequest::Yielded) => self.transmitter.has_yielded = true,
            Err(_) => {
                self.fail_stream(env, TerminateCode::LOCAL_CATASTROPHIC, None);
                self.complete_ready(env);
            }
        }
        if has_response && self.state == RdmapState::Rts {
            return self.next_response(env, room);
        }
        None
    }

    #[inline(never)]
    fn next_response<E: QpEnv>(&mut self, env: &mut E, room: usize) -> Option<OutgoingFpdu> {
        let tx = &mut self.transmitter;
        match self.responder.next_segment(env, &self.attr, tx, room) {
            Ok(next) => next,
            Err(error) => {
                self.fail_stream(env, error.code, Some(&error.request));
                None
            }
        }
    }

    /// The ready-to-receive message precedes everything else (RFC 6581 section 9.2).
    fn next_ready_to_receive(&mut self, room: usize) -> Option<OutgoingFpdu> {
        let kind = self.rtr?;
        let ulpdu_len = match kind {
            RtrKind::Write => TAGGED_HDR_LEN,
            RtrKind::Send => UNTAGGED_HDR_LEN,
            RtrKind::Read => UNTAGGED_HDR_LEN + READ_REQUEST_LEN,
        } as u16;
        let tx = &mut self.transmitter;
        let next = tx.push_message(FpduKind::Rtr, ulpdu_len, room)?;
        self.is_rtr_pending = false;
        self.requester.on_ready_to_receive_sent(kind);
        Some(next)
    }

    fn next_terminate(&mut self, room: usize) -> Option<OutgoingFpdu> {
        let terminate = self.terminate.as_mut()?;
        if terminate.is_queued || !self.may_send {
            return None;
        }
        let ulpdu_len = (UNTAGGED_HDR_LEN + terminate.payload.as_bytes().len()) as u16;
        let tx = &mut self.transmitter;
        let next = tx.push_message(FpduKind::Terminate, ulpdu_len, room)?;
        terminate.is_queued = true;
        Some(next)
    }

    /// Builds the FPDUs `units` of a run at the end of the frame, at each transmission: header, payload,
    /// pad, CRC. Checks the memory keys again. On failure, returns the record that cannot be built, and
    /// the error; the frame then has to be dropped.
    #[inline]
    pub fn build_fpdus(
        &self,
        keys: &KeyReader,
        run: &FpduRun,
        units: Range<u16>,
        frame: &mut impl FrameBuilder,
    ) -> Result<(), (FpduRecord, BuildError)> {
        let mut next = units.start;
        if units.len() > 1 && run.kind() == FpduKind::Request {
            let (requester, attr) = (&self.requester, &self.attr);
            next +=
                requester.append_copied_run(keys, attr, (run, units.clone()), self.crc, frame)?;
        }
        while next < units.end {
            let record = run.get(next);
            let built = self.build_fpdu(keys, &record, frame);
            built.map_err(|error| (record, error))?;
            next += 1;
        }
        Ok(())
    }

    /// Builds one FPDU. Never inlined itself; it inlines the code that nearly all FPDUs need.
    #[inline(never)]
    fn build_fpdu(
        &self,
        keys: &KeyReader,
        record: &FpduRecord,
        frame: &mut impl FrameBuilder,
    ) -> Result<(), BuildError> {
        let (attr, crc) = (&self.attr, self.crc);
        let is_built = match record.kind {
            FpduKind::Request => self
                .requester
                .append_copied(keys, attr, record, crc, frame)?,
            FpduKind::Response => self
                .responder
                .append_copied(keys, attr, record, crc, frame)?,
            _ => false,
        };
        if is_built {
            return Ok(());
        }
        self.build_in_parts(keys, record, frame)
    }

    /// Builds an FPDU of any kind, part by part.
    #[inline(never)]
    fn build_in_parts<B: FrameBuilder>(
        &self,
        keys: &KeyReader,
        record: &FpduRecord,
        frame: &mut B,
    ) -> Result<(), BuildError> {
        let attr = &self.attr;
        let mut fpdu = FpduBuilder::new(self.crc, record, frame);
        match record.kind {
            FpduKind::Request => self
                .requester
                .build_segment(keys, attr, record, &mut fpdu)?,
            FpduKind::Immediate => self.requester.build_immediate(record, &mut fpdu)?,
            FpduKind::Response => self
                .responder
                .build_segment(keys, attr, record, &mut fpdu)?,
            FpduKind::Rtr => self.append_ready_to_receive(&mut fpdu)?,
            FpduKind::Terminate => {
                let terminate = self.terminate.as_ref();
                let terminate = terminate.ok_or(BuildError::MessageCompleted)?;
                fpdu.append_header(&TerminatePayload::ddp_header().to_bytes());
                fpdu.append_bytes(terminate.payload.as_bytes());
            }
        }
        fpdu.finish();
        Ok(())
    }

    fn append_ready_to_receive<B: FrameBuilder>(
        &self,
        fpdu: &mut FpduBuilder<'_, B>,
    ) -> Result<(), BuildError> {
        match self.rtr.ok_or(BuildError::MessageCompleted)? {
            RtrKind::Write => {
                let header = TaggedHeader {
                    control: ControlOctets::new(RdmapOpcode::Write, true),
                    stag: PLACEHOLDER_STAG,
                    to: 0,
                };
                fpdu.append_header(&header.to_bytes());
            }
            RtrKind::Send => fpdu.append_short_message(RdmapOpcode::Send, self.first_msn, &[]),
            RtrKind::Read => fpdu.append_read_request(
                self.first_msn,
                &ReadRequestHeader {
                    sink_stag: PLACEHOLDER_STAG,
                    src_stag: PLACEHOLDER_STAG,
                    ..ReadRequestHeader::default()
                },
            ),
        }
        Ok(())
    }
}
