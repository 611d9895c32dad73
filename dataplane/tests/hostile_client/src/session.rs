//! The control protocol and the shared memory, used without the client library and its checks.

use rustix::fd::OwnedFd;
use siw_shm::control::codec::{self, CallError};
use siw_shm::control::messages::{self as m, Message};
use siw_shm::control::{ControlSocket, RecvError};
use siw_shm::doorbell;
use siw_shm::shared_memory::SharedMemory;
use siw_shm::work_queue::{self, OFF_HEAD, OFF_PENDING, OFF_TAIL, OFF_WORKER};
use siw_shm::{SendData, SendWr, Sge, SqProducer};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// Time limit for a reply; longer than any reply of the daemon takes.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

/// One connection to the daemon.
pub struct AttackSession {
    pub conn: ControlSocket,
    pub hello: m::HelloReply,
    /// Worker state page, asynchronous events.
    _others: Vec<OwnedFd>,
    /// The eventfd of each worker.
    pub wake: Vec<OwnedFd>,
    pub bells: SharedMemory,
    regions: HashMap<u32, Arc<SharedMemory>>,
    seq: u32,
}

/// A queue pair and the location of its rings.
pub struct AttackerQp {
    pub reply: m::QpReply,
    pub memory: Arc<SharedMemory>,
}

/// Registered memory.
pub struct AttackerMemory {
    pub arena: u32,
    pub memory: SharedMemory,
    pub keys: m::MrReply,
    pub pd: u32,
}

impl AttackerMemory {
    /// The first half of the memory.
    pub fn first_half(&self) -> Sge {
        Sge {
            addr: 0,
            length: (REGION_LEN / 2) as u32,
            lkey: self.keys.lkey,
        }
    }

    /// A WRITE of `sges` to the second half of the memory.
    pub fn write_second_half<'a>(&self, sges: &'a [Sge]) -> SendWr<'a> {
        SendWr::write(1, SendData::Sges(sges), REGION_LEN / 2, self.keys.rkey)
    }

    /// A READ of the second half of the memory into `sges`.
    pub fn read_second_half<'a>(&self, sges: &'a [Sge]) -> SendWr<'a> {
        SendWr::read(1, sges, REGION_LEN / 2, self.keys.rkey)
    }
}

/// Listener for connections of this client to itself.
pub struct AttackerListener {
    channel: u32,
    events: ControlSocket,
    addr: m::Addr,
}

/// Length of the attacker's memory regions.
pub const REGION_LEN: u64 = 1 << 20;

impl AttackSession {
    /// Connects and sends HELLO.
    pub fn open(socket: &Path) -> Result<AttackSession, CallError> {
        let conn = ControlSocket::connect_within(socket, REPLY_TIMEOUT)?;
        let hello = m::ClientHello::new("hostile");
        conn.set_version(m::MIN_VERSION);
        let (hello, mut fds) = conn.call_and_wait(1, &hello, &[])?;
        conn.set_version(hello.version as u16);
        let wake = fds.split_off(3);
        let bells = fds.remove(1);
        let len = doorbell::ring_offset(hello.n_workers, hello.doorbell_capacity);
        Ok(AttackSession {
            conn,
            hello,
            _others: fds,
            wake,
            bells: SharedMemory::map_fd(bells, len)?,
            regions: HashMap::new(),
            seq: 1,
        })
    }

    /// Sends a request and waits for its reply.
    pub fn call<M: Message>(&mut self, message: &M) -> Result<(M::Reply, Vec<OwnedFd>), CallError> {
        self.seq = self.seq.wrapping_add(1).max(1);
        self.conn.call_and_wait(self.seq, message, &[])
    }

    /// Encodes a request that is sent without waiting for the reply.
    pub fn encode<M: Message>(&mut self, message: &M) -> Vec<u8> {
        self.seq = self.seq.wrapping_add(1).max(1);
        codec::encode_request(self.seq, message)
    }

    fn queue_memory(
        &mut self,
        place: &m::QueueRef,
        mut fds: Vec<OwnedFd>,
    ) -> Result<Arc<SharedMemory>, CallError> {
        if let Some(fd) = fds.pop() {
            let memory = Arc::new(SharedMemory::map_fd(fd, place.region_len as usize)?);
            self.regions.insert(place.region, memory);
        }
        self.regions
            .get(&place.region)
            .cloned()
            .ok_or(CallError::Proto(codec::ProtoError::MissingFd))
    }

    /// Allocates a protection domain.
    pub fn alloc_pd(&mut self) -> Result<u32, CallError> {
        let request = m::AllocPd {
            device: m::ANY_DEVICE,
            reserved: 0,
        };
        Ok(self.call(&request)?.0.id)
    }

    /// Creates a completion queue; returns it with the memory of its rings.
    pub fn create_cq(&mut self, cqe: u32) -> Result<(m::CqReply, Arc<SharedMemory>), CallError> {
        let request = m::CreateCq {
            cqe,
            channel: 0,
            cookie: 0,
        };
        let (reply, fds) = self.call(&request)?;
        let memory = self.queue_memory(&reply.mem, fds)?;
        Ok((reply, memory))
    }

