//! A bulk transfer both ways between the two hosts of a simulated network.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::time::Duration;

use siw_net::ConnId;
use siw_tcp::{Events, StackConfig, TcpState};
use siw_tcp_sim::{Impairment, Pattern, Rng, SentSegment, SimNet, host_config};

pub mod capture;
pub mod fuzz;
pub mod quiet;
pub mod raw_host;
pub mod scenario;
pub mod wire;

pub const PORT: u16 = 7000;

pub type Net = SimNet<Pattern>;

/// Progress of one direction.
#[derive(Default, Clone)]
pub struct Side {
    pub id: Option<ConnId>,
    pub salt: u64,
    pub goal: u64,
    pub pushed: u64,
    pub acked: u64,
    pub received: u64,
    pub peer_salt: u64,
    pub peer_goal: u64,
    pub closing: bool,
    pub peer_fin: bool,
    pub ended: Events,
    /// Bytes shown to the owner beyond a hole.
    pub shown: u64,
    /// Maximum record length; 0: one segment.
    pub record: u32,
    /// Maximum number of bytes per read; 0: unlimited.
    pub read_step: usize,
}

impl Side {
    /// Fetches events, reads and checks received data, and sends as room permits.
    pub fn work(&mut self, net: &mut Net, host: usize, rng: &mut Rng) {
        let Some(id) = self.id else { return };
        let mut acked = 0;
        let mut next = self.acked;
        net.hosts[host].take_acked(id, |record| {
            assert!(record.start >= next, "records are acknowledged in order");
            next = record.start + 1;
            acked += 1;
        });
        if acked > 0 {
            self.acked = next;
        }
        if let Some(rx) = net.hosts[host].receive_queue(id) {
            let count = rx.len_bytes().min(if self.read_step > 0 {
                self.read_step
            } else {
                usize::MAX
            });
            let mut at = self.received;
            rx.for_each_chunk(0, count, |chunk| {
                for &byte in chunk {
                    assert_eq!(
                        byte,
                        Pattern::byte(self.peer_salt, at),
                        "byte {at} at host {host}"
                    );
                    at += 1;
                }
            });
            assert_eq!(rx.consume(count), count);
            self.received = at;
        }
        assert!(self.received <= self.peer_goal);
        let stack = &mut net.hosts[host];
        while self.pushed < self.goal {
            let room = stack.send_room(id) as u64;
            let emss = stack.effective_mss(id) as u64;
            let max = if self.record > 0 {
                u64::from(self.record)
            } else {
                emss
            };
            let len = (1 + rng.below(max)).min(self.goal - self.pushed);
            let len = if rng.chance(0.7) {
                max.min(self.goal - self.pushed)
            } else {
                len
            };
            // With an empty queue, one record of any length may wait for the window.
            if room < len && (room == 0 || stack.tcp_info(id).is_none_or(|info| info.unsent > 0)) {
                break;
            }
            let record = Pattern {
                salt: self.salt,
                start: self.pushed,
            };
            let last = self.pushed + len == self.goal;
            if stack
                .push_record(id, len as u32, record, last || rng.chance(0.2))
                .is_err()
            {
                break;
            }
            self.pushed += len;
        }
        if self.pushed == self.goal
            && !self.closing
            && stack
                .tcp_info(id)
                .is_some_and(|info| info.state != TcpState::SynSent)
        {
            self.closing = true;
            let now = net.now;
            net.hosts[host].close(now, id);
        }
        net.flush(host, id);
    }
}

pub struct Transfer {
    pub net: Net,
    pub sides: [Side; 2],
    pub rng: Rng,
}

impl Transfer {
    pub fn new(
        seed: u64,
        configs: [StackConfig; 2],
        links: [Impairment; 2],
        goals: [u64; 2],
    ) -> Self {
        let mut net = Net::new(seed, configs, links);
        net.log = Some(vec![]);
        let side = |i: usize| Side {
            salt: seed.wrapping_mul(31) + i as u64,
            peer_salt: seed.wrapping_mul(31) + 1 - i as u64,
            goal: goals[i],
            peer_goal: goals[1 - i],
            ..Side::default()
        };
        Transfer {
            net,
            sides: [side(0), side(1)],
            rng: Rng::new(seed ^ 0xabcdef),
        }
    }

