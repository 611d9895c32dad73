//! The list of numbered tests: the subject of each number, and siwd's behaviour. The tests of a
//! number are those whose names start with it: `c55_c56_...`, `c68_to_c72_...`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Number, section, case, behaviour of siwd.
pub const CASES: [(u32, &str, &str, &str); 89] = [
    (1, "5044 7.1.1", "wrong MPA key", "closes"),
    (2, "5044 7.1.2", "both sides initiate", "closes"),
    (3, "6581 6, 10", "unsupported revision", "closes"),
    (
        4,
        "6581 6, 10",
        "revision 1 requested",
        "replies with revision 1",
    ),
    (
        5,
        "6581 6, 10",
        "S=0 requested",
        "replies with S=0; as initiator refuses S=1 unasked",
    ),
    (
        6,
        "6581 6, 10",
        "S=1 requested",
        "replies with S=1; as initiator refuses S=0",
    ),
    (7, "5044 7.1.1", "PD_Length 0 and 512", "accepted"),
    (8, "5044 7.1.1", "PD_Length 513", "closes"),
    (9, "6581 6, 10", "S=1 and PD_Length below 4", "closes"),
    (
        10,
        "5044 7.1.2",
        "octets after a frame, too early (RFC silent)",
        "closes",
    ),
    (11, "5044 7.1", "frames in one-octet fragments", "accepted"),
    (
        12,
        "5044 7.1.2",
        "no request in time",
        "the worker closes after `request_timeout_ms`",
    ),
    (
        13,
        "5044 7.1.2",
        "no reply in time",
        "the worker closes after `reply_timeout_ms`",
    ),
    (14, "5044 7.1.1", "reserved bits in a frame", "ignored"),
    (15, "5044 7.1.1", "R in a request", "ignored"),
    (
        16,
        "5044 7.1.1",
        "R in a reply",
        "rejected; private data goes to the consumer",
    ),
    (
        17,
        "5044 4.3, 7.1.1",
        "M=1",
        "sends markers (policy: never, accept, request)",
    ),
    (
        18,
        "5044 7.1.1",
        "C bits of both sides",
        "CRC unless both are 0",
    ),
    (
        19,
        "5044 7.1.2",
        "order of the first FPDUs",
        "a responder waits for the initiator's",
    ),
    (20, "6581 9.2", "A=0", "B, C, D ignored"),
    (21, "6581 9.2", "A=1", "echoed with exactly one option"),
    (
        22,
        "6581 8, 9.2",
        "no RTR kind in common",
        "initiator 2/0/07; responder rejects",
    ),
    (
        23,
        "6581 8, 9.1",
        "responder's ORD above IRD",
        "raises IRD, beyond the device's limit 2/0/06",
    ),
    (24, "6581 9.1", "RTR Read with ORD 0", "IRD is at least 1"),
    (
        25,
        "6581 9.1",
        "IRD or ORD 0x3FFF",
        "echoed; own values stay",
    ),
    (
        26,
        "6581 8, 9.3",
        "other local failure during set-up",
        "initiator 2/0/05: reply requests markers that it may not send, or omits the CRC that it requires",
    ),
    (27, "5044 4.4, 8", "bad CRC", "2/0/02, nothing placed"),
    (
        28,
        "5044 4.4",
        "CRC off",
        "any CRC field accepted, zero sent",
    ),
    (
        29,
        "5044 4.1",
        "non-zero pad",
        "ignored, and covered by the CRC",
    ),
    (
        30,
        "5044 8",
        "ULPDU shorter than its header (RFC silent)",
        "2/0/03",
    ),
    (
        31,
        "5044 4.3, 8",
        "marker points elsewhere",
        "2/0/03, nothing placed",
    ),
    (32, "5044 4.2", "low bits of FPDUPTR", "ignored"),
    (33, "5044 4.2", "reserved bits of a marker", "ignored"),
    (34, "5044 5.1, 6", "FPDU split anywhere", "accepted"),
    (35, "5044 5.1, 6", "several FPDUs in a segment", "accepted"),
    (
        36,
        "5044 8",
        "FIN or RST inside an FPDU",
        "local 2/0/01, abort",
    ),
    (37, "5044 8", "second error", "not reported"),
    (38, "5041 4.1, 7.1", "tagged, wrong DDP version", "1/1/04"),
    (39, "5041 4.1", "reserved bits of DDP and RDMAP", "ignored"),
    (40, "5041 7.1", "Write to an unknown STag", "1/1/00"),
    (41, "5041 7.1", "Write with a stale key", "1/1/00"),
    (
        42,
        "5041 7.1",
        "Write to an invalidated or deregistered STag",
        "1/1/00, also in mid-message",
    ),
    (43, "5041 7.1", "Write to memory of another PD", "1/1/02"),
    (
        44,
        "5041 7.1",
        "Write to memory of another stream",
        "1/1/02",
    ),
    (45, "5041 7.1", "TO below the base", "1/1/01"),
    (46, "5041 7.1", "one octet beyond the end", "1/1/01"),
    (47, "5041 7.1", "TO wraps", "1/1/03"),
    (48, "5040 7.2", "no write access (vendors differ)", "0/1/02"),
    (
        49,
        "5041 5.2",
        "zero-length Write with a bad STag",
        "accepted",
    ),
    (
        50,
        "5041 5.3",
        "gap in TO within a Write (vendors differ)",
        "accepted",
    ),
    (51, "5041 4.1, 7.1", "untagged, wrong DDP version", "1/2/06"),
    (52, "5041 7.1", "QN of 4 or more", "1/2/01"),
    (53, "5040 4.1", "opcode on the wrong queue", "1/2/01"),
    (54, "5041 7.1", "no receive buffer", "1/2/02"),
    (55, "5041 7.1", "MSN replayed", "1/2/03"),
    (56, "5041 7.1", "MSN skipped", "1/2/03"),
    (57, "5041 4.3", "MSN after 0xFFFFFFFF", "0"),
    (58, "5041 7.1", "wrong MO", "1/2/04"),
    (
        59,
        "5041 7.1",
        "message longer than its buffer",
        "1/2/05; the receive fails with LOC_LEN_ERR",
    ),
    (
        60,
        "5040 5.3",
        "zero-length Send",
        "consumes a receive work request",
    ),
    (61, "5040 4.1", "STag in a plain Send", "ignored"),
    (62, "5040 4.1", "wrong RDMAP version", "0/2/05"),
    (63, "5040 4.1", "reserved opcode", "0/2/06"),
    (
        64,
        "5040 4.2",
        "T bit does not match the opcode (RFC silent)",
        "0/2/06",
    ),
    (
        65,
        "5040 5.5",
        "unsolicited Read Response (RFC silent)",
        "0/2/06",
    ),
    (
        66,
        "5040 5.2.2",
        "Read Response that does not match",
        "1/1/00 or 1/1/01; BAD_RESP_ERR",
    ),
    (
        67,
        "5040 4.4",
        "Read Request of another length (RFC silent)",
        "0/2/ff",
    ),
    (68, "5040 7.2", "Read from an unknown STag", "0/1/00"),
    (69, "5040 7.2", "Read from another PD", "0/1/03"),
    (70, "5040 7.2", "Read without read access", "0/1/02"),
    (71, "5040 7.2", "Read out of bounds", "0/1/01"),
    (72, "5040 7.2", "Read with TO that wraps", "0/1/04"),
    (
        73,
        "5040 5.2.1",
        "zero-length Read, any STags",
        "empty response",
    ),
    (
        74,
        "5040 6.1",
        "more Reads and atomics than IRD (vendors differ)",
        "1/2/02",
    ),
    (75, "5040 5.3, 7.2", "invalidate an unknown STag", "0/2/09"),
    (
        76,
        "5040 5.3, 7.2",
        "invalidate an STag of another PD or stream",
        "0/1/09",
    ),
    (
        77,
        "5040 8.1.1",
        "invalidate an STag that the peer may not use",
        "0/2/09",
    ),
    (
        78,
        "5040 4.8",
        "malformed Terminate",
        "local error, no answer",
    ),
    (79, "5040 5.4", "after a Terminate", "nothing is sent"),
    (80, "5040 7.1", "several errors", "the first is reported"),
    (
        81,
        "5040 4.8",
        "M, D, R of a Terminate",
        "as figure 10; R for Read Requests only",
    ),
    (
        82,
        "5040 4.8",
        "Read Request quoted in mid-read",
        "updated to the current position; reset if an unsent segment cannot be built any more",
    ),
    (
        83,
        "5040 4.8",
        "local catastrophic error",
        "0/0/00 without headers",
    ),
    (84, "7306 5", "unaligned atomic", "0/2/07, memory unchanged"),
    (
        85,
        "7306 5",
        "unknown atomic opcode (RFC silent)",
        "0/2/06, memory unchanged",
    ),
    (
        86,
        "7306 6.3",
        "Immediate Data not of 8 octets (RFC silent)",
        "0/2/ff",
    ),
    (
        87,
        "7306 5.2.2",
        "Atomic Response",
        "matched by order and MSN, identifier reflected and checked",
    ),
    (88, "7306 5", "masked add", "carries stay within the fields"),
    (
        89,
        "7306 7",
        "Reads and atomics",
        "executed and answered in request order",
    ),
];

