//! The bound: frames of the same shape over the same link in the same thread, with no TCP.
//! Buffers come from DPDK's pool by DPDK's own functions, as in every program that uses it, or
//! from the thread's cache that the daemon has.

use std::time::Duration;

use dpdk::{BURST, ChainBuilder, Mbuf, TxOffload};

use super::link::{End, MEMORY, SourceMemory};
use super::sink::Source;
use super::{Clock, HEADER, MSS};
use crate::measurement::gigabits_per_second;

/// Headers that a port can make sense of; lengths and sums are left out.
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

/// Where raw frames take buffers from and return them to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffers {
    /// `rte_pktmbuf_alloc` and `rte_pktmbuf_free`.
    Pool,
    /// [`dpdk::MbufCache`].
    Cache,
}

/// A header and a reference to `len` bytes of the memory, by DPDK's functions alone, and with a step
/// of the reference counter for each, as they count.
#[inline]
fn plain(source: &mut Source, at: usize, len: usize) -> Option<Mbuf> {
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
fn frame(source: &mut Source, at: usize, len: usize, tso: bool) -> Option<Mbuf> {
    let mut chain = ChainBuilder::new(source.cache.alloc()?);
    chain.append_slice(&HEADERS);
    if !source.payload(&mut chain, at as u64, len as u32) {
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

/// Gb/s of payload in frames of `payload` bytes from the first end to the second, as many in a
/// turn as make 64 full segments.
pub fn stream(
    ends: &mut [End; 2],
    source: &mut SourceMemory,
    payload: usize,
    buffers: Buffers,
    time: Duration,
) -> f64 {
    let turn = (BURST * MSS).div_ceil(payload);
    let [sender, receiver] = ends;
    let source = &mut source.0;
    let tso = payload > MSS;
    let clock = Clock::new();
    let warm = time / 8;
    let (mut at, mut bytes, mut start) = (0, 0u64, None);
    let begin = clock.now();
    let result = loop {
        while sender.out.len() < turn {
            if at + payload > MEMORY {
                at = 0;
            }
            let mbuf = match buffers {
                Buffers::Pool => plain(source, at, payload),
                Buffers::Cache => frame(source, at, payload, tso),
            };
            let Some(mbuf) = mbuf else { break };
            at += payload;
            if let Err(mbuf) = sender.out.push(mbuf) {
                source.cache.free(mbuf);
                break;
            }
        }
        sender.tx.tx_burst(&mut sender.out);
        receiver.rx.rx_burst(&mut receiver.inn);
        for mbuf in receiver.inn.drain() {
            bytes += u64::from(mbuf.pkt_len()) - HEADER as u64;
            match buffers {
                Buffers::Pool => drop(mbuf),
                Buffers::Cache => source.cache.free(mbuf),
            }
        }
        let now = clock.now();
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
    // A port with a thread behind it may take a moment.
    let quiet = std::time::Instant::now();
    while quiet.elapsed() < Duration::from_millis(2) {
        receiver.rx.rx_burst(&mut receiver.inn);
        for mbuf in receiver.inn.drain() {
            source.cache.free(mbuf);
        }
    }
    sender.tx.done_cleanup(0);
    result
}
