//! Datagram services of rdma_cm (RDMA_PS_UDP): a listener on a binding with BIND_DATAGRAMS is found by its
//! port, by messages of the service ID resolution (SIDR) between the queue pairs 1 of two devices.
//!
//! ```text
//!  FIND_SERVICE -> Search -- SIDR_REQ, repeated --> find_service() -> Incoming -> SERVICE_REQUEST
//!  SERVICE_REPLY <- Search <------- SIDR_REP --------- Incoming, answered <- ANSWER_FIND_SERVICE
//! ```
//! An answer is kept for some time, because the request comes again if the answer was lost. The worker that
//! has queue pair 1 sends and receives the messages (`worker/mads.rs`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nix::libc;
use siw_net::QuotaOwner;
use siw_roce::{
    DEFAULT_PKEY, MAD_LEN, MAD_QPN, SIDR_REPLY_DATA_MAX, SIDR_REQUEST_DATA_MAX, SidrMessage,
    SidrReply, SidrRequest, SidrStatus,
};
use siw_shm::control::messages as m;
use siw_shm::control::{CmEventKind, CmEventMessage, Text};

use super::listening::Listeners;
use crate::control::account::quotas::{Charged, Quota};
use crate::control::client::cm_events::to_private_data;
use crate::control::context::Context;
use crate::control::device::devices::{check_own_address, socket_addr};
use crate::control::queues::datagrams::take_shared_datagrams;
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, send_reply};
use crate::control::resources::Resources;
use crate::ids::{ClientId, CmChannelId, CmListenerId, Qpn};
use crate::worker::messages::{Command, MadToSend, NO_CLIENT};

/// Maximum number of searches of one client, and quota amounts of one.
const MAX_SEARCHES: usize = 4096;
const SEARCH: [(Quota, u64); 1] = [(Quota::Heap, 1024)];
/// Time for an answer if the client names none: that of Linux, 16 requests of 4.3 s each.
const DEFAULT_TIMEOUT_MS: u32 = 68_700;
/// Pause until a request is sent again, as Linux makes. A shorter one asks Linux twice: once it has answered, it
/// takes a repeated request for a new one.
const PAUSE: Duration = Duration::from_millis(4295);
/// Maximum number of requests that wait for their program's answer, of all programs and of one user's.
const MAX_WAITING: usize = 8192;
const MAX_WAITING_OF_USER: usize = MAX_WAITING / 4;
/// Time for a program's answer.
const WAITING_TIME: Duration = Duration::from_secs(120);
/// Maximum number of answers that are kept, and for how long: Linux asks again after 4 s each, for 65 s.
const MAX_ANSWERED: usize = 4096;
const ANSWER_MEMORY: Duration = Duration::from_secs(70);
/// Expired times handled in one turn of the control thread.
const TIMES_PER_TURN: usize = 64;

/// Addresses of both ends, and the worker's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Ends {
    device: usize,
    local: IpAddr,
    remote: IpAddr,
}

/// What tells the requests of peers apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PeerKey {
    ends: Ends,
    transaction: u64,
    request_id: u32,
    port: u16,
}

/// A peer's request.
struct Incoming {
    key: PeerKey,
    client: ClientId,
    user: u32,
    listener: CmListenerId,
    /// The answer without a queue pair.
    refusal: SidrReply,
    /// The answer that was sent.
    answer: Option<Box<[u8; MAD_LEN]>>,
    until: Instant,
}

/// A client's search for a service.
struct Search {
    client: ClientId,
    cm_channel: CmChannelId,
    cookie: u64,
    ends: Ends,
    owner: QuotaOwner,
    request: SidrRequest,
    /// Next time to send the request, and the end of the search.
    next: Instant,
    until: Instant,
}

/// A request of a peer or of a client, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::control) enum ServiceEntry {
    Incoming(u32),
    Search(u32),
}

/// Requests for datagram services, of peers and of clients.
#[derive(Default)]
pub(in crate::control) struct Services {
    incoming: BTreeMap<u32, Incoming>,
    by_peer: BTreeMap<PeerKey, u32>,
    /// Numbers of answered requests, the oldest first; some may be gone.
    answered: VecDeque<u32>,
    /// Number of requests that wait for each user's programs, and of all.
    waiting_of_user: BTreeMap<u32, usize>,
    waiting: usize,
    searches: BTreeMap<u32, Charged<Search, 1>>,
    by_client: BTreeSet<(ClientId, ServiceEntry)>,
    /// One time of each entry.
    times: BTreeSet<(Instant, ServiceEntry)>,
    last: u32,
    /// Source of transactions that other hosts cannot guess.
    secret: RandomState,
}

