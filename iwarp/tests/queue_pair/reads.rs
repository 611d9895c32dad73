//! RDMA Reads with several local elements: one Read Request each, one completion for all.
use crate::common::*;
use siw_iwarp::rdmap::{READ_REQUEST_LEN, ReadRequestHeader};
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendWr;
use siw_shm::{Access, Opcode, Sge, WcOpcode, WcStatus, WrFlags};

const VA: u64 = 0x10_0000;

fn request_of(fpdu: &[u8]) -> (u32, ReadRequestHeader) {
    let u = ulpdu(fpdu);
    assert_eq!(u[..2], [0x41, 0x41]);
    let request: &[u8; READ_REQUEST_LEN] = u[18..].try_into().expect("28 octets");
    (untagged_of(fpdu).msn.0, ReadRequestHeader::parse(request))
}

/// RFC 5040 section 4.4: a Read Request names one sink, so each element has its own; each source
/// starts where the previous one ended.
#[test]
fn each_element_that_is_not_empty_has_its_own_read_request() {
    let mut initiator = End::new(negotiated(true));
    let (key, _) = initiator.env.mr(VA, 8192, Access::LOCAL_WRITE);
    let s = [
        sge(VA + 4000, 0, key),
        sge(VA + 4000, 100, key),
        sge(VA, 1, key),
        sge(VA, 0, key),
        sge(VA + 10, 2000, key),
    ];
    initiator
        .env
        .post(&remote(Opcode::Read, 1, &s, 0x5000, Stag(9)));
    let mut from = 0x5000;
    for (msn, i) in [(1, 1), (2, 2), (3, 4)] {
        let (mem, request) = request_of(&initiator.pull().expect("leaves"));
        assert_eq!(mem, msn);
        assert_eq!(
            (
                request.sink_stag,
                request.sink_to,
                request.size,
                request.src_stag,
                request.src_to
            ),
            (key.0, s[i].addr, s[i].length, 9, from)
        );
        from += u64::from(s[i].length);
    }
    assert!(initiator.pull().is_none());
}

/// Sixteen elements, more than the ORD limit allows at once; one completion, in posting order.
#[test]
fn sixteen_elements_fill_up_and_complete_once() {
    let (mut initiator, mut responder) = pair();
    let (initiator_key, initiator_mem) = initiator.env.mr(VA, 64_000, Access::LOCAL_WRITE);
    let (responder_key, responder_mem) = responder.env.mr(VA, 64_000, Access::REMOTE_READ);
    responder_mem
        .write(0, &pattern(64_000, 7))
        .expect("in range");
    // Backwards, with lengths around a full segment.
    let lens = [1, 1428, 1429, 3000, 0, 7, 64, 65, 1, 1, 9000, 2, 3, 4, 5, 6];
    let mut end = 64_000;
    let s: Vec<Sge> = lens
        .iter()
        .map(|&len| {
            end -= len;
            sge(VA + end as u64, len, initiator_key)
        })
        .collect();
    initiator
        .env
        .post(&remote(Opcode::Read, 1, &s, VA + 100, responder_key));
    initiator
        .env
        .post(&remote(Opcode::Write, 2, &[], 0, Stag(1)));
    let out = initiator.pull_all();
    // Only ORD of them are outstanding, and the Write after them waits.
    assert_eq!(initiator.unacked.len(), 4);
    responder.give(&out);
    run(&mut initiator, &mut responder);
    assert_eq!(
        initiator.env.statuses(),
        [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]
    );
    let wc = initiator.env.sent[0].expect("signaled");
    let total: usize = lens.iter().sum();
    assert_eq!(
        (wc.opcode, wc.byte_len as usize),
        (WcOpcode::RDMA_READ, total)
    );
    let got = contents(&initiator_mem, 64_000);
    let want = pattern(64_000, 7);
    let mut from = 100;
    for (x, len) in s.iter().zip(lens) {
        let at = (x.addr - VA) as usize;
        assert!(
            got[at..at + len] == want[from..from + len],
            "element of {len}"
        );
        from += len;
    }
    assert_eq!(responder.qp.state(), RdmapState::Rts);
}

/// A fence after a multi-element Read waits for its last response.
#[test]
fn fence_waits_for_every_part() {
    let (mut initiator, mut responder) = pair();
    let (initiator_key, _) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (responder_key, _) = responder.env.mr(VA, 64, REMOTE);
    let s = [sge(VA, 8, initiator_key), sge(VA + 8, 8, initiator_key)];
    initiator
        .env
        .post(&remote(Opcode::Read, 1, &s, VA, responder_key));
    initiator.env.post(&SendWr {
        flags: WrFlags::FENCE,
        ..remote(Opcode::Write, 2, &[], 0, responder_key)
    });
    responder.give(&initiator.pull_all());
    initiator.ack_all();
    initiator.give(&responder.pull().expect("first response"));
    assert!(initiator.pull().is_none() && initiator.env.sent.is_empty());
    initiator.give(&responder.pull().expect("second response"));
    assert_eq!(initiator.env.statuses(), [(1, WcStatus::SUCCESS)]);
    assert!(initiator.pull().is_some());
}

/// A Terminate that quotes the second request fails the work request that issued both.
#[test]
fn refused_part_fails_the_whole_read() {
    let (mut initiator, mut responder) = pair();
    let (initiator_key, _) = initiator.env.mr(VA, 64, Access::LOCAL_WRITE);
    let (responder_key, _) = responder.env.mr(VA, 8, REMOTE);
    let s = [sge(VA, 8, initiator_key), sge(VA + 8, 8, initiator_key)];
    initiator
        .env
        .post(&remote(Opcode::Read, 1, &s, VA, responder_key));
    initiator
        .env
        .post(&remote(Opcode::Read, 2, &s[..1], VA, responder_key));
    run(&mut initiator, &mut responder);
    assert_eq!(
        initiator
            .qp
            .received_terminate()
            .expect("received")
            .to_string(),
        "0/1/01"
    );
    initiator
        .qp
        .on_tcp_closed(&mut initiator.env, CloseReason::Closed);
    assert_eq!(
        initiator.env.statuses(),
        [(1, WcStatus::REM_ACCESS_ERR), (2, WcStatus::WR_FLUSH_ERR)]
    );
}
