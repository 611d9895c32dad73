//! Narrow paths: told of, guessed, remembered, tried again.

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use common::wire::{Lab, Seg, icmp_error, pattern};
use siw_tcp::sim::host_config;
use siw_tcp::{ConnId, Events};

const FRAG: [u8; 2] = [3, 4];

/// Frames of host 0 beyond this IP length vanish; the last such is kept.
fn hole(l: &mut Lab, mtu: usize) -> Rc<RefCell<Option<Seg>>> {
    let last = Rc::new(RefCell::new(None));
    let keep = last.clone();
    l.lose(move |from, f| {
        let hit = from == 0 && f.len() > 14 + mtu;
        if hit {
            *keep.borrow_mut() = Seg::parse(0, f);
        }
        hit
    });
    last
}

fn push(l: &mut Lab, id: ConnId, lens: &[usize]) -> Vec<u8> {
    let data = pattern(lens.iter().sum());
    let mut at = 0;
    for &n in lens {
        l.net.hosts[0]
            .push_record(id, n as u32, data[at..at + n].to_vec(), true)
            .unwrap();
        at += n;
    }
    l.net.flush(0, id);
    data
}

#[test]
fn a_router_says_too_big_and_what_is_out_is_cut_rfc_1191() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let last = hole(&mut l, 1200);
    // Whole records, several to a segment, and one that needs two.
    let data = push(&mut l, a, &[1448, 700, 700, 1448, 1448]);
    l.net.run(Duration::from_micros(100), |_| false);
    let big = last.borrow().clone().unwrap();
    let before = l.net.hosts[0].tcp_info(a).unwrap().cwnd;
    // Outside the flight, absurdly small: nobody believes it.
    for (seq, mtu) in [(big.seq.wrapping_sub(1 << 20), 1200), (big.seq, 68)] {
        let mut s = big.clone();
        s.seq = seq;
        l.net.inject(1, icmp_error(&s, FRAG, mtu));
        l.net.run(Duration::from_micros(10), |_| false);
        assert_eq!(l.net.hosts[0].effective_mss(a), 1448);
    }
    l.net.inject(1, icmp_error(&big, FRAG, 1200));
    l.net.run(Duration::from_micros(150), |_| false);
    l.collect();
    assert!(l.got(0).contains(Events::MSS_CHANGED));
    assert_eq!(l.net.hosts[0].effective_mss(a), 1200 - 52);
    assert!(
        l.net.hosts[0].tcp_info(a).unwrap().cwnd >= before,
        "no congestion (section 6.5)"
    );
    l.run_ms(20);
    assert_eq!(l.read(1, b), data);
    let s = l.net.hosts[0].stats();
    assert_eq!((s.timeouts, s.pmtu_reductions), (0, 1));
    // Another connection starts narrow; after ten minutes the full size is probed.
    let [c, _] = l.connect();
    assert_eq!(l.net.hosts[0].effective_mss(c), 1200 - 52);
    l.lose(|_, _| false);
    l.net.now = l.net.now + Duration::from_secs(601);
    push(&mut l, a, &[5000]);
    assert_eq!(
        l.net.hosts[0].effective_mss(a),
        1200 - 52,
        "not without a probe"
    );
    l.run_ms(20);
    push(&mut l, a, &[1]);
    l.run_ms(20);
    assert_eq!(l.net.hosts[0].effective_mss(a), 1448, "section 6.3");
    let [d, _] = l.connect();
    assert_eq!(l.net.hosts[0].effective_mss(d), 1448);
}

#[test]
fn a_router_that_does_not_say_its_mtu_is_met_with_a_plateau_rfc_1191_7() {
    let mut l = Lab::new();
    let [a, b] = l.connect();
    let last = hole(&mut l, 1100);
    let data = push(&mut l, a, &[1448; 3]);
    l.net.run(Duration::from_micros(100), |_| false);
    let big = last.borrow().clone().unwrap();
    l.net.inject(1, icmp_error(&big, FRAG, 0));
    l.run_ms(1);
    assert_eq!(l.net.hosts[0].effective_mss(a), 1492 - 52);
    l.run_ms(1);
    let big = last.borrow().clone().unwrap();
    l.net.inject(1, icmp_error(&big, FRAG, 0));
    l.run_ms(20);
    assert_eq!(l.net.hosts[0].effective_mss(a), 1006 - 52);
    assert_eq!(l.read(1, b), data);
}

