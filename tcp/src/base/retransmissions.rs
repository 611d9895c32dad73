//! Retransmissions by cause.

/// Why a segment with data is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetransmissionCause {
    /// The retransmission timer expired (RFC 6298), and slow start after it.
    Timeout,
    /// An ACK reported the loss (RFC 8985 section 6.2, RFC 6582), or the path MTU was reduced.
    Fast,
    /// The tail was not acknowledged within the probe timeout (RFC 8985 section 7.3).
    TailProbe,
}

/// Segments of one connection that were sent again, by cause. The counts saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retransmissions {
    /// SYNs and SYN-ACKs.
    pub handshake: u32,
    /// Segments sent again after a retransmission timeout (RFC 6298).
    pub timeout: u32,
    /// Segments sent again because an ACK reported their loss (RFC 8985 section 6.2, RFC 6582), or
    /// because the path MTU was reduced below their size.
    pub fast: u32,
    /// Segments sent again as tail loss probes (RFC 8985 section 7.3).
    pub tail_probe: u32,
}

impl Retransmissions {
    /// Counts a retransmission of data.
    pub(crate) fn count(&mut self, cause: RetransmissionCause) {
        let count = match cause {
            RetransmissionCause::Timeout => &mut self.timeout,
            RetransmissionCause::Fast => &mut self.fast,
            RetransmissionCause::TailProbe => &mut self.tail_probe,
        };
        *count = count.saturating_add(1);
    }

    /// Counts a retransmission of our SYN or SYN-ACK.
    pub(crate) fn count_handshake(&mut self) {
        self.handshake = self.handshake.saturating_add(1);
    }

    /// Returns the sum over all causes.
    pub fn total(&self) -> u32 {
        [self.timeout, self.fast, self.tail_probe]
            .into_iter()
            .fold(self.handshake, u32::saturating_add)
    }
}
