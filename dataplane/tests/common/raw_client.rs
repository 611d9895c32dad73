//! A client that implements the control protocol without the client library, so that it can write
//! anything into its queues.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use siw::CmEvent;
use siw_shm::control::messages as m;
use siw_shm::control::{ControlSocket, Message, codec};
use siw_shm::shared_memory::{PageSize, SharedMemory};
use siw_shm::work_queue::{OFF_PENDING, OFF_TAIL};
use siw_shm::{CqConsumer, CqGeometry};

use super::{Daemon, End, PATIENCE};

/// Request to import the first `len` bytes of a memory file.
pub fn import_of(len: u64) -> m::ImportMemory {
    m::ImportMemory {
        kind: m::IMPORT_FILE,
        writable: 1,
        offset: 0,
        len,
    }
}

/// Imports the first `imported` bytes of a new file with `len` bytes of memory, whose last descriptor
/// the daemon has then. Returns the number of the arena.
pub fn import_new_file(conn: &ControlSocket, seq: u32, len: usize, imported: u64) -> u32 {
    let file = SharedMemory::create_memfd("file", len, PageSize::Normal).unwrap();
    file.fill_zero(0, len).unwrap();
    let fd = file.memfd().unwrap();
    let (made, _) = conn
        .call_and_wait(seq, &import_of(imported), &[fd])
        .unwrap();
    made.id
}

/// One protection domain, completion queue, shared receive queue and queue pair.
pub struct RawClient {
    pub conn: ControlSocket,
    /// The memory of all its queues.
    pub queues: Arc<SharedMemory>,
    pub pd: u32,
    pub cq: m::CqReply,
    pub srq: m::SrqReply,
    pub qp: m::QpReply,
    pub doorbells: SharedMemory,
    pub doorbell_capacity: u32,
    pub wake: OwnedFd,
    sequence: u32,
    _descriptors: Vec<OwnedFd>,
}

impl RawClient {
    /// A client with a queue pair that was never connected. If `shared`, it receives through the
    /// shared receive queue.
    pub fn detached(daemon: &Daemon, shared: bool) -> RawClient {
        let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
        let hello = m::ClientHello::new("hostile");
        let (hello, mut descriptors) = conn.call_and_wait(1, &hello, &[]).unwrap();
        let wake = descriptors.remove(3);
        let len = siw_shm::doorbell::ring_len(hello.doorbell_capacity);
        let doorbells = SharedMemory::map_fd(descriptors.remove(1), len).unwrap();
        let pd = m::AllocPd {
            device: 0,
            reserved: 0,
        };
        let (pd, _) = conn.call_and_wait(2, &pd, &[]).unwrap();
        let cq = m::CreateCq {
            cqe: 64,
            channel: 0,
            cookie: 0,
        };
        let (cq, mut cq_descriptors) = conn.call_and_wait(3, &cq, &[]).unwrap();
        // Mapped before the next request: afterwards it cannot be mapped for writing any more.
        let region = cq_descriptors.pop().unwrap();
        let queues = Arc::new(SharedMemory::map_fd(region, cq.mem.region_len as usize).unwrap());
        let srq = m::CreateSrq {
            pd: pd.id,
            max_wr: 16,
            max_sge: 4,
            limit: if shared { 4 } else { 0 },
            share: 0,
            reserved: 0,
        };
        let (srq, _) = conn.call_and_wait(4, &srq, &[]).unwrap();
        let create = m::CreateQp {
            pd: pd.id,
            send_cq: cq.cq,
            recv_cq: cq.cq,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 64,
            sq_sig_all: 0,
            srq: if shared { srq.srq } else { 0 },
            final_send: m::FinalSend::default(),
        };
        let (qp, _) = conn.call_and_wait(5, &create, &[]).unwrap();
        RawClient {
            conn,
            queues,
            pd: pd.id,
            cq,
            srq,
            qp,
            doorbells,
            doorbell_capacity: hello.doorbell_capacity,
            wake,
            sequence: 5,
            _descriptors: descriptors,
        }
    }

