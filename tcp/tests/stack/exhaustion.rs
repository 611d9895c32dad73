//! Exhausted buffers: segments that cannot be received or sent are dropped and retransmitted, held
//! buffers stay within their limits, and no connection gets stuck.

use std::time::Duration;

use crate::common::wire::{ACK, Lab, Seg, pattern};
use crate::common::{Transfer, configs, micros};
use siw_net::{FrameInfo, RxChecksum};
use siw_tcp::Events;
use siw_tcp_sim::{Impairment, Rng, host_config};

const MSS: usize = 1448;

fn give(lab: &mut Lab, host: usize, segment: &Seg) {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    lab.net.hosts[host].receive_burst(now, std::iter::once((segment.frame().into(), info)));
}

#[test]
fn every_byte_arrives_despite_exhausted_resources() {
    let mut all = 0;
    for seed in 0..300u64 {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let mut link = Impairment::perfect(micros(20 + rng.below(500)));
        link.loss = rng.below(30) as f64 / 1000.0;
        let mut configs = configs();
        for config in &mut configs {
            config.tcp.user_timeout = Duration::from_secs(3600);
            config.tcp.rto_max = Duration::from_secs(1);
            config.tcp.syn_retries = 60;
            config.net.neighbours.probes = 200;
            config.net.neighbours.retransmit = Duration::from_millis(20);
            config.tcp.sack = rng.chance(0.8);
        }
        let goals = [50_000 + rng.below(200_000), rng.below(100_000)];
        let mut transfer = Transfer::new(seed, configs, [link; 2], goals);
        // With an empty pool, no frame is received, and the port accepts no frame to send.
        let deaf = std::rc::Rc::new(std::cell::Cell::new([false; 2]));
        let hears = deaf.clone();
        transfer.net.filter = Some(Box::new(move |from, _| !hears.get()[1 - from]));
        transfer.connect(rng.chance(0.5));
        let mut next = [transfer.net.now; 2];
        let mut windows = 0;
        let end = transfer.net.now + Duration::from_secs(5);
        let done = transfer.run_all(Duration::from_secs(600), |net, sinks| {
            for host in 0..2 {
                if net.now < next[host] {
                    continue;
                }
                let mut is_deaf = deaf.get();
                // At the end the pools recover.
                let out = !is_deaf[host] && net.now < end && rng.chance(0.5);
                is_deaf[host] = out;
                deaf.set(is_deaf);
                windows += u32::from(out);
                sinks[host] = match out {
                    // Zero frames, or a few.
                    true => Some(if rng.chance(0.5) {
                        0
                    } else {
                        rng.below(5) as usize
                    }),
                    false => None,
                };
                next[host] = net.now + micros(50 + rng.below(20_000));
            }
        });
        assert!(done, "seed {seed}: wedged at {:?}", transfer.net.now);
        all += windows;
        for side in &transfer.sides {
            assert!(
                !side.ended.intersects(Events::RESET | Events::TIMED_OUT),
                "seed {seed}"
            );
        }
        transfer.check_boundaries();
    }
    assert!(all > 300, "{all}");
}

/// The limit applies to buffers in order and out of order together.
#[test]
fn a_connection_holds_at_most_its_limit_of_buffers() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.max_recv_buffers = 64;
    let mut lab = Lab::with(configs);
    let [_, server] = lab.connect();
    lab.lose(|from, frame| from == 1 && frame[12..14] == [8, 0]);
    let first = lab.forge(0);
    let byte = |at: u32| {
        let mut segment = first.clone();
        segment.seq = segment.seq.wrapping_add(at);
        segment.payload = vec![at as u8];
        segment
    };
    // First segments far beyond a hole, then in order up to it: both are bounded, and so is the data
    // that fills the hole, which shares buffers.
    for at in (2..4000).step_by(2) {
        give(&mut lab, 1, &byte(at));
    }
    assert_eq!(lab.net.hosts[1].held_buffers(), 64);
    assert!(lab.net.hosts[1].stats().tcp.rcv_q_drop > 1000);
    for at in 0..4000 {
        give(&mut lab, 1, &byte(at));
        lab.net.poll();
        let held = lab.net.hosts[1].held_buffers();
        assert!(held <= 64 + 8, "{held}");
    }
    // The reader drains and the sender retransmits: the transfer continues.
    let mut got = 0;
    for _ in 0..200 {
        for byte in lab.read(1, server) {
            assert_eq!(byte, got as u8);
            got += 1;
        }
        for at in got..(got + 70).min(4000) {
            give(&mut lab, 1, &byte(at));
        }
        lab.net.poll();
    }
    assert_eq!(got, 4000);
    assert_eq!(lab.net.hosts[1].held_buffers(), 0);
}

