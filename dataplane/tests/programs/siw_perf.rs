//! `siw-perf` against a daemon: its output for people, spreadsheets and programs.

use crate::common::{Daemon, siw_perf};
use std::process::Command;

/// Runs siw-perf on the daemon for a moment; returns its output.
fn run_siw_perf(daemon: &Daemon, arguments: &str) -> String {
    let output = Command::new(siw_perf())
        .args(arguments.split(' '))
        .args(["--secs", "0.3", "--no-bounds", "--socket"])
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
    // The histogram covers every message of the measurement.
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

/// The results that siw-perf prints with --json.
fn run_for_json(daemon: &Daemon, arguments: &str) -> Vec<serde_json::Value> {
    run_siw_perf(daemon, &format!("{arguments} --json"))
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Checks that the data of every message of the measurement was verified.
fn check_verified(result: &serde_json::Value) {
    let verified = result["verified"].as_u64().unwrap();
    assert!(verified >= result["messages"].as_u64().unwrap(), "{result}");
    assert!(verified > 0, "{result}");
}

#[test]
fn atomics_find_the_value_of_the_one_before() {
    let daemon = Daemon::loopback();
    for arguments in [
        "bw --op fetch-add --qps 2 --depth 4 --verify",
        "rate --op compare-swap --depth 8 --verify",
        "lat --op atomic --verify",
        "lat --op compare-swap --verify --events",
    ] {
        let result = &run_for_json(&daemon, arguments)[0];
        assert_eq!(result["size"], 8, "{result}");
        check_verified(result);
    }
}

#[test]
fn writes_with_immediate_data_take_receives_and_arrive() {
    let daemon = Daemon::loopback();
    for arguments in [
        "bw --op write-imm --size 4K --qps 2 --depth 4 --verify",
        "lat --op write-imm --verify --events",
    ] {
        let result = &run_for_json(&daemon, arguments)[0];
        assert_eq!(result["op"], "write-imm", "{result}");
        check_verified(result);
    }
}

#[test]
fn a_number_of_messages_ends_a_measurement() {
    let daemon = Daemon::loopback();
    let output = Command::new(siw_perf())
        .args(["lat", "-n", "100", "--no-bounds", "--json", "--socket"])
        .arg(&daemon.socket)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["messages"], 100, "{result}");
    let times = &result["lat_us"];
    let [min, avg, max] = ["min", "avg", "max"].map(|name| times[name].as_f64().unwrap());
    assert!(min > 0.0 && min <= avg && avg <= max, "{result}");
}

#[test]
fn events_wake_who_waits_at_both_ends() {
    let daemon = Daemon::loopback();
    for arguments in [
        "lat --op send --verify --events",
        "lat --op read --verify --events",
        "bw --op send --size 4K --verify --events --bidirectional",
    ] {
        let result = &run_for_json(&daemon, arguments)[0];
        assert_eq!(result["events"], true, "{result}");
        check_verified(result);
    }
}

#[test]
fn messages_count_that_complete_with_a_later_one() {
    let daemon = Daemon::loopback();
    for arguments in [
        "rate --op write --qps 3 --depth 16 --cq-mod 7 --verify",
        "rate --op send --qps 2 --depth 8 --cq-mod 8 --verify",
        "bw --op read --size 4K --depth 16 --cq-mod 5 --verify --events",
        "rate --op fetch-add --depth 4 --cq-mod 3 --verify",
    ] {
        let result = &run_for_json(&daemon, arguments)[0];
        let (messages, cq_mod) = (&result["messages"], result["cq_mod"].as_u64().unwrap());
        let messages = messages.as_u64().unwrap();
        assert!(cq_mod > 1 && messages > 0, "{result}");
        assert_eq!(messages % cq_mod, 0, "{result}");
        // Messages after the measurement are compared, too.
        assert!(result["verified"].as_u64().unwrap() >= messages, "{result}");
        let lines = &result["workers"][0]["lines_per_message"]["completions"];
        let own = if arguments.contains("send") { 1.0 } else { 0.0 };
        assert!(lines.as_f64().unwrap() < own + 0.5, "{result}");
    }
    let refused = Command::new(siw_perf())
        .args(["rate", "--depth", "4", "--cq-mod", "5"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && error.contains("--cq-mod 5"),
        "{error}"
    );
}

#[test]
fn threads_and_directions_count_together() {
    let daemon = Daemon::loopback();
    let result = &run_for_json(&daemon, "rate --threads 2 --qps 2 --interval 0.01")[0];
    assert_eq!((&result["threads"], &result["qps"]), (&2.into(), &4.into()));
    assert!(result["messages"].as_u64().unwrap() > 0, "{result}");
    assert!(result["workers"][0]["cycles_per_frame"].as_f64().unwrap() > 0.0);
    let both = &run_for_json(&daemon, "bw --op write --size 4K --verify --bidirectional")[0];
    assert_eq!(both["bidirectional"], true);
    let verified = both["verified"].as_u64().unwrap();
    assert!(verified >= both["messages"].as_u64().unwrap(), "{both}");
}

#[test]
fn connections_have_crcs_and_markers_as_asked() {
    let daemon = Daemon::loopback();
    let results = run_for_json(
        &daemon,
        "bw --size 4K --verify --crc on,off --markers on,off",
    );
    let asked: Vec<_> = results
        .iter()
        .map(|result| (result["crc"].as_bool(), result["markers"].as_bool()))
        .collect();
    let (on, off) = (Some(true), Some(false));
    assert_eq!(asked, [(on, on), (on, off), (off, on), (off, off)]);
}

#[test]
fn queue_pairs_are_counted_up() {
    let daemon = Daemon::loopback();
    let output = Command::new(siw_perf())
        .args(["scale", "--qps", "1,20", "--secs", "0.3", "--socket"])
        .arg(&daemon.socket)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
    assert_eq!((last[0], last.len()), ("20", 6), "{text}");
    for value in &last[1..] {
        assert!(value.parse::<f64>().unwrap() > 0.0, "{text}");
    }
}

#[test]
fn a_long_transfer_is_shown_while_it_runs() {
    let daemon = Daemon::loopback();
    let output = Command::new(siw_perf())
        .args(["lat", "--live", "--interval", "0.05", "--secs", "1"])
        .args(["--no-bounds", "--socket"])
        .arg(&daemon.socket)
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stderr).unwrap();
    let rows: Vec<Vec<&str>> = shown
        .lines()
        .skip_while(|line| !line.contains("worker %"))
        .skip(1)
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert!(rows.len() >= 3, "{shown}");
    assert!(rows.iter().all(|row| row.len() == 9), "{shown}");
    // On a busy machine not every interval has a round trip.
    let p50: Vec<f64> = rows.iter().map(|row| row[3].parse().unwrap()).collect();
    assert!(p50.iter().any(|p50| *p50 > 0.0), "{shown}");
}