    /// A client with a queue pair that is connected to that of `end`.
    pub fn connected(daemon: &Daemon, end: &End, shared: bool) -> RawClient {
        let mut client = RawClient::detached(daemon, shared);
        let channel = m::CreateCmChannel { flags: 0 };
        let (channel, mut events) = client.call(&channel);
        let events = ControlSocket::from(events.pop().unwrap());
        events.set_nonblocking(false).unwrap();
        let listener =
            siw::CmListener::new(&end.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 0).unwrap();
        let connect = m::Connect {
            qp_num: client.qp.qp_num,
            device: m::ANY_DEVICE,
            cm_channel: channel.id,
            timeout_ms: 0,
            cookie: 0,
            dst: listener.local_addr().into(),
            src: m::Addr::NONE,
            params: connection_parameters(4),
            stream: 0,
            reserved: 0,
        };
        client.call(&connect);
        let CmEvent::ConnectRequest(request) = end.cm.get_event(Some(PATIENCE)).unwrap() else {
            panic!("no request");
        };
        request
            .accept(&end.qp, None, &siw::ConnectOptions::default())
            .unwrap();
        let packet = events.recv_packet().unwrap();
        let event: m::CmEventMessage =
            codec::decode_event(m::KIND_CM_EVENT, &packet.bytes).unwrap();
        assert_eq!(event.kind, m::CmEventKind::Established as u32);
        client
    }

    /// Sends a request that must succeed.
    pub fn call<M: Message>(&mut self, request: &M) -> (M::Reply, Vec<OwnedFd>) {
        self.try_call(request).unwrap()
    }

    pub fn try_call<M: Message>(
        &mut self,
        request: &M,
    ) -> Result<(M::Reply, Vec<OwnedFd>), codec::CallError> {
        self.sequence += 1;
        self.conn.call_and_wait(self.sequence, request, &[])
    }

    /// Offset of the send queue.
    pub fn send_queue(&self) -> usize {
        self.qp.mem.offset as usize
    }

    /// A consumer that polls the completion queue.
    pub fn completions(&self) -> CqConsumer {
        let geometry = CqGeometry::from_exact(self.cq.entries, self.cq.workers).unwrap();
        CqConsumer::new(self.queues.clone(), self.cq.mem.offset as usize, geometry).unwrap()
    }

    /// Writes the send queue's producer index and rings the doorbell.
    pub fn ring(&self, tail: u32) {
        let at = self.send_queue();
        let word = self.queues.atomic_u32(at + OFF_TAIL).unwrap();
        word.store(tail, Ordering::SeqCst);
        self.ring_again();
    }

    /// Rings the doorbell again without changing the send queue.
    pub fn ring_again(&self) {
        let pending = self.send_queue() + OFF_PENDING;
        let pending = self.queues.atomic_u32(pending).unwrap();
        pending.store(1, Ordering::SeqCst);
        let tail = self.doorbells.atomic_u32(0).unwrap();
        let number = tail.fetch_add(1, Ordering::SeqCst) & (self.doorbell_capacity - 1);
        let slot = siw_shm::doorbell::HEADER + number as usize * 4;
        let slot = self.doorbells.atomic_u32(slot).unwrap();
        slot.store(self.qp.qp_num + 1, Ordering::SeqCst);
        let _ = nix::unistd::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Connection parameters with the device's defaults, `reads` Reads in flight each way, and no
/// private data.
pub fn connection_parameters(reads: u32) -> m::ConnParams {
    m::ConnParams {
        ord: reads,
        ird: reads,
        crc: m::BY_DEVICE,
        mpa_rev: m::BY_DEVICE,
        refusals: 0,
        waits_for_receives: 0,
        private_data: m::PrivateData::new(&[]).unwrap(),
    }
}
