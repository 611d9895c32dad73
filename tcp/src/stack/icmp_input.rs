//! What comes beside TCP: ARP, NDP and ICMP, and what ICMP errors do to connections.

use core::net::IpAddr;

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::base::time::ticks;
use crate::link::control_queue::{Icmpv6Outcome, Origin};
use crate::pmtu::path_mtu::{self, MIN_V4, MIN_V6};
use crate::pmtu::search::PathSearch;
use crate::stack::Stack;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::bytes::{read_u16, read_u32};
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::FrameContent;

/// Type and code (RFC 1191 section 4), type (RFC 4443 section 3.2).
const FRAGMENTATION_NEEDED: [u8; 2] = [3, 4];
const PACKET_TOO_BIG: u8 = 2;

impl<B: RecvBuf, R> Stack<B, R> {
    /// ARP, NDP, ICMP, and what is none of what we speak.
    #[cold]
    pub(crate) fn other(&mut self, now: Instant, what: FrameContent, b: B, src_mac: [u8; 6]) {
        let sh = &mut self.shared;
        let addrs = &sh.config.addresses;
        let own = |a: IpAddr| addrs.iter().any(|c| c.addr == a);
        let can_be_peer = match &what {
            FrameContent::Icmpv4 { src, .. } => sh.can_be_peer((*src).into(), src_mac),
            FrameContent::Icmpv6 { src, .. } => sh.can_be_peer((*src).into(), src_mac),
            FrameContent::Rejected { src, .. } => sh.can_be_peer(*src, src_mac),
            _ => true,
        };
        match what {
            FrameContent::Tcp { .. } => {}
            FrameContent::Fragment { header } => self.fragment(now, header, b, src_mac),
            FrameContent::Rejected {
                src,
                dst,
                error,
                group,
            } => {
                let dst = if group { sh.member(dst) } else { Some(dst) };
                let Some(dst) = dst.filter(|d| own(*d)) else {
                    return;
                };
                if can_be_peer {
                    let o = Origin { src_mac, src, dst };
                    let stats = &mut sh.stats;
                    sh.control.icmp_error(now, &o, error, b.chunk(), stats);
                } else {
                    sh.stats.martians += 1;
                }
            }
            FrameContent::Arp => {
                let claim = sh.control.receive_arp(b.chunk(), own, &mut sh.stats);
                if let Some((addr, mac, reply)) = claim {
                    self.heard(now, addr, mac, reply);
                }
            }
            FrameContent::Icmpv4 { src, dst } => {
                let o = Origin {
                    src_mac,
                    src: src.into(),
                    dst: dst.into(),
                };
                if !own(o.dst) || !can_be_peer {
                    sh.stats.martians += 1;
                } else if sh.control.receive_icmpv4(now, &o, &b, &mut sh.stats) {
                    let q = b.chunk().get(8..).unwrap_or(&[]);
                    let header = q.first().map_or(0, |v| usize::from(v & 15) * 4);
                    if let (Some(ip), Some(tcp)) = (q.get(..20), q.get(header..header + 8))
                        && header >= 20
                        && ip[9] == 6
                    {
                        let (l, r) = (read_u32(ip, 12), read_u32(ip, 16));
                        let key = FlowKey::v4(l, r, read_u16(tcp, 0), read_u16(tcp, 2));
                        let seq = SeqNr(read_u32(tcp, 4));
                        let head = b.chunk();
                        if head[..2] == FRAGMENTATION_NEEDED {
                            let total = read_u16(ip, 2);
                            let mtu = path_mtu::from_v4(read_u16(head, 6), total);
                            self.too_big(&key, seq, mtu, now);
                        } else {
                            self.unreachable(&key, seq);
                        }
                    }
                }
            }
            FrameContent::Icmpv6 {
                src,
                dst,
                hop_limit,
            } => {
                let o = Origin {
                    src_mac,
                    src: src.into(),
                    dst: dst.into(),
                };
                // Who asks whether an address is free has none yet (RFC 4862 section 5.4.2).
                if !can_be_peer && !src.is_unspecified() {
                    sh.stats.martians += 1;
                    return;
                }
                match sh
                    .control
                    .receive_icmpv6(now, &o, hop_limit, &b, own, &mut sh.stats)
                {
                    Icmpv6Outcome::Done => {}
                    Icmpv6Outcome::Claim(addr, mac, answer) => self.heard(now, addr, mac, answer),
                    Icmpv6Outcome::Error => {
                        let q = b.chunk().get(8..).unwrap_or(&[]);
                        if let (Some(ip), Some(tcp)) = (q.get(..40), q.get(40..48))
                            && ip[6] == 6
                        {
                            let half = |at| {
                                u64::from(read_u32(ip, at)) << 32 | u64::from(read_u32(ip, at + 4))
                            };
                            let (l, r) = ([half(8), half(16)], [half(24), half(32)]);
                            let key = FlowKey::v6(l, r, read_u16(tcp, 0), read_u16(tcp, 2));
                            let seq = SeqNr(read_u32(tcp, 4));
                            let head = b.chunk();
                            if head[0] == PACKET_TOO_BIG {
                                let mtu = read_u32(head, 4).min(0xffff) as u16;
                                self.too_big(&key, seq, mtu, now);
                            } else {
                                self.unreachable(&key, seq);
                            }
                        }
                    }
                }
            }
        }
    }

