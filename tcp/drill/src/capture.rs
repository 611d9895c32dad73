//! Writes the packets of a run as a pcapng file, for Wireshark.

use std::borrow::Cow;
use std::io::Write;
use std::time::Duration;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionBlock;
use pcap_file::{DataLink, PcapError};

use crate::run::CapturedPacket;

/// Writes the packets as a pcapng file of raw IP packets, ordered by time. Time 0 of a script has the
/// timestamp 0; the resolution is one microsecond.
pub fn write_pcapng(out: impl Write, packets: &[CapturedPacket]) -> Result<(), PcapError> {
    let mut writer = PcapNgWriter::new(out)?;
    writer.write_pcapng_block(InterfaceDescriptionBlock {
        linktype: DataLink::RAW,
        snaplen: 0,
        options: vec![],
    })?;
    let mut packets: Vec<_> = packets.iter().collect();
    packets.sort_by_key(|packet| packet.at);
    for packet in packets {
        writer.write_pcapng_block(EnhancedPacketBlock {
            interface_id: 0,
            // The default resolution of timestamps is a microsecond.
            timestamp: Duration::from_nanos(packet.at.as_micros() as u64),
            original_len: packet.packet.len() as u32,
            data: Cow::Borrowed(&packet.packet),
            options: vec![],
        })?;
    }
    Ok(())
}
