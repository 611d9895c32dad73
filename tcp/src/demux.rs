//! From a burst of frames to connections: classification, lookup, and what is for none of them
//! (listeners, strangers, ARP, NDP, ICMP).

use core::net::IpAddr;

use crate::conn::flag;
use crate::control::{Icmpv6, Origin};
use crate::flow_table::FlowKey;
use crate::inbound::{self, Inbound, Link};
use crate::input::Verdict;
use crate::segment::{self, Segment};
use crate::stack::{FrameInfo, Stack, State};
use crate::{Events, Instant, RecvBuf, SeqNr};

impl<B: RecvBuf, R> Stack<B, R> {
    /// Takes a whole burst of received frames. ARP, NDP, ICMP are answered inside; the answers
    /// leave with the next `poll`.
    pub fn receive(&mut self, now: Instant, frames: impl Iterator<Item = (B, FrameInfo)>) {
        let link = Link {
            mac: self.sh.config.mac,
            vlan: self.sh.config.vlan,
        };
        // A burst is mostly of one flow: the last connection is tried before hashing.
        let mut last = u32::MAX;
        let mut seg = Segment::default();
        for (mut b, info) in frames {
            self.sh.stats.frames_in += 1;
            let mut src_mac = [0; 6];
            match inbound::classify(
                &link,
                &mut b,
                info.checksum,
                &mut src_mac,
                &mut self.sh.stats,
            ) {
                Some(Inbound::Tcp { key }) => {
                    if !seg.parse(b.chunk()) {
                        self.sh.stats.in_errs += 1;
                        continue;
                    }
                    self.sh.stats.in_segs += 1;
                    b.advance(usize::from(seg.header_len));
                    self.tcp(now, &key, &seg, b, src_mac, &mut last);
                }
                Some(other) => self.other(now, other, b, src_mac),
                None => {}
            }
        }
    }

    #[inline]
    fn tcp(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        b: B,
        src_mac: [u8; 6],
        last: &mut u32,
    ) {
        let known = self
            .conns
            .get(*last as usize)
            .is_some_and(|c| c.template.carries(key) && c.hot.has(flag::HASHED));
        if !known {
            let hash = key.hash::<1, 3>(self.sh.hash_key);
            match self
                .sh
                .table
                .find(hash, |i| self.conns[i as usize].template.carries(key))
            {
                Some(i) => *last = i,
                None => return self.stranger(now, key, seg, b.remaining() as u32, src_mac),
            }
        }
        let index = *last;
        let c = &mut self.conns[index as usize];
        if let Err(b) = self.sh.predicted(index, c, seg, b, now) {
            let payload = b.remaining() as u32;
            match self.sh.segment(index, c, seg, b, now) {
                Verdict::Done => self.reap(index),
                Verdict::Reset => {
                    self.reap(index);
                    self.refuse(now, key, seg, payload, src_mac);
                }
                Verdict::Reopen => {
                    self.sh.stats.time_wait_recycled += 1;
                    self.sh.closed(index, c);
                    self.reap(index);
                    self.stranger(now, key, seg, payload, src_mac);
                }
            }
        }
    }

    /// A segment for no connection (RFC 9293 section 3.10.7.1 and .2).
    #[cold]
    fn stranger(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        let (local, remote) = (key.local(), key.remote());
        if !self.sh.own(local.ip()) {
            self.sh.stats.not_for_us += 1;
            return;
        }
        if !(inbound::peer_address(remote.ip()) && remote.port() != 0)
            || (self.sh.own(remote.ip()) && src_mac != self.sh.config.mac)
            || seg.flags & (segment::SYN | segment::FIN) == segment::SYN | segment::FIN
        {
            self.sh.stats.martians += 1;
            return;
        }
        if seg.flags & segment::RST != 0 {
            return;
        }
        let ports = &self.sh.ports;
        let listener = ports
            .get(&(local.port(), Some(local.ip())))
            .or_else(|| ports.get(&(local.port(), None)));
        let Some(&listener) =
            listener.filter(|_| seg.flags & (segment::SYN | segment::ACK) == segment::SYN)
        else {
            self.sh.stats.no_ports += u64::from(seg.flags & segment::SYN != 0);
            return self.refuse(now, key, seg, payload, src_mac);
        };
        let Some(l) = self.sh.listeners.get_mut(&listener) else {
            return;
        };
        if l.pending >= l.backlog {
            self.sh.stats.listen_overflows += 1;
            self.sh.stats.listen_drops += 1;
            return;
        }
        let user = l.user;
        let Some(index) = self.alloc(*key) else {
            self.sh.stats.listen_drops += 1;
            return;
        };
        if let Some(l) = self.sh.listeners.get_mut(&listener) {
            l.pending += 1;
        }
        let c = &mut self.conns[index as usize];
        c.listener = listener;
        c.hot.user = user;
        c.hot.state = State::SynReceived;
        c.hot.flags |= flag::PASSIVE | flag::BACKLOG | flag::RELEASED;
        c.negotiate(seg, &self.sh.config, self.sh.recv_wscale);
        self.open(index, now);
    }

