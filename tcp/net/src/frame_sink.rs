//! Frame output: the worker implements [`FrameSink`] over its mbuf pool and TX queues.

use crate::ids::ConnId;

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
    /// the burst of received frames), and the NIC does not see it.
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

/// A piece of a frame's payload.
#[derive(Clone, Copy, Debug)]
pub enum PayloadPiece<'a, R> {
    /// These bytes, of a control frame.
    Bytes(&'a [u8]),
    /// Bytes `[offset, offset + len)` of a record.
    Record {
        /// The connection's user value.
        user: u64,
        /// The record as it was pushed.
        record: &'a R,
        /// Offset of the first byte in the record.
        offset: u32,
        /// Number of bytes, not 0.
        len: u32,
    },
}

/// Takes the frames that a stack sends.
pub trait FrameSink<R> {
    /// Sends one frame. `fill` writes its complete Ethernet, VLAN, IP and TCP headers (see
    /// [`TxChecksum`]) of `headers_len` bytes, at most 128. Behind them the frame has the bytes of
    /// `payload`, in this order; together they are `meta.payload_len` bytes.
    ///
    /// Returns `false` if no buffer or TX space is available, without having called `fill`; the
    /// stack then keeps the data and tries again at the next `poll` or `flush`.
    fn send_frame<'a>(
        &mut self,
        headers_len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        payload: impl IntoIterator<Item = PayloadPiece<'a, R>>,
    ) -> bool
    where
        R: 'a;
}
