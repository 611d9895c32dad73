//! Listeners, bindings, and connections of queue pairs through rdma_cm: requests of clients, and the
//! workers' reports about listeners.
//!
//! ```text
//! BIND -> binding --LISTEN--> listener --UNLISTEN--> gone
//!            |                   ^          (waiting requests may live on)
//!            '-UNLISTEN-> gone   '-- LISTEN without a binding
//! ```

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::libc;
use siw_host::ports::PortClaim;
use siw_shm::control::messages::{self as m, CM_OMIT_CANCELLATIONS, CM_REPORT_REMOVALS};
use siw_shm::control::{CmEventKind, CmEventMessage, ControlSocket, QpState, Text};
use siw_shm::device_identity::interface_index;

use super::listening::{
    ClientListener, ConnectRequests, Listeners, PortSpace, RequestMode, WaitingRequest,
    claim_amounts, port_in_use,
};
use super::pairing::{self, Pairing};
use super::services::Services;
use super::streaming;
use crate::control::account::quotas::{Quota, channel_amounts};
use crate::control::client::cm_events;
use crate::control::client::outbox::{self, Outbox};
use crate::control::context::Context;
use crate::control::device::devices::{
    LocalScope, is_link_local, is_on_network, no_route, socket_addr,
};
use crate::control::queues::datagrams::take_shared_datagrams;
use crate::control::queues::queue_pairs;
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply, send_reply_with_fds};
use crate::control::resources::{ClientResolution, QpPhase, Resources};
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId, Qpn, ResolutionId};
use crate::worker::messages::{
    Command, ConnectFailure, ConnectParams, RequestId, ResolutionFailure, ResolutionReport,
    ResolutionRequest,
};

/// Maximum number of retries of a refused connect that a client may request.
const MAX_REFUSALS: u8 = 16;
/// Maximum number of address resolutions in progress of one client, and quota amounts of one.
const MAX_RESOLUTIONS: usize = 4096;
const RESOLUTION: [(Quota, u64); 1] = [(Quota::Heap, 512)];
/// Maximum time of an address resolution.
const MAX_RESOLUTION_MS: u32 = 3_600_000;
/// Maximum backlog of a listener.
const MAX_BACKLOG: u32 = 4096;
/// Quota amounts of a channel of connection events.
const CM_CHANNEL: [(Quota, u64); 3] = channel_amounts(outbox::SOCKET_BYTES);

/// Listeners, connection requests, requests for datagram services, and the listener for pairs.
#[derive(Default)]
pub(in crate::control) struct Connections {
    pub listeners: Listeners,
    pub requests: ConnectRequests,
    pub services: Services,
    pub pairing: Pairing,
}

impl Connections {
    /// Connects a queue pair without rdma_cm, see [`m::PairQp`].
    pub fn pair_qp(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::PairQp,
    ) -> Outcome {
        self.pairing
            .pair_qp(context, &mut self.listeners, id, seq, request)
    }

    pub(in crate::control) fn destroy_cm_channel(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        channel: CmChannelId,
    ) -> Outcome {
        let listeners = &self.listeners;
        let is_user = |number: &CmListenerId| {
            let listener = listeners.get(*number);
            listener.is_some_and(|listener| listener.cm_channel == channel)
        };
        let users = listeners.of_client(id).filter(is_user).count();
        if users > 0 {
            return Err(Refusal::in_use("CM channel", users as u32));
        }
        let client = resources.client_mut(id)?;
        let outbox = client
            .cm_channels
            .remove(&channel)
            .ok_or_else(|| Refusal::no_such("CM channel", channel.0))?;
        let outcome = send_reply::<m::DestroyCmChannel>(client, seq, &EMPTY);
        resources.outboxes.remove(&outbox.epoll_token());
        outcome
    }

    pub(in crate::control) fn take_request(
        &mut self,
        id: ClientId,
        number: ConnectRequestId,
    ) -> Result<WaitingRequest, Refusal> {
        let requests = &mut self.requests;
        let is_ours = requests.get(number).is_some_and(|found| found.client == id);
        let found = if is_ours {
            requests.remove(number)
        } else {
            None
        };
        let found = found.ok_or_else(|| {
            Refusal::new(
                libc::ENOENT,
                format!("no connection request {number}: it was answered, or its peer gave up"),
            )
        })?;
        self.listeners.count_answered(found.listener);
        Ok(found)
    }

