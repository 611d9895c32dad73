//! Path MTUs: learned from ICMP errors, inferred from losses, remembered, raised again.

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use common::wire::{Lab, Seg, icmp_error, pattern};
use siw_tcp::sim::host_config;
use siw_tcp::{ConnId, Events};

const FRAG: [u8; 2] = [3, 4];

/// Frames of host 0 beyond this IP length vanish; the last such is kept.
fn hole(lab: &mut Lab, mtu: usize) -> Rc<RefCell<Option<Seg>>> {
    let last = Rc::new(RefCell::new(None));
    let keep = last.clone();
    lab.lose(move |from, f| {
        let hit = from == 0 && f.len() > 14 + mtu;
        if hit {
            *keep.borrow_mut() = Seg::parse(0, f);
        }
        hit
    });
    last
}

fn push(lab: &mut Lab, id: ConnId, lens: &[usize]) -> Vec<u8> {
    let data = pattern(lens.iter().sum());
    let mut at = 0;
    for &n in lens {
        lab.net.hosts[0]
            .push_record(id, n as u32, data[at..at + n].to_vec(), true)
            .unwrap();
        at += n;
    }
    lab.net.flush(0, id);
    data
}

/// RFC 1191.
#[test]
fn packet_too_big_resegments_data_in_flight() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let last = hole(&mut lab, 1200);
    // Whole records, several to a segment, and one that needs two.
    let data = push(&mut lab, a, &[1448, 700, 700, 1448, 1448]);
    lab.net.run(Duration::from_micros(100), |_| false);
    let big = last.borrow().clone().unwrap();
    let before = lab.net.hosts[0].tcp_info(a).unwrap().cwnd;
    // Outside the flight, absurdly small: nobody believes it.
    for (seq, mtu) in [(big.seq.wrapping_sub(1 << 20), 1200), (big.seq, 68)] {
        let mut s = big.clone();
        s.seq = seq;
        lab.net.inject(1, icmp_error(&s, FRAG, mtu));
        lab.net.run(Duration::from_micros(10), |_| false);
        assert_eq!(lab.net.hosts[0].effective_mss(a), 1448);
    }
    lab.net.inject(1, icmp_error(&big, FRAG, 1200));
    lab.net.run(Duration::from_micros(150), |_| false);
    lab.collect();
    assert!(lab.got(0).contains(Events::MSS_CHANGED));
    assert_eq!(lab.net.hosts[0].effective_mss(a), 1200 - 52);
    assert!(
        lab.net.hosts[0].tcp_info(a).unwrap().cwnd >= before,
        "no congestion (section 6.5)"
    );
    lab.run_ms(20);
    assert_eq!(lab.read(1, b), data);
    let s = lab.net.hosts[0].stats();
    assert_eq!((s.timeouts, s.pmtu_reductions), (0, 1));
    // Another connection starts narrow; after ten minutes the full size is probed.
    let [c, _] = lab.connect();
    assert_eq!(lab.net.hosts[0].effective_mss(c), 1200 - 52);
    lab.lose(|_, _| false);
    lab.net.now = lab.net.now + Duration::from_secs(601);
    push(&mut lab, a, &[5000]);
    assert_eq!(
        lab.net.hosts[0].effective_mss(a),
        1200 - 52,
        "not without a probe"
    );
    lab.run_ms(20);
    push(&mut lab, a, &[1]);
    lab.run_ms(20);
    assert_eq!(lab.net.hosts[0].effective_mss(a), 1448, "section 6.3");
    let [d, _] = lab.connect();
    assert_eq!(lab.net.hosts[0].effective_mss(d), 1448);
}

/// RFC 1191 section 7.
#[test]
fn an_error_without_an_mtu_gives_a_plateau() {
    let mut lab = Lab::new();
    let [a, b] = lab.connect();
    let last = hole(&mut lab, 1100);
    let data = push(&mut lab, a, &[1448; 3]);
    lab.net.run(Duration::from_micros(100), |_| false);
    let big = last.borrow().clone().unwrap();
    lab.net.inject(1, icmp_error(&big, FRAG, 0));
    lab.run_ms(1);
    assert_eq!(lab.net.hosts[0].effective_mss(a), 1492 - 52);
    lab.run_ms(1);
    let big = last.borrow().clone().unwrap();
    lab.net.inject(1, icmp_error(&big, FRAG, 0));
    lab.run_ms(20);
    assert_eq!(lab.net.hosts[0].effective_mss(a), 1006 - 52);
    assert_eq!(lab.read(1, b), data);
}

