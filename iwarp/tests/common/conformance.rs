//! The numbered conformance list: what each number is about and what this crate does. The tests of a
//! number are those whose names start with it: `c55_c56_...`, `c68_to_c72_...`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Number, section, case, what siwd does.
pub const CASES: [(u32, &str, &str, &str); 89] = [
    (1, "5044 7.1.1", "wrong MPA key", "closes"),
    (2, "5044 7.1.2", "both sides initiate", "closes"),
    (3, "6581 7", "unsupported revision", "closes"),
    (
        4,
        "6581 7",
        "revision 1 requested",
        "replies with revision 1",
    ),
    (
        5,
        "6581 9",
        "S=0 requested",
        "replies with S=0; as initiator refuses S=1 unasked",
    ),
    (
        6,
        "6581 9",
        "S=1 requested",
        "replies with S=1; as initiator refuses S=0",
    ),
    (7, "5044 7.1.1", "PD_Length 0 and 512", "accepted"),
    (8, "5044 7.1.1", "PD_Length 513", "closes"),
    (9, "6581 9", "S=1 and PD_Length below 4", "closes"),
    (
        10,
        "5044 7.1.2",
        "octets behind a frame before they may be (RFC silent)",
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
        "who sends the first FPDU",
        "a responder waits for the initiator's",
    ),
    (20, "6581 9", "A=0", "B, C, D ignored"),
    (21, "6581 9", "A=1", "echoed with exactly one option"),
    (
        22,
        "6581 7",
        "no RTR kind in common",
        "initiator 2/0/07; responder rejects",
    ),
    (
        23,
        "6581 7",
        "responder's ORD above IRD",
        "raises IRD, beyond the device's limit 2/0/06",
    ),
    (24, "6581 9", "RTR Read with ORD 0", "IRD is at least 1"),
    (
        25,
        "6581 9.1",
        "IRD or ORD 0x3FFF",
        "echoed; own values stay",
    ),
    (
        26,
        "6581 7",
        "other local failure during set-up",
        "initiator 2/0/05: markers it may not send, CRC left out that it requires",
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
        "5044 4.3",
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
    (32, "5044 4.3", "low bits of FPDUPTR", "ignored"),
    (33, "5044 4.3", "reserved bits of a marker", "ignored"),
    (34, "5044 4", "FPDU split anywhere", "accepted"),
    (35, "5044 4", "several FPDUs in a segment", "accepted"),
    (
        36,
        "5044 8",
        "FIN or RST inside of an FPDU",
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
        "5040 5.2",
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
    (53, "5040 4.1", "opcode on another's QN", "1/2/01"),
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
    (61, "5040 4.6", "STag in a plain Send", "ignored"),
    (62, "5040 4.1", "wrong RDMAP version", "0/2/05"),
    (63, "5040 4.1", "reserved opcode", "0/2/06"),
    (
        64,
        "5040 4.2",
        "T bit against the opcode (RFC silent)",
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
        "5040 5.5",
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
        "5040 5.2",
        "zero-length Read, any STags",
        "empty response",
    ),
    (
        74,
        "5040 5.5",
        "more Reads and atomics than IRD (vendors differ)",
        "1/2/02",
    ),
    (75, "5040 7.2", "invalidate an unknown STag", "0/2/09"),
    (
        76,
        "5040 7.2",
        "invalidate an STag of another PD or stream",
        "0/1/09",
    ),
    (
        77,
        "5040 8.1.1",
        "invalidate what the peer may not use",
        "0/2/09",
    ),
    (
        78,
        "5040 4.8",
        "malformed Terminate",
        "local error, no answer",
    ),
    (79, "5040 4.8", "after a Terminate", "nothing is sent"),
    (80, "5040 4.8", "several errors", "the first is reported"),
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
        "updated to the position",
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
        "7306 6",
        "Immediate Data not of 8 octets (RFC silent)",
        "0/2/ff",
    ),
    (
        87,
        "7306 5",
        "Atomic Response",
        "matched by order and MSN, identifier reflected and checked",
    ),
    (88, "7306 5", "masked add", "carries stay within the fields"),
    (
        89,
        "7306 7",
        "Reads and atomics",
        "done and answered in the order of their requests",
    ),
];

/// Numbers without a test against a running siwd, and why.
pub const NOT_RUNNING: [(u32, &str); 0] = [];

/// The tests of each number.
pub struct Tests {
    /// Octets against this crate: name -> file.
    pub alone: BTreeMap<u32, Vec<(String, String)>>,
    /// Octets against a running siwd over a DPDK port.
    pub running: BTreeMap<u32, Vec<(String, String)>>,
}

impl Tests {
    /// From the sources.
    pub fn find() -> Tests {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let siwd = root.join("../dataplane/tests/conformance");
        Tests {
            alone: in_folders(vec![root.join("src"), root.join("tests")]),
            running: in_folders(vec![siwd]),
        }
    }
}

fn in_folders(mut folders: Vec<PathBuf>) -> BTreeMap<u32, Vec<(String, String)>> {
    let mut found: BTreeMap<u32, Vec<(String, String)>> = BTreeMap::new();
    while let Some(dir) = folders.pop() {
        for entry in std::fs::read_dir(&dir).expect("the sources are there") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let file = path.file_name().map(|f| f.to_string_lossy().into_owned());
            let mut is_test = false;
            for line in text.lines().map(str::trim) {
                if let Some(name) = line.strip_prefix("fn ").and_then(|l| l.split('(').next())
                    && is_test
                {
                    for n in numbers(name) {
                        let item = (name.to_string(), file.clone().unwrap_or_default());
                        found.entry(n).or_default().push(item);
                    }
                }
                is_test = line == "#[test]";
            }
        }
    }
    found.values_mut().for_each(|v| v.sort());
    found
}

