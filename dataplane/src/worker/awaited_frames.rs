//! Waits until the ports have released all frames that refer to memory which is to be released. The
//! control thread waits for this when a registration or a client ends.
//!
//! Drivers free sent frames on request, but some free them only as they send more, and a NIC that a
//! peer has paused sends nothing. So the wait of a client is bounded: after [`PATIENCE`] the worker
//! informs the control thread, which keeps the memory until the frames are released.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use siw_iwarp::TxRecord;
use siw_net::Instant;
use siw_shm::SharedMemory;

use super::ext_bufs::{ExtBufRefs, HeldFrames};
use super::messages::Event;
use super::thresholds::THRESHOLDS;
use crate::datapath::port::WorkerPort;
use crate::ids::CommandToken;

/// One [`Command::AwaitFrames`](super::messages::Command::AwaitFrames) under way.
struct AwaitedFrames {
    token: CommandToken,
    held: HeldFrames,
    is_answered: bool,
    unanswered: Arc<AtomicUsize>,
    /// Time at which the control thread is informed that ports still hold frames.
    late_at: Instant,
    is_late: bool,
}

/// Time that a port may take to release the frames: longer than sending a full ring on the slowest
/// link takes, shorter than clients wait for an answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Interval between sweeps of buffers that finished messages have left in ports.
pub(super) const SWEEP_INTERVAL: Duration = Duration::from_millis(10);

/// Memory that frames refer to after their message has finished, and the waits for its release.
pub(super) struct FrameReleases {
    /// The worker's place among all.
    worker: usize,
    awaited: Vec<AwaitedFrames>,
    /// Time of the next sweep.
    next_sweep: Instant,
}

impl FrameReleases {
    pub(super) fn new(worker: usize) -> FrameReleases {
        FrameReleases {
            worker,
            awaited: Vec::new(),
            next_sweep: Instant::ZERO,
        }
    }

    /// Starts to wait for the frames that refer to these regions now.
    pub(super) fn await_frames(
        &mut self,
        now: Instant,
        token: CommandToken,
        regions: Arc<[Arc<SharedMemory>]>,
        unanswered: Arc<AtomicUsize>,
    ) {
        self.awaited.push(AwaitedFrames {
            token,
            held: HeldFrames::of_regions(regions),
            is_answered: false,
            unanswered,
            late_at: now + PATIENCE,
            is_late: false,
        });
    }

    /// True if nothing waits for frames.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.awaited.is_empty()
    }

    /// True while a client may be waiting for frames, so that the ports must be swept often.
    pub(super) fn is_urgent(&self, now: Instant) -> bool {
        self.awaited.iter().any(|frames| now < frames.late_at)
    }

    /// True if the ports are to be swept for memory of finished messages.
    #[inline]
    pub(super) fn is_sweep_due(&self, now: Instant, ext_bufs: &ExtBufRefs) -> bool {
        ext_bufs.has_unreleased() && now >= self.next_sweep
    }

    /// Has the ports free sent frames, and takes back the memory of finished messages. Called at
    /// intervals: no completion waits for it, but the memory stays mapped until then.
    #[cold]
    pub(super) fn sweep(
        &mut self,
        now: Instant,
        ports: &mut [WorkerPort<TxRecord>],
        ext_bufs: &mut ExtBufRefs,
    ) {
        self.next_sweep = now + SWEEP_INTERVAL;
        for port in ports {
            port.output.release_sent_buffers();
        }
        ext_bufs.reclaim_released(THRESHOLDS.releases);
    }

    /// Answers when the ports have released the frames. A worker that has answered continues to have
    /// its ports free sent frames until all workers have answered: a frame may be in the queue of a
    /// worker that sent it on behalf of another one. Returns true if there is more to do now: a batch
    /// looks at a bounded number of messages.
    #[cold]
    pub(super) fn poll(
        &mut self,
        now: Instant,
        ports: &mut [WorkerPort<TxRecord>],
        ext_bufs: &mut ExtBufRefs,
        events: &mut VecDeque<Event>,
    ) -> bool {
        if now >= self.next_sweep {
            self.sweep(now, ports, ext_bufs);
        }
        let mut looks = THRESHOLDS.searched_messages;
        let mut is_searching = false;
        for frames in self.awaited.iter_mut().filter(|frames| !frames.is_answered) {
            let looks = match frames.held.is_searching() {
                true => std::mem::take(&mut looks),
                false => 0,
            };
            ext_bufs.continue_search(&mut frames.held, looks);
            is_searching |= frames.held.is_searching();
            if frames.held.is_empty() {
                frames.is_answered = true;
                // Relaxed suffices: the counter only decides whether the ports are swept once more.
                frames.unanswered.fetch_sub(1, Ordering::Relaxed);
                events.push_back(Event::BarrierReached {
                    worker: self.worker,
                    token: frames.token,
                });
            } else if !frames.is_late && now >= frames.late_at {
                frames.is_late = true;
                let token = frames.token;
                events.push_back(Event::FramesHeld { token });
            }
        }
        self.awaited
            .retain(|frames| frames.unanswered.load(Ordering::Relaxed) > 0);
        is_searching
    }
}

