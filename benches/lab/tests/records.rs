//! What a run leaves: captures, and reports that later commands read.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use siw_lab::capture::check;

fn lab(folder: &Path, line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_siw-lab"))
        .current_dir(folder)
        .args(line.split_whitespace())
        .output()
        .unwrap()
}

#[track_caller]
fn ends(got: &Output, status: i32) -> String {
    let said = String::from_utf8_lossy(&got.stdout).into_owned();
    let error = String::from_utf8_lossy(&got.stderr);
    assert_eq!(got.status.code(), Some(status), "{said}{error}");
    said
}

fn captures(folder: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder.join("captures")).unwrap();
    let mut all: Vec<_> = all.map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

const RIGHT: &str =
    "run --via reference --seed 5 --case TAG-01,RD-01 --all-captures --output right";

#[test]
fn a_capture_is_judged_by_the_rules_for_senders() {
    let folder = tempfile::tempdir().unwrap();
    ends(&lab(folder.path(), RIGHT), 0);
    for file in captures(&folder.path().join("right")) {
        let connections = check(&file).unwrap();
        assert_eq!(connections.len(), 1);
        assert!(
            connections[0].findings.is_empty(),
            "{:?}",
            connections[0].findings
        );
        assert!(connections[0].messages.len() > 5);
    }
    for (lie, finding) in [
        ("dirty-pad", "pad not zero"),
        ("bad-own-crc", "CRC wrong"),
        ("read-wrong-sink", "does not match its Read"),
    ] {
        let line = format!("run --via reference --seed 5 --lie {lie} --case RD-01 --output {lie}");
        ends(&lab(folder.path(), &line), 1);
        let file = captures(&folder.path().join(lie)).remove(0);
        let said = ends(&lab(folder.path(), &format!("check {}", file.display())), 1);
        assert!(said.contains(finding), "{said}");
    }
}

#[test]
fn a_peer_file_says_how_often_a_verdict_was_seen() {
    let folder = tempfile::tempdir().unwrap();
    let run = |rest: &str| {
        lab(
            folder.path(),
            &format!("run --via reference --seed 5 --case RD-01 {rest}"),
        )
    };
    let peer_of = |rest: &str| {
        let said = ends(
            &lab(folder.path(), &format!("peer {rest} --from head.toml")),
            0,
        );
        std::fs::write(folder.path().join("peer.toml"), &said).unwrap();
        said
    };
    let (wrong, right) = (
        "--lie read-wrong-sink --expect peer.toml",
        "--expect peer.toml",
    );
    std::fs::write(
        folder.path().join("head.toml"),
        "peer = \"one of chance\"\n",
    )
    .unwrap();
    ends(&run("--lie read-wrong-sink --output wrong"), 1);
    ends(&run("--output right"), 0);

    let said = peer_of("wrong --again right --again right");
    assert!(said.contains("seen = \"1 of 3\""), "{said}");
    ends(&run(&format!("{wrong} --output a")), 0);
    ends(&run(&format!("{right} --output b")), 0);
    // A verdict that does not depend on chance is news when it is better, too.
    let said = peer_of("wrong --again wrong");
    assert!(!said.contains("seen ="), "{said}");
    ends(&run(&format!("{wrong} --output c")), 0);
    ends(&run(&format!("{right} --output d")), 1);
}