#[test]
fn all_connections_share_the_buffers_and_none_starves() {
    const CONNS: usize = 50;
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.max_held_buffers = 200;
    configs[1].tcp.syn_cookies = false;
    let mut lab = Lab::with(configs);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 2 * CONNS, 0).unwrap();
    let ids: Vec<_> = (0..CONNS).map(|_| lab.connect()).collect();
    let _ = now;
    // At first no connection is read.
    let data = pattern(40 * MSS);
    for [client, _] in &ids {
        for chunk in data.chunks(MSS) {
            lab.net.hosts[0]
                .push_record(*client, MSS as u32, chunk.to_vec(), false)
                .unwrap();
        }
        lab.net.flush(0, *client);
    }
    for _ in 0..50 {
        lab.run_ms(2);
        let held = lab.net.hosts[1].held_buffers();
        assert!(held <= 225 + CONNS, "{held}");
    }
    assert!(lab.net.hosts[1].held_buffers() >= 200);
    let each = ids
        .iter()
        .map(|[_, server]| lab.net.hosts[1].tcp_info(*server).unwrap().readable);
    assert!(each.min().unwrap() > 0, "each has its one");
    // One connection is read while the others are not; then all are.
    let mut got = vec![vec![]; CONNS];
    for round in 0..1_500 {
        for (k, [_, byte]) in ids.iter().enumerate() {
            if k == 7 || round > 800 {
                let more = lab.read(1, *byte);
                got[k].extend(more);
            }
        }
        lab.run_ms(5);
        assert!(lab.net.hosts[1].held_buffers() <= 225 + CONNS);
        if round == 800 {
            assert!(got[7] == data, "{}", got[7].len());
        }
    }
    assert!(got.iter().all(|bytes| *bytes == data));
    assert_eq!(lab.net.hosts[1].held_buffers(), 0);
    let stats = lab.net.hosts[0].stats();
    assert_eq!((stats.tcp.estab_resets, stats.tcp.abort_on_timeout), (0, 0));
}

#[test]
fn a_reader_progresses_while_others_hold_buffers() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.max_held_buffers = 200;
    let mut lab = Lab::with(configs);
    let ids: Vec<_> = (0..5).map(|_| lab.connect()).collect();
    let data = pattern(400 * MSS);
    let push = |lab: &mut Lab, [client, _]: [siw_net::ConnId; 2]| {
        for chunk in data.chunks(MSS) {
            let record = chunk.to_vec();
            lab.net.hosts[0]
                .push_record(client, MSS as u32, record, false)
                .unwrap();
        }
        lab.net.flush(0, client);
    };
    let (reads, others) = ids.split_first().unwrap();
    others.iter().for_each(|id| push(&mut lab, *id));
    lab.run_ms(200);
    assert!((200..=225).contains(&lab.net.hosts[1].held_buffers()));
    assert!(lab.net.hosts[1].stats().tcp.rcv_q_drop > 0);
    push(&mut lab, *reads);
    let (start, mut got) = (lab.net.now, vec![]);
    while got.len() < data.len() {
        lab.run_ms(1);
        got.extend(lab.read(1, reads[1]));
        assert!(lab.net.hosts[1].held_buffers() <= 225 + 5);
        // Resending one segment at a time, each after a timeout, would take seconds.
        assert!(
            lab.net.now - start < Duration::from_millis(500),
            "{}",
            got.len()
        );
    }
    assert!(got == data);
}

