//! A queue pair connected with itself: its sends arrive at its own receive queue, and its RDMA
//! operations access memory of its own client.

use crate::common::{Daemon, End, LOOPBACK, PATIENCE, pattern, two_cores};
use siw::{
    Access, AsyncEventKind, Context, PairOptions, QpInit, QpState, RecvWr, SendData, SendWr, Wc,
    WcOpcode, WcStatus,
};
use std::collections::BTreeMap;
use std::time::Instant;

const MEMORY: usize = 1 << 20;
/// Half of the memory: the data that is sent or read. The other half receives it.
const HALF: usize = MEMORY / 2;
/// Requests of send queues.
const DEPTH: u32 = 64;

fn connect_to_itself(end: &End, address: &str) {
    let address = address.parse().unwrap();
    let options = PairOptions {
        device: 0,
        local: address,
        peer: address,
        peer_qp_num: end.qp.qp_num(),
        ord: 16,
        ird: 16,
        denied_access: Access::NONE,
    };
    end.qp.connect_pair(&options).unwrap();
}

fn self_connected(daemon: &Daemon) -> End {
    let init = QpInit {
        max_send_wr: DEPTH,
        max_recv_wr: DEPTH,
        ..QpInit::default()
    };
    let end = End::with(&daemon.context(), MEMORY, &init);
    connect_to_itself(&end, "10.77.0.1");
    end
}

fn post_receive(end: &End, wr_id: u64) {
    let sges = &[end.mr.sge(HALF, 65_536)];
    end.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
}

/// The next completions by their ids. The order between the two queues is not defined.
fn completions(end: &End, count: usize) -> BTreeMap<u64, Wc> {
    let found: BTreeMap<_, _> = (0..count)
        .map(|_| end.wc())
        .map(|wc| (wc.wr_id, wc))
        .collect();
    assert_eq!(found.len(), count, "each request completes once");
    assert!(found.values().all(|wc| wc.qp_num == end.qp.qp_num()));
    found
}

fn successes(end: &End, count: usize) -> BTreeMap<u64, Wc> {
    let found = completions(end, count);
    let failed = found.values().find(|wc| wc.status != WcStatus::SUCCESS);
    assert!(failed.is_none(), "{failed:?}");
    found
}

fn statuses(found: &BTreeMap<u64, Wc>) -> Vec<(u64, WcStatus)> {
    found.iter().map(|(id, wc)| (*id, wc.status)).collect()
}

/// Sends a message to itself.
fn exchange(end: &End) {
    end.fill(11);
    post_receive(end, 100);
    let sge = [end.mr.sge(0, 1000)];
    let send = SendWr::send(101, SendData::Sges(&sge));
    end.qp.post_send(&[send]).unwrap();
    let found = successes(end, 2);
    assert_eq!(
        (found[&100].opcode, found[&100].byte_len),
        (WcOpcode::RECV, 1000)
    );
    assert_eq!(found[&101].opcode, WcOpcode::SEND);
    assert_eq!(end.read(HALF, 1000), end.read(0, 1000));
}

fn use_every_operation(end: &End) {
    exchange(end);
    let (addr, rkey) = (end.mr.addr() + HALF as u64, end.mr.rkey());
    end.fill(3);
    let sge = [end.mr.sge(0, 65_536)];
    post_receive(end, 1);
    post_receive(end, 2);
    let with_imm = SendWr::write_with_imm(3, SendData::Sges(&sge), addr, rkey, 0xdead_beef);
    let short = [end.mr.sge(100, 32)];
    let send_with_imm = SendWr::send_with_imm(4, SendData::Sges(&short), 7);
    end.qp.post_send(&[with_imm, send_with_imm]).unwrap();
    let found = successes(end, 4);
    let (write, send) = (found[&1], found[&2]);
    assert_eq!(
        (write.opcode, write.imm),
        (WcOpcode::RECV_RDMA_WITH_IMM, 0xdead_beef)
    );
    assert_eq!(
        (send.opcode, send.imm, send.byte_len),
        (WcOpcode::RECV, 7, 32)
    );
    assert_eq!(end.read(HALF + 32, 65_504), end.read(32, 65_504));

    // The whole half, then back.
    let sge = [end.mr.sge(0, HALF)];
    let write = SendWr::write(5, SendData::Sges(&sge), addr, rkey);
    end.qp.post_send(&[write]).unwrap();
    assert_eq!(successes(end, 1)[&5].opcode, WcOpcode::RDMA_WRITE);
    assert_eq!(end.read(HALF, HALF), end.read(0, HALF));
    end.mr.write(HALF, &pattern(9, HALF)).unwrap();
    end.qp
        .post_send(&[SendWr::read(6, &sge, addr, rkey)])
        .unwrap();
    assert_eq!(successes(end, 1)[&6].opcode, WcOpcode::RDMA_READ);
    assert_eq!(end.read(0, HALF), pattern(9, HALF));

    let words = end.pd.alloc_mr(64, Access::ALL).unwrap();
    words.write(0, &40_u64.to_ne_bytes()).unwrap();
    let (addr, rkey) = (words.addr(), words.rkey());
    let add = SendWr::fetch_add(7, words.sge(8, 8), addr, rkey, 2);
    let swap = SendWr::cmp_swap(8, words.sge(16, 8), addr, rkey, 42, 77);
    end.qp.post_send(&[add, swap]).unwrap();
    successes(end, 2);
    let mut found = [0; 24];
    words.read(0, &mut found).unwrap();
    let expected = [77_u64, 40, 42].map(u64::to_ne_bytes).concat();
    assert_eq!(found[..], expected);
}

