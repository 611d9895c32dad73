//! Clients' requests, one by one: checked against the client's own objects and limits, then
//! done or handed to a worker.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::libc;
use siw_iwarp::QpAttr;
use siw_shm::control::messages as m;
use siw_shm::control::{AsyncEventKind, Conn, Message, Request};
use siw_shm::region::{Pages, Region};
use siw_shm::{
    Access, CqGeometry, CqProducer, KeyError, Mr, QpGeometry, RqConsumer, SqConsumer, Stag, wqe,
};

use super::outbox::Outbox;
use super::resources::{Arena, Channel, Client, Cq, MemoryRegion, Pd, Qp, QpPhase};
use super::{Control, DeviceView, Listener, Pending, TOKEN_OUTBOX, Waiting, cm};
use crate::config::LimitsConfig;
use crate::worker::completion::CqEnd;
use crate::worker::messages::{Command, ConnectParams, QpSetup};

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
    fn unknown(what: &str, id: u32) -> Refusal {
        Refusal::new(libc::ENOENT, format!("no {what} {id} of this client"))
    }
    fn busy(what: &str, users: u32) -> Refusal {
        Refusal::new(
            libc::EBUSY,
            format!("{what} has {users} users: destroy them first"),
        )
    }
    fn limit(what: &str, n: u64) -> Refusal {
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
enum Done {
    Replied,
    /// A worker has to answer first.
    Wait(Pending),
}

type Outcome = Result<Done, Refusal>;

/// What a client may ask for, as the configuration and this version allow.
pub fn limits(c: &LimitsConfig, devices: &[DeviceView]) -> m::Limits {
    let most = |f: fn(&DeviceView) -> u16| devices.iter().map(f).max().unwrap_or(0);
    m::Limits {
        max_qp: c.queue_pairs_per_client,
        max_qp_wr: c.work_requests,
        max_sge: wqe::MAX_SGE as u32,
        max_sge_rd: 1,
        max_inline: wqe::MAX_INLINE as u32,
        max_cq: c.completion_queues_per_client,
        max_cqe: c.completions,
        max_mr: c.memory_regions_per_client,
        max_pd: 65_536,
        max_ord: most(|d| d.max_ord).into(),
        max_ird: most(|d| d.max_ird).into(),
        max_private_data: m::MAX_PRIVATE_DATA as u32,
        max_msg: u64::from(u32::MAX),
        max_mr_size: c.memory_per_client.0,
        max_arena: c.memory_per_client.0,
    }
}

fn send<M: Message>(c: &Client, seq: u32, r: &M::Reply) -> Outcome {
    send_fds::<M>(c, seq, r, &[])
}

fn send_fds<M: Message>(
    c: &Client,
    seq: u32,
    r: &M::Reply,
    fds: &[std::os::fd::BorrowedFd<'_>],
) -> Outcome {
    // A client that does not read its replies gets none; its next call fails.
    if let Err(e) = c.conn.reply::<M>(seq, r, fds) {
        tracing::debug!(client = c.id, "reply not sent: {e}");
    }
    Ok(Done::Replied)
}

const EMPTY: m::Empty = m::Empty { reserved: 0 };

impl Control {
    pub(super) fn request(&mut self, id: u32, seq: u32, request: &Request) {
        let kind = request.kind();
        let greeted = self.clients.get(&id).is_some_and(|c| c.greeted);
        let outcome = if !greeted && !matches!(request, Request::Hello(_)) {
            Err(Refusal::new(
                libc::EPROTO,
                "the first message has to be HELLO",
            ))
        } else {
            self.execute(id, seq, request)
        };
        tracing::trace!(client = id, request = request.name(), ok = outcome.is_ok());
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        match outcome {
            Ok(Done::Replied) => {}
            Ok(Done::Wait(what)) => client.waiting = Some(Waiting { seq, what }),
            Err(r) => {
                tracing::debug!(
                    client = id,
                    request = request.name(),
                    "refused: {}",
                    r.reason
                );
                let _ = client.conn.refuse(kind, seq, r.errno, &r.reason);
            }
        }
    }

    fn execute(&mut self, id: u32, seq: u32, request: &Request) -> Outcome {
        match request {
            Request::Hello(h) => {
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
                self.pds += 1;
                let pd = self.pds;
                let c = self.client(id)?;
                c.pds.insert(pd, Pd { users: 0 });
                send::<m::AllocPd>(
                    c,
                    seq,
                    &m::IdReply {
                        id: pd,
                        reserved: 0,
                    },
                )
            }
            Request::DeallocPd(r) => {
                let c = self.client(id)?;
                let pd = c
                    .pds
                    .get(&r.pd)
                    .ok_or_else(|| Refusal::unknown("protection domain", r.pd))?;
                if pd.users > 0 {
                    return Err(Refusal::busy("protection domain", pd.users));
                }
                c.pds.remove(&r.pd);
                send::<m::DeallocPd>(c, seq, &EMPTY)
            }
            Request::AllocArena(r) => self.alloc_arena(id, seq, r),
            Request::FreeArena(r) => {
                let c = self.client(id)?;
                let a = c
                    .arenas
                    .get(&r.arena)
                    .ok_or_else(|| Refusal::unknown("arena", r.arena))?;
                if a.mrs > 0 {
                    return Err(Refusal::busy("arena", a.mrs));
                }
                c.memory -= a.region.len() as u64;
                c.arenas.remove(&r.arena);
                send::<m::FreeArena>(c, seq, &EMPTY)
            }
            Request::RegMr(r) => self.reg_mr(id, seq, r),
            Request::DeregMr(r) => self.dereg_mr(id, r.lkey),
            Request::CreateChannel(_) => self.create_channel(id, seq),
            Request::DestroyChannel(r) => {
                let c = self.client(id)?;
                let ch = c
                    .channels
                    .get(&r.channel)
                    .ok_or_else(|| Refusal::unknown("completion channel", r.channel))?;
                if ch.cqs > 0 {
                    return Err(Refusal::busy("completion channel", ch.cqs));
                }
                c.channels.remove(&r.channel);
                send::<m::DestroyChannel>(c, seq, &EMPTY)
            }
            Request::CreateCq(r) => self.create_cq(id, seq, r),
            Request::DestroyCq(r) => {
                let c = self.client(id)?;
                let cq = c
                    .cqs
                    .get(&r.cq)
                    .ok_or_else(|| Refusal::unknown("completion queue", r.cq))?;
                if cq.qps > 0 {
                    return Err(Refusal::busy("completion queue", cq.qps));
                }
                for w in 0..self.config.mailboxes.len() {
                    self.command(w, Command::RemoveCq { cq: r.cq });
                }
                let (token, left) = self.fence();
                Ok(Done::Wait(Pending::FreeCq {
                    cq: r.cq,
                    token,
                    left,
                }))
            }
            Request::CreateQp(r) => self.create_qp(id, seq, r),
            Request::ModifyQp(r) => self.modify_qp(id, seq, r),
            Request::QueryQp(r) => {
                let c = self.client(id)?;
                let reply = qp_state(c, r.qp_num)?;
                send::<m::QueryQp>(c, seq, &reply)
            }
            Request::DestroyQp(r) => self.destroy_qp(id, seq, r.qp_num),
            Request::CreateCmChannel(_) => self.create_cm_channel(id, seq),
            Request::DestroyCmChannel(r) => {
                let used = self
                    .listeners
                    .values()
                    .filter(|l| l.client == id && l.cm_channel == r.channel)
                    .count();
                if used > 0 {
                    return Err(Refusal::busy("CM channel", used as u32));
                }
                let c = self.client(id)?;
                c.cm_channels
                    .remove(&r.channel)
                    .ok_or_else(|| Refusal::unknown("CM channel", r.channel))?;
                send::<m::DestroyCmChannel>(c, seq, &EMPTY)
            }
            Request::Connect(r) => self.connect(id, seq, r),
            Request::Listen(r) => self.listen(id, seq, r),
            Request::Unlisten(r) => {
                if self
                    .listeners
                    .get(&r.listener)
                    .is_none_or(|l| l.client != id)
                {
                    return Err(Refusal::unknown("listener", r.listener));
                }
                self.unlisten(r.listener);
                send::<m::Unlisten>(self.client(id)?, seq, &EMPTY)
            }
            Request::Accept(r) => self.accept(id, seq, r),
            Request::Reject(r) => {
                let (request, _) = self.take_request(id, r.request)?;
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
                    .get(&r.qp_num)
                    .ok_or_else(|| Refusal::unknown("queue pair", r.qp_num))?;
                if qp.phase == QpPhase::Detached {
                    return Err(Refusal::new(
                        libc::ENOTCONN,
                        "the queue pair is not connected",
                    ));
                }
                let worker = qp.worker;
                self.command(worker, Command::Disconnect { qpn: r.qp_num });
                send::<m::Disconnect>(self.client(id)?, seq, &EMPTY)
            }
            Request::Stats(r) => self.stats_request(id, seq, r.offset),
        }
    }

    fn client(&mut self, id: u32) -> Result<&mut Client, Refusal> {
        self.clients
            .get_mut(&id)
            .ok_or_else(|| Refusal::new(libc::ENOTCONN, "client is gone"))
    }

    pub(super) fn owner(&self, qpn: u32) -> Option<u32> {
        self.clients
            .iter()
            .find(|(_, c)| c.qps.contains_key(&qpn))
            .map(|(id, _)| *id)
    }

    pub(super) fn qp_mut(&mut self, id: u32, qpn: u32) -> Option<&mut Qp> {
        self.clients.get_mut(&id)?.qps.get_mut(&qpn)
    }

    fn query_device(&mut self, id: u32, seq: u32, index: u32) -> Outcome {
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
            caps: 0,
            ips,
        };
        send::<m::QueryDevice>(self.client(id)?, seq, &reply)
    }

    // ---- memory ------------------------------------------------------------------------

    fn alloc_arena(&mut self, id: u32, seq: u32, r: &m::AllocArena) -> Outcome {
        let limit = self.config.limits.memory_per_client.0;
        let huge = r.huge != 0 && self.config.hugepages;
        let c = self.client(id)?;
        if r.len == 0 {
            return Err(Refusal::new(libc::EINVAL, "an arena needs a length"));
        }
        if c.memory.saturating_add(r.len) > limit {
            return Err(Refusal::limit("arena bytes", limit));
        }
        let pages = if huge { Pages::TryHuge } else { Pages::Normal };
        let region =
            Arc::new(Region::create("siwd-arena", r.len as usize, pages).map_err(Refusal::memory)?);
        let external =
            (self.config.map_arena)(&region).map_err(|e| Refusal::new(libc::ENOMEM, e))?;
        let c = self.client(id)?;
        let arena = c.number();
        let reply = m::ArenaReply {
            arena,
            huge: region.is_huge().into(),
            len: region.len() as u64,
        };
        c.memory += region.len() as u64;
        let fd = region
            .fd()
            .ok_or_else(|| Refusal::new(libc::ENOMEM, "shared memory has no descriptor"))?;
        send_fds::<m::AllocArena>(c, seq, &reply, &[fd])?;
        c.arenas.insert(
            arena,
            Arena {
                region,
                mrs: 0,
                external,
            },
        );
        Ok(Done::Replied)
    }

    fn reg_mr(&mut self, id: u32, seq: u32, r: &m::RegMr) -> Outcome {
        let limit = self.config.limits.memory_regions_per_client;
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        if c.mrs.len() >= limit as usize {
            return Err(Refusal::limit("memory regions", limit.into()));
        }
        let access = Access(r.access);
        if !Access::ALL.contains(access) {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("unknown access bits {:#x}", r.access),
            ));
        }
        let writes = access.0 & (Access::REMOTE_WRITE.0 | Access::REMOTE_ATOMIC.0) != 0;
        if writes && !access.contains(Access::LOCAL_WRITE) {
            return Err(Refusal::new(
                libc::EINVAL,
                "remote write and remote atomic need local write too (ibv_reg_mr(3))",
            ));
        }
        let arena = c
            .arenas
            .get_mut(&r.arena)
            .ok_or_else(|| Refusal::unknown("arena", r.arena))?;
        let pd = c
            .pds
            .get_mut(&r.pd)
            .ok_or_else(|| Refusal::unknown("protection domain", r.pd))?;
        let mr = Mr::new(
            arena.region.clone(),
            r.offset,
            r.len,
            r.va,
            r.pd,
            None,
            access,
        )
        .map_err(|_| {
            Refusal::new(
                libc::EINVAL,
                format!(
                    "{} bytes at {} do not lie in the arena of {} bytes, or their address wraps",
                    r.len,
                    r.offset,
                    arena.region.len()
                ),
            )
        })?;
        let stag = keys
            .insert(mr)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        arena.mrs += 1;
        pd.users += 1;
        c.mrs.insert(
            stag.0,
            MemoryRegion {
                pd: r.pd,
                arena: r.arena,
            },
        );
        let reply = m::MrReply {
            lkey: stag.0,
            rkey: stag.0,
        };
        send::<m::RegMr>(c, seq, &reply)
    }

    fn dereg_mr(&mut self, id: u32, lkey: u32) -> Outcome {
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        if !c.mrs.contains_key(&lkey) {
            return Err(Refusal::unknown("memory region with lkey", lkey));
        }
        let ticket = keys
            .remove(Stag(lkey))
            .ok_or_else(|| Refusal::unknown("memory region with lkey", lkey))?;
        Ok(Done::Wait(Pending::Dereg { lkey, ticket }))
    }

    pub(super) fn finish_dereg(&mut self, id: u32) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(Waiting {
            seq,
            what: Pending::Dereg { lkey, .. },
        }) = c.waiting.take()
        else {
            return;
        };
        if let Some(mr) = c.mrs.remove(&lkey) {
            if let Some(a) = c.arenas.get_mut(&mr.arena) {
                a.mrs -= 1;
            }
            if let Some(pd) = c.pds.get_mut(&mr.pd) {
                pd.users -= 1;
            }
        }
        let _ = c.conn.reply::<m::DeregMr>(seq, &EMPTY, &[]);
        self.answered(id);
    }

    // ---- queues ------------------------------------------------------------------------

    fn create_channel(&mut self, id: u32, seq: u32) -> Outcome {
        let (write, read) = siw_shm::control::event_pipe().map_err(Refusal::memory)?;
        let c = self.client(id)?;
        let channel = c.number();
        let reply = m::IdReply {
            id: channel,
            reserved: 0,
        };
        send_fds::<m::CreateChannel>(c, seq, &reply, &[read.as_fd()])?;
        let writer: Arc<OwnedFd> = Arc::new(write);
        c.channels.insert(channel, Channel { writer, cqs: 0 });
        Ok(Done::Replied)
    }

    fn create_cq(&mut self, id: u32, seq: u32, r: &m::CreateCq) -> Outcome {
        let workers = self.config.mailboxes.len() as u32;
        let (most, deepest) = (
            self.config.limits.completion_queues_per_client,
            self.config.limits.completions,
        );
        if r.cqe == 0 || r.cqe > deepest {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("{} entries: 1 to {deepest} are allowed", r.cqe),
            ));
        }
        let geometry = CqGeometry::new(r.cqe, workers)
            .ok_or_else(|| Refusal::new(libc::EINVAL, format!("{} entries are too many", r.cqe)))?;
        let number = self.cqs.take();
        let made = (|| {
            let c = self.client(id)?;
            if c.cqs.len() >= most as usize {
                return Err(Refusal::limit("completion queues", most.into()));
            }
            let channel = match r.channel {
                0 => None,
                n => Some(
                    c.channels
                        .get_mut(&n)
                        .map(|ch| {
                            ch.cqs += 1;
                            ch.writer.clone()
                        })
                        .ok_or_else(|| Refusal::unknown("completion channel", n))?,
                ),
            };
            let mem = c
                .queues
                .alloc(geometry.len)
                .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
            Ok((channel, mem))
        })();
        let (channel, mem) = match made {
            Ok(x) => x,
            Err(e) => {
                self.cqs.give(number);
                return Err(e);
            }
        };
        for w in 0..workers {
            let producer = CqProducer::new(mem.region.clone(), mem.offset, geometry, w)
                .map_err(|e| Refusal::new(libc::EINVAL, e.to_string()))?;
            self.command(
                w as usize,
                Command::AddCq(Box::new(CqEnd {
                    id: number,
                    client: id,
                    producer,
                    channel: channel.clone(),
                    cookie: r.cookie,
                })),
            );
        }
        let c = self.client(id)?;
        let reply = m::CqReply {
            cq: number,
            entries: geometry.entries,
            workers,
            reserved: 0,
            mem: (&mem).into(),
        };
        let fd = mem.region.fd().filter(|_| mem.new_region);
        send_fds::<m::CreateCq>(c, seq, &reply, fd.as_slice())?;
        c.cqs.insert(
            number,
            Cq {
                mem,
                channel: r.channel,
                qps: 0,
            },
        );
        Ok(Done::Replied)
    }

    pub(super) fn finish_free_cq(&mut self, id: u32) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(Waiting {
            seq,
            what: Pending::FreeCq { cq, .. },
        }) = c.waiting.take()
        else {
            return;
        };
        if let Some(q) = c.cqs.remove(&cq) {
            if let Some(ch) = c.channels.get_mut(&q.channel) {
                ch.cqs -= 1;
            }
            c.queues.free(q.mem);
        }
        let _ = c.conn.reply::<m::DestroyCq>(seq, &EMPTY, &[]);
        self.cqs.give(cq);
        self.answered(id);
    }

    fn create_qp(&mut self, id: u32, seq: u32, r: &m::CreateQp) -> Outcome {
        let l = &self.config.limits;
        let (most, deepest) = (l.queue_pairs_per_client, l.work_requests);
        for (what, n) in [("send", r.max_send_wr), ("receive", r.max_recv_wr)] {
            if n > deepest {
                return Err(Refusal::new(
                    libc::EINVAL,
                    format!("{n} {what} work requests: at most {deepest} are allowed"),
                ));
            }
        }
        if r.max_send_sge.max(r.max_recv_sge) > wqe::MAX_SGE as u32
            || r.max_inline > wqe::MAX_INLINE as u32
        {
            return Err(Refusal::new(
                libc::EINVAL,
                format!(
                    "at most {} scatter/gather elements and {} inline bytes are allowed",
                    wqe::MAX_SGE,
                    wqe::MAX_INLINE
                ),
            ));
        }
        let geometry = QpGeometry::new(
            r.max_send_wr,
            r.max_recv_wr,
            r.max_send_sge,
            r.max_recv_sge,
            r.max_inline,
        )
        .ok_or_else(|| Refusal::new(libc::EINVAL, "the queues would be too long"))?;
        let c = self.client(id)?;
        if c.qps.len() >= most as usize {
            return Err(Refusal::limit("queue pairs", most.into()));
        }
        for cq in [r.send_cq, r.recv_cq] {
            if !c.cqs.contains_key(&cq) {
                return Err(Refusal::unknown("completion queue", cq));
            }
        }
        if !c.pds.contains_key(&r.pd) {
            return Err(Refusal::unknown("protection domain", r.pd));
        }
        let mem = c
            .queues
            .alloc(geometry.len)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        let qpn = self.qpns.take();
        let c = self.client(id)?;
        for cq in [r.send_cq, r.recv_cq] {
            if let Some(cq) = c.cqs.get_mut(&cq) {
                cq.qps += 1;
            }
        }
        if let Some(pd) = c.pds.get_mut(&r.pd) {
            pd.users += 1;
        }
        let reply = m::QpReply {
            qp_num: qpn,
            worker: 0,
            sq_slots: geometry.sq_slots,
            rq_slots: geometry.rq_slots,
            rq_offset: geometry.rq_offset as u32,
            max_send_wr: r.max_send_wr,
            max_recv_wr: r.max_recv_wr,
            max_send_sge: r.max_send_sge.max(1),
            max_recv_sge: r.max_recv_sge.max(1),
            max_inline: r.max_inline.max(wqe::INLINE_IN_HEADER as u32),
            mem: (&mem).into(),
        };
        let fd = mem.region.fd().filter(|_| mem.new_region);
        send_fds::<m::CreateQp>(c, seq, &reply, fd.as_slice())?;
        c.qps.insert(
            qpn,
            Qp {
                attr: QpAttr {
                    qpn,
                    pd: r.pd,
                    max_send_wr: r.max_send_wr.max(1),
                    max_recv_wr: r.max_recv_wr.max(1),
                    sq_sig_all: r.sq_sig_all != 0,
                },
                geometry,
                mem,
                send_cq: r.send_cq,
                recv_cq: r.recv_cq,
                phase: QpPhase::Detached,
                worker: 0,
                cookie: 0,
                cm_channel: 0,
                device: 0,
                state: m::QpState::Idle,
                ird: 0,
                ord: 0,
                local: m::Addr::NONE,
                peer: m::Addr::NONE,
            },
        );
        Ok(Done::Replied)
    }

    /// The worker's ends of a queue pair's rings.
    fn setup(c: &Client, qpn: u32) -> Result<QpSetup, Refusal> {
        let qp = c
            .qps
            .get(&qpn)
            .ok_or_else(|| Refusal::unknown("queue pair", qpn))?;
        let (region, at) = (&qp.mem.region, qp.mem.offset);
        let bad = |e: siw_shm::OutOfBounds| Refusal::new(libc::EINVAL, e.to_string());
        let sq = SqConsumer::new(region.clone(), at, qp.geometry.sq_slots).map_err(bad)?;
        let rq = RqConsumer::new(
            region.clone(),
            at + qp.geometry.rq_offset,
            qp.geometry.rq_slots,
        )
        .map_err(bad)?;
        Ok(QpSetup {
            client: c.id,
            attr: qp.attr,
            sq,
            rq,
            send_cq: qp.send_cq,
            recv_cq: qp.recv_cq,
        })
    }

    fn modify_qp(&mut self, id: u32, seq: u32, r: &m::ModifyQp) -> Outcome {
        let qpn = r.qp_num;
        let c = self.client(id)?;
        let qp = c
            .qps
            .get_mut(&qpn)
            .ok_or_else(|| Refusal::unknown("queue pair", qpn))?;
        let command = match m::QpState::from_u32(r.state) {
            Some(m::QpState::Error) => {
                qp.state = m::QpState::Error;
                if qp.phase == QpPhase::Detached {
                    qp.phase = QpPhase::Attached;
                    qp.worker = 0;
                    let setup = Box::new(Self::setup(c, qpn)?);
                    Command::Adopt { setup }
                } else {
                    Command::ToError { qpn }
                }
            }
            Some(m::QpState::Closing) if qp.phase != QpPhase::Detached => {
                Command::Disconnect { qpn }
            }
            other => {
                let state = other.map_or_else(|| r.state.to_string(), |s| format!("{s:?}"));
                return Err(Refusal::new(
                    libc::EINVAL,
                    format!(
                        "a queue pair cannot be moved to {state} here: ERROR always, CLOSING when connected"
                    ),
                ));
            }
        };
        let worker = self.client(id)?.qps.get(&qpn).map_or(0, |q| q.worker);
        self.command(worker, command);
        let c = self.client(id)?;
        let reply = qp_state(c, qpn)?;
        send::<m::ModifyQp>(c, seq, &reply)
    }

    fn destroy_qp(&mut self, id: u32, seq: u32, qpn: u32) -> Outcome {
        let c = self.client(id)?;
        let qp = c
            .qps
            .get(&qpn)
            .ok_or_else(|| Refusal::unknown("queue pair", qpn))?;
        if qp.phase == QpPhase::Detached {
            self.free_qp(id, qpn);
            return send::<m::DestroyQp>(self.client(id)?, seq, &EMPTY);
        }
        let worker = qp.worker;
        self.command(worker, Command::DestroyQp { qpn });
        Ok(Done::Wait(Pending::DestroyQp { qpn }))
    }

    fn free_qp(&mut self, id: u32, qpn: u32) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        if let Some(qp) = c.qps.remove(&qpn) {
            for cq in [qp.send_cq, qp.recv_cq] {
                if let Some(cq) = c.cqs.get_mut(&cq) {
                    cq.qps -= 1;
                }
            }
            if let Some(pd) = c.pds.get_mut(&qp.attr.pd) {
                pd.users -= 1;
            }
            c.queues.free(qp.mem);
            self.qpns.give(qpn);
        }
    }

    pub(super) fn finish_destroy_qp(&mut self, qpn: u32) {
        let Some(id) = self.owner(qpn) else { return };
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let waits = matches!(&c.waiting, Some(Waiting { what: Pending::DestroyQp { qpn: q }, .. }) if *q == qpn);
        if !waits {
            return;
        }
        if let Some(w) = c.waiting.take() {
            let _ = c.conn.reply::<m::DestroyQp>(w.seq, &EMPTY, &[]);
        }
        self.free_qp(id, qpn);
        self.answered(id);
    }

    // ---- connections -------------------------------------------------------------------

    fn create_cm_channel(&mut self, id: u32, seq: u32) -> Outcome {
        let (ours, theirs) = Conn::pair().map_err(Refusal::memory)?;
        self.outboxes_no += 1;
        let token = TOKEN_OUTBOX | u64::from(self.outboxes_no);
        let c = self.client(id)?;
        let channel = c.number();
        let reply = m::IdReply {
            id: channel,
            reserved: 0,
        };
        send_fds::<m::CreateCmChannel>(c, seq, &reply, &[theirs.as_fd()])?;
        c.cm_channels.insert(channel, Outbox::new(ours, token));
        Ok(Done::Replied)
    }

    fn detached(c: &mut Client, qpn: u32, cm_channel: u32) -> Result<&mut Qp, Refusal> {
        if !c.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::unknown("CM channel", cm_channel));
        }
        let qp = c
            .qps
            .get_mut(&qpn)
            .ok_or_else(|| Refusal::unknown("queue pair", qpn))?;
        if qp.phase != QpPhase::Detached {
            return Err(Refusal::new(
                libc::EISCONN,
                "the queue pair is or was connected; create a new one",
            ));
        }
        Ok(qp)
    }

    fn connect(&mut self, id: u32, seq: u32, r: &m::Connect) -> Outcome {
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
        let worker = self.worker_for(device);
        let c = self.client(id)?;
        let qp = Self::detached(c, r.qp_num, r.cm_channel)?;
        qp.phase = QpPhase::Connecting;
        qp.worker = worker;
        qp.device = device;
        qp.cookie = r.cookie;
        qp.cm_channel = r.cm_channel;
        let setup = Box::new(Self::setup(c, r.qp_num)?);
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
        });
        self.command(worker, Command::Connect { setup, params });
        send::<m::Connect>(self.client(id)?, seq, &EMPTY)
    }

    fn listen(&mut self, id: u32, seq: u32, r: &m::Listen) -> Outcome {
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
        let asked = addr.map_or(r.addr.port, |a| a.port());
        let port = match asked {
            0 => self
                .free_port(&devices, local)
                .ok_or_else(|| Refusal::new(libc::EADDRINUSE, "no free port"))?,
            p if self.port_taken(&devices, local, p) => {
                return Err(Refusal::new(
                    libc::EADDRINUSE,
                    format!("port {p} is in use"),
                ));
            }
            p => p,
        };
        let c = self.client(id)?;
        if !c.cm_channels.contains_key(&r.cm_channel) {
            return Err(Refusal::unknown("CM channel", r.cm_channel));
        }
        self.listeners_no += 1;
        let listener = self.listeners_no;
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
                cm_channel: r.cm_channel,
                cookie: r.cookie,
                devices,
                local,
                port,
            },
        );
        let reply = m::ListenReply {
            listener,
            reserved: 0,
            addr: bound,
        };
        send::<m::Listen>(self.client(id)?, seq, &reply)
    }

    fn take_request(
        &mut self,
        id: u32,
        number: u32,
    ) -> Result<(crate::worker::messages::RequestId, u32), Refusal> {
        let ours = self
            .requests
            .get(&number)
            .and_then(|(_, l)| self.listeners.get(l))
            .is_some_and(|l| l.client == id);
        if !ours {
            return Err(Refusal::new(
                libc::ENOENT,
                format!("connection request {number} is gone: answered, or its peer gave up"),
            ));
        }
        self.requests
            .remove(&number)
            .ok_or_else(|| Refusal::unknown("connection request", number))
    }

    fn accept(&mut self, id: u32, seq: u32, r: &m::Accept) -> Outcome {
        let listener = self.requests.get(&r.request).map(|x| x.1);
        let channel = match r.cm_channel {
            0 => listener
                .and_then(|l| self.listeners.get(&l))
                .map_or(0, |l| l.cm_channel),
            n => n,
        };
        if listener.is_some() {
            Self::detached(self.client(id)?, r.qp_num, channel)?;
        }
        let (request, _) = self.take_request(id, r.request)?;
        let c = self.client(id)?;
        let qp = Self::detached(c, r.qp_num, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.worker = request.worker();
        qp.cookie = r.cookie;
        qp.cm_channel = channel;
        let setup = Box::new(Self::setup(c, r.qp_num)?);
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

    // ---- statistics --------------------------------------------------------------------

    fn stats_request(&mut self, id: u32, seq: u32, offset: u32) -> Outcome {
        if offset > 0 {
            let c = self.client(id)?;
            let text = c.stats_text.clone();
            return send::<m::Stats>(c, seq, &stats_part(&text, offset));
        }
        self.tokens += 1;
        let token = self.tokens;
        let left = self.config.mailboxes.len();
        for w in 0..left {
            self.command(w, Command::Stats { token });
        }
        Ok(Done::Wait(Pending::Stats { token, left }))
    }

    pub(super) fn finish_stats(&mut self, id: u32) {
        let text = self.stats_json();
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        if let Some(w) = c.waiting.take() {
            let _ = c.conn.reply::<m::Stats>(w.seq, &stats_part(&text, 0), &[]);
            c.stats_text = text;
        }
        self.answered(id);
    }

    fn stats_json(&self) -> String {
        let workers: Vec<serde_json::Value> = self
            .stats
            .iter()
            .map(|s| {
                let devices: Vec<serde_json::Value> = s
                    .devices
                    .iter()
                    .map(|(d, rx, tx, tcp)| {
                        serde_json::json!({
                            "device": self.config.devices.get(*d).map_or("", |v| v.name.as_str()),
                            "rx_frames": rx,
                            "tx_frames": tx,
                            "tcp": tcp
                                .iter()
                                .map(|(k, v)| (k.to_owned(), serde_json::Value::from(v)))
                                .collect::<serde_json::Map<_, _>>(),
                        })
                    })
                    .collect();
                serde_json::json!({
                    "queue_pairs": s.queue_pairs,
                    "iterations": s.iterations,
                    "sleeps": s.sleeps,
                    "buffers": s.buffers,
                    "buffers_free": s.buffers_free,
                    "devices": devices,
                })
            })
            .collect();
        let clients: Vec<serde_json::Value> = self
            .clients
            .values()
            .map(|c| {
                serde_json::json!({
                    "id": c.id,
                    "pid": c.pid,
                    "name": c.name,
                    "queue_pairs": c.qps.len(),
                    "completion_queues": c.cqs.len(),
                    "memory_regions": c.mrs.len(),
                    "arena_bytes": c.memory,
                })
            })
            .collect();
        serde_json::json!({ "workers": workers, "clients": clients, "listeners": self.listeners.len() })
            .to_string()
    }

    /// A link went up or down.
    #[allow(dead_code, reason = "called once ports report link changes")]
    pub(super) fn link_changed(&mut self, device: u32, up: bool) {
        let kind = if up {
            AsyncEventKind::PortActive
        } else {
            AsyncEventKind::PortErr
        };
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            self.async_event(id, kind, device, "");
        }
    }
}

fn qp_state(c: &Client, qpn: u32) -> Result<m::QpStateReply, Refusal> {
    let qp = c
        .qps
        .get(&qpn)
        .ok_or_else(|| Refusal::unknown("queue pair", qpn))?;
    Ok(m::QpStateReply {
        state: qp.state as u32,
        worker: qp.worker as u32,
        ird: qp.ird.into(),
        ord: qp.ord.into(),
        local: qp.local,
        peer: qp.peer,
    })
}

fn stats_part(text: &str, offset: u32) -> m::StatsReply {
    let mut reply = m::StatsReply {
        total: text.len() as u32,
        len: 0,
        text: [0; 4096],
    };
    let rest = text.as_bytes().get(offset as usize..).unwrap_or(&[]);
    let n = rest.len().min(reply.text.len());
    reply.text[..n].copy_from_slice(&rest[..n]);
    reply.len = n as u32;
    reply
}