impl Services {
    /// Next time at which [`Self::run`] has work.
    pub fn first_time(&self) -> Option<Instant> {
        self.times.first().map(|(time, _)| *time)
    }

    /// Entries of a client.
    pub fn of_client(&self, client: ClientId) -> impl Iterator<Item = ServiceEntry> {
        let from = (client, ServiceEntry::Incoming(0));
        let to = (client, ServiceEntry::Search(u32::MAX));
        self.by_client.range(from..=to).map(|(_, entry)| *entry)
    }

    fn next_number(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1).max(1);
            let number = self.last;
            if !self.incoming.contains_key(&number) && !self.searches.contains_key(&number) {
                return number;
            }
        }
    }

    /// Processes a message of another host.
    pub fn on_message(
        &mut self,
        context: &mut Context,
        listeners: &mut Listeners,
        (device, local, remote): (usize, IpAddr, IpAddr),
        message: &SidrMessage,
    ) {
        let ends = Ends {
            device,
            local,
            remote,
        };
        match message {
            SidrMessage::Request(request) => self.on_request(context, listeners, ends, request),
            SidrMessage::Reply(reply) => self.on_reply(&mut context.resources, ends, reply),
            // The worker has answered.
            SidrMessage::Unserved(_) => {}
        }
    }

    fn on_request(
        &mut self,
        context: &mut Context,
        listeners: &mut Listeners,
        ends: Ends,
        request: &SidrRequest,
    ) {
        let key = PeerKey {
            ends,
            transaction: request.transaction,
            request_id: request.request_id,
            port: request.port,
        };
        let known = self.by_peer.get(&key);
        if let Some(known) = known.and_then(|number| self.incoming.get(number)) {
            if let Some(answer) = &known.answer {
                let owner = owner_of(&context.resources, known.client);
                send(context, ends, owner, **answer);
            }
            return;
        }
        let Some((number, service)) = listeners.find_service(ends.device, ends.local, request.port)
        else {
            let refusal = request.refusal(SidrStatus::UNSUPPORTED);
            return send(context, ends, NO_CLIENT, refusal.build());
        };
        let (client, channel, cookie) = (service.client, service.cm_channel, service.cookie);
        let Some(found) = context.resources.clients.get(&client) else {
            return;
        };
        let user = found.account.uid();
        // The peer asks again: there may be room then.
        let of_user = self.waiting_of_user.get(&user).copied().unwrap_or(0);
        if found.events_waiting.is_half_used()
            || service.waiting >= service.backlog
            || self.waiting >= MAX_WAITING
            || of_user >= MAX_WAITING_OF_USER
        {
            return listeners.log_overflow(number);
        }
        let listener = number;
        let number = self.next_number();
        let until = Instant::now() + WAITING_TIME;
        let incoming = Incoming {
            key,
            client,
            user,
            listener,
            refusal: request.refusal(SidrStatus::REJECTED),
            answer: None,
            until,
        };
        self.incoming.insert(number, incoming);
        self.by_peer.insert(key, number);
        let entry = ServiceEntry::Incoming(number);
        self.by_client.insert((client, entry));
        self.times.insert((until, entry));
        self.waiting += 1;
        *self.waiting_of_user.entry(user).or_default() += 1;
        listeners.count_waiting(listener);
        let mut event = CmEventMessage::new(CmEventKind::ServiceRequest);
        event.cookie = cookie;
        event.request = number;
        event.listener = listener.0;
        event.device = ends.device as u32;
        event.local = SocketAddr::new(ends.local, request.port).into();
        event.peer = SocketAddr::new(ends.remote, request.from.1).into();
        event.private_data = to_private_data(&request.private_data);
        context
            .resources
            .post_cm_event(client, Some(channel), &event);
    }

    fn on_reply(&mut self, resources: &mut Resources, ends: Ends, reply: &SidrReply) {
        let number = reply.request_id;
        let found = self.searches.get(&number);
        let is_ours = found.is_some_and(|search| {
            (search.ends, search.request.transaction) == (ends, reply.transaction)
        });
        if !is_ours {
            return;
        }
        let mut event = CmEventMessage::new(CmEventKind::ServiceReply);
        event.sidr_status = reply.status.0;
        event.qp_num = reply.qpn;
        event.qkey = reply.qkey;
        event.private_data = to_private_data(&reply.private_data);
        if reply.status != SidrStatus::SUCCESS {
            event.errno = libc::ECONNREFUSED as u32;
            event.reason = Text::new(match reply.status {
                SidrStatus::UNSUPPORTED => "no datagram service listens at that address and port",
                SidrStatus::REJECTED => "the datagram service refused the request",
                _ => "the peer refused the request for its datagram service",
            });
        }
        self.end_search(resources, number, event);
    }

    /// Ends a search with this event.
    fn end_search(&mut self, resources: &mut Resources, number: u32, mut event: CmEventMessage) {
        let Some(search) = self.remove_search(number) else {
            return;
        };
        event.cookie = search.cookie;
        event.device = search.ends.device as u32;
        let (port, from) = (search.request.port, search.request.from.1);
        event.local = SocketAddr::new(search.ends.local, from).into();
        event.peer = SocketAddr::new(search.ends.remote, port).into();
        resources.post_cm_event(search.client, Some(search.cm_channel), &event);
    }

    fn remove_search(&mut self, number: u32) -> Option<Charged<Search, 1>> {
        let search = self.searches.remove(&number)?;
        let entry = ServiceEntry::Search(number);
        self.by_client.remove(&(search.client, entry));
        self.times.remove(&(search.next, entry));
        Some(search)
    }

    fn remove_incoming(&mut self, listeners: &mut Listeners, number: u32) -> Option<Incoming> {
        let incoming = self.incoming.remove(&number)?;
        self.by_peer.remove(&incoming.key);
        let entry = ServiceEntry::Incoming(number);
        self.by_client.remove(&(incoming.client, entry));
        self.times.remove(&(incoming.until, entry));
        if incoming.answer.is_none() {
            self.count_answered(listeners, incoming.listener, incoming.user);
        }
        Some(incoming)
    }

    fn count_answered(&mut self, listeners: &mut Listeners, listener: CmListenerId, user: u32) {
        listeners.count_answered(listener);
        self.waiting = self.waiting.saturating_sub(1);
        if let Some(of_user) = self.waiting_of_user.get_mut(&user) {
            *of_user = of_user.saturating_sub(1);
            if *of_user == 0 {
                self.waiting_of_user.remove(&user);
            }
        }
    }

    /// Removes an entry of a client that leaves; a request that waits is refused.
    pub fn remove_entry(
        &mut self,
        context: &mut Context,
        listeners: &mut Listeners,
        entry: ServiceEntry,
    ) {
        match entry {
            ServiceEntry::Search(number) => drop(self.remove_search(number)),
            ServiceEntry::Incoming(number) => {
                let removed = self.remove_incoming(listeners, number);
                if let Some(removed) = removed.filter(|removed| removed.answer.is_none()) {
                    send(
                        context,
                        removed.key.ends,
                        NO_CLIENT,
                        removed.refusal.build(),
                    );
                }
            }
        }
    }

    /// Refuses the requests that wait for a listener, which ends.
    pub fn forget_listener(
        &mut self,
        context: &mut Context,
        listeners: &mut Listeners,
        (client, listener): (ClientId, CmListenerId),
    ) {
        let of_listener = self.of_client(client).filter(|entry| match entry {
            ServiceEntry::Incoming(number) => self
                .incoming
                .get(number)
                .is_some_and(|found| found.listener == listener && found.answer.is_none()),
            ServiceEntry::Search(_) => false,
        });
        let of_listener: Vec<_> = of_listener.collect();
        for entry in of_listener {
            self.remove_entry(context, listeners, entry);
        }
    }

    /// Ends the searches on a device that was removed.
    pub fn remove_device(&mut self, resources: &mut Resources, device: usize) {
        let on_it = self.searches.iter();
        let on_it: Vec<_> = on_it
            .filter(|(_, search)| search.ends.device == device)
            .map(|(number, _)| *number)
            .collect();
        for number in on_it {
            let event = failure(libc::ENODEV, "the device was removed");
            self.end_search(resources, number, event);
        }
    }

    /// Sends requests again, and ends what has expired; some of it in one turn.
    pub fn run(&mut self, context: &mut Context, listeners: &mut Listeners) {
        if self.times.is_empty() {
            return;
        }
        let now = Instant::now();
        for _ in 0..TIMES_PER_TURN {
            if self.first_time().is_none_or(|first| first > now) {
                return;
            }
            let Some((_, entry)) = self.times.pop_first() else {
                return;
            };
            match entry {
                ServiceEntry::Incoming(number) => drop(self.remove_incoming(listeners, number)),
                ServiceEntry::Search(number) => self.repeat_search(context, number, now),
            }
        }
    }

    fn repeat_search(&mut self, context: &mut Context, number: u32, now: Instant) {
        let entry = ServiceEntry::Search(number);
        let Some(search) = self.searches.get_mut(&number) else {
            return;
        };
        if now >= search.until {
            let event = failure(libc::ETIMEDOUT, "the peer did not answer in time");
            return self.end_search(&mut context.resources, number, event);
        }
        search.next = search.until.min(now + PAUSE);
        self.times.insert((search.next, entry));
        send(context, search.ends, search.owner, search.request.build());
    }

    /// Searches a datagram service, see [`m::FindService`].
    pub fn find(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::FindService,
    ) -> Outcome {
        let data = request.private_data.as_bytes();
        if data.len() > SIDR_REQUEST_DATA_MAX {
            let why = format!("more than {SIDR_REQUEST_DATA_MAX} bytes of private data");
            return Err(Refusal::new(libc::EINVAL, why));
        }
        let addresses = (socket_addr(request.src), socket_addr(request.dst));
        let (Some(local), Some(remote)) = addresses else {
            let why = "the source or the destination address is missing";
            return Err(Refusal::new(libc::EINVAL, why));
        };
        if remote.port() == 0 || remote.ip().is_unspecified() || remote.ip().is_multicast() {
            let why = format!("{remote} is not the address and port of one service");
            return Err(Refusal::new(libc::EINVAL, why));
        }
        let device = request.device as usize;
        let view = context.devices.check_device(device)?;
        check_own_address(view, local.ip(), remote.ip())?;
        let cm_channel = CmChannelId(request.cm_channel);
        let client = context.resources.client_mut(id)?;
        if !client.cm_channels.contains_key(&cm_channel) {
            return Err(Refusal::no_such("CM channel", cm_channel.0));
        }
        let searches = self.of_client(id);
        let is_search = |entry: &ServiceEntry| matches!(entry, ServiceEntry::Search(_));
        if searches.filter(is_search).count() >= MAX_SEARCHES {
            let why = format!("{MAX_SEARCHES} datagram services are being searched: wait for one");
            return Err(Refusal::new(libc::ENOBUFS, why));
        }
        let charge = context.resources.charge(id, SEARCH)?;
        let number = self.next_number();
        let mut private_data = [0; SIDR_REQUEST_DATA_MAX];
        private_data[..data.len()].copy_from_slice(data);
        let timeout = match request.timeout_ms {
            0 => DEFAULT_TIMEOUT_MS,
            timeout => timeout.min(m::MAX_SERVICE_TIMEOUT_MS),
        };
        let now = Instant::now();
        let until = now + Duration::from_millis(timeout.into());
        let search = Search {
            client: id,
            cm_channel,
            cookie: request.cookie,
            ends: Ends {
                device,
                local: local.ip(),
                remote: remote.ip(),
            },
            owner: owner_of(&context.resources, id),
            request: SidrRequest {
                transaction: self.secret.hash_one((id, number, until)),
                request_id: number,
                pkey: DEFAULT_PKEY,
                port: remote.port(),
                from: (local.ip(), local.port()),
                to: remote.ip(),
                private_data,
            },
            next: until.min(now + PAUSE),
            until,
        };
        take_shared_datagrams(context, device);
        send(context, search.ends, search.owner, search.request.build());
        let entry = ServiceEntry::Search(number);
        self.by_client.insert((id, entry));
        self.times.insert((search.next, entry));
        self.searches.insert(number, charge.of(search));
        let reply = m::IdReply {
            id: number,
            reserved: 0,
        };
        send_reply::<m::FindService>(context.resources.client_mut(id)?, seq, &reply)
    }

    /// Ends a search without an event, see [`m::EndFindService`].
    pub fn end(
        &mut self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        number: u32,
    ) -> Outcome {
        let found = self.searches.get(&number);
        if found.is_some_and(|search| search.client == id) {
            drop(self.remove_search(number));
        }
        send_reply::<m::EndFindService>(resources.client_mut(id)?, seq, &EMPTY)
    }

    /// Moves the event of a client's search to another channel, if it has not ended.
    pub fn migrate(&mut self, id: ClientId, number: u32, channel: CmChannelId) {
        let search = self.searches.get_mut(&number);
        if let Some(search) = search.filter(|search| search.client == id) {
            search.cm_channel = channel;
        }
    }

    /// Answers a peer's request, see [`m::AnswerFindService`].
    pub fn answer(
        &mut self,
        context: &mut Context,
        listeners: &mut Listeners,
        (id, seq): (ClientId, u32),
        answer: &m::AnswerFindService,
    ) -> Outcome {
        let data = answer.private_data.as_bytes();
        if data.len() > SIDR_REPLY_DATA_MAX {
            let why = format!("more than {SIDR_REPLY_DATA_MAX} bytes of private data");
            return Err(Refusal::new(libc::EINVAL, why));
        }
        let number = answer.request;
        let found = self.incoming.get_mut(&number);
        let found = found.filter(|found| found.client == id && found.answer.is_none());
        let found = found.ok_or_else(|| {
            let why =
                format!("no request {number} for a datagram service: it was answered, or expired");
            Refusal::new(libc::ENOENT, why)
        })?;
        let client = context.resources.client_mut(id)?;
        let mut reply = found.refusal;
        match answer.accepts {
            0 => {}
            1 if !client.qps.contains_key(&Qpn(answer.qp_num)) => {
                return Err(Refusal::no_such("queue pair", answer.qp_num));
            }
            1 => {
                reply.status = SidrStatus::SUCCESS;
                (reply.qpn, reply.qkey) = (answer.qp_num, answer.qkey);
            }
            other => {
                let why = format!("{other} is no answer to a request for a datagram service");
                return Err(Refusal::new(libc::EINVAL, why));
            }
        }
        reply.private_data[..data.len()].copy_from_slice(data);
        let mad = reply.build();
        let (ends, listener, user) = (found.key.ends, found.listener, found.user);
        let entry = ServiceEntry::Incoming(number);
        self.times.remove(&(found.until, entry));
        found.until = Instant::now() + ANSWER_MEMORY;
        self.times.insert((found.until, entry));
        found.answer = Some(Box::new(mad));
        self.count_answered(listeners, listener, user);
        self.answered.push_back(number);
        while self.answered.len() > MAX_ANSWERED {
            if let Some(oldest) = self.answered.pop_front() {
                let answered = self.incoming.get(&oldest);
                if answered.is_some_and(|oldest| oldest.answer.is_some()) {
                    drop(self.remove_incoming(listeners, oldest));
                }
            }
        }
        let owner = owner_of(&context.resources, id);
        send(context, ends, owner, mad);
        send_reply::<m::AnswerFindService>(context.resources.client_mut(id)?, seq, &EMPTY)
    }
}

fn owner_of(resources: &Resources, id: ClientId) -> QuotaOwner {
    let client = resources.clients.get(&id);
    client.map_or(NO_CLIENT, |client| QuotaOwner {
        // As for queue pairs.
        client: id.0 as u32,
        user: client.peer.uid,
    })
}

/// Sends a MAD by the worker that has queue pair 1 of the device.
fn send(context: &mut Context, ends: Ends, owner: QuotaOwner, bytes: [u8; MAD_LEN]) {
    let Ok(view) = context.devices.check_device(ends.device) else {
        return;
    };
    let worker = view.steering.owner_of_datagrams(MAD_QPN);
    let mad = Box::new(MadToSend {
        device: ends.device,
        local: ends.local,
        remote: ends.remote,
        owner,
        bytes,
    });
    context.workers.post_command(worker, Command::SendMad(mad));
}

fn failure(errno: i32, reason: &str) -> CmEventMessage {
    let mut event = CmEventMessage::new(CmEventKind::ServiceReply);
    event.errno = errno as u32;
    event.reason = Text::new(reason);
    event
}
