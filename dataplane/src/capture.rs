//! Packet capture: workers hand copies of frames to a thread that writes pcapng.
//!
//! Off unless configured. Each frame is captured once: where it is sent, or where it is received on a
//! port whose peer is not in this daemon. Checksums that a port would fill in, or that are not
//! computed on the embedded pair, are completed here, so that a capture shows the frames as on a wire.

use std::borrow::Cow;
use std::fs::{File, OpenOptions, Permissions};
use std::io::BufWriter;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use pcap_file::DataLink;
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};

use crate::config::CaptureConfig;
use crate::host::OWN_FILE;

const QUEUE_FRAMES: usize = 16_384;

/// Direction of a captured frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Received by siwd.
    Inbound,
    /// Sent by siwd.
    Outbound,
}

struct CapturedFrame {
    interface: u32,
    direction: Direction,
    /// Nanoseconds since the epoch.
    time: u64,
    fix_checksum: bool,
    bytes: Vec<u8>,
}

struct CaptureQueue {
    frames: ArrayQueue<CapturedFrame>,
    spare: ArrayQueue<Vec<u8>>,
    stop: AtomicBool,
    dropped: AtomicU64,
    full: AtomicBool,
}

/// A worker's end of the capture: frames go to the writing thread through a queue.
#[derive(Clone)]
pub struct CaptureHandle(Arc<CaptureQueue>);

