//! Opening connections: from here ([`Stack::connect`]) and for peers ([`Stack::listen`]).

use crate::tcb::flags::ConnectionFlags;
use core::net::{IpAddr, SocketAddr};

use crate::base::buffer::RecvBuf;
use crate::base::error::StackError;
use crate::base::ids::{ConnId, ListenerId};
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::connection::context::Listener;
use crate::stack::Stack;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame;

/// Ephemeral ports: all that are not reserved (RFC 6056 section 3.2).
const PORT_FIRST: u16 = 1024;
const PORT_COUNT: u32 = 65536 - PORT_FIRST as u32;
/// Connects try so many ports, times the workers that share the device, before they give up;
/// with a quarter of the ports free it fails once in 10^8.
const PORT_TRIES: u32 = 64;
/// After so many the port of an old connection in TIME-WAIT will do.
const FRESH_TRIES: u32 = 4;
/// So long in TIME-WAIT is a port left alone: a tick of any peer's timestamp clock (RFC 7323
/// section 5.4), so that its PAWS tells the connections apart.
const PORT_REST: u64 = 1_000_000_000;

impl<B: RecvBuf, R> Stack<B, R> {
    /// Active open; ends in `CONNECTED`, or `CLOSED` with one of `REFUSED`, `UNREACHABLE`,
    /// `TIMED_OUT`. `local` must be one of the device's addresses. The SYN leaves with `poll`.
    pub fn connect(
        &mut self,
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
        let from = match local {
            Some(a) if !self.shared.own(a) => return Err(StackError::NotOurAddress(a)),
            Some(a) if a.is_ipv4() != to.is_ipv4() => return Err(StackError::NoSource(to)),
            Some(a) => a,
            None if self.shared.own(to) => to,
            None => {
                // The address on the link that the packets leave by.
                let hop = self.shared.next_hop(to);
                let addrs = &self.shared.config.addresses;
                let near = addrs.iter().find(|c| hop.is_some_and(|h| c.contains(h)));
                let family = addrs.iter().find(|c| c.addr.is_ipv4() == to.is_ipv4());
                near.or(family).ok_or(StackError::NoSource(to))?.addr
            }
        };
        if !self.shared.own(to) && self.shared.next_hop(to).is_none() {
            return Err(StackError::NoRoute(to));
        }
        let key = match local_port {
            Some(p) => self
                .usable(from, p, remote)
                .ok_or(StackError::AddrInUse(p))?,
            None => self
                .draw_port(now, from, remote)
                .ok_or(StackError::NoPorts)?,
        };
        let max = self.shared.config.max_connections;
        let index = self.alloc(key).ok_or(StackError::TooManyConnections(max))?;
        let c = &mut self.conns[index as usize];
        c.tcb.user = user;
        self.shared.stats.active_opens += 1;
        self.open(index, now);
        Ok(ConnId {
            index,
            generation: self.conns[index as usize].generation,
        })
    }

    /// The four-tuple if it is free, or in a TIME-WAIT that timestamps let us reuse (RFC 6191).
    fn usable(&mut self, from: IpAddr, port: u16, remote: SocketAddr) -> Option<FlowKey> {
        let key = FlowKey::new(from, port, remote.ip(), remote.port())?;
        if port == 0 || key.local() == remote {
            return None;
        }
        let hash = key.hash::<1, 3>(self.shared.hash_key);
        if let Some(index) = self
            .shared
            .table
            .find(hash, |i| self.conns[i as usize].template.carries(&key))
        {
            let c = &mut self.conns[index as usize];
            if c.tcb.state != TcpState::TimeWait || !c.tcb.has(ConnectionFlags::TIMESTAMPS) {
                return None;
            }
            self.shared.stats.time_wait_recycled += 1;
            c.closed(&mut self.shared.context(index));
            self.reap(index);
        }
        Some(key)
    }