    /// Creates a queue pair for `depth` requests each way.
    pub fn create_qp(&mut self, pd: u32, cq: u32, depth: u32) -> Result<AttackerQp, CallError> {
        let request = m::CreateQp {
            pd,
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: depth,
            max_recv_wr: depth,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 64,
            sq_sig_all: 0,
            srq: 0,
            final_send: m::FinalSend::default(),
        };
        let (reply, fds) = self.call(&request)?;
        let memory = self.queue_memory(&reply.mem, fds)?;
        Ok(AttackerQp { reply, memory })
    }

    /// Allocates an arena; returns its number and file.
    pub fn alloc_arena(&mut self, len: u64, huge: bool) -> Result<(u32, OwnedFd), CallError> {
        let request = m::AllocArena {
            len,
            huge: huge.into(),
            reserved: 0,
        };
        let (reply, mut fds) = self.call(&request)?;
        let fd = fds
            .pop()
            .ok_or(CallError::Proto(codec::ProtoError::MissingFd))?;
        Ok((reply.arena, fd))
    }

    /// Registers the beginning of an arena with all access rights.
    pub fn register_memory(
        &mut self,
        pd: u32,
        arena: u32,
        len: u64,
    ) -> Result<m::MrReply, CallError> {
        let request = m::RegMr {
            pd,
            arena,
            offset: 0,
            len,
            va: 0,
            access: 7,
            reserved: 0,
        };
        Ok(self.call(&request)?.0)
    }

    /// Registers one extent of application memory.
    pub fn register_extent(
        &mut self,
        pd: u32,
        extent: m::MemoryExtent,
    ) -> Result<m::MrReply, CallError> {
        let mut extents = [m::MemoryExtent::default(); m::MAX_EXTENTS];
        extents[0] = extent;
        let request = m::RegMemory {
            pd,
            access: 7,
            len: extent.len,
            va: 0,
            count: 1,
            reserved: 0,
            reason: m::Text::new(""),
            extents,
        };
        Ok(self.call(&request)?.0)
    }

    /// Allocates an arena, registers and maps it.
    pub fn new_memory(&mut self, pd: u32) -> Result<AttackerMemory, CallError> {
        let (arena, fd) = self.alloc_arena(REGION_LEN, false)?;
        Ok(AttackerMemory {
            arena,
            memory: SharedMemory::map_fd(fd, REGION_LEN as usize)?,
            keys: self.register_memory(pd, arena, REGION_LEN)?,
            pd,
        })
    }

    fn create_cm_channel(&mut self) -> Result<(u32, ControlSocket), CallError> {
        let (reply, mut fds) = self.call(&m::CreateCmChannel { flags: 0 })?;
        let fd = fds
            .pop()
            .ok_or(CallError::Proto(codec::ProtoError::MissingFd))?;
        let events = ControlSocket::from(fd);
        events.set_nonblocking(false)?;
        events.set_call_timeout(REPLY_TIMEOUT)?;
        Ok((reply.id, events))
    }

    /// Listens with a new event channel.
    pub fn listen(&mut self, at: SocketAddr) -> Result<AttackerListener, CallError> {
        let (channel, events) = self.create_cm_channel()?;
        let listen = m::Listen {
            device: m::ANY_DEVICE,
            backlog: 4,
            cm_channel: channel,
            binding: 0,
            cookie: 0,
            mpa: m::MpaOptions::BY_DEVICE,
            addr: at.into(),
            flags: 0,
            reserved: 0,
        };
        let addr = self.call(&listen)?.0.addr;
        Ok(AttackerListener {
            channel,
            events,
            addr,
        })
    }

    /// Requests a connection of a queue pair to a listener of this client.
    pub fn start_connect(
        &mut self,
        listener: &AttackerListener,
        from: &AttackerQp,
    ) -> Result<(), CallError> {
        let connect = m::Connect {
            qp_num: from.reply.qp_num,
            device: 0,
            cm_channel: listener.channel,
            timeout_ms: 0,
            cookie: 0,
            dst: listener.addr,
            src: m::Addr::NONE,
            params: connection_parameters(),
            stream: 0,
            reserved: 0,
        };
        self.call(&connect).map(drop)
    }

    /// Connects two queue pairs of this client to each other.
    pub fn connect(
        &mut self,
        listener: &AttackerListener,
        from: &AttackerQp,
        to: &AttackerQp,
    ) -> Result<(), CallError> {
        self.start_connect(listener, from)?;
        let mut established = 0;
        while established < 2 {
            let event = next_event(&listener.events)?;
            match m::CmEventKind::from_u32(event.kind) {
                Some(m::CmEventKind::ConnectRequest) => {
                    let accept = m::Accept {
                        request: event.request,
                        qp_num: to.reply.qp_num,
                        cookie: 0,
                        cm_channel: 0,
                        reserved: 0,
                        params: connection_parameters(),
                    };
                    self.call(&accept)?;
                }
                Some(m::CmEventKind::Established) => established += 1,
                _ => return Err(CallError::Closed),
            }
        }
        Ok(())
    }

