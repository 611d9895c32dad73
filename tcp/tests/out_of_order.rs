//! An owner that wants to see segments beyond a hole is shown each byte once, at its place.

mod common;

use std::time::Duration;

use common::{Transfer, configs, micros};
use siw_tcp::sim::Impairment;

fn transfer(seed: u64, show: bool) -> Transfer {
    let mut link = Impairment::perfect(micros(100));
    link.loss = 0.03;
    link.reorder = 0.05;
    link.jitter = micros(80);
    link.duplicate = 0.02;
    let configs = configs().map(|mut c| {
        c.show_out_of_order = show;
        c
    });
    let mut t = Transfer::new(seed, configs, [link; 2], [300_000, 100_000]);
    t.connect(false);
    assert!(t.run(Duration::from_secs(60)), "seed {seed}");
    t
}

/// With their distance from the first unread byte.
#[test]
fn out_of_order_segments_are_shown_once() {
    let mut shown = 0;
    for seed in 0..40 {
        let t = transfer(seed, true);
        for s in &t.sides {
            assert!(s.shown <= s.peer_goal, "seed {seed}: {}", s.shown);
            shown += s.shown;
        }
    }
    assert!(shown > 100_000, "{shown}");
}

#[test]
fn nobody_is_shown_anything_who_did_not_ask() {
    let t = transfer(3, false);
    assert_eq!(t.sides.each_ref().map(|s| s.shown), [0, 0]);
}