    pub(in crate::control) fn accept_request(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::Accept,
    ) -> Outcome {
        let (qpn, number) = (Qpn(request.qp_num), ConnectRequestId(request.request));
        let waiting = self.requests.get(number);
        let waiting = waiting.filter(|waiting| waiting.client == id);
        check_is_requested(waiting)?;
        let channel = match request.cm_channel {
            0 => waiting.map_or(CmChannelId(0), |waiting| waiting.cm_channel),
            channel => CmChannelId(channel),
        };
        if waiting.is_some() {
            context
                .resources
                .client_mut(id)?
                .detached_qp(qpn, channel)?;
            let listening = waiting.and_then(|waiting| self.listeners.get(waiting.listener));
            let port_claim = listening.map_or_else(PortClaim::default, |listening| {
                PortClaim::share_all(&listening.port_claims)
            });
            context.resources.count_connection(id, qpn, port_claim)?;
        }
        let WaitingRequest {
            request: worker_request,
            device,
            ..
        } = self.take_request(id, number)?;
        let client = context.resources.client_mut(id)?;
        let qp = client.detached_qp(qpn, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.end_is_recorded = false;
        qp.worker = worker_request.worker();
        qp.device = device;
        qp.waits_for_receives = request.params.waits_for_receives != 0;
        qp.cookie = request.cookie;
        qp.cm_channel = Some(channel);
        let setup = Box::new(client.worker_setup(qpn)?);
        // The application may post as soon as it has the reply, before the worker has the queue
        // pair.
        setup.sq.set_worker(worker_request.worker() as u32);
        let depth = |depth: u32| u16::try_from(depth).unwrap_or(u16::MAX).min(0x3FFE);
        context.workers.post_command(
            worker_request.worker(),
            Command::Accept {
                setup,
                request: worker_request,
                private_data: request.params.private_data.as_bytes().to_vec(),
                ird: depth(request.params.ird),
                ord: depth(request.params.ord),
            },
        );
        send_reply::<m::Accept>(context.resources.client_mut(id)?, seq, &EMPTY)
    }

    pub(in crate::control) fn reject_request(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        reject: &m::Reject,
    ) -> Outcome {
        let number = ConnectRequestId(reject.request);
        let waiting = self.requests.get(number);
        check_is_requested(waiting.filter(|waiting| waiting.client == id))?;
        let request = self.take_request(id, number)?.request;
        let private_data = reject.private_data.as_bytes().to_vec();
        let command = Command::Reject {
            request,
            private_data,
        };
        context.workers.post_command(request.worker(), command);
        send_reply::<m::Reject>(context.resources.client_mut(id)?, seq, &EMPTY)
    }

    /// Reserves an address and port, see [`m::Bind`].
    pub(in crate::control) fn bind_address(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::Bind,
    ) -> Outcome {
        if request.flags & !(m::BIND_REUSE | m::BIND_V6_ONLY | m::BIND_DATAGRAMS) != 0 {
            return Err(Refusal::new(libc::EINVAL, "bind: unknown flags"));
        }
        let space = match request.flags & m::BIND_DATAGRAMS {
            0 => PortSpace::Tcp,
            _ => PortSpace::Datagrams,
        };
        let v6_only = request.flags & m::BIND_V6_ONLY != 0;
        let scope = match socket_addr(request.addr).map(|addr| addr.ip()) {
            Some(ip) if !ip.is_unspecified() => LocalScope::One(ip),
            Some(IpAddr::V4(_)) => LocalScope::Ipv4,
            Some(IpAddr::V6(_)) if v6_only => LocalScope::Ipv6,
            _ => LocalScope::All,
        };
        let device = context
            .devices
            .narrow_device(request.device, &[request.addr])?;
        let devices = context.devices.devices_of(device, scope)?;
        let reuse = request.flags & m::BIND_REUSE != 0;
        let (listeners, asked) = (&self.listeners, request.addr.port);
        let (port, port_claims) = match space {
            PortSpace::Tcp => {
                listeners.choose_port(&context.devices, &devices, scope, asked, reuse)?
            }
            PortSpace::Datagrams => {
                let port = listeners.choose_service_port(&devices, scope, asked, reuse)?;
                (port, Vec::new())
            }
        };
        let amounts = claim_amounts(1, &port_claims);
        let charge = context.resources.charge(id, amounts)?;
        let binding = self.listeners.next_number();
        let bound = ClientListener {
            client: id,
            space,
            cm_channel: CmChannelId(0),
            cookie: 0,
            devices,
            on_every_device: device == m::ANY_DEVICE && !matches!(scope, LocalScope::One(_)),
            scope,
            port,
            reuse,
            listening: false,
            backlog: 0,
            mpa: m::MpaOptions::BY_DEVICE,
            is_streaming: false,
            waiting: 0,
            overflow_logged: false,
            port_claims,
            charges: vec![charge],
        };
        self.listeners.insert(binding, bound);
        let reply = m::ListenReply {
            listener: binding.0,
            reserved: 0,
            addr: m::Addr {
                port,
                ..request.addr
            },
        };
        send_reply::<m::Bind>(context.resources.client_mut(id)?, seq, &reply)
    }

    /// Listens at an address or on a binding, see [`m::Listen`].
    pub(in crate::control) fn start_listener(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::Listen,
    ) -> Outcome {
        check_options(&request.mpa)?;
        if request.flags & !m::LISTEN_STREAMING != 0 {
            return Err(Refusal::new(libc::EINVAL, "listen: unknown flags"));
        }
        let binding = CmListenerId(request.binding);
        let mut on_every_device = request.device == m::ANY_DEVICE;
        let mut space = PortSpace::Tcp;
        let (devices, scope, (port, port_claims)) = if request.binding == 0 {
            let addr = socket_addr(request.addr);
            let ip = addr.map(|addr| addr.ip()).filter(|ip| !ip.is_unspecified());
            let scope = ip.map_or(LocalScope::All, LocalScope::One);
            let device = context
                .devices
                .narrow_device(request.device, &[request.addr])?;
            let devices = context.devices.devices_of(device, scope)?;
            let asked = addr.map_or(request.addr.port, |addr| addr.port());
            let port =
                self.listeners
                    .choose_port(&context.devices, &devices, scope, asked, false)?;
            (devices, scope, port)
        } else {
            let listeners = &self.listeners;
            let bound = listeners.get(binding).filter(|bound| bound.client == id);
            let bound = bound.ok_or_else(|| Refusal::no_such("binding", binding.0))?;
            if bound.listening {
                return Err(Refusal::new(libc::EINVAL, "the binding listens already"));
            }
            space = bound.space;
            if space == PortSpace::Datagrams && request.flags & m::LISTEN_STREAMING != 0 {
                let why = "listen: datagram services have no streaming mode";
                return Err(Refusal::new(libc::EINVAL, why));
            }
            if listeners.has_listener(&bound.devices, bound.scope, (space, bound.port)) {
                return Err(port_in_use(bound.port));
            }
            on_every_device = bound.on_every_device;
            // The port claims of the binding pass to the listener.
            (bound.devices.clone(), bound.scope, (bound.port, Vec::new()))
        };
        context.devices.check_crc(&devices, request.mpa.crc)?;
        let client = context.resources.client_mut(id)?;
        let cm_channel = CmChannelId(request.cm_channel);
        if !client.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::no_such("CM channel", request.cm_channel));
        }
        let user = client.account.uid();
        let (listener, mut charges) = if request.binding == 0 {
            let amounts = claim_amounts(1, &port_claims);
            let charge = context.resources.charge(id, amounts)?;
            (self.listeners.next_number(), vec![charge])
        } else {
            (binding, Vec::new())
        };
        let backlog = request.backlog.clamp(1, MAX_BACKLOG);
        let mut bound = request.addr;
        if bound.family == 0 {
            bound.family = 4;
        }
        bound.port = port;
        let reuse = false;
        let mut port_claims = port_claims;
        if request.binding != 0
            && let Some(bound) = self.listeners.remove(binding)
        {
            (port_claims, charges) = (bound.port_claims, bound.charges);
        }
        let entry = ClientListener {
            client: id,
            space,
            cm_channel,
            cookie: request.cookie,
            devices,
            on_every_device: on_every_device && !matches!(scope, LocalScope::One(_)),
            scope,
            port,
            reuse,
            listening: true,
            backlog,
            mpa: request.mpa,
            is_streaming: request.flags & m::LISTEN_STREAMING != 0,
            waiting: 0,
            overflow_logged: false,
            port_claims,
            charges,
        };
        for &device in &entry.devices {
            match space {
                PortSpace::Tcp => entry.listen_on(context, listener, user, device),
                PortSpace::Datagrams => take_shared_datagrams(context, device),
            }
        }
        self.listeners.insert(listener, entry);
        let reply = m::ListenReply {
            listener: listener.0,
            reserved: 0,
            addr: bound,
        };
        send_reply::<m::Listen>(context.resources.client_mut(id)?, seq, &reply)
    }

    /// Moves events to another channel, see [`m::MigrateCm`].
    pub(in crate::control) fn migrate_events(
        &mut self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        request: &m::MigrateCm,
    ) -> Outcome {
        let channel = CmChannelId(request.cm_channel);
        let client = resources.client_mut(id)?;
        if !client.cm_channels.contains_key(&channel) {
            return Err(Refusal::no_such("CM channel", channel.0));
        }
        if request.qp_num != 0 {
            let qp = client.qps.get_mut(&Qpn(request.qp_num));
            qp.ok_or_else(|| Refusal::no_such("queue pair", request.qp_num))?
                .cm_channel = Some(channel);
        }
        if request.listener != 0 {
            let number = CmListenerId(request.listener);
            let found = self.listeners.get_mut(number);
            found
                .filter(|found| found.client == id)
                .ok_or_else(|| Refusal::no_such("listener", request.listener))?
                .cm_channel = channel;
        }
        if request.request != 0 {
            let number = ConnectRequestId(request.request);
            let found = self.requests.get_mut(number);
            found
                .filter(|found| found.client == id)
                .ok_or_else(|| Refusal::no_such("connection request", request.request))?
                .cm_channel = channel;
        }
        if request.search != 0 {
            self.services.migrate(id, request.search, channel);
        }
        send_reply::<m::MigrateCm>(resources.client_mut(id)?, seq, &EMPTY)
    }

    /// Ends a listener or a binding, see [`m::Unlisten`].
    pub(in crate::control) fn stop_listener(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::Unlisten,
    ) -> Outcome {
        let listener = CmListenerId(request.listener);
        let found = self.listeners.get(listener);
        if found.is_none_or(|found| found.client != id) {
            return Err(Refusal::no_such("listener", listener.0));
        }
        let keep_requests = request.flags & m::UNLISTEN_KEEP_REQUESTS != 0;
        drop(self.remove_listener(context, listener, keep_requests));
        send_reply::<m::Unlisten>(context.resources.client_mut(id)?, seq, &EMPTY)
    }

    /// Removes a listener or binding, and its pending requests unless `keep_requests`. Dropping the
    /// result returns the port to the kernel, and the charge.
    pub(in crate::control) fn remove_listener(
        &mut self,
        context: &mut Context,
        listener: CmListenerId,
        keep_requests: bool,
    ) -> Option<ClientListener> {
        let removed = self.listeners.remove(listener)?;
        if removed.space == PortSpace::Datagrams {
            if !keep_requests && removed.waiting > 0 {
                let of = (removed.client, listener);
                self.services
                    .forget_listener(context, &mut self.listeners, of);
            }
        } else if removed.listening {
            if !keep_requests && removed.waiting > 0 {
                let requests = &mut self.requests;
                requests.forget_listener(removed.client, listener);
            }
            context.workers.post_to_all(|| Command::Unlisten {
                listener,
                keep_requests,
            });
        }
        Some(removed)
    }

    /// Reports a connection request that ended before the application answered it.
    pub(in crate::control) fn on_request_gone(
        &mut self,
        resources: &mut Resources,
        request: RequestId,
        failure: &ConnectFailure,
    ) {
        self.pairing.forget_request(request);
        let Some((number, found)) = self.requests.remove_by_worker_request(request) else {
            return;
        };
        self.listeners.count_answered(found.listener);
        if found.mode != RequestMode::Requested {
            return streaming::report_end(resources, number, &found, failure);
        }
        let mut event = CmEventMessage::new(CmEventKind::RequestCancelled);
        event.cookie = found.cookie;
        event.listener = found.listener.0;
        event.request = number.0;
        let (client, channel) = (found.client, found.cm_channel);
        if !cm_events::has_channel_flag(resources, client, Some(channel), CM_OMIT_CANCELLATIONS) {
            resources.post_cm_event(client, Some(channel), &event);
        }
    }

    /// Passes a connection request to the application, which accepts or rejects it.
    pub(in crate::control) fn on_connect_request(
        &mut self,
        context: &mut Context,
        worker: usize,
        request: RequestId,
        listener: CmListenerId,
        event: CmEventMessage,
    ) {
        if self.pairing.is_listener(listener) {
            return self.pairing.on_pair_request(context, request, &event);
        }
        if self.requests.number_of(request).is_some() {
            return self.on_turned_request(&mut context.resources, request, event);
        }
        self.admit_request(
            context,
            worker,
            (request, RequestMode::Requested),
            listener,
            event,
        );
    }

    /// Gives a number to a connection of a peer, and passes it to the application of its listener.
    pub(super) fn admit_request(
        &mut self,
        context: &mut Context,
        worker: usize,
        (request, mode): (RequestId, RequestMode),
        listener: CmListenerId,
        mut event: CmEventMessage,
    ) {
        let listeners = &self.listeners;
        let clients = &context.resources.clients;
        // Requests are caused by peers: a client that does not read its events gets no more of
        // them, and a listener holds at most `backlog` of them.
        let found = listeners.get(listener).filter(|found| {
            let client = clients.get(&found.client);
            let reads = client.is_some_and(|client| !client.events_waiting.is_half_used());
            reads && found.waiting < found.backlog
        });
        let Some(found) = found else {
            self.listeners.log_overflow(listener);
            let private_data = Vec::new();
            return context.workers.post_command(
                worker,
                Command::Reject {
                    request,
                    private_data,
                },
            );
        };
        let (client, channel) = (found.client, found.cm_channel);
        event.cookie = found.cookie;
        let number = self.requests.next_number();
        event.request = number.0;
        event.listener = listener.0;
        let local = event.local.to_socket_addr().map(|addr| addr.ip());
        let device = local.and_then(|local| context.devices.find_device(Some(local), local));
        event.device = device.unwrap_or(0) as u32;
        let waiting = WaitingRequest {
            request,
            listener,
            client,
            cm_channel: channel,
            cookie: event.cookie,
            device: event.device as usize,
            mode,
        };
        self.requests.insert(number, waiting);
        self.listeners.count_waiting(listener);
        context
            .resources
            .post_cm_event(client, Some(channel), &event);
    }

    /// A worker cannot listen: tells the listener's client, as for a removed device, and ends the
    /// listener in the other workers. siwd's own listener is started again by the next request for it.
    pub(in crate::control) fn on_listen_failed(
        &mut self,
        context: &mut Context,
        number: CmListenerId,
        reason: &str,
    ) {
        tracing::error!(listener = number.0, "listening failed: {reason}");
        context.workers.post_to_all(|| Command::Unlisten {
            listener: number,
            keep_requests: true,
        });
        if let Some(listener) = self.listeners.get(number) {
            let mut event = CmEventMessage::new(CmEventKind::DeviceRemoval);
            event.cookie = listener.cookie;
            event.listener = number.0;
            event.device = listener.devices.first().map_or(0, |device| *device as u32);
            let (client, channel) = (listener.client, listener.cm_channel);
            context
                .resources
                .post_cm_event(client, Some(channel), &event);
        } else {
            self.pairing.forget_listener(number);
        }
    }

    /// Listens on a device that was added.
    pub(in crate::control) fn add_device(&mut self, context: &mut Context, device: usize) {
        self.pairing
            .add_device(context, &mut self.listeners, device);
        for (number, listener) in self.listeners.iter_mut() {
            if !listener.on_every_device {
                continue;
            }
            if listener.space == PortSpace::Datagrams {
                listener.devices.push(device);
                if listener.listening {
                    take_shared_datagrams(context, device);
                }
                continue;
            }
            let claims = context
                .devices
                .claim_against_kernel(&[device], listener.scope, listener.port)
                .map_err(Refusal::from)
                .and_then(|claims| {
                    let amounts = claim_amounts(0, &claims);
                    let charge = context.resources.charge(listener.client, amounts)?;
                    Ok((claims, charge))
                });
            match claims {
                Ok((claims, charge)) => {
                    listener.port_claims.extend(claims);
                    listener.charges.push(charge);
                }
                Err(error) => {
                    let why = error.reason();
                    tracing::warn!(device, listener = number.0, "does not listen here: {why}");
                    continue;
                }
            }
            listener.devices.push(device);
            let owner = context.resources.clients.get(&listener.client);
            if let Some(owner) = owner.filter(|_| listener.listening) {
                listener.listen_on(context, number, owner.account.uid(), device);
            }
        }
    }

    /// Reports the removal of a device to the channels that ask for it, and to the listeners that listen
    /// on no other device.
    pub(in crate::control) fn remove_device(&mut self, resources: &mut Resources, device: usize) {
        let on_it = |listener: &ClientListener| listener.devices == [device];
        let told: Vec<_> = self
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
        let mut event = CmEventMessage::new(CmEventKind::DeviceRemoval);
        event.device = device as u32;
        let channels = resources.clients.values().flat_map(|client| {
            let channels = client.cm_channels.iter();
            let asking = channels.filter(|(_, outbox)| outbox.flags & CM_REPORT_REMOVALS != 0);
            asking.map(|(channel, _)| (client.id, *channel))
        });
        let of_channels: Vec<_> = channels.collect();
        let of_channels = of_channels
            .into_iter()
            .map(|(client, channel)| (client, channel, event));
        for (client, channel, event) in told.into_iter().chain(of_channels) {
            resources.post_cm_event(client, Some(channel), &event);
        }
        for (_, listener) in self.listeners.iter_mut() {
            if listener.on_every_device {
                listener.devices.retain(|other| *other != device);
            }
        }
        self.services.remove_device(resources, device);
    }
}

