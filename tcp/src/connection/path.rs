//! The path to a connection's peer: the headers of the frames, their link-layer destination (ARP,
//! RFC 826; NDP, RFC 4861), and the end of a narrow path's MTU ([`crate::path_mtu`]).

use core::net::IpAddr;

use siw_net::{FlowKey, FrameMeta, FrameSink, Instant, NeighbourLookup, NetConfig, TxChecksum};

use crate::base::sink_full::SinkFull;
use crate::base::state::TcpState;
use crate::base::time::timestamp_at;
use crate::connection::context::TcpContext;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::receive_variables::ReceiveVariables;
use crate::wire::template::{SegmentFields, Template};

/// No generation of the neighbour table.
const FROM_FRAME: u32 = u32::MAX;

/// The path of one connection.
#[repr(C)]
pub(crate) struct PathState {
    /// The headers of the connection's frames.
    pub template: Template,
    /// The generation of the neighbour table in which the template's destination was looked up; 0:
    /// there is none; [`FROM_FRAME`]: it is the source of a received frame.
    pub neighbour_generation: u32,
    /// Offset of the timestamp clock (RFC 7323 section 5.4).
    pub timestamp_offset: u32,
    /// The tick (2^20 ns) at which the connection on a narrow path sends segments of the agreed size
    /// again; its timer needs only these 32 bits.
    pub widen_at: u32,
}

impl PathState {
    /// Returns the path of a connection with this four-tuple, before any handshake.
    pub(crate) fn new(config: &NetConfig, key: &FlowKey) -> Self {
        PathState {
            template: Template::new(config.mac, [0; 6], config.vlan, key),
            neighbour_generation: 0,
            timestamp_offset: 0,
            widen_at: 0,
        }
    }

    /// Returns the peer's address.
    pub(crate) fn remote(&self) -> IpAddr {
        self.template.key().remote().ip()
    }

    /// Returns the value and the echo of a segment's timestamps (RFC 7323), if agreed.
    #[inline(always)]
    pub(crate) fn timestamps(
        &self,
        tcb: &Tcb,
        rcv: &ReceiveVariables,
        now: Instant,
    ) -> Option<(u32, u32)> {
        tcb.has(ConnectionFlags::TIMESTAMPS)
            .then(|| (timestamp_at(now, self.timestamp_offset), rcv.ts_recent))
    }

    /// Completes the metadata of a frame for the sink.
    #[inline(always)]
    pub(crate) fn complete_meta(&self, tcb: &Tcb, cx: &mut TcpContext<'_>, meta: &mut FrameMeta) {
        meta.checksum = if cx.shared.config.tx_checksum {
            TxChecksum::Partial
        } else {
            TxChecksum::Offload
        };
        meta.self_addressed = tcb.has(ConnectionFlags::SELF_ADDRESSED);
        meta.connection = Some(cx.id);
    }

    /// Takes the source of a received frame for the link-layer destination of a reset, which may become due
    /// before the first lookup.
    pub(crate) fn set_source_of_frame(&mut self, mac: [u8; 6]) {
        self.template.set_destination(mac);
        self.neighbour_generation = FROM_FRAME;
    }

    /// Returns whether the template has the current link-layer destination.
    #[inline]
    pub(crate) fn is_resolved(&self, cx: &TcpContext<'_>) -> bool {
        self.neighbour_generation == cx.shared.net.neighbours.generation
    }

    /// Looks the link-layer destination up. Returns `false` if the connection has to wait for its
    /// neighbour; it is scheduled again when the neighbour answers.
    #[cold]
    pub(crate) fn resolve_neighbour(&mut self, tcb: &Tcb, cx: &mut TcpContext<'_>) -> bool {
        if tcb.has(ConnectionFlags::SELF_ADDRESSED) {
            self.template.set_destination(cx.shared.net.config.mac);
        } else {
            let Some(hop) = cx.shared.net.next_hop(self.remote()) else {
                return false;
            };
            let unproven = tcb.state == TcpState::SynReceived && tcb.has(ConnectionFlags::PASSIVE);
            let owner = cx.shared.side_table.quota_owner(cx.id.index);
            let neighbours = &mut cx.shared.net.neighbours;
            match neighbours.lookup(hop, cx.id, unproven, owner, cx.now) {
                NeighbourLookup::Found(mac) => self.template.set_destination(mac),
                NeighbourLookup::Wait => return false,
                NeighbourLookup::Full => {
                    cx.shared.net.stats.neighbour_overflows += 1;
                    // No answer will schedule the connection; its timer retries.
                    return false;
                }
            }
        }
        self.neighbour_generation = cx.shared.net.neighbours.generation;
        true
    }

    /// Sends a segment that consists of headers only, and counts it.
    #[inline]
    pub(crate) fn send_bare_segment<R>(
        &self,
        tcb: &Tcb,
        cx: &mut TcpContext<'_>,
        fields: &SegmentFields<'_>,
        sink: &mut impl FrameSink<R>,
    ) -> Result<(), SinkFull> {
        let (n, mut meta) = self.template.meta(fields);
        self.complete_meta(tcb, cx, &mut meta);
        if !sink.send_frame(n, &meta, |out| self.template.build(out, fields), []) {
            return Err(SinkFull);
        }
        cx.shared.net.stats.frames_out += 1;
        cx.shared.stats.out_segs += 1;
        Ok(())
    }
}
