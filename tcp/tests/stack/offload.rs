//! Sent super-segments, received coalesced chains.

use std::collections::VecDeque;

use crate::common::wire::sum;
use crate::common::{Transfer, configs, micros};
use siw_net::{
    FrameInfo, FrameMeta, FrameSink, Instant, PayloadPiece, RecvBuf, RxChecksum, VecBuf,
};
use siw_tcp::{Events, Stack, StackConfig, TsoLimits};
use siw_tcp_sim::forge::{Ends, Tcp};
use siw_tcp_sim::{Impairment, Pattern, append_payload, host_config};

const TSO: TsoLimits = TsoLimits {
    max_segments: 40,
    max_bytes: 60_000,
};

fn with_tso(mut config: StackConfig) -> StackConfig {
    config.tcp.tx_checksum = false;
    config.tcp.tso = Some(TSO);
    config
}

#[test]
fn full_segments_use_tso_and_losses_resend_singly() {
    for (loss, v6) in [(0.0, false), (0.02, false), (0.02, true)] {
        let mut link = Impairment::perfect(micros(50));
        link.loss = loss;
        let mut transfer =
            Transfer::new(9, configs().map(with_tso), [link; 2], [3_000_000, 100_000]);
        transfer.connect(v6);
        assert!(transfer.run(std::time::Duration::from_secs(20)));
        let stats = transfer.net.hosts[0].stats();
        assert!(stats.tcp.tso_frames > 50, "{stats:?}");
        assert!(stats.net.frames_out < stats.tcp.out_segs);
        let largest = transfer.net.sinks[0].largest;
        assert!(largest > 10_000 && largest <= TSO.max_bytes, "{largest}");
        transfer.check_boundaries();
    }
}

/// FPDUs are multiples of four bytes: at MTUs of 1450 and 8950 they do not fill a segment.
#[test]
fn records_that_nearly_fill_segments_use_tso() {
    for (mtu, tso) in [(1450, true), (8950, true), (1450, false), (8950, false)] {
        let configs = configs().map(|mut config| {
            config.net.mtu = mtu;
            if tso { with_tso(config) } else { config }
        });
        let link = Impairment::perfect(micros(50));
        let mut transfer = Transfer::new(9, configs, [link; 2], [3_000_000, 0]);
        let emss = u32::from(mtu) - 52;
        transfer.sides[0].record = emss / 4 * 4;
        transfer.connect(false);
        assert!(transfer.run(std::time::Duration::from_secs(20)));
        let stats = transfer.net.hosts[0].stats();
        println!(
            "MTU {mtu}: {} super-segments, {} frames",
            stats.tcp.tso_frames, stats.net.frames_out
        );
        assert_eq!(emss % 4, 2);
        let largest = transfer.net.sinks[0].largest;
        assert!(
            tso == (stats.tcp.tso_frames > 50 && largest > 5 * emss.min(5000)),
            "{stats:?}"
        );
        transfer.check_boundaries();
    }
}

/// QEMU's vmxnet3 cuts super-segments into IP fragments.
#[test]
fn a_port_that_loses_super_segments_stops_tso() {
    for v6 in [false, true] {
        let link = Impairment::perfect(micros(50));
        let mut transfer = Transfer::new(9, configs().map(with_tso), [link; 2], [30_000_000, 0]);
        transfer.net.sinks[0].loses_super_segments = true;
        transfer.connect(v6);
        let start = transfer.net.now;
        let done = transfer.run(std::time::Duration::from_secs(20));
        let time = (transfer.net.now - start).as_secs_f64();
        let stats = transfer.net.hosts[0].stats();
        println!(
            "{done} after {time:.3} s, {} sent again",
            stats.tcp.retrans_segs
        );
        assert!(done && time < 2.0, "{time}");
        assert_eq!(stats.tcp.tso_stopped, 1);
        assert!(stats.tcp.retrans_segs < 2_000, "{}", stats.tcp.retrans_segs);
        assert!(transfer.net.hosts[0].take_tso_failure());
        assert!(!transfer.net.hosts[0].take_tso_failure());
    }
}

#[test]
fn tso_pauses_and_goes_on() {
    let link = Impairment::perfect(micros(50));
    let transfer = |pauses: &[bool]| {
        let mut transfer = Transfer::new(9, configs().map(with_tso), [link; 2], [3_000_000, 0]);
        for is_paused in pauses {
            transfer.net.hosts[0].pause_tso(*is_paused);
        }
        transfer.connect(false);
        assert!(transfer.run(std::time::Duration::from_secs(20)));
        let stats = transfer.net.hosts[0].stats();
        assert_eq!(stats.tcp.tso_stopped, 0);
        stats.tcp.tso_frames
    };
    assert_eq!(transfer(&[true]), 0);
    assert_eq!(transfer(&[true, true]), 0);
    assert!(transfer(&[true, true, false]) > 50);
    assert!(transfer(&[false]) > 50);
}

