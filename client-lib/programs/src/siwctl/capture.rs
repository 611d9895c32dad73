//! Captures of a running daemon. siwctl writes the file, so that the daemon opens none for its caller, and
//! a slow disk or reader costs frames of the capture only.

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use serde_json::json;
use siw_shm::control::Addr;
use siw_shm::control::messages::{EVERY_DEVICE, StartCapture};
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};

#[derive(Debug, Subcommand)]
pub enum CaptureCommand {
    /// Capture frames into a pcapng file until Ctrl-C, the limit, or `capture stop`
    Start(StartArgs),
    /// End captures: one by its number in `siwctl show captures`, or all that siwctl started
    Stop {
        /// Number of the capture
        number: Option<u32>,
    },
}

/// Conditions that frames have to meet.
#[derive(Debug, Args)]
pub struct Selection {
    /// Only frames of this device
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Only connections of this queue pair: the present one and later ones, once they are established
    #[arg(long, value_name = "LQPN", value_parser = clap::value_parser!(u32).range(1..))]
    qp: Option<u32>,
    /// Only connections of this client, as with --qp
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    client: Option<u64>,
    /// Only frames from or to this address
    #[arg(long, value_name = "ADDRESS")]
    host: Option<IpAddr>,
    /// Only frames from or to this TCP or UDP port
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
}

impl Selection {
    /// A capture with these conditions.
    pub fn to_request(&self, daemon: &siw::Context) -> anyhow::Result<StartCapture> {
        let device = self.device.as_ref();
        let device = device.map(|name| daemon.device_by_name(name)).transpose()?;
        let host = self.host.map(Addr::from);
        Ok(StartCapture {
            device: device.map_or(EVERY_DEVICE, |device| device.index),
            qp_num: self.qp.unwrap_or(0),
            port: self.port.unwrap_or(0),
            client: self.client.unwrap_or(0),
            host: host.unwrap_or(Addr::NONE),
            ..StartCapture::ALL_FRAMES
        })
    }
}

#[derive(Debug, Args)]
pub struct StartArgs {
    #[command(flatten)]
    selection: Selection,
    /// Only the first bytes of each frame; 96 have all headers
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(14..))]
    snaplen: Option<u32>,
    /// End at this size, such as 64MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    limit: Option<u64>,
    /// Continue in another file, FILE.1 and so on, at this size of a file, at least 1MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_file_size)]
    rotate: Option<u64>,
    /// Keep this number of files of --rotate, the latest ones
    #[arg(long, value_name = "COUNT", requires = "rotate", value_parser = clap::value_parser!(u32).range(1..))]
    ring: Option<u32>,
    /// File to write, or - for standard output: siwctl capture start - | tshark -r -
    file: PathBuf,
}

/// A number of bytes, or with KiB, MiB or GiB.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let shift = match text[digits.len()..].trim() {
        "" => Some(0),
        "KiB" => Some(10),
        "MiB" => Some(20),
        "GiB" => Some(30),
        _ => None,
    };
    let size = digits.parse::<u64>().ok().zip(shift);
    let size = size.and_then(|(number, shift)| number.checked_mul(1 << shift));
    size.filter(|size| *size > 0).ok_or_else(|| {
        "write bytes, or a number with KiB, MiB or GiB, for example 64MiB".to_owned()
    })
}

/// A size of which at least a few reads of the stream fit into a file.
fn parse_file_size(text: &str) -> Result<u64, String> {
    const LEAST: u64 = 1 << 20;
    let size = parse_size(text)?;
    let is_enough = size >= LEAST;
    is_enough.then_some(size).ok_or("at least 1MiB".to_owned())
}

/// Executes `siwctl capture`.
pub fn run(
    daemon: &siw::Context,
    command: &CaptureCommand,
    as_json: bool,
) -> anyhow::Result<String> {
    match command {
        CaptureCommand::Stop { number } => {
            daemon.stop_capture(number.unwrap_or(0))?;
            Ok(String::new())
        }
        CaptureCommand::Start(args) => start(daemon, args, as_json),
    }
}