pub(in crate::control) fn create_cm_channel(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    flags: u64,
) -> Outcome {
    let charge = resources.charge(id, CM_CHANNEL)?;
    let (ours, theirs) = ControlSocket::new_pair().map_err(Refusal::no_shared_memory)?;
    let client = resources.client_mut(id)?;
    let channel = CmChannelId(client.next_number());
    let reply = m::IdReply {
        id: channel.0,
        reserved: 0,
    };
    send_reply_with_fds::<m::CreateCmChannel>(client, seq, &reply, &[theirs.as_fd()])?;
    let token = resources.next_outbox_token(id, Some(channel));
    let client = resources.client_mut(id)?;
    let version = client.conn.agreed_version();
    let mut outbox = Outbox::new(ours, token, version, client.events_waiting.clone());
    outbox.flags = flags;
    client.cm_channels.insert(channel, charge.of(outbox));
    Ok(Served::Replied)
}

/// Device, source address if it is given, and destination of a connect.
pub(super) fn choose_route(
    context: &Context,
    device: u32,
    src: m::Addr,
    dst: m::Addr,
) -> Result<(usize, Option<SocketAddr>, SocketAddr), Refusal> {
    let remote = socket_addr(dst)
        .ok_or_else(|| Refusal::new(libc::EDESTADDRREQ, "the destination address is missing"))?;
    let local = socket_addr(src).filter(|addr| !addr.ip().is_unspecified());
    let device = match context.devices.narrow_device(device, &[src, dst])? {
        m::ANY_DEVICE => context
            .devices
            .find_device(local.map(|addr| addr.ip()), remote.ip())
            .ok_or_else(|| no_route(remote.ip()))?,
        device => device as usize,
    };
    context.devices.check_device(device)?;
    Ok((device, local, remote))
}

