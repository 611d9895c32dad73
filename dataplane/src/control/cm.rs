//! Connection management: converts connection reports of workers into CM events, and selects a
//! worker for connects.

use std::net::SocketAddr;

use nix::libc;
use siw_iwarp::NegotiatedParameters;
use siw_shm::control::messages::KIND_CM_EVENT;
use siw_shm::control::messages::{CM_HOLD_DISCONNECTS, CM_OMIT_CANCELLATIONS};
use siw_shm::control::{Addr, CmEventKind, CmEventMessage, PrivateData, QpState, Text, codec};

use super::ControlThread;
use super::listening::WaitingRequest;
use super::quotas::Quota;
use super::resources::QpPhase;
use crate::ids::{ClientId, CmChannelId, CmListenerId, Qpn};
use crate::worker::messages::{Command, ConnectFailure, DisconnectReason, RequestId};

impl ControlThread {
    /// Reports a connection request that ended before the application answered it.
    pub(super) fn on_request_gone(&mut self, request: RequestId) {
        self.pairing.forget_request(request);
        let resources = &mut self.resources;
        let Some((number, found)) = resources.requests.remove_by_worker_request(request) else {
            return;
        };
        resources.listeners.count_answered(found.listener);
        let mut event = CmEventMessage::new(CmEventKind::RequestCancelled);
        event.cookie = found.cookie;
        event.listener = found.listener.0;
        event.request = number.0;
        let (client, channel) = (found.client, found.cm_channel);
        if !self.has_channel_flag(client, Some(channel), CM_OMIT_CANCELLATIONS) {
            self.post_cm_event(client, Some(channel), &event);
        }
    }

    fn has_channel_flag(&self, id: ClientId, channel: Option<CmChannelId>, flag: u64) -> bool {
        let client = self.resources.clients.get(&id);
        let outbox = channel.and_then(|channel| client?.cm_channels.get(&channel));
        outbox.is_some_and(|outbox| outbox.flags & flag != 0)
    }