    /// Creates two queue pairs that are connected to each other, and memory.
    pub fn connected_pair(
        &mut self,
        depth: u32,
        at: SocketAddr,
    ) -> Result<(AttackerQp, AttackerQp, AttackerMemory), CallError> {
        let pd = self.alloc_pd()?;
        let (cq, _) = self.create_cq(4 * depth)?;
        let from = self.create_qp(pd, cq.cq, depth)?;
        let to = self.create_qp(pd, cq.cq, depth)?;
        let listener = self.listen(at)?;
        self.connect(&listener, &from, &to)?;
        let memory = self.new_memory(pd)?;
        Ok((from, to, memory))
    }

    /// Puts a number on a worker's doorbell ring, and wakes the worker.
    pub fn ring_doorbell(&self, worker: u32, number: u32) {
        let capacity = self.hello.doorbell_capacity;
        let ring = doorbell::ring_offset(worker % self.hello.n_workers, capacity);
        let Ok(tail) = self.bells.atomic_u32(ring) else {
            return;
        };
        let slot = (tail.fetch_add(1, SeqCst) & (capacity - 1)) as usize;
        if let Ok(word) = self.bells.atomic_u32(ring + doorbell::HEADER + slot * 4) {
            word.store(number.wrapping_add(1), SeqCst);
        }
        self.wake_worker(worker);
    }

    /// Writes the worker's eventfd.
    pub fn wake_worker(&self, worker: u32) {
        if let Some(fd) = self.wake.get(worker as usize % self.wake.len()) {
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }
}

fn connection_parameters() -> m::ConnParams {
    m::ConnParams {
        ord: 4,
        ird: 4,
        crc: m::BY_DEVICE,
        mpa_rev: m::BY_DEVICE,
        refusals: 0,
        waits_for_receives: 0,
        private_data: m::PrivateData {
            len: 0,
            data: [0; m::MAX_PRIVATE_DATA],
        },
    }
}

fn next_event(events: &ControlSocket) -> Result<m::CmEventMessage, CallError> {
    let packet = events.recv_packet().map_err(|error| match error {
        RecvError::WouldBlock => CallError::TimedOut,
        _ => CallError::Closed,
    })?;
    Ok(codec::decode_event(m::KIND_CM_EVENT, &packet.bytes)?)
}

impl AttackerQp {
    fn send_queue(&self) -> usize {
        self.reply.mem.offset as usize
    }

    fn receive_queue(&self) -> usize {
        self.send_queue() + self.reply.rq_offset as usize
    }

    fn state_line(&self) -> usize {
        let offset = work_queue::state_offset(self.reply.rq_offset as usize, self.reply.rq_slots);
        self.send_queue() + offset
    }

    fn store(&self, offset: usize, value: u32) {
        if let Ok(word) = self.memory.atomic_u32(offset) {
            word.store(value, SeqCst);
        }
    }

    fn load(&self, offset: usize) -> u32 {
        self.memory
            .atomic_u32(offset)
            .map_or(0, |word| word.load(SeqCst))
    }

    /// Makes both rings look full, regardless of the worker's progress.
    pub fn fill_rings(&self) {
        for (ring, slots) in [
            (self.send_queue(), self.reply.sq_slots),
            (self.receive_queue(), self.reply.rq_slots),
        ] {
            let head = self.load(ring + OFF_HEAD);
            self.store(ring + OFF_TAIL, head.wrapping_add(slots));
        }
    }

    /// Fills every slot of the send queue with the request.
    pub fn fill_slots(&self, request: &SendWr<'_>) -> Option<()> {
        let slots = self.reply.sq_slots;
        let at = self.send_queue();
        let mut producer = SqProducer::new(self.memory.clone(), at, slots, u32::MAX).ok()?;
        while producer.push(request).is_ok() {}
        Some(())
    }

    /// Posts requests at the beginning of a fresh queue, like an honest client.
    pub fn post(&self, request: &SendWr<'_>, count: u32) {
        let slots = self.reply.sq_slots;
        let at = self.send_queue();
        let Ok(mut producer) = SqProducer::new(self.memory.clone(), at, slots, count) else {
            return;
        };
        for _ in 0..count {
            if producer.push(request).is_err() {
                break;
            }
        }
        producer.publish_posted();
    }

    /// Overwrites the words and slots of both rings with `bytes`.
    pub fn scribble(&self, bytes: &[u8]) {
        let send = work_queue::ring_len(self.reply.sq_slots);
        let receive = work_queue::ring_len(self.reply.rq_slots);
        for (ring, len) in [(self.send_queue(), send), (self.receive_queue(), receive)] {
            let len = len.min(bytes.len());
            let _ = self.memory.write(ring, &bytes[..len]);
        }
    }

    /// Rings the doorbell for this queue pair like an honest client, even if one is already
    /// pending.
    pub fn ring(&self, session: &AttackSession) {
        self.store(self.send_queue() + OFF_PENDING, 1);
        let worker = self.load(self.state_line() + OFF_WORKER);
        session.ring_doorbell(worker, self.reply.qp_num);
    }
}
