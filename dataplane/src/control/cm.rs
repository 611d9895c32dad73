//! Connection management: what workers report becomes CM and asynchronous events, and
//! requests to connect find a device and a worker.

use std::net::{IpAddr, SocketAddr};

use nix::libc;
use siw_shm::control::messages::KIND_CM_EVENT;
use siw_shm::control::{
    Addr, AsyncEventKind, CmEventKind, CmEventMessage, PrivateData, QpState, Text, codec,
};

use super::Control;
use super::resources::QpPhase;
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId, Qpn};
use crate::worker::messages::{Command, ConnectFailure, DisconnectReason, Event, RequestId};

impl Control {
    pub(super) fn worker_event(&mut self, worker: usize, event: Event) {
        match event {
            Event::ConnectRequest {
                request,
                listener,
                local,
                remote,
                private_data,
                peer_ird,
                peer_ord,
            } => {
                let mut e = CmEventMessage::new(CmEventKind::ConnectRequest);
                // What the initiator can hold bounds our ORD, what it wants our IRD.
                e.ord = peer_ird.map_or(0, u32::from);
                e.ird = peer_ord.map_or(0, u32::from);
                e.local = local.into();
                e.peer = remote.into();
                e.private_data = private(&private_data);
                self.connect_request(worker, request, listener, e);
            }
            Event::RequestGone { request, listener } => {
                let Some(number) = self.requests.gone(request) else {
                    return;
                };
                let Some(l) = self.listeners.get(listener) else {
                    return;
                };
                let mut e = CmEventMessage::new(CmEventKind::RequestCancelled);
                e.cookie = l.cookie;
                e.listener = listener.0;
                e.request = number.0;
                let (client, channel) = (l.client, l.cm_channel);
                self.cm_event(client, Some(channel), &e);
            }
            Event::Established {
                qpn,
                negotiated,
                private_data,
                local,
                remote,
            } => {
                let Some(id) = self.owner(qpn) else { return };
                let Some(qp) = self.qp_mut(id, qpn) else {
                    return;
                };
                qp.phase = QpPhase::Attached;
                qp.state = QpState::Rts;
                qp.ird = negotiated.ird;
                qp.ord = negotiated.ord;
                qp.local = local.into();
                qp.peer = remote.into();
                let mut e = CmEventMessage::new(CmEventKind::Established);
                e.cookie = qp.cookie;
                e.qp_num = qpn.0;
                e.worker = qp.worker as u32;
                e.device = qp.device as u32;
                e.ird = negotiated.ird.into();
                e.ord = negotiated.ord.into();
                e.crc = negotiated.crc.into();
                e.mpa_rev = negotiated.revision;
                e.local = local.into();
                e.peer = remote.into();
                e.private_data = private(&private_data);
                let channel = qp.cm_channel;
                self.cm_event(id, channel, &e);
            }
            Event::ConnectFailed { qpn, failure } => self.connect_failed(qpn, failure),
            Event::Disconnected { qpn, failure } => {
                let Some(id) = self.owner(qpn) else { return };
                let Some(qp) = self.qp_mut(id, qpn) else {
                    return;
                };
                qp.state = QpState::Error;
                let mut e = CmEventMessage::new(CmEventKind::Disconnected);
                e.cookie = qp.cookie;
                e.qp_num = qpn.0;
                e.device = qp.device as u32;
                e.local = qp.local;
                e.peer = qp.peer;
                if let Some(failure) = failure {
                    let (errno, reason) = match failure {
                        DisconnectReason::Reset => {
                            (libc::ECONNRESET, "the peer reset the connection".to_owned())
                        }
                        DisconnectReason::TimedOut => {
                            (libc::ETIMEDOUT, "the peer stopped answering".to_owned())
                        }
                        DisconnectReason::TerminateReceived(code) => {
                            (libc::EREMOTEIO, format!("the peer sent Terminate: {code}"))
                        }
                        DisconnectReason::TerminateSent(code) => {
                            (libc::EPROTO, format!("ended by this side: {code}"))
                        }
                    };
                    e.errno = errno as u32;
                    e.reason = Text::new(&reason);
                }
                let channel = qp.cm_channel;
                self.cm_event(id, channel, &e);
            }
            Event::QpDestroyed { qpn } => self.finish_destroy_qp(qpn),
            Event::QpInfo { qpn, token, info } => self.qp_info(qpn, token, &info),
            Event::Async { client, qpn, event } => {
                use siw_iwarp::QpEvent as A;
                let (kind, why) = match event {
                    A::QpFatal => (
                        AsyncEventKind::QpFatal,
                        "the queue pair ended with an error",
                    ),
                    A::QpReqErr => (
                        AsyncEventKind::QpReqErr,
                        "the peer broke the protocol, or says that we did",
                    ),
                    A::QpAccessErr => (AsyncEventKind::QpAccessErr, "remote protection error"),
                    A::SqDrained => (AsyncEventKind::SqDrained, "the send queue is drained"),
                };
                if kind != AsyncEventKind::SqDrained
                    && let Some(qp) = self.qp_mut(client, qpn)
                {
                    qp.state = QpState::Error;
                }
                self.async_event(client, kind, qpn.0, why);
            }
            Event::CqOverflow { client, cq } => {
                let why = "the completion queue overflowed: make it deeper or poll it sooner";
                self.async_event(client, AsyncEventKind::CqErr, cq.0, why);
            }
            Event::SrqLimit { client, srq } => self.srq_limit(client, srq),
            Event::LastWqe { client, qpn } => {
                let why = "nothing more is taken from the shared receive queue";
                self.async_event(client, AsyncEventKind::QpLastWqeReached, qpn.0, why);
            }
            Event::BadRequest {
                client,
                qpn,
                reason,
            } => {
                let why = format!("work request refused: {reason}");
                self.async_event(client, AsyncEventKind::QpFatal, qpn.0, &why);
            }
            Event::ClientFault { client, qpn } => {
                let why = format!("queue pair {qpn}: ring indices are impossible");
                self.fault(client, &why);
            }
            Event::ListenFailed { listener, reason } => {
                tracing::warn!(listener = listener.0, "listening failed: {reason}");
            }
            Event::Stats {
                worker,
                token,
                stats,
            } => self.stats_arrived(worker, token, *stats),
            Event::BarrierReached { .. } | Event::Stopped { .. } => {}
        }
    }

