//! The generator of `siw_tcp::sim::seeds`: 10,000 seeds, in shares that run side by side.
//! `SIW_TCP_SEEDS=n` runs n in all, `SIW_TCP_FIRST_SEED=n` begins elsewhere;
//! `cargo run -p siw-tcp --release --example soak` runs as many as one likes.

use siw_tcp::sim::seeds::{FRAMES_SHOWN, SeedOutcome, run_seed};

const SEEDS: u64 = 10_000;
const SHARES: u64 = 4;

fn number_from(variable: &str, default: u64) -> u64 {
    let value = std::env::var(variable).ok();
    value
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

fn run_share(share: u64) {
    let (seeds, first) = (
        number_from("SIW_TCP_SEEDS", SEEDS),
        number_from("SIW_TCP_FIRST_SEED", 0),
    );
    let mut sum = SeedOutcome::default();
    let mut count = 0;
    for seed in (first + share..first + seeds).step_by(SHARES as usize) {
        match run_seed(seed, FRAMES_SHOWN) {
            Ok(outcome) => sum.add(&outcome),
            Err(failure) => panic!("{failure}"),
        }
        count += 1;
    }
    println!("{count} seeds: {sum:?}");
    if count >= 500 {
        // Everything that the generator can do happens.
        for (name, value) in sum.rows() {
            assert!(value > 0, "no {name}");
        }
        assert!(
            sum.wraps > count,
            "sequence numbers wrap in nearly every run"
        );
    }
}

#[test]
#[ignore = "until what it finds is mended"]
fn seeds_of_the_first_share_break_no_rule() {
    run_share(0);
}

#[test]
#[ignore = "until what it finds is mended"]
fn seeds_of_the_second_share_break_no_rule() {
    run_share(1);
}

#[test]
#[ignore = "until what it finds is mended"]
fn seeds_of_the_third_share_break_no_rule() {
    run_share(2);
}

#[test]
#[ignore = "until what it finds is mended"]
fn seeds_of_the_fourth_share_break_no_rule() {
    run_share(3);
}
