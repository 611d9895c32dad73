//! Buffers that run out: what cannot be received or sent is dropped and comes again, what is held
//! stays within its bounds, nobody is stuck.

mod common;

use std::time::Duration;

use common::wire::{ACK, Lab, Seg, pattern};
use common::{Transfer, configs, micros};
use siw_tcp::sim::{Impairment, Rng, host_config};
use siw_tcp::{Events, FrameInfo, RxChecksum};

const MSS: usize = 1448;

fn give(lab: &mut Lab, host: usize, s: &Seg) {
    let info = FrameInfo {
        checksum: RxChecksum::Unknown,
        rss_hash: 0,
    };
    let now = lab.net.now;
    lab.net.hosts[host].receive_burst(now, std::iter::once((s.frame().into(), info)));
}

#[test]
fn every_byte_arrives_despite_exhausted_resources() {
    let mut all = 0;
    for seed in 0..300u64 {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let mut link = Impairment::perfect(micros(20 + rng.below(500)));
        link.loss = rng.below(30) as f64 / 1000.0;
        let mut c = configs();
        for c in &mut c {
            c.user_timeout = Duration::from_secs(3600);
            c.rto_max = Duration::from_secs(1);
            c.syn_retries = 60;
            c.neighbours.probes = 200;
            c.neighbours.retransmit = Duration::from_millis(20);
            c.sack = rng.chance(0.8);
        }
        let goals = [50_000 + rng.below(200_000), rng.below(100_000)];
        let mut t = Transfer::new(seed, c, [link; 2], goals);
        // A pool that is empty takes nothing from the wire, and the port takes nothing to send.
        let deaf = std::rc::Rc::new(std::cell::Cell::new([false; 2]));
        let hears = deaf.clone();
        t.net.filter = Some(Box::new(move |from, _| !hears.get()[1 - from]));
        t.connect(rng.chance(0.5));
        let mut next = [t.net.now; 2];
        let mut windows = 0;
        let end = t.net.now + Duration::from_secs(5);
        let done = t.run_all(Duration::from_secs(600), |net, sinks| {
            for h in 0..2 {
                if net.now < next[h] {
                    continue;
                }
                let mut d = deaf.get();
                // In the end the pools recover.
                let out = !d[h] && net.now < end && rng.chance(0.5);
                d[h] = out;
                deaf.set(d);
                windows += u32::from(out);
                sinks[h] = match out {
                    // Nothing at all, or a few frames.
                    true => Some(if rng.chance(0.5) {
                        0
                    } else {
                        rng.below(5) as usize
                    }),
                    false => None,
                };
                next[h] = net.now + micros(50 + rng.below(20_000));
            }
        });
        assert!(done, "seed {seed}: wedged at {:?}", t.net.now);
        all += windows;
        for s in &t.sides {
            assert!(
                !s.ended.intersects(Events::RESET | Events::TIMED_OUT),
                "seed {seed}"
            );
        }
        t.check_boundaries();
    }
    assert!(all > 300, "{all}");
}

