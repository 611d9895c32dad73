//! Packets to the IP multicast groups of which queue pairs of datagrams are members.

use core::net::IpAddr;

use crate::buffer::RecvBuf;
use crate::link::control_queue::Origin;
use crate::link::groups::{Groups, Membership, PROTOCOL_IGMP, Reporter};
use crate::network::Network;
use crate::network::input::NetworkInput;
use crate::time::Instant;

impl Network {
    /// The groups, and the way of their messages.
    pub(super) fn groups(&mut self) -> (&mut Groups, Reporter<'_>) {
        let reporter = Reporter {
            queue: &mut self.control_queue,
            addresses: &self.config.addresses,
            stats: &mut self.stats,
        };
        (&mut self.groups, reporter)
    }

    /// Receives datagrams of RoCEv2 to a group from now on. `reports`: this worker tells routers and
    /// switches.
    pub fn join_group(&mut self, now: Instant, group: IpAddr, reports: bool) {
        let (groups, mut reporter) = self.groups();
        groups.join(group);
        if reports {
            groups.report(now, group, &mut reporter);
        }
    }

    /// Ends what [`Self::join_group`] began.
    pub fn leave_group(&mut self, group: IpAddr, reports: bool) {
        let (groups, mut reporter) = self.groups();
        groups.leave(group);
        if reports {
            reporter.send(group, Membership::Leave);
        }
    }

    /// Returns whether datagrams to the group are received.
    #[inline]
    pub fn is_in_group(&self, group: IpAddr) -> bool {
        self.groups.has(group)
    }
}

impl<B: RecvBuf> NetworkInput<B> {
    /// Processes a packet to a group; `frame` begins with the IP header. Returns it unless it was taken.
    pub(super) fn on_group_packet(
        &mut self,
        net: &mut Network,
        now: Instant,
        ends: &Origin,
        frame: B,
        stripped: usize,
    ) -> Option<B> {
        let packet = frame.chunk();
        let is_igmp = ends.dst.is_ipv4() && packet.get(9) == Some(&PROTOCOL_IGMP);
        if is_igmp {
            let header = packet
                .first()
                .map_or(0, |first| usize::from(first & 15) * 4);
            let message = packet.get(header..).unwrap_or(&[]);
            let (groups, mut reporter) = net.groups();
            groups.on_igmp(now, message, &mut reporter);
        } else if net.groups.has(ends.dst) {
            // Other packets to the group concern nothing here.
            return self.roce.take_datagram(net, ends, frame, stripped).err();
        }
        Some(frame)
    }
}
