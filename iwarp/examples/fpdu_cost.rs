//! What the protocol costs per FPDU beyond copy and CRC: `cargo run --release -p siw-iwarp --example
//! fpdu_cost`. Prints one JSON line; the bare loop and the whole path alternate in the same run, the
//! best of many rounds counts, because machines are noisy. `*_ns` are whole, `*_beyond_ns` less the
//! bare loop, `*_markers_ratio` the whole with markers by the whole without. An FPDU fills a
//! segment of 1448 octets, with markers too.
//!
//! Receive: finding the FPDU, CRC, markers, header checks, placement; bare: CRC and copy. Send: the
//! next record, header, markers, CRC, and the payload as the daemon has it: a counted reference,
//! with markers a copy in the frame; its release and acknowledgement. Bare: the CRC of the payload.

use siw_iwarp::*;
use siw_memory::{KeyReader, KeyTable, RegisteredMemory, Stag, crc};
use siw_shm::wqe::{SendData, SendWr};
use siw_shm::{Access, Opcode, RecvWqe, SendWqe, Sge, SharedMemory, Wc, WrFlags};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Instant;

const EMSS: u32 = 1448;
const PAYLOAD: usize = 1428;
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
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        Ok(None)
    }
    fn complete_send(&mut self, _: Option<&Wc>) {
        self.done += 1;
    }
    fn complete_recv(&mut self, _: &Wc) {}
    fn is_released(&self, _: ExtBufRef) -> bool {
        true
    }
    fn post_event(&mut self, _: QpEvent) {}
}

/// A received train of whole segments, as the fast path has it: one slice each.
struct Train<'a> {
    frames: &'a [Vec<u8>],
    at: usize,
}

impl RxStream for Train<'_> {
    #[inline]
    fn available(&self) -> usize {
        self.frames.get(self.at).map_or(0, Vec::len)
    }
    #[inline]
    fn peek(&self, off: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.frames[self.at][off..off + out.len()]);
    }
    #[inline]
    fn for_each_slice(&self, off: usize, len: usize, mut f: impl FnMut(&[u8])) {
        f(&self.frames[self.at][off..off + len]);
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

/// What describes a buffer to a NIC: two lines, as an mbuf.
#[derive(Default, Clone)]
#[repr(align(64))]
struct Descriptor([u64; 16]);

/// Copies headers, and payload that is copied, into buffers as a pool has them; references take a
/// descriptor each and are counted, as the daemon's are.
struct Gather<'a> {
    bufs: &'a mut [[u8; 2048]],
    frame: usize,
    at: usize,
    descriptors: &'a mut [Descriptor],
    references: &'a AtomicU16,
}

impl Gather<'_> {
    /// Behind the headers of Ethernet, IP and TCP.
    const HEADROOM: usize = 128 + 66;

    fn next_frame(&mut self) {
        self.frame += 1;
        self.at = Self::HEADROOM;
    }

    /// The port has sent a frame.
    fn release(&mut self, frame: usize) {
        let d = &mut self.descriptors[frame];
        if d.0[3] != 0 {
            self.references.fetch_sub(1, Ordering::AcqRel);
            d.0[3] = 0;
            d.0[8] = 0;
        }
    }
}

impl FrameBuilder for Gather<'_> {
    #[inline]
    fn append_bytes(&mut self, b: &[u8]) {
        if let Some(room) = self.reserve(b.len()) {
            room.copy_from_slice(b);
        }
    }
    #[inline]
    fn contiguous_room(&mut self, want: usize) -> usize {
        want.min(2048 - self.at)
    }
    #[inline]
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let room = self.bufs[self.frame].get_mut(self.at..self.at + len);
        self.at += len;
        room
    }
    #[inline]
    fn append_memory(&mut self, mr: &RegisteredMemory, off: u64, len: u32, _: ExtBufRef) {
        let Ok(p) = mr.ptr_at(off, len as usize) else {
            return;
        };
        self.references.fetch_add(1, Ordering::Relaxed);
        let d = &mut self.descriptors[self.frame];
        // Address, lengths, flags, counter; in the second line the next buffer.
        d.0[..4].copy_from_slice(&[p as u64, len.into(), len.into(), 1]);
        d.0[4] = std::ptr::from_ref(self.references) as u64;
        d.0[8] = self.frame as u64;
    }
}

