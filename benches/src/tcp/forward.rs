//! A link with seeded loss and delay between two ports: frames go from one to the other, in
//! order, after a fixed time, or not at all. For machines whose kernel has no netem, and the
//! same for every stack that is measured.

use std::collections::VecDeque;
use std::time::Duration;

use dpdk::{Mbuf, MbufCache};
use siw_tcp::Instant;

use super::link::End;

/// Frames on their way in one direction; more are dropped, as a router's queue does.
const QUEUE: usize = 12_000;
/// Shorter frames are acknowledgements and handshakes, which are spared.
const DATA: u32 = 500;

/// What happens to data on the way from the first port to the second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    /// Each segment with this probability.
    Random(f64),
    /// So many segments, every second one of a run, once in so many.
    Burst { lost: u64, every: u64 },
}

struct Direction {
    frames: VecDeque<(Instant, Mbuf)>,
    dropped: u64,
}

pub struct Forwarder {
    ends: [End; 2],
    ways: [Direction; 2],
    delay: Duration,
    loss: Loss,
    random: u64,
    data: u64,
    /// Data segments lost on purpose, and frames that met a full queue.
    pub lost: u64,
}

impl Forwarder {
    /// Frames take half of `rtt` each way. The same seed loses the same segments.
    pub fn new(ends: [End; 2], rtt: Duration, loss: Loss, seed: u64) -> Forwarder {
        let way = || Direction {
            frames: VecDeque::with_capacity(QUEUE),
            dropped: 0,
        };
        Forwarder {
            ends,
            ways: [way(), way()],
            delay: rtt / 2,
            loss,
            random: seed,
            data: 0,
            lost: 0,
        }
    }

    /// Data segments that came, and frames that met a full queue.
    pub fn counts(&self) -> (u64, u64) {
        (self.data, self.ways[0].dropped + self.ways[1].dropped)
    }

    /// splitmix64.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let random = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let random = (random ^ random >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        random ^ random >> 31
    }

    fn loses(&mut self) -> bool {
        self.data += 1;
        let lost = match self.loss {
            Loss::Random(probability) => {
                (self.random() >> 11) as f64 / (1u64 << 53) as f64 <= probability
            }
            Loss::Burst { lost, every } => {
                let at = self.data % every;
                at < 2 * lost && at.is_multiple_of(2) && self.data > every
            }
        };
        self.lost += u64::from(lost);
        lost
    }

    /// Takes what came and sends what is due; true when there was anything.
    #[inline]
    pub fn turn(&mut self, now: Instant, cache: &mut MbufCache) -> bool {
        let mut any = false;
        for from in 0..2 {
            let mut inn = std::mem::take(&mut self.ends[from].inn);
            self.ends[from].rx.rx_burst(&mut inn);
            any |= !inn.is_empty();
            for mbuf in inn.drain() {
                if from == 0 && mbuf.pkt_len() >= DATA && self.loses() {
                    cache.free(mbuf);
                } else if self.ways[from].frames.len() >= QUEUE {
                    self.ways[from].dropped += 1;
                    cache.free(mbuf);
                } else {
                    self.ways[from].frames.push_back((now + self.delay, mbuf));
                }
            }
            self.ends[from].inn = inn;
            let (way, to) = (&mut self.ways[from], &mut self.ends[1 - from]);
            while way.frames.front().is_some_and(|(at, _)| *at <= now) && !to.out.is_full() {
                if let Some((_, mut mbuf)) = way.frames.pop_front() {
                    mbuf.clear_offload();
                    if let Err(mbuf) = to.out.push(mbuf) {
                        cache.free(mbuf);
                    }
                }
            }
            if !to.out.is_empty() {
                to.tx.tx_burst(&mut to.out);
                any = true;
            }
        }
        any
    }
}