pub(in crate::control) fn connect_qp(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::Connect,
) -> Outcome {
    let (device, local, remote) = choose_route(context, request.device, request.src, request.dst)?;
    context.devices.check_crc(&[device], request.params.crc)?;
    let worker = match local.filter(|addr| addr.port() != 0) {
        // The peer's segments arrive at the worker that owns this address pair.
        Some(local) => context.devices.views[device]
            .steering
            .owner_of(local, remote),
        None => context.devices.next_worker_of(device),
    };
    let (qpn, channel) = (Qpn(request.qp_num), CmChannelId(request.cm_channel));
    context
        .resources
        .client_mut(id)?
        .detached_qp(qpn, channel)?;
    // A port that the stack selects is claimed already.
    let port_claim = match (&context.devices.views[device].host_ports, local) {
        (Some(ports), Some(local)) if local.port() != 0 => {
            ports.claim_port(local.port(), |ip| ip == local.ip())?
        }
        _ => PortClaim::default(),
    };
    context.resources.count_connection(id, qpn, port_claim)?;
    let client = context.resources.client_mut(id)?;
    let qp = client.detached_qp(qpn, channel)?;
    qp.phase = QpPhase::Connecting;
    qp.end_is_recorded = false;
    qp.worker = worker;
    qp.device = device;
    qp.peer = remote.into();
    qp.waits_for_receives = request.params.waits_for_receives != 0;
    qp.cookie = request.cookie;
    qp.cm_channel = Some(channel);
    let setup = Box::new(client.worker_setup(qpn)?);
    let params = Box::new(connect_params(request, device, local, remote));
    context
        .workers
        .post_command(worker, Command::Connect { setup, params });
    send_reply::<m::Connect>(context.resources.client_mut(id)?, seq, &EMPTY)
}

