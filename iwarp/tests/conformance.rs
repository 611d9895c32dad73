//! The conformance list is complete, and CONFORMANCE.md tells what the tests are.
#[path = "common/conformance.rs"]
mod conformance;
use conformance::*;

/// Numbers without a test of this crate alone: timers, and what a worker does.
const NOT_ALONE: [u32; 2] = [12, 13];

#[test]
fn every_number_has_its_tests_or_a_reason() {
    let tests = Tests::find();
    for (i, (n, ..)) in CASES.iter().enumerate() {
        assert_eq!(*n as usize, i + 1, "in order");
        let excused = NOT_ALONE.contains(n);
        assert_ne!(excused, tests.alone.contains_key(n), "number {n}");
        let excused = NOT_RUNNING.iter().any(|(m, _)| m == n);
        assert_ne!(excused, tests.running.contains_key(n), "number {n} live");
    }
    let mut all = tests.alone.keys().chain(tests.running.keys());
    let beyond = all.find(|n| !(1..=89).contains(*n));
    assert_eq!(beyond, None, "a test has a number that does not exist");
}

#[test]
fn numbers_are_read_from_the_names_of_tests() {
    assert_eq!(numbers("c55_c56_msn_replay"), [55, 56]);
    assert_eq!(numbers("c68_to_c72_a_read"), [68, 69, 70, 71, 72]);
    assert_eq!(numbers("c_on"), []);
    assert_eq!(numbers("crc_c5"), []);
}

/// The file says "pass": if a test fails, this suite fails with it.
#[test]
fn the_report_is_in_step_with_the_tests() {
    let want = render(|_| Some(true));
    let have = include_str!("../CONFORMANCE.md");
    assert!(
        have == want,
        "run `cargo run -p siw-iwarp --example conformance` and commit CONFORMANCE.md"
    );
}
