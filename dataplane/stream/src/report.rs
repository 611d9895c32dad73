//! The endpoint's counters, as text and as JSON.

use serde_json::{Value, json};
use siw_tcp::{Events, StackStats};

/// Connections by their beginning and end, and the bytes transferred.
#[derive(Debug, Default, Clone)]
pub struct StreamTotals {
    /// Opened by the peer.
    pub accepted: u64,
    /// Opened by this endpoint.
    pub connected: u64,
    /// Closed in order in both directions.
    pub closed: u64,
    /// Ended by the peer's RST.
    pub reset_by_peer: u64,
    /// Aborted by this endpoint: by the reset service, at a wrong byte, or at the time limit.
    pub aborted: u64,
    /// Refused by RST.
    pub refused: u64,
    /// No neighbour or router answered.
    pub unreachable: u64,
    /// The peer stopped answering.
    pub timed_out: u64,
    /// Bytes read from connections.
    pub bytes_in: u64,
    /// Bytes that peers acknowledged.
    pub bytes_out: u64,
    /// Bytes read that matched the pattern.
    pub bytes_checked: u64,
    /// Streams with a wrong byte, or of the wrong length.
    pub bad_streams: u64,
}

impl StreamTotals {
    /// `how`: the events that ended the connection.
    pub(super) fn count_end(&mut self, how: Events, is_aborted: bool) {
        let counter = if is_aborted {
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
        *counter += 1;
    }

    /// Number of connections that failed, and of streams with wrong contents or length.
    pub fn failures(&self) -> u64 {
        self.refused + self.unreachable + self.timed_out + self.bad_streams
    }
}

/// The whole result.
#[derive(Debug, Clone)]
pub struct StreamReport {
    /// Connections and bytes.
    pub totals: StreamTotals,
    /// Time from the first connection's opening to the last byte.
    pub seconds: f64,
    /// Names of the devices.
    pub device: String,
    /// TCP counters, summed over all devices.
    pub tcp: StackStats,
    /// Frames received from ports.
    pub frames_in: u64,
    /// Frames handed to ports.
    pub frames_out: u64,
    /// Packet buffers: total, free at the end, and the minimum seen free.
    pub buffers: [u32; 3],
}

impl StreamReport {
    fn gigabits_per_second(&self, bytes: u64) -> f64 {
        if self.seconds > 0.0 {
            bytes as f64 * 8e-9 / self.seconds
        } else {
            0.0
        }
    }

    /// One JSON object, `{"result": {...}}`.
    pub fn to_json(&self) -> Value {
        let totals = &self.totals;
        let tcp: serde_json::Map<_, _> = self
            .tcp
            .iter()
            .map(|(name, count)| (name.to_owned(), count.into()))
            .collect();
        let mib: serde_json::Map<_, _> = self
            .tcp
            .mib_counters()
            .map(|(name, count)| (name.to_owned(), count.into()))
            .collect();
        json!({
            "result": {
                "device": self.device,
                "seconds": self.seconds,
                "accepted": totals.accepted,
                "connected": totals.connected,
                "closed": totals.closed,
                "reset_by_peer": totals.reset_by_peer,
                "aborted": totals.aborted,
                "refused": totals.refused,
                "unreachable": totals.unreachable,
                "timed_out": totals.timed_out,
                "bytes_in": totals.bytes_in,
                "bytes_out": totals.bytes_out,
                "bytes_checked": totals.bytes_checked,
                "bad_streams": totals.bad_streams,
                "gbps_in": self.gigabits_per_second(totals.bytes_in),
                "gbps_out": self.gigabits_per_second(totals.bytes_out),
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

    /// A few lines of text.
    pub fn to_text(&self) -> String {
        let totals = &self.totals;
        let mut text = format!(
            "connections: {} accepted, {} connected; {} closed, {} reset by the peer, {} aborted, \
             {} refused, {} unreachable, {} timed out\n\
             bytes: {} in ({:.3} Gb/s), {} out ({:.3} Gb/s), {} checked, {} bad streams; {:.3} s\n\
             frames: {} in, {} out; packet buffers: {} of {} free, never less than {}\n",
            totals.accepted,
            totals.connected,
            totals.closed,
            totals.reset_by_peer,
            totals.aborted,
            totals.refused,
            totals.unreachable,
            totals.timed_out,
            totals.bytes_in,
            self.gigabits_per_second(totals.bytes_in),
            totals.bytes_out,
            self.gigabits_per_second(totals.bytes_out),
            totals.bytes_checked,
            totals.bad_streams,
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
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        text.push_str("tcp: ");
        text.push_str(&counted.join(", "));
        text
    }
}
