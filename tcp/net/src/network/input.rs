//! Received frames that carry no TCP segment: ARP, neighbour discovery, ICMP, fragments, datagrams of the
//! port mapper and of RoCEv2, and frames for the kernel's stack.

use core::net::IpAddr;

use crate::buffer::RecvBuf;
use crate::config::NetConfig;
use crate::frame_info::RxChecksum;
use crate::ids::ConnId;
use crate::ip::reassembly::ReassemblyTable;
use crate::link::address_conflicts::AddressConflict;
use crate::link::control_queue::{Icmpv6Outcome, NeighbourClaim, Origin};
use crate::link::groups::MLD_QUERY;
use crate::link::ndp::{self, NEIGHBOUR_ADVERTISEMENT};
use crate::link::neighbours::ClaimOutcome;
use crate::network::Network;
use crate::network::datagrams::{PortMapperEvent, PortMapperInbox};
use crate::network::host_path::{FrameOwner, HostFrames};
use crate::network::quoted_segment::SegmentError;
use crate::network::roce::{RoceDatagram, RoceInbox};
use crate::time::Instant;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::{self, FrameContent, FrameOrigin};
use crate::wire::icmp_error::IcmpError;

/// Length of an ICMP error before the quoted packet (RFC 792, RFC 4443).
const ICMP_HEADER: usize = 8;

/// The part of a received frame that concerns the transport.
pub enum Received<B> {
    /// Nothing: the frame was processed, kept, or dropped and counted.
    Nothing,
    /// A TCP segment that arrived in fragments, with a correct checksum.
    Segment(ReassembledSegment<B>),
    /// An ICMP error about a segment of ours.
    Error(SegmentError),
    /// The claim of a neighbour to have this address.
    Claim(IpAddr, ClaimOutcome),
}

/// A TCP segment from a reassembled datagram.
pub struct ReassembledSegment<B> {
    /// The flow.
    pub key: FlowKey,
    /// A fragment was marked Congestion Experienced (RFC 3168 section 5.3).
    pub ce: bool,
    /// The source of the first fragment.
    pub origin: FrameOrigin,
    /// The segment, possibly in several buffers.
    pub buffer: B,
    /// Another worker received the first fragment, and answers.
    pub is_copy: bool,
}

/// Received frames that the network layer keeps: fragments, and those that its owner takes after each burst.
pub struct NetworkInput<B> {
    fragments: ReassemblyTable<B>,
    host_frames: HostFrames<B>,
    port_mapper: PortMapperInbox,
    pub(super) roce: RoceInbox<B>,
}

impl<B: RecvBuf> NetworkInput<B> {
    /// Returns empty queues for a device with this configuration.
    pub fn new(config: &NetConfig) -> Self {
        NetworkInput {
            fragments: ReassemblyTable::new(),
            host_frames: HostFrames::new(config),
            port_mapper: PortMapperInbox::default(),
            roce: RoceInbox::default(),
        }
    }

