//! Opening connections actively ([`Stack::connect`]) and passively ([`Stack::listen`]): SYNs for
//! listeners, and other segments that match no connection (RFC 9293 sections 3.10.7.1 and 3.10.7.2).

use crate::tcb::flags::ConnectionFlags;
use core::net::{IpAddr, SocketAddr};

use crate::base::buffer::RecvBuf;
use crate::base::error::StackError;
use crate::base::ids::{ConnId, ListenerId};
use crate::base::quota_owner::QuotaOwner;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::link::neighbours::{NO_CONNECTION, NeighbourLookup};
use crate::stack::Stack;
use crate::stack::syn_cookies::ReturnedCookie;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame;
use crate::wire::segment::{self, Segment};

/// Ephemeral ports: all that are not reserved (RFC 6056 section 3.2).
const PORT_FIRST: u16 = 1024;
const PORT_COUNT: u32 = 65536 - PORT_FIRST as u32;
/// Ports that an active open tries, multiplied by the number of workers that share the device, before
/// it fails; with a quarter of the ports free that happens once in 10^8.
const PORT_TRIES: u32 = 64;
/// Number of tries after which the port of an old connection in TIME-WAIT is reused.
const FRESH_TRIES: u32 = 4;
/// Minimum time in TIME-WAIT, in ns, before a port is reused: one tick of any peer's timestamp clock
/// (RFC 7323 section 5.4), so that its PAWS can distinguish the two connections.
const PORT_REST: u64 = 1_000_000_000;

impl<B: RecvBuf, R> Stack<B, R> {
    /// Opens a connection actively; ends in `CONNECTED`, or in `CLOSED` with one of `REFUSED`,
    /// `UNREACHABLE`, `TIMED_OUT`. `local` must be one of the device's addresses. `poll` sends the SYN.
    pub fn connect(
        &mut self,
        now: Instant,
        local: Option<IpAddr>,
        local_port: Option<u16>,
        remote: SocketAddr,
        user: u64,
    ) -> Result<ConnId, StackError> {
        self.connect_for(None, now, local, local_port, remote, user)
    }

    /// [`connect`](Self::connect) on behalf of an owner, for whom the number of unresolved neighbours
    /// is limited. Neighbour resolution starts at once.
    ///
    /// # Errors
    /// [`StackError::TooManyUnresolved`], and those of `connect`.
    pub fn connect_for(
        &mut self,
        owner: Option<QuotaOwner>,
        now: Instant,
        local: Option<IpAddr>,
        local_port: Option<u16>,
        remote: SocketAddr,
        user: u64,
    ) -> Result<ConnId, StackError> {
        self.shared.now = now;
        let to = remote.ip();
        if remote.port() == 0 || !frame::is_peer_address(to) {
            return Err(StackError::BadRemote(remote));
        }
        let from = self.source_address(local, to)?;
        if !self.shared.is_own_address(to) {
            let hop = self.shared.next_hop(to).ok_or(StackError::NoRoute(to))?;
            self.shared.neighbours.check_quota(hop, owner)?;
        }
        let (key, previous) = match local_port {
            Some(port) => self
                .claim_four_tuple(from, port, remote)
                .ok_or(StackError::AddrInUse(port))?,
            None => self
                .draw_port(now, from, Some(remote))
                .ok_or(StackError::NoPorts)?,
        };
        self.open_actively(owner, key, previous, user)
    }

