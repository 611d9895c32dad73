//! Flows that send without pause over one bottleneck in virtual time: fairness, goodput, and frames
//! for the port.

use std::collections::HashMap;
use std::time::Duration;

use siw_tcp::{CongestionControl, Events, TsoLimits};

use super::{Impairment, Pattern, Rng, SimNet, host_config};

const PORT: u16 = 7000;

/// Least Jain's index, share of the slowest flow, and share of the rate on a drawn path.
const JAIN_MIN: f64 = 0.8;
const LEAST_MIN: f64 = 0.2;
const GOODPUT_MIN: f64 = 0.9;

/// The path, and the flows over it, which start to send at the same time, once all are connected.
#[derive(Clone, Copy, Debug)]
pub struct SharedPath {
    /// Number of flows.
    pub flows: usize,
    /// Rate of the bottleneck in bits per second.
    pub rate: u64,
    /// Delay in each direction.
    pub delay: Duration,
    /// Frames that may wait at the bottleneck.
    pub queue: usize,
    /// MTU of both hosts. Records are the longest multiples of four bytes that fit a segment, as
    /// FPDUs.
    pub mtu: u16,
    /// The port segments super-segments.
    pub tso: bool,
    /// Delay of the receiver's ACKs.
    pub delayed_ack: Duration,
    /// The receiver's port coalesces segments that arrive within this time; zero: it does not.
    pub coalesce: Duration,
    /// Virtual time before the measurement, and of the measurement.
    pub before: Duration,
    /// See `before`.
    pub measured: Duration,
}

/// The result of [`SharedPath::measure`].
#[derive(Clone, Copy, Debug)]
pub struct PathShares {
    /// Jain's index of the goodputs of the flows; 1: all are equal.
    pub jain: f64,
    /// Goodput of the slowest flow, as a share of the mean.
    pub least: f64,
    /// Goodput of all flows, as a share of the rate.
    pub goodput: f64,
    /// Retransmitted segments, as a share of those sent.
    pub retransmitted: f64,
    /// Segments sent per frame given to the port.
    pub segments_per_frame: f64,
}

impl PathShares {
    /// Checks the shares against the floors of a drawn path.
    ///
    /// # Errors
    /// Flows share the path unfairly, or do not fill it.
    pub fn judge(&self) -> Result<(), String> {
        let floors = [
            ("Jain's index", self.jain, JAIN_MIN),
            ("share of the slowest flow", self.least, LEAST_MIN),
            ("goodput", self.goodput, GOODPUT_MIN),
        ];
        match floors.iter().find(|(_, value, floor)| value < floor) {
            Some((name, value, floor)) => {
                Err(format!("{name} {value:.3} is below {floor}: {self:.3?}"))
            }
            None => Ok(()),
        }
    }

    /// Name and value of each share, in thousandths.
    pub fn rows(&self) -> [(&'static str, u64); 5] {
        let shares = [
            ("jain", self.jain),
            ("least", self.least),
            ("goodput", self.goodput),
            ("retransmitted", self.retransmitted),
            ("segments_per_frame", self.segments_per_frame),
        ];
        shares.map(|(name, share)| (name, (share * 1000.0) as u64))
    }
}

impl SharedPath {
    /// Draws a path and its flows from a seed. Path and queue hold eight segments of each flow, so that
    /// no flow depends on timeouts; the time suffices for hundreds of round trips.
    pub fn draw(seed: u64) -> SharedPath {
        let rng = &mut Rng::new(seed ^ 0x000f_a1b0_55ed);
        let mtu = [1500, 1500, 1450, 9000][rng.below(4) as usize];
        let rate = rng.log_uniform(100_000_000, 10_000_000_000);
        let frame = Duration::from_nanos((u64::from(mtu) + 38) * 8_000_000_000 / rate);
        // Frames that the path holds.
        let held = rng.log_uniform(4, 300);
        let delay = frame * held as u32 / 2;
        let flows = 2 + rng.below(31);
        let queue = (flows * 8).saturating_sub(held).max(held / 2).max(20) + rng.below(200);
        let round_trip = 2 * delay + frame * queue as u32;
        let time = (round_trip * 300).max(frame * flows as u32 * 500);
        let late = Duration::from_millis(40);
        SharedPath {
            flows: flows as usize,
            rate,
            delay,
            queue: queue as usize,
            mtu,
            tso: rng.chance(0.5),
            delayed_ack: if rng.chance(0.3) {
                late
            } else {
                Duration::from_millis(1)
            },
            coalesce: if rng.chance(0.3) {
                frame * rng.below(16) as u32
            } else {
                Duration::ZERO
            },
            before: time,
            measured: time,
        }
    }

