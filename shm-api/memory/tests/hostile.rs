//! Memory keys in the hands of a hostile client: the fuzz target `keys` of `shm-api/fuzz` on random
//! inputs, and binds of several workers at once.
#[path = "common/hostile.rs"]
mod hostile;

use proptest::prelude::*;
use siw_memory::*;
use siw_shm::*;
use std::sync::Arc;

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bind_or_registration_allows_more_than_it_says(octets in prop::collection::vec(any::<u8>(), 0..3000)) {
        hostile::change_keys(&octets);
    }
}

/// Two workers bind the same window while the control thread tries to deregister its region: a
/// deregistered region has no windows, and an allowed access reads the bytes that the binding refers
/// to.
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
        let gone = std::thread::scope(|scope| {
            let workers = [0u32, 1].map(|worker| {
                let (table, bind) = (&table, &bind);
                scope.spawn(move || {
                    let mut reader = table.register_reader().unwrap();
                    for i in 0..100u32 {
                        let key = reader.entry_key(mw);
                        let to = mw.0 & !0xff | (key.wrapping_add(1) & 0xff);
                        let length = if i % 3 == 0 {
                            0
                        } else {
                            64 + u64::from(worker)
                        };
                        let _ = reader.bind_window(&bind(key, to, length), 1, worker);
                        let got = reader.check_access(
                            Stag(to),
                            VA + 64,
                            64,
                            Access::REMOTE_READ,
                            1,
                            worker,
                        );
                        if let Ok((mr, off)) = got {
                            assert_eq!(off, 64);
                            assert_eq!(mr.len(), 4096);
                        }
                        reader.report_quiescent();
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
                    Err(error) => assert!(matches!(error, DeregError::Bound(1..=3)), "{error}"),
                }
            }
            for worker in workers {
                worker.join().unwrap();
            }
            gone
        });
        let reader = table.register_reader().unwrap();
        let key = reader.entry_key(mw);
        if gone {
            assert!(
                reader
                    .check_access(Stag(key), VA + 64, 1, Access::REMOTE_READ, 1, 0)
                    .is_err()
            );
            assert!(reader.bind_window(&bind(key, key, 8), 1, 0).is_err());
        }
        drop(reader);
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
