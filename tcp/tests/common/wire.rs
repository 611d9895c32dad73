//! Parses and forges frames.
#![allow(dead_code)]

use std::cell::RefCell;
use std::rc::Rc;

use siw_net::ConnId;
use siw_tcp::{Events, StackConfig};
use siw_tcp_sim::{Pattern, SimNet, host_config};

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const RST: u8 = 4;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;
pub const ECE: u8 = 64;
pub const CWR: u8 = 128;

/// An IPv4 TCP segment without VLAN.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seg {
    pub from: usize,
    pub sport: u16,
    pub dport: u16,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub options: Vec<u8>,
    pub payload: Vec<u8>,
}

impl Seg {
    pub fn parse(from: usize, frame: &[u8]) -> Option<Seg> {
        if frame.len() < 54 || frame[12..14] != [8, 0] || frame[23] != 6 {
            return None;
        }
        let total = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
        let tcp = &frame[34..14 + total];
        let header = usize::from(tcp[12] >> 4) * 4;
        let b32 = |i: usize| u32::from_be_bytes([tcp[i], tcp[i + 1], tcp[i + 2], tcp[i + 3]]);
        Some(Seg {
            from,
            sport: u16::from_be_bytes([tcp[0], tcp[1]]),
            dport: u16::from_be_bytes([tcp[2], tcp[3]]),
            seq: b32(4),
            ack: b32(8),
            flags: tcp[13],
            window: u16::from_be_bytes([tcp[14], tcp[15]]),
            options: tcp[20..header].to_vec(),
            payload: tcp[header..].to_vec(),
        })
    }

    /// Builds the frame between the simulated hosts, with correct checksums.
    pub fn frame(&self) -> Vec<u8> {
        let (me, peer) = (self.from as u8 + 1, 2 - self.from as u8);
        let mut frame = vec![2, 0, 0, 0, 0, peer, 2, 0, 0, 0, 0, me, 8, 0];
        let tcp_len = 20 + self.options.len() + self.payload.len();
        let mut ip = vec![
            0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, me, 10, 0, 0, peer,
        ];
        ip[2..4].copy_from_slice(&(20 + tcp_len as u16).to_be_bytes());
        let checksum = sum(&ip, 0);
        ip[10..12].copy_from_slice(&checksum);
        let mut tcp = vec![0; 20];
        tcp[0..2].copy_from_slice(&self.sport.to_be_bytes());
        tcp[2..4].copy_from_slice(&self.dport.to_be_bytes());
        tcp[4..8].copy_from_slice(&self.seq.to_be_bytes());
        tcp[8..12].copy_from_slice(&self.ack.to_be_bytes());
        tcp[12] = ((20 + self.options.len()) as u8 / 4) << 4;
        tcp[13] = self.flags;
        tcp[14..16].copy_from_slice(&self.window.to_be_bytes());
        tcp.extend_from_slice(&self.options);
        tcp.extend_from_slice(&self.payload);
        let pseudo: u32 = ip[12..20]
            .chunks(2)
            .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
            .sum();
        let checksum = sum(&tcp, pseudo + 6 + tcp_len as u32);
        tcp[16..18].copy_from_slice(&checksum);
        frame.extend(ip);
        frame.extend(tcp);
        frame
    }

    pub fn ts(&self) -> Option<(u32, u32)> {
        let options = &self.options;
        let at = options.windows(2).position(|pair| pair == [8, 10])?;
        let b32 = |i: usize| {
            u32::from_be_bytes([options[i], options[i + 1], options[i + 2], options[i + 3]])
        };
        Some((b32(at + 2), b32(at + 6)))
    }
}

pub fn sum(data: &[u8], start: u32) -> [u8; 2] {
    let mut total = start;
    for chunk in data.chunks(2) {
        total += u32::from(u16::from_be_bytes([chunk[0], *chunk.get(1).unwrap_or(&0)]));
    }
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    (!(total as u16)).to_be_bytes()
}

/// Builds an ICMPv4 error to host 0 that quotes `segment`, one of its own.
pub fn icmp_error(segment: &Seg, what: [u8; 2], mtu: u16) -> Vec<u8> {
    let frame = segment.frame();
    let mut icmp = vec![what[0], what[1], 0, 0, 0, 0];
    icmp.extend(mtu.to_be_bytes());
    icmp.extend_from_slice(&frame[14..42]);
    let checksum = sum(&icmp, 0);
    icmp[2..4].copy_from_slice(&checksum);
    let mut ip = vec![
        0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1,
    ];
    ip[2..4].copy_from_slice(&(20 + icmp.len() as u16).to_be_bytes());
    let checksum = sum(&ip, 0);
    ip[10..12].copy_from_slice(&checksum);
    [vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0], ip, icmp].concat()
}

