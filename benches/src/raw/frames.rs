//! Generated frames, and the swap of Ethernet addresses.

use super::options::{ETHERNET_HEADER, PayloadWay, VLAN_TAG};
use anyhow::anyhow;
use dpdk::{ExtMemory, ExtTracker, Mbuf, MbufCache, TrackerPool};
use siw_shm::SharedMemory;
use siw_shm::shared_memory::PageSize;
use std::net::Ipv4Addr;
use std::sync::Arc;

/// Ethernet, IPv4 without options, UDP, and the frame number.
const HEADER: usize = ETHERNET_HEADER + IPV4_HEADER + UDP_HEADER + NUMBER_BYTES;
const IPV4_HEADER: usize = 20;
const UDP_HEADER: usize = 8;
const NUMBER_BYTES: usize = 8;
/// Headers with a VLAN tag.
const LONGEST_HEADER: usize = HEADER + VLAN_TAG;
/// Ethertype of a VLAN tag (IEEE 802.1Q).
const ETHERTYPE_VLAN: [u8; 2] = [0x81, 0x00];
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const PROTOCOL_UDP: u8 = 17;
/// Port whose datagrams hosts discard (RFC 863).
const DISCARD_PORT: u16 = 9;
/// Source port of the first of several flows: the first one that is not assigned (RFC 6335).
const FIRST_FLOW_PORT: u16 = 49_152;

/// Size of the payload memory, which fits into a core's cache.
const MEMORY_BYTES: usize = 1 << 20;

/// Source and destination of frames.
#[derive(Debug, Clone, Copy)]
pub(super) struct FrameAddresses {
    pub(super) from: [u8; 6],
    pub(super) to: [u8; 6],
    pub(super) source: Ipv4Addr,
    pub(super) destination: Ipv4Addr,
}

/// Properties of generated frames.
#[derive(Debug, Clone)]
pub(super) struct FrameDescription {
    /// Bytes of the frames, used in turn.
    pub(super) sizes: Vec<usize>,
    /// Number of UDP source ports, used in turn.
    pub(super) flows: u16,
    pub(super) vlan: Option<u16>,
    pub(super) way: PayloadWay,
    pub(super) addresses: FrameAddresses,
}

/// Headers of a frame, with number 0.
#[derive(Debug, Clone, Copy)]
struct FrameTemplate {
    header: [u8; LONGEST_HEADER],
    header_len: usize,
    /// Payload bytes after the header.
    payload: usize,
}

/// Generates numbered UDP frames with payload from registered memory.
pub(super) struct FrameSource {
    memory: Arc<SharedMemory>,
    trackers: TrackerPool,
    tracker: Option<ExtTracker>,
    /// Templates of the next frames, used in turn.
    templates: Vec<FrameTemplate>,
    next_template: usize,
    way: PayloadWay,
    at: usize,
    next_number: u64,
}

impl FrameSource {
    /// Allocates the payload memory; [`Self::describe_frames`] must follow before frames are built.
    pub(super) fn new() -> anyhow::Result<FrameSource> {
        let memory = SharedMemory::create_memfd("siw-perf-raw", MEMORY_BYTES, PageSize::Normal)
            .map_err(|error| anyhow!("memory for payload: {error}"))?;
        let pattern: Vec<u8> = (0..MEMORY_BYTES).map(|index| (index % 251) as u8).collect();
        memory
            .write(0, &pattern)
            .map_err(|error| anyhow!("memory for payload: {error}"))?;
        let memory = Arc::new(memory);
        let mut trackers = TrackerPool::new(4);
        let shared: Arc<dyn ExtMemory> = memory.clone();
        let tracker = trackers
            .alloc(shared)
            .ok_or_else(|| anyhow!("no tracker is free"))?;
        Ok(FrameSource {
            memory,
            trackers,
            tracker: Some(tracker),
            templates: Vec::new(),
            next_template: 0,
            way: PayloadWay::Copy,
            at: 0,
            next_number: 0,
        })
    }

    /// The payload memory.
    pub(super) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Sets the properties of the next frames.
    pub(super) fn describe_frames(&mut self, frames: &FrameDescription) {
        let FrameDescription { flows, vlan, .. } = *frames;
        let ports = (0..flows).map(|flow| match flows {
            1 => DISCARD_PORT,
            _ => FIRST_FLOW_PORT + flow,
        });
        let all = frames
            .sizes
            .iter()
            .flat_map(|size| ports.clone().map(move |port| (*size, port)));
        self.templates = all
            .map(|(size, port)| build_template(size, &frames.addresses, port, vlan))
            .collect();
        self.next_template = 0;
        self.way = frames.way;
    }

