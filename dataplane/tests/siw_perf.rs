//! `siw-perf` against a daemon: what it prints for people, spreadsheets and programs.

mod common;

use common::{Daemon, siw_perf};
use std::process::Command;

/// Runs siw-perf on the daemon for a moment; what it printed.
fn run_siw_perf(daemon: &Daemon, arguments: &str) -> String {
    let output = Command::new(siw_perf())
        .args(arguments.split(' '))
        .args(["--secs", "0.05", "--no-bounds", "--socket"])
        .arg(&daemon.socket)
        .output()
        .unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {complaint}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_combination_is_a_line_of_csv() {
    let daemon = Daemon::loopback();
    let text = run_siw_perf(&daemon, "bw --size 64,16K --depth 1,4 --csv --verify");
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.len(), 5, "{text}");
    let column = |name| lines[0].iter().position(|column| *column == name).unwrap();
    let sizes: Vec<&str> = lines[1..].iter().map(|line| line[column("size")]).collect();
    assert_eq!(sizes, ["64", "16384", "64", "16384"]);
    for line in &lines[1..] {
        assert!(line[column("gbps")].parse::<f64>().unwrap() > 0.0, "{text}");
    }
}

#[test]
fn a_result_names_the_machine_and_its_conditions() {
    let daemon = Daemon::loopback();
    let arguments = "rate --op send --qps 2 --json --interval 0.01 --histogram";
    let result: serde_json::Value =
        serde_json::from_str(&run_siw_perf(&daemon, arguments)).unwrap();
    assert!(
        result["machine"]["kernel"].as_str().unwrap().contains('.'),
        "{result}"
    );
    assert!(
        result["conditions"]["steal_percent"].is_number(),
        "{result}"
    );
    assert_eq!(result["size"], 64);
    let worker = &result["workers"][0];
    assert!(worker["frames"].as_u64().unwrap() > 0, "{result}");
    assert!(worker["ns_per_message"].as_f64().unwrap() > 0.0, "{result}");
    assert!(
        !result["series_gbps"].as_array().unwrap().is_empty(),
        "{result}"
    );
    // The histogram has every message of the measurement.
    let steps = result["histogram"].as_array().unwrap();
    let counted: u64 = steps.iter().map(|step| step[1].as_u64().unwrap()).sum();
    assert_eq!(counted, result["messages"].as_u64().unwrap());
}

#[test]
fn rounds_end_in_a_table_with_their_median() {
    let daemon = Daemon::loopback();
    let text = run_siw_perf(&daemon, "lat --op read --rounds 3");
    let last = text.lines().rfind(|line| line.starts_with("read"));
    let last = last.unwrap_or_else(|| panic!("no table in {text}"));
    assert!(last.contains("64 B"), "{text}");
}

#[test]
fn round_trips_go_on_beside_a_bulk_transfer() {
    let daemon = Daemon::loopback();
    for op in ["write", "send"] {
        let arguments = format!("mixed --op {op} --idle-qps 20 --json");
        let result: serde_json::Value =
            serde_json::from_str(&run_siw_perf(&daemon, &arguments)).unwrap();
        assert!(result["bulk_gbps"].as_f64().unwrap() > 0.0, "{result}");
        assert!(result["messages"].as_u64().unwrap() > 0, "{result}");
        assert_eq!(result["idle_qps"], 20);
    }
}
