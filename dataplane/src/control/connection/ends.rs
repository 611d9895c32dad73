//! The latest ended and failed connections, with the reason of each, for those who ask why a queue pair
//! does not work.

use std::collections::VecDeque;
use std::time::SystemTime;

use serde_json::{Value, json};
use siw_shm::control::Addr;

use crate::ids::{ClientId, Qpn};

/// Number of ends that are kept.
const MOST: usize = 1024;
/// Number of ends kept of one user, so that a user with many does not displace those of others.
const MOST_OF_USER: usize = 256;

/// A connection that has ended or was never made.
pub(in crate::control) struct ConnectionEnd {
    pub time: SystemTime,
    pub qpn: Qpn,
    pub client: ClientId,
    pub pid: u32,
    pub user: u32,
    pub name: String,
    pub device: String,
    pub local: Addr,
    pub peer: Addr,
    /// The connection was established.
    pub was_established: bool,
    /// The connection was closed, not lost.
    pub is_orderly: bool,
    /// Human-readable reason.
    pub reason: String,
}

impl ConnectionEnd {
    /// Logs the end; an orderly close is no news.
    pub fn log(&self) {
        let (qpn, client, pid) = (self.qpn, self.client, self.pid);
        let peer = self.peer.to_socket_addr().map(tracing::field::display);
        match (self.was_established, self.is_orderly) {
            (true, true) => {
                tracing::debug!(%qpn, %client, pid, peer, "disconnected: {}", self.reason)
            }
            (true, false) => {
                tracing::info!(%qpn, %client, pid, peer, "connection lost: {}", self.reason)
            }
            (false, _) => {
                tracing::info!(%qpn, %client, pid, peer, "not connected: {}", self.reason)
            }
        }
    }

    /// Name of the event for lists and recordings.
    pub fn event_name(&self) -> &'static str {
        if self.was_established {
            "disconnected"
        } else {
            "not connected"
        }
    }

    /// The row of a list.
    pub fn to_json(&self) -> Value {
        let since_epoch = self.time.duration_since(SystemTime::UNIX_EPOCH);
        json!({
            "time": since_epoch.map_or(0.0, |time| time.as_millis() as f64 / 1e3),
            "lqpn": self.qpn.0,
            "client": self.client.0,
            "pid": self.pid,
            "name": self.name,
            "device": self.device,
            "src_addr": address_text(self.local),
            "dst_addr": address_text(self.peer),
            "event": self.event_name(),
            "reason": self.reason,
        })
    }
}

/// An address as status output shows it; `None` if there is none.
pub(in crate::control) fn address_text(address: Addr) -> Option<String> {
    address.to_socket_addr().map(|address| address.to_string())
}

/// Ends, the oldest first, each with its number.
#[derive(Default)]
pub(in crate::control) struct ConnectionEnds {
    kept: VecDeque<(u64, ConnectionEnd)>,
    last: u64,
}

impl ConnectionEnds {
    /// Records an end.
    pub fn record(&mut self, end: ConnectionEnd) {
        let of_user = self.kept.iter().filter(|(_, other)| other.user == end.user);
        if of_user.count() >= MOST_OF_USER {
            let oldest = self
                .kept
                .iter()
                .position(|(_, other)| other.user == end.user);
            if let Some(oldest) = oldest {
                self.kept.remove(oldest);
            }
        }
        if self.kept.len() >= MOST {
            self.kept.pop_front();
        }
        self.last += 1;
        self.kept.push_back((self.last, end));
    }

    /// Ends with higher numbers than this one.
    pub fn after(&self, number: u64) -> impl Iterator<Item = (u64, &ConnectionEnd)> {
        let first = self.kept.partition_point(|(kept, _)| *kept <= number);
        self.kept.range(first..).map(|(number, end)| (*number, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_with_many_ends_displaces_only_its_own() {
        let end = |user: u32, qpn: u32| ConnectionEnd {
            time: SystemTime::now(),
            qpn: Qpn(qpn),
            client: ClientId(1),
            pid: 1,
            user,
            name: String::new(),
            device: String::new(),
            local: Addr::NONE,
            peer: Addr::NONE,
            was_established: true,
            is_orderly: true,
            reason: String::new(),
        };
        let mut ends = ConnectionEnds::default();
        ends.record(end(7, 1));
        for qpn in 0..5000 {
            ends.record(end(8, qpn));
        }
        let of = |user| {
            ends.after(0)
                .filter(move |(_, end)| end.user == user)
                .count()
        };
        assert_eq!((of(7), of(8)), (1, MOST_OF_USER));
        let last = ends.after(5000).map(|(number, end)| (number, end.qpn));
        assert_eq!(last.collect::<Vec<_>>(), [(5001, Qpn(4999))]);
    }
}