    /// Builds the next frame; `None` while buffers or references are exhausted.
    #[inline]
    pub(super) fn build_frame(&mut self, cache: &mut MbufCache) -> Option<Mbuf> {
        let template = self.templates.get(self.next_template)?;
        let header = &template.header[..template.header_len];
        let number_at = template.header_len - NUMBER_BYTES;
        if self.at + template.payload > MEMORY_BYTES {
            self.at = 0;
        }
        let number = self.next_number.to_be_bytes();
        let mbuf = match self.way {
            PayloadWay::Copy => {
                let mut mbuf = cache.alloc()?;
                let length = template.header_len + template.payload;
                let Some(room) = mbuf.append(length as u16) else {
                    cache.free(mbuf);
                    return None;
                };
                let (head, payload) = room.split_at_mut(template.header_len);
                head.copy_from_slice(header);
                head[number_at..].copy_from_slice(&number);
                // Cannot fail, since `at` was checked to be within the memory.
                let _ = self.memory.read(self.at, payload);
                mbuf
            }
            PayloadWay::Reference => {
                let fill = |room: &mut [u8]| {
                    room.copy_from_slice(header);
                    room[number_at..].copy_from_slice(&number);
                };
                let payload = (
                    self.tracker.as_ref()?,
                    self.at as u64,
                    template.payload as u16,
                );
                cache.alloc_frame(template.header_len as u16, fill, payload)?
            }
        };
        self.at += template.payload;
        self.next_template += 1;
        if self.next_template == self.templates.len() {
            self.next_template = 0;
        }
        self.next_number += 1;
        Some(mbuf)
    }

    /// Number of the last frame built.
    pub(super) fn last_number(&self) -> u64 {
        self.next_number.wrapping_sub(1)
    }
}

impl Drop for FrameSource {
    fn drop(&mut self) {
        if let Some(tracker) = self.tracker.take() {
            self.trackers.free(tracker);
        }
    }
}

/// A frame of `size` bytes, the VLAN tag included.
fn build_template(
    size: usize,
    addresses: &FrameAddresses,
    source_port: u16,
    vlan: Option<u16>,
) -> FrameTemplate {
    let tag = vlan.map_or(0, |_| VLAN_TAG);
    let untagged = build_header(size - tag, addresses, source_port);
    let mut header = [0; LONGEST_HEADER];
    header[..ETHERNET_ADDRESSES].copy_from_slice(&untagged[..ETHERNET_ADDRESSES]);
    if let Some(id) = vlan {
        header[ETHERNET_ADDRESSES..][..2].copy_from_slice(&ETHERTYPE_VLAN);
        header[ETHERNET_ADDRESSES + 2..][..2].copy_from_slice(&id.to_be_bytes());
    }
    let rest = &untagged[ETHERNET_ADDRESSES..];
    header[ETHERNET_ADDRESSES + tag..][..rest.len()].copy_from_slice(rest);
    FrameTemplate {
        header,
        header_len: HEADER + tag,
        payload: size - HEADER - tag,
    }
}

/// Headers of a frame of `size` bytes without a tag.
fn build_header(size: usize, addresses: &FrameAddresses, source_port: u16) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..6].copy_from_slice(&addresses.to);
    header[6..12].copy_from_slice(&addresses.from);
    header[12..14].copy_from_slice(&ETHERTYPE_IPV4);
    let ip = &mut header[ETHERNET_HEADER..ETHERNET_HEADER + IPV4_HEADER];
    let ip_len = (size - ETHERNET_HEADER) as u16;
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&ip_len.to_be_bytes());
    // "Do not fragment" flag.
    ip[6] = 0x40;
    ip[8] = 64;
    ip[9] = PROTOCOL_UDP;
    ip[12..16].copy_from_slice(&addresses.source.octets());
    ip[16..20].copy_from_slice(&addresses.destination.octets());
    let checksum = !sum_words(ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let udp = &mut header[ETHERNET_HEADER + IPV4_HEADER..HEADER - NUMBER_BYTES];
    udp[..2].copy_from_slice(&source_port.to_be_bytes());
    udp[2..4].copy_from_slice(&DISCARD_PORT.to_be_bytes());
    // The checksum stays zero: none was computed (RFC 768).
    udp[4..6].copy_from_slice(&(ip_len - IPV4_HEADER as u16).to_be_bytes());
    header
}

