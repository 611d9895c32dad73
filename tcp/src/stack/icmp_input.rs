//! What comes beside TCP: ARP, NDP and ICMP, and what ICMP errors do to connections.

use core::net::IpAddr;

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::base::time::to_ticks;
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
    pub(crate) fn on_other_frame(
        &mut self,
        now: Instant,
        what: FrameContent,
        b: B,
        src_mac: [u8; 6],
    ) {
        let sh = &mut self.shared;
        let addrs = &sh.config.addresses;
        let own = |a: IpAddr| addrs.iter().any(|conn| conn.addr == a);
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
                let dst = if group {
                    sh.own_address_of_group(dst)
                } else {
                    Some(dst)
                };
                let Some(dst) = dst.filter(|d| own(*d)) else {
                    return;
                };
                if can_be_peer {
                    let origin = Origin { src_mac, src, dst };
                    let stats = &mut sh.stats;
                    sh.control_queue
                        .icmp_error(now, &origin, error, b.chunk(), stats);
                } else {
                    sh.stats.martians += 1;
                }
            }
            FrameContent::Arp => {
                let claim = sh.control_queue.receive_arp(b.chunk(), own, &mut sh.stats);
                if let Some((addr, mac, reply)) = claim {
                    self.on_neighbour_heard(now, addr, mac, reply);
                }
            }
            FrameContent::Icmpv4 { src, dst } => {
                let origin = Origin {
                    src_mac,
                    src: src.into(),
                    dst: dst.into(),
                };
                if !own(origin.dst) || !can_be_peer {
                    sh.stats.martians += 1;
                } else if sh
                    .control_queue
                    .receive_icmpv4(now, &origin, &b, &mut sh.stats)
                {
                    let quoted = b.chunk().get(8..).unwrap_or(&[]);
                    let header = quoted.first().map_or(0, |v| usize::from(v & 15) * 4);
                    if let (Some(ip), Some(tcp)) =
                        (quoted.get(..20), quoted.get(header..header + 8))
                        && header >= 20
                        && ip[9] == 6
                    {
                        let (local, remote) = (read_u32(ip, 12), read_u32(ip, 16));
                        let key = FlowKey::v4(local, remote, read_u16(tcp, 0), read_u16(tcp, 2));
                        let seq = SeqNr(read_u32(tcp, 4));
                        let head = b.chunk();
                        if head[..2] == FRAGMENTATION_NEEDED {
                            let total = read_u16(ip, 2);
                            let mtu = path_mtu::from_v4(read_u16(head, 6), total);
                            self.on_packet_too_big(&key, seq, mtu, now);
                        } else {
                            self.on_unreachable(&key, seq);
                        }
                    }
                }
            }
            FrameContent::Icmpv6 {
                src,
                dst,
                hop_limit,
            } => {
                let origin = Origin {
                    src_mac,
                    src: src.into(),
                    dst: dst.into(),
                };
                // Who asks whether an address is free has none yet (RFC 4862 section 5.4.2).
                if !can_be_peer && !src.is_unspecified() {
                    sh.stats.martians += 1;
                    return;
                }
                match sh.control_queue.receive_icmpv6(
                    now,
                    &origin,
                    hop_limit,
                    &b,
                    own,
                    &mut sh.stats,
                ) {
                    Icmpv6Outcome::Done => {}
                    Icmpv6Outcome::Claim(addr, mac, answer) => {
                        self.on_neighbour_heard(now, addr, mac, answer)
                    }
                    Icmpv6Outcome::Error => {
                        let quoted = b.chunk().get(8..).unwrap_or(&[]);
                        if let (Some(ip), Some(tcp)) = (quoted.get(..40), quoted.get(40..48))
                            && ip[6] == 6
                        {
                            let half = |at| {
                                u64::from(read_u32(ip, at)) << 32 | u64::from(read_u32(ip, at + 4))
                            };
                            let (local, remote) = ([half(8), half(16)], [half(24), half(32)]);
                            let key =
                                FlowKey::v6(local, remote, read_u16(tcp, 0), read_u16(tcp, 2));
                            let seq = SeqNr(read_u32(tcp, 4));
                            let head = b.chunk();
                            if head[0] == PACKET_TOO_BIG {
                                let mtu = read_u32(head, 4).min(0xffff) as u16;
                                self.on_packet_too_big(&key, seq, mtu, now);
                            } else {
                                self.on_unreachable(&key, seq);
                            }
                        }
                    }
                }
            }
        }
    }

    /// A neighbour said where it is. Claims that nobody asked for change nothing.
    fn on_neighbour_heard(&mut self, now: Instant, addr: IpAddr, mac: [u8; 6], answer: bool) {
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
            let conn = self.connections.get_mut(id.index as usize);
            if let Some(conn) = conn.filter(|conn| conn.generation == id.generation) {
                self.shared
                    .schedule_output(id.index, &mut conn.tcb, ConnectionFlags::NONE);
            }
        }
    }

    /// ICMP errors end only connections that are being opened (RFC 5927 section 5.2), and only
    /// when they quote our SYN.
    fn on_unreachable(&mut self, key: &FlowKey, seq: SeqNr) {
        self.shared.stats.icmp_errors_in += 1;
        let hash = key.hash::<1, 3>(self.shared.hash_key);
        let Some(index) = self
            .shared
            .flow_table
            .find(hash, |i| self.connections[i as usize].template.carries(key))
        else {
            return;
        };
        let conn = &mut self.connections[index as usize];
        if conn.tcb.state == TcpState::SynSent && seq == conn.tcb.snd_una {
            self.shared.stats.attempt_fails += 1;
            conn.fail_connection(&mut self.shared.context_of(index), Events::UNREACHABLE);
            self.free_if_done(index);
        }
    }
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// A router says that what `key` sent at `seq` was too big. Believed when that is in flight
    /// (RFC 5927 section 4.1), was longer, and the size is not absurd (RFC 8899 section 4.6.1).
    pub(crate) fn on_packet_too_big(&mut self, key: &FlowKey, seq: SeqNr, mtu: u16, now: Instant) {
        self.shared.stats.icmp_errors_in += 1;
        let hash = key.hash::<1, 3>(self.shared.hash_key);
        let conns = &self.connections;
        let found = self
            .shared
            .flow_table
            .find(hash, |i| conns[i as usize].template.carries(key));
        let Some(index) = found else { return };
        let conn = &mut self.connections[index as usize];
        let tcb = &conn.tcb;
        let min = if key.is_v6() { MIN_V6 } else { MIN_V4 };
        if tcb.state == TcpState::SynSent || seq.lt(tcb.snd_una) || seq.ge(tcb.snd_nxt) || mtu < min
        {
            return;
        }
        let emss = conn.emss_for(mtu);
        let Some(segment) = conn.send_queue.sent.get(conn.send_queue.first_after(seq)) else {
            return;
        };
        // Of several that left together, each is as long as their EMSS was.
        let len = if segment.mss == 0 {
            segment.len
        } else {
            u32::from(segment.mss)
        };
        if len <= u32::from(emss) {
            return;
        }
        let now_ticks = to_ticks(now.0);
        let to = key.remote().ip();
        let probe = segment.is_probe(u32::from(conn.tcb.emss));
        if emss < conn.tcb.emss {
            self.shared.stats.pmtu_reductions += 1;
            self.shared
                .paths
                .learn(to, PathSearch::from_router_mtu(mtu, now_ticks), now_ticks);
            conn.narrow(&mut self.shared.context_of(index), emss);
        } else if probe {
            // The probe's answer (section 4.6.2): what is in use stays, the search goes on below.
            if let Some(path) = self.shared.paths.known(to)
                && path.probe_of(conn.id(index)).is_some()
            {
                path.limited_by_router(mtu, now_ticks);
                conn.search_at = now_ticks;
            }
            conn.send_cut(&mut self.shared.context_of(index));
        }
    }
}