    /// Returns the source address of a connect from `local`, if given, to `to`.
    fn source_address(&self, local: Option<IpAddr>, to: IpAddr) -> Result<IpAddr, StackError> {
        Ok(match local {
            Some(address) if !self.shared.is_own_address(address) => {
                return Err(StackError::NotOurAddress(address));
            }
            Some(address) if address.is_ipv4() != to.is_ipv4() => {
                return Err(StackError::NoSource(to));
            }
            Some(address) => address,
            None if self.shared.is_own_address(to) => to,
            None => {
                // Prefer the address on the link by which the packets will be sent.
                let hop = self.shared.next_hop(to);
                let addrs = &self.shared.config.addresses;
                let near = addrs
                    .iter()
                    .find(|cidr| hop.is_some_and(|hop| cidr.contains(hop)));
                let family = addrs
                    .iter()
                    .find(|cidr| cidr.addr.is_ipv4() == to.is_ipv4());
                near.or(family).ok_or(StackError::NoSource(to))?.addr
            }
        })
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
        if self.shared.is_own_address(to) || to.is_multicast() {
            return Ok(true);
        }
        let hop = self.shared.next_hop(to).ok_or(StackError::NoRoute(to))?;
        let neighbours = &mut self.shared.neighbours;
        neighbours.check_quota(hop, Some(owner))?;
        match neighbours.lookup(hop, NO_CONNECTION, false, Some(owner), now) {
            NeighbourLookup::Found(_) => Ok(true),
            NeighbourLookup::Wait => Ok(false),
            NeighbourLookup::Full => {
                self.shared.stats.neighbour_overflows += 1;
                Ok(false)
            }
        }
    }

    /// Returns a source for a connect to `remote`, with a port that is free as of now.
    pub fn draw_source(
        &mut self,
        now: Instant,
        local: IpAddr,
        remote: SocketAddr,
    ) -> Option<SocketAddr> {
        let (key, _) = self.draw_port(now, local, Some(remote))?;
        Some(key.local())
    }

    /// Returns whether the worker of this stack receives the frames of a connection.
    pub fn receives(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        let home = self.shared.config.steering.as_ref();
        home.is_none_or(|home| home.owns(local, remote))
    }

    /// Returns the source of a connect that is to follow a request to the peer's port mapper: `local` and
    /// `local_port` if given. `None` if there is none, if the peer is this device, or if the kernel has
    /// the address, too, and with it the UDP port.
    pub fn source_of_mapped_connect(
        &mut self,
        now: Instant,
        local: Option<IpAddr>,
        local_port: Option<u16>,
        remote: SocketAddr,
    ) -> Option<SocketAddr> {
        let from = self.source_address(local, remote.ip()).ok()?;
        let host = self.shared.config.host.as_ref();
        if self.shared.is_own_address(remote.ip())
            || host.is_some_and(|host| host.addresses.contains(&from))
        {
            return None;
        }
        match local_port {
            Some(port) => Some(SocketAddr::new(from, port)),
            None => self.draw_source(now, from, remote),
        }
    }

    /// Opens a connection whose two ends are the same: everything that it sends arrives at itself. The
    /// handshake is a simultaneous open (RFC 9293 section 3.5). `local` must be one of the device's
    /// addresses; the port is drawn. Of the workers that share a device, the one of
    /// [`Steering::owner_of`](crate::Steering::owner_of) calls this.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect).
    pub fn connect_to_itself(
        &mut self,
        now: Instant,
        local: IpAddr,
        user: u64,
    ) -> Result<ConnId, StackError> {
        self.shared.now = now;
        if !self.shared.is_own_address(local) {
            return Err(StackError::NotOurAddress(local));
        }
        let drawn = self.draw_port(now, local, None);
        let (key, previous) = drawn.ok_or(StackError::NoPorts)?;
        self.open_actively(None, key, previous, user)
    }

    /// Starts the handshake of a connection with this key.
    fn open_actively(
        &mut self,
        owner: Option<QuotaOwner>,
        key: FlowKey,
        previous: Option<SeqNr>,
        user: u64,
    ) -> Result<ConnId, StackError> {
        let max = self.shared.config.max_connections;
        let index = self
            .slots
            .allocate(&mut self.shared, &key)
            .ok_or(StackError::TooManyConnections(max))?;
        let conn = &mut self.slots[index];
        conn.tcb.user = user;
        self.shared.stats.active_opens += 1;
        self.start_handshake(index, previous);
        if owner.is_some() {
            // Counted now, since further connects may come before the SYN is sent.
            self.shared
                .side_table
                .fields_of(index)
                .set_quota_owner(owner);
            let conn = &mut self.slots[index];
            let cx = &mut self.shared.context_of(conn.id(index));
            conn.ensure_resolved(cx);
        }
        Ok(ConnId {
            index,
            generation: self.slots[index].generation,
        })
    }

