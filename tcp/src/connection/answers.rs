//! ACKs in answer to unacceptable segments, and their rate limits. Each connection has limits of
//! its own, so that segments to one connection do not use up the answers of another. The limit over
//! all connections that RFC 5961 section 7 recommends applies to challenge ACKs only.

use crate::connection::context::TcpContext;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::receive_variables::ReceiveVariables;
use crate::wire::segment::Segment;

impl TcpContext<'_> {
    /// Answers a segment that may be forged with a challenge ACK (RFC 5961), within the rate
    /// limits.
    pub(crate) fn send_challenge_ack(&mut self, tcb: &mut Tcb) {
        let own = &mut self
            .shared
            .side_table
            .fields_of(self.id.index)
            .other_answers;
        if own.try_take(self.now) && self.shared.challenges.try_take(self.now) {
            self.shared.stats.challenge_acks += 1;
            self.schedule_output(tcb, ConnectionFlags::NEED_ACK);
        } else {
            self.shared.stats.challenges_skipped += 1;
        }
    }

    /// Answers a SYN on a synchronised connection with a challenge ACK, regardless of its sequence
    /// number (RFC 5961 section 4).
    pub(crate) fn on_unexpected_syn(&mut self, tcb: &mut Tcb) {
        self.shared.stats.syn_challenges += 1;
        self.send_challenge_ack(tcb);
    }

    /// Returns whether the connection may answer a segment that is outside the window or rejected
    /// by PAWS. Keepalive and zero-window probes have a limit of their own: a sender that does not
    /// know RCV.NXT must not use up the answers that show the peer that we are alive.
    pub(crate) fn may_answer(&mut self, rcv: &ReceiveVariables, seg: &Segment) -> bool {
        let fields = self.shared.side_table.fields_of(self.id.index);
        let place = seg.seq.distance_from(rcv.nxt);
        let may = if place == -1 || place == 0 {
            fields.probe_answers.try_take(self.now)
        } else {
            fields.other_answers.try_take(self.now)
        };
        self.shared.stats.challenges_skipped += u64::from(!may);
        may
    }
}