#[test]
fn a_black_hole_is_found_by_silence_rfc_8899() {
    for (mtu, narrow) in [(1300, 1200 - 52), (600, 576 - 52)] {
        let mut lab = Lab::new();
        let [a, b] = lab.connect();
        hole(&mut lab, mtu);
        let data = push(&mut lab, a, &[1448; 8]);
        lab.run_ms(2_000);
        assert_eq!(lab.read(1, b), data);
        assert_eq!(lab.net.hosts[0].effective_mss(a), narrow);
        assert!(lab.net.hosts[0].stats().black_holes >= 1);
        assert!(lab.got(0).contains(Events::MSS_CHANGED));
        // A guess is doubted at once, by a probe; and where nobody probes, after a minute.
        lab.lose(|_, _| false);
        let [c, _] = lab.connect();
        assert_eq!(lab.net.hosts[0].effective_mss(c), narrow);
        lab.run_ms(61_000);
        let [c, _] = lab.connect();
        assert_eq!(lab.net.hosts[0].effective_mss(c), 1448);
        push(&mut lab, a, &[5000]);
        lab.run_ms(1);
        lab.send(0, a, b"x");
        assert_eq!(lab.net.hosts[0].effective_mss(a), 1448);
    }
}

#[test]
fn jumbo_frames_shrink_under_load_and_no_byte_is_lost() {
    let mut c = [host_config(0), host_config(1)];
    c.iter_mut().for_each(|c| c.mtu = 9000);
    let mut lab = Lab::with(c);
    let [a, b] = lab.connect();
    let mut sent = vec![];
    let mut got = vec![];
    for round in 0..40usize {
        if round == 5 {
            let last = hole(&mut lab, 1500);
            // The router speaks once, in the middle.
            sent.extend(push(&mut lab, a, &[8948; 6]));
            lab.net.run(Duration::from_micros(60), |_| false);
            let big = last.borrow().clone().unwrap();
            lab.net.inject(1, icmp_error(&big, FRAG, 1500));
            continue;
        }
        let n = lab.net.hosts[0].effective_mss(a);
        sent.extend(push(&mut lab, a, &[n, n / 2, n / 2, 100, n]));
        lab.net.run(Duration::from_micros(300), |_| false);
        got.extend(lab.read(1, b));
    }
    lab.run_ms(100);
    got.extend(lab.read(1, b));
    assert_eq!(got.len(), sent.len());
    assert!(got == sent);
    assert_eq!(lab.net.hosts[0].effective_mss(a), 1448);
}

#[test]
fn ipv6_never_goes_below_1280_rfc_8201_4() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let a = lab.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(10);
    let frames = Rc::new(RefCell::new(vec![]));
    let keep = frames.clone();
    lab.lose(move |from, f| {
        let hit = from == 0 && f.len() > 14 + 1280;
        if hit {
            keep.borrow_mut().push(f.to_vec());
        }
        hit
    });
    let data = push(&mut lab, a, &[1428; 4]);
    lab.net.run(Duration::from_micros(100), |_| false);
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
    lab.net.inject(1, too_big(1000));
    lab.net.run(Duration::from_micros(10), |_| false);
    assert_eq!(lab.net.hosts[0].effective_mss(a), 1428);
    lab.net.inject(1, too_big(1280));
    lab.run_ms(20);
    assert_eq!(lab.net.hosts[0].effective_mss(a), 1280 - 72);
    lab.collect();
    let b = lab.events[1]
        .iter()
        .find(|(_, e)| e.contains(Events::ACCEPTED))
        .unwrap()
        .0;
    assert_eq!(lab.read(1, b), data);
}
