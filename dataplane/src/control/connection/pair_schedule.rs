//! Attempts to connect queue pairs without rdma_cm, and their times.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::listening::PAIRING_PORT;
use crate::ids::{ClientId, Qpn};

/// Connection attempt of a queue pair to its other end.
#[derive(Debug, Clone)]
pub struct PairAttempt {
    pub local: IpAddr,
    pub peer: IpAddr,
    pub peer_qpn: Qpn,
    pub ird: u16,
    pub ord: u16,
    /// This end initiates the connection.
    pub initiates: bool,
    /// The queue pair is its own peer.
    pub to_itself: bool,
    /// Deadline of both ends.
    pub until: Instant,
    pub retry_after: Duration,
    /// Time since which the peer's daemon reports an unknown queue pair.
    pub unknown_since: Option<Instant>,
    /// The peer's address has sent RC over RoCE to the queue pair.
    pub speaks_roce: bool,
}

/// Reason why hosts without siwd cannot be peers. Short: an asynchronous event has room for 128 bytes.
const RC_IS_IWARP: &str = "siwd's RC is iWARP, so the peer has to run siwd";

impl PairAttempt {
    /// Error text for an attempt without any answer.
    pub fn describe_absence(&self) -> String {
        let PairAttempt { peer, peer_qpn, .. } = self;
        match self.speaks_roce {
            true => format!("{peer} sends RC over RoCE: {RC_IS_IWARP}"),
            false => format!("no queue pair {peer_qpn} in RTR at {peer} in time; {RC_IS_IWARP}"),
        }
    }

    /// Error text for an attempt whose connections were refused.
    pub fn describe_refusal(&self) -> String {
        let peer = self.peer;
        format!("{peer} refuses TCP port {PAIRING_PORT}: {RC_IS_IWARP}")
    }
}

/// For each queue pair with an attempt, the time of its next retry, or of its deadline. One time a
/// queue pair, however often its client asks for a pair.
#[derive(Default)]
pub struct PairSchedule {
    by_time: BTreeMap<(Instant, Qpn), ClientId>,
    times: BTreeMap<Qpn, Instant>,
}

impl PairSchedule {
    /// Sets the time of a queue pair, instead of the one that it has.
    pub fn set_time(&mut self, when: Instant, id: ClientId, qpn: Qpn) {
        self.remove(qpn);
        self.times.insert(qpn, when);
        self.by_time.insert((when, qpn), id);
    }

    /// Forgets a queue pair that is gone or reset.
    pub fn remove(&mut self, qpn: Qpn) {
        if let Some(when) = self.times.remove(&qpn) {
            self.by_time.remove(&(when, qpn));
        }
    }

    /// Time of the first queue pair.
    pub fn first_time(&self) -> Option<Instant> {
        let ((when, _), _) = self.by_time.first_key_value()?;
        Some(*when)
    }

    /// Takes a queue pair whose time has come.
    pub fn take_due(&mut self, now: Instant) -> Option<(ClientId, Qpn)> {
        if self.first_time()? > now {
            return None;
        }
        let ((_, qpn), id) = self.by_time.pop_first()?;
        self.times.remove(&qpn);
        Some((id, qpn))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_has_one_time_however_often_it_is_set() {
        let (start, id) = (Instant::now(), ClientId(1));
        let at = |millis| start + Duration::from_millis(millis);
        let mut schedule = PairSchedule::default();
        for millis in 0..1000 {
            schedule.set_time(at(10 + millis), id, Qpn(1));
        }
        schedule.set_time(at(5), id, Qpn(2));
        schedule.set_time(at(7), id, Qpn(3));
        schedule.remove(Qpn(3));
        assert_eq!((schedule.by_time.len(), schedule.times.len()), (2, 2));
        assert_eq!(schedule.first_time(), Some(at(5)));
        assert_eq!(schedule.take_due(at(4)), None);
        assert_eq!(schedule.take_due(at(2000)), Some((id, Qpn(2))));
        assert_eq!(schedule.take_due(at(2000)), Some((id, Qpn(1))));
        assert!(schedule.by_time.is_empty() && schedule.times.is_empty());
    }
}