/// Numbers without a test against a running siwd, each with the reason.
pub const NOT_RUNNING: [(u32, &str); 0] = [];

/// Name of a test, and the file that contains it.
pub type NamedTest = (String, String);

/// The tests of each number.
pub struct NumberedTests {
    /// Octet-level tests of this crate.
    pub alone: BTreeMap<u32, Vec<NamedTest>>,
    /// Octet-level tests of a running siwd over a DPDK port.
    pub running: BTreeMap<u32, Vec<NamedTest>>,
}

impl NumberedTests {
    /// Finds the tests in the sources.
    pub fn find() -> NumberedTests {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let siwd = root.join("../dataplane/tests/conformance");
        NumberedTests {
            alone: find_in_folders(vec![root.join("src"), root.join("tests")]),
            running: find_in_folders(vec![siwd]),
        }
    }
}

fn find_in_folders(mut folders: Vec<PathBuf>) -> BTreeMap<u32, Vec<NamedTest>> {
    let mut found: BTreeMap<u32, Vec<NamedTest>> = BTreeMap::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the sources are there") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            for name in test_names(&text) {
                for number in numbers_of(name) {
                    let test = (name.to_string(), file.to_string());
                    found.entry(number).or_default().push(test);
                }
            }
        }
    }
    found.values_mut().for_each(|tests| tests.sort());
    found
}

