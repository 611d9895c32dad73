//! Memory that changes while it is sent: verbs allow this for the source of a Read, and an
//! application that does it to a Write or Send only harms its own data. Each FPDU is built from a
//! single read of the memory, so that its CRC matches its bytes.

use crate::common::*;
use siw_iwarp::*;
use siw_shm::{Opcode, SharedMemory};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Writes to all of the memory repeatedly until dropped.
struct Scribbler {
    is_over: Arc<AtomicBool>,
    passes: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Scribbler {
    fn start(memory: Arc<SharedMemory>, len: usize) -> Scribbler {
        let is_over = Arc::new(AtomicBool::new(false));
        let passes = Arc::new(AtomicU64::new(0));
        let (stop, count) = (is_over.clone(), passes.clone());
        let thread = std::thread::spawn(move || {
            let mut round = 0u8;
            while !stop.load(Ordering::Relaxed) {
                round = round.wrapping_add(1);
                memory.write(0, &vec![round; len]).expect("in range");
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Scribbler {
            is_over,
            passes,
            thread: Some(thread),
        }
    }
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the scribbler ends");
        }
    }
}

const LEN: usize = 16 << 10;
/// Minimum number of messages, and minimum number of passes over the memory meanwhile.
const ROUNDS: usize = 300;
const PASSES: u64 = 2000;

/// Sends one message of each of several lengths from memory that changes all the time, and passes
/// every FPDU to the peer, which checks CRCs.
fn send_while_memory_changes(opcode: Opcode, markers: bool) {
    let parameters = |initiator| NegotiatedParameters {
        markers_in: markers,
        markers_out: markers,
        ..negotiated(initiator)
    };
    let mut initiator = End::new(parameters(true));
    let mut responder = End::new(parameters(false));
    // Both ends would send by reference if they could.
    responder.send_by_reference();
    let (local, source) = initiator.env.mr(0, LEN, REMOTE);
    let (peer, target) = responder.env.mr(0, LEN, REMOTE);
    let changing = match opcode {
        Opcode::Read => target,
        _ => source,
    };
    let scribbler = Scribbler::start(changing, LEN);
    let mut round = 0;
    while round < ROUNDS || scribbler.passes.load(Ordering::Relaxed) < PASSES {
        let len = [1, 100, 300, 1424, 1428, 4000, LEN][round % 7];
        if opcode == Opcode::Send {
            responder.env.post_recv(round as u64, &[sge(0, LEN, peer)]);
        }
        let sges = [sge(0, len, local)];
        let request = remote(opcode, round as u64, &sges, 0, peer);
        initiator.env.post(&request);
        run(&mut initiator, &mut responder);
        assert_eq!(initiator.qp.found_error(), None, "round {round} of {len}");
        assert_eq!(responder.qp.found_error(), None, "round {round} of {len}");
        round += 1;
        assert_eq!(initiator.env.sent.len(), round);
    }
    assert_eq!(initiator.qp.state(), RdmapState::Rts);
    assert!(responder.env.live.is_empty(), "responses are copied");
}

#[test]
fn read_responses_survive_writes_to_their_source() {
    send_while_memory_changes(Opcode::Read, false);
    send_while_memory_changes(Opcode::Read, true);
}

#[test]
fn copied_writes_and_sends_survive_writes_to_their_source() {
    for opcode in [Opcode::Write, Opcode::Send] {
        send_while_memory_changes(opcode, false);
        send_while_memory_changes(opcode, true);
    }
}

#[test]
fn responses_are_never_sent_by_reference() {
    let (mut initiator, mut responder) = pair();
    responder.send_by_reference();
    let (local, _) = initiator.env.mr(0, LEN, REMOTE);
    let (peer, _) = responder.env.mr(0, LEN, REMOTE);
    let sges = [sge(0, LEN, local)];
    initiator.env.post(&remote(Opcode::Read, 1, &sges, 0, peer));
    let request = initiator.pull_all();
    responder.give(&request);
    let mut segments = 0;
    while let Some(next) = responder.qp.next_record(&mut responder.env, usize::MAX) {
        let mut frame = Frame::default();
        responder
            .build_fpdu(&next.record, &mut frame)
            .expect("the key is there");
        assert!(frame.owners.is_empty());
        segments += 1;
    }
    assert_eq!(segments, LEN.div_ceil(1428));
}