/// Parameters of a connect for the worker.
pub(super) fn connect_params(
    request: &m::Connect,
    device: usize,
    local: Option<SocketAddr>,
    remote: SocketAddr,
) -> ConnectParams {
    let depth = |depth: u32| u16::try_from(depth).unwrap_or(u16::MAX).min(0x3FFE);
    ConnectParams {
        device,
        local: local.map(|addr| addr.ip()),
        local_port: local.map(|addr| addr.port()).filter(|port| *port != 0),
        remote,
        mapped_port: None,
        drawn_port: None,
        asked_mapper: None,
        to_itself: false,
        private_data: request.params.private_data.as_bytes().to_vec(),
        ird: depth(request.params.ird),
        ord: depth(request.params.ord),
        crc: (request.params.crc != m::BY_DEVICE).then_some(request.params.crc != 0),
        revision: (request.params.mpa_rev != m::BY_DEVICE).then_some(request.params.mpa_rev),
        timeout_ms: (request.timeout_ms != 0).then_some(request.timeout_ms),
        refusals: request.params.refusals.min(MAX_REFUSALS),
        is_turned: request.stream != 0,
    }
}

/// Finds the device and the source address for a destination, see [`m::Resolve`].
pub(in crate::control) fn resolve_address(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::Resolve,
) -> Outcome {
    let dst = socket_addr(request.dst)
        .ok_or_else(|| Refusal::new(libc::EDESTADDRREQ, "the destination address is missing"))?;
    let src = socket_addr(request.src).map(|addr| addr.ip());
    let src = src.filter(|ip| !ip.is_unspecified());
    if src.is_some_and(|src| src.is_ipv4() != dst.is_ipv4()) {
        let why = "source and destination are of different address families";
        return Err(Refusal::new(libc::EINVAL, why));
    }
    let narrowed = context
        .devices
        .narrow_device(request.device, &[request.src, request.dst])?;
    let device = match narrowed {
        m::ANY_DEVICE => context
            .devices
            .find_device(src, dst.ip())
            .ok_or_else(|| match src {
                Some(src) => Refusal::new(libc::EADDRNOTAVAIL, format!("no device has {src}")),
                None => no_route(dst.ip()),
            })?,
        device => device as usize,
    };
    let view = context.devices.check_device(device)?;
    let same_family = || {
        let addresses = view.addresses.iter();
        addresses.filter(|cidr| cidr.addr.is_ipv4() == dst.is_ipv4())
    };
    // The address itself if it is the device's own, else one on the destination's network with
    // the longest prefix.
    let chosen = src.or_else(|| {
        same_family()
            .find(|cidr| cidr.addr == dst.ip())
            .or_else(|| {
                let near = same_family().filter(|cidr| is_on_network(cidr, dst.ip()));
                near.max_by_key(|cidr| cidr.prefix)
            })
            .or_else(|| same_family().next())
            .map(|cidr| cidr.addr)
    });
    let local = chosen.ok_or_else(|| no_route(dst.ip()))?;
    let is_checked = is_link_local(local) || narrowed != request.device;
    if is_checked && !view.addresses.iter().any(|cidr| cidr.addr == local) {
        let why = format!("device {} does not have {local}", view.name);
        return Err(Refusal::new(libc::EADDRNOTAVAIL, why));
    }
    // As the client names the interface, if it does.
    let mut named = [request.src.scope_id, request.dst.scope_id].into_iter();
    let scope_id = match is_link_local(local) {
        true => named.find(|number| *number != 0),
        false => Some(0),
    };
    let reply = m::ResolveReply {
        device: device as u32,
        reserved: 0,
        local: m::Addr {
            port: request.src.port,
            scope_id: scope_id.unwrap_or_else(|| interface_index(device as u32)),
            ..m::Addr::from(local)
        },
    };
    send_reply::<m::Resolve>(context.resources.client_mut(id)?, seq, &reply)
}

