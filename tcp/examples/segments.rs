//! Nanoseconds per data segment of a bulk transfer between two stacks in one thread: sending,
//! receiving and the ACKs, without payload copies or checksums. Profile with `perf record`.
//!
//! `cargo run --release -p siw-tcp --example segments [-- SEGMENTS [CONNECTIONS]]`

use std::cell::RefCell;
use std::time::Instant as Clock;

use siw_net::{
    ConnId, FrameInfo, FrameMeta, FrameSink, Instant, PayloadPiece, RecvBuf, RxChecksum,
};
use siw_tcp::{Events, Stack};
use siw_tcp_sim::host_config;

static PAYLOAD: [u8; 9000] = [7; 9000];

struct PooledFrame {
    header: [u8; 128],
    len: u32,
    start: u32,
    payload: u32,
    payload_start: u32,
}

// Frames stay where they are: handles move, packet memory does not.
#[allow(clippy::vec_box)]
#[derive(Default)]
struct FramePool(RefCell<Vec<Box<PooledFrame>>>);

/// A handle as small as an mbuf pointer and its pool.
struct FrameHandle {
    frame: Option<Box<PooledFrame>>,
    pool: &'static FramePool,
}

impl Drop for FrameHandle {
    fn drop(&mut self) {
        if let Some(frame) = self.frame.take() {
            self.pool.0.borrow_mut().push(frame);
        }
    }
}

impl FrameHandle {
    fn frame_ref(&self) -> &PooledFrame {
        self.frame.as_ref().unwrap()
    }
}

impl RecvBuf for FrameHandle {
    type Chunks<'a> =
        std::iter::Chain<std::option::IntoIter<&'a [u8]>, std::option::IntoIter<&'a [u8]>>;
    fn remaining(&self) -> usize {
        let frame = self.frame_ref();
        (frame.len - frame.start + frame.payload - frame.payload_start) as usize
    }
    fn chunk(&self) -> &[u8] {
        let frame = self.frame_ref();
        if frame.start < frame.len {
            &frame.header[frame.start as usize..frame.len as usize]
        } else {
            &PAYLOAD[frame.payload_start as usize..frame.payload as usize]
        }
    }
    fn chunks(&self) -> Self::Chunks<'_> {
        let frame = self.frame_ref();
        let head = &frame.header[frame.start as usize..frame.len as usize];
        let tail = &PAYLOAD[frame.payload_start as usize..frame.payload as usize];
        let some = |s: &'static [u8]| (!s.is_empty()).then_some(s).into_iter();
        (!head.is_empty())
            .then_some(head)
            .into_iter()
            .chain(some(tail))
    }
    fn advance(&mut self, n: usize) {
        let frame = self.frame.as_mut().unwrap();
        let h = (n as u32).min(frame.len - frame.start);
        frame.start += h;
        frame.payload_start += n as u32 - h;
        assert!(frame.payload_start <= frame.payload);
    }
    fn truncate(&mut self, n: usize) {
        let frame = self.frame.as_mut().unwrap();
        let h = (n as u32).min(frame.len - frame.start);
        frame.len = frame.start + h;
        frame.payload = frame.payload_start + n as u32 - h;
    }
}

struct Ring {
    frames: Vec<FrameHandle>,
    pool: &'static FramePool,
    data: u64,
}

impl FrameSink<[u64; 4]> for Ring {
    fn send_frame<'a>(
        &mut self,
        headers_len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        payload: impl IntoIterator<Item = PayloadPiece<'a, [u64; 4]>>,
    ) -> bool {
        let new = || {
            Box::new(PooledFrame {
                header: [0; 128],
                len: 0,
                start: 0,
                payload: 0,
                payload_start: 0,
            })
        };
        let mut frame = self.pool.0.borrow_mut().pop().unwrap_or_else(new);
        fill(&mut frame.header[..headers_len]);
        (frame.len, frame.start) = (headers_len as u32, 0);
        (frame.payload, frame.payload_start) = (meta.payload_len, 0);
        self.data += u64::from(meta.payload_len > 0);
        self.frames.push(FrameHandle {
            frame: Some(frame),
            pool: self.pool,
        });
        for piece in payload {
            std::hint::black_box(piece);
        }
        true
    }
}

