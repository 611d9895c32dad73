//! Received frames other than TCP: ARP, NDP and ICMP, and the effect of ICMP errors on connections.

use core::net::IpAddr;

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::connection::side_table::SideFlags;
use crate::link::address_conflicts::AddressConflict;
use crate::link::control_queue::{Icmpv6Outcome, NeighbourClaim, Origin};
use crate::link::groups::MLD_QUERY;
use crate::link::ndp::{self, NEIGHBOUR_ADVERTISEMENT};
use crate::link::neighbours::{ClaimKind, ClaimOutcome};
use crate::path_mtu::{self, MIN_V4, MIN_V6};
use crate::stack::Stack;
use crate::stack::host_path::FrameOwner;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::bytes::{read_u16, read_u32};
use crate::wire::constants::PROTOCOL_TCP;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::{FrameContent, FrameOrigin};
use crate::wire::icmp_error::{IcmpError, is_soft_error_v4, is_soft_error_v6};

/// ICMPv4 type and code (RFC 1191 section 4), and ICMPv6 type (RFC 4443 section 3.2).
const FRAGMENTATION_NEEDED: [u8; 2] = [3, 4];
const PACKET_TOO_BIG: u8 = 2;

/// Length of an ICMP error before the quoted packet (RFC 792, RFC 4443).
const ICMP_HEADER: usize = 8;

/// Our TCP segment that an ICMP error quotes.
struct QuotedSegment {
    key: FlowKey,
    seq: SeqNr,
    /// Total length in the quoted IP header (IPv4 only, else 0).
    packet_len: u16,
}

impl QuotedSegment {
    /// `quoted`: an IPv4 header and at least the next eight bytes (RFC 792).
    fn parse_v4(quoted: &[u8]) -> Option<QuotedSegment> {
        let ip = quoted.get(..20)?;
        let header_len = usize::from(ip[0] & 15) * 4;
        let tcp = quoted.get(header_len..header_len + 8)?;
        if header_len < 20 || ip[9] != PROTOCOL_TCP {
            return None;
        }
        let (local, remote) = (read_u32(ip, 12), read_u32(ip, 16));
        Some(QuotedSegment {
            key: FlowKey::v4(local, remote, read_u16(tcp, 0), read_u16(tcp, 2)),
            seq: SeqNr(read_u32(tcp, 4)),
            packet_len: read_u16(ip, 2),
        })
    }

    /// `quoted`: an IPv6 header directly followed by TCP, as we send it.
    fn parse_v6(quoted: &[u8]) -> Option<QuotedSegment> {
        let (ip, tcp) = (quoted.get(..40)?, quoted.get(40..48)?);
        if ip[6] != PROTOCOL_TCP {
            return None;
        }
        let half = |at| u64::from(read_u32(ip, at)) << 32 | u64::from(read_u32(ip, at + 4));
        let (local, remote) = ([half(8), half(16)], [half(24), half(32)]);
        Some(QuotedSegment {
            key: FlowKey::v6(local, remote, read_u16(tcp, 0), read_u16(tcp, 2)),
            seq: SeqNr(read_u32(tcp, 4)),
            packet_len: 0,
        })
    }
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// Processes a received frame that carries no TCP segment: ARP, neighbour discovery, ICMP, a
    /// fragment, or a packet that is rejected with an ICMP error.
    #[cold]
    pub(crate) fn on_other_frame(
        &mut self,
        now: Instant,
        what: FrameContent,
        frame: B,
        link_origin: FrameOrigin,
    ) {
        let owner = self.shared.owner_of_frame(&what, &frame);
        let stripped = usize::from(link_origin.stripped);
        if owner == FrameOwner::Host {
            return self
                .host_frames
                .hand_over(&mut self.shared, frame, stripped);
        }
        let src_mac = link_origin.src_mac;
        let origin = |src: IpAddr, dst: IpAddr| Origin { src_mac, src, dst };
        match what {
            FrameContent::Tcp { .. } | FrameContent::Unclaimed => {}
            FrameContent::Group { src, dst } => {
                return self.on_group_packet(now, &origin(src, dst), frame, stripped);
            }
            FrameContent::Fragment { header } => {
                return self.on_fragment(now, header, frame, src_mac);
            }
            FrameContent::Rejected {
                src,
                dst,
                error,
                group,
            } => {
                let dst = if group {
                    self.shared.own_address_of_group(dst)
                } else {
                    Some(dst)
                };
                let Some(dst) = dst else { return };
                let (shared, ends) = (&mut self.shared, origin(src, dst));
                if self.port_mapper.take_datagram(shared, &ends, frame.chunk()) {
                    return;
                }
                let frame = match group {
                    false => self.roce.take_datagram(shared, &ends, frame, stripped),
                    true => Err(frame),
                };
                if let Err(frame) = frame {
                    self.reject_packet(now, &ends, error, frame.chunk());
                }
                return;
            }
            FrameContent::Arp => self.on_arp(now, frame.chunk()),
            FrameContent::Icmpv4 { src, dst } => {
                self.on_icmpv4(now, &origin(src.into(), dst.into()), &frame)
            }
            FrameContent::Icmpv6 {
                src,
                dst,
                hop_limit,
            } => self.on_icmpv6(now, &origin(src.into(), dst.into()), hop_limit, &frame),
        }
        if owner == FrameOwner::Both {
            self.host_frames
                .hand_over(&mut self.shared, frame, stripped);
        }
    }

