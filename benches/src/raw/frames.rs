//! Generated frames, and the swap of Ethernet addresses.

use super::options::{ETHERNET_HEADER, PayloadWay};
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
const NUMBER_AT: usize = HEADER - NUMBER_BYTES;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const PROTOCOL_UDP: u8 = 17;
/// Port whose datagrams hosts discard (RFC 863).
const DISCARD_PORT: u16 = 9;

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

/// Generates numbered UDP frames with payload from registered memory.
pub(super) struct FrameSource {
    memory: Arc<SharedMemory>,
    trackers: TrackerPool,
    tracker: Option<ExtTracker>,
    header: [u8; HEADER],
    /// Payload bytes after the header.
    payload: usize,
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
            header: [0; HEADER],
            payload: 0,
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
    pub(super) fn describe_frames(
        &mut self,
        size: usize,
        way: PayloadWay,
        addresses: &FrameAddresses,
    ) {
        self.header = build_header(size, addresses);
        self.payload = size.saturating_sub(HEADER);
        self.way = way;
    }

    /// Builds the next frame; `None` while buffers or references are exhausted.
    #[inline]
    pub(super) fn build_frame(&mut self, cache: &mut MbufCache) -> Option<Mbuf> {
        if self.at + self.payload > MEMORY_BYTES {
            self.at = 0;
        }
        let number = self.next_number.to_be_bytes();
        let mbuf = match self.way {
            PayloadWay::Copy => {
                let mut mbuf = cache.alloc()?;
                let Some(room) = mbuf.append((HEADER + self.payload) as u16) else {
                    cache.free(mbuf);
                    return None;
                };
                room[..HEADER].copy_from_slice(&self.header);
                room[NUMBER_AT..HEADER].copy_from_slice(&number);
                // Cannot fail, since `at` was checked to be within the memory.
                let _ = self.memory.read(self.at, &mut room[HEADER..]);
                mbuf
            }
            PayloadWay::Reference => {
                let header = &self.header;
                let fill = |room: &mut [u8]| {
                    room.copy_from_slice(header);
                    room[NUMBER_AT..].copy_from_slice(&number);
                };
                let payload = (self.tracker.as_ref()?, self.at as u64, self.payload as u16);
                cache.alloc_frame(HEADER as u16, fill, payload)?
            }
        };
        self.at += self.payload;
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

/// Headers of a frame of `size` bytes, with number 0.
fn build_header(size: usize, addresses: &FrameAddresses) -> [u8; HEADER] {
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
    let udp = &mut header[ETHERNET_HEADER + IPV4_HEADER..NUMBER_AT];
    udp[..2].copy_from_slice(&DISCARD_PORT.to_be_bytes());
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
    let header = frame.first_chunk::<HEADER>()?;
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
        let header = build_header(1514, &ADDRESSES);
        assert_eq!(header[..6], ADDRESSES.to);
        assert_eq!(header[16..18], 1500u16.to_be_bytes());
        assert_eq!(header[38..40], 1480u16.to_be_bytes());
        // The sum of a header including its checksum is all ones.
        assert_eq!(sum_words(&header[14..34]), 0xffff);
    }

    #[test]
    fn numbers_are_read_from_own_frames_alone() {
        let mut header = build_header(64, &ADDRESSES);
        header[NUMBER_AT..].copy_from_slice(&77u64.to_be_bytes());
        assert_eq!(frame_number(&header), Some(77));
        assert_eq!(frame_number(&header[..40]), None);
        header[12] = 0x86;
        assert_eq!(frame_number(&header), None);
    }

    #[test]
    fn swapped_addresses_are_exchanged_and_nothing_else() {
        let before = build_header(64, &ADDRESSES);
        let mut after = before;
        assert!(swap_macs(&mut after));
        assert_eq!((&after[..6], &after[6..12]), (&before[6..12], &before[..6]));
        assert_eq!(after[12..], before[12..]);
        assert!(!swap_macs(&mut [0; 11]));
    }
}