#[test]
fn every_operation_reaches_the_queue_pair_itself() {
    let daemon = Daemon::loopback();
    use_every_operation(&self_connected(&daemon));
    // IPv6, with requests posted before the connection is established.
    let end = End::new(&daemon.context(), MEMORY);
    connect_to_itself(&end, "fd77::1");
    use_every_operation(&end);
    // It counts as one queue pair.
    await_queue_pairs(&end.ctx, 1);
}

/// Waits until the workers have this number of queue pairs.
fn await_queue_pairs(ctx: &Context, count: u64) {
    let queue_pairs = || {
        let text = ctx.read_stats().unwrap();
        let statistics: serde_json::Value = serde_json::from_str(&text).unwrap();
        let workers = statistics["workers"].as_array().unwrap().iter();
        let counts = workers.map(|worker| worker["queue_pairs"].as_u64().unwrap());
        counts.sum::<u64>()
    };
    let start = Instant::now();
    while queue_pairs() != count {
        assert!(start.elapsed() < PATIENCE, "{} queue pairs", queue_pairs());
    }
}

#[test]
fn every_operation_works_with_two_workers_and_crcs() {
    if let Some(reason) = two_cores() {
        println!("skipped: {reason}");
        return;
    }
    let config = LOOPBACK.replace("[workers]", "[workers]\ncores = [0, 1]");
    let config = config.replace(
        "pair = \"lo\"",
        "pair = \"lo\"\nmpa = { crc = \"required\" }",
    );
    let daemon = Daemon::start(&config, &[]);
    // Their connections are spread over the workers.
    let ends: Vec<_> = (0..8).map(|_| self_connected(&daemon)).collect();
    ends.iter().for_each(use_every_operation);
}

#[test]
fn many_messages_arrive_in_order() {
    let daemon = Daemon::loopback();
    let end = self_connected(&daemon);
    const MESSAGES: u64 = 20_000;
    let window = u64::from(DEPTH) / 2;
    for wr_id in 0..window {
        post_receive(&end, wr_id);
    }
    let (mut posted, mut received, mut sent) = (0, 0, 0);
    while received < MESSAGES || sent < MESSAGES {
        while posted < MESSAGES && posted < received.min(sent) + window {
            let sge = [end.mr.sge(0, 1 + (posted as usize * 37) % 5000)];
            let send = SendWr::send_with_imm(posted, SendData::Sges(&sge), posted as u32);
            end.qp.post_send(&[send]).unwrap();
            posted += 1;
        }
        let wc = end.wc();
        assert_eq!(wc.status, WcStatus::SUCCESS);
        if wc.opcode == WcOpcode::RECV {
            let place = (wc.wr_id, u64::from(wc.imm), u64::from(wc.byte_len));
            assert_eq!(place, (received, received, 1 + (received * 37) % 5000));
            post_receive(&end, received + window);
            received += 1;
        } else {
            assert_eq!(wc.wr_id, sent);
            sent += 1;
        }
    }
}

/// More data than the windows and the packet buffers hold, by requests and by responses at once.
#[test]
fn long_writes_and_reads_make_progress_together() {
    let daemon = Daemon::loopback();
    let end = self_connected(&daemon);
    for seed in 1..6 {
        end.fill(seed);
        leave_requests(&end);
        post_receive(&end, 100);
        successes_of_any_id(&end, 18);
        assert_eq!(end.read(HALF, HALF), end.read(0, HALF));
    }
}