    /// Returns the key of the four-tuple if it is free, or if timestamps allow to reuse the TIME-WAIT
    /// connection that holds it (RFC 6191); then also that connection's SND.NXT.
    fn claim_four_tuple(
        &mut self,
        from: IpAddr,
        port: u16,
        remote: SocketAddr,
    ) -> Option<(FlowKey, Option<SeqNr>)> {
        let key = FlowKey::new(from, port, remote.ip(), remote.port())?;
        if port == 0 || key.local() == remote {
            return None;
        }
        self.claim_key(key)
    }

    /// As [`claim_four_tuple`](Self::claim_four_tuple).
    fn claim_key(&mut self, key: FlowKey) -> Option<(FlowKey, Option<SeqNr>)> {
        let hash = self.shared.table_hasher.hash(&key);
        let mut previous = None;
        if let Some(index) = self.slots.find(&self.shared, &key, hash) {
            let conn = &mut self.slots[index];
            if conn.tcb.state != TcpState::TimeWait || !conn.tcb.has(ConnectionFlags::TIMESTAMPS) {
                return None;
            }
            self.shared.stats.time_wait_recycled += 1;
            previous = Some(conn.sender.snd.nxt);
            conn.enter_closed(&mut self.shared.context_of(conn.id(index)));
            self.slots.free_if_done(&mut self.shared, index);
        }
        Some((key, previous))
    }

    /// Chooses an ephemeral port by RFC 6056 section 3.3.3: a keyed offset per destination, plus a counter.
    /// Free ports are preferred to ports held by a connection in TIME-WAIT. `remote`: `None` for a
    /// connection to itself.
    fn draw_port(
        &mut self,
        now: Instant,
        from: IpAddr,
        remote: Option<SocketAddr>,
    ) -> Option<(FlowKey, Option<SeqNr>)> {
        let key_with = |port| {
            let remote = remote.unwrap_or(SocketAddr::new(from, port));
            FlowKey::new(from, port, remote.ip(), remote.port())
        };
        let offset = key_with(0)?.hash(self.shared.isn_key) as u32;
        let time_wait = crate::base::time::to_nanos(self.shared.config.time_wait);
        let mut rested = None;
        let home = self.shared.config.steering.clone();
        // On an address shared with the kernel, only ports that are reserved for this stack.
        let host = self.shared.config.host.as_ref();
        let claimed = host
            .filter(|host| host.addresses.contains(&from))
            .map(|host| host.ports.clone());
        let tries = PORT_TRIES
            * home
                .as_ref()
                .map_or(1, |home| home.steering.worker_count() as u32);
        for i in 0..tries {
            if i >= FRESH_TRIES
                && let Some(key) = rested
            {
                return self.claim_key(key);
            }
            let n = offset.wrapping_add(self.shared.port_draws);
            self.shared.port_draws = self.shared.port_draws.wrapping_add(1);
            let port = match &claimed {
                Some(ports) => ports.nth_of_range(n),
                None => PORT_FIRST + (n % PORT_COUNT) as u16,
            };
            if claimed.as_ref().is_some_and(|ports| !ports.contains(port)) {
                continue;
            }
            let key = key_with(port)?;
            let (local, to) = (key.local(), key.remote());
            if home.as_ref().is_some_and(|home| !home.owns(local, to)) {
                continue;
            }
            let hash = self.shared.table_hasher.hash(&key);
            let holder = self.slots.find(&self.shared, &key, hash);
            match holder {
                _ if Some(local) == remote => {}
                None => return Some((key, None)),
                Some(index) => {
                    let tcb = &self.slots[index].tcb;
                    if tcb.state == TcpState::TimeWait
                        && tcb.has(ConnectionFlags::TIMESTAMPS)
                        && tcb.timer_at().unwrap_or(0).saturating_sub(time_wait) + PORT_REST
                            <= now.0
                    {
                        rested = Some(key);
                    }
                }
            }
        }
        self.claim_key(rested?)
    }

