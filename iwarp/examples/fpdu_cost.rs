//! Measures the protocol cost per FPDU beyond copy and CRC: `cargo run --release -p siw-iwarp
//! --example fpdu_cost`. Prints one JSON line. Because machines are noisy, the bare loop and the
//! whole path alternate in the same run, and the best of many rounds counts. `*_ns` are times of the
//! whole path, `*_beyond_ns` exclude the bare loop. `*_markers_ratio` is the time with markers
//! divided by the time without, sent by reference, and `*_markers_copied_ratio` divided by the time
//! without, copied as links send by default. An FPDU fills a segment of 1448 octets, with markers
//! too.
//!
//! Receive: finding the FPDU, CRC, markers, header checks, placement; bare: CRC and copy. Send: the
//! next record, header, markers, CRC, the payload (a counted reference; with markers, a copy into the
//! frame), its release and its acknowledgement; bare: the CRC of the payload. `copy_ns` and
//! `reference_ns` are the whole send times of FPDUs of several lengths, with payload that is copied
//! in one pass with its CRC, and with payload by reference.

use siw_iwarp::*;
use siw_memory::{KeyReader, KeyTable, RegisteredMemory, Stag, crc};
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, Opcode, PlainSend, RecvWqe, SendWqe, Sge, SharedMemory, Wc, WrFlags};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Instant;

const EMSS: u32 = 1448;
/// Octets of MPA and DDP in a segment with a tagged header.
const OVERHEAD: u32 = 20;
/// Segments for which copies and references are compared.
const COMPARED_EMSS: [u32; 4] = [536, 1024, EMSS, 8948];
const COUNT: usize = 64;
const ROUNDS: usize = 4000;

struct Env {
    keys: KeyReader,
    wqe: SendWqe,
    posted: u32,
    done: u32,
}

impl QpEnv for Env {
    fn keys(&self) -> &KeyReader {
        &self.keys
    }
    fn next_send(&mut self) -> Result<Option<&SendWqe>, RingFault> {
        if self.posted == 0 {
            return Ok(None);
        }
        self.posted -= 1;
        Ok(Some(&self.wqe))
    }
    fn peek_plain_send(&mut self) -> Option<PlainSend> {
        None
    }
    fn take_peeked_send(&mut self) {}
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        Ok(None)
    }
    fn complete_send(&mut self, _: Option<&Wc>) {
        self.done += 1;
    }
    fn complete_recv(&mut self, _: &Wc) {}
    fn is_released(&mut self, _: ExtBufRef) -> bool {
        true
    }
    fn alloc_ext_buf_ref(&mut self) -> ExtBufRef {
        ExtBufRef(0)
    }
    fn post_event(&mut self, _: QpEvent) {}
}

/// Received segments, each with one FPDU in one slice, as on the fast path.
struct SegmentStream<'a> {
    frames: &'a [Vec<u8>],
    at: usize,
}

impl RxStream for SegmentStream<'_> {
    #[inline]
    fn available(&self) -> usize {
        self.frames.get(self.at).map_or(0, Vec::len)
    }
    #[inline]
    fn peek(&self, off: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.frames[self.at][off..off + out.len()]);
    }
    #[inline]
    fn for_each_slice(&self, off: usize, len: usize, mut frame: impl FnMut(&[u8])) {
        frame(&self.frames[self.at][off..off + len]);
    }
    #[inline]
    fn contiguous(&self, off: usize, len: usize) -> Option<&[u8]> {
        self.frames.get(self.at)?.get(off..off + len)
    }
    #[inline]
    fn consume(&mut self, _n: usize) {
        self.at += 1;
    }
}

/// A buffer descriptor for a NIC: two cache lines, like an mbuf.
#[derive(Default, Clone)]
#[repr(align(64))]
struct Descriptor([u64; 16]);

/// Copies headers and copied payload into buffers like those of a pool; each reference takes a
/// descriptor and is counted, as in the daemon.
struct Gather<'a> {
    bufs: &'a mut [Vec<u8>],
    frame: usize,
    at: usize,
    descriptors: &'a mut [Descriptor],
    references: &'a AtomicU16,
}