#[cfg(test)]
mod tests {
    use dpdk::{Mbuf, Mempool, Port, PortConfig, RxBatch, RxQueue, TxBatch, TxQueue};
    use siw_iwarp::ExtBufRef;

    use super::*;
    use crate::datapath::batch_loop::BatchLoop;
    use crate::datapath::test_environment;
    use crate::worker::Worker;
    use crate::worker::messages::Command;
    use crate::worker::test_worker::new_worker;

    /// Creates a ring pair, which holds frames until they are read. Its name must be unique in DPDK
    /// among concurrent tests.
    fn new_link(pool: &Mempool, name: &str) -> (Vec<Port>, TxQueue, RxQueue) {
        let (near, far) = Port::create_ring_pair(test_environment(), name, 1, 64).unwrap();
        let mut ports = vec![near, far];
        let mut queues = ports.iter_mut().map(|port| {
            let config = PortConfig {
                rx_queues: 1,
                tx_queues: 1,
                ..PortConfig::default()
            };
            port.configure(&config, std::slice::from_ref(pool)).unwrap();
            port.start().unwrap().remove(0)
        });
        let tx = queues.next().unwrap().1.unwrap();
        let rx = queues.next().unwrap().0.unwrap();
        drop(queues);
        (ports, tx, rx)
    }

    /// Sends a frame that refers to `memory`.
    fn send_from(
        worker: &mut Worker,
        memory: &Arc<SharedMemory>,
        pool: &Mempool,
        tx: &mut TxQueue,
    ) -> ExtBufRef {
        let ext_bufs = &mut worker.connections.context.ext_bufs;
        let message = ext_bufs.alloc();
        let mut mbuf = Mbuf::alloc(pool).unwrap();
        assert!(ext_bufs.attach(message, memory, 64, 1000, &mut mbuf));
        let mut out = TxBatch::new();
        assert!(out.push(mbuf).is_ok());
        assert_eq!(tx.tx_burst(&mut out), 1);
        message
    }

    fn new_token(number: u64) -> CommandToken {
        let client = None;
        CommandToken { client, number }
    }

    fn next_answer(worker: &mut Worker, now: &mut Instant) -> Option<CommandToken> {
        // Longer than the sweep interval.
        *now = *now + Duration::from_millis(20);
        worker.run_batch(*now);
        match worker.mailbox.events.pop() {
            Some(Event::BarrierReached { token, .. }) => Some(token),
            Some(_) => panic!("another event"),
            None => None,
        }
    }

    #[test]
    fn frames_that_a_port_keeps_are_reported_and_answered_later() {
        let pool = Mempool::new(test_environment(), "kept", 255, 0, 2048, None).unwrap();
        let (_ports, mut tx, mut rx) = new_link(&pool, "kept");
        let memory = Arc::new(SharedMemory::new_anonymous(8192).unwrap());
        let mut worker = new_worker(&pool);
        let mut now = Instant::from_millis(1000);
        let message = send_from(&mut worker, &memory, &pool, &mut tx);
        worker.connections.context.ext_bufs.free(message);
        let token = new_token(3);
        let command = Command::AwaitFrames {
            token,
            regions: Arc::new([memory.clone()]),
            unanswered: Arc::new(AtomicUsize::new(1)),
        };
        assert!(worker.mailbox.commands.push(command).is_ok());
        assert_eq!(next_answer(&mut worker, &mut now), None);
        now = now + PATIENCE;
        worker.run_batch(now);
        let told = worker.mailbox.events.pop();
        assert!(matches!(told, Some(Event::FramesHeld { token: of }) if of == token));
        assert_eq!(next_answer(&mut worker, &mut now), None, "told once");
        let mut received = RxBatch::new();
        assert_eq!(rx.rx_burst(&mut received), 1);
        drop(received);
        assert_eq!(next_answer(&mut worker, &mut now), Some(token));
        assert!(worker.frame_releases.awaited.is_empty());
        assert_eq!(Arc::strong_count(&memory), 1, "nobody has it any more");
    }

