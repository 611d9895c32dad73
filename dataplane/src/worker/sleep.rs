//! Puts a worker to sleep until a doorbell, a frame, a command or a timer.
//!
//! The order that loses no wake-up: announce the sleep, check every ring once more, sleep. Clients
//! ring, issue a fence, and read the announcement (see `siw_shm::doorbell`).
//!
//! The event descriptors are watched edge-triggered and never read: a client shares the file
//! description of its descriptor, so it could make a read block, or take the value away during one.
//! Each write is an edge; a client that fills its counter loses only its own wake-ups.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use siw_net::Instant;
use siw_shm::doorbell::SleepFlag;

use super::awaited_frames::SWEEP_INTERVAL;
use super::parked::Wait;
use super::{Mailbox, Worker};
use crate::datapath::batch_loop::BatchLoop;
use crate::datapath::idle::{self, POLL_INTERVAL};

/// Edges taken per wake-up; further ones wake the worker again.
const EDGES_PER_WAKE: usize = 16;

/// Wake-up sources of a worker besides its ports: its mailbox, and the doorbells of its clients.
pub(super) struct WakeSources {
    epoll: Epoll,
    flag: SleepFlag,
    sleeps: u64,
    /// The edges that ended the last sleep are still to be taken.
    has_edges: bool,
}

impl WakeSources {
    pub(super) fn new(flag: SleepFlag, mailbox: &Mailbox) -> Result<WakeSources, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let sources = WakeSources {
            epoll,
            flag,
            sleeps: 0,
            has_edges: false,
        };
        sources.add(mailbox.inbox.wake_fd())?;
        Ok(sources)
    }

    fn add(&self, fd: &OwnedFd) -> Result<(), Errno> {
        let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        self.epoll.add(fd, EpollEvent::new(edges, 0))
    }

    /// Number of times the worker slept.
    pub(super) fn sleeps(&self) -> u64 {
        self.sleeps
    }

    /// Adds a client's descriptor to the wake-up sources.
    pub(super) fn watch(&mut self, fd: &OwnedFd) {
        if let Err(error) = self.add(fd) {
            tracing::error!("a client's doorbell cannot wake the worker: {error}");
        }
    }

    pub(super) fn unwatch(&mut self, fd: &OwnedFd) {
        let _ = self.epoll.delete(fd);
    }

    /// Takes the edges that woke the worker, so that it can sleep again. Called before the sleep is
    /// announced, so that no edge is taken that a later check of the rings would not cover; and not
    /// right after the wake-up, since the work that came with the edges would wait for the system call.
    fn take_edges(&mut self) {
        if std::mem::take(&mut self.has_edges) {
            let mut events = [EpollEvent::empty(); EDGES_PER_WAKE];
            let _ = self.epoll.wait(&mut events, EpollTimeout::ZERO);
        }
    }
}

impl Worker {
    /// Sleeps until there may be work.
    pub(super) fn sleep_until_work(&mut self, now: Instant) {
        let limit = self.sleep_limit(now);
        if !idle::is_worth_sleeping(limit) {
            return;
        }
        self.connections
            .scheduler
            .stop_polling(&mut self.connections.queue_pairs);
        // Arrivals before an interrupt was armed raise none: check once more.
        if idle::arm_interrupts(&mut self.connections.ports) && self.run_batch(now) {
            idle::disarm_interrupts(&mut self.connections.ports);
            self.idle.note_busy(now);
            return;
        }
        self.connections.cache.return_surplus();
        self.wake_sources.take_edges();
        self.wake_sources.flag.announce_sleep();
        let has_work = self.connections.scheduler.has_work()
            || !self.connections.context.parked.is_empty(Wait::Quiescence)
            || self.connections.departing.has_work()
            || self.connections.pending.has_ended_listeners()
            || !self.mailbox.commands.is_empty()
            || !self.mailbox.inbox.is_empty();
        if has_work {
            self.idle.note_busy(now);
        } else {
            // A sleeping worker reads no memory keys: deregistration need not wait for it.
            self.connections.context.keys.go_offline();
            self.wake_sources.sleeps += 1;
            self.batch_times.begin_sleep(self.connections.clock.now());
            let was_woken = idle::wait_for_wake(
                self.wake_sources.epoll.0.as_fd(),
                &mut self.connections.ports,
                limit,
            );
            self.connections.context.keys.go_online();
            let now = self.connections.clock.now();
            self.batch_times.end_sleep(now);
            // After a sleep that ended by its limit the worker sleeps again; after a wake-up it spins
            // first.
            if was_woken {
                self.wake_sources.has_edges = true;
                self.idle.note_busy(now);
            }
        }
        self.wake_sources.flag.announce_awake();
        idle::disarm_interrupts(&mut self.connections.ports);
    }

    fn sleep_limit(&self, now: Instant) -> Duration {
        let forwarded_at = self.forwarder.last_forwarded;
        let mut limit = idle::ports_sleep_limit(&self.connections.ports, now, forwarded_at);
        if let Some(deadline) = self.connections.deadlines.earliest() {
            limit = limit.min(deadline.duration_since(now));
        }
        if let Some(deadline) = self.connections.context.cqs.next_deadline() {
            limit = limit.min(deadline.duration_since(now));
        }
        if let Some(deadline) = self.stopping {
            limit = limit.min(deadline.duration_since(now)).min(POLL_INTERVAL);
        }
        let must_retry = self.connections.context.cqs.has_unwritten_events()
            || self.connections.context.ext_bufs.has_waits()
            || !self.connections.context.parked.is_empty(Wait::Receive)
            || self.frame_releases.is_urgent(now)
            || !self.connections.outgoing_events.is_empty();
        if self.connections.context.ext_bufs.has_unreleased() || !self.frame_releases.is_empty() {
            limit = limit.min(SWEEP_INTERVAL);
        }
        if must_retry {
            limit = limit.min(POLL_INTERVAL);
        }
        limit
    }
}
