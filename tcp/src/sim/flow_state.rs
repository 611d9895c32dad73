//! What the wire oracle keeps of the connections that it judges: what each end sent, what arrived
//! there, and what was sent again.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use crate::base::time::Instant;
use crate::sim::byte_ranges::ByteRanges;
use crate::sim::wire_view::{SYN, TcpView};

/// The ends of a connection: that of host 0, that of host 1.
pub type FlowEnds = [SocketAddr; 2];

/// A segment that was sent: [`WireOracle::on_way`](crate::sim::wire_oracle::WireOracle::on_way) is told
/// what becomes of it.
pub struct SentRange {
    pub(super) flow: usize,
    pub(super) from: usize,
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) retransmission: Option<SentAgain>,
    /// What the peer had sent and this segment reports as a duplicate, if nothing shows when it is
    /// itself doubled.
    pub(super) duplicate: Option<(u32, u32)>,
}

/// A retransmission, before its fate is known.
pub(super) struct SentAgain {
    pub(super) needed: bool,
    pub(super) is_tail_probe: bool,
    pub(super) timeouts_before: u64,
    /// Reductions of the host's windows until then.
    pub(super) reductions: u64,
    pub(super) at: Instant,
}

/// What an episode sent again from one position on.
#[derive(Default)]
pub(super) struct RangeSentAgain {
    /// Before it was sent again no copy arrived.
    pub(super) needed: bool,
    pub(super) times: u32,
    /// How many of these arrive, with those that the network made.
    pub(super) copies: u32,
}

/// The retransmissions for which one reduction of the window was made: from the first one until all
/// that was in flight then is acknowledged, or until the window is reduced once more. A timeout in
/// a recovery, or after one whose last ACK was lost, is a reduction of its own.
#[derive(Clone, Copy, Debug)]
pub struct RecoveryEpisode {
    /// The end of what was in flight when it began.
    pub(super) recover: u32,
    /// The first retransmission was needed.
    pub first_needed: bool,
    /// Any was.
    pub needed: bool,
    /// Timeouts of the host before it.
    pub timeouts_before: u64,
    /// Reductions of the host's windows, its own with them. Those of another connection count too, and
    /// divide the episode in two, of which each is judged alone.
    pub(super) reductions: u64,
    /// When the first retransmission was sent.
    pub began_at: Instant,
}

/// What one end sent, and what arrived there. Positions count from the end's own SYN, which is 0.
#[derive(Default)]
pub(super) struct FlowSide {
    pub(super) iss: Option<u32>,
    pub(super) window_scale: Option<u8>,
    /// The end of what was sent.
    pub(super) sent: u32,
    pub(super) fin_at: Option<u32>,
    /// First transmissions: start and end.
    pub(super) segments: BTreeMap<u32, u32>,
    /// Of what was sent, what arrives.
    pub(super) arriving: ByteRanges,
    /// What of the peer's arrived here.
    pub(super) received: ByteRanges,
    /// Highest acknowledgement of this end's data that arrived here, and right edge.
    pub(super) acked: u32,
    pub(super) edge: u32,
    /// Acknowledgement and right edge of the last segment that this end sent.
    pub(super) last_ack: Option<u32>,
    pub(super) last_edge: u32,
    pub(super) last_tsval: Option<u32>,
    pub(super) newest_peer_tsval: Option<u32>,
    /// In flight: start, end, when it was last sent.
    pub(super) outstanding: VecDeque<(u32, u32, Instant)>,
    /// Timeouts of the host when this end last sent text, a SYN or a FIN. Those of other connections
    /// count too: a reduction may then be taken for one that a timeout made.
    pub(super) timeouts: u64,
    /// The last episode, what it sent again, and the one before it.
    pub(super) episode: Option<RecoveryEpisode>,
    pub(super) sent_again: BTreeMap<u32, RangeSentAgain>,
    pub(super) episode_before: Option<RecoveryEpisode>,
    pub(super) heard_at: Instant,
    pub(super) acked_at: Instant,
}

impl FlowSide {
    /// `start..end` is sent once more. Returns when its first segment was last sent.
    pub(super) fn note_sent_again(
        &mut self,
        start: u32,
        end: u32,
        now: Instant,
    ) -> Option<Instant> {
        let first = self
            .outstanding
            .partition_point(|segment| segment.1 <= start);
        let before = self.outstanding.get(first).map(|segment| segment.2);
        for segment in self.outstanding.range_mut(first..) {
            if segment.0 >= end {
                break;
            }
            segment.2 = now;
        }
        before
    }

    /// Of what the last episode sent again, whether anything was needed.
    pub(super) fn judge_episode(&mut self) {
        if let Some(episode) = &mut self.episode {
            let mut ranges = self.sent_again.values();
            episode.needed = ranges.any(|range| range.needed && range.copies <= range.times);
        }
    }
}

pub(super) struct Flow {
    pub(super) ends: FlowEnds,
    pub(super) sides: [FlowSide; 2],
    /// The path narrowed: retransmissions may be cut smaller.
    pub(super) is_recut: bool,
    /// This host lost the connection and answered a SYN that was still on its way once more, with
    /// this initial sequence number; the other end stays with the first answer. What the half-open
    /// connection sends says nothing of this one.
    pub(super) answered_anew: Option<(usize, u32)>,
}

impl Flow {
    /// Whether a segment from `from` is of a half-open connection that the other end does not know.
    pub(super) fn is_of_new_answer(&self, from: usize, view: &TcpView<'_>) -> bool {
        self.answered_anew.is_some_and(|(host, iss)| {
            host == from && (view.flags & SYN != 0 || view.seq == iss.wrapping_add(1))
        })
    }
}

/// Whether a host that has asked everybody for its neighbour has been answered.
#[derive(Clone, Copy)]
pub(super) enum NeighbourSearch {
    Asked,
    AnsweredAt(Instant),
}
