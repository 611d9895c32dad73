//! Captures the frames that the hosts of a simulated network send and receive, as a pcapng file.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs::File;
use std::io::{BufWriter, Result, Write};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use pcap_file::DataLink;
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use siw_net::Instant;
use siw_tcp_sim::{RecordBytes, SimNet};

/// Maximum number of frames kept: a longer failing run shows its end.
const KEEP: usize = 200_000;

struct Frame {
    at: Instant,
    host: usize,
    sent: bool,
    bytes: Vec<u8>,
}

/// Collects the frames of a network until written.
#[derive(Clone, Default)]
pub struct Capture(Rc<RefCell<std::collections::VecDeque<Frame>>>);

impl Capture {
    pub fn of<R: RecordBytes>(net: &mut SimNet<R>) -> Capture {
        let capture = Capture::default();
        let frames = capture.0.clone();
        net.tap = Some(Box::new(move |at, host, sent, bytes| {
            let mut frame = frames.borrow_mut();
            if frame.len() == KEEP {
                frame.pop_front();
            }
            let bytes = bytes.to_vec();
            frame.push_back(Frame {
                at,
                host,
                sent,
                bytes,
            });
        }));
        capture
    }

    /// Writes one interface per host: received frames are inbound, sent frames outbound.
    pub fn write(&self, path: &Path) -> Result<usize> {
        let err = |error: pcap_file::PcapError| std::io::Error::other(error);
        let mut writer = PcapNgWriter::new(BufWriter::new(File::create(path)?)).map_err(err)?;
        for host in 0..2 {
            writer
                .write_pcapng_block(InterfaceDescriptionBlock {
                    linktype: DataLink::ETHERNET,
                    snaplen: 0,
                    options: vec![
                        InterfaceDescriptionOption::IfName(Cow::Owned(format!("host{host}"))),
                        InterfaceDescriptionOption::IfTsResol(9),
                    ],
                })
                .map_err(err)?;
        }
        let frames = self.0.borrow();
        for frame in frames.iter() {
            writer
                .write_pcapng_block(EnhancedPacketBlock {
                    interface_id: frame.host as u32,
                    timestamp: Duration::from_nanos(frame.at.0),
                    original_len: frame.bytes.len() as u32,
                    data: Cow::Borrowed(&frame.bytes),
                    options: vec![EnhancedPacketOption::Flags(if frame.sent { 2 } else { 1 })],
                })
                .map_err(err)?;
        }
        writer.get_mut().flush()?;
        Ok(frames.len())
    }
}