impl CaptureHandle {
    /// Queues a copy of a frame whose bytes `fill` appends. If the queue is full, waits briefly, since
    /// a capture with gaps is worth little; then the frame is counted as dropped.
    pub fn record_frame(
        &self,
        interface: u32,
        direction: Direction,
        time: u64,
        fix_checksum: bool,
        fill: impl FnOnce(&mut Vec<u8>),
    ) {
        if self.0.full.load(Ordering::Relaxed) {
            return;
        }
        let mut bytes = self.0.spare.pop().unwrap_or_default();
        bytes.clear();
        fill(&mut bytes);
        let mut frame = CapturedFrame {
            interface,
            direction,
            time,
            fix_checksum,
            bytes,
        };
        for _ in 0..100 {
            match self.0.frames.push(frame) {
                Ok(()) => return,
                Err(back) => frame = back,
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        self.0.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// The writing thread; stops and flushes when dropped.
pub struct Capture {
    shared: Arc<CaptureQueue>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
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
    /// Creates the file with one interface per device, without a snap length.
    ///
    /// # Errors
    /// [`CaptureError`] when the file cannot be created.
    pub fn start_writing(
        config: &CaptureConfig,
        devices: &[String],
    ) -> Result<Capture, CaptureError> {
        let fail = |reason: String| CaptureError {
            path: config.file.clone(),
            reason,
        };
        let file = create_file(&config.file).map_err(|error| fail(error.to_string()))?;
        let mut writer = PcapNgWriter::new(BufWriter::with_capacity(1 << 20, file))
            .map_err(|error| fail(error.to_string()))?;
        for name in devices {
            writer
                .write_pcapng_block(InterfaceDescriptionBlock {
                    linktype: DataLink::ETHERNET,
                    snaplen: 0,
                    options: vec![
                        InterfaceDescriptionOption::IfName(Cow::Owned(name.clone())),
                        InterfaceDescriptionOption::IfTsResol(9),
                    ],
                })
                .map_err(|error| fail(error.to_string()))?;
        }
        let shared = Arc::new(CaptureQueue {
            frames: ArrayQueue::new(QUEUE_FRAMES),
            spare: ArrayQueue::new(QUEUE_FRAMES),
            stop: AtomicBool::new(false),
            dropped: AtomicU64::new(0),
            full: AtomicBool::new(false),
        });
        let limit = config.limit.0;
        let thread = std::thread::Builder::new()
            .name("siwd-capture".into())
            .spawn({
                let shared = shared.clone();
                move || write_loop(&shared, &mut writer, limit)
            })
            .map_err(|error| fail(error.to_string()))?;
        Ok(Capture {
            shared,
            thread: Some(thread),
            path: config.file.clone(),
        })
    }

    /// Creates a handle for a worker.
    pub fn new_handle(&self) -> CaptureHandle {
        CaptureHandle(self.shared.clone())
    }
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
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!(
                    "the capture thread failed; {} is incomplete",
                    self.path.display()
                );
            }
        }
        let dropped = self.shared.dropped.load(Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(
                dropped,
                "frames missing from {}: the disk was too slow",
                self.path.display()
            );
        }
    }
}

fn write_loop(shared: &CaptureQueue, writer: &mut PcapNgWriter<BufWriter<File>>, limit: u64) {
    let mut written = 0u64;
    loop {
        let stopping = shared.stop.load(Ordering::Acquire);
        let Some(mut frame) = shared.frames.pop() else {
            if stopping {
                break;
            }
            std::thread::park_timeout(Duration::from_millis(2));
            continue;
        };
        written += frame.bytes.len() as u64 + 48;
        if written > limit {
            if !shared.full.swap(true, Ordering::Relaxed) {
                tracing::warn!(limit, "capture limit reached: nothing more is captured");
            }
            continue;
        }
        if frame.fix_checksum {
            complete_checksum(&mut frame.bytes);
        }
        let flags = match frame.direction {
            Direction::Inbound => 1,
            Direction::Outbound => 2,
        };
        let block = EnhancedPacketBlock {
            interface_id: frame.interface,
            timestamp: Duration::from_nanos(frame.time),
            original_len: frame.bytes.len() as u32,
            data: Cow::Borrowed(&frame.bytes),
            options: vec![EnhancedPacketOption::Flags(flags)],
        };
        if let Err(error) = writer.write_pcapng_block(block) {
            tracing::error!("writing the capture failed: {error}");
            shared.full.store(true, Ordering::Relaxed);
        }
        let _ = shared.spare.push(frame.bytes);
    }
    if let Err(error) = std::io::Write::flush(writer.get_mut()) {
        tracing::error!("writing the capture failed: {error}");
    }
}

/// Computes the TCP checksum of a whole frame, IPv4 or IPv6, tagged or not.
fn complete_checksum(frame: &mut [u8]) {
    let Some(mut at) = frame
        .get(12..14)
        .map(|bytes| (14, u16::from_be_bytes([bytes[0], bytes[1]])))
    else {
        return;
    };
    if at.1 == 0x8100 {
        let Some(bytes) = frame.get(16..18) else {
            return;
        };
        at = (18, u16::from_be_bytes([bytes[0], bytes[1]]));
    }
    let ip = at.0;
    let (tcp, addresses, len) = match at.1 {
        0x0800 if frame.len() >= ip + 20 && frame[ip + 9] == 6 => {
            let total = usize::from(u16::from_be_bytes([frame[ip + 2], frame[ip + 3]]));
            let header = usize::from(frame[ip] & 15) * 4;
            (ip + header, ip + 12..ip + 20, total.checked_sub(header))
        }
        0x86DD if frame.len() >= ip + 40 && frame[ip + 6] == 6 => {
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

    #[test]
    fn a_capture_is_a_readable_pcapng_with_each_frame() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.pcapng");
        std::fs::write(&file, "old").unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        let config = CaptureConfig {
            file: file.clone(),
            limit: crate::config::ByteSize(1 << 20),
        };
        let capture = Capture::start_writing(&config, &["siw0".into()]).unwrap();
        capture
            .new_handle()
            .record_frame(0, Direction::Outbound, 5, false, |b| b.extend([1; 60]));
        drop(capture);
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut reader = pcap_file::pcapng::PcapNgReader::new(File::open(&file).unwrap()).unwrap();
        let mut frames = 0;
        while let Some(block) = reader.next_block() {
            if let pcap_file::pcapng::Block::EnhancedPacket(p) = block.unwrap() {
                assert_eq!(p.data.as_ref(), &[1; 60]);
                frames += 1;
            }
        }
        assert_eq!(frames, 1);
    }
}