/// Ones' complement sum (RFC 1071) of an even number of bytes.
pub(super) fn sum_words(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks_exact(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
}

/// The frame number, if the frame was generated here.
#[inline]
pub(super) fn frame_number(frame: &[u8]) -> Option<u64> {
    let tag = match frame.get(ETHERNET_ADDRESSES..ETHERNET_HEADER)? {
        ethertype if ethertype == ETHERTYPE_VLAN => VLAN_TAG,
        _ => 0,
    };
    // Behind a tag, everything after the addresses is at the place that it has without one.
    let header = frame[tag..].first_chunk::<HEADER>()?;
    let is_ours = header[12..14] == ETHERTYPE_IPV4
        && header[ETHERNET_HEADER + 9] == PROTOCOL_UDP
        && header[ETHERNET_HEADER + IPV4_HEADER + 2..][..2] == DISCARD_PORT.to_be_bytes();
    let number = header.last_chunk::<NUMBER_BYTES>()?;
    is_ours.then(|| u64::from_be_bytes(*number))
}

/// Octets of the two Ethernet addresses.
pub(super) const ETHERNET_ADDRESSES: usize = 12;
/// Mask for the octets of an Ethernet address in the low bits of an integer.
const ADDRESS_MASK: u64 = (1 << 48) - 1;

/// Swaps the Ethernet addresses; false if the frame is too short or not writable.
///
/// Fast because both addresses stay in registers.
#[inline]
pub(super) fn swap_macs(frame: &mut [u8]) -> bool {
    let Some((front, behind)) = frame.split_first_chunk_mut::<8>() else {
        return false;
    };
    let Some(back) = behind.first_chunk_mut::<4>() else {
        return false;
    };
    let (low, high) = (u64::from_le_bytes(*front), u32::from_le_bytes(*back));
    let (to, from) = (low & ADDRESS_MASK, low >> 48 | u64::from(high) << 16);
    *front = (from | to << 48).to_le_bytes();
    *back = ((to >> 16) as u32).to_le_bytes();
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESSES: FrameAddresses = FrameAddresses {
        from: [2, 0, 0, 0, 0, 1],
        to: [2, 0, 0, 0, 0, 2],
        source: Ipv4Addr::new(198, 18, 0, 1),
        destination: Ipv4Addr::new(198, 18, 0, 2),
    };

    #[test]
    fn headers_have_lengths_and_a_checksum() {
        let header = build_header(1514, &ADDRESSES, DISCARD_PORT);
        assert_eq!(header[..6], ADDRESSES.to);
        assert_eq!(header[16..18], 1500u16.to_be_bytes());
        assert_eq!(header[38..40], 1480u16.to_be_bytes());
        // The sum of a header including its checksum is all ones.
        assert_eq!(sum_words(&header[14..34]), 0xffff);
    }

    #[test]
    fn numbers_are_read_from_own_frames_alone() {
        let mut header = build_header(64, &ADDRESSES, DISCARD_PORT);
        header[HEADER - NUMBER_BYTES..].copy_from_slice(&77u64.to_be_bytes());
        assert_eq!(frame_number(&header), Some(77));
        assert_eq!(frame_number(&header[..40]), None);
        header[12] = 0x86;
        assert_eq!(frame_number(&header), None);
    }

    #[test]
    fn a_tag_is_between_the_addresses_and_the_rest() {
        let plain = build_template(64, &ADDRESSES, 1000, None);
        let tagged = build_template(68, &ADDRESSES, 1000, Some(7));
        assert_eq!((plain.payload, tagged.payload), (14, 14));
        assert_eq!(tagged.header[12..16], [0x81, 0, 0, 7]);
        assert_eq!(tagged.header[16..], plain.header[12..HEADER]);
        let mut frame = tagged.header;
        frame[LONGEST_HEADER - 1] = 9;
        assert_eq!(frame_number(&frame), Some(9));
        assert_eq!(frame_number(&frame[..13]), None);
    }

    #[test]
    fn sizes_and_flows_are_used_in_turn() {
        let mut source = FrameSource::new().unwrap();
        source.describe_frames(&FrameDescription {
            sizes: vec![60, 590],
            flows: 3,
            vlan: None,
            way: PayloadWay::Copy,
            addresses: ADDRESSES,
        });
        let port_of = |template: &FrameTemplate| {
            let at = ETHERNET_HEADER + IPV4_HEADER;
            u16::from_be_bytes([template.header[at], template.header[at + 1]])
        };
        let all: Vec<_> = source
            .templates
            .iter()
            .map(|template| (port_of(template) - FIRST_FLOW_PORT, template.payload))
            .collect();
        assert_eq!(
            all,
            [(0, 10), (1, 10), (2, 10), (0, 540), (1, 540), (2, 540)]
        );
    }

    #[test]
    fn swapped_addresses_are_exchanged_and_nothing_else() {
        let before = build_header(64, &ADDRESSES, DISCARD_PORT);
        let mut after = before;
        assert!(swap_macs(&mut after));
        assert_eq!((&after[..6], &after[6..12]), (&before[6..12], &before[..6]));
        assert_eq!(after[12..], before[12..]);
        assert!(!swap_macs(&mut [0; 11]));
    }
}