pub type Net = SimNet<Vec<u8>>;
type Dropper = Rc<RefCell<Box<dyn FnMut(usize, &[u8]) -> bool>>>;

/// Two hosts, all segments seen on the wire, and helpers to open connections.
pub struct Lab {
    pub net: Net,
    pub seen: Rc<RefCell<Vec<Seg>>>,
    /// Frames for which this returns `true` are lost.
    pub drop: Dropper,
    pub events: [Vec<(ConnId, Events)>; 2],
}

impl Lab {
    pub fn new() -> Lab {
        Lab::with([host_config(0), host_config(1)])
    }

    pub fn with(configs: [StackConfig; 2]) -> Lab {
        let link = siw_tcp_sim::Impairment::perfect(super::micros(50));
        let mut net = Net::new(3, configs, [link; 2]);
        let seen = Rc::new(RefCell::new(vec![]));
        let drop: Dropper = Rc::new(RefCell::new(Box::new(|_, _| false)));
        let (log, lose) = (seen.clone(), drop.clone());
        net.filter = Some(Box::new(move |from, frame| {
            log.borrow_mut().extend(Seg::parse(from, frame));
            !(lose.borrow_mut())(from, frame)
        }));
        Lab {
            net,
            seen,
            drop,
            events: [vec![], vec![]],
        }
    }

    pub fn lose(&mut self, apply: impl FnMut(usize, &[u8]) -> bool + 'static) {
        *self.drop.borrow_mut() = Box::new(apply);
    }

    pub fn collect(&mut self) {
        for host in 0..2 {
            while let Some((id, _, events)) = self.net.hosts[host].next_event() {
                self.events[host].push((id, events));
            }
        }
    }

    /// Runs for some virtual time.
    pub fn run_ms(&mut self, ms: u64) {
        self.net
            .run(std::time::Duration::from_millis(ms), |_| false);
        self.collect();
    }

    /// Returns all events of a host so far.
    pub fn got(&self, host: usize) -> Events {
        self.events[host]
            .iter()
            .fold(Events::NONE, |all, (_, events)| all | *events)
    }

    pub fn connect(&mut self) -> [ConnId; 2] {
        let now = self.net.now;
        let _ = self.net.hosts[1].listen(None, 80, 16, 0);
        let client = self.net.hosts[0]
            .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
            .unwrap();
        self.run_ms(5);
        let server = self.events[1]
            .iter()
            .rev()
            .find(|(_, events)| events.contains(Events::ACCEPTED))
            .expect("accepted")
            .0;
        assert!(self.got(0).contains(Events::CONNECTED));
        [client, server]
    }

    /// Pushes a record and sends it at once.
    pub fn send(&mut self, host: usize, id: ConnId, data: &[u8]) {
        self.net.hosts[host]
            .push_record(id, data.len() as u32, data.to_vec(), true)
            .unwrap();
        self.net.flush(host, id);
    }

    pub fn read(&mut self, host: usize, id: ConnId) -> Vec<u8> {
        siw_tcp_sim::read_all(&mut self.net.hosts[host], id)
    }

    /// Returns the last segment that `host` sent.
    pub fn last(&self, host: usize) -> Seg {
        self.seen
            .borrow()
            .iter()
            .rev()
            .find(|segment| segment.from == host)
            .expect("a segment")
            .clone()
    }

    /// Opens a connection, transfers one byte to host 1, and returns the next bare segment of host 0.
    pub fn connect_with_data(&mut self) -> ([ConnId; 2], Seg) {
        let ids = self.connect();
        self.send(0, ids[0], b"x");
        self.run_ms(5);
        assert_eq!(self.read(1, ids[1]), b"x");
        self.run_ms(5);
        (ids, self.forge(0))
    }

    /// Returns the next segment of `host` on the connection of its last one, without payload.
    pub fn forge(&self, host: usize) -> Seg {
        let mut segment = self.last(host);
        segment.seq = segment.seq.wrapping_add(
            segment.payload.len() as u32 + u32::from(segment.flags & (SYN | FIN) != 0),
        );
        segment.payload.clear();
        segment.flags = ACK;
        segment.options = match segment.ts() {
            Some((value, echo)) => [
                &[1, 1, 8, 10][..],
                &value.to_be_bytes(),
                &echo.to_be_bytes(),
            ]
            .concat(),
            None => vec![],
        };
        segment
    }

    pub fn inject(&mut self, segment: &Seg) {
        self.net.inject(segment.from, segment.frame());
    }
}

pub fn pattern(count: usize) -> Vec<u8> {
    (0..count as u64).map(|i| Pattern::byte(5, i)).collect()
}
