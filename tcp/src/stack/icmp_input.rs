//! What comes beside TCP: ARP, NDP and ICMP, and what ICMP errors do to connections.

use core::net::IpAddr;

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::link::control_queue::{Icmpv6, Origin};
use crate::pmtu::path_mtu;
use crate::stack::Stack;
use crate::wire::bytes::{be16, be32};
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::Inbound;

/// Type and code (RFC 1191 section 4), type (RFC 4443 section 3.2).
const FRAGMENTATION_NEEDED: [u8; 2] = [3, 4];
const PACKET_TOO_BIG: u8 = 2;

impl<B: RecvBuf, R> Stack<B, R> {
    /// ARP, NDP, ICMP, and what is none of what we speak.
    #[cold]
    pub(crate) fn other(&mut self, now: Instant, what: Inbound, b: B, src_mac: [u8; 6]) {
        let sh = &mut self.sh;
        let addrs = &sh.config.addresses;
        let own = |a: IpAddr| addrs.iter().any(|c| c.addr == a);
        let can_be_peer = match &what {
            Inbound::Icmpv4 { src, .. } => sh.can_be_peer((*src).into(), src_mac),
            Inbound::Icmpv6 { src, .. } => sh.can_be_peer((*src).into(), src_mac),
            Inbound::Trouble { src, .. } => sh.can_be_peer(*src, src_mac),
            _ => true,
        };
        match what {
            Inbound::Tcp { .. } => {}
            Inbound::Fragment { header } => self.fragment(now, header, b, src_mac),
            Inbound::Trouble {
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
                if !own(o.dst) || !can_be_peer {
                    sh.stats.martians += 1;
                } else if sh.control.receive_icmpv4(now, &o, &b, &mut sh.stats) {
                    let q = b.chunk().get(8..).unwrap_or(&[]);
                    let header = q.first().map_or(0, |v| usize::from(v & 15) * 4);
                    if let (Some(ip), Some(tcp)) = (q.get(..20), q.get(header..header + 8))
                        && header >= 20
                        && ip[9] == 6
                    {
                        let (l, r) = (be32(ip, 12), be32(ip, 16));
                        let key = FlowKey::v4(l, r, be16(tcp, 0), be16(tcp, 2));
                        let seq = SeqNr(be32(tcp, 4));
                        let head = b.chunk();
                        if head[..2] == FRAGMENTATION_NEEDED {
                            let total = be16(ip, 2);
                            let mtu = path_mtu::from_v4(be16(head, 6), total);
                            self.too_big(&key, seq, mtu, now);
                        } else {
                            self.unreachable(&key, seq);
                        }
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
                // Who asks whether an address is free has none yet (RFC 4862 section 5.4.2).
                if !can_be_peer && !src.is_unspecified() {
                    sh.stats.martians += 1;
                    return;
                }
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
                            let half =
                                |at| u64::from(be32(ip, at)) << 32 | u64::from(be32(ip, at + 4));
                            let (l, r) = ([half(8), half(16)], [half(24), half(32)]);
                            let key = FlowKey::v6(l, r, be16(tcp, 0), be16(tcp, 2));
                            let seq = SeqNr(be32(tcp, 4));
                            let head = b.chunk();
                            if head[0] == PACKET_TOO_BIG {
                                let mtu = be32(head, 4).min(0xffff) as u16;
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
        if answer && !self.sh.neighbours.asked(addr) {
            return;
        }
        // Only neighbours on the link are worth remembering.
        if self.sh.next_hop(addr) != Some(addr) {
            return;
        }
        for id in self.sh.neighbours.heard(addr, mac, !answer, now) {
            let c = self.conns.get_mut(id.index as usize);
            if let Some(c) = c.filter(|c| c.generation == id.generation) {
                self.sh.owe(id.index, &mut c.hot, 0);
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
        if c.hot.state == TcpState::SynSent && seq == c.hot.snd_una {
            self.sh.stats.attempt_fails += 1;
            self.sh.fail(index, c, Events::UNREACHABLE);
            self.reap(index);
        }
    }
}
