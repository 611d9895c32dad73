//! Builds a stack's output frames: headers in a buffer, payload as references to memory, as in the
//! daemon, or as unwritten buffer bytes for ports without reference support.

use dpdk::{ChainBuilder, ExtTracker, Mbuf, MbufCache, TxOffload};
use siw_net::{FrameMeta, FrameSink, PayloadPiece};
use siw_ports::TransmitQueue;

use super::link::PortEnd;

/// Payload up to this length goes into the header's buffer, as in the daemon.
const COPY_MAX: u32 = 512;
/// Maximum buffers per frame.
const RESERVED_BUFFERS: usize = 48;

/// A record: bytes of the source memory from this offset on.
#[derive(Debug, Clone, Copy)]
pub struct RecordLen(pub u32);

impl RecordLen {
    #[inline]
    fn byte_at(self, offset: u32) -> u64 {
        u64::from(self.0) + u64::from(offset)
    }
}

/// Source of payload.
pub(super) struct PayloadSource {
    pub cache: MbufCache,
    pub tracker: ExtTracker,
    /// True if the port sends references to the memory; otherwise the payload is unwritten buffer
    /// bytes.
    pub external: bool,
}

impl PayloadSource {
    /// Appends `len` payload bytes from `at` on; false if no buffer is available.
    #[inline]
    pub(super) fn append_payload(&mut self, chain: &mut ChainBuilder, at: u64, len: u32) -> bool {
        if self.external && len > COPY_MAX {
            let Some(mut mbuf) = self.cache.alloc() else {
                return false;
            };
            return self.tracker.attach(&mut mbuf, at, len as u16) && chain.push(mbuf).is_ok();
        }
        let mut left = len as u16;
        while left > 0 {
            if chain.tailroom() == 0 {
                let Some(mbuf) = self.cache.alloc() else {
                    return false;
                };
                if chain.push(mbuf).is_err() {
                    return false;
                }
            }
            let n = left.min(chain.tailroom());
            if chain.append_room(n).is_none() {
                return false;
            }
            left -= n;
        }
        true
    }
}

pub(super) struct PairSink<'a> {
    pub end: &'a mut PortEnd,
    pub source: &'a mut PayloadSource,
}

impl<'a> PairSink<'a> {
    #[inline]
    pub(super) fn new(end: &'a mut PortEnd, source: &'a mut PayloadSource) -> PairSink<'a> {
        PairSink { end, source }
    }

    /// Returns true if the port takes another frame.
    #[inline]
    fn has_room(&mut self) -> bool {
        if self.end.out.is_full() {
            self.end.tx.tx_burst(&mut self.end.out);
        }
        !self.end.out.is_full()
    }

    /// Starts a chain with the headers in a buffer; `None` if no buffer is available.
    #[inline]
    fn begin_chain(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Option<ChainBuilder> {
        if !self.source.cache.reserve(RESERVED_BUFFERS) {
            return None;
        }
        let head = self.source.cache.alloc()?;
        let mut chain = ChainBuilder::new(head);
        let Some(room) = chain.append_room(len as u16) else {
            self.source.cache.free(chain.finish());
            return None;
        };
        fill(room);
        Some(chain)
    }

    #[inline]
    fn push_frame(&mut self, mut mbuf: Mbuf, meta: &FrameMeta) {
        if self.end.offload && meta.l4_len > 0 {
            mbuf.set_tx_offload(TxOffload {
                l2_len: meta.l2_len,
                l3_len: u16::from(meta.l3_len),
                l4_len: meta.l4_len,
                ipv6: meta.ipv6,
                ip_checksum: false,
                tcp_checksum: true,
                tso_segsz: meta.tso_segsz,
            });
        }
        if let Err(mbuf) = self.end.out.push(mbuf) {
            self.source.cache.free(mbuf);
        }
    }
}

impl FrameSink<RecordLen> for PairSink<'_> {
    #[inline]
    fn send_frame<'a>(
        &mut self,
        headers_len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        payload: impl IntoIterator<Item = PayloadPiece<'a, RecordLen>>,
    ) -> bool {
        if !self.has_room() {
            return false;
        }
        let mut pieces = payload.into_iter();
        let first = pieces.next();
        if self.source.external
            && let Some(PayloadPiece::Record {
                record,
                offset,
                len,
                ..
            }) = first
            && len > COPY_MAX
            && len == meta.payload_len
        {
            let at = record.byte_at(offset);
            let reference = (&self.source.tracker, at, len as u16);
            let mbuf = self
                .source
                .cache
                .alloc_frame(headers_len as u16, fill, reference);
            return mbuf.map(|mbuf| self.push_frame(mbuf, meta)).is_some();
        }
        let Some(mut chain) = self.begin_chain(headers_len, fill) else {
            return false;
        };
        let mut is_whole = true;
        for piece in first.into_iter().chain(pieces) {
            is_whole &= match piece {
                PayloadPiece::Bytes(bytes) => chain.append_slice(bytes),
                PayloadPiece::Record {
                    record,
                    offset,
                    len,
                    ..
                } => {
                    let at = record.byte_at(offset);
                    self.source.append_payload(&mut chain, at, len)
                }
            };
        }
        let mbuf = chain.finish();
        if is_whole {
            self.push_frame(mbuf, meta);
        } else {
            self.source.cache.free(mbuf);
        }
        true
    }
}
