//! Packet capture: workers hand copies of frames to a thread that writes pcapng, into the configured
//! file, or into a socket whose other end a client has.
//!
//! Each frame is captured once: where it is sent, or where it is received on a port whose peer is not in
//! this daemon. Checksums that a port would fill in, or that are not computed on the embedded pair, are
//! completed here, so that a capture shows the frames as on a wire. A worker never waits for the thread:
//! frames beyond the room of its queue are dropped, and the file has their number.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{BufWriter, ErrorKind, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam::queue::ArrayQueue;
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::blocks::interface_statistics::{
    InterfaceStatisticsBlock, InterfaceStatisticsOption,
};
use pcap_file::{DataLink, PcapError};

use crate::config::CaptureConfig;
use crate::host::OWN_FILE;

/// Frames and bytes that may wait for the thread.
const QUEUE_FRAMES: usize = 16_384;
const QUEUE_BYTES: usize = 64 << 20;
/// Buffers kept for further frames, and the longest of them.
const SPARE_BUFFERS: usize = 4096;
const SPARE_BYTES: usize = 2048;
/// Pause of the thread without frames, before which it flushes its buffer.
const IDLE_PAUSE: Duration = Duration::from_millis(10);
/// Longest wait for the reader of a socket before the end of the capture is looked for.
const STREAM_TIMEOUT: Duration = Duration::from_millis(100);
/// Time that the reader of a socket has to take the rest of a capture that was ended.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of a block of pcapng in addition to the frame.
const BLOCK_OVERHEAD: u64 = 48;

/// Direction of a captured frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Received by siwd.
    Inbound,
    /// Sent by siwd.
    Outbound,
}

/// Addresses of a connection, whichever end sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow(SocketAddr, SocketAddr);

impl Flow {
    /// The flow between two ends.
    pub fn new(a: SocketAddr, b: SocketAddr) -> Flow {
        // Without scope and flow label, which frames do not have.
        let plain = |end: SocketAddr| SocketAddr::new(end.ip(), end.port());
        let (a, b) = (plain(a), plain(b));
        Flow(a.min(b), a.max(b))
    }
}

/// Frames that a capture takes: those that meet all conditions.
#[derive(Debug, Clone, Default)]
pub struct CaptureFilter {
    /// Interfaces, by device number.
    pub interfaces: Option<Vec<u32>>,
    /// Source or destination.
    pub host: Option<IpAddr>,
    /// Source or destination port of TCP or UDP.
    pub port: Option<u16>,
    /// Connections.
    pub flows: Option<HashSet<Flow>>,
    /// Maximum bytes of a frame; 0: all.
    pub snap_len: u32,
}

impl CaptureFilter {
    /// Decides on a frame by the number of its device and its headers.
    pub(crate) fn selects(&self, interface: u32, headers: &[u8]) -> bool {
        if !self.selects_interface(interface) {
            return false;
        }
        if !self.is_of_addresses() {
            return true;
        }
        Endpoints::parse(headers).is_some_and(|ends| self.selects_ends(&ends))
    }

    /// Returns true if no frame of the interface is left out because of its interface.
    pub(crate) fn selects_interface(&self, interface: u32) -> bool {
        let interfaces = self.interfaces.as_ref();
        interfaces.is_none_or(|all| all.contains(&interface))
    }

    /// Returns true if the filter looks at addresses.
    pub(crate) fn is_of_addresses(&self) -> bool {
        self.host.is_some() || self.port.is_some() || self.flows.is_some()
    }

    /// Decides by the addresses.
    pub(crate) fn selects_ends(&self, ends: &Endpoints) -> bool {
        let Endpoints {
            from, to, ports, ..
        } = *ends;
        let has_host = self.host.is_none_or(|host| host == from || host == to);
        let has_port = self
            .port
            .is_none_or(|port| ports.is_some_and(|(from, to)| port == from || port == to));
        let in_flow = self.flows.as_ref().is_none_or(|flows| {
            ports.is_some_and(|(from_port, to_port)| {
                let (from, to) = (
                    SocketAddr::new(from, from_port),
                    SocketAddr::new(to, to_port),
                );
                flows.contains(&Flow::new(from, to))
            })
        });
        has_host && has_port && in_flow
    }
}