#[test]
fn tshark_decodes_the_same_messages() {
    if Command::new("tshark").arg("--version").output().is_err() {
        println!("skipped: no tshark");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    ends(&lab(folder.path(), RIGHT), 0);
    for file in captures(&folder.path().join("right")).iter().step_by(8) {
        let fields = ["frame.number", "iwarp_mpa.ulpdulength", "iwarp_rdma.opcode"];
        let fields = fields.iter().flat_map(|field| ["-e", field]);
        let got = Command::new("tshark")
            .args(["-Y", "iwarp_mpa.ulpdulength", "-T", "fields", "-r"])
            .arg(file)
            .args(fields)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&got.stdout);
        let mut theirs = Vec::new();
        for line in said.lines() {
            let columns: Vec<_> = line.split('\t').collect();
            for (length, opcode) in columns[1].split(',').zip(columns[2].split(',')) {
                theirs.push(format!(
                    "frame {} length {length} opcode {opcode}",
                    columns[0]
                ));
            }
        }
        let connections = check(file).unwrap();
        let ours: Vec<_> = connections[0]
            .messages
            .iter()
            .map(|m| {
                format!(
                    "frame {} length {} opcode {:#04x}",
                    m.frame, m.ulpdu_length, m.opcode
                )
            })
            .collect();
        assert_eq!(theirs, ours, "{}", file.display());
    }
}

#[test]
fn runs_are_compared_and_tabled() {
    let folder = tempfile::tempdir().unwrap();
    let cases = "--case TAG-10,TAG-20,MPA-12 --seed 5";
    let line = format!("run --via reference {cases} --output runs/right");
    ends(&lab(folder.path(), &line), 0);
    let line = format!("run --via reference {cases} --lie no-bounds --output runs/wrong");
    ends(&lab(folder.path(), &line), 1);
    let said = ends(&lab(folder.path(), "compare runs/right runs/wrong"), 1);
    assert!(said.contains("broken: 1\n  TAG-20: pass -> fail"), "{said}");
    let said = ends(&lab(folder.path(), "compare runs/wrong runs/right"), 0);
    assert!(said.contains("fixed: 1\n  TAG-20: fail -> pass"), "{said}");
    let said = ends(&lab(folder.path(), "compare runs/right runs/right"), 0);
    assert!(said.starts_with("3 of 3 instances as before"), "{said}");
    let said = ends(&lab(folder.path(), "matrix runs"), 0);
    assert!(
        said.contains("| TAG | 2/2 | - | 1/2, 1 fail | - |"),
        "{said}"
    );
}

#[test]
fn a_perfect_peer_passes_the_smoke_profile_over_ipv6() {
    let folder = tempfile::tempdir().unwrap();
    let line = "run --via reference --ipv6 --seed 5 --profile smoke --all-captures --output six";
    ends(&lab(folder.path(), line), 0);
    let line =
        "run --via reference --ipv6 --seed 5 --case RD-01,TCP-08 --all-captures --output six";
    ends(&lab(folder.path(), line), 0);
    for file in captures(&folder.path().join("six")) {
        if file.to_string_lossy().contains("RD-01") {
            let connections = check(&file).unwrap();
            assert!(connections[0].initiator.is_ipv6());
            assert!(
                connections[0].findings.is_empty(),
                "{:?}",
                connections[0].findings
            );
        }
    }
}

/// The same seed, and another one: the same verdicts.
#[test]
fn verdicts_do_not_depend_on_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    for (seed, output) in [(1, "a"), (1, "b"), (2, "c")] {
        let line =
            format!("run --via reference --group tag,rd,pmp --seed {seed} --output {output}");
        ends(&lab(folder.path(), &line), 0);
    }
    for other in ["b", "c"] {
        let said = ends(&lab(folder.path(), &format!("compare a {other}")), 0);
        assert!(!said.contains("->") || said.contains(" s -> "), "{said}");
    }
}

#[test]
fn a_target_that_dies_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let line = "run --via reference --lie dies --seed 5 --patience 1 --jobs 1 --case ENH-02,TAG-10,TAG-20,UNT-04 --output dead";
    let got = lab(folder.path(), line);
    let said = ends(&got, 2);
    let error = String::from_utf8_lossy(&got.stderr);
    assert!(
        error.contains("the target does not converse any more"),
        "{error}"
    );
    assert!(said.contains("dead"), "{said}");
    let said = ends(&lab(folder.path(), "matrix dead"), 0);
    assert!(said.contains("1 dead"), "{said}");
}