fn successes_of_any_id(end: &End, count: usize) {
    for _ in 0..count {
        let wc = end.wc();
        assert_eq!(wc.status, WcStatus::SUCCESS, "{wc:?}");
    }
}

#[test]
fn a_message_waits_for_its_receive() {
    let daemon = Daemon::loopback();
    let end = self_connected(&daemon);
    exchange(&end);
    let sends = [1, 2].map(|wr_id| SendWr::send(wr_id, SendData::Inline(b"early")));
    end.qp.post_send(&sends).unwrap();
    successes(&end, 2);
    post_receive(&end, 3);
    post_receive(&end, 4);
    let found = successes(&end, 2);
    assert_eq!((found[&3].byte_len, found[&4].byte_len), (5, 5));
}

#[test]
fn a_wrong_key_fails_its_request_and_flushes_both_queues() {
    let daemon = Daemon::loopback();
    for is_read in [false, true] {
        let end = self_connected(&daemon);
        exchange(&end);
        post_receive(&end, 1);
        post_receive(&end, 2);
        let sge = [end.mr.sge(0, 8)];
        let (addr, wrong) = (end.mr.addr(), end.mr.rkey() ^ 0x100);
        let first = if is_read {
            SendWr::read(3, &sge, addr, wrong)
        } else {
            SendWr::write(3, SendData::Sges(&sge), addr, wrong)
        };
        end.qp.post_send(&[first]).unwrap();
        let found = completions(&end, 3);
        let flushed = WcStatus::WR_FLUSH_ERR;
        let expected = [(1, flushed), (2, flushed), (3, WcStatus::REM_ACCESS_ERR)];
        assert_eq!(statuses(&found), expected, "read: {is_read}");
        let event = end.ctx.get_async_event(Some(PATIENCE)).unwrap();
        assert_eq!(event.kind, Some(AsyncEventKind::QpAccessErr), "{event:?}");
        // Both queues flush from now on.
        post_receive(&end, 4);
        end.qp
            .post_send(&[SendWr::send(5, SendData::Inline(b"late"))])
            .unwrap();
        let late = completions(&end, 2);
        assert_eq!(statuses(&late), [(4, flushed), (5, flushed)]);
        assert_eq!(end.qp.query().unwrap().state, Some(QpState::Error));
    }
}

#[test]
fn a_queue_pair_moved_to_error_flushes_both_queues() {
    let daemon = Daemon::loopback();
    let end = self_connected(&daemon);
    exchange(&end);
    post_receive(&end, 1);
    post_receive(&end, 2);
    end.qp.set_error().unwrap();
    let flushed = WcStatus::WR_FLUSH_ERR;
    let found = completions(&end, 2);
    assert_eq!(statuses(&found), [(1, flushed), (2, flushed)]);
}

#[test]
fn it_connects_again_after_a_reset_whatever_was_outstanding() {
    let daemon = Daemon::loopback();
    let end = self_connected(&daemon);
    for round in 0..6 {
        exchange(&end);
        if round % 2 == 1 {
            leave_requests(&end);
        }
        end.qp.reset().unwrap();
        while end.cq.poll(&mut [Wc::default()]).unwrap() > 0 {}
        connect_to_itself(&end, "10.77.0.1");
    }
    use_every_operation(&end);
}

/// Posts long WRITEs and READs, and a SEND, for which no receive is posted.
fn leave_requests(end: &End) {
    let (addr, rkey) = (end.mr.addr() + HALF as u64, end.mr.rkey());
    let sge = [end.mr.sge(0, HALF)];
    for wr_id in 0..8 {
        let write = SendWr::write(wr_id, SendData::Sges(&sge), addr, rkey);
        let read = SendWr::read(wr_id, &sge, addr, rkey);
        end.qp.post_send(&[write, read]).unwrap();
    }
    let short = [end.mr.sge(0, 40_000)];
    let send = SendWr::send(8, SendData::Sges(&short));
    end.qp.post_send(&[send]).unwrap();
}

#[test]
fn it_is_destroyed_with_requests_outstanding() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    for _ in 0..8 {
        let end = self_connected(&daemon);
        exchange(&end);
        leave_requests(&end);
        drop(end.qp);
        assert_eq!(end.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    }
    // Its client ends.
    let end = self_connected(&daemon);
    leave_requests(&end);
    drop(end);
    await_queue_pairs(&ctx, 0);
    exchange(&self_connected(&daemon));
}
