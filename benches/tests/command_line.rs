//! Error output of `siw-perf` and `./benches/figures`.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Output};

fn siw_perf(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_siw-perf"))
        .args(args)
        .output()
        .unwrap()
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

#[test]
fn without_a_daemon_it_exits_with_the_way_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("siwd.sock");
    let out = siw_perf(&["bw", "--json", "--socket", socket.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(1));
    assert!(out.stdout.is_empty(), "only results go to stdout");
    let said = stderr(&out);
    assert!(said.contains("siwd is not running"), "{said}");
    assert!(
        said.contains("siwd --config config/loopback.toml"),
        "{said}"
    );
}

#[test]
fn a_bad_size_is_refused_before_the_daemon_is_asked() {
    let out = siw_perf(&["bw", "--size", "0", "--socket", "/nonexistent"]);
    assert!(!out.status.success());
    assert!(stderr(&out).contains("1 byte to 1 GiB"), "{}", stderr(&out));
    let out = siw_perf(&["lat", "--size", "many"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(
        stderr(&out).contains("64, 4K, 1M or 1G"),
        "{}",
        stderr(&out)
    );
}

#[test]
fn help_lists_what_the_mode_has() {
    let out = siw_perf(&["lat", "--help"]);
    assert!(out.status.success());
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        text.contains("--pause") && !text.contains("--depth"),
        "{text}"
    );
    for alias in ["-s, --size", "-n, --iters", "--duration"] {
        assert!(text.contains(alias), "{alias} is missing in {text}");
    }
}

#[test]
fn a_reader_that_is_gone_ends_it_quietly() {
    let dir = tempfile::tempdir().unwrap();
    let results = dir.path().join("results.json");
    std::fs::write(&results, RAW_RESULT.replace('\n', "")).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = Command::new(env!("CARGO_BIN_EXE_siw-perf"))
        .args(["report", "--markdown", "-", "--html"])
        .arg(dir.path().join("page.html"))
        .arg(&results)
        .stdout(writer)
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    assert!(!stderr(&out).contains("panicked"), "{}", stderr(&out));
}

/// Runs `siw-perf raw` on a pair of rings and returns its results; `None`, with a message, if another
/// program has the cores.
fn raw_results(args: &[&str]) -> Option<Vec<serde_json::Value>> {
    let out = siw_perf(&[&["raw", "--json"], args].concat());
    let said = stderr(&out);
    if said.contains("is busy: siwd process") && !out.status.success() {
        println!("skipped: {said}");
        return None;
    }
    assert!(out.status.success(), "{said}");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let lines = text.lines().map(serde_json::from_str);
    Some(lines.collect::<Result<_, _>>().unwrap())
}

#[test]
fn raw_frames_are_sent_at_a_rate_mixed_and_tagged() {
    let args = "--mode txonly -s imix --vlan 7 --flows 4 --rate 20k -D 0.5";
    let args: Vec<&str> = args.split(' ').collect();
    let Some(results) = raw_results(&args) else {
        return;
    };
    assert_eq!(results.len(), 1, "one kind of payload: {results:?}");
    let result = &results[0];
    let frames = result["ports"][0]["tx"]["frames"].as_u64().unwrap();
    // A loaded machine may send less, but never more.
    assert!((1..=10_100).contains(&frames), "{result}");
    assert_eq!(result["ports"][1]["rx"]["frames"], frames, "{result}");
    let rates = &result["ports"][0]["tx"];
    assert!(
        rates["l1_gbps"].as_f64() > rates["gbps"].as_f64(),
        "{result}"
    );
    assert_eq!(
        (&result["imix"], &result["vlan"]),
        (&true.into(), &7.into())
    );
}

#[test]
fn the_highest_rate_without_loss_is_searched() {
    let args = ["--mode", "txonly", "--search", "-D", "0.05"];
    let out = siw_perf(&[&["raw", "--json"][..], &args].concat());
    let said = stderr(&out);
    if !out.status.success() {
        // An interrupted thread loses frames on rings, too.
        let is_busy = said.contains("is busy: siwd process");
        assert!(is_busy || said.contains("lost at every rate"), "{said}");
        println!("skipped: {said}");
        return;
    }
    let result: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let trials = result["trials"].as_array().unwrap();
    assert!(!trials.is_empty(), "{result}");
    let tx = &result["ports"][0]["tx"]["frames"];
    assert_eq!(tx, &result["ports"][1]["rx"]["frames"], "{result}");
}

#[test]
fn raw_frames_use_a_queue_on_each_core() {
    let cores = dpdk::allowed_cores();
    let [first, second, ..] = cores[..] else {
        println!("skipped: two cores are needed");
        return;
    };
    let cores = format!("{first},{second}");
    let args = ["--mode", "macswap", "-D", "0.3", "--cores", &cores];
    let Some(results) = raw_results(&args) else {
        return;
    };
    assert_eq!(results[0]["cores"], serde_json::json!([first, second]));
    let received = results[0]["ports"][0]["rx"]["frames"].as_u64().unwrap();
    assert!(received > 0, "{}", results[0]);
}

/// A result of `siw-perf raw --json`.
const RAW_RESULT: &str = r#"{"raw":"macswap","size":64,"burst":32,"payload":"copy","secs":1.0,
    "ports":[],"series":[],"conditions":{"steal_percent":0,"interrupts":0,"cache_line_ns_before":null,
    "cache_line_ns_after":null,"disturbed":null},"machine":{"cpu":"","processors":1,
    "virtual_machine":true,"kernel":"","dpdk":"","commit":""}}"#;

#[test]
fn an_unknown_group_of_figures_lists_those_that_exist() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("figures");
    let out = Command::new(&script).arg("no-such-group").output().unwrap();
    assert!(!out.status.success());
    assert!(stderr(&out).contains("rdma"), "{}", stderr(&out));
    let out = Command::new(&script).arg("--list").output().unwrap();
    assert!(out.status.success());
    assert!(
        String::from_utf8_lossy(&out.stdout)
            .lines()
            .any(|l| l == "rdma")
    );
}

#[test]
fn a_figure_that_cannot_be_measured_is_null_and_its_reason_is_told() {
    let out = Command::new(env!("CARGO_BIN_EXE_siw-figures"))
        .args(["best", "/nonexistent", "--key", "gbps", "--figure", "f"])
        .args(["--unit", "Gb/s", "--floor", "20", "--goal", "40"])
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(2));
    let line = String::from_utf8_lossy(&out.stdout).into_owned();
    assert_eq!(
        line.trim_end(),
        r#"{"figure":"f","value":null,"unit":"Gb/s","floor":20.0,"goal":40.0,"holds":false}"#
    );
    assert!(stderr(&out).contains("/nonexistent"), "{}", stderr(&out));
}
