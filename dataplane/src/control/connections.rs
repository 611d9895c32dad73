//! CM channels, connects, listeners, accepts: requests of clients.

use std::os::fd::AsFd;

use nix::libc;
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;

use super::outbox::Outbox;
use super::requests::*;
use super::resources::{Client, Qp, QpPhase};
use super::{Control, Listener, TOKEN_OUTBOX, cm};
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId, Qpn};
use crate::worker::messages::{Command, ConnectParams, RequestId};

impl Control {
    pub(super) fn create_cm_channel(&mut self, id: ClientId, seq: u32) -> Outcome {
        let (ours, theirs) = ControlSocket::new_pair().map_err(Refusal::memory)?;
        self.outboxes_no += 1;
        let token = TOKEN_OUTBOX | u64::from(self.outboxes_no);
        let c = self.client(id)?;
        let channel = CmChannelId(c.number());
        let reply = m::IdReply {
            id: channel.0,
            reserved: 0,
        };
        send_fds::<m::CreateCmChannel>(c, seq, &reply, &[theirs.as_fd()])?;
        c.cm_channels.insert(channel, Outbox::new(ours, token));
        Ok(Done::Replied)
    }

    pub(super) fn detached(
        c: &mut Client,
        qpn: Qpn,
        cm_channel: CmChannelId,
    ) -> Result<&mut Qp, Refusal> {
        if !c.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::unknown("CM channel", cm_channel.0));
        }
        let qp = c
            .qps
            .get_mut(&qpn)
            .ok_or_else(|| Refusal::unknown("queue pair", qpn.0))?;
        if qp.phase != QpPhase::Detached {
            return Err(Refusal::new(
                libc::EISCONN,
                "the queue pair is or was connected; create a new one",
            ));
        }
        Ok(qp)
    }

    pub(super) fn connect(&mut self, id: ClientId, seq: u32, r: &m::Connect) -> Outcome {
        let remote = cm::socket_addr(r.dst).ok_or_else(|| {
            Refusal::new(libc::EDESTADDRREQ, "the destination address is missing")
        })?;
        let local = cm::socket_addr(r.src).filter(|a| !a.ip().is_unspecified());
        let device = match r.device {
            m::ANY_DEVICE => self
                .route(local.map(|a| a.ip()), remote.ip())
                .ok_or_else(|| {
                    Refusal::new(
                        libc::EHOSTUNREACH,
                        format!(
                            "no device reaches {}: not on a device's network, and no gateway",
                            remote.ip()
                        ),
                    )
                })?,
            n => n as usize,
        };
        if device >= self.config.devices.len() {
            return Err(Refusal::new(libc::ENODEV, format!("no device {device}")));
        }
        self.check_crc(&[device], r.params.crc)?;
        let worker = match local.filter(|a| a.port() != 0) {
            // Its answers come to the worker that the addresses name.
            Some(local) => self.config.devices[device].steering.owner_of(local, remote),
            None => self.worker_for(device),
        };
        let (qpn, channel) = (Qpn(r.qp_num), CmChannelId(r.cm_channel));
        let c = self.client(id)?;
        let qp = Self::detached(c, qpn, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.worker = worker;
        qp.device = device;
        qp.cookie = r.cookie;
        qp.cm_channel = Some(channel);
        let setup = Box::new(Self::setup(c, qpn)?);
        let depth = |n: u32| u16::try_from(n).unwrap_or(u16::MAX).min(0x3FFE);
        let params = Box::new(ConnectParams {
            device,
            local: local.map(|a| a.ip()),
            local_port: local.map(|a| a.port()).filter(|p| *p != 0),
            remote,
            private_data: r.params.private_data.as_bytes().to_vec(),
            ird: depth(r.params.ird),
            ord: depth(r.params.ord),
            crc: (r.params.crc != m::BY_DEVICE).then_some(r.params.crc != 0),
            revision: (r.params.mpa_rev != m::BY_DEVICE).then_some(r.params.mpa_rev),
            timeout_ms: (r.timeout_ms != 0).then_some(r.timeout_ms),
        });
        self.command(worker, Command::Connect { setup, params });
        send::<m::Connect>(self.client(id)?, seq, &EMPTY)
    }

    pub(super) fn listen(&mut self, id: ClientId, seq: u32, r: &m::Listen) -> Outcome {
        check_options(&r.mpa)?;
        let addr = cm::socket_addr(r.addr);
        let local = addr.map(|a| a.ip()).filter(|a| !a.is_unspecified());
        let n = self.config.devices.len();
        let devices: Vec<usize> = match (r.device, local) {
            (m::ANY_DEVICE, None) => (0..n).collect(),
            (m::ANY_DEVICE, Some(ip)) => self.route(Some(ip), ip).into_iter().collect(),
            (d, None) if (d as usize) < n => vec![d as usize],
            (d, Some(ip)) if (d as usize) < n => self
                .route(Some(ip), ip)
                .filter(|x| *x == d as usize)
                .into_iter()
                .collect(),
            (d, _) => return Err(Refusal::new(libc::ENODEV, format!("no device {d}"))),
        };
        if devices.is_empty() {
            let ip = local.map_or_else(String::new, |i| i.to_string());
            return Err(Refusal::new(
                libc::EADDRNOTAVAIL,
                format!("{ip} is no address of this device; listen on one of its own or on any"),
            ));
        }
        self.check_crc(&devices, r.mpa.crc)?;
        let asked = addr.map_or(r.addr.port, |a| a.port());
        let port = match asked {
            0 => self
                .free_port(&devices, local)
                .ok_or_else(|| Refusal::new(libc::EADDRINUSE, "no free port"))?,
            p if self.listeners.taken(&devices, local, p) => {
                return Err(Refusal::new(
                    libc::EADDRINUSE,
                    format!("port {p} is in use"),
                ));
            }
            p => p,
        };
        let c = self.client(id)?;
        let cm_channel = CmChannelId(r.cm_channel);
        if !c.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::unknown("CM channel", r.cm_channel));
        }
        self.listeners_no += 1;
        let listener = CmListenerId(self.listeners_no);
        for &device in &devices {
            for w in self.config.devices[device].workers.clone() {
                self.command(
                    w,
                    Command::Listen {
                        listener,
                        device,
                        local,
                        port,
                        backlog: (r.backlog as usize).clamp(1, 4096),
                        mpa: r.mpa,
                    },
                );
            }
        }
        let mut bound = r.addr;
        if bound.family == 0 {
            bound.family = 4;
        }
        bound.port = port;
        self.listeners.insert(
            listener,
            Listener {
                client: id,
                cm_channel,
                cookie: r.cookie,
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
        send::<m::Listen>(self.client(id)?, seq, &reply)
    }

    pub(super) fn take_request(
        &mut self,
        id: ClientId,
        number: ConnectRequestId,
    ) -> Result<(RequestId, CmListenerId), Refusal> {
        let ours = self
            .requests
            .get(number)
            .and_then(|(_, l)| self.listeners.get(l))
            .is_some_and(|l| l.client == id);
        if !ours {
            return Err(Refusal::new(
                libc::ENOENT,
                format!("connection request {number} is gone: answered, or its peer gave up"),
            ));
        }
        self.requests
            .remove(number)
            .ok_or_else(|| Refusal::unknown("connection request", number.0))
    }

    pub(super) fn accept(&mut self, id: ClientId, seq: u32, r: &m::Accept) -> Outcome {
        let (qpn, number) = (Qpn(r.qp_num), ConnectRequestId(r.request));
        let listener = self.requests.get(number).map(|x| x.1);
        let channel = match r.cm_channel {
            0 => listener
                .and_then(|l| self.listeners.get(l))
                .map_or(CmChannelId(0), |l| l.cm_channel),
            n => CmChannelId(n),
        };
        if listener.is_some() {
            Self::detached(self.client(id)?, qpn, channel)?;
        }
        let (request, _) = self.take_request(id, number)?;
        let c = self.client(id)?;
        let qp = Self::detached(c, qpn, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.worker = request.worker();
        qp.cookie = r.cookie;
        qp.cm_channel = Some(channel);
        let setup = Box::new(Self::setup(c, qpn)?);
        let depth = |n: u32| u16::try_from(n).unwrap_or(u16::MAX).min(0x3FFE);
        self.command(
            request.worker(),
            Command::Accept {
                setup,
                request,
                private_data: r.params.private_data.as_bytes().to_vec(),
                ird: depth(r.params.ird),
                ord: depth(r.params.ord),
            },
        );
        send::<m::Accept>(self.client(id)?, seq, &EMPTY)
    }
}

impl Control {
    /// No application turns off what the configuration requires.
    fn check_crc(&self, devices: &[usize], crc: u8) -> Result<(), Refusal> {
        let strict = |d: &&usize| self.config.devices[**d].crc_required;
        match devices.iter().find(strict).filter(|_| crc == 0) {
            Some(d) => Err(Refusal::new(
                libc::EPERM,
                format!(
                    "device {} requires CRC (crc = \"required\" in its configuration)",
                    self.config.devices[*d].name
                ),
            )),
            None => Ok(()),
        }
    }
}

/// Values that mean nothing are refused, with those that do.
fn check_options(o: &m::MpaOptions) -> Result<(), Refusal> {
    let bad = |what: &str, allowed: &str| {
        Err(Refusal::new(
            libc::EINVAL,
            format!("listen: {what} means nothing; allowed are {allowed}, or 255 for the device's"),
        ))
    };
    match o {
        _ if !matches!(o.crc, 0 | 1 | m::BY_DEVICE) => bad("this CRC", "0 and 1"),
        _ if !matches!(o.mpa_rev, 1 | 2 | m::BY_DEVICE) => bad("this MPA revision", "1 and 2"),
        _ if !matches!(o.markers, 0..=2 | m::BY_DEVICE) => bad("this marker policy", "0 to 2"),
        _ if !matches!(o.rtr, 0..=7 | m::BY_DEVICE) => bad("this set of RTR kinds", "0 to 7"),
        _ if !matches!(o.terminate, 0 | 1 | m::BY_DEVICE) => bad("this Terminate order", "0 and 1"),
        _ if !matches!(o.out_of_order, 0..=2 | m::BY_DEVICE) => bad("this placement", "0 to 2"),
        _ if !matches!(o.private_data, 0..=512 | u16::MAX) => Err(Refusal::new(
            libc::EINVAL,
            "listen: private data of 512 bytes at most, or 65535 for the device's limit",
        )),
        _ => Ok(()),
    }
}
