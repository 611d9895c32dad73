//! The parser of case files, and the case files.

use std::collections::BTreeSet;
use std::path::Path;

use siw_lab::case::{Expr, StepKind, Term, Value, built_in, parse};
use siw_lab::conformance;
use siw_lab::expect::Peer;
use siw_lab::suite::{Instance, order};

const HEAD: &str = "case X-1 \"title\"\nrfc 5041 7.1 MUST \"sentence\"\n";

fn error(steps: &str) -> String {
    parse("X-1.case", &format!("{HEAD}{steps}"))
        .unwrap_err()
        .to_string()
}

#[test]
fn built_in_cases_are_right_and_unique() {
    let cases = built_in().unwrap();
    let ids: BTreeSet<_> = cases.iter().map(|c| &c.id).collect();
    assert_eq!(ids.len(), cases.len());
    for case in &cases {
        let stem = Path::new(&case.file).file_stem().unwrap().to_str().unwrap();
        assert_eq!(stem, case.id, "the file is named by its case");
        assert_eq!(
            Path::new(&case.file).parent().unwrap().to_str().unwrap(),
            case.group()
        );
    }
}

#[test]
fn cases_with_an_impaired_path_come_last_of_their_target() {
    let cases = built_in().unwrap();
    let instance = |case| Instance {
        case,
        params: Vec::new(),
    };
    let mut instances: Vec<_> = cases.iter().map(instance).collect();
    order(&mut instances, true);
    let run: Vec<_> = instances.iter().map(|instance| instance.case).collect();
    for target in run.chunk_by(|a, b| a.settings == b.settings) {
        assert!(target.is_sorted_by_key(|case| case.impairs_path()));
    }
    let place = |id| run.iter().position(|case| case.id == id).unwrap();
    assert!(run[0].settings.is_empty());
    assert!(place("IMP-05") > place("TCP-07") && place("TCP-07") > place("TCP-06"));
}

#[test]
fn errors_name_file_and_line() {
    let expected = [
        (
            "send wrote\nwant close",
            "X-1.case:3: send wrote is unknown",
        ),
        ("send write\nwant closed", "X-1.case:4: closed is unknown"),
        (
            "send write stag=$y\nwant close",
            "X-1.case:3: variable $y is unknown",
        ),
        (
            "send write stag=0xg\nwant close",
            "X-1.case:3: 0xg is not a number",
        ),
        (
            "send write tso=1\nwant close",
            "X-1.case:3: field tso is unknown here",
        ),
        (
            "send write to=1 to=2\nwant close",
            "X-1.case:3: field to is given twice",
        ),
        (
            "send write data=0xabc\nwant close",
            "X-1.case:3: 0xabc: pairs of hexadecimal digits",
        ),
        (
            "send write\nwant terminate 1/1",
            "X-1.case:4: 1/1 is no code like 1/1/00",
        ),
        (
            "send write\nwant close note bad",
            "X-1.case:4: a quoted text belongs behind note",
        ),
        (
            "also close",
            "X-1.case:3: also belongs below a line with want or then",
        ),
        (
            "role peer",
            "X-1.case:3: expected: role responder, or role initiator",
        ),
        (
            "start mpa",
            "X-1.case:3: expected: start nothing, tcp, stream, region, agent, asked, listening, calling, streaming or opened",
        ),
        ("param n in 5..2", "X-1.case:3: 5..2 is no range like 0..15"),
        ("param n of 5", "X-1.case:3: expected: param NAME in VALUE"),
        ("lose", "X-1.case:3: expected: lose NUMBER"),
        (
            "settings crc=off",
            "X-1.case:3: crc=off is no setting like mpa.crc=off",
        ),
        ("wait 5", "X-1.case:3: 5 is no time like"),
        ("want reply ird~4", "X-1.case:3: ird~4 is no comparison"),
        ("want close within=5", "X-1.case:3: 5 is no time like"),
        ("remark \"open", "X-1.case:3: a quotation mark is missing"),
        (
            "send write",
            "X-1.case:1: case X-1 lacks a line beginning with want",
        ),
        ("\n\n# comment\nfrob", "X-1.case:6: frob is unknown"),
        (
            "repeat 2\nsend write\nwant close",
            "X-1.case:1: repeat without done",
        ),
        (
            "repeat 2\nrepeat 2",
            "X-1.case:4: expected: repeat COUNT, not within another",
        ),
        ("done", "X-1.case:3: done is unknown"),
        ("send write to=$i", "X-1.case:3: variable $i is unknown"),
        ("send write to=$r.base*x", "X-1.case:3: x is not a number"),
        ("when n=1 want close", "X-1.case:3: n is no parameter"),
        (
            "param n in 1\nwhen n=1",
            "X-1.case:4: expected: when NAME=VALUE STEP",
        ),
        (
            "param n in 1\nwhen n=1 smoke",
            "X-1.case:4: smoke is no step",
        ),
        ("stream 3", "X-1.case:3: expected: stream 1, or stream 2"),
        ("want close past=x", "X-1.case:3: past=x is unknown"),
    ];
    for (steps, text) in expected {
        let got = error(steps);
        assert!(got.starts_with(text), "{steps}: {got}");
    }
    assert!(
        parse("f", "")
            .unwrap_err()
            .to_string()
            .starts_with("f:1: no case")
    );
    assert!(
        parse("f", "want close")
            .unwrap_err()
            .to_string()
            .contains("f:1: the first line has to be")
    );
    assert!(
        parse("f", "case A-1 \"t\"\nwant close")
            .unwrap_err()
            .to_string()
            .contains("lacks a line beginning with rfc")
    );
    assert!(
        parse("f", "case A-1 \"t\"\nrfc 1 2 WILL \"s\"")
            .unwrap_err()
            .to_string()
            .contains("level WILL is unknown")
    );
}

