//! A host without a stack: it builds each frame that host 1 of a lab receives, and parses the answers.

use siw_net::{ConnId, FrameInfo, Instant, RxChecksum};
use siw_tcp::{Events, StackConfig, StackStats};
use siw_tcp_sim::forge::{Ends, Tcp};

use super::wire::{ACK, Lab, PSH, SYN};

pub const MAC: [u8; 6] = [2, 9, 9, 9, 9, 9];
const HOST: [u8; 6] = [2, 0, 0, 0, 0, 2];
const PORTS: [u16; 2] = [2000, 80];

/// A change made to a frame in transit.
pub type FrameChange<'a> = &'a dyn Fn(Vec<u8>) -> Vec<Vec<u8>>;

pub struct RawHost {
    pub lab: Lab,
    pub ends: Ends,
    seq: u32,
    ack: u32,
}

impl RawHost {
    /// Creates a host on the link of host 1, with an address of the given family.
    pub fn new(v6: bool) -> RawHost {
        RawHost::of(v6, |_| {})
    }

    /// Like `new`, with changes to the configuration of host 1.
    pub fn of(v6: bool, change: impl FnOnce(&mut StackConfig)) -> RawHost {
        let mut configs = [0, 1].map(siw_tcp_sim::host_config);
        change(&mut configs[1]);
        let mut lab = Lab::with(configs);
        let now = lab.net.now;
        lab.net.hosts[1].listen(None, 80, 16, 0).unwrap();
        let ip = if v6 {
            ["fd00::9", "fd00::2"]
        } else {
            ["10.0.0.9", "10.0.0.2"]
        };
        let ends = Ends {
            mac: [MAC, HOST],
            ip: ip.map(|address| address.parse().unwrap()),
        };
        let mut raw_host = RawHost {
            lab,
            ends,
            seq: 1000,
            ack: 0,
        };
        let hello = if v6 { ends.solicit() } else { ends.arp(1) };
        assert_eq!(raw_host.answers(vec![hello]).len(), 1);
        assert!(now <= raw_host.now());
        raw_host
    }

    pub fn now(&self) -> Instant {
        self.lab.net.now
    }

    pub fn give(&mut self, frames: Vec<Vec<u8>>) {
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        let now = self.now();
        let frames = frames.into_iter().map(|frame| (frame.into(), info));
        self.lab.net.hosts[1].receive_burst(now, frames);
    }

    /// Polls host 1 and returns the frames that it sends.
    pub fn said(&mut self) -> Vec<Vec<u8>> {
        let now = self.now();
        let sink = &mut self.lab.net.sinks[1];
        self.lab.net.hosts[1].poll(now, sink);
        sink.frames.drain(..).map(|(frame, _)| frame).collect()
    }

    pub fn answers(&mut self, frames: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        self.give(frames);
        self.said()
    }

    pub fn stats(&self) -> StackStats {
        self.lab.net.hosts[1].stats()
    }

    fn segment(&self, flags: u8, payload: &[u8]) -> Vec<u8> {
        self.ends.tcp(&Tcp {
            ports: PORTS,
            seq: self.seq,
            ack: self.ack,
            flags,
            window: 60_000,
            options: &[],
            payload,
        })
    }

    /// Opens a connection to port 80, with all segments changed by `way`.
    pub fn connect(&mut self, way: FrameChange<'_>) -> ConnId {
        // Host 1 also sends an address resolution for this host.
        let replies = self.answers(way(self.segment(SYN, b"")));
        let tcp = if self.ends.ip[0].is_ipv6() { 54 } else { 34 };
        let numbers = replies.iter().find_map(|frame| {
            let word = |at| u32::from_be_bytes(frame[at..at + 4].try_into().unwrap());
            (frame[tcp..tcp + 2] == [0, 80] && frame[tcp + 13] == SYN | ACK)
                .then(|| (word(tcp + 4), word(tcp + 8)))
        });
        let (seq, ack) = numbers.expect("a SYN with an ACK");
        assert_eq!(ack, self.seq + 1);
        (self.seq, self.ack) = (ack, seq.wrapping_add(1));
        self.give(way(self.segment(ACK, b"")));
        self.lab.collect();
        let (id, events) = *self.lab.events[1].last().expect("an event");
        assert!(events.contains(Events::ACCEPTED));
        id
    }

    /// Sends data; returns whether it was delivered at once.
    pub fn delivers(&mut self, id: ConnId, data: &[u8], way: FrameChange<'_>) -> bool {
        self.give(way(self.segment(ACK | PSH, data)));
        let got = self.lab.read(1, id);
        if got.is_empty() {
            return false;
        }
        assert!(got == data, "{} bytes of {}", got.len(), data.len());
        self.seq += data.len() as u32;
        true
    }
}
