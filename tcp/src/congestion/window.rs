//! The congestion window and the slow start threshold (RFC 5681 section 2). They lie in the first
//! cache line of a connection; only this folder writes them.

use crate::base::sequence::SeqNr;

/// No window is larger: what is in flight must stay below half the sequence space, with room for
/// arithmetic (RFC 9293 section 3.4).
pub(super) const MAX_WINDOW: u32 = 1 << 30;
/// Connections with shorter round trips, in ns, are not paced: these are only a few ticks of the timer
/// wheel.
pub(super) const MIN_PACED_RTT: u64 = 500_000;

/// The slow start threshold in bytes. Infinite until the path shows congestion, in one of two values, so
/// that a single comparison finds the connections that are not paced: in a fabric, nearly all of them
/// nearly always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlowStartThreshold(pub(super) u32);

impl SlowStartThreshold {
    /// No congestion was seen, and new segments are not paced.
    pub(crate) const INFINITE: SlowStartThreshold = SlowStartThreshold(u32::MAX);
    /// No congestion was seen, but the window was not in use of late: new segments are paced
    /// (RFC 7661 section 4.4.2).
    const INFINITE_PACED: SlowStartThreshold = SlowStartThreshold(u32::MAX - 1);

    /// The threshold in bytes; `None`: it is infinite.
    pub(crate) fn finite_bytes(self) -> Option<u32> {
        (self < Self::INFINITE_PACED).then_some(self.0)
    }
}

/// How many bytes may be on the wire, and where slow start ends. It lies in the hot part of a connection,
/// so it has 8 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CongestionWindow {
    pub(super) cwnd: u32,
    pub(super) ssthresh: SlowStartThreshold,
}

/// What a connection has on the wire, as congestion control needs to know it.
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
}

impl CongestionWindow {
    /// The window of a connection that cannot send yet.
    pub(crate) const CLOSED: CongestionWindow = CongestionWindow {
        cwnd: 0,
        ssthresh: SlowStartThreshold::INFINITE,
    };

    /// The handshake agreed on segments of `mss` bytes: the initial window of `segments` of them
    /// (RFC 6928).
    pub(crate) fn set_initial(&mut self, segments: u32, mss: u32) {
        self.cwnd = initial_window(segments, mss).min(MAX_WINDOW);
    }

    /// The window in bytes.
    #[inline]
    pub(crate) fn cwnd(&self) -> u32 {
        self.cwnd
    }

    /// The slow start threshold.
    #[inline]
    pub(crate) fn ssthresh(&self) -> SlowStartThreshold {
        self.ssthresh
    }

    /// How many bytes more the window lets onto the wire.
    #[inline]
    pub(crate) fn available(&self, pipe: u32) -> u32 {
        self.cwnd.saturating_sub(pipe)
    }

    /// Whether the connection is in slow start: the window grows by what is acknowledged until it reaches the
    /// threshold.
    #[inline]
    pub(crate) fn in_slow_start(&self) -> bool {
        self.cwnd < self.ssthresh.0
    }

    /// Whether new segments may be spread over the round trip. `false` for nearly all connections.
    #[inline]
    pub(crate) fn is_paced(&self) -> bool {
        self.ssthresh != SlowStartThreshold::INFINITE
    }

    /// From now on the connection is paced, if timers can divide its round trip.
    #[inline]
    pub(super) fn begin_pacing(&mut self, srtt: u64) {
        if !self.is_paced() && srtt >= MIN_PACED_RTT {
            self.ssthresh = SlowStartThreshold::INFINITE_PACED;
        }
    }

    /// The window is in use again. A connection that has seen congestion stays paced.
    pub(super) fn end_idle_pacing(&mut self) {
        if self.ssthresh == SlowStartThreshold::INFINITE_PACED {
            self.ssthresh = SlowStartThreshold::INFINITE;
        }
    }

    /// A retransmission timeout: one segment, beside those that may still arrive (RFC 5681 section
    /// 3.1).
    pub(super) fn collapse_to_one(&mut self, pipe: u32, mss: u32) {
        self.cwnd = pipe + mss;
    }

    /// Congestion was found: the window is at most `ssthresh` bytes from now on.
    pub(super) fn reduce_to(&mut self, ssthresh: u32) {
        self.ssthresh = SlowStartThreshold(ssthresh);
        self.cwnd = self.cwnd.min(ssthresh);
    }
}

/// The initial window in bytes (RFC 6928 section 2).
#[inline]
pub(crate) fn initial_window(segments: u32, mss: u32) -> u32 {
    segments.max(1).saturating_mul(mss)
}
