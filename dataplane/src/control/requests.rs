//! Client requests: each is checked against the client's own objects and limits, then served here
//! or passed to a worker. [`ControlThread::on_request`] is the entry point.

use nix::libc;
use siw_memory::Stag;
use siw_shm::control::messages as m;
use siw_shm::control::{Message, Request};
use siw_shm::wqe;

use super::ControlThread;
use super::pending::{DeferredRequest, PendingReply};
use super::quotas::{self, Quota};
pub(super) use super::refusal::Refusal;
use super::resources::{Client, ProtectionDomain};
use crate::config::LimitsConfig;
use crate::device_view::DeviceView;
use crate::ids::{ArenaId, ClientId, CmChannelId, CompletionChannelId, CqId, PdId, Qpn, SrqId};

/// Outcome of a served request.
pub(super) enum Served {
    Replied,
    /// A worker must answer first.
    Deferred(PendingReply),
}

/// Progress of a request.
#[derive(PartialEq, Eq)]
pub(super) enum RequestState {
    Finished,
    /// To be retried when none of the client's queue pairs is being destroyed.
    TryAgain,
}

pub(super) type Outcome = Result<Served, Refusal>;

/// Limits reported to clients, from the configuration and this version.
pub fn client_limits(limits: &LimitsConfig, devices: &[DeviceView]) -> m::Limits {
    let most = |property: fn(&DeviceView) -> u16| devices.iter().map(property).max().unwrap_or(0);
    m::Limits {
        max_qp: limits.queue_pairs_per_client,
        max_qp_wr: limits.work_requests,
        max_sge: wqe::MAX_SGE as u32,
        max_sge_rd: wqe::MAX_SGE as u32,
        max_inline: wqe::MAX_INLINE as u32,
        max_cq: limits.completion_queues_per_client,
        max_cqe: limits.completions,
        max_mr: limits.memory_regions_per_client,
        max_pd: quotas::MAX_PD,
        max_ord: most(|device| device.max_ord).into(),
        max_ird: most(|device| device.max_ird).into(),
        max_private_data: m::MAX_PRIVATE_DATA as u32,
        max_srq: limits.queue_pairs_per_client,
        max_srq_wr: super::shared_receive::srq_depth(limits),
        max_srq_sge: wqe::MAX_SGE as u32,
        max_mw: limits.memory_regions_per_client,
        max_fast_pages: siw_shm::local_wqe::MAX_FAST_PAGES,
        reserved: 0,
        max_msg: u64::from(u32::MAX),
        max_mr_size: limits.memory_per_client.0,
        max_arena: limits.memory_per_client.0,
    }
}

pub(super) fn send_reply<M: Message>(client: &Client, seq: u32, reply: &M::Reply) -> Outcome {
    send_reply_with_fds::<M>(client, seq, reply, &[])
}

