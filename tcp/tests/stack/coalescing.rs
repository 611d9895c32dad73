//! Receive coalescing and segmentation offload: consecutive segments are received and sent together, with
//! the same result as one by one, however the port delivers and accepts them.

use crate::common::wire::{ACK, ECE, FIN, Lab, PSH, Seg, pattern};
use siw_net::{FrameInfo, IpCidr, RxChecksum, VecBuf};
use siw_tcp_sim::{Rng, host_config};

const INFO: FrameInfo = FrameInfo {
    checksum: RxChecksum::Unknown,
    rss_hash: 0,
};

/// Describes all state of the receiver that a burst can change.
fn outcome(lab: &mut Lab, ids: [siw_net::ConnId; 2]) -> String {
    lab.run_ms(0);
    let sent: Vec<_> = lab.seen.borrow().clone();
    let conn = lab.net.hosts[1].tcp_info(ids[1]);
    let state = conn.map(|info| {
        (
            info.state,
            info.readable,
            info.send_window,
            info.in_flight,
            info.peer_fin,
        )
    });
    let read = lab.read(1, ids[1]);
    let mut stats = lab.net.hosts[1].stats();
    // A burst leads to one round of pending ACKs, single frames to many; segments are recognised in the
    // same way in both cases.
    (
        stats.net.frames_out,
        stats.tcp.out_segs,
        stats.tcp.pure_acks_out,
    ) = (0, 0, 0);
    let last = sent.iter().rev().find(|segment| segment.from == 1).cloned();
    format!("{state:?} {last:?} {stats:?} {read:?}")
}

/// Builds frames of a flow from host 0, some of them invalid.
fn frames(lab: &Lab, rng: &mut Rng) -> Vec<Vec<u8>> {
    let mut next = lab.forge(0);
    let mut frames = vec![];
    for i in 0..24u64 {
        let mut segment = next.clone();
        segment.payload = pattern(1 + rng.below(1400) as usize);
        segment.flags = if rng.chance(0.2) { ACK | PSH } else { ACK };
        let after = segment.seq.wrapping_add(segment.payload.len() as u32);
        let mut keep = true;
        let mut frame = None;
        match rng.below(40) {
            0 => segment.flags |= FIN,
            1 => keep = false,
            2 => segment.seq = segment.seq.wrapping_sub(700),
            3 => segment.ack = segment.ack.wrapping_add(1),
            4 => segment.window += 1,
            5 => segment.flags |= ECE,
            6 => segment.options = vec![],
            7 => segment.sport += 1,
            8 => segment.payload.clear(),
            9 => segment.options[4] ^= 0x80,
            10 => {
                let mut spoilt = segment.frame();
                let at = rng.below(spoilt.len() as u64) as usize;
                spoilt[at] ^= 1 << rng.below(8);
                frame = Some(spoilt);
            }
            11 => {
                let mut padded = segment.frame();
                padded.resize(padded.len() + 7, 0xee);
                frame = Some(padded);
            }
            12 => {
                let mut short = segment.frame();
                short.truncate(short.len() - 1);
                frame = Some(short);
            }
            _ => {}
        }
        if keep || i == 0 {
            frames.push(frame.unwrap_or_else(|| segment.frame()));
        }
        next.seq = after;
    }
    frames
}

#[test]
fn a_burst_does_what_its_frames_do_one_by_one() {
    for seed in 0..3000u64 {
        let run = |alone: bool| {
            let mut rng = Rng::new(seed);
            let mut config = host_config(1);
            // Some bursts reach the limits of window and buffers.
            if rng.chance(0.3) {
                config.tcp.recv_window = 4096 + rng.below(20_000) as u32;
            }
            if rng.chance(0.1) {
                config.tcp.max_recv_buffers = 64;
            }
            let mut lab = Lab::with([host_config(0), config]);
            let ids = lab.connect();
            lab.send(0, ids[0], b"first");
            lab.run_ms(1);
            lab.read(1, ids[1]);
            let frames = frames(&lab, &mut rng);
            let now = lab.net.now;
            let host = &mut lab.net.hosts[1];
            if alone {
                for frame in frames {
                    host.receive_burst(now, [(VecBuf::from(frame), INFO)].into_iter());
                }
            } else {
                host.receive_burst(
                    now,
                    frames.into_iter().map(|frame| (VecBuf::from(frame), INFO)),
                );
            }
            outcome(&mut lab, ids)
        };
        assert_eq!(run(false), run(true), "seed {seed}");
    }
}

