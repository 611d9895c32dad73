//! Debian's Prometheus scrapes a running siwd; promtool accepts the metrics and the alert rules, and every
//! expression of the dashboard and the rules has a value.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::siwctl::{shown, start_exporter};
use crate::common::programs::is_installed;
use crate::common::{Daemon, PATIENCE, pair, ping, wait};

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        wait(&mut self.0);
    }
}

fn monitoring(file: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/monitoring");
    folder.join(file).canonicalize().unwrap()
}

/// Runs promtool; returns its output, and whether it is content.
fn promtool(args: &[&str], input: &str) -> (bool, String) {
    let mut child = Command::new("promtool")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    let out = child.wait_with_output().unwrap();
    let text = [out.stdout, out.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    (out.status.success(), text)
}

/// All strings with this key.
fn strings(value: &Value, key: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if name == key => found.push(text.to_owned()),
                    _ => strings(value, key, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| strings(value, key, found)),
        _ => {}
    }
}

/// Waits for a line with this word, and returns it.
fn read_line_with(reader: &mut impl BufRead, word: &str) -> String {
    let mut all = String::new();
    loop {
        let start = all.len();
        assert!(reader.read_line(&mut all).unwrap() > 0, "{all}");
        if all[start..].contains(word) {
            return all[start..].to_owned();
        }
    }
}

#[test]
fn prometheus_scrapes_siwd_and_evaluates_the_dashboard_and_the_rules() {
    if !is_installed("prometheus", "prometheus") {
        return;
    }
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    let (is_clean, text) = promtool(
        &["check", "metrics"],
        &shown(&daemon, &["metrics", "--text"]),
    );
    assert!(is_clean && text.is_empty(), "{text}");
    let rules = monitoring("siwd-alerts.yml");
    let (is_clean, text) = promtool(&["check", "rules", rules.to_str().unwrap()], "");
    assert!(is_clean, "{text}");
    let (exporter, mut said) = start_exporter(&daemon);
    let _exporter = Running(exporter);
    let line = read_line_with(&mut said, "http://");
    let target = line.trim().rsplit('/').nth(1).unwrap().to_owned();
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("prometheus.yml");
    let rules = rules.display();
    let scrape = "scrape_interval: 1s\n  evaluation_interval: 1s";
    let job = format!("job_name: siwd\n    static_configs: [{{ targets: ['{target}'] }}]");
    std::fs::write(
        &config,
        format!("global:\n  {scrape}\nrule_files: ['{rules}']\nscrape_configs:\n  - {job}\n"),
    )
    .unwrap();
    let mut prometheus = Command::new("prometheus")
        .arg(format!("--config.file={}", config.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            folder.path().join("data").display()
        ))
        .arg("--web.listen-address=127.0.0.1:0")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(prometheus.stderr.take().unwrap());
    let _prometheus = Running(prometheus);
    let line = read_line_with(&mut log, "\"Listening on\"");
    let address = line.trim().rsplit("address=").next().unwrap().to_owned();
    // It must not block on a full pipe.
    std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
    let server = format!("http://{address}");
    let query = |expression: &str| promtool(&["query", "instant", &server, expression], "");
    let start = Instant::now();
    loop {
        // Rates need two scrapes, between which there is traffic.
        ping(&a, &b);
        let (_, text) = query("count_over_time(siwd_clients[1m]) >= 3");
        if text.contains("=>") {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{text}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let (is_done, text) = query("up{job=\"siwd\"}");
    assert!(is_done && text.contains("=> 1 "), "{text}");
    let dashboard = std::fs::read_to_string(monitoring("siwd-dashboard.json")).unwrap();
    let mut expressions = Vec::new();
    strings(
        &serde_json::from_str(&dashboard).unwrap(),
        "expr",
        &mut expressions,
    );
    assert!(expressions.len() >= 10, "{expressions:?}");
    for expression in expressions {
        let expression = expression.replace("$instance", ".*");
        let expression = expression.replace("$__rate_interval", "1m");
        let (is_done, text) = query(&expression);
        assert!(is_done && text.contains("=>"), "{expression}: {text}");
    }
    // The rules are evaluated. None fires, except that a loaded machine delays the control thread.
    let mut answer = String::new();
    let mut conn = std::net::TcpStream::connect(&address).unwrap();
    conn.write_all(b"GET /api/v1/rules HTTP/1.0\r\n\r\n")
        .unwrap();
    conn.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let answer: Value = serde_json::from_str(body).unwrap();
    let rules = answer["data"]["groups"][0]["rules"].as_array().unwrap();
    assert!(rules.len() >= 7, "{answer}");
    for rule in rules {
        assert_eq!(rule["health"], "ok", "{rule}");
        let is_of_machine = rule["name"] == "SiwdControlThreadSlow";
        assert!(is_of_machine || rule["state"] == "inactive", "{rule}");
    }
    let (_, bytes) = query("sum(siwd_siw_tcp_in_bytes_total{device=\"siw1\"})");
    let value = bytes
        .split("=> ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    let value: f64 = value.unwrap().parse().unwrap();
    assert!(value >= 4096.0, "{bytes}");
}
