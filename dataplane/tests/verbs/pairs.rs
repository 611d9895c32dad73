//! Queue pairs connected by address and number, without rdma_cm, as on InfiniBand. They get no
//! connection events; only the completions of sends show the state of the peer.

use std::net::IpAddr;

use crate::common::{Daemon, End, PATIENCE};
use siw::{
    Access, AsyncEventKind, CmChannel, CmListener, Context, PairOptions, RecvWr, SendData, SendWr,
    WcStatus,
};

/// The addresses of siw0 and siw1.
const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

/// A send to a peer that has left fails no earlier than this, so that programs slower than their
/// peer can read the completions before it.
const RETRIES: std::time::Duration = std::time::Duration::from_millis(500);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Options of a connection from a device to a queue pair on a device.
fn options(from: usize, to: usize, peer_qp_num: u32) -> PairOptions {
    PairOptions {
        device: from as u32,
        local: ip(ADDRESSES[from]),
        peer: ip(ADDRESSES[to]),
        peer_qp_num,
        ord: 16,
        ird: 16,
        denied_access: Access::NONE,
    }
}

/// Two connected queue pairs, each of a client of its own.
fn pair_of(daemon: &Daemon, devices: (usize, usize)) -> (End, End) {
    let contexts = (daemon.context(), daemon.context());
    let (a, b) = (End::new(&contexts.0, 8192), End::new(&contexts.1, 8192));
    join(&a, &b, devices);
    (a, b)
}

fn join(a: &End, b: &End, (of_a, of_b): (usize, usize)) {
    a.qp.connect_pair(&options(of_a, of_b, b.qp.qp_num()))
        .unwrap();
    b.qp.connect_pair(&options(of_b, of_a, a.qp.qp_num()))
        .unwrap();
}

fn post_receives(end: &End, numbers: std::ops::Range<u64>) {
    for wr_id in numbers {
        let sges = &[end.mr.sge(0, 4096)];
        end.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
    }
}

fn post_send(end: &End, number: u64) {
    let sge = [end.mr.sge(4096, 1000)];
    let send = SendWr::send(number, SendData::Sges(&sge));
    end.qp.post_send(&[send]).unwrap();
}

/// The ids and statuses of the next completions.
fn completions<const N: usize>(end: &End) -> [(u64, WcStatus); N] {
    std::array::from_fn(|_| {
        let done = end.wc();
        (done.wr_id, done.status)
    })
}

/// Waits until the worker of a queue pair has seen the end of its stream.
fn await_end_of_stream(end: &End) {
    let start = std::time::Instant::now();
    while end.qp.query().unwrap().state != Some(siw::QpState::Idle) {
        assert!(start.elapsed() < PATIENCE, "the connection stays");
    }
}

/// Exchanges SENDs in both directions.
fn exchange(a: &End, b: &End) {
    for (from, to) in [(a, b), (b, a)] {
        from.fill(from.qp.qp_num().into());
        post_receives(to, 10..11);
        post_send(from, 20);
        assert_eq!(completions(from), [(20, WcStatus::SUCCESS)]);
        assert_eq!(completions(to), [(10, WcStatus::SUCCESS)]);
        assert_eq!(to.read(0, 1000), from.read(4096, 1000));
    }
}

#[test]
fn pairs_connect_between_devices_and_on_one() {
    let daemon = Daemon::loopback();
    for devices in [(0, 1), (1, 0), (0, 0)] {
        let (a, b) = pair_of(&daemon, devices);
        exchange(&a, &b);
    }
    // Several pairs of one client, with requests posted before the other end is connected.
    let ctx = daemon.context();
    let mut pairs = Vec::new();
    for _ in 0..8 {
        let (a, b) = (End::new(&ctx, 8192), End::new(&ctx, 8192));
        post_receives(&b, 1..2);
        a.qp.connect_pair(&options(0, 0, b.qp.qp_num())).unwrap();
        post_send(&a, 2);
        pairs.push((a, b));
    }
    for (a, b) in &pairs {
        b.qp.connect_pair(&options(0, 0, a.qp.qp_num())).unwrap();
    }
    for (a, b) in &pairs {
        assert_eq!(completions(a), [(2, WcStatus::SUCCESS)]);
        assert_eq!(completions(b), [(1, WcStatus::SUCCESS)]);
    }
}

