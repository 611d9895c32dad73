//! Clients' requests, one by one: checked against the client's own objects and limits, then
//! done or handed to a worker.

use nix::libc;
use siw_memory::{KeyError, Stag};
use siw_shm::control::codec::UNANSWERED;
use siw_shm::control::messages as m;
use siw_shm::control::{Message, Request};
use siw_shm::wqe;

use super::resources::{Client, Pd, Qp, QpPhase};
use super::{Control, DeviceView, Pending, Waiting};
use crate::config::LimitsConfig;
use crate::ids::{
    ArenaId, ClientId, CmChannelId, CmListenerId, CompletionChannelId, ConnectRequestId, CqId,
    PdId, Qpn, SrqId,
};
use crate::worker::messages::Command;

/// A request that is not done: errno and words.
#[derive(Debug)]
pub struct Refusal {
    errno: i32,
    reason: String,
}

impl Refusal {
    pub fn new(errno: i32, reason: impl Into<String>) -> Refusal {
        Refusal {
            errno,
            reason: reason.into(),
        }
    }
    pub fn memory(e: std::io::Error) -> Refusal {
        let errno = e.raw_os_error().unwrap_or(libc::ENOMEM);
        Refusal::new(errno, format!("no shared memory: {e}"))
    }
    /// Whether it may be different once queue pairs that are on their way out are gone.
    fn may_pass(&self) -> bool {
        matches!(self.errno, libc::EBUSY | libc::ENOMEM)
    }
    pub(super) fn unknown(what: &str, id: u32) -> Refusal {
        Refusal::new(libc::ENOENT, format!("no {what} {id} of this client"))
    }
    pub(super) fn busy(what: &str, users: u32) -> Refusal {
        Refusal::new(
            libc::EBUSY,
            format!("{what} has {users} users: destroy them first"),
        )
    }
    pub(super) fn limit(what: &str, n: u64) -> Refusal {
        Refusal::new(
            libc::ENOMEM,
            format!("{what}: the limit is {n}; see [limits]"),
        )
    }
}

impl From<KeyError> for Refusal {
    fn from(e: KeyError) -> Refusal {
        Refusal::new(libc::EINVAL, e.to_string())
    }
}

/// What a request led to.
pub(super) enum Done {
    Replied,
    /// A worker has to answer first.
    Wait(Pending),
}

/// Whether a request is through.
#[derive(PartialEq, Eq)]
pub(super) enum Turn {
    Over,
    /// Again, when no queue pair of the client is on its way out any more.
    Later,
}

pub(super) type Outcome = Result<Done, Refusal>;

/// Most protection domains of one client: as many as Linux siw has.
const MAX_PD: u32 = 102_400;

/// What a client may ask for, as the configuration and this version allow.
pub fn limits(c: &LimitsConfig, devices: &[DeviceView]) -> m::Limits {
    let most = |f: fn(&DeviceView) -> u16| devices.iter().map(f).max().unwrap_or(0);
    m::Limits {
        max_qp: c.queue_pairs_per_client,
        max_qp_wr: c.work_requests,
        max_sge: wqe::MAX_SGE as u32,
        max_sge_rd: wqe::MAX_SGE as u32,
        max_inline: wqe::MAX_INLINE as u32,
        max_cq: c.completion_queues_per_client,
        max_cqe: c.completions,
        max_mr: c.memory_regions_per_client,
        max_pd: MAX_PD,
        max_ord: most(|d| d.max_ord).into(),
        max_ird: most(|d| d.max_ird).into(),
        max_private_data: m::MAX_PRIVATE_DATA as u32,
        max_srq: c.queue_pairs_per_client,
        max_srq_wr: super::shared_receive::srq_depth(c),
        max_srq_sge: wqe::MAX_SGE as u32,
        max_mw: c.memory_regions_per_client,
        max_fast_pages: siw_shm::local_wqe::MAX_FAST_PAGES,
        reserved: 0,
        max_msg: u64::from(u32::MAX),
        max_mr_size: c.memory_per_client.0,
        max_arena: c.memory_per_client.0,
    }
}

pub(super) fn send<M: Message>(c: &Client, seq: u32, r: &M::Reply) -> Outcome {
    send_fds::<M>(c, seq, r, &[])
}