fn time(f: impl FnOnce()) -> f64 {
    let t = Instant::now();
    f();
    t.elapsed().as_nanos() as f64 / COUNT as f64
}

fn main() {
    let (plain, marked) = (measure(false), measure(true));
    println!(
        "{{\"rx_ns\":{:.1},\"rx_beyond_ns\":{:.1},\"rx_markers_ratio\":{:.3},\"tx_ns\":{:.1},\"tx_beyond_ns\":{:.1},\"tx_markers_ratio\":{:.3},\"queue_pair_bytes\":{}}}",
        plain.rx,
        plain.rx - plain.rx_bare,
        marked.rx / plain.rx,
        plain.tx,
        plain.tx - plain.tx_bare,
        marked.tx / plain.tx,
        size_of::<QueuePair>()
    );
}

/// Nanoseconds of an FPDU.
struct Cost {
    rx: f64,
    rx_bare: f64,
    tx: f64,
    tx_bare: f64,
}

/// A stream with markers carries as much in a segment less its markers.
fn measure(markers: bool) -> Cost {
    let payload = PAYLOAD - if markers { 12 } else { 0 };
    let table = KeyTable::new(64, 1);
    let region = Arc::new(SharedMemory::new_anonymous(1 << 20).expect("memory"));
    let mr =
        RegisteredMemory::new(region.clone(), 0, 1 << 20, 0, 1, None, Access(7)).expect("in range");
    let key = table.insert(mr).expect("room");
    let keys = table.register_reader().expect("a reader is free");
    let s = [Sge {
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
        data: SendData::Sges(&s),
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
    };
    let fresh = || {
        let mut qp = QueuePair::new(attr);
        let n = NegotiatedParameters {
            initiator: true,
            crc: true,
            markers_in: markers,
            markers_out: markers,
            ird: 1,
            ord: 1,
            rtr: None,
            revision: 2,
        };
        qp.set_rts(n, EMSS);
        qp
    };
    let mut qp = fresh();
    let mut bufs = vec![[0; 2048]; COUNT];
    let mut descriptors = vec![Descriptor::default(); COUNT];
    let references = AtomicU16::new(0);

    let mut marker_position = mpa::marker::MarkerPosition::stream_start(markers);
    let frames: Vec<Vec<u8>> = (0..COUNT)
        .map(|i| {
            let to = (i * payload) as u64;
            let f = mpa::fpdu::encode_fpdu_at(
                &[
                    &[0xc1, 0x40],
                    &key.0.to_be_bytes(),
                    &to.to_be_bytes(),
                    &vec![i as u8; payload],
                ],
                true,
                marker_position,
            )
            .into_vec();
            marker_position = marker_position.advanced_by(f.len());
            f
        })
        .collect();

    let (mut rx, mut rx_bare, mut tx, mut tx_bare) = (f64::MAX, f64::MAX, f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        rx_bare = rx_bare.min(time(|| {
            for (i, f) in frames.iter().enumerate() {
                black_box(crc::crc32c(f));
                region
                    .write(i * payload, &f[16..16 + payload])
                    .expect("in range");
            }
        }));
        // The train is the start of a stream every time.
        let mut sink = fresh();
        rx = rx.min(time(|| {
            let mut t = Train {
                frames: &frames,
                at: 0,
            };
            let p = sink.receive_in_order(&mut env, &mut t);
            assert_eq!(p.fpdus as usize, COUNT);
        }));
        tx_bare = tx_bare.min(time(|| {
            for i in 0..COUNT {
                black_box(
                    crc::crc32c_append_shared(0, &region, i * payload, payload).expect("in range"),
                );
            }
        }));
        env.posted = 1;
        let mut recs = [None; COUNT];
        tx = tx.min(time(|| {
            let mut g = Gather {
                bufs: &mut bufs,
                frame: 0,
                at: Gather::HEADROOM,
                descriptors: &mut descriptors,
                references: &references,
            };
            for slot in &mut recs {
                let Some(OutgoingFpdu { record: rec, .. }) = qp.next_record(&mut env, 1 << 20)
                else {
                    panic!("more to send")
                };
                qp.build_fpdu(&env.keys, &rec, &mut g)
                    .expect("the key is there");
                g.next_frame();
                *slot = Some(rec);
            }
            for (i, rec) in recs.iter().flatten().enumerate() {
                g.release(i);
                qp.on_record_acked(&mut env, rec);
            }
            black_box(g.descriptors);
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