    /// A neighbour said where it is. Claims that nobody asked for change nothing.
    fn heard(&mut self, now: Instant, addr: IpAddr, mac: [u8; 6], answer: bool) {
        if answer && !self.shared.neighbours.expects_answer(addr) {
            return;
        }
        // Only neighbours on the link are worth remembering.
        if self.shared.next_hop(addr) != Some(addr) {
            return;
        }
        for id in self
            .shared
            .neighbours
            .process_claim(addr, mac, !answer, now)
        {
            let c = self.conns.get_mut(id.index as usize);
            if let Some(c) = c.filter(|c| c.generation == id.generation) {
                self.shared.owe(id.index, &mut c.tcb, ConnectionFlags::NONE);
            }
        }
    }

    /// ICMP errors end only connections that are being opened (RFC 5927 section 5.2), and only
    /// when they quote our SYN.
    fn unreachable(&mut self, key: &FlowKey, seq: SeqNr) {
        self.shared.stats.icmp_errors_in += 1;
        let hash = key.hash::<1, 3>(self.shared.hash_key);
        let Some(index) = self
            .shared
            .table
            .find(hash, |i| self.conns[i as usize].template.carries(key))
        else {
            return;
        };
        let c = &mut self.conns[index as usize];
        if c.tcb.state == TcpState::SynSent && seq == c.tcb.snd_una {
            self.shared.stats.attempt_fails += 1;
            c.fail(&mut self.shared.context(index), Events::UNREACHABLE);
            self.reap(index);
        }
    }
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// A router says that what `key` sent at `seq` was too big. Believed when that is in flight
    /// (RFC 5927 section 4.1), was longer, and the size is not absurd (RFC 8899 section 4.6.1).
    pub(crate) fn too_big(&mut self, key: &FlowKey, seq: SeqNr, mtu: u16, now: Instant) {
        self.shared.stats.icmp_errors_in += 1;
        let hash = key.hash::<1, 3>(self.shared.hash_key);
        let conns = &self.conns;
        let found = self
            .shared
            .table
            .find(hash, |i| conns[i as usize].template.carries(key));
        let Some(index) = found else { return };
        let c = &mut self.conns[index as usize];
        let h = &c.tcb;
        let min = if key.is_v6() { MIN_V6 } else { MIN_V4 };
        if h.state == TcpState::SynSent || seq.lt(h.snd_una) || seq.ge(h.snd_nxt) || mtu < min {
            return;
        }
        let emss = c.emss_for(mtu);
        let Some(s) = c.tx.sent.get(c.tx.first_after(seq)) else {
            return;
        };
        // Of several that left together, each is as long as their EMSS was.
        let len = if s.mss == 0 { s.len } else { u32::from(s.mss) };
        if len <= u32::from(emss) {
            return;
        }
        let t = ticks(now.0);
        let to = key.remote().ip();
        let probe = s.is_probe(u32::from(c.tcb.emss));
        if emss < c.tcb.emss {
            self.shared.stats.pmtu_reductions += 1;
            self.shared.paths.learn(to, PathSearch::told(mtu, t), t);
            c.narrow(&mut self.shared.context(index), emss);
        } else if probe {
            // The probe's answer (section 4.6.2): what is in use stays, the search goes on below.
            if let Some(path) = self.shared.paths.known(to)
                && path.probe_of(c.id(index)).is_some()
            {
                path.limited(mtu, t);
                c.search_at = t;
            }
            c.send_cut(&mut self.shared.context(index));
        }
    }
}