#[test]
fn a_black_hole_is_found_by_silence_rfc_8899() {
    for (mtu, narrow) in [(1300, 1200 - 52), (600, 576 - 52)] {
        let mut l = Lab::new();
        let [a, b] = l.connect();
        hole(&mut l, mtu);
        let data = push(&mut l, a, &[1448; 8]);
        l.run_ms(2_000);
        assert_eq!(l.read(1, b), data);
        assert_eq!(l.net.hosts[0].effective_mss(a), narrow);
        assert!(l.net.hosts[0].stats().black_holes >= 1);
        assert!(l.got(0).contains(Events::MSS_CHANGED));
        // A guess is doubted at once, by a probe; and where nobody probes, after a minute.
        l.lose(|_, _| false);
        let [c, _] = l.connect();
        assert_eq!(l.net.hosts[0].effective_mss(c), narrow);
        l.run_ms(61_000);
        let [c, _] = l.connect();
        assert_eq!(l.net.hosts[0].effective_mss(c), 1448);
        push(&mut l, a, &[5000]);
        l.run_ms(1);
        l.send(0, a, b"x");
        assert_eq!(l.net.hosts[0].effective_mss(a), 1448);
    }
}

#[test]
fn jumbo_frames_shrink_under_load_and_no_byte_is_lost() {
    let mut c = [host_config(0), host_config(1)];
    c.iter_mut().for_each(|c| c.mtu = 9000);
    let mut l = Lab::with(c);
    let [a, b] = l.connect();
    let mut sent = vec![];
    let mut got = vec![];
    for round in 0..40usize {
        if round == 5 {
            let last = hole(&mut l, 1500);
            // The router speaks once, in the middle.
            sent.extend(push(&mut l, a, &[8948; 6]));
            l.net.run(Duration::from_micros(60), |_| false);
            let big = last.borrow().clone().unwrap();
            l.net.inject(1, icmp_error(&big, FRAG, 1500));
            continue;
        }
        let n = l.net.hosts[0].effective_mss(a);
        sent.extend(push(&mut l, a, &[n, n / 2, n / 2, 100, n]));
        l.net.run(Duration::from_micros(300), |_| false);
        got.extend(l.read(1, b));
    }
    l.run_ms(100);
    got.extend(l.read(1, b));
    assert_eq!(got.len(), sent.len());
    assert!(got == sent);
    assert_eq!(l.net.hosts[0].effective_mss(a), 1448);
}

#[test]
fn ipv6_never_goes_below_1280_rfc_8201_4() {
    let mut l = Lab::new();
    let now = l.net.now;
    l.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let a = l.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    l.run_ms(10);
    let frames = Rc::new(RefCell::new(vec![]));
    let keep = frames.clone();
    l.lose(move |from, f| {
        let hit = from == 0 && f.len() > 14 + 1280;
        if hit {
            keep.borrow_mut().push(f.to_vec());
        }
        hit
    });
    let data = push(&mut l, a, &[1428; 4]);
    l.net.run(Duration::from_micros(100), |_| false);
    let big = frames.borrow()[0].clone();
    let too_big = |mtu: u32| {
        let mut icmp = vec![2, 0, 0, 0];
        icmp.extend(mtu.to_be_bytes());
        icmp.extend_from_slice(&big[14..14 + 60]);
        let addr = |n: u8| {
            let mut a = [0u8; 16];
            (a[0], a[15]) = (0xfd, n);
            a
        };
        let pseudo = 2 * 0xfd00 + 3 + 58 + icmp.len() as u32;
        let c = common::wire::sum(&icmp, pseudo);
        icmp[2..4].copy_from_slice(&c);
        let mut ip = vec![0x60, 0, 0, 0, 0, icmp.len() as u8, 58, 64];
        ip.extend(addr(2));
        ip.extend(addr(1));
        [
            vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd],
            ip,
            icmp,
        ]
        .concat()
    };
    l.net.inject(1, too_big(1000));
    l.net.run(Duration::from_micros(10), |_| false);
    assert_eq!(l.net.hosts[0].effective_mss(a), 1428);
    l.net.inject(1, too_big(1280));
    l.run_ms(20);
    assert_eq!(l.net.hosts[0].effective_mss(a), 1280 - 72);
    l.collect();
    let b = l.events[1]
        .iter()
        .find(|(_, e)| e.contains(Events::ACCEPTED))
        .unwrap()
        .0;
    assert_eq!(l.read(1, b), data);
}
