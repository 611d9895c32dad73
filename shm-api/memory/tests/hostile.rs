//! Shared memory in the hands of a hostile client: the fuzz targets of `shm-api/fuzz` on random
//! inputs, and the same while the other side runs.
#[path = "common/hostile.rs"]
mod hostile;

use proptest::prelude::*;
use siw_memory::*;
use siw_shm::work_queue::ring_len;
use siw_shm::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_content_of_the_rings_breaks_a_worker(d in prop::collection::vec(any::<u8>(), 0..3000)) {
        hostile::rings(&d);
    }

    #[test]
    fn no_bind_or_registration_allows_more_than_it_says(d in prop::collection::vec(any::<u8>(), 0..3000)) {
        hostile::keys(&d);
    }
}

/// The copy is what is checked: slots that change while they are read give some request or an
/// error, and never more elements than fit.
#[test]
fn slots_that_change_while_they_are_read_are_copied_once() {
    let slots = 8;
    let region = Arc::new(SharedMemory::new_anonymous(ring_len(slots)).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut x = 1u64;
            while !stop.load(Ordering::Relaxed) {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let slot = (x >> 40) as usize % slots as usize;
                let at = work_queue::HEADER + slot * wqe::SLOT_LEN;
                // Opcode, flags, elements, slots: each right by itself.
                let b = (x >> 8).to_le_bytes();
                let head = [b[0] % 13, b[1] % 16, b[2] % 18, b[3] % 6];
                region.write(at, &head).unwrap();
            }
        });
        let mut w = SendWqe::new();
        let (mut seen, mut round) = (0, 0u32);
        // At least until the writer has come to run.
        while round < 200_000 || seen == 0 {
            round = round.wrapping_add(1);
            let mut sq = SqConsumer::new(region.clone(), 0, slots).unwrap();
            let tail = region.atomic_u32(0).unwrap();
            tail.store(round % (slots + 1), Ordering::Relaxed);
            while let Ok(Some(())) = sq.pop(&mut w) {
                seen += 1;
                assert!(w.sges().len() <= wqe::MAX_SGE);
                assert!(w.inline_data().is_none_or(|d| d.len() <= wqe::MAX_INLINE));
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Two workers bind the same window while the control thread tries to deregister its region: a
/// region that is gone has no window, and whoever is allowed reads what the binding says.
#[test]
fn binds_of_two_workers_and_a_deregistration_never_cross() {
    const VA: u64 = 0x1000;
    let table = KeyTable::new(16, 2);
    let region = Arc::new(SharedMemory::new_anonymous(8192).unwrap());
    for _ in 0..200 {
        let mr = RegisteredMemory::new(region.clone(), 0, 4096, VA, 1, None, Access(31)).unwrap();
        let mr = table.insert(mr).unwrap();
        let mw = table
            .insert(RegisteredMemory::new_window(1, WindowType::One))
            .unwrap();
        let bind = |key: u32, to: u32, length| BindMw {
            rkey: key,
            new_rkey: to,
            lkey: mr.0,
            addr: VA + 64,
            length,
            access: Access::REMOTE_READ,
        };
        let gone = std::thread::scope(|s| {
            let workers = [0u32, 1].map(|w| {
                let (table, bind) = (&table, &bind);
                s.spawn(move || {
                    let mut r = table.register_reader().unwrap();
                    for i in 0..100u32 {
                        let key = r.entry_key(mw);
                        let to = mw.0 & !0xff | (key.wrapping_add(1) & 0xff);
                        let length = if i % 3 == 0 { 0 } else { 64 + u64::from(w) };
                        let _ = r.bind_window(&bind(key, to, length), 1, w);
                        let got = r.check_access(Stag(to), VA + 64, 64, Access::REMOTE_READ, 1, w);
                        if let Ok((mr, off)) = got {
                            assert_eq!(off, 64);
                            assert_eq!(mr.len(), 4096);
                        }
                        r.report_quiescent();
                    }
                })
            });
            let mut gone = false;
            for _ in 0..50 {
                match table.deregister(mr) {
                    Ok(_) => {
                        gone = true;
                        break;
                    }
                    Err(e) => assert!(matches!(e, DeregError::Bound(1..=3)), "{e}"),
                }
            }
            for w in workers {
                w.join().unwrap();
            }
            gone
        });
        let r = table.register_reader().unwrap();
        let key = r.entry_key(mw);
        if gone {
            assert!(
                r.check_access(Stag(key), VA + 64, 1, Access::REMOTE_READ, 1, 0)
                    .is_err()
            );
            assert!(r.bind_window(&bind(key, key, 8), 1, 0).is_err());
        }
        drop(r);
        table.remove(mw).unwrap();
        if !gone {
            assert_eq!(
                table.with_entry(mr, RegisteredMemory::count_windows),
                Some(0)
            );
            table.deregister(mr).unwrap();
        }
        table.wait_for_reclaim();
    }
}
