//! A worker without ports for tests, which the test's thread runs, and objects of its clients.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use dpdk::Mempool;
use nix::sys::eventfd::EventFd;
use siw_iwarp::QpInitAttr;
use siw_memory::KeyTable;
use siw_shm::control::FinalSend;
use siw_shm::work_queue::ring_len;
use siw_shm::{
    Access, CqGeometry, CqProducer, RqConsumer, SharedMemory, SqConsumer, SrqConsumer, SrqGeometry,
    SrqRing, WorkerPage,
};

use super::completion_queues::WorkerCq;
use super::messages::QpSetup;
use super::shared_receive_queues::WorkerSrq;
use super::{Mailbox, Worker, WorkerConfig};
use crate::config::IdlePolicy;
use crate::datapath::clock::TscClock;
use crate::datapath::inbox::WorkerInbox;
use crate::ids::{ClientId, CqId, SrqId};

/// Slots of each work queue of [`Queues`].
const SLOTS: u32 = 8;

fn event_descriptor() -> OwnedFd {
    EventFd::new().unwrap().into()
}

/// A worker without ports.
pub(super) fn new_worker(pool: &Mempool) -> Worker {
    let page = WorkerPage::create_sealed(2).unwrap();
    let flag = |number| page.sleep_flag(number).unwrap();
    let inbox = Arc::new(WorkerInbox::new(event_descriptor(), flag(0)));
    let mailbox = Mailbox {
        commands: ArrayQueue::new(16),
        events: ArrayQueue::new(16),
        has_ended: AtomicBool::new(false),
        inbox: inbox.clone(),
        control_wake: Arc::new(event_descriptor()),
        control_asleep: Arc::new(flag(1)),
    };
    let config = WorkerConfig {
        index: 0,
        core: 0,
        idle: IdlePolicy::Poll,
        spin: Duration::ZERO,
        clock: TscClock::start(),
        ports: Vec::new(),
        pool: pool.clone(),
        keys: KeyTable::new(16, 1).register_reader().unwrap(),
        sleeping: flag(0),
        max_pending_per_user: 1,
        mailbox: Arc::new(mailbox),
        inboxes: Arc::new([inbox]),
    };
    Worker::new(config).unwrap()
}

/// Memory of queues. All queues of a kind share it: nothing is posted to them.
pub(super) struct Queues {
    memory: Arc<SharedMemory>,
    cq: CqGeometry,
    srq: Arc<SrqRing>,
}

impl Queues {
    pub(super) fn new() -> Queues {
        let (cq, srq) = (CqGeometry::new(4, 1), SrqGeometry::new(4, 1));
        let (cq, srq) = (cq.unwrap(), srq.unwrap());
        let len = cq.len.max(srq.len).max(ring_len(SLOTS));
        let memory = Arc::new(SharedMemory::new_anonymous(len).unwrap());
        Queues {
            srq: SrqRing::new(memory.clone(), 0, srq).unwrap(),
            memory,
            cq,
        }
    }

    pub(super) fn completion_queue(&self, client: ClientId, id: CqId) -> WorkerCq {
        WorkerCq {
            id,
            client,
            producer: CqProducer::new(self.memory.clone(), 0, self.cq, 0).unwrap(),
            channel: None,
            cookie: 0,
        }
    }

    pub(super) fn shared_receive_queue(&self, client: ClientId, id: SrqId) -> WorkerSrq {
        WorkerSrq {
            id,
            client,
            consumer: SrqConsumer::new(self.srq.clone(), Arc::default()),
        }
    }

    /// A queue pair, whose completion queue does not exist.
    pub(super) fn queue_pair(&self, client: ClientId, qpn: u32) -> QpSetup {
        QpSetup {
            client,
            user: 0,
            attr: QpInitAttr {
                qpn,
                pd: 1,
                max_send_wr: 4,
                max_recv_wr: 4,
                sq_sig_all: false,
                denied_access: Access::NONE,
            },
            sq: SqConsumer::new(self.memory.clone(), 0, SLOTS).unwrap(),
            rq: RqConsumer::new(self.memory.clone(), 0, SLOTS).unwrap(),
            send_cq: CqId(0),
            recv_cq: CqId(0),
            srq: None,
            srq_share: 0,
            is_paired: false,
            most_connections: 0,
            waits_for_receives: false,
            final_send: FinalSend::default(),
            is_recorded: false,
        }
    }
}
