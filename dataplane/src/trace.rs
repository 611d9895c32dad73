//! Trace of the next frames and of the next turns of queue pairs, for an operator: each record has the
//! counters of the worker that the step moved, and the reasons of its drops, which are those of
//! `siwctl show drops`.
//!
//! Workers hand the records to a thread, which writes them as lines of JSON into a socket whose other end a
//! client has. The queue between them has room for all records of a trace, so a worker never waits and no
//! record is dropped, however slow the reader is. Workers look for a trace where they look for captures.

use std::io::{BufWriter, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use serde_json::{Value, json};

use crate::capture::{CaptureCounters, CaptureFilter, Endpoints, ReaderSocket, TCP};
use crate::ids::Qpn;

/// Maximum records of a trace.
pub const MOST_RECORDS: u64 = 16_384;
/// Bytes of a frame that are kept for its description: those of all headers.
const HEADER_BYTES: usize = 144;
/// Pause of the thread without records.
const IDLE_PAUSE: Duration = Duration::from_millis(10);

/// A counter that a step moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceStep {
    /// Name in the statistics.
    pub name: &'static str,
    /// Amount by which it moved.
    pub count: u64,
    /// Human-readable meaning of a counter of drops; `None` for others.
    pub drop: Option<&'static str>,
}

/// What a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceEvent {
    /// A frame that a worker took from a port, from another worker, or from its own device (loopback).
    Received,
    /// A frame that a worker handed to the port or to loopback.
    Sent,
    /// A turn of a queue pair: requests taken from its send queue and their frames.
    Turn,
    /// Timers, acknowledgements and retransmissions of a device.
    Timers,
    /// Commands of the control thread and deadlines of connections, if they dropped something.
    Other,
}

impl TraceEvent {
    fn name(self) -> &'static str {
        match self {
            TraceEvent::Received => "received",
            TraceEvent::Sent => "sent",
            TraceEvent::Turn => "turn",
            TraceEvent::Timers => "timers",
            TraceEvent::Other => "other",
        }
    }
}

/// The beginning of a frame.
#[derive(Debug, Clone)]
pub struct TracedFrame {
    /// Bytes of the whole frame.
    pub len: u32,
    headers: Vec<u8>,
}

impl TracedFrame {
    /// A frame of `len` bytes with these bytes at its beginning.
    pub fn new(len: u32, bytes: &[u8]) -> TracedFrame {
        TracedFrame {
            len,
            headers: bytes[..bytes.len().min(HEADER_BYTES)].to_vec(),
        }
    }
}

/// One step of a worker.
#[derive(Debug)]
pub struct TraceRecord {
    /// Nanoseconds since the epoch.
    pub time: u64,
    /// Device number.
    pub interface: u32,
    /// What the record is about.
    pub event: TraceEvent,
    /// Queue pair of the turn, or of the frame's connection.
    pub qpn: Option<Qpn>,
    /// The frame.
    pub frame: Option<TracedFrame>,
    /// Counters that moved.
    pub steps: Vec<TraceStep>,
}

/// Records between the workers and the thread of a trace.
struct TraceQueue {
    /// A record with the worker's index. It has room for all records.
    records: ArrayQueue<(usize, TraceRecord)>,
    /// Records to take before the trace ends.
    wanted: AtomicU64,
    written: AtomicU64,
    bytes_written: AtomicU64,
}

/// A worker's end of a trace.
#[derive(Clone)]
pub struct TraceTap {
    queue: Arc<TraceQueue>,
    filter: Arc<CaptureFilter>,
    /// Index of the worker.
    pub worker: usize,
}