    pub fn connect(&mut self, v6: bool) {
        let now = self.net.now;
        self.net.hosts[1].listen(None, PORT, 8, 1).unwrap();
        let to = if v6 {
            format!("[fd00::2]:{PORT}")
        } else {
            format!("10.0.0.2:{PORT}")
        };
        let id = self.net.hosts[0]
            .connect(now, None, None, to.parse().unwrap(), 0)
            .unwrap();
        self.sides[0].id = Some(id);
    }

    pub fn events(&mut self) {
        for host in 0..2 {
            while let Some((id, _, events)) = self.net.hosts[host].next_event() {
                if events.contains(Events::ACCEPTED) {
                    self.sides[host].id = Some(id);
                }
                if self.sides[host].id != Some(id) {
                    continue;
                }
                if events.contains(Events::OUT_OF_ORDER) {
                    let side = &mut self.sides[host];
                    let (salt, at) = (side.peer_salt, side.received);
                    let seen = &mut side.shown;
                    self.net.hosts[host].for_each_out_of_order(id, |offset, buffer| {
                        assert!(offset > 0);
                        for (i, &byte) in buffer.as_slice().iter().enumerate() {
                            assert_eq!(byte, Pattern::byte(salt, at + (offset + i) as u64));
                        }
                        *seen += buffer.as_slice().len() as u64;
                    });
                }
                self.sides[host].ended |= events;
                self.sides[host].peer_fin |= events.contains(Events::PEER_FIN);
            }
        }
    }

    pub fn done(&self) -> bool {
        self.sides
            .iter()
            .all(|side| side.received == side.peer_goal && side.ended.contains(Events::CLOSED))
    }

    /// Runs until both directions are delivered and closed; `false` after `time` of virtual time.
    pub fn run(&mut self, time: Duration) -> bool {
        self.run_watching(time, |_| ())
    }

    /// Like `run`; `watch` may also limit the number of frames that the sinks accept.
    pub fn run_all(
        &mut self,
        time: Duration,
        mut watch: impl FnMut(&mut Net, &mut [Option<usize>; 2]),
    ) -> bool {
        let mut space = [None; 2];
        self.run_watching(time, |net| {
            let before = space;
            watch(net, &mut space);
            for host in 0..2 {
                if before[host] != space[host] {
                    net.sinks[host].space = space[host];
                }
            }
        })
    }

    /// Like `run`; calls `watch` with the network after each step.
    pub fn run_watching(&mut self, time: Duration, mut watch: impl FnMut(&mut Net)) -> bool {
        let limit = self.net.now + time;
        loop {
            watch(&mut self.net);
            self.events();
            for host in 0..2 {
                let mut side = std::mem::take(&mut self.sides[host]);
                side.work(&mut self.net, host, &mut self.rng);
                self.sides[host] = side;
            }
            if self.done() {
                return true;
            }
            let unread = (0..2).any(|host| {
                let id = self.sides[host].id;
                id.and_then(|id| self.net.hosts[host].tcp_info(id))
                    .is_some_and(|info| info.readable > 0)
            });
            if !self.net.step(limit) && !unread {
                self.events();
                return self.done();
            }
        }
    }

    /// Checks that every retransmission has the boundaries of a first transmission; on a path that
    /// narrowed, that it is part of one and does not join separate segments.
    pub fn check_boundaries(&self) {
        let mut first: [BTreeMap<u32, u32>; 2] = Default::default();
        for sent in self.net.log.as_ref().unwrap() {
            let SentSegment {
                from,
                seq,
                payload,
                retransmission,
            } = *sent;
            let stats = self.net.hosts[from].stats();
            if retransmission && stats.tcp.black_holes + stats.tcp.pmtu_reductions > 0 {
                // Transfers are too short for sequence numbers to wrap around fully; the wrap
                // itself is not checked.
                let whole = first[from].range(..=seq).next_back();
                let inside = whole.is_none_or(|(start, len)| seq - start + payload <= *len);
                assert!(inside, "a retransmission at {seq} joins what was apart");
            } else if retransmission {
                assert_eq!(
                    first[from].get(&seq),
                    Some(&payload),
                    "a retransmission at {seq} changed its length"
                );
            } else {
                assert_eq!(
                    first[from].insert(seq, payload),
                    None,
                    "{seq} was new twice"
                );
            }
        }
    }
}

pub fn configs() -> [StackConfig; 2] {
    [host_config(0), host_config(1)]
}

pub fn micros(count: u64) -> Duration {
    Duration::from_micros(count)
}