    /// Common start of active and passive opens.
    pub(crate) fn open(&mut self, index: u32, now: Instant) {
        let c = &mut self.conns[index as usize];
        let key = c.template.key();
        let iss = self.sh.isn(&key, now);
        c.ts_offset = self.sh.ts_offset(&key);
        c.hot.snd_una = iss;
        c.hot.snd_nxt = iss + 1;
        c.hot.snd_wl2 = iss;
        c.cwnd_mark = c.hot.snd_nxt;
        self.sh.owe(index, &mut c.hot, flag::NEED_SYN);
        self.sh.restart_rto(index, &mut c.hot, now);
        self.sh.update_active(c);
    }

    fn refuse(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        if seg.flags & segment::RST == 0 && self.sh.resets.take(now) {
            self.sh
                .control
                .reset(src_mac, key, seg, payload, &mut self.sh.stats);
        }
    }

    /// ARP, NDP and ICMP.
    #[cold]
    fn other(&mut self, now: Instant, what: Inbound, b: B, src_mac: [u8; 6]) {
        let sh = &mut self.sh;
        let addrs = &sh.config.addrs;
        let own = |a: IpAddr| addrs.iter().any(|c| c.addr == a);
        match what {
            Inbound::Tcp { .. } => {}
            Inbound::Arp => {
                let claim = sh.control.receive_arp(b.chunk(), own, &mut sh.stats);
                if let Some((addr, mac, reply)) = claim {
                    self.heard(now, addr, mac, reply);
                }
            }
            Inbound::Icmpv4 { src, dst } => {
                let o = Origin {
                    src_mac,
                    src: src.into(),
                    dst: dst.into(),
                };
                if !own(o.dst) || !inbound::peer_address(o.src) {
                    sh.stats.martians += 1;
                } else if sh.control.receive_icmpv4(now, &o, &b, &mut sh.stats) {
                    let q = b.chunk().get(8..).unwrap_or(&[]);
                    let header = q.first().map_or(0, |v| usize::from(v & 15) * 4);
                    if let (Some(ip), Some(tcp)) = (q.get(..20), q.get(header..header + 8))
                        && header >= 20
                        && ip[9] == 6
                    {
                        let (l, r) = (segment::be32(ip, 12), segment::be32(ip, 16));
                        let key = FlowKey::v4(l, r, segment::be16(tcp, 0), segment::be16(tcp, 2));
                        self.unreachable(&key, SeqNr(segment::be32(tcp, 4)));
                    }
                }
            }
            Inbound::Icmpv6 {
                src,
                dst,
                hop_limit,
            } => {
                let o = Origin {
                    src_mac,
                    src: src.into(),
                    dst: dst.into(),
                };
                match sh
                    .control
                    .receive_icmpv6(now, &o, hop_limit, &b, own, &mut sh.stats)
                {
                    Icmpv6::Done => {}
                    Icmpv6::Claim(addr, mac, answer) => self.heard(now, addr, mac, answer),
                    Icmpv6::Error => {
                        let q = b.chunk().get(8..).unwrap_or(&[]);
                        if let (Some(ip), Some(tcp)) = (q.get(..40), q.get(40..48))
                            && ip[6] == 6
                        {
                            let half = |at| {
                                u64::from(segment::be32(ip, at)) << 32
                                    | u64::from(segment::be32(ip, at + 4))
                            };
                            let (l, r) = ([half(8), half(16)], [half(24), half(32)]);
                            let key =
                                FlowKey::v6(l, r, segment::be16(tcp, 0), segment::be16(tcp, 2));
                            self.unreachable(&key, SeqNr(segment::be32(tcp, 4)));
                        }
                    }
                }
            }
        }
    }

    /// A neighbour said where it is. Claims that nobody asked for change nothing.
    fn heard(&mut self, now: Instant, addr: IpAddr, mac: [u8; 6], answer: bool) {
        if answer && !self.sh.neighbours.asked(addr) {
            return;
        }
        // Only neighbours on the link are worth remembering.
        if self.sh.next_hop(addr) != Some(addr) {
            return;
        }
        for index in self.sh.neighbours.heard(addr, mac, !answer, now) {
            if let Some(c) = self.conns.get_mut(index as usize) {
                self.sh.owe(index, &mut c.hot, 0);
            }
        }
    }

    /// ICMP errors end only connections that are being opened (RFC 5927 section 5.2), and only
    /// when they quote our SYN.
    fn unreachable(&mut self, key: &FlowKey, seq: SeqNr) {
        self.sh.stats.icmp_errors_in += 1;
        let hash = key.hash::<1, 3>(self.sh.hash_key);
        let Some(index) = self
            .sh
            .table
            .find(hash, |i| self.conns[i as usize].template.carries(key))
        else {
            return;
        };
        let c = &mut self.conns[index as usize];
        if c.hot.state == State::SynSent && seq == c.hot.snd_una {
            self.sh.stats.attempt_fails += 1;
            self.sh.fail(index, c, Events::UNREACHABLE);
            self.reap(index);
        }
    }
}