impl TraceTap {
    /// Returns true until all records are taken.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        self.queue.wanted.load(Ordering::Relaxed) > 0
    }

    /// Decides on a frame.
    pub fn selects_frame(&self, interface: u32, frame: &TracedFrame) -> bool {
        self.filter.selects(interface, &frame.headers)
    }

    /// Decides on a turn of a queue pair with this connection.
    pub fn selects_turn(&self, interface: u32, ends: Option<(SocketAddr, SocketAddr)>) -> bool {
        self.filter.selects_interface(interface)
            && (!self.filter.is_of_addresses()
                || ends.is_some_and(|(local, remote)| {
                    let ends = Endpoints::of_connection(local, remote);
                    self.filter.selects_ends(&ends)
                }))
    }

    /// Returns true if the trace has no conditions.
    pub fn selects_all(&self) -> bool {
        self.filter.interfaces.is_none() && !self.filter.is_of_addresses()
    }

    /// Decides on work of a device that concerns no single connection.
    pub fn selects_device(&self, interface: u32) -> bool {
        self.filter.selects_interface(interface) && !self.filter.is_of_addresses()
    }

    /// Adds a record, if the trace takes more.
    pub fn add(&self, record: TraceRecord) {
        let wanted = &self.queue.wanted;
        let take = |wanted: u64| wanted.checked_sub(1);
        if wanted
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
        {
            // There is room for each record that was taken.
            let _ = self.queue.records.push((self.worker, record));
        }
    }

    /// The same trace with another filter.
    pub fn with_filter(&self, filter: CaptureFilter) -> TraceTap {
        TraceTap {
            queue: self.queue.clone(),
            filter: Arc::new(filter),
            worker: self.worker,
        }
    }

    /// Records and bytes written so far.
    pub fn counters(&self) -> CaptureCounters {
        CaptureCounters {
            frames: self.queue.written.load(Ordering::Relaxed),
            bytes: self.queue.bytes_written.load(Ordering::Relaxed),
            dropped: 0,
        }
    }
}

/// A trace with its thread, which is told to end when this is dropped.
pub struct Trace {
    tap: TraceTap,
    stop: Arc<AtomicBool>,
    thread: Thread,
}

impl Trace {
    /// Traces `records` steps that the filter selects into a socket, until its reader leaves or this is
    /// dropped. `reader`: its name in the log.
    ///
    /// # Errors
    /// The operating system refuses a thread, or to set up the socket.
    pub fn into_stream(
        stream: UnixStream,
        devices: &[String],
        filter: CaptureFilter,
        records: u64,
        reader: String,
    ) -> std::io::Result<Trace> {
        let records = records.clamp(1, MOST_RECORDS);
        let queue = Arc::new(TraceQueue {
            records: ArrayQueue::new(records as usize),
            wanted: AtomicU64::new(records),
            written: AtomicU64::new(0),
            bytes_written: AtomicU64::new(0),
        });
        let stop: Arc<AtomicBool> = Arc::default();
        let socket = ReaderSocket::new(stream, stop.clone())?;
        let devices = devices.to_vec();
        let (to_write, ordered) = (queue.clone(), stop.clone());
        let thread = std::thread::Builder::new().name("siwd-trace".into());
        let thread = thread.spawn(move || {
            let written = write_records(&to_write, &ordered, socket, &devices, records);
            // Workers record nothing from here on, even before the control thread takes the trace from them.
            to_write.wanted.store(0, Ordering::Relaxed);
            if let Err(error) = written {
                tracing::debug!("trace {reader} ends: {error}");
            }
        })?;
        Ok(Trace {
            tap: TraceTap {
                queue,
                filter: Arc::new(filter),
                worker: 0,
            },
            stop,
            thread: thread.thread().clone(),
        })
    }

