//! Idle threads: whether a thread may sleep, for how long, and which ports wake it.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use siw_net::Instant;

use super::port::WorkerPort;
use crate::config::IdlePolicy;

/// Longest sleep on a port that cannot wake the thread.
pub const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Longest sleep while connections on a port without wake-ups have data in flight, or frames wait to
/// be sent.
pub const SHORT_POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Time for which the interval stays short after another worker forwarded a frame.
const AFTER_FORWARDED_FRAME: Duration = Duration::from_millis(10);
/// Longest sleep in any case; keeps counters and captures fresh.
const LONGEST_SLEEP: Duration = Duration::from_secs(10);
/// A sleep shorter than this costs more than spinning.
const SHORTEST_SLEEP: Duration = Duration::from_micros(5);
/// Maximum number of ports whose interrupts one thread waits for; others are polled at intervals.
const MAX_INTERRUPTS: usize = 63;

/// Decides whether the thread spins or may sleep.
pub struct Idle {
    policy: IdlePolicy,
    /// Time that the thread spins after the last work before it sleeps.
    spin_time: Duration,
    last_busy: Instant,
}

impl Idle {
    /// A thread that spins for `spin_time` after its last work.
    pub fn new(policy: IdlePolicy, spin_time: Duration) -> Idle {
        Idle {
            policy,
            spin_time,
            last_busy: Instant::ZERO,
        }
    }

    /// Notes a batch with work.
    #[inline]
    pub fn note_busy(&mut self, now: Instant) {
        self.last_busy = now;
    }

    /// Returns true once the thread has spun long enough.
    #[inline]
    pub fn may_sleep(&self, now: Instant) -> bool {
        self.policy == IdlePolicy::Adaptive && now.duration_since(self.last_busy) >= self.spin_time
    }
}

/// Returns whether a sleep of this length is worth its system calls.
pub fn is_worth_sleeping(limit: Duration) -> bool {
    limit >= SHORTEST_SLEEP
}

/// Time for which the ports and the stacks above them need no processing. `forwarded_at`: when another
/// worker last forwarded a frame to this one.
pub fn ports_sleep_limit<R>(
    ports: &[WorkerPort<R>],
    now: Instant,
    forwarded_at: Instant,
) -> Duration {
    let mut limit = LONGEST_SLEEP;
    let mut interrupts = 0;
    for port in ports {
        interrupts += usize::from(port.interrupt_fd().is_some());
        if port.must_be_polled() || interrupts > MAX_INTERRUPTS {
            // Workers that send and receive through this one may have data in flight, too.
            let is_quiet =
                port.stack.is_idle() && now.duration_since(forwarded_at) > AFTER_FORWARDED_FRAME;
            limit = limit.min(if is_quiet {
                POLL_INTERVAL
            } else {
                SHORT_POLL_INTERVAL
            });
        }
        if let Some(deadline) = port.stack.next_deadline() {
            limit = limit.min(deadline.duration_since(now));
        }
        let waits = port.output.has_frames() || port.output.has_backlog() || port.has_fault_work();
        if waits || port.stack.has_output() {
            limit = limit.min(SHORT_POLL_INTERVAL);
        }
        // No frame can come and wake the thread before the port is given buffers.
        if port.is_out_of_buffers() {
            limit = limit.min(POLL_INTERVAL);
        }
    }
    limit
}

/// Arms the receive interrupts of the ports that have them. Returns true if there is one: the caller
/// must then check for frames once more before it sleeps, since earlier ones raise no interrupt.
pub fn arm_interrupts<R>(ports: &mut [WorkerPort<R>]) -> bool {
    let mut any = false;
    for port in ports {
        any |= port.arm_interrupt();
    }
    any
}

/// Disarms the receive interrupts after a sleep.
pub fn disarm_interrupts<R>(ports: &mut [WorkerPort<R>]) {
    for port in ports {
        port.disarm_interrupt();
    }
}

/// Sleeps until `wake` is readable, a port's interrupt is raised, or `limit` has passed. Returns true
/// if the thread was woken.
pub fn wait_for_wake<R>(
    wake: BorrowedFd<'_>,
    ports: &mut [WorkerPort<R>],
    limit: Duration,
) -> bool {
    let mut fds: [_; 1 + MAX_INTERRUPTS] =
        std::array::from_fn(|_| PollFd::new(wake, PollFlags::POLLIN));
    let interrupts = ports.iter().filter_map(WorkerPort::interrupt_fd);
    let mut used = 1;
    for (place, interrupt) in fds[1..].iter_mut().zip(interrupts) {
        *place = PollFd::new(interrupt, PollFlags::POLLIN);
        used += 1;
    }
    let fds = &mut fds[..used];
    let was_woken = ppoll(fds, Some(TimeSpec::from(limit)), None).is_ok_and(|ready| ready > 0);
    if was_woken {
        let raised: [bool; 1 + MAX_INTERRUPTS] =
            std::array::from_fn(|place| fds.get(place).and_then(PollFd::any).unwrap_or(false));
        let interrupting = ports
            .iter_mut()
            .filter(|port| port.interrupt_fd().is_some());
        for (port, _) in interrupting
            .zip(&raised[1..])
            .filter(|(_, is_raised)| **is_raised)
        {
            port.note_interrupt();
        }
    }
    was_woken
}
