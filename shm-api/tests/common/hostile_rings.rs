//! Actions of a hostile client on the rings that it shares with a worker, driven by the octets of a
//! fuzzer. Used by the test suite and by the fuzz target `rings`. The consumers are those of the
//! daemon.

#[path = "octet_input.rs"]
mod octet_input;

use octet_input::Input;
use siw_shm::completion_queue::CqGeometry;
use siw_shm::work_queue::{QpGeometry, ring_len};
use siw_shm::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// All structures lie in one region: send queue, receive queue, doorbell ring, completion queue. The
/// client writes words anywhere while the worker takes and completes requests.
pub fn write_over_rings(data: &[u8]) {
    const BELLS: u32 = 8;
    let mut input = Input(data);
    let qp = QpGeometry::new(4, 4, 5, 5, 64).expect("small");
    let cq = CqGeometry::new(4, 1).expect("small");
    let (bell_at, cq_at) = (qp.len, qp.len + doorbell::ring_len(BELLS));
    let len = cq_at + cq.len;
    let region = Arc::new(SharedMemory::new_anonymous(len + 4096).expect("memory"));
    let sq = SqConsumer::new(region.clone(), 0, qp.sq_slots);
    let mut sq = sq.expect("in range");
    let rq = RqConsumer::new(region.clone(), qp.rq_offset, qp.rq_slots);
    let mut rq = rq.expect("in range");
    let mut bell = DoorbellConsumer::new(region.clone(), bell_at, BELLS).expect("in range");
    let mut producer = CqProducer::new(region.clone(), cq_at, cq, 0).expect("in range");
    assert_eq!(qp.rq_offset, ring_len(qp.sq_slots));
    let (mut send, mut recv) = (SendWqe::new(), RecvWqe::new());
    let (mut sq_dead, mut rq_dead) = (false, false);
    while !input.is_empty() {
        match input.u8() % 8 {
            0..=2 => {
                let at = usize::from(input.u16()) * 4 % len;
                let word = region.atomic_u32(at).expect("in range");
                word.store(input.odd() as u32, Ordering::Relaxed);
            }
            // A nearly valid header slot, and the index word after it.
            3 => {
                let (base, slots) = if input.u8() & 1 == 0 {
                    (0, qp.sq_slots)
                } else {
                    (qp.rq_offset, qp.rq_slots)
                };
                let slot = u32::from(input.u8()) % slots;
                let at = base + work_queue::HEADER + slot as usize * wqe::SLOT_LEN;
                let head = [
                    input.u8() % 14,
                    input.u8() % 16,
                    input.u8() % 18,
                    input.u8() % 6,
                ];
                let opcode = if base == 0 { head[0] } else { wqe::OPCODE_RECV };
                region
                    .write(at, &[opcode, head[1], head[2], head[3]])
                    .expect("in range");
                let tail = region.atomic_u32(base).expect("in range");
                tail.fetch_add(u32::from(input.u8() % 3), Ordering::Relaxed);
            }
            4 if !sq_dead => match sq.pop(&mut send) {
                Ok(Some(())) => {
                    assert!(send.sges().len() <= wqe::MAX_SGE);
                    assert!(
                        send.inline_data()
                            .is_none_or(|bytes| bytes.len() <= wqe::MAX_INLINE)
                    );
                    let _ = format!("{send:?}");
                    sq.release_popped();
                    sq.complete_requests(1);
                }
                Ok(None) => {}
                Err(_) => sq_dead = true,
            },
            5 if !rq_dead => match rq.pop(&mut recv) {
                Ok(Some(())) => {
                    assert!(recv.sges().len() <= wqe::MAX_SGE);
                    rq.release_popped();
                    rq.complete_requests(1);
                }
                Ok(None) => {}
                Err(_) => rq_dead = true,
            },
            6 => {
                for _ in 0..BELLS {
                    if bell.pop().is_none() {
                        break;
                    }
                }
                sq.clear_pending();
            }
            _ => {
                // A full ring, according to the client, is an error of this queue.
                let _ = producer.push(&Wc::default());
                let _ = producer.take_event();
            }
        }
    }
    // Memory beyond the rings was never touched.
    let mut tail = [1; 4096];
    region.read(len, &mut tail).expect("in range");
    assert_eq!(tail, [0; 4096]);
}