/// Protocol numbers of IP.
pub(crate) const TCP: u8 = 6;
const UDP: u8 = 17;

/// Addresses in the headers of a frame.
#[derive(Debug, PartialEq)]
pub(crate) struct Endpoints {
    pub from: IpAddr,
    pub to: IpAddr,
    /// Ports of TCP or UDP; `None` in fragments but the first, and of other protocols.
    pub ports: Option<(u16, u16)>,
    /// Protocol above IP; `None` in fragments but the first.
    pub protocol: Option<u8>,
    /// Place of its header in the frame.
    pub transport: usize,
}

impl Endpoints {
    /// The ends of a TCP connection.
    pub fn of_connection(from: SocketAddr, to: SocketAddr) -> Endpoints {
        Endpoints {
            from: from.ip(),
            to: to.ip(),
            ports: Some((from.port(), to.port())),
            protocol: Some(TCP),
            transport: 0,
        }
    }

    /// Parses a frame with IPv4 or IPv6, tagged or not.
    pub fn parse(frame: &[u8]) -> Option<Endpoints> {
        let ip = IpStart::find(frame)?;
        let packet = frame.get(ip.offset..)?;
        let word = |at: usize| Some(u16::from_be_bytes([*packet.get(at)?, *packet.get(at + 1)?]));
        let (from, to, protocol, transport) = if ip.is_v4 {
            let address = |at: usize| {
                let octets: [u8; 4] = packet.get(at..at + 4)?.try_into().ok()?;
                Some(IpAddr::from(octets))
            };
            let is_first_fragment = word(6)? & 0x1FFF == 0;
            let header = usize::from(packet.first()? & 15) * 4;
            let protocol = is_first_fragment.then_some(*packet.get(9)?);
            (address(12)?, address(16)?, protocol, header)
        } else {
            let address = |at: usize| {
                let octets: [u8; 16] = packet.get(at..at + 16)?.try_into().ok()?;
                Some(IpAddr::from(octets))
            };
            (address(8)?, address(24)?, Some(*packet.get(6)?), 40)
        };
        let has_ports = matches!(protocol, Some(TCP | UDP));
        let ports = word(transport).zip(word(transport + 2));
        Some(Endpoints {
            from,
            to,
            ports: ports.filter(|_| has_ports),
            protocol,
            transport: ip.offset + transport,
        })
    }
}

/// Place of the IP header in a frame.
struct IpStart {
    offset: usize,
    is_v4: bool,
}

impl IpStart {
    fn find(frame: &[u8]) -> Option<IpStart> {
        const VLAN: u16 = 0x8100;
        let ether_type = |at: usize| {
            let bytes = frame.get(at..at + 2)?;
            Some(u16::from_be_bytes([bytes[0], bytes[1]]))
        };
        let offset = if ether_type(12)? == VLAN { 18 } else { 14 };
        let is_v4 = match ether_type(offset - 2)? {
            0x0800 => true,
            0x86DD => false,
            _ => return None,
        };
        Some(IpStart { offset, is_v4 })
    }
}

/// A frame to record, without its bytes.
#[derive(Debug, Clone, Copy)]
pub struct FrameRecord<'a> {
    /// Device number.
    pub interface: u32,
    /// Its direction.
    pub direction: Direction,
    /// Nanoseconds since the epoch.
    pub time: u64,
    /// The TCP checksum is not complete.
    pub lacks_checksum: bool,
    /// Comment in the capture: the fault that a plan injects into the frame.
    pub comment: Option<&'a Arc<str>>,
}

/// A frame that waits for the thread.
struct CapturedFrame {
    interface: u32,
    direction: Direction,
    /// Nanoseconds since the epoch.
    time: u64,
    fix_checksum: bool,
    comment: Option<Arc<str>>,
    bytes: Vec<u8>,
}

