//! The conformance list is complete, and CONFORMANCE.md tells what the tests are.
#[path = "common/conformance.rs"]
mod conformance;
use conformance::*;

#[test]
fn every_number_has_a_test_or_a_reason() {
    let tests = tests_by_number();
    for (i, (n, ..)) in CASES.iter().enumerate() {
        assert_eq!(*n as usize, i + 1, "in order");
        let excused = NOT_COVERED.iter().any(|(m, _)| m == n);
        assert_ne!(excused, tests.contains_key(n), "number {n}");
    }
    let beyond = tests.keys().find(|n| !(1..=89).contains(*n));
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
