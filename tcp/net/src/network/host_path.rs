//! Frames for the kernel's stack, on a device that both stacks share ([`crate::NetConfig::host`]).
//!
//! Frames of our connections pay nothing for this: they reach their connection before the frame owner
//! is determined. All other frames are ours or the kernel's:
//!
//! | frame | at an address of ours only | at a shared address | at another address, or to a group |
//! |---|---|---|---|
//! | TCP: a port that we listen on or draw from | ours | ours | |
//! | TCP: another port | ours (RST) | the kernel's | the kernel's |
//! | ARP, neighbour discovery | both | both | both |
//! | ICMP error | ours | both | the kernel's |
//! | other ICMP | ours | the kernel's | the kernel's |
//! | fragment of TCP | ours | ours | the kernel's |
//! | UDP to the port mapper | ours | the kernel's | the kernel's |
//! | UDP to the port of RoCEv2 | ours | the kernel's, and ours from the first queue pair of datagrams on | the kernel's, and ours to a group that one of our queue pairs is in |
//! | IGMP, and queries of MLD | | | the kernel's, and both while we are in a group |
//! | other fragment, other protocol | ours (ICMP error) | the kernel's | the kernel's |
//! | neither IP nor ARP | | | the kernel's |
//!
//! Both stacks answer ARP and neighbour solicitations for shared addresses, with the same Ethernet
//! address, so neither depends on the other being up. An ICMP error that quotes a segment of ours means
//! nothing to the kernel, which has no matching connection. Frames for the kernel are kept complete as
//! received, in a short list that the owner of the stack drains after each burst; frames that do not fit
//! are dropped and counted.

use core::net::{IpAddr, Ipv4Addr};

use crate::buffer::RecvBuf;
use crate::config::NetConfig;
use crate::link::groups::{MLD_QUERY, PROTOCOL_IGMP};
use crate::network::Network;
use crate::network::datagrams::udp_to_port;
use crate::wire::bytes::read_u32;
use crate::wire::constants::{PROTOCOL_TCP, ROCE_PORT};
use crate::wire::frame::FrameContent;

/// Types of ICMPv4 errors (RFC 792) and of neighbour discovery (RFC 4861).
const ICMPV4_ERRORS: [u8; 5] = [3, 4, 5, 11, 12];
const NEIGHBOUR_DISCOVERY: core::ops::RangeInclusive<u8> = 133..=137;
/// ICMPv6 messages below this type are errors (RFC 4443 section 2.1).
const FIRST_INFORMATIONAL: u8 = 128;

/// Owner of a frame that carries no segment of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameOwner {
    Ours,
    Host,
    Both,
}

/// Maximum number of frames per burst: two bursts of a port, since frames forwarded by other workers
/// arrive as well.
const FRAMES_MAX: usize = 64;

/// Frames for the kernel's stack, until drained.
pub(super) struct HostFrames<B>(pub Vec<B>);

impl<B: RecvBuf> HostFrames<B> {
    /// Returns an empty list, with memory if the device is shared.
    pub(super) fn new(config: &NetConfig) -> Self {
        let most = config.host.as_ref().map_or(0, |_| FRAMES_MAX);
        HostFrames(Vec::with_capacity(most))
    }

    /// Queues a frame after restoring the `stripped` bytes of headers (0: a reassembled datagram, for
    /// which no frame exists).
    #[cold]
    pub(super) fn hand_over(&mut self, net: &mut Network, mut frame: B, stripped: usize) {
        // A copy of a frame that another worker received: that worker hands it over.
        if net.control_queue.silent {
            return;
        }
        if stripped == 0 || self.0.len() >= FRAMES_MAX || !frame.retreat(stripped) {
            net.stats.host_drops += 1;
            return;
        }
        net.stats.host_frames += 1;
        self.0.push(frame);
    }
}

impl Network {
    /// Determines the owner of a frame that carries no TCP segment. `frame` starts with the content `what`.
    pub(super) fn owner_of_frame<B: RecvBuf>(&self, what: &FrameContent, frame: &B) -> FrameOwner {
        let Some(host) = &self.config.host else {
            return FrameOwner::Ours;
        };
        let bytes = frame.chunk();
        // Owner of a packet to this address; `at_shared` applies if both stacks have the address.
        let by_address = |dst: IpAddr, at_shared: FrameOwner| {
            if host.addresses.contains(&dst) {
                at_shared
            } else if self.is_own_address(dst) {
                FrameOwner::Ours
            } else {
                FrameOwner::Host
            }
        };
        match what {
            FrameContent::Tcp { .. } => FrameOwner::Ours,
            FrameContent::Unclaimed | FrameContent::Rejected { group: true, .. } => {
                FrameOwner::Host
            }
            FrameContent::Group { dst, .. } => self.owner_of_group_packet(*dst, bytes),
            FrameContent::Arp => FrameOwner::Both,
            FrameContent::Icmpv4 { dst, .. } => {
                let is_error = bytes
                    .first()
                    .is_some_and(|kind| ICMPV4_ERRORS.contains(kind));
                by_address((*dst).into(), owner_if_shared(is_error))
            }
            FrameContent::Icmpv6 { dst, .. } => match bytes.first() {
                Some(kind) if NEIGHBOUR_DISCOVERY.contains(kind) => FrameOwner::Both,
                Some(&MLD_QUERY) if self.groups.has_any() => FrameOwner::Both,
                kind => {
                    let is_error = kind.is_some_and(|kind| *kind < FIRST_INFORMATIONAL);
                    by_address((*dst).into(), owner_if_shared(is_error))
                }
            },
            FrameContent::Rejected { dst, .. } => {
                let is_ours = self.takes_roce && udp_to_port(bytes, ROCE_PORT).is_some();
                let at_shared = match is_ours {
                    true => FrameOwner::Ours,
                    false => FrameOwner::Host,
                };
                by_address(*dst, at_shared)
            }
            FrameContent::Fragment { header } => {
                let Some((dst, protocol)) = fragment_target(bytes, *header) else {
                    return FrameOwner::Ours;
                };
                let at_shared = if protocol == PROTOCOL_TCP {
                    FrameOwner::Ours
                } else {
                    FrameOwner::Host
                };
                by_address(dst, at_shared)
            }
        }
    }

    /// Determines the owner of a packet to a group, on a shared device.
    fn owner_of_group_packet(&self, group: IpAddr, packet: &[u8]) -> FrameOwner {
        let is_igmp = group.is_ipv4() && packet.get(9) == Some(&PROTOCOL_IGMP);
        if is_igmp && self.groups.has_any() {
            FrameOwner::Both
        } else if self.groups.has(group) && udp_to_port(packet, ROCE_PORT).is_some() {
            FrameOwner::Ours
        } else {
            FrameOwner::Host
        }
    }
}

/// Determines the owner of an ICMP message to a shared address.
fn owner_if_shared(is_error: bool) -> FrameOwner {
    if is_error {
        FrameOwner::Both
    } else {
        FrameOwner::Host
    }
}

/// Returns the destination of a fragment and the protocol of its datagram. In IPv6 `header` is the
/// offset of the fragment header.
fn fragment_target(packet: &[u8], header: Option<usize>) -> Option<(IpAddr, u8)> {
    match header {
        None => {
            let packet = packet.get(..20)?;
            Some((Ipv4Addr::from(read_u32(packet, 16)).into(), packet[9]))
        }
        Some(at) => {
            let dst: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
            Some((IpAddr::from(dst), *packet.get(at)?))
        }
    }
}