/// Owners that stop reading take nothing from those who read, whatever their peers send.
#[test]
fn connections_that_are_not_read_take_no_buffers_from_others() {
    const WAITING: usize = 30;
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.max_held_buffers = 200;
    let mut lab = Lab::with(configs);
    let waiting: Vec<_> = (0..WAITING).map(|_| lab.connect()).collect();
    let reads = lab.connect();
    let data = pattern(40 * MSS);
    let push = |lab: &mut Lab, client: siw_net::ConnId, bytes: &[u8]| {
        for chunk in bytes.chunks(MSS) {
            let record = chunk.to_vec();
            lab.net.hosts[0]
                .push_record(client, MSS as u32, record, false)
                .unwrap();
        }
        lab.net.flush(0, client);
    };
    let (first, rest) = data.split_at(MSS);
    for [client, server] in &waiting {
        push(&mut lab, *client, first);
        while lab.net.hosts[1].tcp_info(*server).unwrap().readable == 0 {
            lab.run_ms(1);
        }
        assert!(lab.net.hosts[1].stop_reading(*server));
        push(&mut lab, *client, rest);
    }
    lab.run_ms(300);
    let held = lab.net.hosts[1].held_buffers();
    // Three eighths, as all are of one user, and the first one of each.
    assert!((75..=75 + WAITING).contains(&held), "{held}");
    let dropped = lab.net.hosts[1].stats().tcp.rcv_q_drop;
    assert!(dropped > 0);
    // A reader is not slowed down: no segment of its own is dropped.
    let (start, mut got) = (lab.net.now, vec![]);
    push(&mut lab, reads[0], &data);
    while got.len() < data.len() {
        lab.run_ms(1);
        got.extend(lab.read(1, reads[1]));
        assert!(
            lab.net.now - start < Duration::from_millis(100),
            "{}",
            got.len()
        );
    }
    assert!(got == data);
    // Then the others are read: nothing is lost or doubled.
    let mut parts = vec![vec![]; WAITING];
    for ids in &waiting {
        lab.net.hosts[1].resume_reading(ids[1]);
    }
    for _ in 0..5_000 {
        for (got, ids) in parts.iter_mut().zip(&waiting) {
            got.extend(lab.read(1, ids[1]));
        }
        if parts.iter().all(|got| got.len() == data.len()) {
            break;
        }
        lab.run_ms(5);
    }
    assert!(parts.iter().all(|got| *got == data));
    lab.run_ms(5);
    assert_eq!(lab.net.hosts[1].held_buffers(), 0);
}

/// Data that has not been acknowledged yet is forgotten where it would exceed the share.
#[test]
fn an_owner_that_stops_reading_gives_back_what_is_not_acknowledged() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.max_held_buffers = 160;
    let mut lab = Lab::with(configs);
    let all: Vec<_> = (0..10)
        .map(|_| {
            let [_, server] = lab.connect();
            (server, lab.forge(0))
        })
        .collect();
    for (number, (server, first)) in all.into_iter().enumerate() {
        let before = lab.net.hosts[1].held_buffers();
        for at in 0..10 {
            let mut segment = first.clone();
            segment.seq = segment.seq.wrapping_add(100 * at);
            segment.payload = vec![at as u8; 100];
            give(&mut lab, 1, &segment);
        }
        assert_eq!(lab.net.hosts[1].held_buffers(), before + 10);
        assert!(lab.net.hosts[1].stop_reading(server));
        let kept = lab.net.hosts[1].held_buffers() - before;
        assert_eq!(kept, if number < 6 { 10 } else { 1 }, "{number}");
        let readable = lab.net.hosts[1].tcp_info(server).unwrap().readable;
        assert_eq!(readable as usize, kept * 100);
    }
}

#[test]
fn buffers_are_released_however_a_connection_ends() {
    let mut lab = Lab::new();
    for how in 0..3 {
        let [client, server] = lab.connect();
        lab.send(0, client, &pattern(MSS));
        lab.run_ms(2);
        let mut far = lab.forge(0);
        far.flags = ACK;
        far.seq = far.seq.wrapping_add(5000);
        far.payload = vec![1; 100];
        give(&mut lab, 1, &far);
        assert_eq!(lab.net.hosts[1].held_buffers(), 2);
        let now = lab.net.now;
        match how {
            0 => lab.net.hosts[1].release(now, server),
            1 => {
                lab.net.hosts[1].abort(now, server);
                lab.net.hosts[1].release(now, server);
            }
            _ => {
                lab.net.hosts[0].abort(now, client);
                lab.run_ms(2);
                // Data received in order can still be read.
                assert_eq!(lab.net.hosts[1].held_buffers(), 1);
                lab.net.hosts[1].release(now, server);
            }
        }
        assert_eq!(lab.net.hosts[1].held_buffers(), 0, "{how}");
        lab.net.hosts[0].release(now, client);
        lab.run_ms(5);
    }
}

#[test]
fn connections_take_turns_when_one_fills_the_port() {
    let mut lab = Lab::new();
    let ids = [lab.connect()[0], lab.connect()[0]];
    for id in ids {
        for _ in 0..8 {
            let host = &mut lab.net.hosts[0];
            host.push_record(id, MSS as u32, pattern(MSS), false)
                .unwrap();
        }
    }
    for _ in 0..2 {
        lab.net.sinks[0].space = Some(4);
        let now = lab.net.now;
        lab.net.hosts[0].poll(now, &mut lab.net.sinks[0]);
        lab.net.drain_sinks();
    }
    for id in ids {
        let info = lab.net.hosts[0].tcp_info(id).unwrap();
        assert!(info.in_flight > 0, "{info:?}");
    }
}