#[test]
fn continued_lines_are_one() {
    let case = parse(
        "f",
        &format!("{HEAD}send write\n  stag=1\n\tto=2\nwant close\n"),
    )
    .unwrap();
    assert_eq!(case.steps.len(), 2);
    assert_eq!(case.steps[0].source, "send write stag=1 to=2");
}

#[test]
fn parameters_are_combined() {
    let case = parse(
        "f",
        &format!("{HEAD}param a in 1 2\nparam b in 0..2\nwant close\n"),
    )
    .unwrap();
    assert_eq!(case.instances().len(), 6);
}

#[test]
fn octets_are_joined_and_steps_depend_on_parameters() {
    let steps = "param n in 1 2\nrepeat 2\nwhen n=2 send write data=len:2,long:$i*8+1,0xff\ndone\nwant close\n";
    let case = parse("f", &format!("{HEAD}{steps}")).unwrap();
    assert_eq!(case.steps.len(), 4);
    assert_eq!(case.steps[1].when, Some(("n".into(), 2)));
    let StepKind::Send { fields, .. } = &case.steps[1].kind else {
        panic!("{:?}", case.steps[1]);
    };
    let number = |value| Expr(vec![(true, Term::Number(value))]);
    let value = Expr(vec![
        (true, Term::Product("i".into(), 8)),
        (true, Term::Number(1)),
    ]);
    let is_native = false;
    assert_eq!(
        fields["data"],
        Value::Parts(vec![
            Value::Pattern(number(2)),
            Value::Long { value, is_native },
            Value::Octets(vec![0xFF]),
        ])
    );
}

#[test]
fn missing_cases_are_missing() {
    let cases = built_in().unwrap();
    for missing in siw_lab::catalogue::missing().unwrap() {
        assert!(
            cases.iter().all(|case| case.id != missing.case),
            "{} exists: delete its line in benches/lab/catalogue",
            missing.case
        );
    }
}

#[test]
fn the_readme_counts_the_cases() {
    let cases = built_in().unwrap();
    let missing = siw_lab::catalogue::missing().unwrap().len();
    let passive = cases.iter().filter(|case| !case.needs_agent()).count();
    let wanted = format!(
        "{} case files of {} in the catalogue, {passive} of them in passive mode",
        cases.len(),
        cases.len() + missing
    );
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let text = std::fs::read_to_string(readme).unwrap();
    assert!(text.contains(&wanted), "benches/lab/README.md: {wanted}");
}

/// The file says what a run without news would: `siw-lab conformance` writes it from such a run.
#[test]
fn conformance_of_siwd_is_current() {
    let lab = Path::new(env!("CARGO_MANIFEST_DIR"));
    let peer = Peer::read(&lab.join("peers/siwd.toml"), &built_in().unwrap()).unwrap();
    let wanted = conformance::expected(built_in().unwrap(), &peer).unwrap();
    let have = std::fs::read_to_string(lab.join("../../iwarp/CONFORMANCE.md")).unwrap();
    assert!(
        have == wanted,
        "run `deploy/lab/full --publish siwd` and commit iwarp/CONFORMANCE.md"
    );
}

#[test]
fn peer_files_are_right() {
    let cases = built_in().unwrap();
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")).unwrap() {
        let peer = Peer::read(&entry.unwrap().path(), &cases).unwrap();
        for expected in peer.expect {
            assert!(!expected.reason.is_empty(), "{}", expected.case);
        }
    }
}
