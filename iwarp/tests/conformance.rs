//! The list of numbered tests is complete, and TESTS.md matches the tests.
#[path = "common/conformance.rs"]
mod conformance;
use std::collections::BTreeMap;

use conformance::*;

/// Numbers without a test in this crate: timers, and the behavior of a worker.
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

/// The file says "pass" without running the tests: if a test fails, its suite fails too.
#[test]
fn report_is_in_step_with_the_tests() {
    let want = render();
    let have = include_str!("../TESTS.md");
    assert!(
        have == want,
        "run `cargo run -p siw-iwarp --example conformance` (without root: `-- --names-only`) and \
         commit TESTS.md"
    );
}

#[test]
fn a_skipped_test_did_not_pass() {
    let printed = "test fpdus::c1_passes ... ok\ntest c2_fails ... FAILED\n\
                   test rdmap::c3_lacks_root ... ok\ntest c4_c5_prints ... ok\n\
                   test helper ... FAILED\n\nsuccesses:\n\n\
                   ---- rdmap::c3_lacks_root stdout ----\n\nskipped: needs root\n\n\
                   ---- c4_c5_prints stdout ----\nskipping nothing\n";
    let mut results = BTreeMap::new();
    read_outcomes(printed, &mut results);
    let expected = [
        ("c1_passes", TestOutcome::Passed),
        ("c2_fails", TestOutcome::Failed),
        ("c3_lacks_root", TestOutcome::Skipped("needs root".into())),
        ("c4_c5_prints", TestOutcome::Passed),
    ];
    let expected = expected.map(|(name, outcome)| (name.to_string(), outcome));
    assert_eq!(results, BTreeMap::from(expected));
}
