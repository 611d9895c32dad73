//! Looking at frames and forging them.
#![allow(dead_code)]

use std::cell::RefCell;
use std::rc::Rc;

use siw_tcp::sim::{Pattern, SimNet, host_config};
use siw_tcp::{ConnId, Events, StackConfig};

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
    pub fn parse(from: usize, f: &[u8]) -> Option<Seg> {
        if f.len() < 54 || f[12..14] != [8, 0] || f[23] != 6 {
            return None;
        }
        let total = usize::from(u16::from_be_bytes([f[16], f[17]]));
        let t = &f[34..14 + total];
        let header = usize::from(t[12] >> 4) * 4;
        let b32 = |i: usize| u32::from_be_bytes([t[i], t[i + 1], t[i + 2], t[i + 3]]);
        Some(Seg {
            from,
            sport: u16::from_be_bytes([t[0], t[1]]),
            dport: u16::from_be_bytes([t[2], t[3]]),
            seq: b32(4),
            ack: b32(8),
            flags: t[13],
            window: u16::from_be_bytes([t[14], t[15]]),
            options: t[20..header].to_vec(),
            payload: t[header..].to_vec(),
        })
    }

    /// The frame, checksums right, between the simulated hosts.
    pub fn frame(&self) -> Vec<u8> {
        let (me, peer) = (self.from as u8 + 1, 2 - self.from as u8);
        let mut f = vec![2, 0, 0, 0, 0, peer, 2, 0, 0, 0, 0, me, 8, 0];
        let tcp_len = 20 + self.options.len() + self.payload.len();
        let mut ip = vec![
            0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, me, 10, 0, 0, peer,
        ];
        ip[2..4].copy_from_slice(&(20 + tcp_len as u16).to_be_bytes());
        let c = sum(&ip, 0);
        ip[10..12].copy_from_slice(&c);
        let mut t = vec![0; 20];
        t[0..2].copy_from_slice(&self.sport.to_be_bytes());
        t[2..4].copy_from_slice(&self.dport.to_be_bytes());
        t[4..8].copy_from_slice(&self.seq.to_be_bytes());
        t[8..12].copy_from_slice(&self.ack.to_be_bytes());
        t[12] = ((20 + self.options.len()) as u8 / 4) << 4;
        t[13] = self.flags;
        t[14..16].copy_from_slice(&self.window.to_be_bytes());
        t.extend_from_slice(&self.options);
        t.extend_from_slice(&self.payload);
        let pseudo: u32 = ip[12..20]
            .chunks(2)
            .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
            .sum();
        let c = sum(&t, pseudo + 6 + tcp_len as u32);
        t[16..18].copy_from_slice(&c);
        f.extend(ip);
        f.extend(t);
        f
    }

    pub fn ts(&self) -> Option<(u32, u32)> {
        let o = &self.options;
        let at = o.windows(2).position(|w| w == [8, 10])?;
        let b32 = |i: usize| u32::from_be_bytes([o[i], o[i + 1], o[i + 2], o[i + 3]]);
        Some((b32(at + 2), b32(at + 6)))
    }
}

pub fn sum(data: &[u8], start: u32) -> [u8; 2] {
    let mut s = start;
    for w in data.chunks(2) {
        s += u32::from(u16::from_be_bytes([w[0], *w.get(1).unwrap_or(&0)]));
    }
    while s > 0xffff {
        s = (s & 0xffff) + (s >> 16);
    }
    (!(s as u16)).to_be_bytes()
}

/// An ICMPv4 error towards host 0 that quotes `s`, a segment of its own.
pub fn icmp_error(s: &Seg, what: [u8; 2], mtu: u16) -> Vec<u8> {
    let f = s.frame();
    let mut icmp = vec![what[0], what[1], 0, 0, 0, 0];
    icmp.extend(mtu.to_be_bytes());
    icmp.extend_from_slice(&f[14..42]);
    let c = sum(&icmp, 0);
    icmp[2..4].copy_from_slice(&c);
    let mut ip = vec![
        0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1,
    ];
    ip[2..4].copy_from_slice(&(20 + icmp.len() as u16).to_be_bytes());
    let c = sum(&ip, 0);
    ip[10..12].copy_from_slice(&c);
    [vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0], ip, icmp].concat()
}

