//! Client requests for CM channels, connects and accepts. Listeners are in `addresses.rs`.

use std::os::fd::AsFd;

use nix::libc;
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;

use super::addresses::no_route;
use super::listening::WaitingRequest;
use super::outbox::Outbox;
use super::queues::CM_CHANNEL;
use super::requests::*;
use super::resources::{Client, ClientQp, QpPhase};
use super::{ControlThread, cm};
use crate::host_ports::PortClaim;
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId, Qpn};
use crate::worker::messages::{Command, ConnectParams};

/// Maximum number of retries of a refused connect that a client may request.
const MAX_REFUSALS: u8 = 16;

impl ControlThread {
    pub(super) fn create_cm_channel(&mut self, id: ClientId, seq: u32, flags: u64) -> Outcome {
        self.resources.charge(id, &CM_CHANNEL)?;
        let (ours, theirs) = match ControlSocket::new_pair() {
            Ok(ends) => ends,
            Err(error) => {
                self.resources.release(id, &CM_CHANNEL);
                return Err(Refusal::no_shared_memory(error));
            }
        };
        let client = self.resources.client_mut(id)?;
        let channel = CmChannelId(client.next_number());
        let reply = m::IdReply {
            id: channel.0,
            reserved: 0,
        };
        send_reply_with_fds::<m::CreateCmChannel>(client, seq, &reply, &[theirs.as_fd()])?;
        let token = self.resources.next_outbox_token(id, Some(channel));
        let client = self.resources.client_mut(id)?;
        let version = client.conn.agreed_version();
        let mut outbox = Outbox::new(ours, token, version, client.events_waiting.clone());
        outbox.flags = flags;
        client.cm_channels.insert(channel, outbox);
        Ok(Served::Replied)
    }

    pub(super) fn destroy_cm_channel(
        &mut self,
        id: ClientId,
        seq: u32,
        channel: CmChannelId,
    ) -> Outcome {
        let listeners = &self.resources.listeners;
        let is_user = |number: &CmListenerId| {
            let listener = listeners.get(*number);
            listener.is_some_and(|listener| listener.cm_channel == channel)
        };
        let users = listeners.of_client(id).filter(is_user).count();
        if users > 0 {
            return Err(Refusal::in_use("CM channel", users as u32));
        }
        let client = self.resources.client_mut(id)?;
        let outbox = client
            .cm_channels
            .remove(&channel)
            .ok_or_else(|| Refusal::no_such("CM channel", channel.0))?;
        let outcome = send_reply::<m::DestroyCmChannel>(client, seq, &EMPTY);
        self.resources.outboxes.remove(&outbox.epoll_token());
        self.resources.release(id, &CM_CHANNEL);
        outcome
    }