    /// Opens passively on one address or on all. `backlog` bounds connections that are not yet
    /// established plus those whose `ACCEPTED` was not yet fetched. Further SYNs are answered with
    /// cookies while fewer than `backlog` established connections wait to be fetched. `user` is the
    /// user value of new connections until `set_user`.
    pub fn listen(
        &mut self,
        local: Option<IpAddr>,
        port: u16,
        backlog: usize,
        user: u64,
    ) -> Result<ListenerId, StackError> {
        if let Some(address) = local.filter(|&address| !self.shared.is_own_address(address)) {
            return Err(StackError::NotOurAddress(address));
        }
        let in_use = StackError::AddrInUse(port);
        if port == 0 {
            return Err(in_use);
        }
        let listener = self.shared.listeners.add(local, port, backlog, user);
        listener.map(ListenerId).ok_or(in_use)
    }

    /// Stops listening. A half-open connection is reset when its peer next sends a segment; established
    /// connections stay.
    pub fn stop_listening(&mut self, _now: Instant, listener: ListenerId) {
        self.shared.listeners.remove(listener.0);
    }

    /// Starts the handshake of an active or passive open.
    pub(crate) fn start_handshake(&mut self, index: u32, previous: Option<SeqNr>) {
        let conn = &mut self.slots[index];
        conn.start_handshake(&mut self.shared.context_of(conn.id(index)), previous);
    }

    /// Processes a SYN that is acceptable for a new connection in place of one in TIME-WAIT. The old one is
    /// closed only if the new one can be opened, which needs a listener with room; otherwise it stays, since
    /// the peer may still retransmit its FIN (RFC 9293 section 3.6.1).
    #[cold]
    pub(super) fn on_syn_in_time_wait(
        &mut self,
        index: u32,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        let listener = self.shared.listeners.find(key.local()).filter(|_| {
            self.shared.is_plausible_peer(key, src_mac) && seg.flags & segment::FIN == 0
        });
        let Some(entry) = listener.and_then(|id| self.shared.listeners.get(id)) else {
            let conn = &mut self.slots[index];
            self.shared
                .context_of(conn.id(index))
                .on_unexpected_syn(&mut conn.tcb);
            return;
        };
        // No cookie: its sequence number is not above those of the old connection.
        let room = entry.pending < entry.backlog && !self.shared.neighbours.crowded();
        if !room || !self.slots.make_slot(&mut self.shared, index) {
            self.shared.stats.listen_overflows += u64::from(!room);
            self.shared.stats.listen_drops += 1;
            return;
        }
        self.shared.stats.time_wait_recycled += 1;
        let conn = &mut self.slots[index];
        let previous = Some(conn.sender.snd.nxt);
        conn.enter_closed(&mut self.shared.context_of(conn.id(index)));
        self.slots.free_if_done(&mut self.shared, index);
        self.on_unmatched_segment(key, seg, payload, src_mac, previous);
    }