    /// RFC 6056 section 3.3.3: a keyed offset per destination, and a counter. Prefers ports that
    /// nobody has to those that only TIME-WAIT holds.
    fn draw_port(&mut self, now: Instant, from: IpAddr, remote: SocketAddr) -> Option<FlowKey> {
        let offset = FlowKey::new(from, 0, remote.ip(), remote.port())?
            .hash::<2, 4>(self.shared.isn_key) as u32;
        let time_wait = crate::base::time::nanos(self.shared.config.time_wait);
        let mut rested = None;
        let home = self.shared.config.steering.clone();
        let tries = PORT_TRIES
            * home
                .as_ref()
                .map_or(1, |h| h.steering.worker_count() as u32);
        for i in 0..tries {
            if i >= FRESH_TRIES
                && let Some(port) = rested
            {
                return self.usable(from, port, remote);
            }
            let n = offset.wrapping_add(self.shared.port_draws) % PORT_COUNT;
            self.shared.port_draws = self.shared.port_draws.wrapping_add(1);
            let port = PORT_FIRST + n as u16;
            let local = SocketAddr::new(from, port);
            if home.as_ref().is_some_and(|h| !h.owns(local, remote)) {
                continue;
            }
            let key = FlowKey::new(from, port, remote.ip(), remote.port())?;
            let hash = key.hash::<1, 3>(self.shared.hash_key);
            let holder = self
                .shared
                .table
                .find(hash, |i| self.conns[i as usize].template.carries(&key));
            match holder {
                _ if key.local() == remote => {}
                None => return Some(key),
                Some(index) => {
                    let h = &self.conns[index as usize].tcb;
                    if h.state == TcpState::TimeWait
                        && h.has(ConnectionFlags::TIMESTAMPS)
                        && h.timer_at().unwrap_or(0).saturating_sub(time_wait) + PORT_REST <= now.0
                    {
                        rested = Some(port);
                    }
                }
            }
        }
        self.usable(from, rested?, remote)
    }

    /// Passive open on one address or all. `backlog` bounds connections that are not yet
    /// established plus those whose `ACCEPTED` was not yet fetched; SYNs beyond are answered with
    /// cookies while fewer than `backlog` wait to be fetched. `user` becomes the user of
    /// new connections until `set_user`.
    pub fn listen(
        &mut self,
        local: Option<IpAddr>,
        port: u16,
        backlog: usize,
        user: u64,
    ) -> Result<ListenerId, StackError> {
        if let Some(a) = local.filter(|&a| !self.shared.own(a)) {
            return Err(StackError::NotOurAddress(a));
        }
        if port == 0 || self.shared.ports.contains_key(&(port, local)) {
            return Err(StackError::AddrInUse(port));
        }
        let id = self.shared.next_listener;
        self.shared.next_listener += 1;
        self.shared.ports.insert((port, local), id);
        self.shared.listeners.insert(
            id,
            Listener {
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

    /// Stops listening. Half-open connections are reset when their peer next speaks; established
    /// ones live on.
    pub fn stop_listening(&mut self, _now: Instant, listener: ListenerId) {
        if let Some(l) = self.shared.listeners.remove(&listener.0) {
            self.shared.ports.remove(&(l.port, l.local));
        }
    }

    /// Common start of active and passive opens.
    pub(crate) fn open(&mut self, index: u32, now: Instant) {
        let c = &mut self.conns[index as usize];
        let key = c.template.key();
        let iss = self.shared.isn(&key, now);
        c.ts_offset = self.shared.ts_offset(&key);
        c.tcb.snd_una = iss;
        c.tcb.snd_nxt = iss + 1;
        c.tcb.snd_wl2 = iss;
        c.congestion.set_first_byte(c.tcb.snd_nxt);
        self.shared
            .owe(index, &mut c.tcb, ConnectionFlags::NEED_SYN);
        c.tcb.restart_rto(&mut self.shared.context(index));
        c.update_active(&mut self.shared.context(index));
    }
}
