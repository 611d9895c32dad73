//! CM channels, connects, listeners, accepts: requests of clients.

use std::os::fd::AsFd;

use nix::libc;
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;

use super::listening::ClientListener;
use super::outbox::Outbox;
use super::queues::CHANNEL;
use super::quotas::Quota;
use super::requests::*;
use super::resources::{Client, ClientQp, QpPhase};
use super::{ControlThread, cm};
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId, Qpn};
use crate::worker::messages::{Command, ConnectParams, RequestId};

impl ControlThread {
    pub(super) fn create_cm_channel(&mut self, id: ClientId, seq: u32) -> Outcome {
        self.resources.charge(id, &CHANNEL)?;
        let (ours, theirs) = match ControlSocket::new_pair() {
            Ok(ends) => ends,
            Err(error) => {
                self.resources.release(id, &CHANNEL);
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
        let outbox = Outbox::new(ours, token, version, client.events_waiting.clone());
        client.cm_channels.insert(channel, outbox);
        Ok(Served::Replied)
    }

    pub(super) fn destroy_cm_channel(
        &mut self,
        id: ClientId,
        seq: u32,
        channel: CmChannelId,
    ) -> Outcome {
        let is_user =
            |listener: &ClientListener| listener.client == id && listener.cm_channel == channel;
        let listeners = self.resources.listeners.iter();
        let users = listeners.filter(|(_, listener)| is_user(listener)).count();
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
        self.resources.release(id, &CHANNEL);
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
        let device = match request.device {
            m::ANY_DEVICE => self
                .find_device(local.map(|addr| addr.ip()), remote.ip())
                .ok_or_else(|| {
                    Refusal::new(
                        libc::EHOSTUNREACH,
                        format!(
                            "no device reaches {}: not on a device's network, and no gateway",
                            remote.ip()
                        ),
                    )
                })?,
            device => device as usize,
        };
        if device >= self.config.devices.len() {
            return Err(Refusal::new(libc::ENODEV, format!("no device {device}")));
        }
        self.check_crc(&[device], request.params.crc)?;
        let worker = match local.filter(|addr| addr.port() != 0) {
            // Its answers come to the worker that the addresses name.
            Some(local) => self.config.devices[device].steering.owner_of(local, remote),
            None => self.next_worker_of(device),
        };
        let (qpn, channel) = (Qpn(request.qp_num), CmChannelId(request.cm_channel));
        Self::detached_qp(self.resources.client_mut(id)?, qpn, channel)?;
        self.resources.count_connection(id, qpn)?;
        let client = self.resources.client_mut(id)?;
        let qp = Self::detached_qp(client, qpn, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.worker = worker;
        qp.device = device;
        qp.cookie = request.cookie;
        qp.cm_channel = Some(channel);
        let setup = Box::new(Self::worker_qp_setup(client, qpn)?);
        let depth = |depth: u32| u16::try_from(depth).unwrap_or(u16::MAX).min(0x3FFE);
        let params = Box::new(ConnectParams {
            device,
            local: local.map(|addr| addr.ip()),
            local_port: local.map(|addr| addr.port()).filter(|port| *port != 0),
            remote,
            private_data: request.params.private_data.as_bytes().to_vec(),
            ird: depth(request.params.ird),
            ord: depth(request.params.ord),
            crc: (request.params.crc != m::BY_DEVICE).then_some(request.params.crc != 0),
            revision: (request.params.mpa_rev != m::BY_DEVICE).then_some(request.params.mpa_rev),
            timeout_ms: (request.timeout_ms != 0).then_some(request.timeout_ms),
        });
        self.workers
            .post_command(worker, Command::Connect { setup, params });
        send_reply::<m::Connect>(self.resources.client_mut(id)?, seq, &EMPTY)
    }

    pub(super) fn start_listener(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::Listen,
    ) -> Outcome {
        check_options(&request.mpa)?;
        let addr = cm::socket_addr(request.addr);
        let local = addr
            .map(|addr| addr.ip())
            .filter(|addr| !addr.is_unspecified());
        let device_count = self.config.devices.len();
        let devices: Vec<usize> = match (request.device, local) {
            (m::ANY_DEVICE, None) => (0..device_count).collect(),
            (m::ANY_DEVICE, Some(ip)) => self.find_device(Some(ip), ip).into_iter().collect(),
            (device, None) if (device as usize) < device_count => vec![device as usize],
            (device, Some(ip)) if (device as usize) < device_count => self
                .find_device(Some(ip), ip)
                .filter(|found| *found == device as usize)
                .into_iter()
                .collect(),
            (device, _) => return Err(Refusal::new(libc::ENODEV, format!("no device {device}"))),
        };
        if devices.is_empty() {
            let ip = local.map_or_else(String::new, |ip_addr| ip_addr.to_string());
            return Err(Refusal::new(
                libc::EADDRNOTAVAIL,
                format!("{ip} is no address of this device; listen on one of its own or on any"),
            ));
        }
        self.check_crc(&devices, request.mpa.crc)?;
        let asked = addr.map_or(request.addr.port, |addr| addr.port());
        let port = match asked {
            0 => self
                .find_free_port(&devices, local)
                .ok_or_else(|| Refusal::new(libc::EADDRINUSE, "no free port"))?,
            port if self
                .resources
                .listeners
                .is_port_taken(&devices, local, port) =>
            {
                return Err(Refusal::new(
                    libc::EADDRINUSE,
                    format!("port {port} is in use"),
                ));
            }
            port => port,
        };
        let client = self.resources.client_mut(id)?;
        let cm_channel = CmChannelId(request.cm_channel);
        if !client.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::no_such("CM channel", request.cm_channel));
        }
        self.resources.charge(id, &[(Quota::Listeners, 1)])?;
        let listener = self.resources.next_listener_id();
        for &device in &devices {
            for worker in self.config.devices[device].workers.clone() {
                self.workers.post_command(
                    worker,
                    Command::Listen {
                        listener,
                        device,
                        local,
                        port,
                        backlog: (request.backlog as usize).clamp(1, 4096),
                        mpa: request.mpa,
                    },
                );
            }
        }
        let mut bound = request.addr;
        if bound.family == 0 {
            bound.family = 4;
        }
        bound.port = port;
        self.resources.listeners.insert(
            listener,
            ClientListener {
                client: id,
                cm_channel,
                cookie: request.cookie,
                devices,
                local,
                port,
            },
        );
        let reply = m::ListenReply {
            listener: listener.0,
            reserved: 0,
            addr: bound,
        };
        send_reply::<m::Listen>(self.resources.client_mut(id)?, seq, &reply)
    }

    pub(super) fn stop_listener(
        &mut self,
        id: ClientId,
        seq: u32,
        listener: CmListenerId,
    ) -> Outcome {
        let found = self.resources.listeners.get(listener);
        if found.is_none_or(|found| found.client != id) {
            return Err(Refusal::no_such("listener", listener.0));
        }
        self.remove_listener(listener);
        self.resources.release(id, &[(Quota::Listeners, 1)]);
        send_reply::<m::Unlisten>(self.resources.client_mut(id)?, seq, &EMPTY)
    }

    pub(super) fn take_request(
        &mut self,
        id: ClientId,
        number: ConnectRequestId,
    ) -> Result<(RequestId, CmListenerId), Refusal> {
        let ours = self
            .resources
            .requests
            .get(number)
            .and_then(|(_, listener)| self.resources.listeners.get(listener))
            .is_some_and(|listener| listener.client == id);
        if !ours {
            return Err(Refusal::new(
                libc::ENOENT,
                format!("connection request {number} is gone: answered, or its peer gave up"),
            ));
        }
        self.resources
            .requests
            .remove(number)
            .ok_or_else(|| Refusal::no_such("connection request", number.0))
    }

    pub(super) fn accept_request(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::Accept,
    ) -> Outcome {
        let (qpn, number) = (Qpn(request.qp_num), ConnectRequestId(request.request));
        let listener = self.resources.requests.get(number).map(|found| found.1);
        let channel = match request.cm_channel {
            0 => listener
                .and_then(|listener| self.resources.listeners.get(listener))
                .map_or(CmChannelId(0), |listener| listener.cm_channel),
            channel => CmChannelId(channel),
        };
        if listener.is_some() {
            Self::detached_qp(self.resources.client_mut(id)?, qpn, channel)?;
            self.resources.count_connection(id, qpn)?;
        }
        let (worker_request, _) = self.take_request(id, number)?;
        let client = self.resources.client_mut(id)?;
        let qp = Self::detached_qp(client, qpn, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.worker = worker_request.worker();
        qp.cookie = request.cookie;
        qp.cm_channel = Some(channel);
        let setup = Box::new(Self::worker_qp_setup(client, qpn)?);
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
        let (request, _) = self.take_request(id, ConnectRequestId(reject.request))?;
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

    /// No application turns off what the configuration requires.
    fn check_crc(&self, devices: &[usize], crc: u8) -> Result<(), Refusal> {
        let strict = |device: &&usize| self.config.devices[**device].crc_required;
        match devices.iter().find(strict).filter(|_| crc == 0) {
            Some(device) => Err(Refusal::new(
                libc::EPERM,
                format!(
                    "device {} requires CRC (crc = \"required\" in its configuration)",
                    self.config.devices[*device].name
                ),
            )),
            None => Ok(()),
        }
    }
}

/// Values that mean nothing are refused, with those that do.
fn check_options(options: &m::MpaOptions) -> Result<(), Refusal> {
    let bad = |what: &str, allowed: &str| {
        Err(Refusal::new(
            libc::EINVAL,
            format!("listen: {what} means nothing; allowed are {allowed}, or 255 for the device's"),
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
            "listen: private data of 512 bytes at most, or 65535 for the device's limit",
        )),
        _ => Ok(()),
    }
}