type Host = Stack<FrameHandle, [u64; 4]>;

fn main() {
    let mut args = std::env::args()
        .skip(1)
        .map(|a| a.parse::<u64>().expect("a number"));
    let goal = args.next().unwrap_or(20_000_000);
    let conns = args.next().unwrap_or(1) as usize;
    let pool: &'static FramePool = Box::leak(Box::default());
    let mut hosts = [0, 1].map(|i| {
        let mut c = host_config(i);
        c.tcp.tx_checksum = false;
        c.tcp.max_connections = 200_000;
        Host::new(c, Instant(1)).unwrap()
    });
    let mut rings = [0, 1].map(|_| Ring {
        frames: vec![],
        pool,
        data: 0,
    });
    let start = Clock::now();
    let now = || Instant(1 + start.elapsed().as_nanos() as u64);
    hosts[1].listen(None, 1, 1 << 20, 0).unwrap();
    let info = FrameInfo {
        checksum: RxChecksum::Good,
        rss_hash: 0,
    };
    let mut ids: Vec<ConnId> = vec![];
    for i in 0..conns {
        let port = 10_000 + (i % 50_000) as u16;
        ids.push(
            hosts[0]
                .connect(
                    now(),
                    None,
                    Some(port),
                    "10.0.0.2:1".parse().unwrap(),
                    i as u64,
                )
                .unwrap(),
        );
    }
    let mut open = 0;
    let mut begun = None;
    let mut bytes = 0u64;
    let mut turn = 0;
    let emss = 1448;
    loop {
        let t = now();
        for h in 0..2 {
            let mut out = std::mem::take(&mut rings[1 - h].frames);
            while !out.is_empty() {
                let n = out.len().min(64);
                hosts[h].receive_burst(t, out.drain(..n).map(|b| (b, info)));
                while let Some((id, _, e)) = hosts[h].next_event() {
                    if e.contains(Events::CONNECTED) {
                        open += 1;
                    }
                    if e.contains(Events::READABLE)
                        && let Some(rx) = hosts[h].receive_queue(id)
                    {
                        let n = rx.len_bytes();
                        bytes += rx.consume(n) as u64;
                    }
                    if e.contains(Events::ACKED) {
                        hosts[h].take_acked(id, |r| {
                            std::hint::black_box(r);
                        });
                    }
                }
                hosts[h].poll(t, &mut rings[h]);
            }
            rings[1 - h].frames = out;
        }
        if open == conns {
            if begun.is_none() {
                begun = Some((Clock::now(), rings[0].data));
                println!("{conns} connections open");
            }
            // One batch a turn, of up to 64 segments.
            for _ in 0..if conns > 1 { 64 } else { 1 } {
                let id = ids[turn % conns];
                turn += 1;
                let burst = if conns > 1 { 1 } else { 64 };
                for _ in 0..burst {
                    if hosts[0].send_room(id) < emss {
                        break;
                    }
                    hosts[0]
                        .push_record(id, emss as u32, [bytes, 0, 0, 0], false)
                        .unwrap();
                }
                hosts[0].flush(t, id, &mut rings[0]);
            }
        }
        for h in 0..2 {
            hosts[h].poll(t, &mut rings[h]);
        }
        if rings[0].data >= goal {
            break;
        }
    }
    let (begun, first) = begun.unwrap();
    let n = rings[0].data - first;
    let ns = begun.elapsed().as_nanos() as f64 / n as f64;
    let acks = hosts[1].stats().tcp.pure_acks_out;
    let c = hosts[0].tcp_info(ids[0]).unwrap();
    println!(
        "{ns:.1} ns/segment (send + receive + ACKs), {n} segments, {acks} ACKs, {bytes} bytes, {c:?}"
    );
    let s = hosts[1].stats();
    println!(
        "predicted {} of {} in; retransmits {}",
        s.tcp.hp_hits,
        s.tcp.in_segs,
        hosts[0].stats().tcp.retrans_segs
    );
}