    /// Processes a received frame with this content, which is no TCP segment; `frame` begins with the
    /// content.
    #[cold]
    pub fn receive(
        &mut self,
        net: &mut Network,
        now: Instant,
        content: FrameContent,
        frame: B,
        link_origin: FrameOrigin,
    ) -> Received<B> {
        let owner = net.owner_of_frame(&content, &frame);
        let stripped = usize::from(link_origin.stripped);
        if owner == FrameOwner::Host {
            self.host_frames.hand_over(net, frame, stripped);
            return Received::Nothing;
        }
        let src_mac = link_origin.src_mac;
        let origin = |src: IpAddr, dst: IpAddr| Origin { src_mac, src, dst };
        let received = match content {
            FrameContent::Tcp { .. } | FrameContent::Unclaimed => Received::Nothing,
            FrameContent::Group { src, dst } => {
                let ends = origin(src, dst);
                let left = self.on_group_packet(net, now, &ends, frame, stripped);
                if owner == FrameOwner::Both
                    && let Some(frame) = left
                {
                    self.host_frames.hand_over(net, frame, stripped);
                }
                return Received::Nothing;
            }
            FrameContent::Fragment { header } => {
                return self.on_fragment(net, now, header, frame, src_mac);
            }
            FrameContent::Rejected {
                src,
                dst,
                error,
                group,
            } => {
                let dst = if group {
                    net.own_address_of_group(dst)
                } else {
                    Some(dst)
                };
                if let Some(dst) = dst {
                    let ends = origin(src, dst);
                    self.on_rejected_packet(net, now, &ends, error, (frame, stripped), group);
                }
                return Received::Nothing;
            }
            FrameContent::Arp => net.on_arp(now, frame.chunk()),
            FrameContent::Icmpv4 { src, dst } => {
                self.on_icmpv4(net, now, &origin(src.into(), dst.into()), &frame)
            }
            FrameContent::Icmpv6 {
                src,
                dst,
                hop_limit,
            } => self.on_icmpv6(net, now, &origin(src.into(), dst.into()), hop_limit, &frame),
        };
        if owner == FrameOwner::Both {
            self.host_frames.hand_over(net, frame, stripped);
        }
        received
    }

    /// Processes a copy of a frame that another worker received and answers. Every worker of a device
    /// needs its information (neighbours, ICMP errors), see [`crate::Destination::AllWorkers`].
    pub fn receive_copy(
        &mut self,
        net: &mut Network,
        now: Instant,
        mut frame: B,
        checksum: RxChecksum,
    ) -> Received<B> {
        let mut origin = FrameOrigin::default();
        let group_frames = net.stats.group_frames_in;
        let content = frame::classify_frame(
            &net.link_identity(),
            &mut frame,
            checksum,
            &mut origin,
            &mut net.stats,
        );
        // The other worker has counted it.
        net.stats.group_frames_in = group_frames;
        let Some(content) = content else {
            return Received::Nothing;
        };
        net.set_silent(true);
        let received = self.receive(net, now, content, frame, origin);
        net.set_silent(false);
        received
    }

    /// Queues the frame of a TCP segment that belongs to the kernel, after restoring the `stripped` bytes of
    /// headers; 0: a reassembled datagram, which is no longer a frame.
    #[cold]
    pub fn hand_over(&mut self, net: &mut Network, frame: B, stripped: usize) {
        self.host_frames.hand_over(net, frame, stripped);
    }

    /// Processes a fragment, and the datagram that it completes.
    fn on_fragment(
        &mut self,
        net: &mut Network,
        now: Instant,
        header: Option<usize>,
        frame: B,
        src_mac: [u8; 6],
    ) -> Received<B> {
        let complete = self.fragments.receive(net, now, header, frame, src_mac);
        let Some(datagram) = complete else {
            return Received::Nothing;
        };
        let origin = FrameOrigin {
            src_mac: datagram.src_mac,
            stripped: 0,
        };
        let (buffer, is_copy) = (datagram.buffer, datagram.is_copy);
        match datagram.content {
            FrameContent::Tcp { key, ce } => {
                let steering = net.config.steering.as_ref();
                let is_ours = steering.is_none_or(|home| home.owns(key.local(), key.remote()));
                if !is_ours
                    || frame::verify_segment_checksum(&key, &buffer, &mut net.stats).is_none()
                {
                    return Received::Nothing;
                }
                Received::Segment(ReassembledSegment {
                    key,
                    ce,
                    origin,
                    buffer,
                    is_copy,
                })
            }
            // RFC 6980 section 5: neighbour discovery in fragments must be ignored.
            FrameContent::Icmpv6 { .. } if ndp::is_neighbour_discovery(buffer.chunk()) => {
                net.stats.martians += 1;
                Received::Nothing
            }
            content => {
                let before = net.set_silent(is_copy);
                let received = self.receive(net, now, content, buffer, origin);
                net.set_silent(before);
                received
            }
        }
    }

