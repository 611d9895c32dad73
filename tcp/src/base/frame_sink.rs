//! Where frames go: the worker implements [`FrameSink`] over its mbuf pool and TX queues.

use crate::base::ids::ConnId;

/// What is left to do for the TCP checksum of an outgoing frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TxChecksum {
    /// Nothing to do: the frame has none, or it is already complete.
    Complete,
    /// The field holds the pseudo-header sum; the sink completes it over TCP header and payload,
    /// see [`crate::checksum::complete_tcp_checksum`].
    Partial,
    /// The field holds the pseudo-header sum, as checksum offload requires. On a link in
    /// memory whose receiver reports [`crate::RxChecksum::Good`] it stays as it is.
    Offload,
}

/// What a sink (and an offload descriptor) needs to know about one frame.
#[derive(Clone, Copy, Debug)]
pub struct FrameMeta {
    /// Ethernet header with its VLAN tag, if any.
    pub l2_len: u8,
    /// Bytes of the IP header; 0 for ARP.
    pub l3_len: u8,
    /// TCP header with its options; 0 for control frames that are not TCP.
    pub l4_len: u8,
    /// The packet is IPv6, not IPv4.
    pub ipv6: bool,
    /// What is left to do for the checksum.
    pub checksum: TxChecksum,
    /// The destination is an address of this very device: the worker loops the frame back
    /// (into [`crate::Stack::receive_burst`]) and the NIC never sees it.
    pub self_addressed: bool,
    /// These bytes were sent before.
    pub retransmission: bool,
    /// Payload bytes that follow the headers.
    pub payload_len: u32,
    /// Payload per wire segment when the frame is a TSO super-segment; 0: an ordinary frame.
    /// Every wire segment of it but the last is full, and each carries whole records (unless a
    /// record exceeds the segment). The TCP checksum field of a super-segment holds the
    /// pseudo-header sum without a length, as DPDK's `rte_ipv4_phdr_cksum` makes it for TSO.
    pub tso_segsz: u16,
    /// `None` for ARP, NDP, ICMP and resets that belong to no connection.
    pub connection: Option<ConnId>,
}

/// Receives the frames a [`crate::Stack`] emits, piece by piece. `begin_frame` .. `end_frame` bracket one
/// frame; between them come the pieces of its payload in order.
pub trait FrameSink<R> {
    /// Starts a frame with complete Ethernet, VLAN, IP and TCP headers (see [`TxChecksum`]).
    /// `false`: no buffer or TX space now; the stack keeps the work and tries again at the next
    /// `poll` or `flush`. After `false` neither `append_record`, `append_bytes` nor `end_frame` is called.
    fn begin_frame(&mut self, headers: &[u8], meta: &FrameMeta) -> bool;
    /// As `begin_frame` for headers of `len` bytes (at most 128) that `fill` writes: a sink that hands
    /// out its packet memory spares a copy that stalls on the stores just made. `fill` gets
    /// exactly `len` bytes and is called once, or not at all when the answer is `false`.
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
    /// A whole frame whose payload, `meta.payload_len` bytes, is one piece of a record:
    /// `begin_frame_with`, `append_record` and `end_frame` in one, for sinks that have a short way.
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
    /// A whole frame without payload: `begin_frame_with` and `end_frame` in one.
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
    /// The bytes `[offset, offset + len)` of this record come next. `user` is the connection's.
    fn append_record(&mut self, user: u64, record: &R, offset: u32, len: u32);
    /// Raw payload bytes (control frames).
    fn append_bytes(&mut self, bytes: &[u8]);
    /// The frame is complete: it may be sent.
    fn end_frame(&mut self);
}