/// Frames between the workers and the thread of one capture.
struct CaptureQueue {
    frames: ArrayQueue<CapturedFrame>,
    spare: ArrayQueue<Vec<u8>>,
    /// Bytes of the waiting frames.
    bytes: AtomicUsize,
    /// Orders the thread to write the waiting frames and end.
    stop: Arc<AtomicBool>,
    /// The limit is reached, or writing failed: nothing more is recorded.
    has_ended: AtomicBool,
    /// Frames dropped because the thread was too slow, by interface.
    dropped: Box<[AtomicU64]>,
    frames_written: AtomicU64,
    bytes_written: AtomicU64,
}

impl CaptureQueue {
    fn dropped_of(&self, interface: u32) -> u64 {
        let dropped = self.dropped.get(interface as usize);
        dropped.map_or(0, |count| count.load(Ordering::Relaxed))
    }

    fn counters(&self) -> CaptureCounters {
        let dropped = self
            .dropped
            .iter()
            .map(|count| count.load(Ordering::Relaxed));
        CaptureCounters {
            frames: self.frames_written.load(Ordering::Relaxed),
            bytes: self.bytes_written.load(Ordering::Relaxed),
            dropped: dropped.sum(),
        }
    }
}

/// Counters of a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureCounters {
    /// Frames written.
    pub frames: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Frames dropped because the file or the reader was too slow.
    pub dropped: u64,
}

/// The workers' end of a capture.
#[derive(Clone)]
pub struct CaptureTap {
    queue: Arc<CaptureQueue>,
    filter: Arc<CaptureFilter>,
}

impl CaptureTap {
    /// Queues a copy of a frame that the filter selects. `headers`: the first part of the frame, with
    /// its headers; `fill` appends all of it. Drops and counts it if the queue is full.
    pub(crate) fn record_frame(
        &self,
        frame: &FrameRecord<'_>,
        headers: &[u8],
        fill: impl FnOnce(&mut Vec<u8>),
    ) {
        let queue = &*self.queue;
        let FrameRecord {
            interface,
            direction,
            time,
            lacks_checksum,
            comment,
        } = *frame;
        if queue.has_ended.load(Ordering::Relaxed) || !self.filter.selects(interface, headers) {
            return;
        }
        let Some(dropped) = queue.dropped.get(interface as usize) else {
            // A device that was added later: the file has no interface for it.
            return;
        };
        let drop_frame = || {
            dropped.fetch_add(1, Ordering::Relaxed);
        };
        if queue.frames.is_full() || queue.bytes.load(Ordering::Relaxed) >= QUEUE_BYTES {
            return drop_frame();
        }
        let mut bytes = queue.spare.pop().unwrap_or_default();
        bytes.clear();
        fill(&mut bytes);
        queue.bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        let frame = CapturedFrame {
            interface,
            direction,
            time,
            fix_checksum: lacks_checksum,
            comment: comment.cloned(),
            bytes,
        };
        if let Err(frame) = queue.frames.push(frame) {
            queue.bytes.fetch_sub(frame.bytes.len(), Ordering::Relaxed);
            drop_frame();
        }
    }

    /// The same capture with another filter.
    pub fn with_filter(&self, filter: CaptureFilter) -> CaptureTap {
        CaptureTap {
            queue: self.queue.clone(),
            filter: Arc::new(filter),
        }
    }

    /// Counters so far.
    pub fn counters(&self) -> CaptureCounters {
        self.queue.counters()
    }
}

/// A socket whose other end a client has. The order to end bounds the wait for a reader that stalls.
pub(crate) struct ReaderSocket {
    stream: UnixStream,
    stop: Arc<AtomicBool>,
    /// Time at which the order to end was seen.
    ending: Option<Instant>,
}

impl ReaderSocket {
    /// Writes to the stream until `stop` is set.
    ///
    /// # Errors
    /// The operating system refuses to set up the socket.
    pub fn new(stream: UnixStream, stop: Arc<AtomicBool>) -> std::io::Result<ReaderSocket> {
        stream.set_write_timeout(Some(STREAM_TIMEOUT))?;
        // Nothing is read: the reader cannot fill the other direction.
        stream.shutdown(std::net::Shutdown::Read)?;
        Ok(ReaderSocket {
            stream,
            stop,
            ending: None,
        })
    }
}

