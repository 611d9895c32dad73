//! The bound: frames of the same shape over the same link in the same thread, without TCP. Buffers
//! come from DPDK's pool through DPDK's own functions, as in other DPDK programs, or from a cache
//! of prepared buffers, as in the daemon.

use std::time::Duration;

use dpdk::{BURST, ChainBuilder, Mbuf, TxOffload};
use siw_ports::{ReceiveQueue, TransmitQueue};

use super::link::{MEMORY_BYTES, PortEnd, SourceMemory};
use super::sink::PayloadSource;
use super::{BenchClock, HEADER, MSS};
use crate::measurement::gigabits_per_second;

/// Headers that a port can parse; lengths and checksums are not filled in.
const HEADERS: [u8; HEADER] = {
    let mut headers = [0x42; HEADER];
    (headers[0], headers[6]) = (2, 2);
    (headers[12], headers[13]) = (8, 0);
    // IPv4 without options, TCP with timestamps.
    (headers[14], headers[23]) = (0x45, 6);
    (headers[20], headers[21]) = (0x40, 0);
    headers[46] = 0x80;
    headers[47] = 0x10;
    headers
};

/// Allocator of raw frames' buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferSource {
    /// `rte_pktmbuf_alloc` and `rte_pktmbuf_free`.
    Pool,
    /// [`dpdk::MbufCache`].
    Cache,
}

/// Builds a frame of a header and a reference to `len` bytes of the memory with DPDK's functions
/// only, which count each reference individually.
#[inline]
fn build_frame_from_pool(source: &mut PayloadSource, at: usize, len: usize) -> Option<Mbuf> {
    let mut header = Mbuf::alloc(source.cache.pool())?;
    header.append_slice(&HEADERS);
    let mut payload = Mbuf::alloc(source.cache.pool())?;
    if !source
        .tracker
        .attach_unbatched(&mut payload, at as u64, len as u16)
    {
        return None;
    }
    header.append_chain(payload).ok()?;
    Some(header)
}

#[inline]
fn build_frame_from_cache(
    source: &mut PayloadSource,
    at: usize,
    len: usize,
    tso: bool,
) -> Option<Mbuf> {
    let mut chain = ChainBuilder::new(source.cache.alloc()?);
    chain.append_slice(&HEADERS);
    if !source.append_payload(&mut chain, at as u64, len as u32) {
        source.cache.free(chain.finish());
        return None;
    }
    let mut mbuf = chain.finish();
    if tso {
        mbuf.set_tx_offload(TxOffload {
            l2_len: 14,
            l3_len: 20,
            l4_len: (HEADER - 34) as u8,
            ipv6: false,
            ip_checksum: false,
            tcp_checksum: true,
            tso_segsz: MSS as u16,
        });
    }
    Some(mbuf)
}

/// Gb/s of payload in frames of `payload` bytes from the first end to the second; each turn sends
/// as many frames as carry 64 full segments.
pub fn measure_raw_stream(
    ends: &mut [PortEnd; 2],
    source: &mut SourceMemory,
    payload: usize,
    buffers: BufferSource,
    time: Duration,
) -> f64 {
    let turn = (BURST * MSS).div_ceil(payload);
    let [sender, receiver] = ends;
    let source = &mut source.0;
    let tso = payload > MSS;
    let clock = BenchClock::new();
    let warm = time / 8;
    let (mut at, mut bytes, mut start) = (0, 0u64, None);
    let begin = clock.read_clock();
    let result = loop {
        while sender.out.len() < turn {
            if at + payload > MEMORY_BYTES {
                at = 0;
            }
            let mbuf = match buffers {
                BufferSource::Pool => build_frame_from_pool(source, at, payload),
                BufferSource::Cache => build_frame_from_cache(source, at, payload, tso),
            };
            let Some(mbuf) = mbuf else { break };
            at += payload;
            if let Err(mbuf) = sender.out.push(mbuf) {
                source.cache.free(mbuf);
                break;
            }
        }
        sender.tx.tx_burst(&mut sender.out);
        receiver.rx.rx_burst(&mut receiver.received);
        for mbuf in receiver.received.drain() {
            bytes += u64::from(mbuf.pkt_len()) - HEADER as u64;
            match buffers {
                BufferSource::Pool => drop(mbuf),
                BufferSource::Cache => source.cache.free(mbuf),
            }
        }
        let now = clock.read_clock();
        match start {
            None if now - begin > warm => (start, bytes) = (Some(now), 0),
            Some(seconds) if now - seconds >= time => {
                break gigabits_per_second(bytes, now - seconds);
            }
            _ => {}
        }
    };
    while let Some(mbuf) = sender.out.pop() {
        source.cache.free(mbuf);
    }
    // A port served by another thread delivers its last frames a little later.
    let quiet = std::time::Instant::now();
    while quiet.elapsed() < Duration::from_millis(2) {
        receiver.rx.rx_burst(&mut receiver.received);
        for mbuf in receiver.received.drain() {
            source.cache.free(mbuf);
        }
    }
    sender.tx.done_cleanup();
    result
}