    /// Processes a segment that matches no connection (RFC 9293 sections 3.10.7.1 and 3.10.7.2).
    /// `previous`: SND.NXT of the connection that a SYN replaces.
    #[cold]
    pub(super) fn on_unmatched_segment(
        &mut self,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
        previous: Option<SeqNr>,
    ) {
        let own = self.shared.is_own_address(key.local().ip());
        if !own || !self.shared.is_plausible_peer(key, src_mac) {
            self.shared.stats.not_for_us += u64::from(!own);
            self.shared.stats.martians += u64::from(own);
            return;
        }
        self.shared.stats.no_connection += u64::from(seg.flags & segment::SYN == 0);
        if seg.flags & segment::RST != 0 {
            return;
        }
        let listener = self.shared.listeners.find(key.local());
        if listener.is_some() && seg.flags & (segment::SYN | segment::ACK) == 0 {
            // LISTEN ignores segments with neither SYN nor ACK (section 3.10.7.2, fourth).
            return;
        }
        if listener.is_some()
            && seg.flags & (segment::SYN | segment::ACK | segment::FIN)
                == segment::SYN | segment::FIN
        {
            // SYN with FIN opens and closes at once; no legitimate peer sends it.
            self.shared.stats.martians += 1;
            return;
        }
        let listener =
            listener.filter(|_| seg.flags & (segment::SYN | segment::ACK) == segment::SYN);
        let Some(listener) = listener else {
            self.shared.stats.no_ports += u64::from(seg.flags & segment::SYN != 0);
            return self
                .shared
                .reset_unmatched_segment(key, seg, payload, src_mac);
        };
        let Some(entry) = self.shared.listeners.get_mut(listener) else {
            return;
        };
        // A cookie needs neither a slot nor a neighbour entry: it is sent to the source MAC address of the
        // SYN.
        let pressed = entry.pending >= entry.backlog || self.shared.neighbours.crowded();
        if pressed && entry.ready < entry.backlog && self.shared.config.syn_cookies {
            return self.shared.send_cookie(key, seg, listener, src_mac);
        }
        if entry.pending >= entry.backlog {
            self.shared.stats.listen_overflows += 1;
            self.shared.stats.listen_drops += 1;
            return;
        }
        let user = entry.user;
        let Some(index) = self.slots.allocate(&mut self.shared, key) else {
            self.shared.stats.listen_drops += 1;
            return;
        };
        if let Some(entry) = self.shared.listeners.get_mut(listener) {
            entry.pending += 1;
        }
        let conn = &mut self.slots[index];
        conn.listener = listener;
        conn.tcb.user = user;
        conn.tcb.state = TcpState::SynReceived;
        conn.tcb.flags |=
            ConnectionFlags::PASSIVE | ConnectionFlags::IN_BACKLOG | ConnectionFlags::RELEASED;
        conn.apply_peer_syn(&mut self.shared.context_of(conn.id(index)), seg);
        self.start_handshake(index, previous);
    }

    /// Opens the connection whose cookie an ACK returns; it is in SYN-RECEIVED, and processes the ACK
    /// next. `None`: there is no room for a connection now; the peer will retransmit its data.
    #[cold]
    pub(super) fn open_from_cookie(
        &mut self,
        key: &FlowKey,
        seg: &Segment,
        cookie: &ReturnedCookie,
        src_mac: [u8; 6],
    ) -> Option<u32> {
        let socket = self.shared.listeners.get_mut(cookie.listener)?;
        if socket.ready >= socket.backlog {
            self.shared.stats.listen_overflows += 1;
            return None;
        }
        let user = socket.user;
        let Some(index) = self.slots.allocate(&mut self.shared, key) else {
            self.shared.stats.listen_drops += 1;
            return None;
        };
        if let Some(socket) = self.shared.listeners.get_mut(cookie.listener) {
            socket.pending += 1;
        }
        self.shared.stats.cookies_recv += 1;
        let offset = self.shared.timestamp_offset(key);
        let conn = &mut self.slots[index];
        conn.listener = cookie.listener;
        conn.path.timestamp_offset = offset;
        conn.path.set_source_of_frame(src_mac);
        conn.apply_peer_syn(
            &mut self.shared.context_of(conn.id(index)),
            &cookie.syn(seg),
        );
        let tcb = &mut conn.tcb;
        tcb.user = user;
        tcb.state = TcpState::SynReceived;
        tcb.flags |=
            ConnectionFlags::PASSIVE | ConnectionFlags::IN_BACKLOG | ConnectionFlags::RELEASED;
        let snd = &mut conn.sender.snd;
        snd.una = cookie.sequence;
        snd.nxt = seg.ack;
        snd.wl2 = cookie.sequence;
        // The time of the SYN-ACK is not recorded: a backoff of 1 prevents a round-trip measurement.
        snd.backoff = 1;
        self.shared
            .context_of(conn.id(index))
            .update_active_count(&mut conn.tcb, &conn.sender.snd);
        Some(index)
    }
}
