//! State of the wire oracle for each connection that it checks: sent and received ranges, and
//! retransmissions.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use siw_net::Instant;

use crate::byte_ranges::ByteRanges;
use crate::wire_view::{SYN, TcpView};

/// The endpoints of a connection: that of host 0, then that of host 1.
pub type FlowEnds = [SocketAddr; 2];

/// A sent segment, whose fate is reported to
/// [`WireOracle::on_way`](crate::wire_oracle::WireOracle::on_way).
pub struct SentRange {
    pub(super) flow: usize,
    pub(super) from: usize,
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) retransmission: Option<SentAgain>,
    /// The range that this segment reports as a duplicate, if the segment has no timestamps: then
    /// its receiver cannot recognise a duplicate of the report.
    pub(super) duplicate: Option<(u32, u32)>,
}

/// A retransmission whose fate is not yet known.
pub(super) struct SentAgain {
    pub(super) needed: bool,
    pub(super) is_tail_probe: bool,
    /// Its boundaries are not those of the first transmission.
    pub(super) is_cut: bool,
    pub(super) timeouts_before: u64,
    pub(super) timeouts: u64,
    /// Window reductions of the host when this end last sent data, and now.
    pub(super) reductions_before: u64,
    pub(super) reductions: u64,
    pub(super) at: Instant,
}

/// Retransmissions of an episode that start at one position.
#[derive(Default)]
pub(super) struct RangeSentAgain {
    /// No copy had arrived before the retransmission.
    pub(super) needed: bool,
    pub(super) times: u32,
    /// How many of these arrive, including duplicates made by the network.
    pub(super) copies: u32,
}

/// The retransmissions that belong to one reduction of the window: from the first one until all data
/// then in flight is acknowledged, or until the next reduction. A timeout during a recovery, or after
/// one whose last ACK was lost, is a separate reduction.
#[derive(Clone, Copy, Debug)]
pub struct RecoveryEpisode {
    /// End of the data in flight when the episode began.
    pub(super) recover: u32,
    /// The first retransmission was needed.
    pub first_needed: bool,
    /// At least one retransmission was needed.
    pub needed: bool,
    /// The first retransmission may be a tail loss probe, which reduces no window.
    pub may_be_probe: bool,
    /// Timeouts of the host before the episode, and when it began.
    pub timeouts_before: u64,
    pub(super) timeouts: u64,
    /// The one before this may go on: its data is not all acknowledged, and what separates the two may be
    /// a fast recovery of another connection.
    pub may_go_on: bool,
    /// Window reductions of the host, including this one. Reductions of other connections also count
    /// and split the episode in two, each checked separately.
    pub(super) reductions: u64,
    /// When the first retransmission was sent.
    pub began_at: Instant,
}

/// Data sent by and received at one end. Positions count from the end's own SYN, which is 0.
#[derive(Default)]
pub(super) struct FlowSide {
    pub(super) iss: Option<u32>,
    pub(super) window_scale: Option<u8>,
    /// End of the sent data.
    pub(super) sent: u32,
    pub(super) fin_at: Option<u32>,
    /// First transmissions: start and end.
    pub(super) segments: BTreeMap<u32, u32>,
    /// Sent ranges of which a copy arrives.
    pub(super) arriving: ByteRanges,
    /// Ranges of the peer's data that arrived here.
    pub(super) received: ByteRanges,
    /// Highest acknowledgement of this end's data that arrived here, and the right edge.
    pub(super) acked: u32,
    pub(super) edge: u32,
    /// Acknowledgement and right edge of the last segment that this end sent.
    pub(super) last_ack: Option<u32>,
    pub(super) last_edge: u32,
    pub(super) last_tsval: Option<u32>,
    pub(super) newest_peer_tsval: Option<u32>,
    /// Segments in flight: start, end, time of the last transmission.
    pub(super) outstanding: VecDeque<(u32, u32, Instant)>,
    /// Timeouts of the host when this end last sent data, a SYN or a FIN. Timeouts of other connections
    /// also count: a reduction may then be attributed to a timeout by mistake.
    pub(super) timeouts: u64,
    /// Window reductions of the host at that time.
    pub(super) reductions: u64,
    /// The last episode, its retransmitted ranges, and the previous episode.
    pub(super) episode: Option<RecoveryEpisode>,
    pub(super) sent_again: BTreeMap<u32, RangeSentAgain>,
    pub(super) episode_before: Option<RecoveryEpisode>,
    /// The host's timeouts when this end last sent again what the peer could not acknowledge because it
    /// searched for this end's address, and the end of the data that was sent then.
    pub(super) held_up: Option<(u64, u32)>,
    pub(super) heard_at: Instant,
    pub(super) acked_at: Instant,
}

impl FlowSide {
    /// Notes a retransmission of `start..end`. Returns when its first segment was last sent.
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

    /// Returns whether the data before `end` is sent again because the peer searched for this end's
    /// address: it did so since that data was sent (`has_searched`), or since data whose timeout takes
    /// everything in flight for lost (RFC 5681 section 3.1).
    pub(super) fn is_held_up(&mut self, has_searched: bool, end: u32, timeouts: u64) -> bool {
        if has_searched {
            self.held_up = Some((timeouts, self.sent));
        }
        (self.held_up).is_some_and(|(at, sent)| has_searched || at == timeouts && end <= sent)
    }

    /// Returns whether each end has sent its FIN and the other has acknowledged it.
    pub(super) fn is_over(&self, peer: &FlowSide) -> bool {
        let is_acked = |fin: Option<u32>, ack: u32| fin.is_some_and(|fin| ack > fin);
        is_acked(self.fin_at, self.acked) && is_acked(peer.fin_at, self.last_ack.unwrap_or(0))
    }

    /// Updates whether a retransmission of the last episode was needed.
    pub(super) fn judge_episode(&mut self) {
        if let Some(episode) = &mut self.episode {
            let mut ranges = self.sent_again.values();
            episode.needed = ranges.any(|range| range.needed && range.copies <= range.times);
        }
    }
}

pub(super) struct Flow {
    pub(super) ends: FlowEnds,
    /// The connection before this one between the same endpoints. One end may still use it while the
    /// other has opened this one.
    pub(super) earlier: Option<usize>,
    pub(super) sides: [FlowSide; 2],
    /// The MTU of the path decreased: retransmissions may be split into smaller segments.
    pub(super) is_recut: bool,
    /// This host lost the connection and answered an old SYN that was still in transit, with this
    /// initial sequence number; the other end keeps the first SYN-ACK. Segments of the half-open
    /// connection say nothing about this one.
    pub(super) answered_anew: Option<(usize, u32)>,
    /// This host answered a repeated SYN anew, before the peer had answered its SYN-ACK with this initial
    /// sequence number.
    pub(super) replaced: Option<(usize, u32)>,
}

impl Flow {
    /// Returns whether a segment from `from` belongs to a half-open connection unknown to the other end.
    pub(super) fn is_of_new_answer(&self, from: usize, view: &TcpView<'_>) -> bool {
        self.answered_anew.is_some_and(|(host, iss)| {
            host == from && (view.flags & SYN != 0 || view.seq == iss.wrapping_add(1))
        })
    }
}

/// State of the neighbour resolution of a host.
#[derive(Clone, Copy)]
pub(super) enum NeighbourSearch {
    Asked,
    AnsweredAt(Instant),
}
