//! Regions of `Pd::alloc_mr` share a few arenas: their number, and the reuse of freed regions.

use std::collections::HashSet;
use std::ffi::CString;

use crate::common::*;
use siw::{Mr, Pd, SendData, SendWr, WcStatus};

/// Arenas that the daemon has mapped.
fn arenas_of(daemon: &Daemon) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.child.id())).unwrap();
    maps.lines()
        .filter(|line| line.contains("siwd-arena"))
        .count()
}

fn make(pd: &Pd, len: usize) -> Mr {
    pd.alloc_mr(len, ALL).unwrap()
}

fn addresses(regions: &[Mr]) -> HashSet<*mut u8> {
    regions.iter().map(|mr| mr.arena().as_ptr()).collect()
}

fn is_zero(mr: &Mr) -> bool {
    let mut bytes = vec![1; mr.len()];
    mr.read(0, &mut bytes).unwrap();
    bytes.iter().all(|byte| *byte == 0)
}

#[test]
fn ten_thousand_regions_need_a_handful_of_arenas() {
    const REGIONS: usize = 10_000;
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let before = arenas_of(&daemon);
    let other_pd = b.ctx.alloc_pd().unwrap();
    let regions: Vec<_> = (0..REGIONS)
        .map(|i| make(if i % 2 == 0 { &b.pd } else { &other_pd }, 4096))
        .collect();
    let arenas = arenas_of(&daemon) - before;
    assert!(arenas <= 6, "{arenas}");
    assert!(addresses(&regions).len() <= 7);
    let mut starts: Vec<_> = regions.iter().map(|mr| mr.as_ptr() as usize).collect();
    starts.sort_unstable();
    assert!(starts.iter().all(|start| start % 4096 == 0));
    assert!(starts.windows(2).all(|two| two[1] - two[0] >= 4096));

    // Each region is separate: a peer's write changes this region only, and needs a key of its
    // queue pair's protection domain.
    let write = |mr: &Mr| {
        let sge = [a.mr.sge(0, 4096)];
        let wr = SendWr::write(1, SendData::Sges(&sge), mr.addr(), mr.rkey());
        a.qp.post_send(&[wr]).unwrap();
        let status = a.wc().status;
        if status != WcStatus::SUCCESS {
            return status;
        }
        a.qp.post_send(&[SendWr::read(2, &sge, mr.addr(), mr.rkey())])
            .map_or(WcStatus::WR_FLUSH_ERR, |()| a.wc().status)
    };
    a.fill(7);
    let middle = REGIONS / 2;
    assert_eq!(write(&regions[middle]), WcStatus::SUCCESS);
    assert!(!is_zero(&regions[middle]));
    assert!(is_zero(&regions[middle - 2]) && is_zero(&regions[middle + 2]));
    assert_ne!(write(&regions[middle + 1]), WcStatus::SUCCESS);
    assert!(is_zero(&regions[middle + 1]));

    drop(regions);
    b.ctx.await_releases().unwrap();
    assert_eq!(arenas_of(&daemon), before, "all of it is given back");
}

#[test]
fn freed_memory_is_used_again_and_zeroed() {
    let daemon = Daemon::loopback();
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    let mut regions: Vec<_> = (0..600).map(|_| make(&pd, 4096)).collect();
    let (arenas, known) = (arenas_of(&daemon), addresses(&regions));
    for _ in 0..3 {
        for mr in &regions {
            mr.write(0, &[0xff; 4096]).unwrap();
        }
        let mut index = 0;
        regions.retain(|_| {
            index += 1;
            index % 2 == 0
        });
        let again: Vec<_> = (0..300).map(|_| make(&pd, 4096)).collect();
        assert!(again.iter().all(is_zero));
        regions.extend(again);
    }
    assert_eq!(arenas_of(&daemon), arenas);
    assert_eq!(addresses(&regions), known);
    // Small regions share a page, in cache lines of their own; a long region has an arena of its
    // own.
    let small = [make(&pd, 1), make(&pd, 100), make(&pd, 8)];
    let starts = small.each_ref().map(|mr| mr.as_ptr() as usize);
    assert!(starts[0] % 64 == 0 && starts[1] % 128 == 0 && starts[2] % 64 == 0);
    let long = make(&pd, 9 << 20);
    assert!(!known.contains(&long.arena().as_ptr()) && long.arena_offset() == 0);
    assert_eq!(arenas_of(&daemon), arenas + 1);
}

#[test]
fn a_client_with_little_memory_takes_little() {
    let limits = "[limits]\nmemory_per_client = \"9 MiB\"\n";
    let daemon = Daemon::start(&format!("{LOOPBACK}{limits}"), &[]);
    let ctx = daemon.context();
    let pd = ctx.alloc_pd().unwrap();
    let first = make(&pd, 4096);
    assert_eq!(
        (first.arena().len(), first.arena().is_huge()),
        (256 << 10, false)
    );
    // If the next larger arena would exceed a limit, one of just the required length is allocated.
    let mut regions = vec![first];
    let refused = loop {
        match pd.alloc_mr(1 << 20, ALL) {
            Ok(mr) => regions.push(mr),
            Err(error) => break error.to_string(),
        }
    };
    assert!(regions.len() >= 5, "{} and then: {refused}", regions.len());
    assert!(refused.contains("memory_per_client"), "{refused}");
}

/// Allocations of the C API come from the same arenas.
#[test]
fn the_c_api_shares_arenas_too() {
    let daemon = Daemon::loopback();
    let socket = CString::new(daemon.socket.to_str().unwrap()).unwrap();
    let (mut ctx, mut pd) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: valid pointers.
    unsafe {
        assert_eq!(siw::capi::siw_open(socket.as_ptr(), &mut ctx), 0);
        assert_eq!(siw::capi::siw_alloc_pd(ctx, &mut pd), 0);
    }
    let before = arenas_of(&daemon);
    let mut regions = Vec::new();
    for len in [64, 4096, 10_000].repeat(10) {
        let mut mr: *mut siw::capi::SiwMr = std::ptr::null_mut();
        // SAFETY: valid pointers.
        let status = unsafe { siw::capi::siw_alloc_mr(pd, len, 7, &mut mr) };
        assert_eq!(status, 0);
        regions.push(mr);
    }
    assert_eq!(arenas_of(&daemon), before + 1);
    for mr in regions {
        // SAFETY: made above, freed once.
        assert_eq!(unsafe { siw::capi::siw_dereg_mr(mr) }, 0);
    }
    // SAFETY: made above, freed once.
    unsafe {
        assert_eq!(siw::capi::siw_await_releases(ctx), 0);
        assert_eq!(arenas_of(&daemon), before);
        siw::capi::siw_dealloc_pd(pd);
        siw::capi::siw_close(ctx);
    }
}
