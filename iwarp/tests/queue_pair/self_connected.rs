//! A queue pair that receives its own stream.
use crate::common::*;
use siw_iwarp::*;
use siw_memory::Stag;
use siw_shm::wqe::SendData;
use siw_shm::{Opcode, WcStatus};

const VA: u64 = 0x10_0000;
const LEN: usize = 8192;
const UNKNOWN: Stag = Stag(0x11_1100);

fn self_connected() -> End {
    let mut qp = QueuePair::new(init_attr());
    qp.set_self_connected();
    qp.set_rts(negotiated(true), EMSS);
    End {
        qp,
        ..End::new(negotiated(true))
    }
}

/// Delivers what it sends until nothing is left.
fn loop_back(end: &mut End) {
    loop {
        let bytes = end.pull_all();
        if bytes.is_empty() {
            break;
        }
        end.give(&bytes);
        end.ack_all();
    }
}

#[test]
fn requests_and_responses_have_the_numbers_that_it_expects() {
    let mut end = self_connected();
    let (key, memory) = end.env.mr(VA, LEN, REMOTE);
    for round in 0..50 {
        let source = [sge(VA, 3000, key)];
        let target = [sge(VA + 4096, 3000, key)];
        memory.write(0, &pattern(3000, round)).unwrap();
        end.env.post_recv(1, &target);
        end.env.post(&wr(Opcode::Send, 2, SendData::Sges(&source)));
        loop_back(&mut end);
        assert_eq!(contents(&memory, LEN)[4096..7096], pattern(3000, round));
        memory.write(4096, &pattern(3000, round + 1)).unwrap();
        end.env
            .post(&remote(Opcode::Read, 3, &source, VA + 4096, key));
        loop_back(&mut end);
        assert_eq!(contents(&memory, 3000), pattern(3000, round + 1));
        assert_eq!(end.env.recv_statuses(), [(1, WcStatus::SUCCESS)]);
        let done = [2, 3].map(|wr_id| (wr_id, WcStatus::SUCCESS));
        assert_eq!(end.env.statuses(), done);
        end.env.received.clear();
        end.env.sent.clear();
    }
    assert_eq!(end.qp.state(), RdmapState::Rts);
}

/// The Terminate comes back to a stream that has ended, so the error itself fails the request.
#[test]
fn an_error_fails_the_request_that_caused_it_as_at_a_peer() {
    type Post = fn(&mut Env, Stag);
    let cases: [(Post, WcStatus); 4] = [
        (
            |env, key| env.post(&remote(Opcode::Write, 2, &[sge(VA, 16, key)], VA, UNKNOWN)),
            WcStatus::REM_ACCESS_ERR,
        ),
        (
            |env, key| env.post(&remote(Opcode::Read, 2, &[sge(VA, 16, key)], VA, UNKNOWN)),
            WcStatus::REM_ACCESS_ERR,
        ),
        (
            |env, key| {
                env.post_recv(10, &[sge(VA, 8, key)]);
                env.post(&wr(Opcode::Send, 2, SendData::Sges(&[sge(VA, 16, key)])));
            },
            WcStatus::REM_INV_REQ_ERR,
        ),
        (
            |env, key| env.post(&wr(Opcode::Send, 2, SendData::Sges(&[sge(VA, 16, key)]))),
            WcStatus::RNR_RETRY_EXC_ERR,
        ),
    ];
    for (post, status) in cases {
        let mut end = self_connected();
        let (key, _memory) = end.env.mr(VA, LEN, REMOTE);
        let local = [sge(VA, 16, key)];
        end.env.post(&remote(Opcode::Write, 1, &local, VA, key));
        post(&mut end.env, key);
        end.env.post(&remote(Opcode::Write, 3, &local, VA, key));
        let bytes = end.pull_all();
        end.give(&bytes);
        assert_eq!(end.qp.state(), RdmapState::Terminate);
        assert_eq!(end.env.events.len(), 1, "{:?}", end.env.events);
        // Its own Terminate changes nothing.
        let terminate = end.pull().expect("a Terminate leaves");
        end.give(&terminate);
        assert_eq!(end.env.events.len(), 1, "{:?}", end.env.events);
        end.ack_all();
        end.env.post_recv(11, &[]);
        end.qp.on_tcp_closed(&mut end.env, CloseReason::Closed);
        let flushed = WcStatus::WR_FLUSH_ERR;
        let expected = [(1, WcStatus::SUCCESS), (2, status), (3, flushed)];
        assert_eq!(end.env.statuses(), expected);
        assert_eq!(end.env.recv_statuses().last(), Some(&(11, flushed)));
        assert_eq!(end.qp.state(), RdmapState::Error);
    }
}
