//! Limit on external memory regions, in a process of its own because the test uses all of them.

mod common;

use std::sync::Arc;

use common::eal;
use dpdk::{ExtMemory, ExternalRegion, IovaSpace, OwnedMemory, external_regions_left};

#[test]
fn the_limit_is_named_before_dpdk_fails() {
    let space = IovaSpace::new(48);
    let register = || {
        let memory: Arc<dyn ExtMemory> = Arc::new(OwnedMemory::new(4096));
        ExternalRegion::register(eal(), memory, 4096, 4096, &space)
    };
    eal();
    let room = external_regions_left();
    assert!(
        (16..128).contains(&room),
        "{room} of 128, less what EAL has"
    );
    let mut regions: Vec<_> = (0..room).map(|_| register().unwrap()).collect();
    assert_eq!(external_regions_left(), 0);
    let refused = register().map(|_| ()).unwrap_err().to_string();
    assert!(
        refused.contains("all 128 of DPDK's lists of memory (RTE_MAX_MEMSEG_LISTS) are in use")
            && refused.contains("tx_payload = \"copy\""),
        "{refused}"
    );
    regions.pop();
    regions.push(register().unwrap());
    drop(regions);
    assert_eq!(external_regions_left(), room);
}
