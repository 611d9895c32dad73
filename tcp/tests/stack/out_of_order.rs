//! An owner that reads segments beyond a hole sees each byte once, at its stream offset.

use std::time::Duration;

use crate::common::{Transfer, configs, micros};
use siw_tcp_sim::Impairment;

fn transfer(seed: u64, show: bool) -> Transfer {
    let mut link = Impairment::perfect(micros(100));
    link.loss = 0.03;
    link.reorder = 0.05;
    link.jitter = micros(80);
    link.duplicate = 0.02;
    let configs = configs().map(|mut config| {
        config.tcp.show_out_of_order = show;
        config
    });
    let mut transfer = Transfer::new(seed, configs, [link; 2], [300_000, 100_000]);
    transfer.connect(false);
    assert!(transfer.run(Duration::from_secs(60)), "seed {seed}");
    transfer
}

/// Each segment is reported with its distance from the first unread byte.
#[test]
fn out_of_order_segments_are_shown_once() {
    let mut shown = 0;
    for seed in 0..40 {
        let transfer = transfer(seed, true);
        for side in &transfer.sides {
            assert!(side.shown <= side.peer_goal, "seed {seed}: {}", side.shown);
            shown += side.shown;
        }
    }
    assert!(shown > 100_000, "{shown}");
}

#[test]
fn nobody_is_shown_anything_who_did_not_ask() {
    let transfer = transfer(3, false);
    assert_eq!(transfer.sides.each_ref().map(|side| side.shown), [0, 0]);
}
