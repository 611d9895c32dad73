//! Rings in the hands of a hostile client: the fuzz target `rings` of `shm-api/fuzz` on random
//! inputs, and slots that change while a worker reads them.
#[path = "common/hostile_rings.rs"]
mod hostile;

use proptest::prelude::*;
use siw_shm::work_queue::ring_len;
use siw_shm::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_content_of_the_rings_breaks_a_worker(octets in prop::collection::vec(any::<u8>(), 0..3000)) {
        hostile::write_over_rings(&octets);
    }
}

/// The checks apply to the copy: slots that change while they are read yield a request or an error,
/// and never more elements than fit.
#[test]
fn slots_that_change_while_they_are_read_are_copied_once() {
    let slots = 8;
    let region = Arc::new(SharedMemory::new_anonymous(ring_len(slots)).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = 1u64;
            while !stop.load(Ordering::Relaxed) {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let slot = (random >> 40) as usize % slots as usize;
                let offset = work_queue::HEADER + slot * wqe::SLOT_LEN;
                // Opcode, flags, elements, slots: each valid on its own.
                let bytes = (random >> 8).to_le_bytes();
                let head = [bytes[0] % 13, bytes[1] % 16, bytes[2] % 18, bytes[3] % 6];
                region.write(offset, &head).unwrap();
            }
        });
        let mut wqe = SendWqe::new();
        let (mut seen, mut round) = (0, 0u32);
        // At least until the writer is running.
        while round < 200_000 || seen == 0 {
            round = round.wrapping_add(1);
            let mut consumer = SqConsumer::new(region.clone(), 0, slots).unwrap();
            let tail = region.atomic_u32(0).unwrap();
            tail.store(round % (slots + 1), Ordering::Relaxed);
            while let Ok(Some(())) = consumer.pop(&mut wqe) {
                seen += 1;
                assert!(wqe.sges().len() <= wqe::MAX_SGE);
                assert!(
                    wqe.inline_data()
                        .is_none_or(|inline| inline.len() <= wqe::MAX_INLINE)
                );
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
