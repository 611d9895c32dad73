//! Peers that accept a connection and then look at nothing that they received, where the device's
//! `wake_silent_peer_ms` allows for them.
//!
//! Linux siw assigns the function that hears of received data after it has sent its MPA reply: what
//! arrives in between is acknowledged by its TCP, and read when more arrives. Both sides would wait for
//! ever if the initiator waits for an answer to its first message. An RDMA Write of nothing is more
//! data, and changes nothing at any peer (RFC 5040 section 5.1).

use std::time::Duration;

use siw_tcp::{ConnId, Instant};

use super::Worker;
use super::lifecycle::LifecycleState;
use super::worker_qp::QpSlot;

/// Pauses double; one that would be longer is not made.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The next Write of nothing to a peer that has not sent an FPDU yet.
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
    /// How long the peer of a connection that is being set up may be silent: zero for ever.
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

    /// The peer has accepted the connection.
    pub(super) fn watch_silent_peer(&mut self, now: Instant, slot: QpSlot, pause: Duration) {
        let queue_pair = self.queue_pairs.get(slot);
        let is_running = |state: &LifecycleState| matches!(state, LifecycleState::Running { .. });
        if queue_pair.is_some_and(|queue_pair| is_running(&queue_pair.state)) {
            let wake = PeerWake::after(now, pause);
            self.enter_state(slot, LifecycleState::Running { wake });
        }
    }

    /// The peer had its time to send something.
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
        // What is under way will do, and is repeated by TCP if it is lost.
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

    /// The peer's TCP has all that was given to ours.
    fn is_acknowledged(&self, port: usize, conn: ConnId) -> bool {
        let info = self.ports[port].stack.tcp_info(conn);
        info.is_some_and(|info| info.in_flight == 0 && info.unsent == 0)
    }
}