#[test]
fn a_pair_stays_quiet_until_it_sends_to_a_peer_that_left() {
    let daemon = Daemon::loopback();
    // The peer's queue pair is destroyed; the peer's client ends.
    for ends_process in [false, true] {
        let (a, b) = pair_of(&daemon, (0, 1));
        exchange(&a, &b);
        post_receives(&a, 1..4);
        post_receives(&b, 4..5);
        post_send(&a, 5);
        assert_eq!(completions(&b), [(4, WcStatus::SUCCESS)]);
        if ends_process {
            drop(b);
        } else {
            drop(b.qp);
        }
        // The message has arrived, so the end of the peer does not matter.
        assert_eq!(completions(&a), [(5, WcStatus::SUCCESS)]);
        await_end_of_stream(&a);
        assert_eq!(a.cq.poll(&mut [Default::default()]).unwrap(), 0);
        post_receives(&a, 6..7);
        let sge = [a.mr.sge(4096, 1000)];
        let sends = [8, 9].map(|number| SendWr::send(number, SendData::Sges(&sge)));
        let posted = std::time::Instant::now();
        a.qp.post_send(&sends).unwrap();
        let flushed = [9, 1, 2, 3, 6].map(|number| (number, WcStatus::WR_FLUSH_ERR));
        assert_eq!(completions(&a), [(8, WcStatus::RETRY_EXC_ERR)]);
        assert!(posted.elapsed() >= RETRIES, "{:?}", posted.elapsed());
        assert_eq!(completions(&a), flushed);
        assert_eq!(a.qp.query().unwrap().state, Some(siw::QpState::Error));
    }
}

#[test]
fn requests_under_way_to_a_peer_that_leaves_fail() {
    let daemon = Daemon::loopback();
    let (a, b) = pair_of(&daemon, (0, 1));
    exchange(&a, &b);
    // No receive is posted for it: it waits at the peer and is acknowledged.
    post_send(&a, 1);
    assert_eq!(completions(&a), [(1, WcStatus::SUCCESS)]);
    // More than the peer's receive window.
    let large = a.pd.alloc_mr(16 << 20, crate::common::ALL).unwrap();
    let sge = [large.sge(0, 16 << 20)];
    let send = SendWr::send(2, SendData::Sges(&sge));
    a.qp.post_send(&[send]).unwrap();
    post_send(&a, 3);
    let left = std::time::Instant::now();
    drop(b.qp);
    assert_eq!(
        completions(&a),
        [(2, WcStatus::RETRY_EXC_ERR), (3, WcStatus::WR_FLUSH_ERR)]
    );
    assert!(left.elapsed() >= RETRIES, "{:?}", left.elapsed());
}

#[test]
fn a_pair_is_connected_anew_after_a_reset() {
    let daemon = Daemon::loopback();
    let (a, b) = pair_of(&daemon, (0, 1));
    for _ in 0..3 {
        exchange(&a, &b);
        a.qp.reset().unwrap();
        b.qp.reset().unwrap();
        let sge = [a.mr.sge(4096, 8)];
        let early = a.qp.post_send(&[SendWr::send(1, SendData::Sges(&sge))]);
        assert!(early.is_err(), "it is not connected any more");
        join(&a, &b, (0, 1));
    }
    exchange(&a, &b);
}

/// The reason in the next asynchronous event of a queue pair.
fn fatal_reason(ctx: &Context, qp_num: u32) -> String {
    let event = ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, Some(AsyncEventKind::QpFatal), "{event:?}");
    assert_eq!(event.object, qp_num);
    event.reason.to_string()
}

