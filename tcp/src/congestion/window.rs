//! The congestion window and the slow start threshold (RFC 5681 section 2). They lie in the cache line
//! of the send variables; only this module tree writes them.

use crate::base::sequence::SeqNr;

/// The largest window: the bytes in flight must stay below half the sequence space, with room for
/// arithmetic (RFC 9293 section 3.4).
pub(super) const MAX_WINDOW: u32 = 1 << 30;
/// Connections with shorter round trips, in ns, are not paced: they would span only a few ticks of
/// the timer wheel.
pub(super) const MIN_PACED_RTT: u64 = 500_000;

/// The slow start threshold in bytes. Until the path shows congestion it has one of two infinite
/// values, so that a single comparison identifies the connections that are not paced: in a fabric,
/// almost all connections almost always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlowStartThreshold(pub(super) u32);

impl SlowStartThreshold {
    /// No congestion was seen; new segments are not paced.
    pub(crate) const INFINITE: SlowStartThreshold = SlowStartThreshold(u32::MAX);
    /// No congestion was seen, but the window was not in use recently: new segments are paced (RFC
    /// 7661 section 4.4.2).
    const INFINITE_PACED: SlowStartThreshold = SlowStartThreshold(u32::MAX - 1);

    /// Returns the threshold in bytes; `None` if it is infinite.
    pub(crate) fn finite_bytes(self) -> Option<u32> {
        (self < Self::INFINITE_PACED).then_some(self.0)
    }
}

/// The limit of bytes on the wire, and the threshold at which slow start ends. It lies in the hot
/// part of a connection and therefore takes only 8 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CongestionWindow {
    pub(super) cwnd: u32,
    pub(super) ssthresh: SlowStartThreshold,
}

/// The send state of a connection that congestion control depends on.
#[derive(Clone, Copy)]
pub(crate) struct Flight {
    /// SND.UNA and SND.NXT.
    pub una: SeqNr,
    pub next: SeqNr,
    /// Payload bytes deemed on the wire (RFC 6675).
    pub pipe: u32,
    /// Payload bytes of a full segment.
    pub mss: u32,
    /// The smoothed round-trip time in ns, 0: not measured yet.
    pub srtt: u64,
}

impl Flight {
    /// FlightSize (RFC 5681 section 2), in bytes of sequence space.
    #[inline]
    pub(crate) fn flight_size(&self) -> u32 {
        self.next - self.una
    }

    /// Returns the state in flight before the ACK of `newly` bytes.
    pub(crate) fn before_ack_of(&self, newly: u32) -> Flight {
        Flight {
            una: self.una - newly,
            ..*self
        }
    }
}

impl CongestionWindow {
    /// The window of a connection that cannot send yet.
    pub(crate) const CLOSED: CongestionWindow = CongestionWindow {
        cwnd: 0,
        ssthresh: SlowStartThreshold::INFINITE,
    };

    /// Sets the initial window to `segments` segments of `mss` bytes, the size agreed in the
    /// handshake (RFC 6928).
    pub(crate) fn set_initial(&mut self, segments: u32, mss: u32) {
        self.cwnd = initial_window(segments, mss).min(MAX_WINDOW);
    }

    /// Returns the window in bytes.
    #[inline]
    pub(crate) fn cwnd(&self) -> u32 {
        self.cwnd
    }

    /// Returns the slow start threshold.
    #[inline]
    pub(crate) fn ssthresh(&self) -> SlowStartThreshold {
        self.ssthresh
    }

    /// Returns how many more bytes the window allows on the wire.
    #[inline]
    pub(crate) fn available(&self, pipe: u32) -> u32 {
        self.cwnd.saturating_sub(pipe)
    }

    /// Returns whether the connection is in slow start: the window grows by the acknowledged bytes
    /// until it reaches the threshold.
    #[inline]
    pub(crate) fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh.0
    }

    /// Returns whether new segments may be spread over the round trip. `false` for nearly all
    /// connections.
    #[inline]
    pub(crate) fn is_paced(&self) -> bool {
        self.ssthresh != SlowStartThreshold::INFINITE
    }

    /// Begins to pace the connection, if timers can divide its round trip.
    #[inline]
    pub(super) fn begin_pacing(&mut self, srtt: u64) {
        if !self.is_paced() && srtt >= MIN_PACED_RTT {
            self.ssthresh = SlowStartThreshold::INFINITE_PACED;
        }
    }

    /// Ends the pacing of an unused window, now in use again. After congestion the connection stays
    /// paced.
    pub(super) fn end_idle_pacing(&mut self) {
        if self.ssthresh == SlowStartThreshold::INFINITE_PACED {
            self.ssthresh = SlowStartThreshold::INFINITE;
        }
    }

    /// Reduces the window after a retransmission timeout to one segment in addition to those that
    /// may still arrive (RFC 5681 section 3.1).
    pub(super) fn collapse_to_one(&mut self, pipe: u32, mss: u32) {
        self.cwnd = pipe + mss;
    }

    /// Reduces the window to at most `ssthresh` bytes after congestion.
    pub(super) fn reduce_to(&mut self, ssthresh: u32) {
        self.ssthresh = SlowStartThreshold(ssthresh);
        self.cwnd = self.cwnd.min(ssthresh);
    }
}

/// Returns the initial window in bytes (RFC 6928 section 2).
#[inline]
pub(crate) fn initial_window(segments: u32, mss: u32) -> u32 {
    segments.max(1).saturating_mul(mss)
}
