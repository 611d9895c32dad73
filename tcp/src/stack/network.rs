//! The network layer's part of the public interface, and the results of received frames that concern
//! connections.

use core::net::{IpAddr, SocketAddr};

use siw_net::{
    AddressConflict, ClaimOutcome, Datagram, DatagramError, DatagramHeaders, DatagramOutcome,
    DatagramPath, FlowKey, FrameSink, Instant, IpCidr, LearnedRoutes, MIN_PATH_MTU_V4,
    MIN_PATH_MTU_V6, NO_CONNECTION, NeighbourLookup, NetStats, PortMapperEvent, QuotaOwner,
    ReassembledSegment, Received, RecvBuf, RoceDatagram, RxChecksum, SegmentError,
    SegmentErrorKind,
};

use crate::base::error::StackError;
use crate::base::events::Events;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::connection::context::SharedState;
use crate::connection::side_table::SideFlags;
use crate::stack::Stack;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::segment::Segment;

impl<B: RecvBuf, R> Stack<B, R> {
    /// Processes a copy of a frame that another worker received and answers. Every worker of a device
    /// needs its information (neighbours, ICMP errors), see [`siw_net::Destination::AllWorkers`].
    pub fn receive_copy(&mut self, now: Instant, frame: B, checksum: RxChecksum) {
        self.shared.now = now;
        let net = &mut self.shared.net;
        let received = self.input.receive_copy(net, now, frame, checksum);
        self.on_received(received);
    }

    /// Processes the part of a received frame that concerns connections.
    #[cold]
    pub(super) fn on_received(&mut self, received: Received<B>) {
        match received {
            Received::Nothing => {}
            Received::Segment(segment) => self.on_reassembled_segment(segment),
            Received::Claim(neighbour, outcome) => self.apply_claim_outcome(neighbour, outcome),
            Received::Error(error) => match error.kind {
                SegmentErrorKind::TooBig { mtu } => self.on_packet_too_big(&error, mtu),
                SegmentErrorKind::Unreachable { soft } => self.on_unreachable(&error, soft),
            },
        }
    }

    /// Processes a TCP segment that arrived in fragments.
    fn on_reassembled_segment(&mut self, segment: ReassembledSegment<B>) {
        let mut seg = Segment::default();
        let Some(buffer) = self.parse_segment(&mut seg, segment.buffer, segment.ce) else {
            return;
        };
        let before = self.shared.net.set_silent(segment.is_copy);
        self.on_tcp_segment(&segment.key, None, &seg, buffer, segment.origin);
        self.shared.net.set_silent(before);
    }