    fn connect_request(
        &mut self,
        worker: usize,
        request: RequestId,
        listener: CmListenerId,
        mut e: CmEventMessage,
    ) {
        let Some(l) = self.listeners.get(listener) else {
            let private_data = Vec::new();
            return self.command(
                worker,
                Command::Reject {
                    request,
                    private_data,
                },
            );
        };
        self.requests_no = self.requests_no.wrapping_add(1).max(1);
        e.request = self.requests_no;
        e.cookie = l.cookie;
        e.listener = listener.0;
        let local = e.local.to_socket_addr().map(|a| a.ip());
        e.device = self
            .config
            .devices
            .iter()
            .position(|d| d.addresses.iter().any(|c| Some(c.addr) == local))
            .unwrap_or(0) as u32;
        let (client, channel) = (l.client, l.cm_channel);
        self.requests
            .insert(ConnectRequestId(e.request), request, listener);
        self.cm_event(client, Some(channel), &e);
    }

    fn connect_failed(&mut self, qpn: Qpn, failure: ConnectFailure) {
        let Some(id) = self.owner(qpn) else { return };
        let Some(qp) = self.qp_mut(id, qpn) else {
            return;
        };
        qp.phase = QpPhase::Detached;
        qp.state = QpState::Idle;
        let (kind, errno, reason) = match &failure {
            ConnectFailure::Rejected(_) => (
                CmEventKind::Rejected,
                libc::ECONNREFUSED,
                "the application at the other end rejected the connection".to_owned(),
            ),
            ConnectFailure::Refused => (
                CmEventKind::Rejected,
                libc::ECONNREFUSED,
                "nothing listens at that address and port".to_owned(),
            ),
            ConnectFailure::Unreachable => (
                CmEventKind::Unreachable,
                libc::EHOSTUNREACH,
                "no neighbour answers for that address".to_owned(),
            ),
            ConnectFailure::TimedOut => (
                CmEventKind::Unreachable,
                libc::ETIMEDOUT,
                "the peer did not answer in time".to_owned(),
            ),
            ConnectFailure::Reset => (
                CmEventKind::ConnectError,
                libc::ECONNRESET,
                "the peer closed the connection during set-up".to_owned(),
            ),
            ConnectFailure::Protocol(why) => (CmEventKind::ConnectError, libc::EPROTO, why.clone()),
            ConnectFailure::Local(why) => {
                (CmEventKind::ConnectError, libc::EADDRNOTAVAIL, why.clone())
            }
        };
        let mut e = CmEventMessage::new(kind);
        e.cookie = qp.cookie;
        e.qp_num = qpn.0;
        e.errno = errno as u32;
        e.reason = Text::new(&reason);
        if let ConnectFailure::Rejected(data) = &failure {
            e.private_data = private(data);
        }
        let channel = qp.cm_channel;
        self.cm_event(id, channel, &e);
    }

