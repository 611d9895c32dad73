//! Handshakes with duplicate segments, early segments and ICMP errors.

use std::time::Duration;

use crate::common::wire::{ACK, FIN, Lab, PSH, RST, SYN, Seg, icmp_error};
use siw_net::{ConnId, IpCidr, VecBuf};
use siw_tcp::{Events, Stack, StackConfig, TcpState};
use siw_tcp_sim::host_config;

fn syn(port: u16) -> Seg {
    Seg {
        from: 0,
        sport: port,
        dport: 80,
        seq: 5000,
        flags: SYN,
        window: 60_000,
        ..Seg::default()
    }
}

/// Host 1 listens and knows its neighbour; host 0 sends nothing by itself.
fn listening() -> Lab {
    let mut lab = Lab::new();
    lab.connect();
    lab.lose(|from, _| from == 0);
    lab.seen.borrow_mut().clear();
    lab.events = [vec![], vec![]];
    lab
}

/// Counts the SYN-ACKs of host 1 so far.
fn syn_acks(lab: &Lab) -> usize {
    let seen = lab.seen.borrow();
    seen.iter().filter(|seg| seg.flags == SYN | ACK).count()
}

#[test]
fn repeated_syns_are_answered_ever_more_seldom() {
    let mut lab = listening();
    // The same SYN, once a millisecond for half a minute.
    for _ in 0..30_000 {
        lab.inject(&syn(9));
        lab.net.run(Duration::from_millis(1), |_| false);
    }
    let sent = syn_acks(&lab);
    assert!((3..=7).contains(&sent), "{sent} SYN-ACKs");
    // Then the peer is silent, and the connection times out like any other.
    lab.run_ms(130_000);
    assert!(syn_acks(&lab) <= 7);
    assert_eq!(lab.net.hosts[1].connection_count(), 1, "the first only");
}

#[test]
fn a_syn_ack_that_was_lost_is_sent_again_at_once() {
    let mut lab = listening();
    lab.inject(&syn(9));
    lab.run_ms(300);
    assert_eq!(syn_acks(&lab), 1);
    lab.inject(&syn(9));
    lab.run_ms(1);
    assert_eq!(syn_acks(&lab), 2);
}

/// RFC 6298 section 3: the ACK could answer either of two SYN-ACKs.
#[test]
fn a_repeated_syn_ack_measures_no_round_trip() {
    for again in [false, true] {
        let mut lab = listening();
        lab.inject(&syn(9));
        lab.run_ms(400);
        if again {
            lab.inject(&syn(9));
            lab.run_ms(1);
        }
        let mut ack = syn(9);
        (ack.seq, ack.ack) = (5001, lab.last(1).seq.wrapping_add(1));
        ack.flags = ACK;
        lab.inject(&ack);
        lab.run_ms(1);
        let (id, events) = lab.events[1][0];
        assert!(events.contains(Events::ACCEPTED));
        let srtt = lab.net.hosts[1].tcp_info(id).unwrap().srtt;
        assert_eq!(srtt.is_some(), !again, "{srtt:?}");
    }
}

/// The same in a simultaneous open: the SYN-ACK retransmits our SYN.
#[test]
fn a_simultaneous_open_measures_no_round_trip() {
    let mut lab = listening();
    let now = lab.net.now;
    let to = "10.0.0.1:700".parse().unwrap();
    let id = lab.net.hosts[1]
        .connect(now, None, Some(800), to, 0)
        .unwrap();
    lab.run_ms(300);
    let ours = lab.last(1);
    let mut theirs = Seg {
        sport: 700,
        dport: 800,
        ..syn(700)
    };
    lab.inject(&theirs);
    lab.run_ms(1);
    // The segment acknowledges our SYN, not our SYN-ACK.
    (theirs.flags, theirs.ack) = (SYN | ACK, ours.seq.wrapping_add(1));
    lab.inject(&theirs);
    lab.run_ms(1);
    let info = lab.net.hosts[1].tcp_info(id).unwrap();
    assert_eq!((info.state, info.srtt), (TcpState::Established, None));
}

/// RFC 9293 section 3.10.7.3: text and FIN in a SYN-ACK are processed.
#[test]
fn text_and_fin_on_a_syn_ack_are_received() {
    let mut lab = listening();
    let now = lab.net.now;
    let to = "10.0.0.1:700".parse().unwrap();
    let id = lab.net.hosts[1].connect(now, None, None, to, 0).unwrap();
    lab.run_ms(5);
    let ours = lab.last(1);
    let answer = Seg {
        sport: 700,
        dport: ours.sport,
        ack: ours.seq.wrapping_add(1),
        flags: SYN | ACK | PSH | FIN,
        payload: b"early".to_vec(),
        ..syn(700)
    };
    lab.inject(&answer);
    lab.run_ms(5);
    assert!(
        lab.got(1)
            .contains(Events::CONNECTED | Events::READABLE | Events::PEER_FIN)
    );
    assert_eq!(lab.read(1, id), b"early");
    let ack = lab.last(1);
    assert_eq!((ack.flags, ack.ack), (ACK, 5000 + 1 + 5 + 1));
}

/// Text in a SYN is not acknowledged, so that the peer retransmits it.
#[test]
fn text_on_a_syn_is_not_lost() {
    let mut lab = listening();
    let mut seg = syn(9);
    seg.payload = b"early".to_vec();
    lab.inject(&seg);
    lab.run_ms(5);
    let answer = lab.last(1);
    assert_eq!((answer.flags, answer.ack), (SYN | ACK, 5001));
    (seg.seq, seg.ack, seg.flags) = (5001, answer.seq.wrapping_add(1), ACK | PSH);
    lab.inject(&seg);
    lab.run_ms(5);
    let (id, _) = lab.events[1][0];
    assert_eq!(lab.read(1, id), b"early");
}