fn start(daemon: &siw::Context, args: &StartArgs, as_json: bool) -> anyhow::Result<String> {
    let to_stdout = args.file == Path::new("-");
    if to_stdout && std::io::stdout().is_terminal() {
        bail!("a capture is no text: name a file, or pipe it into tshark -r -");
    }
    if to_stdout && args.rotate.is_some() {
        bail!("standard output is one stream: --rotate needs a file");
    }
    let request = StartCapture {
        snap_len: args.snaplen.unwrap_or(0),
        limit: args.limit.unwrap_or(0),
        ..args.selection.to_request(daemon)?
    };
    let signals = watch_signals().context("cannot watch signals")?;
    let (number, stream) = daemon.start_capture(&request)?;
    let name = args.file.display();
    let sink: Box<dyn Write> = if to_stdout {
        Box::new(std::io::stdout())
    } else {
        let file = create_file(&args.file);
        Box::new(file.with_context(|| format!("cannot create {name}"))?)
    };
    let mut out = Output {
        sink,
        written: 0,
        path: &args.file,
        rotate: args.rotate.unwrap_or(u64::MAX),
        ring: args.ring.unwrap_or(u32::MAX),
        number: 0,
    };
    eprintln!("siwctl: capture {number} to {name}; Ctrl-C ends it");
    let mut blocks = Blocks::default();
    let copied = copy_stream(daemon, number, stream, &signals, |bytes| {
        let whole = blocks.take(bytes);
        out.write_blocks(&whole, &blocks.head)
    });
    let Blocks {
        frames, dropped, ..
    } = blocks;
    match copied {
        Ok(()) => {}
        // The reader has seen enough, like `head`.
        Err(error) if to_stdout && error.kind() == ErrorKind::BrokenPipe => {}
        Err(error) => {
            bail!("cannot write {name}: {error}; it has {frames} frames");
        }
    }
    let missing = match dropped {
        0 => String::new(),
        dropped => format!(", {dropped} missing because they were written too slowly"),
    };
    eprintln!("siwctl: {frames} frames{missing}");
    if frames == 0 {
        eprintln!("siwctl: no frame matched: see siwctl show conn for addresses and ports");
    }
    Ok(if as_json && !to_stdout {
        let file = name.to_string();
        format!(
            "{}\n",
            json!({ "file": file, "files": out.number + 1, "frames": frames, "dropped": dropped })
        )
    } else {
        String::new()
    })
}

/// Creates a file for its owner alone: it has payload.
fn create_file(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)
}

/// Standard output, a file, or the latest of several files.
struct Output<'a> {
    sink: Box<dyn Write>,
    /// Bytes in the present file.
    written: u64,
    path: &'a Path,
    /// Size at which the next file begins.
    rotate: u64,
    /// Number of files kept.
    ring: u32,
    /// Number of the present file.
    number: u32,
}

impl Output<'_> {
    /// Writes whole blocks. `head`: the blocks with which each file begins.
    fn write_blocks(&mut self, blocks: &[u8], head: &[u8]) -> std::io::Result<()> {
        let len = blocks.len() as u64;
        if self.written > 0 && self.written + len > self.rotate {
            self.number += 1;
            let mut file = create_file(&self.file_path(self.number))?;
            file.write_all(head)?;
            self.sink = Box::new(file);
            self.written = head.len() as u64;
            if let Some(oldest) = self.number.checked_sub(self.ring) {
                std::fs::remove_file(self.file_path(oldest))?;
            }
        }
        self.written += len;
        self.sink.write_all(blocks)?;
        self.sink.flush()
    }

    /// FILE, FILE.1, FILE.2 ...
    fn file_path(&self, number: u32) -> PathBuf {
        if number == 0 {
            return self.path.to_owned();
        }
        let mut path = self.path.as_os_str().to_owned();
        path.push(format!(".{number}"));
        path.into()
    }
}

/// A descriptor that is readable after SIGINT or SIGTERM.
pub fn watch_signals() -> std::io::Result<UnixStream> {
    let (ours, of_handler) = UnixStream::pair()?;
    for signal in [libc::SIGINT, libc::SIGTERM] {
        signal_hook::low_level::pipe::register(signal, of_handler.try_clone()?)?;
    }
    Ok(ours)
}