pub(super) fn send_fds<M: Message>(
    c: &Client,
    seq: u32,
    r: &M::Reply,
    fds: &[std::os::fd::BorrowedFd<'_>],
) -> Outcome {
    // A client that does not read its replies gets none; its next call fails.
    if let Err(e) = c.conn.send_reply::<M>(seq, r, fds) {
        tracing::debug!(client = c.id.0, "reply not sent: {e}");
    }
    Ok(Done::Replied)
}

pub(super) const EMPTY: m::Empty = m::Empty { reserved: 0 };

impl Control {
    pub(super) fn request(&mut self, id: ClientId, seq: u32, request: &Request) -> Turn {
        let kind = request.kind();
        let greeted = self.clients.get(&id).is_some_and(|c| c.greeted);
        let outcome = if !greeted && !matches!(request, Request::ClientHello(_)) {
            Err(Refusal::new(
                libc::EPROTO,
                "the first message has to be HELLO",
            ))
        } else {
            self.execute(id, seq, request)
        };
        tracing::trace!(
            client = id.0,
            request = request.name(),
            ok = outcome.is_ok()
        );
        let Some(client) = self.clients.get_mut(&id) else {
            return Turn::Over;
        };
        match outcome {
            Ok(Done::Replied) => {}
            Ok(Done::Wait(what)) => client.waiting = Some(Waiting { seq, what }),
            Err(r) if r.may_pass() && !client.dying_qps.is_empty() => return Turn::Later,
            Err(r) => {
                tracing::debug!(
                    client = id.0,
                    request = request.name(),
                    "refused: {}",
                    r.reason
                );
                if seq != UNANSWERED {
                    let _ = client.conn.send_refusal(kind, seq, r.errno, &r.reason);
                }
            }
        }
        Turn::Over
    }

    fn execute(&mut self, id: ClientId, seq: u32, request: &Request) -> Outcome {
        match request {
            Request::ClientHello(h) => {
                if h.version != u32::from(m::VERSION) {
                    return Err(Refusal::new(
                        libc::EPROTONOSUPPORT,
                        format!(
                            "shared-memory version {}, siwd speaks {}: use client library and daemon of the same release",
                            h.version,
                            m::VERSION
                        ),
                    ));
                }
                self.hello(id, seq, h).map(|()| Done::Replied)
            }
            Request::QueryDevice(q) => self.query_device(id, seq, q.index),
            Request::AllocPd(_) => {
                if self.client(id)?.pds.len() >= MAX_PD as usize {
                    return Err(Refusal::limit("protection domains", MAX_PD.into()));
                }
                self.pds += 1;
                let pd = PdId(self.pds);
                let c = self.client(id)?;
                c.pds.insert(pd, Pd { users: 0 });
                send::<m::AllocPd>(
                    c,
                    seq,
                    &m::IdReply {
                        id: pd.0,
                        reserved: 0,
                    },
                )
            }
            Request::DeallocPd(r) => {
                let c = self.client(id)?;
                let pd = c
                    .pds
                    .get(&PdId(r.pd))
                    .ok_or_else(|| Refusal::unknown("protection domain", r.pd))?;
                if pd.users > 0 {
                    return Err(Refusal::busy("protection domain", pd.users));
                }
                c.pds.remove(&PdId(r.pd));
                send::<m::DeallocPd>(c, seq, &EMPTY)
            }
            Request::AllocArena(r) => self.alloc_arena(id, seq, r),
            Request::FreeArena(r) => {
                let c = self.client(id)?;
                let a = c
                    .arenas
                    .get(&ArenaId(r.arena))
                    .ok_or_else(|| Refusal::unknown("arena", r.arena))?;
                if a.mrs > 0 {
                    return Err(Refusal::busy("arena", a.mrs));
                }
                c.memory -= a.region.len() as u64;
                c.arenas.remove(&ArenaId(r.arena));
                send::<m::FreeArena>(c, seq, &EMPTY)
            }
            Request::RegMr(r) => self.reg_mr(id, seq, r),
            Request::DeregMr(r) => self.dereg_mr(id, Stag(r.lkey)),
            Request::ReregMr(r) => self.rereg_mr(id, r),
            Request::AllocFastMr(r) => self.alloc_fast_mr(id, seq, r),
            Request::AllocMw(r) => self.alloc_mw(id, seq, r),
            Request::DeallocMw(r) => self.dealloc_mw(id, Stag(r.rkey)),
            Request::CreateChannel(_) => self.create_channel(id, seq),
            Request::DestroyChannel(r) => {
                let c = self.client(id)?;
                let ch = c
                    .channels
                    .get(&CompletionChannelId(r.channel))
                    .ok_or_else(|| Refusal::unknown("completion channel", r.channel))?;
                if ch.cqs > 0 {
                    return Err(Refusal::busy("completion channel", ch.cqs));
                }
                c.channels.remove(&CompletionChannelId(r.channel));
                send::<m::DestroyChannel>(c, seq, &EMPTY)
            }
            Request::CreateCq(r) => self.create_cq(id, seq, r),
            Request::DestroyCq(r) => {
                let number = CqId(r.cq);
                let cq = self
                    .client(id)?
                    .cqs
                    .get(&number)
                    .ok_or_else(|| Refusal::unknown("completion queue", r.cq))?;
                if cq.qps > 0 {
                    return Err(Refusal::busy("completion queue", cq.qps));
                }
                for w in 0..self.config.mailboxes.len() {
                    self.command(w, Command::RemoveCq { cq: number });
                }
                let (token, left) = self.fence();
                Ok(Done::Wait(Pending::FreeCq {
                    cq: number,
                    token,
                    left,
                }))
            }
            Request::CreateQp(r) => self.create_qp(id, seq, r),
            Request::ModifyQp(r) => self.modify_qp(id, seq, r),
            Request::QueryQp(r) => self.query_qp(id, seq, Qpn(r.qp_num)),
            Request::DestroyQp(r) => self.destroy_qp(id, seq, Qpn(r.qp_num)),
            Request::ResizeCq(r) => self.resize_cq(id, r),
            Request::FreeCqRing(r) => self.free_cq_ring(id, seq, r),
            Request::ModerateCq(r) => self.moderate_cq(id, seq, r),
            Request::CreateSrq(r) => self.create_srq(id, seq, r),
            Request::ModifySrq(r) => self.modify_srq(id, seq, r),
            Request::QuerySrq(r) => self.query_srq(id, seq, SrqId(r.srq)),
            Request::DestroySrq(r) => self.destroy_srq(id, SrqId(r.srq)),
            Request::CreateCmChannel(_) => self.create_cm_channel(id, seq),
            Request::DestroyCmChannel(r) => {
                let used = self
                    .listeners
                    .iter()
                    .filter(|(_, l)| l.client == id && l.cm_channel == CmChannelId(r.channel))
                    .count();
                if used > 0 {
                    return Err(Refusal::busy("CM channel", used as u32));
                }
                let c = self.client(id)?;
                c.cm_channels
                    .remove(&CmChannelId(r.channel))
                    .ok_or_else(|| Refusal::unknown("CM channel", r.channel))?;
                send::<m::DestroyCmChannel>(c, seq, &EMPTY)
            }
            Request::Connect(r) => self.connect(id, seq, r),
            Request::Listen(r) => self.listen(id, seq, r),
            Request::Unlisten(r) => {
                if self
                    .listeners
                    .get(CmListenerId(r.listener))
                    .is_none_or(|l| l.client != id)
                {
                    return Err(Refusal::unknown("listener", r.listener));
                }
                self.unlisten(CmListenerId(r.listener));
                send::<m::Unlisten>(self.client(id)?, seq, &EMPTY)
            }
            Request::Accept(r) => self.accept(id, seq, r),
            Request::Reject(r) => {
                let (request, _) = self.take_request(id, ConnectRequestId(r.request))?;
                let private_data = r.private_data.as_bytes().to_vec();
                self.command(
                    request.worker(),
                    Command::Reject {
                        request,
                        private_data,
                    },
                );
                send::<m::Reject>(self.client(id)?, seq, &EMPTY)
            }
            Request::Disconnect(r) => {
                let c = self.client(id)?;
                let qp = c
                    .qps
                    .get(&Qpn(r.qp_num))
                    .ok_or_else(|| Refusal::unknown("queue pair", r.qp_num))?;
                if qp.phase == QpPhase::Detached {
                    return Err(Refusal::new(
                        libc::ENOTCONN,
                        "the queue pair is not connected",
                    ));
                }
                let worker = qp.worker;
                self.command(worker, Command::Disconnect { qpn: Qpn(r.qp_num) });
                send::<m::Disconnect>(self.client(id)?, seq, &EMPTY)
            }
            Request::ReadStats(r) => self.stats_request(id, seq, r.offset),
        }
    }

    pub(super) fn client(&mut self, id: ClientId) -> Result<&mut Client, Refusal> {
        self.clients
            .get_mut(&id)
            .ok_or_else(|| Refusal::new(libc::ENOTCONN, "client is gone"))
    }

    pub(super) fn owner(&self, qpn: Qpn) -> Option<ClientId> {
        self.clients
            .iter()
            .find(|(_, c)| c.qps.contains_key(&qpn) || c.dying_qps.contains_key(&qpn))
            .map(|(id, _)| *id)
    }

    pub(super) fn qp_mut(&mut self, id: ClientId, qpn: Qpn) -> Option<&mut Qp> {
        self.clients.get_mut(&id)?.qps.get_mut(&qpn)
    }

    fn query_device(&mut self, id: ClientId, seq: u32, index: u32) -> Outcome {
        let n = self.config.devices.len();
        let d = self.config.devices.get(index as usize).ok_or_else(|| {
            Refusal::new(libc::ENODEV, format!("no device {index}: there are {n}"))
        })?;
        let mut ips = [m::Addr::NONE; 8];
        let mut used = 0;
        for (place, cidr) in ips.iter_mut().zip(&d.addresses) {
            *place = cidr.addr.into();
            used += 1;
        }
        let reply = m::DeviceReply {
            index,
            port_state: if d.link_up {
                m::PORT_ACTIVE
            } else {
                m::PORT_DOWN
            },
            name: m::Text::new(&d.name),
            driver: m::Text::new(&d.driver),
            mac: d.mac,
            n_ips: used,
            mtu: d.mtu.into(),
            link_mbps: d.link_mbps,
            crc: d.crc.into(),
            mpa_rev: d.mpa_rev,
            reserved: [0; 6],
            caps: m::CAP_IMMEDIATE
                | m::CAP_ATOMIC
                | m::CAP_MARKERS
                | m::CAP_LOCAL_INV
                | m::CAP_MEM_WINDOW
                | m::CAP_FAST_REG,
            ips,
        };
        send::<m::QueryDevice>(self.client(id)?, seq, &reply)
    }
}
