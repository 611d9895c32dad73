//! Connection management: what workers report becomes CM and asynchronous events, and
//! requests to connect find a device and a worker.

use std::net::{IpAddr, SocketAddr};

use nix::libc;
use siw_shm::control::messages::KIND_CM_EVENT;
use siw_shm::control::{
    Addr, AsyncEventKind, CmEventKind, CmEventMessage, PrivateData, QpState, Text, codec,
};

use super::ControlThread;
use super::resources::QpPhase;
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId, Qpn};
use crate::worker::messages::{Command, ConnectFailure, DisconnectReason, Event, RequestId};

impl ControlThread {
    pub(super) fn on_worker_event(&mut self, worker: usize, event: Event) {
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
                let mut event = CmEventMessage::new(CmEventKind::ConnectRequest);
                // What the initiator can hold bounds our ORD, what it wants our IRD.
                event.ord = peer_ird.map_or(0, u32::from);
                event.ird = peer_ord.map_or(0, u32::from);
                event.local = local.into();
                event.peer = remote.into();
                event.private_data = to_private_data(&private_data);
                self.on_connect_request(worker, request, listener, event);
            }
            Event::RequestGone { request, listener } => {
                let Some(number) = self.requests.remove_by_worker_request(request) else {
                    return;
                };
                let Some(found) = self.listeners.get(listener) else {
                    return;
                };
                let mut event = CmEventMessage::new(CmEventKind::RequestCancelled);
                event.cookie = found.cookie;
                event.listener = listener.0;
                event.request = number.0;
                let (client, channel) = (found.client, found.cm_channel);
                self.post_cm_event(client, Some(channel), &event);
            }
            Event::Established {
                qpn,
                negotiated,
                private_data,
                local,
                remote,
            } => {
                let Some(id) = self.owner_of_qp(qpn) else {
                    return;
                };
                let Some(qp) = self.qp_mut(id, qpn) else {
                    return;
                };
                qp.phase = QpPhase::Attached;
                qp.state = QpState::Rts;
                qp.ird = negotiated.ird;
                qp.ord = negotiated.ord;
                qp.local = local.into();
                qp.peer = remote.into();
                let mut event = CmEventMessage::new(CmEventKind::Established);
                event.cookie = qp.cookie;
                event.qp_num = qpn.0;
                event.worker = qp.worker as u32;
                event.device = qp.device as u32;
                event.ird = negotiated.ird.into();
                event.ord = negotiated.ord.into();
                event.crc = negotiated.crc.into();
                event.mpa_rev = negotiated.revision;
                event.local = local.into();
                event.peer = remote.into();
                event.private_data = to_private_data(&private_data);
                let channel = qp.cm_channel;
                self.post_cm_event(id, channel, &event);
            }
            Event::ConnectFailed { qpn, failure } => self.on_connect_failed(qpn, failure),
            Event::Disconnected { qpn, failure } => {
                let Some(id) = self.owner_of_qp(qpn) else {
                    return;
                };
                let Some(qp) = self.qp_mut(id, qpn) else {
                    return;
                };
                qp.state = QpState::Error;
                let mut event = CmEventMessage::new(CmEventKind::Disconnected);
                event.cookie = qp.cookie;
                event.qp_num = qpn.0;
                event.device = qp.device as u32;
                event.local = qp.local;
                event.peer = qp.peer;
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
                    event.errno = errno as u32;
                    event.reason = Text::new(&reason);
                }
                let channel = qp.cm_channel;
                self.post_cm_event(id, channel, &event);
            }
            Event::QpDestroyed { qpn } => self.finish_destroy_qp(qpn),
            Event::QpInfo { qpn, token, info } => self.on_qp_info(qpn, token, &info),
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
                self.post_async_event(client, kind, qpn.0, why);
            }
            Event::CqOverflow { client, cq } => {
                let why = "the completion queue overflowed: make it deeper or poll it sooner";
                self.post_async_event(client, AsyncEventKind::CqErr, cq.0, why);
            }
            Event::SrqLimit { client, srq } => self.srq_limit(client, srq),
            Event::LastWqe { client, qpn } => {
                let why = "nothing more is taken from the shared receive queue";
                self.post_async_event(client, AsyncEventKind::QpLastWqeReached, qpn.0, why);
            }
            Event::BadRequest {
                client,
                qpn,
                reason,
            } => {
                let why = format!("work request refused: {reason}");
                self.post_async_event(client, AsyncEventKind::QpFatal, qpn.0, &why);
            }
            Event::ClientFault { client, qpn } => {
                let why = format!("queue pair {qpn}: ring indices are impossible");
                self.close_faulty_client(client, &why);
            }
            Event::ListenFailed { listener, reason } => {
                tracing::warn!(listener = listener.0, "listening failed: {reason}");
            }
            Event::Stats {
                worker,
                token,
                stats,
            } => self.on_worker_stats(worker, token, *stats),
            Event::BarrierReached { .. } | Event::Stopped { .. } => {}
        }
    }

    fn on_connect_request(
        &mut self,
        worker: usize,
        request: RequestId,
        listener: CmListenerId,
        mut event: CmEventMessage,
    ) {
        let Some(found) = self.listeners.get(listener) else {
            let private_data = Vec::new();
            return self.post_command(
                worker,
                Command::Reject {
                    request,
                    private_data,
                },
            );
        };
        self.last_request = self.last_request.wrapping_add(1).max(1);
        event.request = self.last_request;
        event.cookie = found.cookie;
        event.listener = listener.0;
        let local = event.local.to_socket_addr().map(|addr| addr.ip());
        event.device = self
            .config
            .devices
            .iter()
            .position(|device| device.addresses.iter().any(|cidr| Some(cidr.addr) == local))
            .unwrap_or(0) as u32;
        let (client, channel) = (found.client, found.cm_channel);
        self.requests
            .insert(ConnectRequestId(event.request), request, listener);
        self.post_cm_event(client, Some(channel), &event);
    }

    fn on_connect_failed(&mut self, qpn: Qpn, failure: ConnectFailure) {
        let Some(id) = self.owner_of_qp(qpn) else {
            return;
        };
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
        let mut event = CmEventMessage::new(kind);
        event.cookie = qp.cookie;
        event.qp_num = qpn.0;
        event.errno = errno as u32;
        event.reason = Text::new(&reason);
        if let ConnectFailure::Rejected(data) = &failure {
            event.private_data = to_private_data(data);
        }
        let channel = qp.cm_channel;
        self.post_cm_event(id, channel, &event);
    }

    fn post_cm_event(
        &mut self,
        client: ClientId,
        channel: Option<CmChannelId>,
        event: &CmEventMessage,
    ) {
        let Some(client) = self.clients.get_mut(&client) else {
            return;
        };
        if let Some(outbox) = channel.and_then(|channel| client.cm_channels.get_mut(&channel)) {
            outbox.send_event(&self.epoll, codec::encode_event(KIND_CM_EVENT, event));
        }
    }

    /// The device through which a peer is reached: its own address turns the connection
    /// round, then whoever is on the peer's link, then the longest route, then whoever has a
    /// gateway.
    pub(super) fn find_device(&self, src: Option<IpAddr>, dst: IpAddr) -> Option<usize> {
        let devices = &self.config.devices;
        if let Some(src) = src {
            return devices
                .iter()
                .position(|device| device.addresses.iter().any(|cidr| cidr.addr == src));
        }
        let own = devices
            .iter()
            .position(|device| device.addresses.iter().any(|cidr| cidr.addr == dst));
        let on_link = || {
            devices
                .iter()
                .position(|device| device.addresses.iter().any(|cidr| is_on_network(cidr, dst)))
        };
        let by_gateway = || {
            devices.iter().position(|device| {
                if dst.is_ipv4() {
                    device.gateway
                } else {
                    device.gateway6
                }
            })
        };
        let by_route = || {
            let longest = |device: &super::DeviceView| {
                device
                    .routes
                    .iter()
                    .filter(|route| is_on_network(route, dst))
                    .map(|route| route.prefix)
                    .max()
            };
            devices
                .iter()
                .enumerate()
                .filter_map(|(index, device)| Some((longest(device)?, std::cmp::Reverse(index))))
                .max()
                .map(|(_, index)| index.0)
        };
        own.or_else(on_link).or_else(by_route).or_else(by_gateway)
    }

    /// Takes turns among the workers that have a queue of the device.
    pub(super) fn next_worker_of(&mut self, device: usize) -> usize {
        let workers = &self.config.devices[device].workers;
        self.next_worker = self.next_worker.wrapping_add(1);
        workers
            .get(self.next_worker % workers.len().max(1))
            .copied()
            .unwrap_or(0)
    }

    pub(super) fn remove_listener(&mut self, listener: CmListenerId) {
        if self.listeners.remove(listener).is_some() {
            self.requests.forget_listener(listener);
            for worker in 0..self.config.mailboxes.len() {
                self.post_command(worker, Command::Unlisten { listener });
            }
        }
    }

    /// A port that no listener on these devices uses.
    pub(super) fn find_free_port(&self, devices: &[usize], local: Option<IpAddr>) -> Option<u16> {
        let start = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8) as u16;
        (0..28_000u16)
            .map(|index| 32_768 + (start.wrapping_add(index) % 28_000))
            .find(|port| !self.listeners.is_port_taken(devices, local, *port))
    }
}

fn is_on_network(cidr: &crate::config::Cidr, addr: IpAddr) -> bool {
    siw_tcp::IpCidr::new(cidr.addr, cidr.prefix).contains(addr)
}

fn to_private_data(data: &[u8]) -> PrivateData {
    PrivateData::new(data).unwrap_or(PrivateData {
        len: 0,
        data: [0; 512],
    })
}

/// An address that is one, without the port when it names none.
pub(super) fn socket_addr(addr: Addr) -> Option<SocketAddr> {
    addr.to_socket_addr()
}
