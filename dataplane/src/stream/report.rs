//! What the endpoint counted, as text and as JSON.

use serde_json::{Value, json};
use siw_tcp::{Events, StackStats};

/// Connections by how they began and ended, and what they carried.
#[derive(Debug, Default, Clone)]
pub struct StreamTotals {
    pub accepted: u64,
    pub connected: u64,
    /// Both directions were closed in order.
    pub closed: u64,
    pub reset_by_peer: u64,
    /// Ended here: by the reset service, at a wrong byte, or at the time limit.
    pub aborted: u64,
    pub refused: u64,
    pub unreachable: u64,
    pub timed_out: u64,
    /// Bytes read from connections.
    pub bytes_in: u64,
    /// Bytes that peers acknowledged.
    pub bytes_out: u64,
    /// Of the bytes read, those compared with the pattern and found right.
    pub bytes_checked: u64,
    /// Streams with a wrong byte, or of the wrong length.
    pub bad_streams: u64,
}

impl StreamTotals {
    pub(super) fn count_end(&mut self, how: Events, aborted: bool) {
        let place = if aborted {
            &mut self.aborted
        } else if how.contains(Events::REFUSED) {
            &mut self.refused
        } else if how.contains(Events::UNREACHABLE) {
            &mut self.unreachable
        } else if how.contains(Events::TIMED_OUT) {
            &mut self.timed_out
        } else if how.contains(Events::RESET) {
            &mut self.reset_by_peer
        } else {
            &mut self.closed
        };
        *place += 1;
    }

    /// ConnectPlan that did not come about, and streams that were wrong.
    pub fn failures(&self) -> u64 {
        self.refused + self.unreachable + self.timed_out + self.bad_streams
    }
}

/// The whole result.
#[derive(Debug, Clone)]
pub struct StreamReport {
    pub totals: StreamTotals,
    /// From the first connection's opening to the last byte.
    pub seconds: f64,
    pub device: String,
    /// TCP's counters of all devices together.
    pub tcp: StackStats,
    pub frames_in: u64,
    pub frames_out: u64,
    /// Packet buffers: all, free at the end, and the fewest that were seen free.
    pub buffers: [u32; 3],
}

impl StreamReport {
    fn gbps(&self, bytes: u64) -> f64 {
        if self.seconds > 0.0 {
            bytes as f64 * 8e-9 / self.seconds
        } else {
            0.0
        }
    }

    pub fn json(&self) -> Value {
        let t = &self.totals;
        let tcp: serde_json::Map<_, _> = self
            .tcp
            .iter()
            .map(|(name, n)| (name.to_owned(), n.into()))
            .collect();
        let mib: serde_json::Map<_, _> = self
            .tcp
            .mib_counters()
            .map(|(name, n)| (name.to_owned(), n.into()))
            .collect();
        json!({
            "result": {
                "device": self.device,
                "seconds": self.seconds,
                "accepted": t.accepted,
                "connected": t.connected,
                "closed": t.closed,
                "reset_by_peer": t.reset_by_peer,
                "aborted": t.aborted,
                "refused": t.refused,
                "unreachable": t.unreachable,
                "timed_out": t.timed_out,
                "bytes_in": t.bytes_in,
                "bytes_out": t.bytes_out,
                "bytes_checked": t.bytes_checked,
                "bad_streams": t.bad_streams,
                "gbps_in": self.gbps(t.bytes_in),
                "gbps_out": self.gbps(t.bytes_out),
                "frames_in": self.frames_in,
                "frames_out": self.frames_out,
                "buffers": self.buffers[0],
                "buffers_free": self.buffers[1],
                "buffers_least_free": self.buffers[2],
                "tcp": tcp,
                "mib": mib,
            }
        })
    }

    pub fn text(&self) -> String {
        let t = &self.totals;
        let mut s = format!(
            "connections: {} accepted, {} connected; {} closed, {} reset by the peer, {} aborted, \
             {} refused, {} unreachable, {} timed out\n\
             bytes: {} in ({:.3} Gb/s), {} out ({:.3} Gb/s), {} checked, {} bad streams; {:.3} s\n\
             frames: {} in, {} out; packet buffers: {} of {} free, never less than {}\n",
            t.accepted,
            t.connected,
            t.closed,
            t.reset_by_peer,
            t.aborted,
            t.refused,
            t.unreachable,
            t.timed_out,
            t.bytes_in,
            self.gbps(t.bytes_in),
            t.bytes_out,
            self.gbps(t.bytes_out),
            t.bytes_checked,
            t.bad_streams,
            self.seconds,
            self.frames_in,
            self.frames_out,
            self.buffers[1],
            self.buffers[0],
            self.buffers[2],
        );
        let counted: Vec<_> = self
            .tcp
            .iter()
            .filter(|(_, n)| *n > 0)
            .map(|(name, n)| format!("{name} {n}"))
            .collect();
        s.push_str("tcp: ");
        s.push_str(&counted.join(", "));
        s
    }
}
