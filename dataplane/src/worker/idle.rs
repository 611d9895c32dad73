//! What a worker does when nothing is to be done: spin, or sleep until a doorbell, a frame,
//! a command or a timer.
//!
//! The order that loses no wake-up: announce the sleep, look at every ring once more, sleep.
//! Clients ring, fence, and look at the announcement (see `siw_shm::doorbell`).

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;
use siw_shm::doorbell::SleepFlag;
use siw_tcp::Instant;

use super::{Mailbox, Worker};
use crate::config::IdlePolicy;

/// Longest sleep on a port that cannot wake the worker.
const NAP: Duration = Duration::from_millis(1);
/// Naps while connections have something in flight on such a port.
const SHORT_NAP: Duration = Duration::from_micros(50);
/// Naps stay short for so long after another worker handed over a frame.
const RECENT: Duration = Duration::from_millis(10);
/// Ports whose interrupts one worker sleeps on; further ones are napped for.
const INTERRUPTS: usize = 15;
/// Longest sleep at all: counters and capture stay fresh.
const LONG: Duration = Duration::from_secs(10);

/// The sleeping half of a worker.
pub struct Idle {
    policy: IdlePolicy,
    spin: u64,
    busy_at: Instant,
    epoll: Epoll,
    flag: SleepFlag,
    sleeps: u64,
}

impl Idle {
    pub fn new(
        policy: IdlePolicy,
        spin: Duration,
        flag: SleepFlag,
        mailbox: &Mailbox,
    ) -> Result<Idle, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let fd = &mailbox.worker_wake;
        epoll.add(
            fd,
            EpollEvent::new(EpollFlags::EPOLLIN, fd.as_raw_fd() as u64),
        )?;
        Ok(Idle {
            policy,
            spin: spin.as_nanos() as u64,
            busy_at: Instant::ZERO,
            epoll,
            flag,
            sleeps: 0,
        })
    }

    pub fn sleeps(&self) -> u64 {
        self.sleeps
    }

    #[inline]
    pub fn busy(&mut self, now: Instant) {
        self.busy_at = now;
    }

    #[inline]
    pub fn may_sleep(&self, now: Instant) -> bool {
        self.policy == IdlePolicy::Adaptive && now.0.saturating_sub(self.busy_at.0) >= self.spin
    }

    /// Wakes when this client writes.
    pub fn watch(&mut self, fd: &OwnedFd) {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, fd.as_raw_fd() as u64);
        if let Err(e) = self.epoll.add(fd, event) {
            tracing::error!("a client's doorbell cannot wake the worker: {e}");
        }
    }

    pub fn unwatch(&mut self, fd: &OwnedFd) {
        let _ = self.epoll.delete(fd);
    }
}

impl Worker {
    /// Sleeps until something may have to be done.
    pub(super) fn sleep(&mut self, now: Instant) {
        let limit = self.sleep_limit(now);
        if limit < Duration::from_micros(5) {
            return;
        }
        // What came before an interrupt was armed raises none: look once more.
        if self.arm_interrupts() && self.run_batch(now) {
            self.disarm_interrupts();
            self.idle.busy(now);
            return;
        }
        self.cache.return_surplus();
        self.idle.flag.announce_sleep();
        let work = !self.mailbox.commands.is_empty()
            || !self.mailbox.frames.is_empty()
            || self.clients.iter().any(|c| c.doorbells.has_work());
        if work {
            self.idle.busy(now);
        } else {
            self.keys.go_offline();
            self.idle.sleeps += 1;
            let woken = self.block(limit);
            self.keys.go_online();
            // A nap that found nothing leads to the next one, a wake-up to a spell of spinning.
            if woken {
                self.drain_wakes();
            }
        }
        self.idle.flag.announce_awake();
        self.disarm_interrupts();
    }

    fn sleep_limit(&self, now: Instant) -> Duration {
        let mut limit = LONG;
        for port in &self.ports {
            if !port.link.in_process && !port.link.rx_interrupt && port.rx.is_some() {
                // Others whose frames come and go here may have something in flight too.
                let quiet = port.stack.is_idle() && now.duration_since(self.handed_at) > RECENT;
                limit = limit.min(if quiet { NAP } else { SHORT_NAP });
            }
            if let Some(at) = port.stack.next_deadline() {
                limit = limit.min(at.duration_since(now));
            }
            if !port.out.batch.is_empty() || port.stack.has_output() {
                limit = limit.min(SHORT_NAP);
            }
        }
        if let Some((&(at, _), ())) = self.timers.first_key_value() {
            limit = limit.min(at.duration_since(now));
        }
        if let Some(at) = self.cqs.next_due() {
            limit = limit.min(at.duration_since(now));
        }
        if let Some(at) = self.stopping {
            limit = limit.min(at.duration_since(now)).min(NAP);
        }
        if self.cqs.owes() || !self.releasing.is_empty() || self.events_waiting {
            limit = limit.min(NAP);
        }
        limit
    }

    fn block(&self, limit: Duration) -> bool {
        let mut fds: [Option<PollFd<'_>>; 1 + INTERRUPTS] = [const { None }; 1 + INTERRUPTS];
        fds[0] = Some(PollFd::new(self.idle.epoll.0.as_fd(), PollFlags::POLLIN));
        let ports = self
            .ports
            .iter()
            .filter(|l| l.link.rx_interrupt)
            .filter_map(|l| l.rx.as_ref()?.interrupt_source());
        let mut n = 1;
        for (place, fd) in fds[1..].iter_mut().zip(ports) {
            *place = Some(PollFd::new(fd, PollFlags::POLLIN));
            n += 1;
        }
        let mut fds =
            fds.map(|f| f.unwrap_or(PollFd::new(self.idle.epoll.0.as_fd(), PollFlags::empty())));
        ppoll(&mut fds[..n], Some(TimeSpec::from(limit)), None).is_ok_and(|n| n > 0)
    }

    fn arm_interrupts(&mut self) -> bool {
        let mut any = false;
        for port in self.ports.iter_mut().filter(|l| l.link.rx_interrupt) {
            let Some(rx) = &mut port.rx else { continue };
            match rx.arm_interrupt() {
                Ok(()) => any = true,
                Err(e) => {
                    tracing::debug!(
                        device = port.device,
                        "no receive interrupts: {e}; napping instead"
                    );
                    port.link.rx_interrupt = false;
                }
            }
        }
        any
    }

    fn disarm_interrupts(&mut self) {
        for port in self.ports.iter_mut().filter(|l| l.link.rx_interrupt) {
            if let Some(rx) = &mut port.rx {
                let _ = rx.disarm_interrupt();
            }
        }
    }

    fn drain_wakes(&mut self) {
        let mut events = [EpollEvent::empty(); 16];
        let n = self
            .idle
            .epoll
            .wait(&mut events, EpollTimeout::ZERO)
            .unwrap_or(0);
        for e in &events[..n] {
            let fd = e.data();
            let source = self
                .clients
                .iter()
                .map(|c| &*c.wake)
                .chain([&self.mailbox.worker_wake])
                .find(|f| f.as_raw_fd() as u64 == fd);
            if let Some(f) = source {
                let _ = nix::unistd::read(f, &mut [0u8; 8]);
            }
        }
        let now = self.clock.now();
        self.idle.busy(now);
    }
}
