//! Completion queues and the channels that tell when to poll them
//! (ibv_poll_cq(3), ibv_req_notify_cq(3), ibv_get_cq_event(3)).

use crate::context::{ClientInner, lock_unpoisoned};
use crate::credit::Credits;
use crate::{Context, Error, Wc, WcStatus};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use siw_shm::control::{CqReply, CreateChannel, CreateCq, DestroyChannel, DestroyCq, ProtoError};
use siw_shm::spin::SpinLock;
use siw_shm::{CqConsumer, CqGeometry, SharedMemory};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// Delivers the cookies of completion queues that were armed and have completions.
pub struct CompletionChannel {
    client: Arc<ClientInner>,
    id: u32,
    fd: OwnedFd,
}

impl CompletionChannel {
    /// A new channel.
    pub fn new(ctx: &Context) -> Result<Arc<CompletionChannel>, Error> {
        let (reply, fds) = ctx.0.call_daemon(&CreateChannel { reserved: 0 })?;
        let fd = fds.into_iter().next().ok_or(ProtoError::MissingFd)?;
        let channel = Arc::new(CompletionChannel {
            client: ctx.0.clone(),
            id: reply.id,
            fd,
        });
        // Readiness is waited for by poll: a second reader must not block here.
        rustix::io::ioctl_fionbio(&channel.fd, true)?;
        Ok(channel)
    }

    /// The cookie of a queue with completions. Events were consumed one by one by
    /// the armings; poll the queue after arming it again.
    pub fn get_event(&self, timeout: Option<Duration>) -> Result<u64, Error> {
        loop {
            self.client.wait_readable(self.fd.as_fd(), timeout)?;
            let mut cookie = [0; 8];
            match rustix::io::read(&self.fd, &mut cookie) {
                Ok(8) => return Ok(u64::from_ne_bytes(cookie)),
                Ok(0) => {
                    self.client.check_alive();
                    return Err(Error::DaemonGone);
                }
                Ok(len) => return Err(ProtoError::NotSiwd(len).into()),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for CompletionChannel {
    /// Readable when an event waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        self.client.call_ignoring_errors(&DestroyChannel {
            channel: self.id,
            reserved: 0,
        });
    }
}

/// Completion queue; clones are the same queue.
#[derive(Clone)]
pub struct Cq(Arc<CqInner>);

struct CqInner {
    client: Arc<ClientInner>,
    id: u32,
    ring: SpinLock<Polling>,
    /// Held while the rings are replaced; polling goes on.
    resizing: Mutex<()>,
    entries: AtomicU32,
    channel: Option<Arc<CompletionChannel>>,
    /// Since the last completion.
    empty_polls: AtomicU32,
}

/// What polling needs, under one lock.
pub(crate) struct Polling {
    pub ring: CqConsumer,
    /// What was left in the rings from before a resize: older than all in `ring`.
    pub left: VecDeque<Wc>,
    pub credits: Credits,
    /// Those that complete into it, by number.
    pub queue_pairs: HashMap<u32, Weak<dyn LostRequests>>,
}

/// A queue pair, as its completion queues know it.
pub(crate) trait LostRequests: Send + Sync {
    /// The daemon is gone: completions, with WR_FLUSH_ERR, of what it has not done and what completes
    /// into the queue with this id.
    fn flush_into(&self, cq: u32, flushed: &mut Vec<Wc>);
}

impl Polling {
    #[inline]
    fn poll(&mut self, out: &mut [Wc]) -> usize {
        loop {
            let mut taken = 0;
            if !self.left.is_empty() {
                taken = out.len().min(self.left.len());
                for (to, from) in out.iter_mut().zip(self.left.drain(..taken)) {
                    *to = from;
                }
            }
            taken += self.ring.poll(&mut out[taken..]);
            if self.credits.count_polled(&out[..taken]) {
                return taken;
            }
            let kept = self.credits.keep_known(&mut out[..taken]);
            if kept > 0 {
                return kept;
            }
        }
    }
}

impl Polling {
    /// Moves what waits in the rings to what is left of earlier ones. True: there was something.
    pub fn drain_rings(&mut self) -> bool {
        let mut wc = [Wc::default(); 64];
        let mut found = false;
        loop {
            let taken = self.ring.poll(&mut wc);
            if taken == 0 {
                return found;
            }
            found = true;
            self.left.extend(&wc[..taken]);
        }
    }

