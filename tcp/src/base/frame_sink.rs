//! Frame output: the worker implements [`FrameSink`] over its mbuf pool and TX queues.

use crate::base::ids::ConnId;

/// The state of the TCP checksum of an outgoing frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TxChecksum {
    /// The frame has no TCP checksum, or it is complete.
    Complete,
    /// The field holds the pseudo-header sum; the sink completes it over TCP header and payload,
    /// see [`crate::checksum::complete_tcp_checksum`].
    Partial,
    /// The field holds the pseudo-header sum, as checksum offload requires. On an in-memory link
    /// whose receiver reports [`crate::RxChecksum::Good`] the field may stay incomplete.
    Offload,
}

/// Metadata of one frame for the sink, e.g. for an offload descriptor.
#[derive(Clone, Copy, Debug)]
pub struct FrameMeta {
    /// Bytes of the Ethernet header, including a VLAN tag.
    pub l2_len: u8,
    /// Bytes of the IP header; 0 for ARP.
    pub l3_len: u8,
    /// Bytes of the TCP header with its options; 0 for control frames other than TCP.
    pub l4_len: u8,
    /// The packet is IPv6, not IPv4.
    pub ipv6: bool,
    /// The state of the TCP checksum.
    pub checksum: TxChecksum,
    /// The destination is an address of this device: the worker loops the frame back (into
    /// [`crate::Stack::receive_burst`]), and the NIC does not see it.
    pub self_addressed: bool,
    /// The payload is a retransmission.
    pub retransmission: bool,
    /// Payload bytes that follow the headers.
    pub payload_len: u32,
    /// Payload per wire segment if the frame is a TSO super-segment; 0 for an ordinary frame. Every
    /// wire segment but the last is full, and each carries whole records (unless a record exceeds
    /// the segment). The TCP checksum field of a super-segment holds the pseudo-header sum without
    /// the length, as DPDK's `rte_ipv4_phdr_cksum` computes it for TSO.
    pub tso_segsz: u16,
    /// The connection; `None` for ARP, NDP, ICMP and resets that belong to no connection.
    pub connection: Option<ConnId>,
}

/// Receives the frames that a [`crate::Stack`] sends, piece by piece. `begin_frame` and `end_frame`
/// bracket one frame; the pieces of its payload follow in order between them.
pub trait FrameSink<R> {
    /// Starts a frame with complete Ethernet, VLAN, IP and TCP headers (see [`TxChecksum`]).
    /// Returns `false` if no buffer or TX space is available; the stack then keeps the data, tries
    /// again at the next `poll` or `flush`, and calls neither `append_record`, `append_bytes` nor
    /// `end_frame`.
    fn begin_frame(&mut self, headers: &[u8], meta: &FrameMeta) -> bool;
    /// Like `begin_frame`, for headers of `len` bytes (at most 128) written by `fill`: a sink that
    /// exposes its packet memory saves a copy, which would stall on the stores just made. `fill`
    /// gets exactly `len` bytes and is called once, or not at all if the result is `false`.
    #[inline]
    fn begin_frame_with(
        &mut self,
        len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        let mut headers = [0u8; 128];
        fill(&mut headers[..len]);
        self.begin_frame(&headers[..len], meta)
    }
    /// Sends a whole frame whose payload, `meta.payload_len` bytes, is one piece of a record:
    /// `begin_frame_with`, `append_record` and `end_frame` in one, for sinks with a fast path.
    #[inline]
    fn send_single_piece(
        &mut self,
        len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        (user, record, offset): (u64, &R, u32),
    ) -> bool {
        let begun = self.begin_frame_with(len, meta, fill);
        if begun {
            self.append_record(user, record, offset, meta.payload_len);
            self.end_frame();
        }
        begun
    }
    /// Sends a whole frame without payload: `begin_frame_with` and `end_frame` in one.
    #[inline]
    fn send_headers_only(
        &mut self,
        len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        let begun = self.begin_frame_with(len, meta, fill);
        if begun {
            self.end_frame();
        }
        begun
    }
    /// Appends the bytes `[offset, offset + len)` of this record. `user` is the connection's.
    fn append_record(&mut self, user: u64, record: &R, offset: u32, len: u32);
    /// Appends raw payload bytes (control frames).
    fn append_bytes(&mut self, bytes: &[u8]);
    /// Completes the frame, which may then be sent.
    fn end_frame(&mut self);
}
