//! Path MTUs: learned from ICMP errors, inferred from losses, cached, raised again.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use crate::common::wire::{Lab, Seg, icmp_error, pattern};
use crate::common::{Transfer, configs, micros};
use siw_net::ConnId;
use siw_tcp::Events;
use siw_tcp_sim::{Impairment, host_config};

const FRAG: [u8; 2] = [3, 4];

/// Drops frames of host 0 beyond this IP length; the last one is kept.
fn hole(lab: &mut Lab, mtu: usize) -> Rc<RefCell<Option<Seg>>> {
    let last = Rc::new(RefCell::new(None));
    let keep = last.clone();
    lab.lose(move |from, frame| {
        let hit = from == 0 && frame.len() > 14 + mtu;
        if hit {
            *keep.borrow_mut() = Seg::parse(0, frame);
        }
        hit
    });
    last
}

fn push(lab: &mut Lab, id: ConnId, lens: &[usize]) -> Vec<u8> {
    let data = pattern(lens.iter().sum());
    let mut at = 0;
    for &count in lens {
        lab.net.hosts[0]
            .push_record(id, count as u32, data[at..at + count].to_vec(), true)
            .unwrap();
        at += count;
    }
    lab.net.flush(0, id);
    data
}

/// RFC 1191.
#[test]
fn packet_too_big_resegments_data_in_flight() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let last = hole(&mut lab, 1200);
    // Whole records, several per segment, and one that needs two segments.
    let data = push(&mut lab, client, &[1448, 700, 700, 1448, 1448]);
    lab.net.run(Duration::from_micros(100), |_| false);
    let big = last.borrow().clone().unwrap();
    let before = lab.net.hosts[0].tcp_info(client).unwrap().cwnd;
    // Errors about a segment outside the flight, or with an absurdly small MTU, are ignored.
    for (seq, mtu) in [(big.seq.wrapping_sub(1 << 20), 1200), (big.seq, 68)] {
        let mut segment = big.clone();
        segment.seq = seq;
        lab.net.inject(1, icmp_error(&segment, FRAG, mtu));
        lab.net.run(Duration::from_micros(10), |_| false);
        assert_eq!(lab.net.hosts[0].effective_mss(client), 1448);
    }
    lab.net.inject(1, icmp_error(&big, FRAG, 1200));
    lab.net.run(Duration::from_micros(150), |_| false);
    lab.collect();
    assert!(lab.got(0).contains(Events::MSS_CHANGED));
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1200 - 52);
    assert!(
        lab.net.hosts[0].tcp_info(client).unwrap().cwnd >= before,
        "no congestion (section 6.5)"
    );
    lab.run_ms(20);
    assert_eq!(lab.read(1, server), data);
    let stats = lab.net.hosts[0].stats();
    assert_eq!((stats.tcp.timeouts, stats.tcp.pmtu_reductions), (0, 1));
    // Another connection starts with the narrow size; after ten minutes the full size is probed.
    let [opener, _] = lab.connect();
    assert_eq!(lab.net.hosts[0].effective_mss(opener), 1200 - 52);
    lab.lose(|_, _| false);
    lab.net.now = lab.net.now + Duration::from_secs(601);
    push(&mut lab, client, &[5000]);
    assert_eq!(
        lab.net.hosts[0].effective_mss(client),
        1200 - 52,
        "not without a probe"
    );
    lab.run_ms(20);
    push(&mut lab, client, &[1]);
    lab.run_ms(20);
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1448, "section 6.3");
    let [server, _] = lab.connect();
    assert_eq!(lab.net.hosts[0].effective_mss(server), 1448);
}

/// RFC 1191 section 7.
#[test]
fn an_error_without_an_mtu_gives_a_plateau() {
    let mut lab = Lab::new();
    let [client, server] = lab.connect();
    let last = hole(&mut lab, 1100);
    let data = push(&mut lab, client, &[1448; 3]);
    lab.net.run(Duration::from_micros(100), |_| false);
    let big = last.borrow().clone().unwrap();
    lab.net.inject(1, icmp_error(&big, FRAG, 0));
    lab.run_ms(1);
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1492 - 52);
    lab.run_ms(1);
    let big = last.borrow().clone().unwrap();
    lab.net.inject(1, icmp_error(&big, FRAG, 0));
    lab.run_ms(20);
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1006 - 52);
    assert_eq!(lab.read(1, server), data);
}