pub type Net = SimNet<Vec<u8>>;
type Dropper = Rc<RefCell<Box<dyn FnMut(usize, &[u8]) -> bool>>>;

/// Two hosts, everything seen on the wire, and a connection when asked for.
pub struct Lab {
    pub net: Net,
    pub seen: Rc<RefCell<Vec<Seg>>>,
    /// Frames for which this is true are lost.
    pub drop: Dropper,
    pub events: [Vec<(ConnId, Events)>; 2],
}

impl Lab {
    pub fn new() -> Lab {
        Lab::with([host_config(0), host_config(1)])
    }

    pub fn with(configs: [StackConfig; 2]) -> Lab {
        let link = siw_tcp::sim::Impairment::perfect(super::micros(50));
        let mut net = Net::new(3, configs, [link; 2]);
        let seen = Rc::new(RefCell::new(vec![]));
        let drop: Dropper = Rc::new(RefCell::new(Box::new(|_, _| false)));
        let (s, d) = (seen.clone(), drop.clone());
        net.filter = Some(Box::new(move |from, f| {
            s.borrow_mut().extend(Seg::parse(from, f));
            !(d.borrow_mut())(from, f)
        }));
        Lab {
            net,
            seen,
            drop,
            events: [vec![], vec![]],
        }
    }

    pub fn lose(&mut self, f: impl FnMut(usize, &[u8]) -> bool + 'static) {
        *self.drop.borrow_mut() = Box::new(f);
    }

    pub fn collect(&mut self) {
        for h in 0..2 {
            while let Some((id, _, e)) = self.net.hosts[h].next_event() {
                self.events[h].push((id, e));
            }
        }
    }

    /// Runs for some virtual time.
    pub fn run_ms(&mut self, ms: u64) {
        self.net
            .run(std::time::Duration::from_millis(ms), |_| false);
        self.collect();
    }

    /// All events of a host so far.
    pub fn got(&self, host: usize) -> Events {
        self.events[host]
            .iter()
            .fold(Events::NONE, |a, (_, e)| a | *e)
    }

    pub fn connect(&mut self) -> [ConnId; 2] {
        let now = self.net.now;
        let _ = self.net.hosts[1].listen(None, 80, 16, 0);
        let a = self.net.hosts[0]
            .connect(now, None, None, "10.0.0.2:80".parse().unwrap(), 0)
            .unwrap();
        self.run_ms(5);
        let b = self.events[1]
            .iter()
            .rev()
            .find(|(_, e)| e.contains(Events::ACCEPTED))
            .expect("accepted")
            .0;
        assert!(self.got(0).contains(Events::CONNECTED));
        [a, b]
    }

    /// Pushes and sends at once.
    pub fn send(&mut self, host: usize, id: ConnId, data: &[u8]) {
        self.net.hosts[host]
            .push_record(id, data.len() as u32, data.to_vec(), true)
            .unwrap();
        self.net.flush(host, id);
    }

    pub fn read(&mut self, host: usize, id: ConnId) -> Vec<u8> {
        siw_tcp::sim::read_all(&mut self.net.hosts[host], id)
    }

    /// The last segment `host` sent.
    pub fn last(&self, host: usize) -> Seg {
        self.seen
            .borrow()
            .iter()
            .rev()
            .find(|s| s.from == host)
            .expect("a segment")
            .clone()
    }

    /// What `host` would send next on the connection of its last segment, bare.
    pub fn forge(&self, host: usize) -> Seg {
        let mut s = self.last(host);
        s.seq = s
            .seq
            .wrapping_add(s.payload.len() as u32 + u32::from(s.flags & (SYN | FIN) != 0));
        s.payload.clear();
        s.flags = ACK;
        s.options = match s.ts() {
            Some((v, e)) => [&[1, 1, 8, 10][..], &v.to_be_bytes(), &e.to_be_bytes()].concat(),
            None => vec![],
        };
        s
    }

    pub fn inject(&mut self, s: &Seg) {
        self.net.inject(s.from, s.frame());
    }
}

pub fn pattern(n: usize) -> Vec<u8> {
    (0..n as u64).map(|i| Pattern::byte(5, i)).collect()
}