    /// Whether a request of the queue pair succeeded, and its completion was not polled.
    pub fn has_success_of(&self, qp_num: u32) -> bool {
        let is_success = |wc: &Wc| wc.qp_num == qp_num && wc.status == WcStatus::SUCCESS;
        self.left.iter().any(is_success) || self.ring.has_waiting(is_success)
    }

    /// Forgets the completions of a queue pair that were not polled.
    pub fn purge_qp(&mut self, qp_num: u32) {
        self.drain_rings();
        self.left.retain(|wc| wc.qp_num != qp_num);
    }
}

/// Polls in succession without a completion, some microseconds, after which a program that polls without
/// pause gives way to others on its core.
const POLLS_TO_YIELD: u32 = 1024;
/// Empty polls between two readings of the clock: some tens of microseconds.
const CLOCK_CHECK: u32 = 4 * POLLS_TO_YIELD;
/// Time between two looks at the control socket, which are system calls.
const ALIVE_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// How long [`Cq::wait`] spins before it blocks.
const SPIN: Duration = Duration::from_micros(50);

impl Drop for CqInner {
    fn drop(&mut self) {
        self.client.call_ignoring_errors(&DestroyCq {
            cq: self.id,
            reserved: 0,
        });
    }
}

/// The application's end of new rings.
pub(crate) fn map_consumer(
    reply: &CqReply,
    region: Arc<SharedMemory>,
) -> Result<CqConsumer, Error> {
    let geometry = CqGeometry::from_exact(reply.entries, reply.workers).ok_or(Error::Invalid(
        "siwd sent an impossible completion queue geometry",
    ))?;
    Ok(CqConsumer::new(
        region,
        reply.mem.offset as usize,
        geometry,
    )?)
}

impl Cq {
    /// A queue of at least `cqe` entries, with an event channel and the cookie that
    /// it delivers for this queue.
    pub fn new(
        ctx: &Context,
        cqe: u32,
        channel: Option<(&Arc<CompletionChannel>, u64)>,
    ) -> Result<Cq, Error> {
        let create = CreateCq {
            cqe,
            channel: channel.map_or(0, |(channel, _)| channel.id),
            cookie: channel.map_or(0, |(_, cookie)| cookie),
        };
        let destroy = |reply: &CqReply| DestroyCq {
            cq: reply.cq,
            reserved: 0,
        };
        let (reply, ring) =
            ctx.0
                .create_queue(&create, |reply| reply.mem, map_consumer, destroy)?;
        let ring = Polling {
            ring,
            left: VecDeque::new(),
            credits: Credits::default(),
            queue_pairs: HashMap::new(),
        };
        Ok(Cq(Arc::new(CqInner {
            client: ctx.0.clone(),
            id: reply.cq,
            ring: SpinLock::new(ring),
            resizing: Mutex::new(()),
            entries: AtomicU32::new(reply.entries),
            channel: channel.map(|(channel, _)| channel.clone()),
            empty_polls: AtomicU32::new(0),
        })))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id
    }

    pub(crate) fn client(&self) -> &Arc<ClientInner> {
        &self.0.client
    }

    /// Id in asynchronous events (CQ_ERR).
    pub fn cq_id(&self) -> u32 {
        self.0.id
    }

    /// Completions it can hold (per worker).
    pub fn capacity(&self) -> u32 {
        self.0.entries.load(Ordering::Relaxed)
    }

    pub(crate) fn polling_state(&self) -> &SpinLock<Polling> {
        &self.0.ring
    }

    /// Held by the one thread that replaces the rings.
    pub(crate) fn start_resizing(&self) -> MutexGuard<'_, ()> {
        lock_unpoisoned(&self.0.resizing)
    }

    pub(crate) fn set_capacity(&self, entries: u32) {
        self.0.entries.store(entries, Ordering::Relaxed);
    }

    /// Takes completions that are there, at most `out.len()`.
    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize, Error> {
        let taken = self.0.ring.lock().poll(out);
        if taken > 0 {
            if self.0.empty_polls.load(Ordering::Relaxed) != 0 {
                self.0.empty_polls.store(0, Ordering::Relaxed);
            }
        } else if !out.is_empty() {
            self.on_empty_poll()?;
        }
        Ok(taken)
    }