#[test]
fn flows_in_a_burst_behave_as_frame_by_frame() {
    for seed in 0..1500u64 {
        let run = |alone: bool| {
            let mut rng = Rng::new(seed);
            let mut lab = Lab::with([host_config(0), host_config(1)]);
            let flows: Vec<_> = (0..2 + rng.below(8))
                .map(|_| {
                    let ids = lab.connect();
                    lab.send(0, ids[0], b"first");
                    lab.run_ms(1);
                    lab.read(1, ids[1]);
                    (ids, frames(&lab, &mut rng))
                })
                .collect();
            // Runs of each flow, and between them frames that are not segments.
            let mut left: Vec<_> = flows.iter().map(|frame| frame.1.iter().cloned()).collect();
            let mut all = vec![];
            while left.iter().any(|flow| flow.len() > 0) {
                let flow = &mut left[rng.below(flows.len() as u64) as usize];
                all.extend(flow.take(1 + rng.below(7) as usize));
                if rng.chance(0.05) {
                    all.push(vec![rng.below(256) as u8; 14 + rng.below(60) as usize]);
                }
            }
            let now = lab.net.now;
            let host = &mut lab.net.hosts[1];
            if alone {
                for frame in all {
                    host.receive_burst(now, [(VecBuf::from(frame), INFO)].into_iter());
                }
            } else {
                host.receive_burst(
                    now,
                    all.into_iter().map(|frame| (VecBuf::from(frame), INFO)),
                );
            }
            flows
                .iter()
                .map(|(ids, _)| outcome(&mut lab, *ids))
                .collect::<Vec<_>>()
        };
        assert_eq!(run(false), run(true), "seed {seed}");
    }
}

#[test]
fn a_small_tx_ring_gets_the_same_segments() {
    for seed in 0..500u64 {
        let run = |narrow: bool| {
            let mut rng = Rng::new(seed);
            let mut config = host_config(0);
            config.tcp.initial_window = 40;
            config.tcp.timestamps = seed % 3 > 0;
            let mut lab = Lab::with([config, host_config(1)]);
            let ids = lab.connect();
            lab.seen.borrow_mut().clear();
            let emss = lab.net.hosts[0].effective_mss(ids[0]) as u64;
            let mut sent = vec![];
            for _ in 0..2 + rng.below(8) {
                let len = match rng.below(4) {
                    0 => emss,
                    1 => 1 + rng.below(emss),
                    2 => emss * (1 + rng.below(6)),
                    _ => 1 + rng.below(5 * emss),
                };
                let data = pattern(len as usize);
                sent.extend_from_slice(&data);
                let end = rng.chance(0.4);
                lab.net.hosts[0]
                    .push_record(ids[0], len as u32, data, end)
                    .unwrap();
            }
            let mut steps = 0;
            loop {
                lab.net.sinks[0].space = narrow.then(|| rng.below(5) as usize);
                lab.net.flush(0, ids[0]);
                lab.net.sinks[0].space = None;
                if lab.net.hosts[0].tcp_info(ids[0]).unwrap().unsent == 0 {
                    break;
                }
                // Segments that the port did not accept at once must not wait for an ACK.
                steps += 1;
                if !narrow || steps % 64 == 0 {
                    lab.run_ms(1);
                }
            }
            lab.run_ms(20);
            assert_eq!(lab.read(1, ids[1]), sent, "seed {seed}");
            assert_eq!(lab.net.hosts[0].stats().tcp.retrans_segs, 0, "seed {seed}");
            let seen = lab.seen.borrow();
            seen.iter()
                .filter(|segment| segment.from == 0 && !segment.payload.is_empty())
                .map(|segment| {
                    (
                        segment.seq,
                        segment.flags,
                        segment.window,
                        segment.payload.len(),
                    )
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(run(true), run(false), "seed {seed}");
    }
}

#[test]
fn a_burst_of_data_gets_one_ack() {
    let mut lab = Lab::new();
    let ids = lab.connect();
    lab.send(0, ids[0], b"first");
    lab.run_ms(5);
    lab.read(1, ids[1]);
    let before = lab.net.hosts[1].stats().tcp.pure_acks_out;
    let first = lab.forge(0);
    let frames: Vec<_> = (0..20u32)
        .map(|i| Seg {
            seq: first.seq.wrapping_add(100 * i),
            payload: pattern(100),
            ..first.clone()
        })
        .map(|segment| (VecBuf::from(segment.frame()), INFO))
        .collect();
    let now = lab.net.now;
    lab.net.hosts[1].receive_burst(now, frames.into_iter());
    assert_eq!(lab.read(1, ids[1]), pattern(100).repeat(20));
    lab.net.hosts[1].poll(now, &mut lab.net.sinks[1]);
    assert_eq!(lab.net.hosts[1].stats().tcp.pure_acks_out, before + 1);
    assert!(lab.net.hosts[1].stats().tcp.hp_hits >= 20);
}

#[test]
fn coalesced_ipv6_and_vlan_segments_arrive_whole() {
    for (v6, vlan) in [(true, None), (false, Some(9)), (true, Some(9))] {
        let configs = [0, 1].map(|i| {
            let mut config = host_config(i);
            config.net.vlan = vlan;
            let six = format!("fd00::{}/64", i + 1).parse::<IpCidr>().unwrap();
            if !config.net.addresses.contains(&six) {
                config.net.addresses.push(six);
            }
            config
        });
        let link = siw_tcp_sim::Impairment::perfect(crate::common::micros(50));
        let mut transfer = crate::common::Transfer::new(7, configs, [link; 2], [400_000, 100_000]);
        transfer.connect(v6);
        assert!(
            transfer.run(std::time::Duration::from_secs(20)),
            "{v6} {vlan:?}"
        );
        let stats = transfer.net.hosts[1].stats();
        assert!(
            stats.tcp.hp_hits > 100,
            "{v6} {vlan:?}: {}",
            stats.tcp.hp_hits
        );
        assert_eq!(stats.net.csum_errors, 0);
    }
}
