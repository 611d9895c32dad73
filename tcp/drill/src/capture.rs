//! A run as a pcapng file of raw IP packets, for Wireshark.

use std::borrow::Cow;
use std::io::Write;
use std::time::Duration;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionBlock;
use pcap_file::{DataLink, PcapError};

use crate::run::Captured;

/// Writes the packets in the order of their times.
pub fn write_pcapng(out: impl Write, packets: &[Captured]) -> Result<(), PcapError> {
    let mut w = PcapNgWriter::new(out)?;
    w.write_pcapng_block(InterfaceDescriptionBlock {
        linktype: DataLink::RAW,
        snaplen: 0,
        options: vec![],
    })?;
    let mut packets: Vec<_> = packets.iter().collect();
    packets.sort_by_key(|p| p.at);
    for p in packets {
        w.write_pcapng_block(EnhancedPacketBlock {
            interface_id: 0,
            // The default resolution of timestamps is a microsecond.
            timestamp: Duration::from_nanos(p.at.as_micros() as u64),
            original_len: p.packet.len() as u32,
            data: Cow::Borrowed(&p.packet),
            options: vec![],
        })?;
    }
    Ok(())
}
