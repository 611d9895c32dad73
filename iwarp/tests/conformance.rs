//! The conformance list is complete, and CONFORMANCE.md tells what the tests are.
#[path = "common/conformance.rs"]
mod conformance;
use conformance::*;

/// Numbers without a test of this crate alone: timers, and what a worker does.
const NOT_ALONE: [u32; 2] = [12, 13];

#[test]
fn every_number_has_its_tests_or_a_reason() {
    let tests = NumberedTests::find();
    for (index, (number, ..)) in CASES.iter().enumerate() {
        assert_eq!(*number as usize, index + 1, "in order");
        let is_excused = NOT_ALONE.contains(number);
        assert_ne!(is_excused, tests.alone.contains_key(number), "{number}");
        let is_excused = NOT_RUNNING.iter().any(|(excused, _)| excused == number);
        let is_running = tests.running.contains_key(number);
        assert_ne!(is_excused, is_running, "{number} against a running siwd");
    }
    let mut all = tests.alone.keys().chain(tests.running.keys());
    let unknown = all.find(|number| !(1..=89).contains(*number));
    assert_eq!(unknown, None, "a test has a number that does not exist");
}

#[test]
fn numbers_are_read_from_the_names_of_tests() {
    assert_eq!(numbers_of("c55_c56_msn_replay"), [55, 56]);
    assert_eq!(numbers_of("c68_to_c72_a_read"), [68, 69, 70, 71, 72]);
    assert_eq!(numbers_of("c_on"), []);
    assert_eq!(numbers_of("crc_c5"), []);
}

/// The file says "pass": if a test fails, this suite fails with it.
#[test]
fn report_is_in_step_with_the_tests() {
    let want = render(|_| Some(true));
    let have = include_str!("../CONFORMANCE.md");
    assert!(
        have == want,
        "run `cargo run -p siw-iwarp --example conformance` (without root: `-- --names-only`) and \
         commit CONFORMANCE.md"
    );
}