    /// Processes a fragment, and the datagram that it completes.
    fn on_fragment(&mut self, now: Instant, header: Option<usize>, frame: B, src_mac: [u8; 6]) {
        let complete = self
            .fragments
            .receive(&mut self.shared, header, frame, src_mac);
        let Some(datagram) = complete else { return };
        let origin = FrameOrigin {
            src_mac: datagram.src_mac,
            stripped: 0,
        };
        let buffer = datagram.buffer;
        let silent = &mut self.shared.control_queue.silent;
        let before = core::mem::replace(silent, datagram.is_copy);
        match datagram.content {
            FrameContent::Tcp { key, ce } => {
                self.on_reassembled_segment(&key, ce, buffer, origin);
            }
            // RFC 6980 section 5: neighbour discovery in fragments must be ignored.
            FrameContent::Icmpv6 { .. } if ndp::is_neighbour_discovery(buffer.chunk()) => {
                self.shared.stats.martians += 1;
            }
            content => self.on_other_frame(now, content, buffer, origin),
        }
        self.shared.control_queue.silent = before;
    }

    /// Answers a packet to one of our addresses that no protocol here accepts with an ICMP error.
    fn reject_packet(&mut self, now: Instant, origin: &Origin, error: IcmpError, packet: &[u8]) {
        let sh = &mut self.shared;
        if !sh.is_own_address(origin.dst) {
            return;
        }
        if !sh.can_be_peer(origin.src, origin.src_mac) {
            sh.stats.martians += 1;
            return;
        }
        sh.control_queue
            .icmp_error(now, origin, error, packet, &mut sh.stats);
    }

    fn on_arp(&mut self, now: Instant, packet: &[u8]) {
        let sh = &mut self.shared;
        let addresses = &sh.config.addresses;
        let is_own = |address: IpAddr| addresses.iter().any(|cidr| cidr.addr == address);
        let claim = sh.control_queue.receive_arp(packet, is_own, &mut sh.stats);
        if let Some(claim) = claim {
            self.on_neighbour_claim(now, claim);
        }
    }

    fn on_neighbour_claim(&mut self, now: Instant, claim: NeighbourClaim) {
        match claim {
            NeighbourClaim::Neighbour(address, mac, kind) => {
                self.on_neighbour_heard(now, address, mac, kind)
            }
            NeighbourClaim::OurAddress(address, mac) => {
                let conflict = AddressConflict { address, mac };
                self.shared.on_address_conflict(now, conflict);
            }
        }
    }

    fn on_icmpv4(&mut self, now: Instant, origin: &Origin, message: &B) {
        let sh = &mut self.shared;
        if !sh.is_own_address(origin.dst) || !sh.can_be_peer(origin.src, origin.src_mac) {
            sh.stats.martians += 1;
            return;
        }
        let is_error = sh
            .control_queue
            .receive_icmpv4(now, origin, message, &mut sh.stats);
        let head = message.chunk();
        if !is_error {
            return;
        }
        let packet = head.get(ICMP_HEADER..).unwrap_or(&[]);
        let Some(quoted) = QuotedSegment::parse_v4(packet) else {
            self.port_mapper.take_error(&mut self.shared, head, packet);
            return;
        };
        if head[..2] == FRAGMENTATION_NEEDED {
            let mtu = path_mtu::from_v4(read_u16(head, 6), quoted.packet_len);
            self.on_packet_too_big(&quoted.key, quoted.seq, mtu, now);
        } else {
            let soft = is_soft_error_v4(head[0], head[1]);
            self.on_unreachable(&quoted.key, quoted.seq, soft);
        }
    }

