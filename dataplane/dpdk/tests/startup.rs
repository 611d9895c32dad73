//! Start and end of DPDK: each case in a process of its own, since a process can start DPDK only
//! once.

mod common;

use common::config;
use dpdk::{Eal, EalConfig, Error, Mbuf, MbufCache, Mempool, OwnedMemory, Port, TrackerPool};
use std::process::Command;
use std::sync::Arc;

const CASE: &str = "SIWD_DPDK_TEST_CASE";

/// Runs this binary again with only the given test, which then takes its in-child branch, and
/// returns the output. Returns `None` in the child.
fn in_child(test: &str) -> Option<String> {
    if std::env::var(CASE).as_deref() == Ok(test) {
        return None;
    }
    let exe = std::env::current_exe().expect("this binary has a path");
    let out = Command::new(exe)
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CASE, test)
        .output()
        .expect("this binary runs");
    let text =
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(
        out.status.success(),
        "{test} failed in its process:\n{text}"
    );
    Some(text)
}

#[test]
fn missing_hugepages_are_told_with_the_command_and_can_be_done_without() {
    if in_child("missing_hugepages_are_told_with_the_command_and_can_be_done_without").is_some() {
        return;
    }
    let greedy = EalConfig {
        hugepages: true,
        memory_mb: u32::MAX,
        ..config()
    };
    let err = Eal::init(greedy).map(|_| ()).unwrap_err();
    assert!(matches!(err, Error::Hugepages { .. }), "{err}");
    let text = err.to_string();
    assert!(
        text.contains("/nr_hugepages") && text.contains("echo "),
        "{text}"
    );
    // DPDK was not started yet: normal pages still work.
    let eal = Eal::init(config()).unwrap();
    assert!(Mempool::new(&eal, "fallback", 63, 0, 2048, None).is_ok());
}

#[test]
fn dpdk_starts_once_and_an_impossible_core_is_named() {
    if in_child("dpdk_starts_once_and_an_impossible_core_is_named").is_some() {
        return;
    }
    let wrong = EalConfig {
        main_core: 1023,
        ..config()
    };
    let err = Eal::init(wrong).map(|_| ()).unwrap_err().to_string();
    assert!(err.contains("core 1023"), "{err}");
    let allowed = std::thread::available_parallelism().unwrap();
    let _eal = Eal::init(config()).unwrap();
    assert_eq!(
        std::thread::available_parallelism().unwrap(),
        allowed,
        "the caller is not pinned"
    );
    let second = Eal::init(config()).map(|_| ());
    assert!(matches!(second, Err(Error::AlreadyInitialised)));
}

#[test]
fn a_failed_start_quotes_dpdk() {
    if in_child("a_failed_start_quotes_dpdk").is_some() {
        return;
    }
    let wrong = EalConfig {
        vdevs: vec!["net_nosuchdriver0".into()],
        ..config()
    };
    let err = Eal::init(wrong).map(|_| ()).unwrap_err().to_string();
    assert!(err.contains("net_nosuchdriver0"), "{err}");
}

#[test]
fn everything_is_cleaned_up_in_whatever_order_it_is_dropped() {
    if in_child("everything_is_cleaned_up_in_whatever_order_it_is_dropped").is_some() {
        return;
    }
    let eal = Eal::init(config()).unwrap();
    let pool = Mempool::new(&eal, "p", 63, 0, 2048, None).unwrap();
    let pair = Port::create_ring_pair(&eal, "x", 1, 64).unwrap();
    drop(eal);
    let cache = MbufCache::new(&pool);
    drop(pool);
    drop(cache);
    drop(pair);
}

#[test]
fn a_buffer_may_be_the_last_thing_left() {
    if in_child("a_buffer_may_be_the_last_thing_left").is_some() {
        return;
    }
    let eal = Eal::init(config()).unwrap();
    let pool = Mempool::new(&eal, "p", 63, 0, 2048, None).unwrap();
    let mut trackers = TrackerPool::new(1);
    let tracker = trackers.alloc(Arc::new(OwnedMemory::new(64))).unwrap();
    let mut direct = Mbuf::alloc(&pool).unwrap();
    assert!(direct.append_slice(b"alive"));
    let mut external = Mbuf::alloc(&pool).unwrap();
    assert!(tracker.attach(&mut external, 0, 5));
    drop((tracker, trackers, pool, eal));
    assert_eq!(direct.data(), b"alive");
    assert_eq!(external.data(), [0; 5]);
}

#[test]
fn a_pool_that_does_not_fit_says_how_large_it_would_be() {
    // In a process of its own, since the attempt briefly takes all memory.
    if in_child("a_pool_that_does_not_fit_says_how_large_it_would_be").is_some() {
        return;
    }
    let eal = &Eal::init(config()).unwrap();
    let err = Mempool::new(eal, "p", 4_000_000, 0, 9128, None)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        err.contains("4000000 buffers") && err.contains("MiB"),
        "{err}"
    );
    let long = "a-name-of-more-than-22-bytes";
    assert!(Mempool::new(eal, long, 63, 0, 2048, None).is_err());
    assert!(Mempool::new(eal, "p", 63, 0, u16::MAX, None).is_err());
}