impl Gather<'_> {
    /// Headroom for the headers of Ethernet, IP and TCP.
    const HEADROOM: usize = 128 + 66;

    fn next_frame(&mut self) {
        self.frame += 1;
        self.at = Self::HEADROOM;
    }

    /// The port has sent a frame.
    fn release(&mut self, frame: usize) {
        let descriptor = &mut self.descriptors[frame];
        if descriptor.0[3] != 0 {
            self.references.fetch_sub(1, Ordering::AcqRel);
            descriptor.0[3] = 0;
            descriptor.0[8] = 0;
        }
    }
}

impl FrameBuilder for Gather<'_> {
    #[inline]
    fn reserve_fpdus(&mut self, len: usize, _: usize) -> Option<&mut [u8]> {
        let room = self.bufs[self.frame].get_mut(self.at..self.at + len)?;
        self.at += len;
        Some(room)
    }
    #[inline]
    fn reserve(&mut self, want: usize) -> Option<&mut [u8]> {
        let len = want.min(self.bufs[self.frame].len() - self.at);
        let room = self.bufs[self.frame].get_mut(self.at..self.at + len);
        self.at += len;
        room
    }
    fn withdraw(&mut self, len: usize) {
        self.at -= len;
    }
    #[inline]
    fn append_reference(
        &mut self,
        region: &Arc<SharedMemory>,
        offset: usize,
        len: usize,
        _: ExtBufRef,
    ) -> bool {
        let Ok(address) = region.ptr_at(offset, len) else {
            return false;
        };
        self.references.fetch_add(1, Ordering::Relaxed);
        let descriptor = &mut self.descriptors[self.frame];
        // Address, lengths, flags, counter; the second line has the next buffer.
        descriptor.0[..4].copy_from_slice(&[address as u64, len as u64, len as u64, 1]);
        descriptor.0[4] = std::ptr::from_ref(self.references) as u64;
        descriptor.0[8] = self.frame as u64;
        true
    }
}

fn time(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_nanos() as f64 / COUNT as f64
}

fn main() {
    let plain = StreamShape {
        emss: EMSS,
        has_markers: false,
        by_reference: true,
    };
    let with_markers = StreamShape {
        has_markers: true,
        ..plain
    };
    let of_lengths = |by_reference| {
        let costs = COMPARED_EMSS.map(|emss| {
            let shape = StreamShape {
                emss,
                by_reference,
                ..plain
            };
            format!("\"{}\":{:.1}", shape.payload_len(), measure(shape).tx)
        });
        costs.join(",")
    };
    let (copy, reference) = (of_lengths(false), of_lengths(true));
    let copied = measure(StreamShape {
        by_reference: false,
        ..plain
    });
    let (plain, marked) = (measure(plain), measure(with_markers));
    println!(
        "{{\"rx_ns\":{:.1},\"rx_beyond_ns\":{:.1},\"rx_markers_ratio\":{:.3},\"tx_ns\":{:.1},\"tx_beyond_ns\":{:.1},\"tx_markers_ratio\":{:.3},\"tx_markers_copied_ratio\":{:.3},\"copy_ns\":{{{copy}}},\"reference_ns\":{{{reference}}},\"queue_pair_bytes\":{}}}",
        plain.rx,
        plain.rx - plain.rx_bare,
        marked.rx / plain.rx,
        plain.tx,
        plain.tx - plain.tx_bare,
        marked.tx / plain.tx,
        marked.tx / copied.tx,
        size_of::<QueuePair>()
    );
}

/// Nanoseconds per FPDU.
struct Cost {
    rx: f64,
    rx_bare: f64,
    tx: f64,
    tx_bare: f64,
}

/// Parameters of the stream.
#[derive(Clone, Copy)]
struct StreamShape {
    /// Octets of a segment.
    emss: u32,
    has_markers: bool,
    by_reference: bool,
}

impl StreamShape {
    /// Payload of a segment; markers reduce it by their length.
    fn payload_len(self) -> usize {
        (self.emss - OVERHEAD) as usize - if self.has_markers { 12 } else { 0 }
    }
}

