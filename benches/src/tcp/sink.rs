//! Builds a stack's output frames: headers in a buffer, payload as references to memory, as in the
//! daemon, or as unwritten buffer bytes for ports without reference support.

use dpdk::{ChainBuilder, ExtTracker, Mbuf, MbufCache, TxOffload};
use siw_tcp::{FrameMeta, FrameSink};

use super::link::PortEnd;

/// Payload up to this length goes into the header's buffer, as in the daemon.
const COPY_MAX: u32 = 512;
/// Maximum buffers per frame.
const RESERVED_BUFFERS: usize = 48;

/// A record: bytes of the source memory from this offset on.
#[derive(Debug, Clone, Copy)]
pub struct RecordLen(pub u32);

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
    frame: Option<(ChainBuilder, FrameMeta, bool)>,
}

impl<'a> PairSink<'a> {
    #[inline]
    pub(super) fn new(end: &'a mut PortEnd, source: &'a mut PayloadSource) -> PairSink<'a> {
        PairSink {
            end,
            source,
            frame: None,
        }
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
    fn finish_chain(&mut self, chain: ChainBuilder, meta: &FrameMeta, whole: bool) {
        let mbuf = chain.finish();
        if !whole {
            return self.source.cache.free(mbuf);
        }
        self.push_frame(mbuf, meta);
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
    fn begin_frame(&mut self, headers: &[u8], meta: &FrameMeta) -> bool {
        self.begin_frame_with(headers.len(), meta, |room| room.copy_from_slice(headers))
    }

    #[inline]
    fn begin_frame_with(
        &mut self,
        len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        if !self.has_room() {
            return false;
        }
        let chain = self.begin_chain(len, fill);
        let begun = chain.is_some();
        self.frame = chain.map(|c| (c, *meta, true));
        begun
    }

    #[inline]
    fn send_single_piece(
        &mut self,
        len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        (_, record, offset): (u64, &RecordLen, u32),
    ) -> bool {
        if !self.has_room() {
            return false;
        }
        let at = u64::from(record.0) + u64::from(offset);
        if self.source.external && meta.payload_len > COPY_MAX {
            let reference = (&self.source.tracker, at, meta.payload_len as u16);
            let mbuf = self.source.cache.alloc_frame(len as u16, fill, reference);
            return mbuf.map(|mbuf| self.push_frame(mbuf, meta)).is_some();
        }
        let Some(mut chain) = self.begin_chain(len, fill) else {
            return false;
        };
        let whole = self.source.append_payload(&mut chain, at, meta.payload_len);
        self.finish_chain(chain, meta, whole);
        true
    }

    #[inline]
    fn send_headers_only(
        &mut self,
        len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        let Some(chain) = self.begin_chain(len, fill) else {
            return false;
        };
        self.finish_chain(chain, meta, true);
        true
    }

    #[inline]
    fn append_record(&mut self, _user: u64, record: &RecordLen, offset: u32, len: u32) {
        if let Some((chain, _, whole)) = &mut self.frame {
            let at = u64::from(record.0) + u64::from(offset);
            *whole &= self.source.append_payload(chain, at, len);
        }
    }

    fn append_bytes(&mut self, b: &[u8]) {
        if let Some((chain, _, whole)) = &mut self.frame {
            *whole &= chain.append_slice(b);
        }
    }

    #[inline]
    fn end_frame(&mut self) {
        let Some((chain, meta, whole)) = self.frame.take() else {
            return;
        };
        self.finish_chain(chain, &meta, whole);
    }
}
