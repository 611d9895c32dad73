//! Completion queues and completion channels (ibv_poll_cq(3), ibv_req_notify_cq(3),
//! ibv_get_cq_event(3)).

use crate::context::{ClientInner, StaleCompletions};
use crate::credit::Credits;
use crate::deadline::Deadline;
use crate::high_descriptors::KeptDescriptor;
use crate::locking::{Inherited, ProcessMutex, ProcessSpinLock};
use crate::{Context, Error, Wc};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use rustix::net::{RecvFlags, recv};
use siw_shm::control::{CqReply, CreateChannel, CreateCq, DestroyChannel, DestroyCq, ProtoError};
use siw_shm::{CqConsumer, CqGeometry, SharedMemory};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// Delivers the cookies of armed completion queues that have completions.
pub struct CompletionChannel {
    client: Arc<ClientInner>,
    id: u32,
    fd: KeptDescriptor,
}

impl CompletionChannel {
    /// A new channel.
    pub fn new(ctx: &Context) -> Result<Arc<CompletionChannel>, Error> {
        let (reply, fds) = ctx.0.call_daemon(&CreateChannel { reserved: 0 })?;
        let fd = ctx
            .0
            .place_channel(fds.into_iter().next().ok_or(ProtoError::MissingFd)?);
        Ok(Arc::new(CompletionChannel {
            client: ctx.0.clone(),
            id: reply.id,
            fd: KeptDescriptor::new(fd)?,
        }))
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Waits for an event and returns the cookie of its queue. Each arming raises at most one
    /// event; arm the queue again, then poll it.
    pub fn get_event(&self, timeout: Option<Duration>) -> Result<u64, Error> {
        let deadline = Deadline::after(timeout);
        loop {
            self.client
                .wait_readable(self.fd.as_fd(), deadline.left())?;
            if let Some(cookie) = self.try_get_event()? {
                return Ok(cookie);
            }
        }
    }

    /// As [`Self::get_event`], without waiting: None if no event is pending.
    pub fn try_get_event(&self) -> Result<Option<u64>, Error> {
        // A child of fork(2) would take the events of its parent.
        self.client.check_process()?;
        let mut cookie = [0; 8];
        let mut receive = || recv(&self.fd, &mut cookie, RecvFlags::DONTWAIT);
        match rustix::io::retry_on_intr(|| receive().map(|(_, len)| len)) {
            Ok(8) => Ok(Some(u64::from_ne_bytes(cookie))),
            Ok(0) => {
                self.client.check_alive();
                Err(Error::DaemonGone)
            }
            Ok(len) => Err(ProtoError::NotSiwd(len).into()),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until the daemon has closed the control socket; an ending daemon closes its descriptors one
    /// after the other. Returns whether that was within `timeout`.
    pub fn await_end(&self, timeout: Duration) -> bool {
        !self.client.stays_alive(timeout)
    }
}

impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for CompletionChannel {
    /// Readable when an event is pending.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        self.client.free_object(&DestroyChannel {
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
    ring: ProcessSpinLock<Polling>,
    /// Held while the rings are replaced; polling goes on.
    resizing: ProcessMutex<()>,
    entries: AtomicU32,
    channel: Option<Arc<CompletionChannel>>,
    /// Number of empty polls since the last completion.
    empty_polls: AtomicU32,
}

impl StaleCompletions for CqInner {
    fn discard_of(&self, qp_num: u32) {
        if let Ok(mut polling) = self.ring.lock() {
            polling.purge_qp(qp_num);
        }
    }
}

/// Polling state, under one lock.
pub(crate) struct Polling {
    pub ring: CqConsumer,
    /// Completions drained from rings that a resize replaced: older than all in `ring`.
    pub left: VecDeque<Wc>,
    pub credits: Credits,
    /// Queue pairs that complete into this queue, by number.
    pub queue_pairs: HashMap<u32, Weak<dyn LostRequests>>,
}

/// A queue pair, as seen by its completion queues.
pub(crate) trait LostRequests: Send + Sync {
    /// Called when the daemon has ended: adds completions with WR_FLUSH_ERR for unfinished requests
    /// that complete into the queue with this id.
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
    /// Moves the completions in the rings to `left`. Returns whether there were any.
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

    /// Discards the unpolled completions of a queue pair.
    pub fn purge_qp(&mut self, qp_num: u32) {
        self.drain_rings();
        self.left.retain(|wc| wc.qp_num != qp_num);
    }
}

/// Consecutive empty polls, some microseconds, after which a program that polls without pause
/// yields its core.
const POLLS_TO_YIELD: u32 = 1024;
/// Empty polls between two readings of the clock: some tens of microseconds.
const CLOCK_CHECK: u32 = 4 * POLLS_TO_YIELD;
/// Time between two checks of the control socket, which are system calls.
const ALIVE_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Spinning time of [`Cq::wait`] before it blocks.
const SPIN: Duration = Duration::from_micros(50);

impl Drop for CqInner {
    fn drop(&mut self) {
        self.client.free_object(&DestroyCq {
            cq: self.id,
            reserved: 0,
        });
    }
}

/// Maps the application's end of new rings.
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
    /// Creates a queue of at least `cqe` entries, with an event channel and the cookie that the
    /// channel delivers for this queue.
    pub fn new(
        ctx: &Context,
        cqe: u32,
        channel: Option<(&Arc<CompletionChannel>, u64)>,
    ) -> Result<Cq, Error> {
        if let Some((channel, _)) = channel {
            ctx.0.check_same(&channel.client, "completion channel")?;
        }
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
            ring: ProcessSpinLock::new(ring),
            resizing: ProcessMutex::default(),
            entries: AtomicU32::new(reply.entries),
            channel: channel.map(|(channel, _)| channel.clone()),
            empty_polls: AtomicU32::new(0),
        })))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id
    }

    /// The queue as its context discards completions, not kept alive.
    pub(crate) fn stale_completions(&self) -> Weak<dyn StaleCompletions> {
        let inner: Weak<CqInner> = Arc::downgrade(&self.0);
        inner
    }

    pub(crate) fn client(&self) -> &Arc<ClientInner> {
        &self.0.client
    }

    /// Id in asynchronous events (CQ_ERR).
    pub fn cq_id(&self) -> u32 {
        self.0.id
    }

    /// Maximum number of completions (per worker).
    pub fn capacity(&self) -> u32 {
        self.0.entries.load(Ordering::Relaxed)
    }

    pub(crate) fn polling_state(&self) -> &ProcessSpinLock<Polling> {
        &self.0.ring
    }

    /// Takes the lock of the thread that replaces the rings.
    pub(crate) fn start_resizing(&self) -> Result<MutexGuard<'_, ()>, Inherited> {
        self.0.resizing.lock()
    }

    pub(crate) fn set_capacity(&self, entries: u32) {
        self.0.entries.store(entries, Ordering::Relaxed);
    }

    /// Polls completions, at most `out.len()`.
    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize, Error> {
        let taken = self.0.ring.lock()?.poll(out);
        if taken > 0 {
            if self.0.empty_polls.load(Ordering::Relaxed) != 0 {
                self.0.empty_polls.store(0, Ordering::Relaxed);
            }
        } else if !out.is_empty()
            && let Err(error) = self.on_empty_poll()
        {
            return self.poll_last(out, error);
        }
        Ok(taken)
    }

    /// Polls once more after a queue was empty and then had a reason to stay so: the daemon may have
    /// completed a request in between, before it ended.
    #[cold]
    pub(crate) fn poll_last(&self, out: &mut [Wc], error: Error) -> Result<usize, Error> {
        match self.0.ring.lock()?.poll(out) {
            0 => Err(error),
            taken => Ok(taken),
        }
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

    /// Yields the core after many empty polls, so that other threads on it can run, such as the
    /// peer program or siwd.
    #[cold]
    fn on_silence(&self, polls: u32) {
        std::thread::yield_now();
        if polls.is_multiple_of(CLOCK_CHECK) {
            self.0.client.check_alive_every(ALIVE_CHECK_INTERVAL);
        }
    }

    /// Checks for a reason why an empty queue may stay empty.
    #[cold]
    pub(crate) fn check_health(&self) -> Result<(), Error> {
        if !self.0.client.known_alive() {
            return Err(Error::DaemonGone);
        }
        if self.0.ring.lock()?.ring.error_code() != 0 {
            return Err(Error::CqOverflow);
        }
        Ok(())
    }

    /// Completes the work requests that the daemon has not finished with WR_FLUSH_ERR, as a failed
    /// device does. For use after [`Self::poll`] has returned [`Error::DaemonGone`]. Returns
    /// whether there are completions to poll.
    #[cold]
    pub fn flush_lost_requests(&self) -> bool {
        // The locks of a completion queue and of a work queue are never held together.
        let queue_pairs: Vec<_> = {
            let Ok(mut polling) = self.0.ring.lock() else {
                return false;
            };
            // The last completions of the daemon come first; they are not lost.
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
        let polling = self.0.ring.lock();
        polling.is_ok_and(|mut polling| {
            polling.left.extend(flushed);
            has_some
        })
    }

    /// Disarms the queue of a daemon that has ended. Returns whether an event is due, as a failed device
    /// raises one: the queue was armed and has completions, those that the daemon left or those of
    /// [`Self::flush_lost_requests`].
    pub fn take_event_after_end(&self) -> bool {
        if self.0.client.known_alive() {
            return false;
        }
        // A request is lost only if its completion is not among those to poll.
        let polling = self.0.ring.lock();
        let has_some =
            polling.is_ok_and(|polling| !polling.left.is_empty()) || self.flush_lost_requests();
        let polling = self.0.ring.lock();
        polling.is_ok_and(|polling| has_some && polling.ring.disarm_event())
    }

    /// Arms the channel: the next completion, or the next solicited or failed one,
    /// raises one event. Poll once more before waiting for it.
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), Error> {
        self.0.ring.lock()?.ring.arm_event(solicited_only);
        Ok(())
    }

    /// Polls for up to `spin` until there are completions.
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

    /// Waits for completions: spins a little, then arms and blocks on the channel, which no other
    /// queue may use. A queue without a channel spins and yields.
    pub fn wait(&self, out: &mut [Wc], timeout: Option<Duration>) -> Result<usize, Error> {
        if out.is_empty() {
            return Ok(0);
        }
        let deadline = Deadline::after(timeout);
        loop {
            let spin = deadline.left().map_or(SPIN, |left| left.min(SPIN));
            let taken = self.poll_spin(out, spin)?;
            if taken > 0 {
                return Ok(taken);
            }
            let Some(channel) = &self.0.channel else {
                if deadline.has_passed() {
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
            if let Err(error) = self.check_health() {
                return self.poll_last(out, error);
            }
            match channel.get_event(deadline.left()) {
                Ok(_) => {}
                Err(error @ Error::DaemonGone) => return self.poll_last(out, error),
                Err(error) => return Err(error),
            }
        }
    }
}
