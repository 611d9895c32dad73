//! Frames out: TCP's segments become mbufs that hold copies of what a stream carries.

use dpdk::{ChainBuilder, MbufCache};
use siw_tcp::{FrameMeta, FrameSink};

use super::pattern::StreamPattern;
use crate::worker::sink::PortOutput;

/// What a connection has queued at TCP.
pub(super) enum StreamRecord {
    /// So many bytes of the pattern from here on.
    Pattern { at: u64, len: u32 },
    /// Bytes to return.
    Block(Vec<u8>),
}

impl StreamRecord {
    pub(super) fn len(&self) -> u32 {
        match self {
            StreamRecord::Pattern { len, .. } => *len,
            StreamRecord::Block(b) => b.len() as u32,
        }
    }
}

/// Where TCP's frames go during one call into a stack.
pub(super) struct Sink<'a> {
    pub out: &'a mut PortOutput,
    pub cache: &'a mut MbufCache,
    pub pattern: StreamPattern,
    /// Nanoseconds since the epoch, for captures.
    pub wall: u64,
    pub frame: Option<Frame>,
}

/// A frame under construction.
pub(super) struct Frame {
    chain: ChainBuilder,
    meta: FrameMeta,
    broken: bool,
}

impl Frame {
    /// Calls `f` with room for `len` bytes, in as many pieces as buffers ask for, and with the
    /// place of each among them.
    #[inline]
    fn fill(&mut self, cache: &mut MbufCache, len: usize, mut f: impl FnMut(usize, &mut [u8])) {
        let mut done = 0;
        while done < len {
            if self.chain.tailroom() == 0 {
                let pushed = cache.alloc().is_some_and(|m| self.chain.push(m).is_ok());
                if !pushed {
                    self.broken = true;
                    return;
                }
            }
            let n = usize::from(self.chain.tailroom()).min(len - done);
            let Some(room) = self.chain.append_room(n as u16).filter(|r| !r.is_empty()) else {
                self.broken = true;
                return;
            };
            f(done, room);
            done += n;
        }
    }
}

impl FrameSink<StreamRecord> for Sink<'_> {
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
        if self.out.batch.is_full() {
            self.out.burst();
            if self.out.batch.is_full() {
                return false;
            }
        }
        // Buffers hold 2 KiB or a whole packet.
        if !self.cache.reserve(2 + meta.payload_len as usize / 2048) {
            return false;
        }
        let Some(head) = self.cache.alloc() else {
            return false;
        };
        let mut chain = ChainBuilder::new(head);
        let Some(room) = chain.append_room(len as u16) else {
            self.cache.free(chain.finish());
            return false;
        };
        fill(room);
        self.frame = Some(Frame {
            chain,
            meta: *meta,
            broken: false,
        });
        true
    }

    #[inline]
    fn append_record(&mut self, _user: u64, record: &StreamRecord, offset: u32, len: u32) {
        let Some(frame) = &mut self.frame else { return };
        match record {
            StreamRecord::Pattern { at, .. } => {
                let (pattern, from) = (self.pattern, at + u64::from(offset));
                frame.fill(self.cache, len as usize, |i, room| {
                    pattern.fill(from + i as u64, room);
                });
            }
            StreamRecord::Block(b) => match b.get(offset as usize..(offset + len) as usize) {
                Some(b) => frame.fill(self.cache, b.len(), |i, room| {
                    room.copy_from_slice(&b[i..i + room.len()]);
                }),
                None => frame.broken = true,
            },
        }
    }

    fn append_bytes(&mut self, b: &[u8]) {
        let Some(frame) = &mut self.frame else { return };
        frame.fill(self.cache, b.len(), |i, room| {
            room.copy_from_slice(&b[i..i + room.len()]);
        });
    }

    #[inline]
    fn end_frame(&mut self) {
        let Some(Frame {
            chain,
            meta,
            broken,
        }) = self.frame.take()
        else {
            return;
        };
        let mbuf = chain.finish();
        if broken {
            // As if the network had lost it: TCP repeats.
            self.cache.free(mbuf);
            return;
        }
        self.out.send(mbuf, &meta, self.cache, self.wall);
    }
}