/// Resolves the neighbour of a destination, see [`m::StartResolution`].
pub(in crate::control) fn start_resolution(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::StartResolution,
) -> Outcome {
    let addresses = (socket_addr(request.src), socket_addr(request.dst));
    let (Some(local), Some(remote)) = addresses else {
        let why = "the source or the destination address is missing";
        return Err(Refusal::new(libc::EINVAL, why));
    };
    if local.is_ipv4() != remote.is_ipv4() {
        let why = "source and destination are of different address families";
        return Err(Refusal::new(libc::EINVAL, why));
    }
    let device = request.device as usize;
    let view = context.devices.check_device(device)?;
    if !view.addresses.iter().any(|cidr| cidr.addr == local.ip()) {
        let why = format!("device {} does not have {}", view.name, local.ip());
        return Err(Refusal::new(libc::EADDRNOTAVAIL, why));
    }
    let worker = match local.port() {
        0 => context.devices.next_worker_of(device),
        // The worker of the connection that is going to have this address pair.
        _ => view.steering.owner_of(local, remote),
    };
    let cm_channel = CmChannelId(request.cm_channel);
    let client = context.resources.client_mut(id)?;
    if !client.cm_channels.contains_key(&cm_channel) {
        return Err(Refusal::no_such("CM channel", cm_channel.0));
    }
    if client.resolutions.len() >= MAX_RESOLUTIONS {
        let why = format!("{MAX_RESOLUTIONS} address resolutions are in progress: wait for one");
        return Err(Refusal::new(libc::ENOBUFS, why));
    }
    let charge = context.resources.charge(id, RESOLUTION)?;
    let client = context.resources.client_mut(id)?;
    let resolution = ResolutionId(client.next_number());
    client.resolutions.insert(
        resolution,
        charge.of(ClientResolution {
            worker,
            device,
            cm_channel,
            cookie: request.cookie,
            peer: request.dst,
        }),
    );
    let command = ResolutionRequest {
        client: id,
        user: client.peer.uid,
        resolution,
        device,
        local,
        remote,
        timeout: Duration::from_millis(request.timeout_ms.min(MAX_RESOLUTION_MS).into()),
        report: ResolutionReport::ToClient,
    };
    let reply = m::IdReply {
        id: resolution.0,
        reserved: 0,
    };
    context
        .workers
        .post_command(worker, Command::Resolve(Box::new(command)));
    send_reply::<m::StartResolution>(context.resources.client_mut(id)?, seq, &reply)
}