    #[test]
    fn a_batch_looks_at_a_bounded_number_of_messages() {
        let pool = Mempool::new(test_environment(), "searched", 63, 0, 2048, None).unwrap();
        let (_ports, mut tx, mut rx) = new_link(&pool, "searched");
        let memory = Arc::new(SharedMemory::new_anonymous(8192).unwrap());
        let mut worker = new_worker(&pool);
        let ext_bufs = &mut worker.connections.context.ext_bufs;
        // Messages without frames, before the one with a frame.
        for _ in 0..3 * THRESHOLDS.searched_messages {
            ext_bufs.alloc();
        }
        let last = send_from(&mut worker, &memory, &pool, &mut tx);
        let mut now = Instant::from_millis(1000);
        let tokens = [1, 2].map(new_token);
        for token in tokens {
            let command = Command::AwaitFrames {
                token,
                regions: Arc::new([memory.clone()]),
                unanswered: Arc::new(AtomicUsize::new(1)),
            };
            assert!(worker.mailbox.commands.push(command).is_ok());
        }
        let mut batches = 0;
        while worker.run_batch(now) {
            batches += 1;
        }
        assert!((6..10).contains(&batches), "{batches} batches");
        assert_eq!(Arc::strong_count(&memory), 2, "the search has ended");
        let mut received = RxBatch::new();
        assert_eq!(rx.rx_burst(&mut received), 1);
        drop(received);
        worker.connections.context.ext_bufs.free(last);
        let answers = tokens.map(|_| next_answer(&mut worker, &mut now));
        assert_eq!(answers, tokens.map(Some));
    }

    #[test]
    fn memory_stays_until_the_ring_holds_no_frame_of_it() {
        let pool = Mempool::new(test_environment(), "awaited", 255, 0, 2048, None).unwrap();
        let (_ports, mut tx, mut rx) = new_link(&pool, "awaited");
        let [memory, other] = [0, 1].map(|_| Arc::new(SharedMemory::new_anonymous(8192).unwrap()));
        let mut workers = [(), ()].map(|()| new_worker(&pool));
        let [worker, idle] = &mut workers;
        let mut now = Instant::from_millis(1000);
        let in_flight = send_from(worker, &memory, &pool, &mut tx);
        let done = send_from(worker, &memory, &pool, &mut tx);
        send_from(worker, &other, &pool, &mut tx);
        // Completed by its ACK while the frame is still in the ring.
        worker.connections.context.ext_bufs.free(done);

        let token = new_token(7);
        let unanswered = Arc::new(AtomicUsize::new(2));
        for worker in [&*worker, &*idle] {
            let command = Command::AwaitFrames {
                token,
                regions: Arc::new([memory.clone()]),
                unanswered: unanswered.clone(),
            };
            assert!(worker.mailbox.commands.push(command).is_ok());
        }
        assert_eq!(next_answer(worker, &mut now), None, "two frames");
        assert_eq!(next_answer(idle, &mut now), Some(token), "it has sent none");
        assert_eq!(next_answer(idle, &mut now), None, "it has answered");
        assert_eq!(
            idle.frame_releases.awaited.len(),
            1,
            "it may have to free frames of others"
        );

        let mut received = RxBatch::new();
        assert_eq!(rx.rx_burst(&mut received), 3);
        let mut frames = received.drain();
        drop(frames.next());
        worker.connections.context.ext_bufs.free(in_flight);
        // Reuses the freed tracker; the command does not cover its new frame.
        send_from(worker, &memory, &pool, &mut tx);
        assert_eq!(next_answer(worker, &mut now), None, "one frame");
        drop(frames.next());
        assert_eq!(next_answer(worker, &mut now), Some(token));
        assert_eq!(next_answer(idle, &mut now), None);
        assert!(worker.frame_releases.awaited.is_empty() && idle.frame_releases.awaited.is_empty());
        assert_eq!(rx.rx_burst(&mut received), 1);
    }
}