/// Connects host 0 to a peer that does not answer; returns the SYN that it sent.
fn connecting() -> (Lab, ConnId, Seg) {
    let mut configs = [host_config(0), host_config(1)];
    configs[0].tcp.syn_retries = 2;
    let mut lab = Lab::with(configs);
    lab.connect();
    lab.lose(|from, _| from == 1);
    let now = lab.net.now;
    let to = "10.0.0.2:80".parse().unwrap();
    let id = lab.net.hosts[0].connect(now, None, None, to, 0).unwrap();
    lab.run_ms(5);
    let syn = lab.last(0);
    (lab, id, syn)
}

/// RFC 9293 section 3.5.1, half-open connections: the peer still has an earlier connection of these
/// addresses, answers the SYN with its ACK, and forgets it after our reset.
#[test]
fn a_syn_is_sent_again_behind_the_reset_of_an_earlier_connection() {
    let (mut lab, id, syn) = connecting();
    let from = lab.seen.borrow().len();
    let old = Seg {
        from: 1,
        sport: syn.dport,
        dport: syn.sport,
        seq: 77,
        ack: syn.seq.wrapping_sub(1000),
        flags: ACK,
        window: 1000,
        ..Seg::default()
    };
    lab.inject(&old);
    lab.run_ms(1);
    let sent: Vec<(u8, u32)> = {
        let seen = lab.seen.borrow();
        let ours = seen[from..].iter().filter(|seg| seg.from == 0);
        ours.map(|seg| (seg.flags, seg.seq)).collect()
    };
    assert_eq!(sent, [(RST, old.ack), (syn.flags, syn.seq)]);
    // Once: the next one is answered with a reset, and the timer goes on.
    lab.inject(&old);
    lab.run_ms(100);
    assert_eq!(lab.last(0).flags, RST);
    // Nothing was lost.
    lab.lose(|_, _| false);
    let mut accepted = old;
    (accepted.flags, accepted.ack) = (SYN | ACK, syn.seq.wrapping_add(1));
    lab.inject(&accepted);
    lab.run_ms(1);
    let info = lab.net.hosts[0].tcp_info(id).unwrap();
    assert_eq!(info.state, TcpState::Established);
    assert_eq!(info.retransmissions.handshake, 0);
    assert!(info.srtt.is_some() && info.cwnd as usize > 2 * info.effective_mss);
}

/// RFC 9293 section 3.9.2.2, MUST-56 and SHLD-25.
#[test]
fn soft_icmp_errors_only_explain_a_failed_connect() {
    // Network and host unreachable, also for a type of service, source route failed, time
    // exceeded, parameter problem.
    let soft = [
        [3, 0],
        [3, 1],
        [3, 5],
        [3, 11],
        [3, 12],
        [11, 0],
        [11, 1],
        [12, 0],
    ];
    for what in soft {
        let (mut lab, id, syn) = connecting();
        lab.net.inject(1, icmp_error(&syn, what, 0));
        lab.run_ms(100);
        let state = lab.net.hosts[0].tcp_info(id).unwrap().state;
        assert_eq!(state, TcpState::SynSent, "{what:?}");
        assert!(!lab.got(0).contains(Events::CLOSED));
        lab.run_ms(10_000);
        assert!(
            lab.got(0).contains(Events::UNREACHABLE | Events::CLOSED),
            "{what:?}"
        );
    }
    // Without a soft error the connect times out, and a SYN-ACK after a soft error is still accepted.
    let (mut lab, ..) = connecting();
    lab.run_ms(10_000);
    assert!(lab.got(0).contains(Events::TIMED_OUT) && !lab.got(0).contains(Events::UNREACHABLE));
    let (mut lab, id, syn) = connecting();
    lab.net.inject(1, icmp_error(&syn, [3, 1], 0));
    lab.lose(|_, _| false);
    lab.run_ms(1500);
    let info = lab.net.hosts[0].tcp_info(id).unwrap();
    assert_eq!(info.state, TcpState::Established);
}

/// SHLD-26.
#[test]
fn hard_icmp_errors_end_a_connect() {
    for what in [[3, 2], [3, 3], [3, 9], [3, 10], [3, 13]] {
        let (mut lab, _, syn) = connecting();
        let mut other = syn.clone();
        other.seq = other.seq.wrapping_add(1);
        lab.net.inject(1, icmp_error(&other, what, 0));
        lab.run_ms(5);
        assert!(
            !lab.got(0).contains(Events::CLOSED),
            "{what:?}: not our SYN"
        );
        lab.net.inject(1, icmp_error(&syn, what, 0));
        lab.run_ms(5);
        assert!(
            lab.got(0).contains(Events::UNREACHABLE | Events::CLOSED),
            "{what:?}"
        );
    }
}

#[test]
fn every_configuration_has_secrets_of_its_own() {
    let new = || {
        let address: IpCidr = "10.0.0.1/24".parse().unwrap();
        StackConfig::new([2, 0, 0, 0, 0, 1], vec![address])
    };
    let (one, other) = (new(), new());
    assert_ne!(one.tcp.isn_key, other.tcp.isn_key);
    assert_ne!(one.tcp.hash_key, other.tcp.hash_key);
    assert_ne!(one.tcp.isn_key, one.tcp.hash_key);
    assert_ne!(one.tcp.isn_key[..8], one.tcp.isn_key[8..]);
    let now = siw_net::Instant::from_millis(1);
    assert!(Stack::<VecBuf, Vec<u8>>::new(one, now).is_ok());
}
