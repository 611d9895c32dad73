//! Wakes peers that accept a connection and then do not read received data, if the device's
//! `wake_silent_peer_ms` is set.
//!
//! Linux siw installs its callback for received data after it has sent its MPA reply: data that
//! arrives in between is acknowledged by its TCP, but read only when more arrives. If the initiator
//! waits for an answer to its first message, both sides would wait without end. A zero-length RDMA
//! Write is more data, and has no effect at any peer (RFC 5040 section 5.1).

use std::time::Duration;

use siw_tcp::{ConnId, Instant};

use super::Worker;
use super::lifecycle::LifecycleState;
use super::slots::QpSlot;

/// Longest pause between two wake-ups. Each pause is twice the one before.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Next zero-length RDMA Write to a peer that has not sent an FPDU yet.
pub(super) struct PeerWake {
    pub(super) at: Instant,
    pause: Duration,
}

impl PeerWake {
    fn after(now: Instant, pause: Duration) -> Option<PeerWake> {
        let at = now + pause;
        (!pause.is_zero()).then_some(PeerWake { at, pause })
    }
}

impl Worker {
    /// Time that the peer of a connection under set-up may stay silent; zero for no limit.
    pub(super) fn wake_after(&self, slot: QpSlot) -> Duration {
        let queue_pair = self.queue_pairs.get(slot);
        let milliseconds = match queue_pair.map(|queue_pair| &queue_pair.state) {
            Some(
                LifecycleState::TcpConnecting(attempt) | LifecycleState::MpaNegotiation(attempt),
            ) => attempt.config.wake_silent_peer_ms,
            _ => 0,
        };
        Duration::from_millis(milliseconds.into())
    }

    /// Starts to watch a peer that has accepted the connection.
    pub(super) fn watch_silent_peer(&mut self, now: Instant, slot: QpSlot, pause: Duration) {
        let queue_pair = self.queue_pairs.get(slot);
        let is_running = |state: &LifecycleState| matches!(state, LifecycleState::Running { .. });
        if queue_pair.is_some_and(|queue_pair| is_running(&queue_pair.state)) {
            let wake = PeerWake::after(now, pause);
            self.enter_state(slot, LifecycleState::Running { wake });
        }
    }

    /// Sends a zero-length RDMA Write to a peer that has stayed silent for the pause.
    pub(super) fn wake_silent_peer(&mut self, now: Instant, slot: QpSlot) {
        let Some(queue_pair) = self.queue_pairs.get_mut(slot) else {
            return;
        };
        let LifecycleState::Running { wake: Some(wake) } = &queue_pair.state else {
            return;
        };
        let pause = wake.pause * 2;
        let port = queue_pair.port;
        let conn = queue_pair.conn;
        let is_silent = !queue_pair.protocol.has_received();
        // Data in flight has the same effect, and TCP retransmits it if it is lost.
        if is_silent && conn.is_some_and(|conn| self.is_acknowledged(port, conn)) {
            if let Some(queue_pair) = self.queue_pairs.get_mut(slot) {
                queue_pair.protocol.send_empty_write();
            }
            self.mark_ready(slot);
        }
        let goes_on = is_silent && pause <= LONGEST_PAUSE;
        let wake = PeerWake::after(now, pause).filter(|_| goes_on);
        self.enter_state(slot, LifecycleState::Running { wake });
    }

    /// True if the peer's TCP has acknowledged all data given to ours.
    fn is_acknowledged(&self, port: usize, conn: ConnId) -> bool {
        let info = self.ports[port].stack.tcp_info(conn);
        info.is_some_and(|info| info.in_flight == 0 && info.unsent == 0)
    }
}