/// Passes on what arrives until the capture or trace ends. A signal ends it in the daemon, which then sends
/// the rest.
pub fn copy_stream(
    daemon: &siw::Context,
    number: u32,
    stream: OwnedFd,
    signals: &UnixStream,
    mut take: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut stream = UnixStream::from(stream);
    let mut buffer = vec![0; 256 << 10];
    let mut is_ending = false;
    loop {
        if !is_ending {
            let mut ready = [
                PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !ready[1].revents().is_empty() {
                is_ending = true;
                // The capture may have ended by itself.
                let _ = daemon.stop_capture(number);
            }
        }
        let len = match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error),
        };
        take(&buffer[..len])?;
    }
}

/// Divides a stream of pcapng into blocks, and counts frames.
#[derive(Default)]
struct Blocks {
    /// The beginning of a block that is not complete.
    rest: Vec<u8>,
    /// The section header and the descriptions of interfaces.
    head: Vec<u8>,
    frames: u64,
    /// Frames that the daemon dropped.
    dropped: u64,
}

impl Blocks {
    /// Takes received bytes; returns those of all complete blocks.
    fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        const ENHANCED_PACKET: u32 = 6;
        const INTERFACE_STATISTICS: u32 = 5;
        const INTERFACE_DESCRIPTION: u32 = 1;
        const SECTION_HEADER: u32 = 0x0A0D_0D0A;
        /// Type and length at the start of a block, length at its end.
        const FRAME: usize = 12;
        self.rest.extend_from_slice(bytes);
        let word = |bytes: &[u8], at: usize| {
            let word = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_ne_bytes(word))
        };
        let mut end = 0;
        while let Some((kind, len)) =
            word(&self.rest, end).zip(word(&self.rest, end + 4).map(|len| len as usize))
            && let Some(block) = self.rest.get(end..end + len.max(FRAME))
        {
            match kind {
                ENHANCED_PACKET => self.frames += 1,
                SECTION_HEADER | INTERFACE_DESCRIPTION => self.head.extend_from_slice(block),
                INTERFACE_STATISTICS => self.dropped += dropped_in(block),
                _ => {}
            }
            end += block.len();
        }
        let rest = self.rest.split_off(end);
        std::mem::replace(&mut self.rest, rest)
    }
}

/// Dropped frames (`isb_ifdrop`) in an interface statistics block.
fn dropped_in(block: &[u8]) -> u64 {
    const IF_DROP: u16 = 5;
    // Type, length, interface, time stamp.
    let mut options = block.get(20..).unwrap_or_default();
    while let Some(([kind, kind2, len, len2], rest)) = options.split_first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([*len, *len2]));
        let value = rest.get(..len).unwrap_or_default();
        if u16::from_ne_bytes([*kind, *kind2]) == IF_DROP {
            return value.try_into().map_or(0, u64::from_ne_bytes);
        }
        options = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(kind: u32, body: &[u8]) -> Vec<u8> {
        let len = (body.len() as u32 + 12).to_ne_bytes();
        [&kind.to_ne_bytes()[..], &len, body, &len].concat()
    }

    #[test]
    fn blocks_are_whole_however_they_arrive() {
        let statistics = [
            &[0; 12][..],
            &4u16.to_ne_bytes(),
            &8u16.to_ne_bytes(),
            &9u64.to_ne_bytes(),
            &5u16.to_ne_bytes(),
            &8u16.to_ne_bytes(),
            &7u64.to_ne_bytes(),
            &[0; 4],
        ]
        .concat();
        let all = [
            block(1, &[1; 8]),
            block(6, &[2; 40]),
            block(6, &[]),
            block(5, &statistics),
        ]
        .concat();
        for step in [1, 7, 64, all.len()] {
            let mut blocks = Blocks::default();
            let mut written = Vec::new();
            for part in all.chunks(step) {
                let whole = blocks.take(part);
                assert!(whole.is_empty() || whole.len() >= 12);
                written.extend(whole);
            }
            assert_eq!(written, all);
            assert_eq!((blocks.frames, blocks.dropped), (2, 7));
        }
        // Bytes that are no block are kept or passed on.
        let mut blocks = Blocks::default();
        assert!(blocks.take(&[0; 64]).len() <= 64);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("64MiB"), Ok(64 << 20));
        assert_eq!(parse_size("5 KiB"), Ok(5 << 10));
        assert_eq!(parse_size("77"), Ok(77));
        for wrong in ["", "0", "x", "1MB", "99999999999GiB", "-1"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
