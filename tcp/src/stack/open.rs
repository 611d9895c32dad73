//! Opening connections actively ([`Stack::connect`]) and passively ([`Stack::listen`]).

use crate::tcb::flags::ConnectionFlags;
use core::net::{IpAddr, SocketAddr};

use crate::base::buffer::RecvBuf;
use crate::base::error::StackError;
use crate::base::ids::{ConnId, ListenerId};
use crate::base::quota_owner::QuotaOwner;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::config::LearnedRoutes;
use crate::connection::context::ListenSocket;
use crate::stack::Stack;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame;

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
            None => Some(self.draw_port(now, from, Some(remote))?.0.local()),
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
            .allocate_slot(key)
            .ok_or(StackError::TooManyConnections(max))?;
        let conn = &mut self.connections[index as usize];
        conn.tcb.user = user;
        self.shared.stats.active_opens += 1;
        self.start_handshake(index, previous);
        if owner.is_some() {
            // Counted now, since further connects may come before the SYN is sent.
            self.shared
                .side_table
                .fields_of(index)
                .set_quota_owner(owner);
            let conn = &mut self.connections[index as usize];
            let cx = &mut self.shared.context_of(conn.id(index));
            conn.path
                .ensure_resolved(&mut conn.tcb, &mut conn.sender, cx);
        }
        Ok(ConnId {
            index,
            generation: self.connections[index as usize].generation,
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
        if let Some(index) = self.shared.flow_table.find(hash, |i| {
            self.connections[i as usize].path.template.carries(&key)
        }) {
            let conn = &mut self.connections[index as usize];
            if conn.tcb.state != TcpState::TimeWait || !conn.tcb.has(ConnectionFlags::TIMESTAMPS) {
                return None;
            }
            self.shared.stats.time_wait_recycled += 1;
            previous = Some(conn.tcb.snd_nxt);
            conn.enter_closed(&mut self.shared.context_of(conn.id(index)));
            self.free_if_done(index);
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
            let holder = self.shared.flow_table.find(hash, |i| {
                self.connections[i as usize].path.template.carries(&key)
            });
            match holder {
                _ if Some(local) == remote => {}
                None => return Some((key, None)),
                Some(index) => {
                    let tcb = &self.connections[index as usize].tcb;
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
        if port == 0 || self.shared.ports.contains_key(&(port, local)) {
            return Err(StackError::AddrInUse(port));
        }
        let id = self.shared.next_listener;
        self.shared.next_listener += 1;
        self.shared.ports.insert((port, local), id);
        self.shared.listeners.insert(
            id,
            ListenSocket {
                local,
                port,
                backlog: backlog.max(1),
                pending: 0,
                ready: 0,
                cookies_until: 0,
                user,
            },
        );
        Ok(ListenerId(id))
    }

    /// Stops listening. A half-open connection is reset when its peer next sends a segment; established
    /// connections stay.
    pub fn stop_listening(&mut self, _now: Instant, listener: ListenerId) {
        if let Some(listener) = self.shared.listeners.remove(&listener.0) {
            self.shared.ports.remove(&(listener.port, listener.local));
        }
    }

    /// Replaces the learned routes, which are used in addition to those of the configuration.
    pub fn set_learned_routes(&mut self, routes: LearnedRoutes) {
        self.shared.learned_routes = routes;
        self.shared.neighbours.new_generation();
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
        let neighbours = &mut self.shared.neighbours;
        let Some(mac) = mac else {
            return neighbours.forget_known(address, now);
        };
        for id in neighbours.set_known(address, mac, is_permanent, now) {
            self.schedule_after_resolution(id);
        }
    }

    /// Starts the handshake of an active or passive open.
    pub(crate) fn start_handshake(&mut self, index: u32, previous: Option<SeqNr>) {
        let conn = &mut self.connections[index as usize];
        conn.start_handshake(&mut self.shared.context_of(conn.id(index)), previous);
    }
}