    fn on_icmpv6(&mut self, now: Instant, origin: &Origin, hop_limit: u8, message: &B) {
        let sh = &mut self.shared;
        // A node that checks whether its address is unique has none yet (RFC 4862 section 5.4.2). One
        // that has an address of ours advertises it from there.
        let advertises_ours = sh.is_own_address(origin.src)
            && message.chunk().first() == Some(&NEIGHBOUR_ADVERTISEMENT);
        if !sh.can_be_peer(origin.src, origin.src_mac)
            && !origin.src.is_unspecified()
            && !advertises_ours
        {
            sh.stats.martians += 1;
            return;
        }
        // Queries are from the link, by their hop limit (RFC 2710 section 5).
        if let [MLD_QUERY, ..] = message.chunk()
            && hop_limit == 1
            && let Some(asked) = message.chunk().get(8..24)
            && let Ok(asked) = <[u8; 16]>::try_from(asked)
        {
            let (groups, mut reporter) = sh.groups();
            return groups.on_query(now, IpAddr::from(asked), &mut reporter);
        }
        let addresses = &sh.config.addresses;
        let is_own = |address: IpAddr| addresses.iter().any(|cidr| cidr.addr == address);
        let outcome =
            sh.control_queue
                .receive_icmpv6(now, origin, hop_limit, message, is_own, &mut sh.stats);
        match outcome {
            Icmpv6Outcome::Done => {}
            Icmpv6Outcome::Claim(claim) => self.on_neighbour_claim(now, claim),
            Icmpv6Outcome::Error => {
                let head = message.chunk();
                let packet = head.get(ICMP_HEADER..).unwrap_or(&[]);
                let Some(quoted) = QuotedSegment::parse_v6(packet) else {
                    self.port_mapper.take_error(&mut self.shared, head, packet);
                    return;
                };
                if head[0] == PACKET_TOO_BIG {
                    let mtu = read_u32(head, 4).min(0xffff) as u16;
                    self.on_packet_too_big(&quoted.key, quoted.seq, mtu, now);
                } else {
                    let soft = is_soft_error_v6(head[0], head[1]);
                    self.on_unreachable(&quoted.key, quoted.seq, soft);
                }
            }
        }
    }

    /// Processes the claim of a neighbour to have a link-layer address.
    fn on_neighbour_heard(&mut self, now: Instant, addr: IpAddr, mac: [u8; 6], kind: ClaimKind) {
        // Only neighbours on the link are cached.
        if self.shared.next_hop(addr) != Some(addr) {
            return;
        }
        let outcome = self.shared.neighbours.process_claim(addr, mac, kind, now);
        self.apply_claim_outcome(addr, outcome);
    }

    /// Schedules the output of connections that waited for the neighbour, and of those whose data it
    /// did not answer, if the path through it is new.
    pub(crate) fn apply_claim_outcome(&mut self, neighbour: IpAddr, outcome: ClaimOutcome) {
        for id in outcome.waiters {
            if let Some(conn) = self.slots.current(id) {
                self.shared
                    .schedule_output(id.index, &mut conn.tcb, ConnectionFlags::NONE);
            }
        }
        if outcome.is_path_new {
            self.shared.stalled.release_behind(Some(neighbour));
        }
    }

    /// Processes an ICMP error other than "too big" that quotes a segment of ours. It ends a connection
    /// only during an active open (RFC 5927 section 5.2) and only if it quotes our SYN. A `soft` error
    /// does not end it, but is reported as the reason if the open fails (RFC 9293 section 3.9.2.2,
    /// MUST-56).
    fn on_unreachable(&mut self, key: &FlowKey, seq: SeqNr, soft: bool) {
        self.shared.stats.icmp_errors_in += 1;
        let hash = self.shared.table_hasher.hash(key);
        let Some(index) = self.slots.find(&self.shared, key, hash) else {
            return;
        };
        let conn = &mut self.slots[index];
        if conn.tcb.state != TcpState::SynSent || seq != conn.sender.snd.una {
            return;
        }
        if soft {
            let fields = self.shared.side_table.fields_of(index);
            fields.flags.set(SideFlags::SOFT_ERROR, true);
        } else {
            self.shared.stats.attempt_fails += 1;
            conn.fail_connection(
                &mut self.shared.context_of(conn.id(index)),
                Events::UNREACHABLE,
            );
            self.slots.free_if_done(&mut self.shared, index);
        }
    }

    /// Processes the report of a router that the segment of `key` at `seq` exceeded `mtu`. The report is
    /// accepted if the segment is in flight (RFC 5927 section 4.1) and was longer than `mtu` allows, and
    /// if `mtu` is plausible (RFC 8899 section 4.6.1).
    pub(crate) fn on_packet_too_big(&mut self, key: &FlowKey, seq: SeqNr, mtu: u16, now: Instant) {
        self.shared.stats.icmp_errors_in += 1;
        let hash = self.shared.table_hasher.hash(key);
        let found = self.slots.find(&self.shared, key, hash);
        let Some(index) = found else { return };
        let conn = &mut self.slots[index];
        let snd = &conn.sender.snd;
        let min = if key.is_v6() { MIN_V6 } else { MIN_V4 };
        let is_in_flight = seq.ge(snd.una) && seq.lt(snd.nxt);
        if conn.tcb.state == TcpState::SynSent || !is_in_flight || mtu < min {
            return;
        }
        let emss = conn.path.emss_for(&conn.tcb, mtu);
        let Some(segment) = conn
            .sender
            .send_buffer
            .sent
            .get(conn.sender.send_buffer.first_after(seq))
        else {
            return;
        };
        // Segments sent as one super-segment each have the EMSS of that time.
        let len = if segment.mss == 0 {
            segment.len
        } else {
            u32::from(segment.mss)
        };
        if len <= u32::from(emss) {
            return;
        }
        if emss < conn.tcb.emss {
            self.shared.stats.pmtu_reductions += 1;
            self.shared.paths.learn(key.remote().ip(), mtu, now);
            let cx = &mut self.shared.context_of(conn.id(index));
            conn.narrow_path(cx, emss);
        }
    }
}