#[test]
fn a_pair_that_cannot_be_is_told_why() {
    let daemon = Daemon::loopback();
    let a = End::new(&daemon.context(), 8192);
    let refused = |change: &dyn Fn(&mut PairOptions)| {
        let mut wanted = options(0, 1, 1);
        change(&mut wanted);
        a.qp.connect_pair(&wanted).unwrap_err().errno()
    };
    let elsewhere = |wanted: &mut PairOptions| wanted.peer = ip("192.0.2.1");
    assert_eq!(refused(&elsewhere), nix::libc::EHOSTUNREACH);
    let not_ours = |wanted: &mut PairOptions| wanted.local = ip("10.77.0.2");
    assert_eq!(refused(&not_ours), nix::libc::EADDRNOTAVAIL);
    // The connecting end asks the other end's daemon, which has no such queue pair.
    post_receives(&a, 1..2);
    a.qp.connect_pair(&options(0, 1, 0xFFFF)).unwrap();
    post_send(&a, 2);
    let reason = fatal_reason(&a.ctx, a.qp.qp_num());
    assert!(
        reason.contains("10.77.0.2 has no queue pair 65535"),
        "{reason}"
    );
    assert_eq!(
        completions(&a),
        [(2, WcStatus::RETRY_EXC_ERR), (1, WcStatus::WR_FLUSH_ERR)]
    );
    let again = a.qp.connect_pair(&options(0, 1, 1)).unwrap_err();
    assert_eq!(again.errno(), nix::libc::EISCONN);
}

#[test]
fn what_a_queue_pair_denies_no_key_allows() {
    let daemon = Daemon::loopback();
    let read = |from: &End, of: &End, number| {
        let sge = [from.mr.sge(0, 8)];
        let wr = SendWr::read(number, &sge, of.mr.addr(), of.mr.rkey());
        from.qp.post_send(&[wr]).unwrap();
        completions::<1>(from)
    };
    let (a, b) = pair_of(&daemon, (0, 1));
    assert_eq!(read(&a, &b, 1), [(1, WcStatus::SUCCESS)]);
    b.qp.deny_access(Access::REMOTE_WRITE).unwrap();
    assert_eq!(read(&a, &b, 2), [(2, WcStatus::SUCCESS)]);
    b.qp.deny_access(Access::REMOTE).unwrap();
    assert_eq!(read(&a, &b, 3), [(3, WcStatus::REM_ACCESS_ERR)]);
    let error = b.qp.deny_access(Access::LOCAL_WRITE).unwrap_err();
    assert_eq!(error.errno(), nix::libc::EINVAL, "{error}");

    // Access denied from the connection on, until a change of the denied access.
    for (denied, allowed) in [
        (Access::REMOTE_READ, Access::NONE),
        (Access::NONE, Access::REMOTE_READ),
    ] {
        let contexts = (daemon.context(), daemon.context());
        let (a, b) = (End::new(&contexts.0, 8192), End::new(&contexts.1, 8192));
        a.qp.connect_pair(&options(0, 1, b.qp.qp_num())).unwrap();
        let limited = PairOptions {
            denied_access: denied,
            ..options(1, 0, a.qp.qp_num())
        };
        b.qp.connect_pair(&limited).unwrap();
        b.qp.deny_access(allowed).unwrap();
        let expected = match allowed {
            Access::NONE => WcStatus::SUCCESS,
            _ => WcStatus::REM_ACCESS_ERR,
        };
        assert_eq!(read(&a, &b, 4), [(4, expected)]);
    }
}

/// Otherwise its client would get the connections of other clients' queue pairs, or prevent them.
#[test]
fn no_client_can_listen_on_the_port_of_pairs() {
    let daemon = Daemon::loopback();
    let channel = CmChannel::new(&daemon.context()).unwrap();
    let listen = |address: &str| CmListener::new(&channel, None, address.parse().unwrap(), 8, 0);
    let addresses = ["0.0.0.0:5045", "10.77.0.2:5045", "[fd77::2]:5045"];
    for address in addresses {
        let error = listen(address).err().unwrap().to_string();
        assert!(error.contains("5045"), "{address}: {error}");
    }
    let (a, b) = pair_of(&daemon, (0, 1));
    for address in addresses {
        assert!(listen(address).is_err(), "{address}: while pairs exist");
    }
    post_receives(&b, 0..1);
    post_send(&a, 1);
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    assert!(!daemon.stop_and_read_log().contains("listening failed"));
}
