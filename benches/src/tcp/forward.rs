//! An impaired link between two ports with seeded loss and delay: frames pass in order after a
//! fixed time, or are dropped. For machines whose kernel has no netem, and identical for every
//! measured stack.

use std::collections::VecDeque;
use std::time::Duration;

use dpdk::{Mbuf, MbufCache};
use siw_net::Instant;
use siw_ports::{ReceiveQueue, TransmitQueue};

use super::link::PortEnd;

/// Maximum delayed frames per direction; more are dropped, as in a router's queue.
const QUEUE_FRAMES: usize = 12_000;
/// Shorter frames are acknowledgements and handshakes, which the link never drops on purpose.
const DATA_FRAME_BYTES: u32 = 500;

/// Loss pattern of data segments from the first port to the second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    /// Each segment is lost with this probability.
    Random(f64),
    /// `lost` segments, every second one of a run, once in `every` segments.
    Burst {
        /// Segments lost in each run.
        lost: u64,
        /// Segments from one run to the next.
        every: u64,
    },
}

struct DelayedFrames {
    frames: VecDeque<(Instant, Mbuf)>,
    dropped: u64,
}

/// Passes frames between two ports, with loss and delay.
pub struct ImpairedLink {
    ends: [PortEnd; 2],
    directions: [DelayedFrames; 2],
    delay: Duration,
    loss: Loss,
    random_state: u64,
    data: u64,
    /// Data segments lost on purpose.
    pub lost: u64,
}

impl ImpairedLink {
    /// Delays frames by half of `rtt` each way. The same seed loses the same segments.
    pub fn new(ends: [PortEnd; 2], rtt: Duration, loss: Loss, seed: u64) -> ImpairedLink {
        let way = || DelayedFrames {
            frames: VecDeque::with_capacity(QUEUE_FRAMES),
            dropped: 0,
        };
        ImpairedLink {
            ends,
            directions: [way(), way()],
            delay: rtt / 2,
            loss,
            random_state: seed,
            data: 0,
            lost: 0,
        }
    }

    /// Data segments received, and frames dropped because the queue was full.
    pub fn count_frames(&self) -> (u64, u64) {
        (
            self.data,
            self.directions[0].dropped + self.directions[1].dropped,
        )
    }

    /// Next number of the splitmix64 generator.
    fn next_random(&mut self) -> u64 {
        self.random_state = self.random_state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let random =
            (self.random_state ^ self.random_state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let random = (random ^ random >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        random ^ random >> 31
    }

    /// Counts a data segment, and decides whether to drop it.
    fn drops_next_segment(&mut self) -> bool {
        self.data += 1;
        let lost = match self.loss {
            Loss::Random(probability) => {
                (self.next_random() >> 11) as f64 / (1u64 << 53) as f64 <= probability
            }
            Loss::Burst { lost, every } => {
                let at = self.data % every;
                at < 2 * lost && at.is_multiple_of(2) && self.data > every
            }
        };
        self.lost += u64::from(lost);
        lost
    }

    /// Receives arrived frames and sends the due ones; returns true if there were any.
    #[inline]
    pub fn pass_frames(&mut self, now: Instant, cache: &mut MbufCache) -> bool {
        let mut any = false;
        for from in 0..2 {
            let mut inn = std::mem::take(&mut self.ends[from].received);
            self.ends[from].rx.rx_burst(&mut inn);
            any |= !inn.is_empty();
            for mbuf in inn.drain() {
                if from == 0 && mbuf.pkt_len() >= DATA_FRAME_BYTES && self.drops_next_segment() {
                    cache.free(mbuf);
                } else if self.directions[from].frames.len() >= QUEUE_FRAMES {
                    self.directions[from].dropped += 1;
                    cache.free(mbuf);
                } else {
                    self.directions[from]
                        .frames
                        .push_back((now + self.delay, mbuf));
                }
            }
            self.ends[from].received = inn;
            let (way, to) = (&mut self.directions[from], &mut self.ends[1 - from]);
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