fn measure(shape: StreamShape) -> Cost {
    let (payload, markers) = (shape.payload_len(), shape.has_markers);
    let table = KeyTable::new(64, 1);
    let region = Arc::new(SharedMemory::new_anonymous(1 << 20).expect("memory"));
    let mr =
        RegisteredMemory::new(region.clone(), 0, 1 << 20, 0, 1, None, Access(7)).expect("in range");
    let key = table.insert(mr).expect("room");
    let keys = table.register_reader().expect("a reader is free");
    let sges = [Sge {
        addr: 0,
        length: (payload * COUNT) as u32,
        lkey: key.0,
    }];
    let wqe = SendWqe::from_wr(&SendWr {
        opcode: Opcode::Write,
        flags: WrFlags::SIGNALED,
        wr_id: 0,
        imm: 0,
        remote_addr: 0,
        rkey: key.0,
        data: SendData::Sges(&sges),
    })
    .expect("valid");
    let mut env = Env {
        keys,
        wqe,
        posted: 0,
        done: 0,
    };
    let attr = QpInitAttr {
        qpn: 1,
        pd: 1,
        max_send_wr: 64,
        max_recv_wr: 64,
        sq_sig_all: false,
        denied_access: Access::NONE,
    };
    let fresh = || {
        let mut qp = QueuePair::new(attr);
        let negotiated = NegotiatedParameters {
            initiator: true,
            crc: true,
            markers_in: markers,
            markers_out: markers,
            ird: 1,
            ord: 1,
            joins_immediate: false,
            rtr: None,
            revision: 2,
        };
        qp.set_rts(negotiated, shape.emss);
        qp.set_copied_up_to(if shape.by_reference { 0 } else { u32::MAX });
        qp
    };
    let mut qp = fresh();
    let mut bufs = vec![vec![0; (shape.emss as usize + 256).max(2048)]; COUNT];
    let mut descriptors = vec![Descriptor::default(); COUNT];
    let references = AtomicU16::new(0);

    let mut marker_position = mpa::marker::MarkerPosition::stream_start(markers);
    let frames: Vec<Vec<u8>> = (0..COUNT)
        .map(|index| {
            let to = (index * payload) as u64;
            let frame = mpa::fpdu::encode_fpdu_at(
                &[
                    &[0xc1, 0x40],
                    &key.0.to_be_bytes(),
                    &to.to_be_bytes(),
                    &vec![index as u8; payload],
                ],
                true,
                marker_position,
            )
            .into_vec();
            marker_position = marker_position.advanced_by(frame.len());
            frame
        })
        .collect();

    let (mut rx, mut rx_bare, mut tx, mut tx_bare) = (f64::MAX, f64::MAX, f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        rx_bare = rx_bare.min(time(|| {
            for (index, frame) in frames.iter().enumerate() {
                black_box(crc::crc32c(frame));
                region
                    .write(index * payload, &frame[16..16 + payload])
                    .expect("in range");
            }
        }));
        // These segments are the start of a stream each time.
        let mut sink = fresh();
        rx = rx.min(time(|| {
            let mut stream = SegmentStream {
                frames: &frames,
                at: 0,
            };
            let progress = sink.receive_in_order(&mut env, &mut stream);
            assert_eq!(progress.fpdus as usize, COUNT);
        }));
        tx_bare = tx_bare.min(time(|| {
            for index in 0..COUNT {
                black_box(
                    crc::crc32c_append_shared(0, &region, index * payload, payload)
                        .expect("in range"),
                );
            }
        }));
        env.posted = 1;
        let mut records = [None; COUNT];
        tx = tx.min(time(|| {
            let mut gather = Gather {
                bufs: &mut bufs,
                frame: 0,
                at: Gather::HEADROOM,
                descriptors: &mut descriptors,
                references: &references,
            };
            for slot in &mut records {
                let Some(OutgoingFpdu { record, .. }) = qp.next_record(&mut env, 1 << 20) else {
                    panic!("more to send")
                };
                qp.build_fpdus(&env.keys, &record.into(), 0..1, &mut gather)
                    .expect("the key is there");
                gather.next_frame();
                *slot = Some(record);
            }
            for (index, record) in records.iter().flatten().enumerate() {
                gather.release(index);
                qp.on_record_acked(record);
                qp.complete_acked(&mut env);
            }
            black_box(gather.descriptors);
        }));
    }
    assert_eq!(env.done as usize, ROUNDS);
    assert!(env.keys.lookup(Stag(key.0)).is_some());
    Cost {
        rx,
        rx_bare,
        tx,
        tx_bare,
    }
}
