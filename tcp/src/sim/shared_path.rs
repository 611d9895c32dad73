//! Flows that send without pause over one bottleneck in virtual time: fairness, goodput, and frames
//! for the port.

use std::collections::HashMap;
use std::time::Duration;

use super::{Impairment, Pattern, SimNet, host_config};
use crate::base::events::Events;
use crate::config::{CongestionControl, TsoLimits};

const PORT: u16 = 7000;

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

impl SharedPath {
    /// Sends from one host to the other, and measures at the receiver.
    pub fn measure(&self) -> PathShares {
        let mut link = Impairment::perfect(self.delay);
        (link.rate, link.queue) = (self.rate, self.queue);
        let configs = [0, 1].map(|host| {
            let mut config = host_config(host);
            config.congestion = CongestionControl::Cubic;
            config.mtu = self.mtu;
            // As siwd with a pool of 16384 buffers.
            config.recv_window = 1 << 20;
            config.recv_window_doublings = 5;
            config.max_held_buffers = 11_776;
            if self.tso {
                config.tx_checksum = false;
                config.tso = Some(TsoLimits {
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
            |net: &mut SimNet<Pattern>| net.hosts[0].stats().curr_estab == self.flows as u64;
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
            retransmitted: stats.retrans_segs as f64 / stats.out_segs as f64,
            segments_per_frame: stats.out_segs as f64 / stats.frames_out as f64,
        }
    }

    fn transfer(
        net: &mut SimNet<Pattern>,
        time: Duration,
        received: &mut HashMap<crate::base::ids::ConnId, u64>,
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