/// The numbers at the start of a test's name.
pub fn numbers(name: &str) -> Vec<u32> {
    let mut out: Vec<u32> = Vec::new();
    let mut to = false;
    for part in name.split('_') {
        let n = part.strip_prefix('c').and_then(|d| d.parse().ok());
        match (n, out.last().copied()) {
            (Some(n), Some(from)) if to => out.extend(from + 1..=n),
            (Some(n), _) => out.push(n),
            (None, Some(_)) if part == "to" => {
                to = true;
                continue;
            }
            _ => break,
        }
        to = false;
    }
    out
}

/// CONFORMANCE.md. `passed`: whether the test of this name passed; `None` when it did not run.
pub fn render(passed: impl Fn(&str) -> Option<bool>) -> String {
    let tests = Tests::find();
    let mut out = String::from(
        "# Conformance of siwd\n\n\
         Written by `cargo run -p siw-iwarp --example conformance`, which runs the tests; a test keeps it\n\
         in step with the list and the names of the tests. Codes are layer/type/code of the Terminate.\n\
         Tests against a running siwd (`dataplane/tests/conformance`) send octets over a DPDK tap port\n\
         from a scripted peer and compare what comes back; those against the crate (`iwarp/`) run no device.\n\n\
         | # | RFC | case | siwd | result | against a running siwd | against the crate |\n\
         |---|---|---|---|---|---|---|\n",
    );
    let mut running = 0;
    let mut all = 0;
    for (n, rfc, case, does) in CASES {
        let at = |m: &BTreeMap<u32, Vec<(String, String)>>| m.get(&n).cloned().unwrap_or_default();
        let (live, alone) = (at(&tests.running), at(&tests.alone));
        let mut list = live.iter().chain(&alone).peekable();
        let result = if list.peek().is_none() {
            "not covered"
        } else if list.clone().all(|(t, _)| passed(t) == Some(true)) {
            all += 1;
            running += u32::from(!live.is_empty());
            "pass"
        } else if list.any(|(t, _)| passed(t) == Some(false)) {
            "FAIL"
        } else {
            "not run"
        };
        let names = |v: &[(String, String)]| {
            let v: Vec<String> = v.iter().map(|(t, f)| format!("`{t}` ({f})")).collect();
            v.join(", ")
        };
        let live = match NOT_RUNNING.iter().find(|(m, _)| *m == n) {
            Some((_, why)) => format!("no: {why}"),
            None => names(&live),
        };
        let alone = names(&alone);
        let _ = writeln!(
            out,
            "| {n} | {rfc} | {case} | {does} | {result} | {live} | {alone} |"
        );
    }
    let _ = writeln!(
        out,
        "\n{all} of {} pass, {running} of them against a running siwd.",
        CASES.len()
    );
    out
}