impl Write for ReaderSocket {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        loop {
            match self.stream.write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let is_ending = self.stop.load(Ordering::Acquire);
                    let ending = &mut self.ending;
                    if is_ending && ending.get_or_insert_with(Instant::now).elapsed() > END_TIMEOUT
                    {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Destination of a capture.
enum CaptureSink {
    File(File),
    Stream(ReaderSocket),
}

impl Write for CaptureSink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            CaptureSink::File(file) => file.write(bytes),
            CaptureSink::Stream(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A capture with its thread, which is told to end when this is dropped.
pub struct Capture {
    tap: CaptureTap,
    thread: Option<JoinHandle<()>>,
    /// The file is complete when this has been dropped.
    is_awaited: bool,
}

/// The capture file cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("capture file {}: {reason}; name a writable place in [capture] file", path.display())]
pub struct CaptureError {
    path: PathBuf,
    reason: String,
}

/// Checks that the capture file can be written, and leaves it as it is.
///
/// # Errors
/// [`CaptureError`] with the cause.
pub fn check_writable(config: &CaptureConfig) -> Result<(), CaptureError> {
    let outcome = match config.file.metadata() {
        Ok(found) if found.is_file() || found.is_dir() => {
            File::options().write(true).open(&config.file).map(drop)
        }
        Ok(_) => Ok(()),
        Err(_) => {
            let folder = config.file.parent().unwrap_or("/".as_ref());
            let here = folder.as_os_str().is_empty();
            let folder = if here { ".".as_ref() } else { folder };
            folder
                .metadata()
                .and_then(|_| crate::host::check_folder(folder))
        }
    };
    outcome.map_err(|error| CaptureError {
        path: config.file.clone(),
        reason: error.to_string(),
    })
}

impl Capture {
    /// Captures all frames into the configured file, with one interface per device.
    ///
    /// # Errors
    /// [`CaptureError`] when the file cannot be created.
    pub fn into_file(config: &CaptureConfig, devices: &[String]) -> Result<Capture, CaptureError> {
        let fail = |error: std::io::Error| CaptureError {
            path: config.file.clone(),
            reason: error.to_string(),
        };
        let file = create_file(&config.file).map_err(fail)?;
        let path = config.file.display().to_string();
        let limit = Some(config.limit.0);
        let filter = CaptureFilter::default();
        let stop = Arc::default();
        let sink = CaptureSink::File(file);
        let mut capture = start(devices, filter, limit, path, (sink, stop));
        if let Ok(capture) = &mut capture {
            capture.is_awaited = true;
        }
        capture.map_err(fail)
    }

    /// Captures the frames that the filter selects into a socket, until its reader leaves, `limit`
    /// bytes are written, or this is dropped. `reader`: its name in the log.
    ///
    /// # Errors
    /// The operating system refuses a thread, or to set up the socket.
    pub fn into_stream(
        stream: UnixStream,
        devices: &[String],
        filter: CaptureFilter,
        limit: Option<u64>,
        reader: String,
    ) -> std::io::Result<Capture> {
        let stop: Arc<AtomicBool> = Arc::default();
        let sink = CaptureSink::Stream(ReaderSocket::new(stream, stop.clone())?);
        start(devices, filter, limit, reader, (sink, stop))
    }

    /// The workers' end.
    pub fn tap(&self) -> &CaptureTap {
        &self.tap
    }
}

/// Starts the thread of a capture. `stop` orders it to end.
fn start(
    devices: &[String],
    filter: CaptureFilter,
    limit: Option<u64>,
    name: String,
    (sink, stop): (CaptureSink, Arc<AtomicBool>),
) -> std::io::Result<Capture> {
    let queue = Arc::new(CaptureQueue {
        frames: ArrayQueue::new(QUEUE_FRAMES),
        spare: ArrayQueue::new(SPARE_BUFFERS),
        bytes: AtomicUsize::new(0),
        stop,
        has_ended: AtomicBool::new(false),
        dropped: devices.iter().map(|_| AtomicU64::new(0)).collect(),
        frames_written: AtomicU64::new(0),
        bytes_written: AtomicU64::new(0),
    });
    let writer = CaptureWriter {
        sink,
        queue: queue.clone(),
        devices: devices.to_vec(),
        limit: limit.unwrap_or(u64::MAX),
        snap_len: filter.snap_len,
        name,
    };
    let thread = std::thread::Builder::new().name("siwd-capture".into());
    let thread = thread.spawn(move || writer.run())?;
    Ok(Capture {
        tap: CaptureTap {
            queue,
            filter: Arc::new(filter),
        },
        thread: Some(thread),
        is_awaited: false,
    })
}

/// Creates a file that its owner alone can read: it will contain payload.
fn create_file(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(OWN_FILE)
        .open(path)?;
    // An existing file keeps its mode; a pipe or a device has no bytes to protect.
    if file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(OWN_FILE))?;
    }
    Ok(file)
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.tap.queue.stop.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else {
            return;
        };
        thread.thread().unpark();
        if self.is_awaited && thread.join().is_err() {
            tracing::error!("the capture thread failed: its file is incomplete");
        }
    }
}

/// Writes the frames of one capture, in a thread of its own.
struct CaptureWriter {
    sink: CaptureSink,
    queue: Arc<CaptureQueue>,
    devices: Vec<String>,
    limit: u64,
    snap_len: u32,
    /// File or reader, for the log.
    name: String,
}

/// Outcome of a capture that ended without a fault.
#[derive(PartialEq)]
enum CaptureEnd {
    Ordered,
    LimitReached,
}

impl CaptureWriter {
    fn run(self) {
        let CaptureWriter {
            sink,
            queue,
            devices,
            limit,
            snap_len,
            name,
        } = self;
        let is_file = matches!(sink, CaptureSink::File(_));
        let written = write_capture(&queue, sink, &devices, limit, snap_len);
        // Workers record nothing from here on, even before the control thread takes the capture from them.
        queue.has_ended.store(true, Ordering::Relaxed);
        while queue.frames.pop().is_some() {}
        let CaptureCounters { dropped, bytes, .. } = queue.counters();
        match written {
            Ok(CaptureEnd::LimitReached) => {
                tracing::warn!(bytes, dropped, "capture {name}: the limit is reached");
            }
            Ok(CaptureEnd::Ordered) if dropped > 0 => {
                tracing::warn!(
                    bytes,
                    dropped,
                    "capture {name} lacks frames: it was written too slowly"
                );
            }
            Ok(CaptureEnd::Ordered) => tracing::debug!(bytes, "capture {name} ends"),
            Err(error) if is_file => {
                tracing::error!(bytes, dropped, "capture {name} ends: {error}");
            }
            Err(error) => tracing::debug!(bytes, dropped, "capture {name} ends: {error}"),
        }
    }
}

/// Writes frames until the order to end, the limit or an error.
fn write_capture(
    queue: &CaptureQueue,
    sink: CaptureSink,
    devices: &[String],
    limit: u64,
    snap_len: u32,
) -> std::io::Result<CaptureEnd> {
    let mut writer =
        PcapNgWriter::new(BufWriter::with_capacity(1 << 18, sink)).map_err(to_io_error)?;
    for name in devices {
        let description = InterfaceDescriptionBlock {
            linktype: DataLink::ETHERNET,
            snaplen: snap_len,
            options: vec![
                InterfaceDescriptionOption::IfName(Cow::Owned(name.clone())),
                InterfaceDescriptionOption::IfTsResol(9),
            ],
        };
        writer
            .write_pcapng_block(description)
            .map_err(to_io_error)?;
    }
    let mut counts = vec![InterfaceCounts::default(); devices.len()];
    let mut written = 0;
    let end = loop {
        let is_stopping = queue.stop.load(Ordering::Acquire);
        let Some(mut frame) = queue.frames.pop() else {
            // A running capture can be read.
            writer.get_mut().flush()?;
            if is_stopping {
                break CaptureEnd::Ordered;
            }
            std::thread::park_timeout(IDLE_PAUSE);
            continue;
        };
        queue.bytes.fetch_sub(frame.bytes.len(), Ordering::Relaxed);
        if frame.fix_checksum {
            complete_checksum(&mut frame.bytes);
        }
        let original_len = frame.bytes.len();
        if snap_len > 0 {
            frame.bytes.truncate(snap_len as usize);
        }
        written += frame.bytes.len() as u64 + BLOCK_OVERHEAD;
        if written > limit {
            break CaptureEnd::LimitReached;
        }
        let flags = match frame.direction {
            Direction::Inbound => 1,
            Direction::Outbound => 2,
        };
        let mut options = vec![EnhancedPacketOption::Flags(flags)];
        if let Some(comment) = &frame.comment {
            options.push(EnhancedPacketOption::Comment(Cow::Borrowed(comment)));
            written += (4 + comment.len().next_multiple_of(4)) as u64;
        }
        if let Some(counts) = counts.get_mut(frame.interface as usize) {
            let dropped = queue.dropped_of(frame.interface);
            let since_last = dropped - std::mem::replace(&mut counts.dropped, dropped);
            if since_last > 0 {
                options.push(EnhancedPacketOption::DropCount(since_last));
            }
            counts.written += 1;
        }
        let block = EnhancedPacketBlock {
            interface_id: frame.interface,
            timestamp: Duration::from_nanos(frame.time),
            original_len: original_len as u32,
            data: Cow::Borrowed(&frame.bytes),
            options,
        };
        writer.write_pcapng_block(block).map_err(to_io_error)?;
        queue.frames_written.fetch_add(1, Ordering::Relaxed);
        queue.bytes_written.store(written, Ordering::Relaxed);
        if frame.bytes.capacity() <= SPARE_BYTES {
            let _ = queue.spare.push(frame.bytes);
        }
    };
    write_statistics(queue, &mut writer, &counts)?;
    writer.get_mut().flush()?;
    Ok(end)
}

/// Frames of one interface in a capture.
#[derive(Clone, Default)]
struct InterfaceCounts {
    written: u64,
    /// Dropped frames that a written one has told of.
    dropped: u64,
}

/// Writes how many frames each interface had, and how many of them are missing.
fn write_statistics(
    queue: &CaptureQueue,
    writer: &mut PcapNgWriter<BufWriter<CaptureSink>>,
    counts: &[InterfaceCounts],
) -> std::io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since_epoch| since_epoch.as_nanos() as u64);
    for (interface, counts) in counts.iter().enumerate() {
        let dropped = queue.dropped_of(interface as u32);
        let block = InterfaceStatisticsBlock {
            interface_id: interface as u32,
            // The upper half is written first.
            timestamp: now.rotate_left(32),
            options: vec![
                InterfaceStatisticsOption::IsbIfRecv(counts.written + dropped),
                InterfaceStatisticsOption::IsbIfDrop(dropped),
            ],
        };
        writer.write_pcapng_block(block).map_err(to_io_error)?;
    }
    Ok(())
}

