//! TIME-WAIT ends early only for a SYN that opens a new connection (RFC 9293 sections 3.6.1 and
//! 3.10.7.4, RFC 5961 section 4).

use crate::common::wire::{ACK, FIN, Lab, RST, SYN, Seg};
use siw_tcp::ListenerId;
use siw_tcp_sim::host_config;

/// Host 1, whose listener has this backlog, closed first and is in TIME-WAIT. Returns the peer's FIN.
/// Host 0 no longer sends anything by itself.
fn waiting(backlog: usize) -> (Lab, ListenerId, Seg) {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.syn_cookies = false;
    let mut lab = Lab::with(configs);
    let listener = lab.net.hosts[1].listen(None, 80, backlog, 0).unwrap();
    let [a, b] = lab.connect();
    lab.net.hosts[1].release(lab.net.now, b);
    lab.run_ms(5);
    lab.net.hosts[0].release(lab.net.now, a);
    lab.run_ms(5);
    assert_eq!(lab.net.hosts[1].connection_count(), 1);
    let fin = lab.last(0);
    assert_eq!(fin.flags, ACK | FIN);
    lab.lose(|from, _| from == 0);
    lab.seen.borrow_mut().clear();
    (lab, listener, fin)
}

/// A SYN with the same ports, acceptable for a new connection (RFC 6191).
fn new_syn(fin: &Seg) -> Seg {
    let (value, _) = fin.ts().unwrap();
    let mut syn = fin.clone();
    (syn.flags, syn.ack) = (SYN, 0);
    syn.seq = syn.seq.wrapping_add(100_000);
    let later = value.wrapping_add(1000).to_be_bytes();
    syn.options = [&[2, 4, 5, 180, 1, 1, 8, 10][..], &later, &[0; 4]].concat();
    syn
}

/// Returns the answers of host 1.
fn answers(lab: &mut Lab, seg: &Seg) -> Vec<Seg> {
    lab.seen.borrow_mut().clear();
    lab.inject(seg);
    lab.run_ms(100);
    let seen = lab.seen.borrow();
    seen.iter().filter(|seg| seg.from == 1).cloned().collect()
}

/// Checks that the connection still exists: it acknowledges, and a repeated FIN gets no reset.
fn still_waits(lab: &mut Lab, fin: &Seg, seg: &Seg) {
    let back = answers(lab, seg);
    assert!(back.iter().all(|answer| answer.flags == ACK), "{back:?}");
    let end = fin.seq.wrapping_add(1);
    assert!(back.iter().all(|answer| answer.ack == end), "{back:?}");
    let again = answers(lab, fin);
    let acks: Vec<_> = again
        .iter()
        .map(|answer| (answer.flags, answer.ack))
        .collect();
    assert_eq!(acks, [(ACK, end)], "the FIN is acknowledged again");
    assert_eq!(lab.net.hosts[1].stats().tcp.time_wait_recycled, 0);
}

#[test]
fn a_syn_with_fin_does_not_end_it() {
    let (mut lab, _, fin) = waiting(4);
    let mut syn = new_syn(&fin);
    syn.flags |= FIN;
    still_waits(&mut lab, &fin, &syn);
}

#[test]
fn a_syn_without_a_listener_does_not_end_it() {
    let (mut lab, listener, fin) = waiting(4);
    lab.net.hosts[1].stop_listening(lab.net.now, listener);
    let syn = new_syn(&fin);
    still_waits(&mut lab, &fin, &syn);
    // A port without a connection refuses the same segment.
    let mut other = syn;
    other.sport ^= 1;
    assert_eq!(answers(&mut lab, &other)[0].flags, ACK | RST);
}

#[test]
fn a_full_backlog_does_not_end_it() {
    let (mut lab, _, fin) = waiting(1);
    let mut half_open = new_syn(&fin);
    half_open.sport ^= 1;
    assert_eq!(answers(&mut lab, &half_open)[0].flags, SYN | ACK);
    let syn = new_syn(&fin);
    lab.inject(&syn);
    lab.run_ms(1);
    assert_eq!(lab.net.hosts[1].stats().tcp.time_wait_recycled, 0);
    assert_eq!(lab.net.hosts[1].connection_count(), 2);
    assert_eq!(lab.net.hosts[1].stats().tcp.listen_overflows, 1);
}

/// The owner has not released the connection, and no other slot is free.
#[test]
fn a_syn_that_finds_no_slot_does_not_end_it() {
    let mut configs = [host_config(0), host_config(1)];
    configs[1].tcp.max_connections = 1;
    let mut lab = Lab::with(configs);
    let [a, b] = lab.connect();
    lab.net.hosts[1].close(lab.net.now, b);
    lab.run_ms(5);
    lab.net.hosts[0].release(lab.net.now, a);
    lab.run_ms(5);
    let fin = lab.last(0);
    lab.lose(|from, _| from == 0);
    let syn = new_syn(&fin);
    let back = answers(&mut lab, &syn);
    assert!(back.iter().all(|answer| answer.flags == ACK), "{back:?}");
    assert_eq!(lab.net.hosts[1].stats().tcp.time_wait_recycled, 0);
    lab.net.hosts[1].release(lab.net.now, b);
    assert_eq!(answers(&mut lab, &syn)[0].flags, SYN | ACK);
}

#[test]
fn an_acceptable_syn_opens_a_new_connection() {
    let (mut lab, _, fin) = waiting(4);
    let syn = new_syn(&fin);
    let back = answers(&mut lab, &syn);
    assert_eq!(
        (back[0].flags, back[0].ack),
        (SYN | ACK, syn.seq.wrapping_add(1))
    );
    assert_eq!(lab.net.hosts[1].stats().tcp.time_wait_recycled, 1);
}

/// The old connection has sent faster than the clock of initial sequence numbers ticks.
#[test]
fn the_new_sequence_numbers_are_above_the_old() {
    let mut lab = Lab::new();
    lab.net.hosts[1].listen(None, 80, 4, 0).unwrap();
    let [a, b] = lab.connect();
    for part in crate::common::wire::pattern(1 << 20).chunks(1448) {
        lab.send(1, b, part);
        lab.run_ms(1);
        lab.read(0, a);
    }
    lab.net.hosts[1].release(lab.net.now, b);
    lab.run_ms(5);
    lab.net.hosts[0].release(lab.net.now, a);
    lab.run_ms(5);
    let (fin, last) = (lab.last(0), lab.last(1));
    assert_eq!(fin.flags, ACK | FIN);
    lab.lose(|from, _| from == 0);
    let answer = answers(&mut lab, &new_syn(&fin)).remove(0);
    assert_eq!(answer.flags, SYN | ACK);
    let above = answer.seq.wrapping_sub(last.seq) as i32;
    assert!(above > 0, "{above}");
}