    #[inline]
    fn on_empty_poll(&self) -> Result<(), Error> {
        // Lossy counting between threads is fine.
        let polls = self.0.empty_polls.load(Ordering::Relaxed).wrapping_add(1);
        self.0.empty_polls.store(polls, Ordering::Relaxed);
        if polls.is_multiple_of(POLLS_TO_YIELD) {
            self.on_silence(polls);
        }
        if self.0.client.known_alive() && polls & 63 != 0 {
            Ok(())
        } else {
            self.check_health()
        }
    }

    /// Nothing has come for some time: others that the core has may run, such as the program at the
    /// other end, or siwd.
    #[cold]
    fn on_silence(&self, polls: u32) {
        std::thread::yield_now();
        if polls.is_multiple_of(CLOCK_CHECK) {
            self.0.client.check_alive_every(ALIVE_CHECK_INTERVAL);
        }
    }

    /// Why an empty queue may stay empty.
    #[cold]
    fn check_health(&self) -> Result<(), Error> {
        if !self.0.client.known_alive() {
            return Err(Error::DaemonGone);
        }
        if self.0.ring.lock().ring.error_code() != 0 {
            return Err(Error::CqOverflow);
        }
        Ok(())
    }

    /// Has the work requests that the daemon had not done when it went complete with WR_FLUSH_ERR, as
    /// those of a device that failed do. For when [`Self::poll`] returns [`Error::DaemonGone`]. True:
    /// there are some to poll.
    #[cold]
    pub fn flush_lost_requests(&self) -> bool {
        // The locks of a completion queue and of a work queue are not held together.
        let queue_pairs: Vec<_> = {
            let mut polling = self.0.ring.lock();
            // What the daemon completed last of all comes first, and is not lost.
            if polling.drain_rings() {
                return true;
            }
            let queue_pairs = polling.queue_pairs.values();
            queue_pairs.filter_map(Weak::upgrade).collect()
        };
        let mut flushed = Vec::new();
        for queue_pair in &queue_pairs {
            queue_pair.flush_into(self.0.id, &mut flushed);
        }
        let has_some = !flushed.is_empty();
        self.0.ring.lock().left.extend(flushed);
        has_some
    }

    /// Arms the channel: the next completion, or the next solicited or failed one,
    /// raises one event. Poll once more before waiting for it.
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), Error> {
        self.0.ring.lock().ring.arm_event(solicited_only);
        Ok(())
    }

    /// Polls for up to `spin` until something is there.
    pub fn poll_spin(&self, out: &mut [Wc], spin: Duration) -> Result<usize, Error> {
        let mut start = None;
        loop {
            for _ in 0..64 {
                let taken = self.poll(out)?;
                if taken > 0 {
                    return Ok(taken);
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            if now - *start.get_or_insert(now) >= spin {
                return Ok(0);
            }
        }
    }

    /// Waits for completions: spins a little, then arms and blocks on the channel,
    /// which must be this queue's own. A queue without channel spins and yields.
    pub fn wait(&self, out: &mut [Wc], timeout: Option<Duration>) -> Result<usize, Error> {
        if out.is_empty() {
            return Ok(0);
        }
        let deadline = timeout.map(|duration| Instant::now() + duration);
        let left = || deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        loop {
            let spin = left().map_or(SPIN, |left| left.min(SPIN));
            let taken = self.poll_spin(out, spin)?;
            if taken > 0 {
                return Ok(taken);
            }
            let Some(channel) = &self.0.channel else {
                if left().is_some_and(|left| left.is_zero()) {
                    return Err(Error::Timeout);
                }
                self.0.client.check_alive();
                std::thread::yield_now();
                continue;
            };
            self.req_notify(false)?;
            let taken = self.poll(out)?;
            if taken > 0 {
                return Ok(taken);
            }
            self.check_health()?;
            match channel.get_event(left()) {
                Ok(_) => {}
                Err(Error::DaemonGone) => {
                    // What completed before the daemon went is still delivered.
                    let taken = self.0.ring.lock().poll(out);
                    return if taken > 0 {
                        Ok(taken)
                    } else {
                        Err(Error::DaemonGone)
                    };
                }
                Err(error) => return Err(error),
            }
        }
    }
}