/// The operating system's error below that of the library.
fn to_io_error(error: PcapError) -> std::io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => std::io::Error::other(other.to_string()),
    }
}

/// Computes the TCP checksum of a whole frame, IPv4 or IPv6, tagged or not.
fn complete_checksum(frame: &mut [u8]) {
    let Some(IpStart { offset: ip, is_v4 }) = IpStart::find(frame) else {
        return;
    };
    let (tcp, addresses, len) = match is_v4 {
        true if frame.len() >= ip + 20 && frame[ip + 9] == 6 => {
            let total = usize::from(u16::from_be_bytes([frame[ip + 2], frame[ip + 3]]));
            let header = usize::from(frame[ip] & 15) * 4;
            (ip + header, ip + 12..ip + 20, total.checked_sub(header))
        }
        false if frame.len() >= ip + 40 && frame[ip + 6] == 6 => {
            let total = usize::from(u16::from_be_bytes([frame[ip + 4], frame[ip + 5]]));
            (ip + 40, ip + 8..ip + 40, Some(total))
        }
        _ => return,
    };
    let Some(len) = len.filter(|length| *length >= 20 && tcp + length <= frame.len()) else {
        return;
    };
    frame[tcp + 16..tcp + 18].fill(0);
    let sum_of = |bytes: &[u8]| -> u64 {
        bytes
            .chunks(2)
            .map(|pair| u64::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])))
            .sum()
    };
    let mut sum = sum_of(&frame[addresses]) + sum_of(&frame[tcp..tcp + len]) + 6 + len as u64;
    while sum >> 16 != 0 {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    frame[tcp + 16..tcp + 18].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completed_checksum_sums_to_all_ones() {
        let mut f = vec![0u8; 14 + 20 + 20 + 3];
        f[12..14].copy_from_slice(&[8, 0]);
        f[14] = 0x45;
        f[16..18].copy_from_slice(&43u16.to_be_bytes());
        f[23] = 6;
        f[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        f[34..36].copy_from_slice(&[1, 2]);
        f[54..57].copy_from_slice(&[7, 8, 9]);
        complete_checksum(&mut f);
        let mut sum: u64 = 6 + 23;
        for c in f[26..].chunks(2) {
            sum += u64::from(u16::from_be_bytes([c[0], *c.get(1).unwrap_or(&0)]));
        }
        while sum >> 16 != 0 {
            sum = (sum & 0xFFFF) + (sum >> 16);
        }
        assert_eq!(sum, 0xFFFF);
    }

    fn ipv4_frame(from: [u8; 4], to: [u8; 4], ports: (u16, u16)) -> Vec<u8> {
        let mut frame = vec![0; 60];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[23] = 6;
        frame[26..30].copy_from_slice(&from);
        frame[30..34].copy_from_slice(&to);
        frame[34..36].copy_from_slice(&ports.0.to_be_bytes());
        frame[36..38].copy_from_slice(&ports.1.to_be_bytes());
        frame
    }

    /// A frame, and the number of those dropped before it.
    type ReadFrame = (Vec<u8>, Option<u64>);

    /// Blocks of a file after its header, up to the first that is not whole: written frames with the
    /// drops before them, and the numbers of dropped frames by interface.
    fn read_back(bytes: &[u8]) -> (Vec<ReadFrame>, Vec<u64>) {
        use pcap_file::pcapng::{Block, PcapNgReader};
        let (mut frames, mut dropped) = (Vec::new(), Vec::new());
        let Ok(mut reader) = PcapNgReader::new(bytes) else {
            return (frames, dropped);
        };
        while let Some(Ok(block)) = reader.next_block() {
            match block {
                Block::EnhancedPacket(packet) => {
                    let drops = packet.options.iter().find_map(|option| match option {
                        EnhancedPacketOption::DropCount(count) => Some(*count),
                        _ => None,
                    });
                    frames.push((packet.data.to_vec(), drops));
                }
                Block::InterfaceStatistics(statistics) => {
                    dropped.extend(statistics.options.iter().filter_map(|option| match option {
                        InterfaceStatisticsOption::IsbIfDrop(count) => Some(*count),
                        _ => None,
                    }));
                }
                _ => {}
            }
        }
        (frames, dropped)
    }

    fn record(tap: &CaptureTap, interface: u32, frame: &[u8]) {
        let record = FrameRecord {
            interface,
            direction: Direction::Outbound,
            time: 5,
            lacks_checksum: false,
            comment: None,
        };
        tap.record_frame(&record, frame, |bytes| bytes.extend_from_slice(frame));
    }

    #[test]
    fn a_capture_is_a_readable_pcapng_with_each_frame() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.pcapng");
        std::fs::write(&file, "old").unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        let config = CaptureConfig::new(file.clone(), None);
        let capture = Capture::into_file(&config, &["siw0".into()]).unwrap();
        record(capture.tap(), 0, &[1; 60]);
        // It can be read while the capture runs.
        let deadline = Instant::now() + Duration::from_secs(60);
        while read_back(&std::fs::read(&file).unwrap_or_default())
            .0
            .is_empty()
        {
            assert!(Instant::now() < deadline);
        }
        drop(capture);
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let (frames, dropped) = read_back(&std::fs::read(&file).unwrap());
        assert_eq!(frames, [(vec![1; 60], None)]);
        assert_eq!(dropped, [0]);
    }

    #[test]
    fn filters_select_by_device_address_port_and_connection() {
        let frame = ipv4_frame([10, 0, 0, 1], [10, 0, 0, 2], (1000, 2000));
        let (a, b) = ("10.0.0.1:1000", "10.0.0.2:2000");
        let flow = |a: &str, b: &str| Flow::new(a.parse().unwrap(), b.parse().unwrap());
        let none = CaptureFilter::default;
        let host = |text: &str| CaptureFilter {
            host: Some(text.parse().unwrap()),
            ..none()
        };
        let port = |port| CaptureFilter {
            port: Some(port),
            ..none()
        };
        let flows = |flow| CaptureFilter {
            flows: Some(HashSet::from([flow])),
            ..none()
        };
        let on = |interface| CaptureFilter {
            interfaces: Some(vec![interface]),
            ..none()
        };
        for (filter, is_selected) in [
            (none(), true),
            (host("10.0.0.1"), true),
            (host("10.0.0.2"), true),
            (host("10.0.0.3"), false),
            (host("fd77::1"), false),
            (port(2000), true),
            (port(2001), false),
            (flows(flow(a, b)), true),
            (flows(flow(b, a)), true),
            (flows(flow(a, a)), false),
            (on(3), true),
            (on(4), false),
        ] {
            assert_eq!(filter.selects(3, &frame), is_selected, "{filter:?}");
        }
        let mut tagged = frame.clone();
        tagged.splice(12..12, [0x81, 0, 0, 7]);
        assert!(host("10.0.0.2").selects(3, &tagged) && !port(9).selects(3, &tagged));
        // A later fragment has no ports; headers that end early select nothing.
        let mut fragment = frame.clone();
        fragment[21] = 1;
        assert!(!port(1000).selects(3, &fragment) && host("10.0.0.1").selects(3, &fragment));
        for len in 0..38 {
            assert!(!port(1000).selects(3, &frame[..len]), "{len}");
        }
    }

    #[test]
    fn a_stalled_reader_costs_frames_and_no_time() {
        use std::io::Read;
        let (stream, mut reader) = UnixStream::pair().unwrap();
        let filter = CaptureFilter {
            snap_len: 100,
            ..CaptureFilter::default()
        };
        let devices = ["siw0".into(), "siw1".into()];
        let capture = Capture::into_stream(stream, &devices, filter, None, "x".into()).unwrap();
        let frame = vec![7; 9000];
        let mut recorded = 0;
        while capture.tap().counters().dropped == 0 {
            record(capture.tap(), 1, &frame);
            recorded += 1;
        }
        // The reader goes on: the next frame tells of the missing ones.
        let read = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).map(|_| bytes)
        });
        let deadline = Instant::now() + Duration::from_secs(60);
        while !capture.tap().queue.frames.is_empty() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
        record(capture.tap(), 1, &frame);
        recorded += 1;
        let dropped = capture.tap().counters().dropped;
        drop(capture);
        let (frames, drops) = read_back(&read.join().unwrap().unwrap());
        assert_eq!(drops, [0, dropped]);
        assert_eq!(frames.len() as u64 + dropped, recorded);
        assert!(frames.iter().all(|(bytes, _)| bytes.len() == 100));
        let told: u64 = frames.iter().filter_map(|(_, drops)| *drops).sum();
        assert_eq!(told, dropped);
    }

    #[test]
    fn a_full_disk_ends_the_capture() {
        let config = CaptureConfig::new("/dev/full".into(), None);
        let capture = Capture::into_file(&config, &["siw0".into()]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !capture.tap().queue.has_ended.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
    }
}