/// Ends a resolution without an event, see [`m::EndResolution`].
pub(in crate::control) fn end_resolution(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    resolution: ResolutionId,
) -> Outcome {
    let client = context.resources.client_mut(id)?;
    if let Some(ended) = client.resolutions.remove(&resolution) {
        let client = id;
        let command = Command::EndResolution { client, resolution };
        context.workers.post_command(ended.worker, command);
    }
    send_reply::<m::EndResolution>(context.resources.client_mut(id)?, seq, &EMPTY)
}

/// Reports the end of a resolution to its client.
pub(in crate::control) fn on_resolved(
    resources: &mut Resources,
    id: ClientId,
    resolution: ResolutionId,
    outcome: &Result<SocketAddr, ResolutionFailure>,
) {
    let client = resources.clients.get_mut(&id);
    let Some(ended) = client.and_then(|client| client.resolutions.remove(&resolution)) else {
        return;
    };
    let mut event = match outcome {
        Ok(local) => {
            let mut event = CmEventMessage::new(CmEventKind::AddressResolved);
            event.local = (*local).into();
            event
        }
        Err(failure) => {
            let (errno, reason) = cm_events::describe_resolution_failure(failure);
            let mut event = CmEventMessage::new(CmEventKind::AddressError);
            event.errno = errno as u32;
            event.reason = Text::new(&reason);
            event
        }
    };
    event.cookie = ended.cookie;
    event.device = ended.device as u32;
    event.peer = ended.peer;
    resources.post_cm_event(id, Some(ended.cm_channel), &event);
}