/// Names of the functions after `#[test]`.
fn test_names(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if is_test && let Some(function) = line.strip_prefix("fn ") {
            names.extend(function.split('(').next());
        }
        is_test = line == "#[test]";
    }
    names
}

/// The numbers at the start of a test's name.
pub fn numbers_of(name: &str) -> Vec<u32> {
    let mut numbers: Vec<u32> = Vec::new();
    let mut is_range = false;
    for part in name.split('_') {
        let number = part
            .strip_prefix('c')
            .and_then(|digits| digits.parse().ok());
        match (number, numbers.last().copied()) {
            (Some(number), Some(from)) if is_range => numbers.extend(from + 1..=number),
            (Some(number), _) => numbers.push(number),
            (None, Some(_)) if part == "to" => {
                is_range = true;
                continue;
            }
            _ => break,
        }
        is_range = false;
    }
    numbers
}

const HEADER: &str = "\
# Numbered tests of siwd's protocol

`CONFORMANCE.md` has the verdicts of siw-lab, which judges from outside. These tests also see the memory, the
completions and the events of siwd's own side. Written by `cargo run -p siw-iwarp --example conformance`, which
runs them; a test checks the list against the names of the tests. Codes are layer/type/code of the Terminate.
Tests against a running siwd (`dataplane/tests/conformance`) use a scripted peer that sends octets
over a DPDK tap port and compares the response; those against the crate (`iwarp/`) use no device.
`PROTOCOL.md` lists the open points of the RFCs and siwd's choices.

| # | RFC | case | siwd | result | against a running siwd | against the crate |
|---|---|---|---|---|---|---|
";

/// Renders TESTS.md. Every case that has tests is marked "pass": a failing test fails its
/// suite, and CI allows no skipped tests.
pub fn render() -> String {
    let tests = NumberedTests::find();
    let mut out = String::from(HEADER);
    let mut passed_running = 0;
    let mut passed = 0;
    for (number, rfc, case, behaviour) in CASES {
        let running = tests.running.get(&number).cloned().unwrap_or_default();
        let alone = tests.alone.get(&number).cloned().unwrap_or_default();
        let result = if running.is_empty() && alone.is_empty() {
            "not covered"
        } else {
            passed += 1;
            passed_running += u32::from(!running.is_empty());
            "pass"
        };
        let running = match NOT_RUNNING.iter().find(|(excused, _)| *excused == number) {
            Some((_, why)) => format!("no: {why}"),
            None => format_tests(&running),
        };
        let alone = format_tests(&alone);
        let _ = writeln!(
            out,
            "| {number} | {rfc} | {case} | {behaviour} | {result} | {running} | {alone} |"
        );
    }
    let _ = writeln!(
        out,
        "\n{passed} of {} pass, {passed_running} of them against a running siwd.",
        CASES.len()
    );
    out
}

/// Outcome of a numbered test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TestOutcome {
    Passed,
    Failed,
    /// Skipped for this reason.
    Skipped(String),
}

/// Reads the outcomes of the numbered tests from the output of `cargo test -- --show-output`: one
/// line for each test, followed by the output of each test under its name.
pub fn read_outcomes(printed: &str, results: &mut BTreeMap<String, TestOutcome>) {
    let last_name = |path: &str| path.rsplit("::").next().unwrap_or(path).to_string();
    let mut printing = String::new();
    for line in printed.lines() {
        if let Some((path, outcome)) = line
            .strip_prefix("test ")
            .and_then(|line| line.split_once(" ... "))
        {
            let name = last_name(path);
            if numbers_of(&name).is_empty() {
                continue;
            }
            let outcome = match outcome {
                "ok" => TestOutcome::Passed,
                outcome if outcome.starts_with("ignored") => TestOutcome::Skipped(outcome.into()),
                _ => TestOutcome::Failed,
            };
            // All tests with the same name must pass.
            let known = results.entry(name).or_insert(TestOutcome::Passed);
            if *known == TestOutcome::Passed {
                *known = outcome;
            }
        } else if let Some(path) = line.strip_prefix("---- ") {
            printing = last_name(path.strip_suffix(" stdout ----").unwrap_or(path));
        } else if let Some(why) = line.strip_prefix("skipped: ")
            && let Some(outcome) = results.get_mut(&printing)
            && *outcome == TestOutcome::Passed
        {
            *outcome = TestOutcome::Skipped(why.into());
        }
    }
}

fn format_tests(tests: &[NamedTest]) -> String {
    let tests: Vec<String> = tests
        .iter()
        .map(|(name, file)| format!("`{name}` ({file})"))
        .collect();
    tests.join(", ")
}
