//! RDMA Reads with several local elements: one Read Request each, one completion for all.
mod common;
use common::*;
use siw_iwarp::rdmap::{READ_REQUEST_LEN, ReadRequestHeader};
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendWr;
use siw_shm::{Access, Opcode, Sge, WcOpcode, WcStatus, WrFlags};

const VA: u64 = 0x10_0000;

fn request_of(f: &[u8]) -> (u32, ReadRequestHeader) {
    let u = ulpdu(f);
    assert_eq!(u[..2], [0x41, 0x41]);
    let r: &[u8; READ_REQUEST_LEN] = u[18..].try_into().expect("28 octets");
    (untagged_of(f).msn.0, ReadRequestHeader::parse(r))
}

/// RFC 5040 section 4.4: a Read Request names one sink, so each element has its own; the source goes
/// on where the one before ended.
#[test]
fn each_element_that_is_not_empty_has_its_own_read_request() {
    let mut a = End::new(negotiated(true));
    let (k, _) = a.env.mr(VA, 8192, Access::LOCAL_WRITE);
    let s = [
        sge(VA + 4000, 0, k),
        sge(VA + 4000, 100, k),
        sge(VA, 1, k),
        sge(VA, 0, k),
        sge(VA + 10, 2000, k),
    ];
    a.env.post(&remote(Opcode::Read, 1, &s, 0x5000, Stag(9)));
    let mut from = 0x5000;
    for (msn, i) in [(1, 1), (2, 2), (3, 4)] {
        let (m, r) = request_of(&a.pull().expect("leaves"));
        assert_eq!(m, msn);
        assert_eq!(
            (r.sink_stag, r.sink_to, r.size, r.src_stag, r.src_to),
            (k.0, s[i].addr, s[i].length, 9, from)
        );
        from += u64::from(s[i].length);
    }
    assert!(a.pull().is_none());
}

/// Sixteen elements, more than the ORD limit lets out at once; one completion, in posting order.
#[test]
fn sixteen_elements_fill_up_and_complete_once() {
    let (mut a, mut b) = pair();
    let (ka, ma) = a.env.mr(VA, 64_000, Access::LOCAL_WRITE);
    let (kb, mb) = b.env.mr(VA, 64_000, Access::REMOTE_READ);
    mb.write(0, &pattern(64_000, 7)).expect("in range");
    // Backwards, in lengths on both sides of a segment.
    let lens = [1, 1428, 1429, 3000, 0, 7, 64, 65, 1, 1, 9000, 2, 3, 4, 5, 6];
    let mut end = 64_000;
    let s: Vec<Sge> = lens
        .iter()
        .map(|&n| {
            end -= n;
            sge(VA + end as u64, n, ka)
        })
        .collect();
    a.env.post(&remote(Opcode::Read, 1, &s, VA + 100, kb));
    a.env.post(&remote(Opcode::Write, 2, &[], 0, Stag(1)));
    let out = a.pull_all();
    // Only ORD of them are out, and the Write behind them waits.
    assert_eq!(a.unacked.len(), 4);
    b.give(&out);
    run(&mut a, &mut b);
    assert_eq!(
        a.env.statuses(),
        [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]
    );
    let c = a.env.sent[0].expect("signaled");
    let total: usize = lens.iter().sum();
    assert_eq!(
        (c.opcode, c.byte_len as usize),
        (WcOpcode::RDMA_READ, total)
    );
    let got = contents(&ma, 64_000);
    let want = pattern(64_000, 7);
    let mut from = 100;
    for (x, n) in s.iter().zip(lens) {
        let at = (x.addr - VA) as usize;
        assert!(got[at..at + n] == want[from..from + n], "element of {n}");
        from += n;
    }
    assert_eq!(b.qp.state(), RdmapState::Rts);
}

/// A fence behind such a read waits for its last response.
#[test]
fn a_fence_waits_for_every_part() {
    let (mut a, mut b) = pair();
    let (ka, _) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (kb, _) = b.env.mr(VA, 64, REMOTE);
    let s = [sge(VA, 8, ka), sge(VA + 8, 8, ka)];
    a.env.post(&remote(Opcode::Read, 1, &s, VA, kb));
    a.env.post(&SendWr {
        flags: WrFlags::FENCE,
        ..remote(Opcode::Write, 2, &[], 0, kb)
    });
    b.give(&a.pull_all());
    a.ack_all();
    a.give(&b.pull().expect("first response"));
    assert!(a.pull().is_none() && a.env.sent.is_empty());
    a.give(&b.pull().expect("second response"));
    assert_eq!(a.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert!(a.pull().is_some());
}

/// A Terminate that quotes the second request blames the work request of both.
#[test]
fn a_refused_part_fails_the_whole_read() {
    let (mut a, mut b) = pair();
    let (ka, _) = a.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (kb, _) = b.env.mr(VA, 8, REMOTE);
    let s = [sge(VA, 8, ka), sge(VA + 8, 8, ka)];
    a.env.post(&remote(Opcode::Read, 1, &s, VA, kb));
    a.env.post(&remote(Opcode::Read, 2, &s[..1], VA, kb));
    run(&mut a, &mut b);
    assert_eq!(
        a.qp.received_terminate().expect("told").to_string(),
        "0/1/01"
    );
    a.qp.on_tcp_closed(&mut a.env, CloseReason::Closed);
    assert_eq!(
        a.env.statuses(),
        [(1, WcStatus::REM_ACCESS_ERR), (2, WcStatus::WR_FLUSH_ERR)]
    );
}
