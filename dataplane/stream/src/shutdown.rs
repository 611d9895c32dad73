//! Shutdown of the endpoint: at the time limit, on a signal, or when all connections have ended.

use std::time::Duration;

use siw_net::Instant;
use siw_tcp::Events;

use crate::connection::StreamContext;
use crate::endpoint::{Endpoint, EndpointState};

/// Time for connections to close after the time limit, or after data was acknowledged since.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

impl Endpoint<'_> {
    /// Periodic check of signals, the time limit and the pool.
    #[cold]
    pub(super) fn check_end(&mut self, now: Instant) {
        self.cache.return_surplus();
        self.least_free_buffers = self.least_free_buffers.min(self.free_buffers());
        let open = self.connections.len() - self.free_slots.len();
        match self.state {
            EndpointState::Running => {
                let is_late = self.deadline.is_some_and(|deadline| deadline <= now);
                let only_connects = self.plan.connects.is_some() && self.plan.offers.is_empty();
                if is_late || self.is_stop_requested() {
                    self.start_closing(now);
                } else if only_connects && self.active_count == 0 {
                    self.extend_grace(now);
                }
            }
            EndpointState::Closing { until, acked } => {
                if acked != self.totals.bytes_out && until != Instant(u64::MAX) {
                    self.extend_grace(now);
                } else if open > 0 && until <= now {
                    self.abort_all(now);
                    self.state = EndpointState::Closing {
                        until: Instant(u64::MAX),
                        acked,
                    };
                }
                let has_output = self
                    .ports
                    .iter()
                    .any(|port| port.stack.has_output() || !port.output.batch.is_empty());
                if open == 0 && !has_output || self.is_stop_requested() {
                    self.state = EndpointState::Finished;
                }
            }
            EndpointState::Finished => {}
        }
    }

    /// Gives connections time to close, which begins again while peers acknowledge data.
    fn extend_grace(&mut self, now: Instant) {
        self.state = EndpointState::Closing {
            until: now + CLOSE_GRACE,
            acked: self.totals.bytes_out,
        };
    }

    /// Stops opening connections and sending the pattern; open connections close in order.
    fn start_closing(&mut self, now: Instant) {
        self.extend_grace(now);
        self.unread.clear();
        for slot in 0..self.connections.len() {
            let Some(connection) = &mut self.connections[slot] else {
                continue;
            };
            connection.unread_until = now;
            connection.stop_sending();
            if !connection.service.sends() && !connection.is_closing {
                connection.is_closing = true;
                let stack = &mut self.ports[connection.port].stack;
                stack.close(now, connection.conn);
            }
            self.mark_ready(slot as u32);
        }
    }

    fn abort_all(&mut self, now: Instant) {
        for slot in 0..self.connections.len() {
            if let Some(connection) = &mut self.connections[slot] {
                connection.abort(&mut StreamContext {
                    stack: &mut self.ports[connection.port].stack,
                    pattern: self.pattern,
                    blocks: &mut self.spare_blocks,
                    now,
                });
                self.on_ended(now, slot as u32, Events::NONE);
            }
        }
    }
}