    fn cm_event(&mut self, client: ClientId, channel: Option<CmChannelId>, event: &CmEventMessage) {
        let Some(c) = self.clients.get_mut(&client) else {
            return;
        };
        if let Some(outbox) = channel.and_then(|channel| c.cm_channels.get_mut(&channel)) {
            outbox.send(&self.epoll, codec::encode_event(KIND_CM_EVENT, event));
        }
    }

    /// The device through which a peer is reached: its own address turns the connection
    /// round, then whoever is on the peer's link, then the longest route, then whoever has a
    /// gateway.
    pub(super) fn route(&self, src: Option<IpAddr>, dst: IpAddr) -> Option<usize> {
        let devices = &self.config.devices;
        if let Some(src) = src {
            return devices
                .iter()
                .position(|d| d.addresses.iter().any(|c| c.addr == src));
        }
        let own = devices
            .iter()
            .position(|d| d.addresses.iter().any(|c| c.addr == dst));
        let on_link = || {
            devices
                .iter()
                .position(|d| d.addresses.iter().any(|c| contains(c, dst)))
        };
        let by_gateway = || {
            devices
                .iter()
                .position(|d| if dst.is_ipv4() { d.gateway } else { d.gateway6 })
        };
        let by_route = || {
            let longest = |d: &super::DeviceView| {
                d.routes
                    .iter()
                    .filter(|r| contains(r, dst))
                    .map(|r| r.prefix)
                    .max()
            };
            devices
                .iter()
                .enumerate()
                .filter_map(|(i, d)| Some((longest(d)?, std::cmp::Reverse(i))))
                .max()
                .map(|(_, i)| i.0)
        };
        own.or_else(on_link).or_else(by_route).or_else(by_gateway)
    }

    /// Takes turns among the workers that have a queue of the device.
    pub(super) fn worker_for(&mut self, device: usize) -> usize {
        let workers = &self.config.devices[device].workers;
        self.next_worker = self.next_worker.wrapping_add(1);
        workers
            .get(self.next_worker % workers.len().max(1))
            .copied()
            .unwrap_or(0)
    }

    pub(super) fn unlisten(&mut self, listener: CmListenerId) {
        if self.listeners.remove(listener).is_some() {
            self.requests.forget(listener);
            for w in 0..self.config.mailboxes.len() {
                self.command(w, Command::Unlisten { listener });
            }
        }
    }

    /// A port that no listener on these devices uses.
    pub(super) fn free_port(&self, devices: &[usize], local: Option<IpAddr>) -> Option<u16> {
        let start = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8) as u16;
        (0..28_000u16)
            .map(|i| 32_768 + (start.wrapping_add(i) % 28_000))
            .find(|p| !self.listeners.taken(devices, local, *p))
    }
}

fn contains(c: &crate::config::Cidr, addr: IpAddr) -> bool {
    siw_tcp::IpCidr::new(c.addr, c.prefix).contains(addr)
}

fn private(data: &[u8]) -> PrivateData {
    PrivateData::new(data).unwrap_or(PrivateData {
        len: 0,
        data: [0; 512],
    })
}

/// An address that is one, without the port when it names none.
pub(super) fn socket_addr(a: Addr) -> Option<SocketAddr> {
    a.to_socket_addr()
}
