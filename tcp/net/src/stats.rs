//! Counters of the network layer, with the names of IP-MIB (RFC 4293) and Linux's nstat where these have
//! one. Damaged frames of all protocols are counted together, under the names of TCP-MIB.

use crate::counters;

impl NetStats {
    /// Counts a packet with a wrong checksum. `field`: its checksum; `pseudo`: the sum of its
    /// pseudo-header, which the kernel writes there if an interface is to compute the checksum.
    #[cold]
    pub fn count_wrong_checksum(&mut self, field: u16, pseudo: u16) {
        if field == pseudo {
            self.offloaded_checksums += 1;
        } else {
            self.csum_errors += 1;
        }
    }

    /// Returns the number of packets that were dropped because of offloads of their sender.
    #[inline]
    pub fn offload_drops(&self) -> u64 {
        self.offloaded_checksums + self.offloaded_segments
    }
}

counters! {
    /// Counters of one device's network layer in one worker, since its start.
    NetStats;
    drops: [
        "TcpInCsumErrors",
        "SiwOffloadedChecksums",
        "SiwOffloadedSegments",
        "TcpInErrs",
        "IpReasmFails",
        "IpReasmTimeout",
        "SiwSourceRouted",
        "IpInAddrErrors",
        "SiwOtherAddress",
        "IpInHdrErrors",
        "IpInUnknownProtos",
        "ArpTableFull",
        "SiwControlDrops",
        "SiwHostDrops",
    ];
    /// Frames handed to `receive_burst`.
    frames_in = "SiwFramesIn",
    /// Frames that the sink accepted.
    frames_out = "SiwFramesOut",
    /// Broadcast and multicast frames received.
    group_frames_in = "SiwGroupFramesIn",
    /// Broadcast and multicast frames sent.
    group_frames_out = "SiwGroupFramesOut",
    /// Packets with a wrong checksum.
    csum_errors = "TcpInCsumErrors",
    /// Packets whose checksum the sender left to an offload that did not happen: `ethtool -K` with
    /// `tx off` for the interface of the sender.
    offloaded_checksums = "SiwOffloadedChecksums",
    /// Packets merged by GRO, or not cut by TSO, that do not fit into a frame of the port: `ethtool -K`
    /// with `tso off gso off gro off`.
    offloaded_segments = "SiwOffloadedSegments",
    /// Frames with malformed headers.
    in_errs = "TcpInErrs",
    /// Fragments of IPv4 and IPv6 received.
    reassembly_required = "IpReasmReqds",
    /// Datagrams reassembled.
    reassembly_oks = "IpReasmOKs",
    /// Fragments and datagrams that could not be reassembled.
    reassembly_fails = "IpReasmFails",
    /// Datagrams whose fragments did not all arrive in time.
    reassembly_timeouts = "IpReasmTimeout",
    /// Messages of other hosts that claim one of our addresses (RFC 5227, RFC 4862).
    address_conflicts = "SiwAddressConflicts",
    /// IPv4 packets dropped because they have a source route.
    source_routed = "SiwSourceRouted",
    /// Packets with impossible addresses (martians).
    martians = "IpInAddrErrors",
    /// Frames for other devices or VLANs, or of other protocols.
    not_for_us = "SiwOtherAddress",
    /// IPv6 packets whose extension headers are malformed or contain an option that must be
    /// rejected.
    header_errors = "IpInHdrErrors",
    /// IP packets that carry neither TCP nor ICMP.
    unknown_protocols = "IpInUnknownProtos",
    /// ARP packets received.
    arp_in = "ArpIn",
    /// ARP packets sent.
    arp_out = "ArpOut",
    /// Neighbour solicitations and advertisements received.
    ndp_in = "NdpIn",
    /// Neighbour solicitations and advertisements sent.
    ndp_out = "NdpOut",
    /// ICMP messages received.
    icmp_in = "IcmpInMsgs",
    /// ICMP messages sent.
    icmp_out = "IcmpOutMsgs",
    /// ICMP errors that quote a segment of ours.
    icmp_errors_in = "SiwIcmpErrorsIn",
    /// ICMP destination-unreachable errors sent (unknown protocols over IPv4).
    icmp_unreachables_out = "IcmpOutDestUnreachs",
    /// ICMPv6 parameter problems sent (RFC 4443 section 3.4).
    icmp_parameter_problems_out = "IcmpOutParmProbs",
    /// ICMP time-exceeded errors sent for incomplete fragmented datagrams.
    icmp_time_exceeded_out = "IcmpOutTimeExcds",
    /// Neighbours that did not answer.
    neighbour_failures = "ArpFailures",
    /// Lookups that found the neighbour table full.
    neighbour_overflows = "ArpTableFull",
    /// ARP, NDP and ICMP answers, resets and SYN cookies dropped because the queue was full or by
    /// the rate limit.
    control_drops = "SiwControlDrops",
    /// Frames left to the kernel's stack on a shared device.
    host_frames = "SiwHostFrames",
    /// Frames for the kernel's stack that were dropped: too many in one burst, or impossible to
    /// restore.
    host_drops = "SiwHostDrops",
}