    pub(super) fn detached_qp(
        client: &mut Client,
        qpn: Qpn,
        cm_channel: CmChannelId,
    ) -> Result<&mut ClientQp, Refusal> {
        if !client.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::no_such("CM channel", cm_channel.0));
        }
        let qp = client
            .qps
            .get_mut(&qpn)
            .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
        if qp.phase != QpPhase::Detached {
            return Err(Refusal::new(
                libc::EISCONN,
                "the queue pair is or was connected; create a new one",
            ));
        }
        Ok(qp)
    }

    pub(super) fn connect_qp(&mut self, id: ClientId, seq: u32, request: &m::Connect) -> Outcome {
        let remote = cm::socket_addr(request.dst).ok_or_else(|| {
            Refusal::new(libc::EDESTADDRREQ, "the destination address is missing")
        })?;
        let local = cm::socket_addr(request.src).filter(|addr| !addr.ip().is_unspecified());
        let device = match self.narrow_device(request.device, &[request.src, request.dst])? {
            m::ANY_DEVICE => self
                .find_device(local.map(|addr| addr.ip()), remote.ip())
                .ok_or_else(|| no_route(remote.ip()))?,
            device => device as usize,
        };
        self.check_device(device)?;
        self.check_crc(&[device], request.params.crc)?;
        let worker = match local.filter(|addr| addr.port() != 0) {
            // The peer's segments arrive at the worker that owns this address pair.
            Some(local) => self.config.devices[device].steering.owner_of(local, remote),
            None => self.next_worker_of(device),
        };
        let (qpn, channel) = (Qpn(request.qp_num), CmChannelId(request.cm_channel));
        Self::detached_qp(self.resources.client_mut(id)?, qpn, channel)?;
        // A port that the stack selects is claimed already.
        let port_claim = match (&self.config.devices[device].host_ports, local) {
            (Some(ports), Some(local)) if local.port() != 0 => {
                ports.claim_port(local.port(), |ip| ip == local.ip())?
            }
            _ => PortClaim::default(),
        };
        self.resources.count_connection(id, qpn, port_claim)?;
        let client = self.resources.client_mut(id)?;
        let qp = Self::detached_qp(client, qpn, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.worker = worker;
        qp.device = device;
        qp.waits_for_receives = request.params.waits_for_receives != 0;
        qp.cookie = request.cookie;
        qp.cm_channel = Some(channel);
        let setup = Box::new(Self::worker_qp_setup(client, qpn)?);
        let depth = |depth: u32| u16::try_from(depth).unwrap_or(u16::MAX).min(0x3FFE);
        let params = Box::new(ConnectParams {
            device,
            local: local.map(|addr| addr.ip()),
            local_port: local.map(|addr| addr.port()).filter(|port| *port != 0),
            remote,
            to_itself: false,
            private_data: request.params.private_data.as_bytes().to_vec(),
            ird: depth(request.params.ird),
            ord: depth(request.params.ord),
            crc: (request.params.crc != m::BY_DEVICE).then_some(request.params.crc != 0),
            revision: (request.params.mpa_rev != m::BY_DEVICE).then_some(request.params.mpa_rev),
            timeout_ms: (request.timeout_ms != 0).then_some(request.timeout_ms),
            refusals: request.params.refusals.min(MAX_REFUSALS),
        });
        self.workers
            .post_command(worker, Command::Connect { setup, params });
        send_reply::<m::Connect>(self.resources.client_mut(id)?, seq, &EMPTY)
    }

    pub(super) fn take_request(
        &mut self,
        id: ClientId,
        number: ConnectRequestId,
    ) -> Result<WaitingRequest, Refusal> {
        let requests = &mut self.resources.requests;
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
        self.resources.listeners.count_answered(found.listener);
        Ok(found)
    }

    pub(super) fn accept_request(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::Accept,
    ) -> Outcome {
        let (qpn, number) = (Qpn(request.qp_num), ConnectRequestId(request.request));
        let waiting = self.resources.requests.get(number);
        let waiting = waiting.filter(|waiting| waiting.client == id);
        let channel = match request.cm_channel {
            0 => waiting.map_or(CmChannelId(0), |waiting| waiting.cm_channel),
            channel => CmChannelId(channel),
        };
        if waiting.is_some() {
            Self::detached_qp(self.resources.client_mut(id)?, qpn, channel)?;
            let listening =
                waiting.and_then(|waiting| self.resources.listeners.get(waiting.listener));
            let port_claim = listening.map_or_else(PortClaim::default, |listening| {
                PortClaim::share_all(&listening.port_claims)
            });
            self.resources.count_connection(id, qpn, port_claim)?;
        }
        let worker_request = self.take_request(id, number)?.request;
        let client = self.resources.client_mut(id)?;
        let qp = Self::detached_qp(client, qpn, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.worker = worker_request.worker();
        qp.waits_for_receives = request.params.waits_for_receives != 0;
        qp.cookie = request.cookie;
        qp.cm_channel = Some(channel);
        let setup = Box::new(Self::worker_qp_setup(client, qpn)?);
        // The application may post as soon as it has the reply, before the worker has the queue
        // pair.
        setup.sq.set_worker(worker_request.worker() as u32);
        let depth = |depth: u32| u16::try_from(depth).unwrap_or(u16::MAX).min(0x3FFE);
        self.workers.post_command(
            worker_request.worker(),
            Command::Accept {
                setup,
                request: worker_request,
                private_data: request.params.private_data.as_bytes().to_vec(),
                ird: depth(request.params.ird),
                ord: depth(request.params.ord),
            },
        );
        send_reply::<m::Accept>(self.resources.client_mut(id)?, seq, &EMPTY)
    }

    pub(super) fn reject_request(&mut self, id: ClientId, seq: u32, reject: &m::Reject) -> Outcome {
        let request = self
            .take_request(id, ConnectRequestId(reject.request))?
            .request;
        let private_data = reject.private_data.as_bytes().to_vec();
        let command = Command::Reject {
            request,
            private_data,
        };
        self.workers.post_command(request.worker(), command);
        send_reply::<m::Reject>(self.resources.client_mut(id)?, seq, &EMPTY)
    }

    pub(super) fn disconnect_qp(&mut self, id: ClientId, seq: u32, qpn: Qpn) -> Outcome {
        let client = self.resources.client_mut(id)?;
        let qp = client
            .qps
            .get(&qpn)
            .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
        if qp.phase == QpPhase::Detached {
            return Err(Refusal::new(
                libc::ENOTCONN,
                "the queue pair is not connected",
            ));
        }
        let command = Command::Disconnect { qpn };
        self.workers.post_command(qp.worker, command);
        send_reply::<m::Disconnect>(client, seq, &EMPTY)
    }
}