    /// Sends from one host to the other, and measures at the receiver.
    pub fn measure(&self) -> PathShares {
        let mut link = Impairment::perfect(self.delay);
        (link.rate, link.queue, link.coalesce) = (self.rate, self.queue, self.coalesce);
        let configs = [0, 1].map(|host| {
            let mut config = host_config(host);
            config.tcp.congestion = CongestionControl::Cubic;
            config.net.mtu = self.mtu;
            config.tcp.delayed_ack = self.delayed_ack;
            // As siwd with a pool of 16384 buffers.
            config.tcp.recv_window = 1 << 20;
            config.tcp.recv_window_doublings = 5;
            config.tcp.max_held_buffers = 11_776;
            if self.tso {
                config.tcp.tx_checksum = false;
                config.tcp.tso = Some(TsoLimits {
                    max_segments: 64,
                    max_bytes: 60_000,
                });
            }
            config
        });
        let mut net = SimNet::<Pattern>::new(11, configs, [link; 2]);
        let to = std::net::SocketAddr::from(([10, 0, 0, 2], PORT));
        let start = net.now;
        net.hosts[1]
            .listen(None, PORT, self.flows, 0)
            .expect("a free port");
        for _ in 0..self.flows {
            net.hosts[0]
                .connect(start, None, None, to, 0)
                .expect("a free slot");
        }
        // A lost SYN is repeated after one second and after three.
        let are_open =
            |net: &mut SimNet<Pattern>| net.hosts[0].stats().tcp.curr_estab == self.flows as u64;
        net.run(Duration::from_secs(5), are_open);
        let mut received = HashMap::new();
        Self::transfer(&mut net, self.before, &mut received);
        received.clear();
        Self::transfer(&mut net, self.measured, &mut received);
        let mut rates: Vec<f64> = received
            .into_values()
            .map(|bytes: u64| bytes as f64)
            .collect();
        rates.resize(self.flows, 0.0);
        let sum: f64 = rates.iter().sum();
        let squares: f64 = rates.iter().map(|rate| rate * rate).sum();
        let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
        let (flows, stats) = (self.flows as f64, net.hosts[0].stats());
        PathShares {
            jain: sum * sum / (flows * squares),
            least: least * flows / sum,
            goodput: sum * 8.0 / self.measured.as_secs_f64() / self.rate as f64,
            retransmitted: stats.tcp.retrans_segs as f64 / stats.tcp.out_segs as f64,
            segments_per_frame: stats.tcp.out_segs as f64 / stats.net.frames_out as f64,
        }
    }

    fn transfer(
        net: &mut SimNet<Pattern>,
        time: Duration,
        received: &mut HashMap<siw_net::ConnId, u64>,
    ) {
        let end = net.now + time;
        while net.step(end) {
            while let Some((id, _, events)) = net.hosts[1].next_event() {
                if events.intersects(Events::READABLE | Events::ACCEPTED)
                    && let Some(queue) = net.hosts[1].receive_queue(id)
                {
                    *received.entry(id).or_default() += queue.consume(usize::MAX) as u64;
                }
            }
            while let Some((id, ..)) = net.hosts[0].next_event() {
                net.hosts[0].take_acked(id, drop);
                let len = net.hosts[0].effective_mss(id) / 4 * 4;
                while net.hosts[0].send_room(id) >= len {
                    let record = Pattern { salt: 1, start: 0 };
                    let pushed = net.hosts[0].push_record(id, len as u32, record, false);
                    if pushed.is_err() {
                        break;
                    }
                }
                net.flush(0, id);
            }
        }
    }
}