/// In order and out of order together.
#[test]
fn a_connection_holds_at_most_its_limit_of_buffers() {
    let mut c = [host_config(0), host_config(1)];
    c[1].max_recv_buffers = 64;
    let mut lab = Lab::with(c);
    let [_, b] = lab.connect();
    lab.lose(|from, f| from == 1 && f[12..14] == [8, 0]);
    let first = lab.forge(0);
    let byte = |at: u32| {
        let mut s = first.clone();
        s.seq = s.seq.wrapping_add(at);
        s.payload = vec![at as u8];
        s
    };
    // Far beyond a hole, then in order up to it: both are bounded, and so is what fills the hole.
    for at in (2..4000).step_by(2) {
        give(&mut lab, 1, &byte(at));
    }
    assert_eq!(lab.net.hosts[1].held_buffers(), 64);
    assert!(lab.net.hosts[1].stats().rcv_q_drop > 1000);
    for at in 0..4000 {
        give(&mut lab, 1, &byte(at));
        lab.net.poll();
        let held = lab.net.hosts[1].held_buffers();
        assert!(held <= 64 + 8, "{held}");
    }
    assert!(
        lab.net.hosts[1].stats().rcv_pruned > 0,
        "reneged on, RFC 2018 section 8"
    );
    // The reader drains, the sender repeats: on it goes.
    let mut got = 0;
    for _ in 0..200 {
        for b in lab.read(1, b) {
            assert_eq!(b, got as u8);
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
    let mut c = [host_config(0), host_config(1)];
    c[1].max_held_buffers = 200;
    c[1].syn_cookies = false;
    let mut lab = Lab::with(c);
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 2 * CONNS, 0).unwrap();
    let ids: Vec<_> = (0..CONNS).map(|_| lab.connect()).collect();
    let _ = now;
    // Nobody reads at first.
    let data = pattern(40 * MSS);
    for [a, _] in &ids {
        for c in data.chunks(MSS) {
            lab.net.hosts[0]
                .push_record(*a, MSS as u32, c.to_vec(), false)
                .unwrap();
        }
        lab.net.flush(0, *a);
    }
    for _ in 0..50 {
        lab.run_ms(2);
        let held = lab.net.hosts[1].held_buffers();
        assert!(held <= 225 + CONNS, "{held}");
    }
    assert!(lab.net.hosts[1].held_buffers() >= 200);
    let each = ids
        .iter()
        .map(|[_, b]| lab.net.hosts[1].tcp_info(*b).unwrap().readable);
    assert!(each.min().unwrap() > 0, "each has its one");
    // One reads on though the others do not; then all.
    let mut got = vec![vec![]; CONNS];
    for round in 0..1_500 {
        for (k, [_, b]) in ids.iter().enumerate() {
            if k == 7 || round > 800 {
                let more = lab.read(1, *b);
                got[k].extend(more);
            }
        }
        lab.run_ms(5);
        assert!(lab.net.hosts[1].held_buffers() <= 225 + CONNS);
        if round == 800 {
            assert!(got[7] == data, "{}", got[7].len());
        }
    }
    assert!(got.iter().all(|g| *g == data));
    assert_eq!(lab.net.hosts[1].held_buffers(), 0);
    let s = lab.net.hosts[0].stats();
    assert_eq!((s.estab_resets, s.abort_on_timeout), (0, 0));
}

#[test]
fn a_reader_progresses_while_others_hold_buffers() {
    let mut c = [host_config(0), host_config(1)];
    c[1].max_held_buffers = 200;
    let mut lab = Lab::with(c);
    let ids: Vec<_> = (0..5).map(|_| lab.connect()).collect();
    let data = pattern(400 * MSS);
    let push = |lab: &mut Lab, [a, _]: [siw_tcp::ConnId; 2]| {
        for c in data.chunks(MSS) {
            let record = c.to_vec();
            lab.net.hosts[0]
                .push_record(a, MSS as u32, record, false)
                .unwrap();
        }
        lab.net.flush(0, a);
    };
    let (reads, others) = ids.split_first().unwrap();
    others.iter().for_each(|id| push(&mut lab, *id));
    lab.run_ms(200);
    assert!((200..=225).contains(&lab.net.hosts[1].held_buffers()));
    assert!(lab.net.hosts[1].stats().rcv_q_drop > 0);
    push(&mut lab, *reads);
    let (start, mut got) = (lab.net.now, vec![]);
    while got.len() < data.len() {
        lab.run_ms(1);
        got.extend(lab.read(1, reads[1]));
        assert!(lab.net.hosts[1].held_buffers() <= 225 + 5);
        // One segment at a time, each after a timeout, would take seconds.
        assert!(
            lab.net.now - start < Duration::from_millis(500),
            "{}",
            got.len()
        );
    }
    assert!(got == data);
}

#[test]
fn buffers_are_released_however_a_connection_ends() {
    let mut lab = Lab::new();
    for how in 0..3 {
        let [a, b] = lab.connect();
        lab.send(0, a, &pattern(MSS));
        lab.run_ms(2);
        let mut far = lab.forge(0);
        far.flags = ACK;
        far.seq = far.seq.wrapping_add(5000);
        far.payload = vec![1; 100];
        give(&mut lab, 1, &far);
        assert_eq!(lab.net.hosts[1].held_buffers(), 2);
        let now = lab.net.now;
        match how {
            0 => lab.net.hosts[1].release(now, b),
            1 => {
                lab.net.hosts[1].abort(now, b);
                lab.net.hosts[1].release(now, b);
            }
            _ => {
                lab.net.hosts[0].abort(now, a);
                lab.run_ms(2);
                // What came in order can still be read.
                assert_eq!(lab.net.hosts[1].held_buffers(), 1);
                lab.net.hosts[1].release(now, b);
            }
        }
        assert_eq!(lab.net.hosts[1].held_buffers(), 0, "{how}");
        lab.net.hosts[0].release(now, a);
        lab.run_ms(5);
    }
}
