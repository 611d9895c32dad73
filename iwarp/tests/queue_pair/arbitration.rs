//! Requests and responses share a stream message by message, with equal octets while both have
//! something to send (RFC 5041 section 5.3 forbids interleaving messages).
use crate::common::*;
use siw_iwarp::*;
use siw_shm::{Access, Opcode};

const LEN: usize = 512 << 10;

/// Octets that the shared end sends: its own requests, and responses to the peer's Reads.
#[derive(Default)]
struct Share {
    requests: usize,
    responses: usize,
    /// Octets of the longest run of one kind while the other waited.
    longest_wait: usize,
}

/// Runs an end with `sends` Writes of `send_len` octets to send, which is asked for `reads` Reads of
/// `read_len`; returns how its first `octets` are shared.
fn share_of(sends: (usize, usize), reads: (usize, usize), octets: usize) -> Share {
    let deep = |initiator| NegotiatedParameters {
        ird: 64,
        ord: 64,
        ..negotiated(initiator)
    };
    let (mut shared, mut peer) = (End::new(deep(true)), End::new(deep(false)));
    let (source, _) = shared.env.mr(0, LEN, Access::NONE);
    let (readable, _) = shared.env.mr(0, LEN, REMOTE);
    let (sink, _) = peer.env.mr(0, LEN, REMOTE);
    // The peer may send once it has received an FPDU.
    shared.env.post(&remote(Opcode::Write, 0, &[], 0, sink));
    run(&mut shared, &mut peer);
    for wr_id in 0..reads.0 {
        let sges = [sge(0, reads.1, sink)];
        let read = remote(Opcode::Read, wr_id as u64, &sges, 0, readable);
        peer.env.post(&read);
    }
    let requests = peer.pull_all();
    for wr_id in 0..sends.0 {
        let sges = [sge(0, sends.1, source)];
        let write = remote(Opcode::Write, wr_id as u64, &sges, 0, sink);
        shared.env.post(&write);
    }
    shared.give(&requests);
    let mut share = Share::default();
    let (mut last_was_response, mut run_len) = (false, 0);
    while share.requests + share.responses < octets {
        let fpdu = shared.pull().expect("both have something to send");
        // Opcode 2: RDMA Read Response.
        let is_response = ulpdu(&fpdu)[1] & 0x0f == 2;
        match is_response {
            true => share.responses += fpdu.len(),
            false => share.requests += fpdu.len(),
        }
        run_len = if is_response == last_was_response {
            run_len + fpdu.len()
        } else {
            fpdu.len()
        };
        last_was_response = is_response;
        share.longest_wait = share.longest_wait.max(run_len);
        peer.give(&fpdu);
        // A queue pair with a full send queue sends no more requests until some are acknowledged.
        shared.ack_all();
    }
    assert_eq!(peer.qp.found_error(), None, "no message was interleaved");
    share
}

#[test]
fn long_responses_leave_small_requests_their_share() {
    let share = share_of((20_000, 256), (16, LEN), 4 << 20);
    let ratio = share.requests as f64 / share.responses as f64;
    // 256 KiB of requests after each response of 512 KiB, where headers count for somewhat more than
    // their length.
    assert!(ratio > 0.3, "{} of {}", share.requests, share.responses);
    assert!(
        share.longest_wait <= LEN + (64 << 10),
        "one message at a time"
    );
}

#[test]
fn long_requests_leave_small_responses_their_share() {
    let share = share_of((16, LEN), (32, 4096), 1 << 20);
    // All of the Reads are answered after the first request.
    let responses = 32 * (4096 + 3 * 20);
    assert!(share.responses >= responses, "{}", share.responses);
    assert!(
        share.longest_wait <= LEN + (64 << 10),
        "one message at a time"
    );
}

#[test]
fn equal_messages_take_turns() {
    let share = share_of((64, 1000), (64, 1000), 64_000);
    assert!(share.requests.abs_diff(share.responses) <= 2 * 1020);
    assert!(share.longest_wait <= 2 * 1020, "{}", share.longest_wait);
}