#[test]
fn a_black_hole_is_found_by_silence_rfc_8899() {
    for (sack, mtu, narrow) in [
        (true, 1300, 1200 - 52),
        (false, 1300, 1200 - 52),
        (true, 600, 576 - 52),
    ] {
        let mut configs = [host_config(0), host_config(1)];
        configs.iter_mut().for_each(|config| config.tcp.sack = sack);
        let mut lab = Lab::with(configs);
        let [client, server] = lab.connect();
        hole(&mut lab, mtu);
        let data = push(&mut lab, client, &[1448; 8]);
        lab.run_ms(2_000);
        assert_eq!(lab.read(1, server), data);
        assert_eq!(lab.net.hosts[0].effective_mss(client), narrow);
        let holes = lab.net.hosts[0].stats().tcp.black_holes;
        assert!(holes >= 1);
        assert!(lab.got(0).contains(Events::MSS_CHANGED));
        let [opener, _] = lab.connect();
        assert_eq!(lab.net.hosts[0].effective_mss(opener), narrow);
        // Segments of the agreed size are tried again after ten minutes (RFC 1191 section 6.3). The
        // path is still narrow, which costs a few timeouts.
        lab.run_ms(590_000);
        assert_eq!(lab.net.hosts[0].effective_mss(client), narrow);
        lab.events[0].clear();
        lab.run_ms(12_000);
        assert_eq!(lab.net.hosts[0].effective_mss(client), 1448);
        assert_eq!(lab.net.hosts[0].effective_mss(opener), 1448);
        assert!(lab.got(0).contains(Events::MSS_CHANGED));
        let data = push(&mut lab, client, &[1448; 8]);
        lab.run_ms(2_000);
        assert_eq!(lab.read(1, server), data);
        assert_eq!(lab.net.hosts[0].effective_mss(client), narrow);
        assert!(lab.net.hosts[0].stats().tcp.black_holes > holes);
        // Now it is whole.
        lab.lose(|_, _| false);
        lab.run_ms(602_000);
        let timeouts = lab.net.hosts[0].stats().tcp.timeouts;
        let data = push(&mut lab, client, &[1448; 8]);
        lab.run_ms(100);
        assert_eq!(lab.read(1, server), data);
        assert_eq!(lab.net.hosts[0].effective_mss(client), 1448);
        assert_eq!(lab.net.hosts[0].stats().tcp.timeouts, timeouts);
    }
}

/// An outage loses short segments too, such as the ACKs of the peer.
#[test]
fn outages_of_50_ms_are_no_black_holes() {
    for delay_us in [10, 1_000] {
        let mut link = Impairment::perfect(micros(delay_us));
        link.rate = 1_000_000_000;
        let mut transfer = Transfer::new(9, configs(), [link; 2], [20_000_000; 2]);
        transfer.connect(false);
        let start = transfer.net.now;
        let done = transfer.run_watching(Duration::from_secs(60), |net| {
            let at = (net.now - start).as_millis() % 150;
            let mut link = link;
            link.loss = if at >= 100 { 1.0 } else { 0.0 };
            (0..2).for_each(|host| net.set_link(host, link));
        });
        let stats = transfer.net.hosts[0].stats();
        let (timeouts, holes) = (stats.tcp.timeouts, stats.tcp.black_holes);
        println!("{delay_us} us: {timeouts} timeouts, {holes} black holes");
        let time = transfer.net.now - start;
        assert!(done, "{time:?}");
        assert!(timeouts > 0, "no outage in {time:?}");
        assert_eq!(holes, 0);
    }
}

#[test]
fn jumbo_frames_shrink_under_load_and_no_byte_is_lost() {
    let mut configs = [host_config(0), host_config(1)];
    configs.iter_mut().for_each(|config| config.net.mtu = 9000);
    let mut lab = Lab::with(configs);
    let [client, server] = lab.connect();
    let mut sent = vec![];
    let mut got = vec![];
    for round in 0..40usize {
        if round == 5 {
            let last = hole(&mut lab, 1500);
            // The router reports once, in the middle of the data.
            sent.extend(push(&mut lab, client, &[8948; 6]));
            lab.net.run(Duration::from_micros(60), |_| false);
            let big = last.borrow().clone().unwrap();
            lab.net.inject(1, icmp_error(&big, FRAG, 1500));
            continue;
        }
        let count = lab.net.hosts[0].effective_mss(client);
        sent.extend(push(
            &mut lab,
            client,
            &[count, count / 2, count / 2, 100, count],
        ));
        lab.net.run(Duration::from_micros(300), |_| false);
        got.extend(lab.read(1, server));
    }
    lab.run_ms(100);
    got.extend(lab.read(1, server));
    assert_eq!(got.len(), sent.len());
    assert!(got == sent);
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1448);
}

#[test]
fn ipv6_never_goes_below_1280_rfc_8201_4() {
    let mut lab = Lab::new();
    let now = lab.net.now;
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let client = lab.net.hosts[0]
        .connect(now, None, None, "[fd00::2]:80".parse().unwrap(), 0)
        .unwrap();
    lab.run_ms(10);
    let frames = Rc::new(RefCell::new(vec![]));
    let keep = frames.clone();
    lab.lose(move |from, frame| {
        let hit = from == 0 && frame.len() > 14 + 1280;
        if hit {
            keep.borrow_mut().push(frame.to_vec());
        }
        hit
    });
    let data = push(&mut lab, client, &[1428; 4]);
    lab.net.run(Duration::from_micros(100), |_| false);
    let big = frames.borrow()[0].clone();
    let too_big = |mtu: u32| {
        let mut icmp = vec![2, 0, 0, 0];
        icmp.extend(mtu.to_be_bytes());
        icmp.extend_from_slice(&big[14..14 + 60]);
        let addr = |count: u8| {
            let mut octets = [0u8; 16];
            (octets[0], octets[15]) = (0xfd, count);
            octets
        };
        let pseudo = 2 * 0xfd00 + 3 + 58 + icmp.len() as u32;
        let checksum = crate::common::wire::sum(&icmp, pseudo);
        icmp[2..4].copy_from_slice(&checksum);
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
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1428);
    lab.net.inject(1, too_big(1280));
    lab.run_ms(20);
    assert_eq!(lab.net.hosts[0].effective_mss(client), 1280 - 72);
    lab.collect();
    let server = lab.events[1]
        .iter()
        .find(|(_, events)| events.contains(Events::ACCEPTED))
        .unwrap()
        .0;
    assert_eq!(lab.read(1, server), data);
}