#[test]
fn losses_and_outages_of_a_path_do_not_stop_tso() {
    for (loss, period_ms) in [(0.05, 0), (0.2, 0), (0.0, 100), (0.0, 300), (0.05, 150)] {
        let mut link = Impairment::perfect(micros(50));
        link.loss = loss;
        link.rate = 1_000_000_000;
        let goal = match (loss > 0.0, period_ms) {
            (true, 0) => 300_000,
            (true, _) => 10_000_000,
            _ => 30_000_000,
        };
        let mut transfer = Transfer::new(9, configs().map(with_tso), [link; 2], [goal, goal]);
        transfer.connect(false);
        let start = transfer.net.now;
        let done = transfer.run_watching(std::time::Duration::from_secs(60), |net| {
            let at = (net.now - start).as_millis() as u64;
            let is_out = period_ms > 0 && at % period_ms >= period_ms - 50;
            for host in 0..2 {
                let mut link = link;
                link.loss = if is_out { 1.0 } else { link.loss };
                net.set_link(host, link);
            }
        });
        let stats = transfer.net.hosts[0].stats();
        let name = format!("{loss} {period_ms}");
        println!(
            "{name}: {} timeouts, {} black holes",
            stats.tcp.timeouts, stats.tcp.black_holes
        );
        assert!(done, "{name}");
        assert_eq!(stats.tcp.tso_stopped, 0, "{name}");
        // Losses of single segments in a row may look like a black hole.
        assert!(loss > 0.0 || stats.tcp.black_holes == 0, "{name}");
        assert!(period_ms == 0 || stats.tcp.timeouts > 2, "{name}");
    }
}

#[test]
fn a_configuration_that_cannot_work_is_refused() {
    let mut config = with_tso(host_config(0));
    config.tcp.tx_checksum = true;
    assert!(Stack::<Chain, Pattern>::new(config.clone(), Instant(1)).is_err());
    config.tcp.tx_checksum = false;
    config.tcp.tso = Some(TsoLimits {
        max_segments: 40,
        max_bytes: 70_000,
    });
    assert!(Stack::<Chain, Pattern>::new(config, Instant(1)).is_err());
}

/// A received frame of many buffers, as LRO ports and virtio deliver them.
#[derive(Default)]
struct Chain {
    parts: VecDeque<Vec<u8>>,
}

impl RecvBuf for Chain {
    type Chunks<'a> =
        std::iter::Map<std::collections::vec_deque::Iter<'a, Vec<u8>>, fn(&'a Vec<u8>) -> &'a [u8]>;
    fn remaining(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }
    fn chunk(&self) -> &[u8] {
        self.parts.front().map_or(&[], |part| part)
    }
    fn chunks(&self) -> Self::Chunks<'_> {
        self.parts.iter().map(|part| part)
    }
    fn advance(&mut self, mut count: usize) {
        while count > 0 {
            let part = self.parts.front_mut().unwrap();
            if part.len() > count {
                part.drain(..count);
                return;
            }
            count -= part.len();
            self.parts.pop_front();
        }
    }
    fn truncate(&mut self, count: usize) {
        let mut left = count;
        for part in &mut self.parts {
            part.truncate(left);
            left -= part.len();
        }
        self.parts.retain(|part| !part.is_empty());
    }
}

/// A memory link that carries whole super-segments and notes the lengths of their records.
#[derive(Default)]
struct Wire {
    frames: Vec<Chain>,
    /// Segment size and record lengths of each super-segment.
    super_segments: Vec<(u16, Vec<u32>)>,
}

impl FrameSink<Pattern> for Wire {
    fn send_frame<'a>(
        &mut self,
        headers_len: usize,
        meta: &FrameMeta,
        fill: impl FnOnce(&mut [u8]),
        payload: impl IntoIterator<Item = PayloadPiece<'a, Pattern>>,
    ) -> bool {
        let mut headers = vec![0; headers_len];
        fill(&mut headers);
        let mut parts = VecDeque::from([headers]);
        let mut lens = vec![];
        for piece in payload {
            let mut value = vec![];
            append_payload(&mut value, [piece]);
            parts.extend(value.chunks(1000).map(<[u8]>::to_vec));
            lens.push(value.len() as u32);
        }
        self.frames.push(Chain { parts });
        if meta.tso_segsz > 0 {
            self.super_segments.push((meta.tso_segsz, lens));
        }
        true
    }
}