    /// Processes a packet to `ends.dst` that no protocol here accepts, unless it is a datagram that the owner
    /// takes: answers it with an ICMP error. `stripped`: bytes of Ethernet's header before the packet.
    fn on_rejected_packet(
        &mut self,
        net: &mut Network,
        now: Instant,
        ends: &Origin,
        error: IcmpError,
        (packet, stripped): (B, usize),
        group: bool,
    ) {
        if self.port_mapper.take_datagram(net, ends, packet.chunk()) {
            return;
        }
        let packet = match group {
            false => self.roce.take_datagram(net, ends, packet, stripped),
            true => Err(packet),
        };
        if let Err(packet) = packet {
            net.reject_packet(now, ends, error, packet.chunk());
        }
    }

    fn on_icmpv4(
        &mut self,
        net: &mut Network,
        now: Instant,
        origin: &Origin,
        message: &B,
    ) -> Received<B> {
        if !net.is_own_address(origin.dst) || !net.can_be_peer(origin.src, origin.src_mac) {
            net.stats.martians += 1;
            return Received::Nothing;
        }
        let is_error = net
            .control_queue
            .receive_icmpv4(now, origin, message, &mut net.stats);
        let head = message.chunk();
        if !is_error {
            return Received::Nothing;
        }
        let packet = head.get(ICMP_HEADER..).unwrap_or(&[]);
        self.on_error(net, SegmentError::parse_v4(head, packet), head, packet)
    }

    fn on_icmpv6(
        &mut self,
        net: &mut Network,
        now: Instant,
        origin: &Origin,
        hop_limit: u8,
        message: &B,
    ) -> Received<B> {
        // A node that checks whether its address is unique has none yet (RFC 4862 section 5.4.2). One
        // that has an address of ours advertises it from there.
        let advertises_ours = net.is_own_address(origin.src)
            && message.chunk().first() == Some(&NEIGHBOUR_ADVERTISEMENT);
        if !net.can_be_peer(origin.src, origin.src_mac)
            && !origin.src.is_unspecified()
            && !advertises_ours
        {
            net.stats.martians += 1;
            return Received::Nothing;
        }
        // Queries are from the link, by their hop limit (RFC 2710 section 5).
        if let [MLD_QUERY, ..] = message.chunk()
            && hop_limit == 1
            && let Some(asked) = message.chunk().get(8..24)
            && let Ok(asked) = <[u8; 16]>::try_from(asked)
        {
            let (groups, mut reporter) = net.groups();
            groups.on_query(now, IpAddr::from(asked), &mut reporter);
            return Received::Nothing;
        }
        let addresses = &net.config.addresses;
        let is_own = |address: IpAddr| addresses.iter().any(|cidr| cidr.addr == address);
        let outcome = net.control_queue.receive_icmpv6(
            now,
            origin,
            hop_limit,
            message,
            is_own,
            &mut net.stats,
        );
        match outcome {
            Icmpv6Outcome::Done => Received::Nothing,
            Icmpv6Outcome::Claim(claim) => net.on_neighbour_claim(now, claim),
            Icmpv6Outcome::Error => {
                let head = message.chunk();
                let packet = head.get(ICMP_HEADER..).unwrap_or(&[]);
                self.on_error(net, SegmentError::parse_v6(head, packet), head, packet)
            }
        }
    }

    /// Processes an ICMP error: about a segment of ours, or else perhaps about a datagram to a port mapper.
    fn on_error(
        &mut self,
        net: &mut Network,
        error: Option<SegmentError>,
        head: &[u8],
        packet: &[u8],
    ) -> Received<B> {
        let Some(error) = error else {
            self.port_mapper.take_error(net, head, packet);
            return Received::Nothing;
        };
        net.stats.icmp_errors_in += 1;
        Received::Error(error)
    }