pub(in crate::control) fn disconnect_qp(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::Disconnect,
) -> Outcome {
    let qpn = Qpn(request.qp_num);
    let client = context.resources.client_mut(id)?;
    let qp = client
        .qps
        .get(&qpn)
        .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
    if request.flags & !m::DISCONNECT_TO_ERROR != 0 {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("unknown flags {:#x} of a disconnect", request.flags),
        ));
    }
    if qp.phase == QpPhase::Detached {
        return Err(Refusal::new(
            libc::ENOTCONN,
            "the queue pair is not connected",
        ));
    }
    let to_error = request.flags & m::DISCONNECT_TO_ERROR != 0;
    let command = Command::Disconnect { qpn, to_error };
    context.workers.post_command(qp.worker, command);
    send_reply::<m::Disconnect>(client, seq, &EMPTY)
}

impl Connections {
    /// Logs a connection request that was refused without its application.
    pub(in crate::control) fn log_refused_request(
        &self,
        resources: &Resources,
        listener: CmListenerId,
        (local, remote): (SocketAddr, SocketAddr),
        reason: &str,
    ) {
        let listener = self.listeners.get(listener);
        let client = listener.and_then(|listener| resources.clients.get(&listener.client));
        let pid = client.map(|client| client.peer.pid);
        tracing::info!(pid, %local, %remote, "connection request refused: {reason}");
    }
}

/// Reports a failed connect or accept; the queue pair may try again, unless it was moved to ERROR
/// meanwhile or its worker is about to release it. `is_kept`: see [`Event::ConnectFailed`].
pub(in crate::control) fn on_connect_failed(
    context: &mut Context,
    qpn: Qpn,
    failure: ConnectFailure,
    is_kept: bool,
) {
    let Some(id) = context.resources.owner_of_qp(qpn) else {
        return;
    };
    let Some(qp) = context.resources.qp_mut(id, qpn) else {
        return;
    };
    // The failure and the move to ERROR have crossed.
    let is_in_error = !is_kept && qp.state == QpState::Error;
    if is_kept {
        qp.state = QpState::Error;
        qp.pair = None;
    }
    if qp.phase == QpPhase::Connecting {
        qp.phase = if is_kept {
            QpPhase::Attached
        } else {
            QpPhase::Detached
        };
        if !is_kept {
            qp.state = QpState::Idle;
        }
    }
    // It is charged again if it tries again.
    qp.connection = None;
    if pairing::on_pair_failed(context, id, qpn, &failure) {
        return;
    }
    let Some(qp) = context.resources.qp_mut(id, qpn) else {
        return;
    };
    let event = cm_events::failure_event(qpn, qp.cookie, &failure);
    let channel = qp.cm_channel;
    context.record_end(qpn, false, Some(&event.reason.to_text()));
    context.resources.post_cm_event(id, channel, &event);
    let qp = context.resources.qp_mut(id, qpn);
    if is_in_error && qp.is_some_and(|qp| qp.phase == QpPhase::Detached) {
        // The queue pair exists.
        let _ = queue_pairs::install_in_error(context, id, qpn);
    }
}

/// Refuses an answer to a connection whose peer has not sent its MPA request.
fn check_is_requested(waiting: Option<WaitingRequest>) -> Result<(), Refusal> {
    match waiting.map(|waiting| waiting.mode) {
        None | Some(RequestMode::Requested) => Ok(()),
        Some(_) => Err(Refusal::new(
            libc::EINVAL,
            "the connection is in streaming mode, or awaits the MPA request of its peer",
        )),
    }
}

/// Refuses undefined option values; the refusal lists the allowed ones.
fn check_options(options: &m::MpaOptions) -> Result<(), Refusal> {
    let bad = |what: &str, allowed: &str| {
        Err(Refusal::new(
            libc::EINVAL,
            format!(
                "listen: {what} is undefined; allowed are {allowed}, or 255 for the device's setting"
            ),
        ))
    };
    match options {
        _ if !matches!(options.crc, 0 | 1 | m::BY_DEVICE) => bad("this CRC", "0 and 1"),
        _ if !matches!(options.mpa_rev, 1 | 2 | m::BY_DEVICE) => {
            bad("this MPA revision", "1 and 2")
        }
        _ if !matches!(options.markers, 0..=2 | m::BY_DEVICE) => {
            bad("this marker policy", "0 to 2")
        }
        _ if !matches!(options.rtr, 0..=7 | m::BY_DEVICE) => bad("this set of RTR kinds", "0 to 7"),
        _ if !matches!(options.terminate, 0 | 1 | m::BY_DEVICE) => {
            bad("this Terminate order", "0 and 1")
        }
        _ if !matches!(options.out_of_order, 0..=2 | m::BY_DEVICE) => {
            bad("this placement", "0 to 2")
        }
        _ if !matches!(options.private_data, 0..=512 | u16::MAX) => Err(Refusal::new(
            libc::EINVAL,
            "listen: at most 512 bytes of private data, or 65535 for the device's limit",
        )),
        _ => Ok(()),
    }
}