pub(super) fn send_reply_with_fds<M: Message>(
    client: &Client,
    seq: u32,
    reply: &M::Reply,
    fds: &[std::os::fd::BorrowedFd<'_>],
) -> Outcome {
    // A client that does not read its replies loses them; its next call fails.
    if let Err(error) = client.conn.send_reply::<M>(seq, reply, fds) {
        tracing::debug!(client = client.id.0, "reply not sent: {error}");
    }
    Ok(Served::Replied)
}

pub(super) const EMPTY: m::Empty = m::Empty { reserved: 0 };

impl ControlThread {
    pub(super) fn on_request(&mut self, id: ClientId, seq: u32, request: &Request) -> RequestState {
        let kind = request.kind();
        let greeted = self
            .resources
            .clients
            .get(&id)
            .is_some_and(|client| client.greeted);
        let outcome = if !greeted && !matches!(request, Request::ClientHello(_)) {
            Err(Refusal::new(
                libc::EPROTO,
                "the first message must be HELLO",
            ))
        } else if let Err(error) = self.own_queues(id) {
            self.close_faulty_client(id, &format!("its queues are unusable: {error}"));
            return RequestState::Finished;
        } else {
            self.dispatch_request(id, seq, request)
        };
        tracing::trace!(
            client = id.0,
            request = request.name(),
            ok = outcome.is_ok()
        );
        self.settle_account(id);
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return RequestState::Finished;
        };
        match outcome {
            Ok(Served::Replied) => {}
            Ok(Served::Deferred(what)) => client.waiting = Some(DeferredRequest { seq, what }),
            Err(refusal) if refusal.may_be_temporary() && !client.departing_qps.is_empty() => {
                return RequestState::TryAgain;
            }
            Err(refusal) => {
                tracing::debug!(
                    client = id.0,
                    request = request.name(),
                    "refused: {}",
                    refusal.reason()
                );
                refusal.send(&client.conn, kind, seq);
            }
        }
        RequestState::Finished
    }

    /// Keeps a client from freeing pages of the queues of its earlier requests. A client maps new
    /// memory of queues before it sends another request.
    fn own_queues(&mut self, id: ClientId) -> std::io::Result<()> {
        let client = self.resources.clients.get_mut(&id);
        client.map_or(Ok(()), |client| client.queues.own_regions())
    }

    /// Passes a request to its handler.
    fn dispatch_request(&mut self, id: ClientId, seq: u32, request: &Request) -> Outcome {
        match request {
            Request::ClientHello(hello) => self.greet_client(id, seq, hello),
            Request::QueryDevice(query) => self.query_device(id, seq, query.index),
            Request::AllocPd(_) => self.alloc_pd(id, seq),
            Request::DeallocPd(request) => self.dealloc_pd(id, seq, PdId(request.pd)),
            Request::AllocArena(request) => self.alloc_arena(id, seq, request),
            Request::FreeArena(request) => self.free_arena(id, seq, ArenaId(request.arena)),
            Request::RegMr(request) => self.reg_mr(id, seq, request),
            Request::DeregMr(request) => self.dereg_mr(id, request),
            Request::ReregMr(request) => self.rereg_mr(id, request),
            Request::AddExtents(request) => self.add_extents(id, seq, request),
            Request::RegMemory(request) => self.reg_memory(id, seq, request),
            Request::ImportMemory(_) => Err(Refusal::new(
                libc::EINVAL,
                "the descriptor of the memory is missing",
            )),
            Request::AllocFastMr(request) => self.alloc_fast_mr(id, seq, request),
            Request::AllocMw(request) => self.alloc_mw(id, seq, request),
            Request::DeallocMw(request) => self.dealloc_mw(id, Stag(request.rkey)),
            Request::CreateChannel(_) => self.create_channel(id, seq),
            Request::DestroyChannel(request) => {
                self.destroy_channel(id, seq, CompletionChannelId(request.channel))
            }
            Request::CreateCq(request) => self.create_cq(id, seq, request),
            Request::DestroyCq(request) => self.destroy_cq(id, CqId(request.cq)),
            Request::ResizeCq(request) => self.resize_cq(id, request),
            Request::FreeCqRing(request) => self.free_cq_ring(id, seq, request),
            Request::ModerateCq(request) => self.moderate_cq(id, seq, request),
            Request::CreateQp(request) => self.create_qp(id, seq, request),
            Request::ModifyQp(request) => self.modify_qp(id, seq, request),
            Request::QueryQp(request) => self.query_qp(id, seq, Qpn(request.qp_num)),
            Request::DestroyQp(request) => self.destroy_qp(id, seq, Qpn(request.qp_num)),
            Request::CreateSrq(request) => self.create_srq(id, seq, request),
            Request::ModifySrq(request) => self.modify_srq(id, seq, request, true),
            Request::QuerySrq(request) => self.query_srq(id, seq, SrqId(request.srq)),
            Request::DestroySrq(request) => self.destroy_srq(id, SrqId(request.srq)),
            Request::CreateCmChannel(request) => self.create_cm_channel(id, seq, request.flags),
            Request::DestroyCmChannel(request) => {
                self.destroy_cm_channel(id, seq, CmChannelId(request.channel))
            }
            Request::Connect(request) => self.connect_qp(id, seq, request),
            Request::PairQp(request) => self.pair_qp(id, seq, request),
            Request::Listen(request) => self.start_listener(id, seq, request),
            Request::Unlisten(request) => self.stop_listener(id, seq, request),
            Request::Bind(request) => self.bind_address(id, seq, request),
            Request::Resolve(request) => self.resolve_address(id, seq, request),
            Request::MigrateCm(request) => self.migrate_events(id, seq, request),
            Request::Accept(request) => self.accept_request(id, seq, request),
            Request::Reject(request) => self.reject_request(id, seq, request),
            Request::Disconnect(request) => self.disconnect_qp(id, seq, Qpn(request.qp_num)),
            Request::ReadStats(request) => self.read_statistics(id, seq, request.offset),
        }
    }

    fn alloc_pd(&mut self, id: ClientId, seq: u32) -> Outcome {
        self.resources
            .charge(id, &[(Quota::ProtectionDomains, 1)])?;
        // Unique among all clients, because keys are checked against it.
        let pd = PdId(self.resources.pds.allocate_number()?);
        let client = self.resources.client_mut(id)?;
        client.pds.insert(pd, ProtectionDomain { users: 0 });
        let reply = m::IdReply {
            id: pd.0,
            reserved: 0,
        };
        send_reply::<m::AllocPd>(client, seq, &reply)
    }

    fn dealloc_pd(&mut self, id: ClientId, seq: u32, pd: PdId) -> Outcome {
        let client = self.resources.client_mut(id)?;
        let found = client
            .pds
            .get(&pd)
            .ok_or_else(|| Refusal::no_such("protection domain", pd.0))?;
        if found.users > 0 {
            return Err(Refusal::in_use("protection domain", found.users));
        }
        client.pds.remove(&pd);
        let outcome = send_reply::<m::DeallocPd>(client, seq, &EMPTY);
        self.resources.pds.release_number(pd.0);
        self.resources.release(id, &[(Quota::ProtectionDomains, 1)]);
        outcome
    }

    fn query_device(&mut self, id: ClientId, seq: u32, index: u32) -> Outcome {
        let count = self.config.devices.len();
        let device = self.config.devices.get(index as usize).ok_or_else(|| {
            Refusal::new(
                libc::ENODEV,
                format!("no device {index}: the number of devices is {count}"),
            )
        })?;
        let mut ips = [m::Addr::NONE; 8];
        let mut used = 0;
        for (place, cidr) in ips.iter_mut().zip(&device.addresses) {
            *place = cidr.addr.into();
            used += 1;
        }
        let reply = m::DeviceReply {
            index,
            port_state: if device.link_up {
                m::PORT_ACTIVE
            } else {
                m::PORT_DOWN
            },
            name: m::Text::new(&device.name),
            driver: m::Text::new(&device.driver),
            mac: device.mac,
            n_ips: used,
            mtu: device.mtu.into(),
            link_mbps: device.link_mbps,
            crc: device.crc.into(),
            mpa_rev: device.mpa_rev,
            reserved: [0; 6],
            caps: m::CAP_IMMEDIATE
                | m::CAP_ATOMIC
                | m::CAP_MARKERS
                | m::CAP_LOCAL_INV
                | m::CAP_MEM_WINDOW
                | m::CAP_FAST_REG,
            ips,
        };
        send_reply::<m::QueryDevice>(self.resources.client_mut(id)?, seq, &reply)
    }
}