    /// Returns whether [`poll`](Self::poll) has a timer to serve.
    #[inline]
    pub fn is_due(&self, net: &Network, now: Instant) -> bool {
        net.is_due(now) || self.fragments.is_due(now)
    }

    /// Serves the timers. Returns the connections whose neighbour did not answer.
    #[inline]
    pub fn poll(&mut self, net: &mut Network, now: Instant) -> Vec<ConnId> {
        if self.fragments.is_due(now) {
            self.fragments.give_up(net, now);
        }
        net.poll(now)
    }

    /// Returns the earliest time at which a timer is due.
    pub fn next_deadline(&self, net: &Network) -> Option<Instant> {
        let all = [net.next_deadline(), self.fragments.next_deadline()];
        all.into_iter().flatten().min()
    }

    /// Returns whether frames for the kernel are queued.
    #[inline]
    pub fn has_host_frames(&self) -> bool {
        !self.host_frames.0.is_empty()
    }

    /// Drains the frames for the kernel, as received except for Ethernet padding. Must be called after
    /// each burst, since the list is short.
    pub fn take_host_frames(&mut self) -> impl Iterator<Item = B> {
        self.host_frames.0.drain(..)
    }

    /// Number of received buffers in incomplete datagrams, at most
    /// [`max_fragments`](crate::ReassemblyConfig::max_fragments).
    pub fn held_fragments(&self) -> usize {
        self.fragments.held_buffers()
    }

    /// Returns whether messages for the port mapper wait.
    #[inline]
    pub fn has_port_mapper_events(&self) -> bool {
        !self.port_mapper.0.is_empty()
    }

    /// Takes the next message for the port mapper.
    pub fn next_port_mapper_event(&mut self) -> Option<PortMapperEvent> {
        self.port_mapper.0.pop_front()
    }

    /// Returns whether datagrams of RoCEv2 wait.
    #[inline]
    pub fn has_roce_datagrams(&self) -> bool {
        !self.roce.0.is_empty()
    }

    /// Takes the next datagram of RoCEv2.
    #[inline]
    pub fn next_roce_datagram(&mut self) -> Option<RoceDatagram<B>> {
        self.roce.0.pop_front()
    }
}

impl Network {
    /// Answers a packet to one of our addresses that no protocol here accepts with an ICMP error.
    fn reject_packet(&mut self, now: Instant, origin: &Origin, error: IcmpError, packet: &[u8]) {
        if !self.is_own_address(origin.dst) {
            return;
        }
        if !self.can_be_peer(origin.src, origin.src_mac) {
            self.stats.martians += 1;
            return;
        }
        self.control_queue
            .icmp_error(now, origin, error, packet, &mut self.stats);
    }

    fn on_arp<B>(&mut self, now: Instant, packet: &[u8]) -> Received<B> {
        let addresses = &self.config.addresses;
        let is_own = |address: IpAddr| addresses.iter().any(|cidr| cidr.addr == address);
        let claim = self
            .control_queue
            .receive_arp(packet, is_own, &mut self.stats);
        match claim {
            Some(claim) => self.on_neighbour_claim(now, claim),
            None => Received::Nothing,
        }
    }

    /// Processes the claim of a host to have an address.
    fn on_neighbour_claim<B>(&mut self, now: Instant, claim: NeighbourClaim) -> Received<B> {
        match claim {
            // Only neighbours on the link are cached.
            NeighbourClaim::Neighbour(address, mac, kind)
                if self.next_hop(address) == Some(address) =>
            {
                let outcome = self.neighbours.process_claim(address, mac, kind, now);
                Received::Claim(address, outcome)
            }
            NeighbourClaim::Neighbour(..) => Received::Nothing,
            NeighbourClaim::OurAddress(address, mac) => {
                self.on_address_conflict(now, AddressConflict { address, mac });
                Received::Nothing
            }
        }
    }
}