/// A chain of buffers is received in place.
#[test]
fn super_segments_carry_whole_records() {
    let start = Instant::from_millis(1000);
    let mut hosts = [0, 1].map(|i| {
        let mut config = with_tso(host_config(i));
        config.tcp.initial_window = 100;
        Stack::<Chain, Pattern>::new(config, start).unwrap()
    });
    hosts[1].listen(None, 80, 4, 0).unwrap();
    let client = hosts[0]
        .connect(start, None, None, "10.0.0.2:80".parse().unwrap(), 0)
        .unwrap();
    let mut wires = [Wire::default(), Wire::default()];
    let mut server = None;
    // Full records, two halves that share a segment, and a short one that ends a super-segment.
    let lens = [1448, 1448, 724, 724, 1448, 500, 1448, 1448, 1000, 1000];
    let total: u32 = lens.iter().sum();
    let mut pushed = false;
    let mut got = 0u64;
    for step in 0..60u64 {
        let now = Instant(start.0 + step * 50_000);
        for i in 0..2 {
            let info = FrameInfo {
                checksum: RxChecksum::Good,
                rss_hash: 0,
            };
            let frames = std::mem::take(&mut wires[1 - i].frames);
            hosts[i].receive_burst(now, frames.into_iter().map(|frame| (frame, info)));
            while let Some((id, _, events)) = hosts[i].next_event() {
                if events.contains(Events::ACCEPTED) {
                    server = Some(id);
                }
                if events.contains(Events::CONNECTED) && !pushed {
                    pushed = true;
                    let mut at = 0;
                    for len in lens {
                        let record = Pattern { salt: 3, start: at };
                        hosts[0].push_record(client, len, record, false).unwrap();
                        at += u64::from(len);
                    }
                    hosts[0].flush(now, client, &mut wires[0]);
                }
            }
            hosts[i].poll(now, &mut wires[i]);
        }
        if let Some(rx) = server.and_then(|server| hosts[1].receive_queue(server)) {
            let count = rx.len_bytes();
            rx.for_each_chunk(0, count, |chunk| {
                for &byte in chunk {
                    assert_eq!(byte, Pattern::byte(3, got));
                    got += 1;
                }
            });
            rx.consume(count);
        }
    }
    assert_eq!(got, u64::from(total));
    assert_eq!(
        wires[0].super_segments,
        [
            (1448, vec![1448, 1448, 724, 724, 1448, 500]),
            (1448, vec![1448, 1448, 1000]),
        ],
        "each segment but the last of a super-segment is full"
    );
    assert!(hosts[0].is_idle() && hosts[0].stats().tcp.retrans_segs == 0);
    let acks = hosts[1].stats().tcp.pure_acks_out;
    assert!(acks <= 2, "a chain is acknowledged at once: {acks}");
}

/// Frames of a sender on this machine whose interface is to compute the checksums: the kernel has
/// written the sum of the pseudo-header there.
#[test]
fn checksums_left_to_an_offload_have_a_counter_of_their_own() {
    for (from, to) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
        let ends = Ends {
            mac: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
            ip: [from, to].map(|address| address.parse().unwrap()),
        };
        let syn = ends.tcp(&Tcp {
            ports: [4000, 80],
            seq: 7,
            flags: 2,
            window: 1000,
            ..Tcp::default()
        });
        let header = if ends.ip[0].is_ipv4() { 34 } else { 54 };
        let mut host = Stack::<VecBuf, Pattern>::new(host_config(1), Instant(1)).unwrap();
        host.listen(None, 80, 8, 0).unwrap();
        let mut give = |frame: Vec<u8>| {
            let info = FrameInfo {
                checksum: RxChecksum::Unknown,
                rss_hash: 0,
            };
            host.receive_burst(Instant(2), std::iter::once((frame.into(), info)));
            let stats = host.stats();
            [
                stats.net.csum_errors,
                stats.net.offloaded_checksums,
                stats.tcp.passive_opens,
                stats.tcp.in_segs,
            ]
        };
        let mut partial = syn.clone();
        partial[header + 16..header + 18].fill(0);
        let rest = sum(&partial[header..], 0);
        let complete = u32::from(u16::from_be_bytes([syn[header + 16], syn[header + 17]]));
        let rest = u32::from(u16::from_be_bytes(rest));
        // The checksums are complements of the sums of pseudo-header and segment, and of the segment.
        let pseudo = (0xffff - complete) + rest;
        let pseudo = ((pseudo & 0xffff) + (pseudo >> 16)) as u16;
        partial[header + 16..header + 18].copy_from_slice(&pseudo.to_be_bytes());
        assert_eq!(give(partial.clone()), [0, 1, 0, 0], "{from}");
        partial[header + 4] ^= 1;
        assert_eq!(
            give(partial.clone()),
            [0, 2, 0, 0],
            "whatever the segment is"
        );
        partial[header + 17] ^= 1;
        assert_eq!(give(partial), [1, 2, 0, 0], "{from}");
        assert_eq!(give(syn), [1, 2, 0, 1], "{from}");
    }
}

#[test]
fn packets_longer_than_their_frames_have_counters_of_their_own() {
    let ends = Ends {
        mac: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
        ip: ["10.0.0.1", "10.0.0.2"].map(|address| address.parse().unwrap()),
    };
    let payload = vec![7; 4000];
    let long = ends.tcp(&Tcp {
        ports: [4000, 80],
        flags: 16,
        payload: &payload,
        ..Tcp::default()
    });
    let mut host = Stack::<VecBuf, Pattern>::new(host_config(1), Instant(1)).unwrap();
    for len in [1900, 100] {
        let info = FrameInfo {
            checksum: RxChecksum::Unknown,
            rss_hash: 0,
        };
        let frame = long[..len].to_vec();
        host.receive_burst(Instant(2), std::iter::once((frame.into(), info)));
    }
    let stats = host.stats();
    assert_eq!((stats.net.offloaded_segments, stats.net.in_errs), (1, 1));
    assert_eq!(stats.net.offload_drops(), 1);
}
