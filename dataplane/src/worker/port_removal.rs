//! Removal of a device in use: its connections end, and the worker continues with the others.

use siw_iwarp::CloseReason;
use siw_tcp::Instant;

use super::Worker;
use super::messages::{ConnectFailure, Event};

impl Worker {
    /// Ends the connections of a removed device and gives its queues back to the port.
    pub(super) fn remove_port(&mut self, now: Instant, device: usize) {
        if let Some(port) = self.ports.iter().position(|port| port.device == device) {
            for slot in self.pending.select(|pending| pending.port == port) {
                self.drop_pending(now, slot, true);
            }
            self.stop_listening_on(now, port);
            let on_port = self
                .queue_pairs
                .select(|queue_pair| queue_pair.port == port && queue_pair.conn.is_some());
            for slot in on_port {
                let Some(queue_pair) = self.queue_pairs.get(slot) else {
                    continue;
                };
                let Some(conn) = queue_pair.conn else {
                    continue;
                };
                let has_stream = queue_pair.state.has_stream();
                self.ports[port].stack.abort(now, conn);
                if has_stream {
                    self.on_connection_ended(now, port, conn, slot, CloseReason::Reset);
                } else {
                    let why = "the device was removed".to_owned();
                    self.connect_failed(now, slot, ConnectFailure::Local(why));
                }
            }
            self.ports[port].drop_queues();
        }
        // Buffers that its driver still holds are lost.
        self.post_event(Event::PortRemoved { device });
    }
}
