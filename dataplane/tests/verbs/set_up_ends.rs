//! Queue pairs that leave a connection set-up for another state: their work requests complete once.

use crate::common::*;
use siw::{
    AsyncEventKind, CmEvent, CmListener, ConnectOptions, PairOptions, QpInit, QpState, RecvWr,
    SendData, SendWr, SrqInit, Wc, WcStatus,
};

const REQUESTS: u64 = 24;
/// Added to the number of a send work request.
const SENDS: u64 = 1000;

/// Two workers where the machine has the processors: a queue pair in ERROR may then move between them.
fn start_daemon() -> Daemon {
    match two_cores() {
        None => Daemon::start(
            &LOOPBACK.replace("[workers]", "[workers]\ncores = [0, 1]"),
            &[],
        ),
        Some(_) => Daemon::loopback(),
    }
}

/// Connects `from` to the queue pair with this number at the other device.
fn connect_pair(from: &End, peer_qp_num: u32) {
    let options = PairOptions {
        device: from.ctx.device_by_name("siw0").unwrap().index,
        local: "10.77.0.1".parse().unwrap(),
        peer: "10.77.0.2".parse().unwrap(),
        peer_qp_num,
        ord: 1,
        ird: 1,
        denied_access: siw::Access::NONE,
    };
    from.qp.connect_pair(&options).unwrap();
}

fn post_sends(end: &End) {
    for wr_id in 0..REQUESTS {
        let send = SendWr::send(SENDS + wr_id, SendData::Inline(b"x"));
        end.qp.post_send(&[send]).unwrap();
    }
}

fn post_receives(end: &End) {
    for wr_id in 0..REQUESTS {
        let sges = &[end.mr.sge(0, 64)];
        end.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
    }
}

/// Moves a queue pair to ERROR twice and returns its completions: the second move is answered when the
/// worker that has the queue pair has flushed it.
fn flush(end: &End) -> Vec<u64> {
    end.qp.set_error().unwrap();
    end.qp.set_error().unwrap();
    end.ctx.read_stats().unwrap();
    assert_eq!(end.qp.query().unwrap().state, Some(QpState::Error));
    let mut completions = [Wc::default(); 16];
    let mut flushed = Vec::new();
    loop {
        let count = end.cq.poll(&mut completions).unwrap();
        if count == 0 {
            flushed.sort_unstable();
            return flushed;
        }
        for completion in &completions[..count] {
            assert_eq!(completion.status, WcStatus::WR_FLUSH_ERR);
            flushed.push(completion.wr_id);
        }
    }
}

#[test]
fn a_pair_moved_to_error_while_it_connects_completes_each_request_once() {
    let daemon = start_daemon();
    let ctx = daemon.context();
    for _ in 0..20 {
        let (from, to) = (End::new(&ctx, 4096), End::new(&ctx, 4096));
        // The peer is never moved to RTR: the daemon keeps the request of this end.
        connect_pair(&from, to.qp.qp_num());
        post_sends(&from);
        post_receives(&from);
        let all: Vec<u64> = (0..REQUESTS).chain(SENDS..SENDS + REQUESTS).collect();
        assert_eq!(flush(&from), all);
        // Requests that are posted later are flushed too.
        post_receives(&from);
        assert_eq!(flush(&from), (0..REQUESTS).collect::<Vec<_>>());
        // A reset makes the queue pair new.
        from.qp.reset().unwrap();
        connect_pair(&from, to.qp.qp_num());
        post_receives(&from);
        from.qp.reset().unwrap();
        assert!(flush(&from).is_empty());
    }
}

#[test]
fn a_queue_pair_of_a_shared_queue_moved_to_error_while_it_connects_completes_each_send_once() {
    let daemon = start_daemon();
    let ctx = daemon.context();
    let mut from = End::new(&ctx, 4096);
    let srq = from.pd.create_srq(&SrqInit::default()).unwrap();
    let to = End::new(&ctx, 4096);
    for _ in 0..10 {
        let init = QpInit::default();
        let qp = from.pd.create_qp_with_srq(&from.cq, &from.cq, &srq, &init);
        from.qp = qp.unwrap();
        connect_pair(&from, to.qp.qp_num());
        post_sends(&from);
        assert_eq!(flush(&from), (SENDS..SENDS + REQUESTS).collect::<Vec<_>>());
        let event = ctx.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(event.kind, Some(AsyncEventKind::QpLastWqeReached));
        assert_eq!(event.object, from.qp.qp_num());
    }
}

#[test]
fn a_connect_of_rdma_cm_that_ends_in_error_completes_each_receive_once() {
    let daemon = start_daemon();
    let ctx = daemon.context();
    let peer = End::new(&ctx, 4096);
    let address = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new(&peer.cm, None, address, 8, 0).unwrap();
    for _ in 0..10 {
        let from = End::new(&ctx, 4096);
        let options = ConnectOptions::default();
        from.qp
            .connect(&from.cm, listener.local_addr(), &options)
            .unwrap();
        let request = peer.cm.get_event(Some(PATIENCE)).unwrap();
        assert!(matches!(request, CmEvent::ConnectRequest(_)));
        post_receives(&from);
        assert_eq!(flush(&from), (0..REQUESTS).collect::<Vec<_>>());
        let end = from.cm.get_event(Some(PATIENCE)).unwrap();
        assert!(matches!(end, CmEvent::ConnectError(_)), "{end:?}");
        let gone = peer.cm.get_event(Some(PATIENCE)).unwrap();
        assert!(matches!(gone, CmEvent::RequestCancelled { .. }), "{gone:?}");
    }
}

/// The daemon tries to connect to a queue pair that does not exist, again and again.
#[test]
fn a_pair_destroyed_between_two_attempts_leaves_nothing_in_a_worker() {
    let daemon = start_daemon();
    let ctx = daemon.context();
    let from = End::new(&ctx, 4096);
    for round in 0..200 {
        let end = from.another();
        connect_pair(&end, 0xff_fff0);
        if round % 2 == 0 {
            end.qp.query().unwrap();
        }
        drop(end);
    }
    assert_eq!(from.count_of_workers("queue_pairs"), 0);
}