    /// Reports an established connection of a queue pair.
    pub(super) fn on_established(
        &mut self,
        qpn: Qpn,
        negotiated: &NegotiatedParameters,
        private_data: &[u8],
        (local, remote): (SocketAddr, SocketAddr),
    ) {
        let Some(id) = self.resources.owner_of_qp(qpn) else {
            return;
        };
        let Some(qp) = self.resources.qp_mut(id, qpn) else {
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
        event.private_data = to_private_data(private_data);
        let channel = qp.cm_channel;
        self.post_cm_event(id, channel, &event);
    }

    /// Handles the end of a queue pair's connection; without a reason it was an orderly close. If its
    /// client has completions to poll, the report may be held until
    /// [`on_completions_polled`](Self::on_completions_polled).
    pub(super) fn on_disconnected(
        &mut self,
        qpn: Qpn,
        reason: Option<DisconnectReason>,
        has_unpolled: bool,
    ) {
        let Some(id) = self.resources.owner_of_qp(qpn) else {
            return;
        };
        let Some(qp) = self.resources.qp_mut(id, qpn) else {
            return;
        };
        if qp.pair.is_some() {
            // Its client learns of it with its next work request.
            return log_end_of_pair(qpn, qp.peer, reason);
        }
        qp.state = QpState::Error;
        qp.held_disconnect = Some(reason);
        let channel = qp.cm_channel;
        if !has_unpolled || !self.has_channel_flag(id, channel, CM_HOLD_DISCONNECTS) {
            self.on_completions_polled(qpn);
        }
    }

    /// Reports the end of a queue pair's connection that was held, if one was.
    pub(super) fn on_completions_polled(&mut self, qpn: Qpn) {
        let Some(id) = self.resources.owner_of_qp(qpn) else {
            return;
        };
        let Some(qp) = self.resources.qp_mut(id, qpn) else {
            return;
        };
        let Some(reason) = qp.held_disconnect.take() else {
            return;
        };
        let mut event = CmEventMessage::new(CmEventKind::Disconnected);
        event.cookie = qp.cookie;
        event.qp_num = qpn.0;
        event.device = qp.device as u32;
        event.local = qp.local;
        event.peer = qp.peer;
        if let Some(reason) = reason {
            let (errno, text) = describe_disconnect(&reason);
            event.errno = errno as u32;
            event.reason = Text::new(&text);
        }
        let channel = qp.cm_channel;
        self.post_cm_event(id, channel, &event);
    }

    /// Passes a connection request to the application, which accepts or rejects it.
    pub(super) fn on_connect_request(
        &mut self,
        worker: usize,
        request: RequestId,
        listener: CmListenerId,
        mut event: CmEventMessage,
    ) {
        if self.pairing.is_listener(listener) {
            return self.on_pair_request(request, &event);
        }
        let listeners = &self.resources.listeners;
        let clients = &self.resources.clients;
        // Requests are caused by peers: a client that does not read its events gets no more of
        // them, and a listener holds at most `backlog` of them.
        let found = listeners.get(listener).filter(|found| {
            let client = clients.get(&found.client);
            let reads = client.is_some_and(|client| !client.events_waiting.is_half_used());
            reads && found.waiting < found.backlog
        });
        let Some(found) = found else {
            self.resources.listeners.log_overflow(listener);
            let private_data = Vec::new();
            return self.workers.post_command(
                worker,
                Command::Reject {
                    request,
                    private_data,
                },
            );
        };
        let (client, channel) = (found.client, found.cm_channel);
        event.cookie = found.cookie;
        let number = self.resources.next_request_id();
        event.request = number.0;
        event.listener = listener.0;
        let local = event.local.to_socket_addr().map(|addr| addr.ip());
        event.device = self
            .config
            .devices
            .iter()
            .position(|device| device.addresses.iter().any(|cidr| Some(cidr.addr) == local))
            .unwrap_or(0) as u32;
        let waiting = WaitingRequest {
            request,
            listener,
            client,
            cm_channel: channel,
            cookie: event.cookie,
        };
        self.resources.requests.insert(number, waiting);
        self.resources.listeners.count_waiting(listener);
        self.post_cm_event(client, Some(channel), &event);
    }

    /// Reports a failed connect or accept; the queue pair may try again.
    pub(super) fn on_connect_failed(&mut self, qpn: Qpn, failure: ConnectFailure) {
        let Some(id) = self.resources.owner_of_qp(qpn) else {
            return;
        };
        let Some(qp) = self.resources.qp_mut(id, qpn) else {
            return;
        };
        qp.phase = QpPhase::Detached;
        qp.state = QpState::Idle;
        self.resources.forget_connection(id, qpn);
        if self.on_pair_failed(id, qpn, &failure) {
            return;
        }
        let Some(qp) = self.resources.qp_mut(id, qpn) else {
            return;
        };
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
            ConnectFailure::OverQuota(why) => {
                (CmEventKind::ConnectError, libc::ENOBUFS, why.clone())
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

    /// Reports the removal of a device to the listeners that listen on no other device.
    pub(super) fn post_removal_to_listeners(&mut self, device: usize) {
        let on_it = |listener: &super::listening::ClientListener| listener.devices == [device];
        let told: Vec<_> = self
            .resources
            .listeners
            .iter()
            .filter(|(_, listener)| on_it(listener))
            .map(|(number, listener)| {
                let mut event = CmEventMessage::new(CmEventKind::DeviceRemoval);
                event.cookie = listener.cookie;
                event.listener = number.0;
                event.device = device as u32;
                (listener.client, listener.cm_channel, event)
            })
            .collect();
        for (client, channel, event) in told {
            self.post_cm_event(client, Some(channel), &event);
        }
    }

    /// A worker cannot listen: tells the listener's client, as for a removed device, and ends the
    /// listener in the other workers. siwd's own listener is started again by the next request for it.
    pub(super) fn on_listen_failed(&mut self, number: CmListenerId, reason: &str) {
        tracing::error!(listener = number.0, "listening failed: {reason}");
        self.workers.post_to_all(|| Command::Unlisten {
            listener: number,
            keep_requests: true,
        });
        if let Some(listener) = self.resources.listeners.get(number) {
            let mut event = CmEventMessage::new(CmEventKind::DeviceRemoval);
            event.cookie = listener.cookie;
            event.listener = number.0;
            event.device = listener.devices.first().map_or(0, |device| *device as u32);
            let (client, channel) = (listener.client, listener.cm_channel);
            self.post_cm_event(client, Some(channel), &event);
        } else {
            self.forget_pairing_listener(number);
        }
    }

    fn post_cm_event(
        &mut self,
        id: ClientId,
        channel: Option<CmChannelId>,
        event: &CmEventMessage,
    ) {
        let may_wait = self.resources.may_queue_events(id);
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let Some(outbox) = channel.and_then(|channel| client.cm_channels.get_mut(&channel)) else {
            return;
        };
        let packet = codec::encode_event(KIND_CM_EVENT, event);
        // A network failure can end all connections at once, with one event each.
        let connections = client.account.amount(Quota::Connections) as usize;
        let has_room = outbox.send_event(&self.epoll, packet, connections, may_wait);
        self.resources.settle_account(id);
        // Cancelled requests are caused by peers; the client learns of the cancellation when it
        // accepts.
        if !has_room && event.kind != CmEventKind::RequestCancelled as u32 {
            // The client makes connections without reading their events.
            let limit = self.config.limits.events_per_client;
            let why = format!(
                "the client does not read its queued events, at most {limit}: see [limits] events_per_client and memory_per_client"
            );
            self.close_faulty_client(id, &why);
        }
    }

    /// Selects the next worker of the device in round-robin order.
    pub(super) fn next_worker_of(&mut self, device: usize) -> usize {
        let workers = &self.config.devices[device].workers;
        self.next_worker = self.next_worker.wrapping_add(1);
        workers
            .get(self.next_worker % workers.len().max(1))
            .copied()
            .unwrap_or(0)
    }
}

/// Errno and text for an abnormal end of a connection.
fn describe_disconnect(reason: &DisconnectReason) -> (i32, String) {
    match reason {
        DisconnectReason::Reset => (libc::ECONNRESET, "the peer reset the connection".to_owned()),
        DisconnectReason::TimedOut => (libc::ETIMEDOUT, "the peer stopped answering".to_owned()),
        DisconnectReason::TerminateReceived(code) => {
            (libc::EREMOTEIO, format!("the peer sent Terminate: {code}"))
        }
        DisconnectReason::TerminateSent(code) => {
            (libc::EPROTO, format!("ended by this side: {code}"))
        }
    }
}

fn log_end_of_pair(qpn: Qpn, peer: Addr, reason: Option<DisconnectReason>) {
    let why = reason.map_or("closed by the peer".to_owned(), |reason| {
        describe_disconnect(&reason).1
    });
    let peer = peer.to_socket_addr().map(|addr| addr.ip());
    tracing::info!(%qpn, ?peer, "the connection of a queue pair ended: {why}");
}

pub(super) fn to_private_data(data: &[u8]) -> PrivateData {
    PrivateData::new(data).unwrap_or(PrivateData {
        len: 0,
        data: [0; 512],
    })
}

/// Converts an address of a message; `None` if its family is absent or unknown. Connections do not
/// have the interface of a link-local address: it selects the device.
pub(super) fn socket_addr(addr: Addr) -> Option<SocketAddr> {
    let without_interface = Addr {
        scope_id: 0,
        ..addr
    };
    without_interface.to_socket_addr()
}
