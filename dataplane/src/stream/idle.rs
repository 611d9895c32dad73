//! What the endpoint does when nothing is to be done: spin, or sleep until a frame, a timer or a
//! signal, as the daemon's workers do.

use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signalfd::SignalFd;
use nix::sys::time::TimeSpec;
use siw_tcp::Instant;

use super::endpoint::StreamPort;
use crate::config::IdlePolicy;

/// Longest sleep on a port without receive interrupts; and while something is in flight.
const NAP: Duration = Duration::from_millis(1);
const SHORT_NAP: Duration = Duration::from_micros(50);
/// Longest sleep at all.
const LONG: Duration = Duration::from_secs(10);
/// Ports that one sleep waits for.
const PORTS: usize = 15;

/// The sleeping half.
pub(super) struct StreamIdle {
    policy: IdlePolicy,
    spin: u64,
    busy_at: Instant,
    signals: SignalFd,
}

impl StreamIdle {
    pub(super) fn new(policy: IdlePolicy, spin: Duration, signals: SignalFd) -> StreamIdle {
        StreamIdle {
            policy,
            spin: spin.as_nanos() as u64,
            busy_at: Instant::ZERO,
            signals,
        }
    }

    #[inline]
    pub(super) fn busy(&mut self, now: Instant) {
        self.busy_at = now;
    }

    #[inline]
    pub(super) fn may_sleep(&self, now: Instant) -> bool {
        self.policy == IdlePolicy::Adaptive && now.0.saturating_sub(self.busy_at.0) >= self.spin
    }

    /// SIGTERM or SIGINT came.
    pub(super) fn stop_requested(&self) -> bool {
        matches!(self.signals.read_signal(), Ok(Some(_)))
    }

    /// How long all ports can wait.
    pub(super) fn limit(ports: &[StreamPort], now: Instant) -> Duration {
        let mut limit = LONG;
        for l in ports {
            if !l.link.rx_interrupt && !l.link.in_process {
                limit = limit.min(if l.stack.is_idle() { NAP } else { SHORT_NAP });
            }
            if let Some(at) = l.stack.next_deadline() {
                limit = limit.min(at.duration_since(now));
            }
            if !l.out.batch.is_empty() || !l.out.loopback.is_empty() || l.stack.has_output() {
                limit = limit.min(SHORT_NAP);
            }
        }
        limit
    }

    /// Interrupts of the ports that have them; true when there is one, and the caller must look
    /// for frames once more before it sleeps: what came earlier raises none.
    pub(super) fn arm(ports: &mut [StreamPort]) -> bool {
        let mut any = false;
        for l in ports.iter_mut().filter(|l| l.link.rx_interrupt) {
            match l.rx.arm_interrupt() {
                Ok(()) => any = true,
                Err(e) => {
                    tracing::debug!("no receive interrupts: {e}; napping instead");
                    l.link.rx_interrupt = false;
                }
            }
        }
        any
    }

    pub(super) fn disarm(ports: &mut [StreamPort]) {
        for l in ports.iter_mut().filter(|l| l.link.rx_interrupt) {
            let _ = l.rx.disarm_interrupt();
        }
    }

    /// Sleeps; true when something woke it.
    pub(super) fn sleep(&self, ports: &[StreamPort], limit: Duration) -> bool {
        let signals = self.signals.as_fd();
        let mut fds: [_; 1 + PORTS] =
            std::array::from_fn(|_| PollFd::new(signals, PollFlags::POLLIN));
        let ports = ports
            .iter()
            .filter(|l| l.link.rx_interrupt)
            .filter_map(|l| l.rx.interrupt_source());
        let mut n = 1;
        for (place, fd) in fds[1..].iter_mut().zip(ports) {
            *place = PollFd::new(fd, PollFlags::POLLIN);
            n += 1;
        }
        ppoll(&mut fds[..n], Some(TimeSpec::from(limit)), None).is_ok_and(|n| n > 0)
    }
}