    /// The workers' end.
    pub fn tap(&self) -> &TraceTap {
        &self.tap
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// Writes all records of a trace, or those before the order to end.
fn write_records(
    queue: &TraceQueue,
    stop: &AtomicBool,
    socket: ReaderSocket,
    devices: &[String],
    records: u64,
) -> std::io::Result<()> {
    let mut out = BufWriter::new(socket);
    let mut written = 0;
    while written < records {
        let is_stopping = stop.load(Ordering::Acquire);
        let Some((worker, record)) = queue.records.pop() else {
            out.flush()?;
            if is_stopping {
                return Ok(());
            }
            std::thread::park_timeout(IDLE_PAUSE);
            continue;
        };
        let mut line = describe_record(worker, &record, devices).to_string();
        line.push('\n');
        out.write_all(line.as_bytes())?;
        written += 1;
        queue.written.store(written, Ordering::Relaxed);
        let bytes = &queue.bytes_written;
        bytes.fetch_add(line.len() as u64, Ordering::Relaxed);
    }
    out.flush()
}

/// A record as a line of the trace.
fn describe_record(worker: usize, record: &TraceRecord, devices: &[String]) -> Value {
    let steps = record.steps.iter().filter(|step| step.drop.is_none());
    let steps = steps.map(|step| json!({ "name": step.name, "count": step.count }));
    let drops = record.steps.iter().filter_map(|step| {
        let meaning = step.drop?;
        Some(json!({ "reason": step.name, "meaning": meaning, "count": step.count }))
    });
    json!({
        "time": record.time as f64 / 1e9,
        "worker": worker,
        "device": devices.get(record.interface as usize),
        "event": record.event.name(),
        "lqpn": record.qpn.map(|qpn| qpn.0),
        "frame": record.frame.as_ref().map(describe_frame),
        "steps": steps.collect::<Vec<_>>(),
        "drops": drops.collect::<Vec<_>>(),
    })
}

/// The headers of a frame.
fn describe_frame(frame: &TracedFrame) -> Value {
    let headers = &frame.headers[..];
    let Some(ends) = Endpoints::parse(headers) else {
        let ether_type = headers.get(12..14);
        let ether_type = ether_type.map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
        return json!({ "bytes": frame.len, "ether_type": ether_type });
    };
    let address = |ip, port: Option<u16>| match port {
        Some(port) => SocketAddr::new(ip, port).to_string(),
        None => ip.to_string(),
    };
    let mut row = json!({
        "bytes": frame.len,
        "src_addr": address(ends.from, ends.ports.map(|(from, _)| from)),
        "dst_addr": address(ends.to, ends.ports.map(|(_, to)| to)),
        "protocol": ends.protocol,
    });
    let tcp = headers.get(ends.transport..).unwrap_or_default();
    if let (Some(TCP), Some(tcp)) = (ends.protocol, tcp.first_chunk::<20>()) {
        let word = |at: usize| u32::from_be_bytes([tcp[at], tcp[at + 1], tcp[at + 2], tcp[at + 3]]);
        let header = ends.transport + usize::from(tcp[12] >> 4) * 4;
        row["flags"] = flag_names(tcp[13]).into();
        row["seq"] = word(4).into();
        row["ack"] = word(8).into();
        row["window"] = u16::from_be_bytes([tcp[14], tcp[15]]).into();
        row["payload"] = frame.len.saturating_sub(header as u32).into();
    }
    row
}

/// Names of TCP's flags, as tcpdump has them: `SYN,ACK`.
fn flag_names(flags: u8) -> String {
    const NAMES: [&str; 8] = ["FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"];
    let names = NAMES.iter().enumerate();
    let set = names.filter(|(bit, _)| flags & (1 << bit) != 0);
    set.map(|(_, name)| *name).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn record(qpn: u32) -> TraceRecord {
        TraceRecord {
            time: 1_500_000_000,
            interface: 1,
            event: TraceEvent::Turn,
            qpn: Some(Qpn(qpn)),
            frame: None,
            steps: vec![
                TraceStep {
                    name: "request_slots",
                    count: 2,
                    drop: None,
                },
                TraceStep {
                    name: "SiwNoPorts",
                    count: 1,
                    drop: Some("no listener"),
                },
            ],
        }
    }

    /// The reader takes nothing until the end; no record is lost, and none beyond the number is taken.
    #[test]
    fn a_stalled_reader_gets_all_records() {
        let (stream, mut reader) = UnixStream::pair().unwrap();
        let devices = ["siw0".into(), "siw1".into()];
        let filter = CaptureFilter::default();
        let trace = Trace::into_stream(stream, &devices, filter, MOST_RECORDS, "x".into()).unwrap();
        for qpn in 0..MOST_RECORDS as u32 + 5 {
            trace.tap().add(record(qpn));
        }
        assert!(!trace.tap().is_wanted());
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len() as u64, MOST_RECORDS);
        let first = &lines[0];
        assert_eq!(
            (&first["lqpn"], &first["device"]),
            (&0.into(), &"siw1".into())
        );
        assert_eq!(first["steps"][0]["count"], 2);
        assert_eq!(first["drops"][0]["reason"], "SiwNoPorts");
        assert_eq!(lines.last().unwrap()["lqpn"], MOST_RECORDS - 1);
    }

    #[test]
    fn headers_are_described() {
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[23] = 6;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[34..38].copy_from_slice(&[0x10, 0, 0x20, 0]);
        frame[41] = 7;
        frame[46] = 5 << 4;
        frame[47] = 0x12;
        let row = describe_frame(&TracedFrame::new(64, &frame));
        assert_eq!(row["src_addr"], "10.0.0.1:4096");
        assert_eq!(row["dst_addr"], "10.0.0.2:8192");
        assert_eq!((&row["flags"], &row["seq"]), (&"SYN,ACK".into(), &7.into()));
        assert_eq!(row["payload"], 10);
        for len in 0..60 {
            describe_frame(&TracedFrame::new(64, &frame[..len]));
        }
    }
}
