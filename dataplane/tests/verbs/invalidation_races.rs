//! One worker invalidates a key while another places the peer's WRITEs under it: after the
//! completion of the invalidation none of them changes the memory any more (RFC 5040 section
//! 8.1.1).

use std::time::Instant;

use crate::common::*;
use siw::{Arena, SendData, SendWr, WcStatus, inc_rkey};

/// Two workers: connections are spread randomly over them.
const TWO: &str = "[workers]\ncores = [0, 1]\nidle = \"adaptive\"\n\
                   [dpdk]\nhugepages = \"never\"\nbuffers = 16384\n";
const LEN: usize = 64 << 10;
const WRITES: u64 = 48;

/// Returns true if the invalidation happened while WRITEs were in progress.
fn race(daemon: &Daemon, base: &End) -> bool {
    let to = || "10.77.0.2:0".parse().unwrap();
    let writer = End::new(&daemon.context(), LEN);
    let (target, near) = (base.another(), End::new(&daemon.context(), 64));
    let invalidator = base.another();
    connect(&writer, &target, "siw0", to());
    connect(&near, &invalidator, "siw0", to());
    let arena = Arena::alloc(&base.ctx, LEN, false).unwrap();
    let mut region = base.pd.alloc_fast_mr(&arena, 16).unwrap();
    assert_eq!(
        region
            .map_ranges(std::slice::from_ref(&(0..LEN)), 12)
            .unwrap(),
        1
    );
    let key = inc_rkey(region.key());
    let register = region.register_request(1, key, 0, ALL).unwrap();
    invalidator.qp.post_send(&[register]).unwrap();
    assert_eq!(invalidator.wc().status, WcStatus::SUCCESS);
    writer.fill(11);
    let source = [writer.mr.sge(0, LEN)];
    for number in 0..WRITES {
        let write = SendWr::write(number, SendData::Sges(&source), 0, key);
        writer.qp.post_send(&[write]).unwrap();
    }
    assert_eq!(writer.wc().status, WcStatus::SUCCESS);
    invalidator
        .qp
        .post_send(&[SendWr::local_inv(2, key)])
        .unwrap();
    assert_eq!(invalidator.wc().status, WcStatus::SUCCESS);
    let ours = vec![0x55; LEN];
    arena.write(0, &ours).unwrap();
    // Waits until all WRITEs are done, or one of them has ended the stream.
    let refused = (1..WRITES).any(|_| writer.wc().status != WcStatus::SUCCESS);
    let mut found = vec![0; LEN];
    arena.read(0, &mut found).unwrap();
    let changed = found.iter().filter(|byte| **byte != 0x55).count();
    assert_eq!(changed, 0, "bytes placed after the invalidation");
    refused
}

#[test]
fn nothing_is_placed_after_an_invalidation_completed() {
    skip_if!(two_cores());
    let pair = LOOPBACK.split_once("[[device]]").unwrap().1;
    let daemon = Daemon::start(&format!("{TWO}[[device]]{pair}"), &[]);
    let base = End::new(&daemon.context(), 64);
    let mut under_way = (0..24).filter(|_| race(&daemon, &base)).count();
    // On a busy machine the WRITEs sometimes, but not always, end first.
    let end = Instant::now() + PATIENCE;
    while under_way == 0 {
        assert!(Instant::now() < end, "no invalidation came in time");
        under_way += usize::from(race(&daemon, &base));
    }
    assert!(daemon.stop().success());
}