    /// Schedules the output of connections that waited for the neighbour, and of those whose data it
    /// did not answer, if the path through it is new.
    fn apply_claim_outcome(&mut self, neighbour: IpAddr, outcome: ClaimOutcome) {
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

    /// Processes an ICMP error other than "too big" about a segment. It ends a connection
    /// only during an active open (RFC 5927 section 5.2) and only if it quotes our SYN. A `soft` error
    /// does not end it, but is reported as the reason if the open fails (RFC 9293 section 3.9.2.2,
    /// MUST-56).
    fn on_unreachable(&mut self, error: &SegmentError, soft: bool) {
        let hash = self.shared.table_hasher.hash(&error.key);
        let Some(index) = self.slots.find(&self.shared, &error.key, hash) else {
            return;
        };
        let conn = &mut self.slots[index];
        let quotes_syn = SeqNr(error.sequence) == conn.sender.snd.una;
        if conn.tcb.state != TcpState::SynSent || !quotes_syn {
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

    /// Processes the report of a router that a segment exceeded `mtu`. The report is
    /// accepted if the segment is in flight (RFC 5927 section 4.1) and was longer than `mtu` allows, and
    /// if `mtu` is plausible (RFC 8899 section 4.6.1).
    fn on_packet_too_big(&mut self, error: &SegmentError, mtu: u16) {
        let (key, seq) = (&error.key, SeqNr(error.sequence));
        let hash = self.shared.table_hasher.hash(key);
        let found = self.slots.find(&self.shared, key, hash);
        let Some(index) = found else { return };
        let conn = &mut self.slots[index];
        let snd = &conn.sender.snd;
        let min = if key.is_v6() {
            MIN_PATH_MTU_V6
        } else {
            MIN_PATH_MTU_V4
        };
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
            let now = self.shared.now;
            self.shared.paths.learn(key.remote().ip(), mtu, now);
            let cx = &mut self.shared.context_of(conn.id(index));
            conn.narrow_path(cx, emss);
        }
    }

    /// Returns the network layer's counters since the start.
    #[inline]
    pub fn net_stats(&self) -> &NetStats {
        &self.shared.net.stats
    }

    /// Takes a conflict about one of our addresses to report; each address at most once in ten seconds.
    #[inline]
    pub fn take_address_conflict(&mut self) -> Option<AddressConflict> {
        self.shared.net.take_address_conflict()
    }

    /// Replaces the device's addresses. New ones are probed and announced as at the start. Listeners on
    /// removed ones end; the owner closes connections from them before.
    ///
    /// # Errors
    /// The configuration is invalid with these addresses, for example because a router is not on the link
    /// any more. Nothing has changed then.
    pub fn set_addresses(
        &mut self,
        now: Instant,
        addresses: Vec<IpCidr>,
    ) -> Result<(), StackError> {
        let shared = &mut self.shared;
        shared.net.set_addresses(now, addresses)?;
        shared.now = now;
        let own = &shared.net.config.addresses;
        shared
            .listeners
            .retain(|local| own.iter().any(|cidr| cidr.addr == local));
        shared.stalled.release_all();
        Ok(())
    }

    /// Forgets all neighbours whose Ethernet addresses are known: the next frame to each of them asks again.
    pub fn flush_neighbours(&mut self) {
        self.shared.net.neighbours.flush();
        self.shared.stalled.release_all();
    }

    /// Replaces the learned routes, which are used in addition to those of the configuration. Data that
    /// got no answer is sent again at once: the path to its peer may be back. Callers therefore repeat
    /// the routes when the link is up again.
    pub fn set_learned_routes(&mut self, routes: LearnedRoutes) {
        self.shared.net.set_learned_routes(routes);
        self.shared.stalled.release_all();
    }

    /// Sets the MAC address of a neighbour as known to another stack on this machine; `None`: that
    /// stack no longer knows it. `is_permanent`: the entry needs no confirmation.
    pub fn learn_neighbour(
        &mut self,
        now: Instant,
        address: IpAddr,
        mac: Option<[u8; 6]>,
        is_permanent: bool,
    ) {
        self.shared.now = now;
        let net = &mut self.shared.net;
        let outcome = net.learn_neighbour(now, address, mac, is_permanent);
        self.apply_claim_outcome(address, outcome);
    }

    /// Looks up the neighbour by which `to` is reached, on behalf of `owner`, and solicits it if it is not
    /// known. Returns whether it is known: if not, the caller looks again later.
    ///
    /// # Errors
    /// There is no route, or `owner` has reached its limit of unresolved neighbours.
    pub fn resolve_neighbour(
        &mut self,
        now: Instant,
        owner: QuotaOwner,
        to: IpAddr,
    ) -> Result<bool, StackError> {
        let net = &mut self.shared.net;
        if net.is_own_address(to) || to.is_multicast() {
            return Ok(true);
        }
        let hop = net.next_hop(to).ok_or(StackError::NoRoute(to))?;
        net.neighbours.check_quota(hop, Some(owner))?;
        match net
            .neighbours
            .lookup(hop, NO_CONNECTION, false, Some(owner), now)
        {
            NeighbourLookup::Found(_) => Ok(true),
            NeighbourLookup::Wait => Ok(false),
            NeighbourLookup::Full => {
                net.stats.neighbour_overflows += 1;
                Ok(false)
            }
        }
    }

    /// Returns whether the worker of this stack receives the frames of a connection.
    pub fn receives(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        let home = self.shared.net.config.steering.as_ref();
        home.is_none_or(|home| home.owns(local, remote))
    }

    /// Returns whether frames for the kernel are queued.
    #[inline]
    pub fn has_host_frames(&self) -> bool {
        self.input.has_host_frames()
    }

    /// Drains the frames for the kernel, as received except for Ethernet padding. Must be called after
    /// each burst, since the list is short.
    pub fn take_host_frames(&mut self) -> impl Iterator<Item = B> {
        self.input.take_host_frames()
    }

    /// Number of received buffers in incomplete datagrams, at most
    /// [`max_fragments`](siw_net::ReassemblyConfig::max_fragments).
    pub fn held_fragments(&self) -> usize {
        self.input.held_fragments()
    }

    /// Returns whether messages for the port mapper wait.
    #[inline]
    pub fn has_port_mapper_events(&self) -> bool {
        self.input.has_port_mapper_events()
    }

    /// Takes the next message for the port mapper.
    pub fn next_port_mapper_event(&mut self) -> Option<PortMapperEvent> {
        self.input.next_port_mapper_event()
    }

    /// Returns whether the stack receives messages of the port mapper.
    pub fn has_port_mapper(&self) -> bool {
        self.shared.net.config.port_mapper
    }

    /// Answers a datagram, unless the rate limit of answers is reached.
    pub fn answer_datagram(&mut self, now: Instant, datagram: &Datagram, payload: &[u8]) {
        self.shared.net.answer_datagram(now, datagram, payload);
    }

    /// Sends a datagram to the port mapper of the host at `to`.
    pub fn send_to_port_mapper(
        &mut self,
        now: Instant,
        owner: QuotaOwner,
        from: IpAddr,
        to: IpAddr,
        payload: &[u8],
    ) -> DatagramOutcome {
        let net = &mut self.shared.net;
        net.send_to_port_mapper(now, owner, from, to, payload)
    }

    /// Returns whether datagrams of RoCEv2 wait.
    #[inline]
    pub fn has_roce_datagrams(&self) -> bool {
        self.input.has_roce_datagrams()
    }

    /// Takes the next datagram of RoCEv2.
    #[inline]
    pub fn next_roce_datagram(&mut self) -> Option<RoceDatagram<B>> {
        self.input.next_roce_datagram()
    }

    /// Takes datagrams of RoCEv2 to addresses that the kernel has too, from now on.
    pub fn take_roce_from_host(&mut self) {
        self.shared.net.take_roce_from_host();
    }

    /// Returns the worker that has a queue pair of datagrams, if several share the device.
    #[inline]
    pub fn owner_of_datagrams(&self, qpn: u32) -> Option<usize> {
        self.shared.net.owner_of_datagrams(qpn)
    }

    /// Receives datagrams of RoCEv2 to a group from now on. `reports`: this worker tells routers and
    /// switches.
    pub fn join_group(&mut self, now: Instant, group: IpAddr, reports: bool) {
        self.shared.net.join_group(now, group, reports);
    }

    /// Ends what [`Self::join_group`] began.
    pub fn leave_group(&mut self, group: IpAddr, reports: bool) {
        self.shared.net.leave_group(group, reports);
    }

    /// Returns whether datagrams to the group are received.
    #[inline]
    pub fn is_in_group(&self, group: IpAddr) -> bool {
        self.shared.net.is_in_group(group)
    }

    /// Returns whether this is the first of the workers that share the device.
    pub fn is_first_worker(&self) -> bool {
        self.shared.net.is_first_worker()
    }

    /// Number of workers that share the device.
    pub fn worker_count(&self) -> usize {
        self.shared.net.worker_count()
    }

    /// Returns the largest IP packet of the device, in bytes.
    pub fn mtu(&self) -> usize {
        self.shared.net.mtu()
    }

    /// Builds the headers of a datagram of RoCEv2 with `payload_len` bytes behind UDP. `owner`: the owner
    /// that an unresolved neighbour is charged to.
    ///
    /// # Errors
    /// The datagram cannot be sent now.
    #[inline]
    pub fn roce_headers(
        &mut self,
        now: Instant,
        owner: QuotaOwner,
        path: &DatagramPath,
        payload_len: usize,
    ) -> Result<DatagramHeaders, DatagramError> {
        self.shared.net.roce_headers(now, owner, path, payload_len)
    }

    /// Sends a datagram of RoCEv2: these headers, then `payload`, of the length that they announce.
    /// Returns `false` if the sink has no room.
    #[inline]
    pub fn send_roce(
        &mut self,
        headers: &DatagramHeaders,
        payload: &[u8],
        sink: &mut impl FrameSink<R>,
    ) -> bool {
        self.shared.net.send_roce(headers, payload, sink)
    }
}

impl SharedState {
    /// Returns whether a segment that matches no connection here belongs to the kernel.
    #[cold]
    pub(super) fn is_host_segment(&self, key: &FlowKey) -> bool {
        let Some(host) = &self.net.config.host else {
            return false;
        };
        // One of our own connects, looped back: the kernel accepts nothing from its own address.
        if self.net.is_own_address(key.remote().ip()) {
            return false;
        }
        let local = key.local();
        if host.addresses.contains(&local.ip()) {
            !host.ports.contains(local.port()) && self.listeners.find(local).is_none()
        } else {
            !self.net.is_own_address(local.ip())
        }
    }
}
