//! `siwctl` against a running daemon: its lists and explanations name what the clients have and did.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, Command, Stdio};

use serde_json::Value;
use siw::{
    Access, CmChannel, CmEvent, CmListener, ConnectOptions, Context, ObjectList, PairOptions,
    QpInit,
};

use super::client_faults::{as_user, open_to_all};
use crate::common::{Daemon, End, PATIENCE, client_program, pair, ping};

fn siwctl_command(daemon: &Daemon, args: &[&str]) -> Command {
    let mut command = Command::new(client_program("siwctl"));
    command.args(args).arg("--socket").arg(&daemon.socket);
    command.stdin(Stdio::null());
    command
}

/// Starts a siwctl that runs until it is interrupted, and has begun when this returns.
pub fn start_siwctl(daemon: &Daemon, args: &[&str]) -> (Child, BufReader<ChildStderr>) {
    let mut child = siwctl_command(daemon, args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("Ctrl-C ends it"), "{line}");
    (child, said)
}

/// Runs siwctl; returns its exit status, output and errors.
pub fn siwctl(daemon: &Daemon, args: &[&str]) -> (Option<i32>, String, String) {
    let out = siwctl_command(daemon, args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

pub fn shown(daemon: &Daemon, args: &[&str]) -> String {
    let (status, out, error) = siwctl(daemon, args);
    assert_eq!(status, Some(0), "{args:?}: {error}");
    out
}

pub fn shown_json(daemon: &Daemon, args: &[&str]) -> Vec<Value> {
    let args = [args, &["--json"]].concat();
    serde_json::from_str(&shown(daemon, &args)).unwrap()
}

fn numbers(rows: &[Value], key: &str) -> BTreeSet<u64> {
    rows.iter().map(|row| row[key].as_u64().unwrap()).collect()
}

#[test]
fn lists_show_the_objects_of_the_clients() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    let both = BTreeSet::from([u64::from(a.qp.qp_num()), u64::from(b.qp.qp_num())]);
    let qps = shown_json(&daemon, &["show", "qp"]);
    assert_eq!(numbers(&qps, "lqpn"), both);
    for (end, device) in [(&a, "siw0"), (&b, "siw1")] {
        let number = end.qp.qp_num();
        let row = qps.iter().find(|row| row["lqpn"] == number).unwrap();
        for (key, value) in [("ifname", device), ("type", "RC"), ("state", "RTS")] {
            assert_eq!(row[key], value, "{row}");
        }
        assert_eq!(row["pid"], std::process::id());
        let line = format!(
            "link {device}/1 lqpn {number} pdn {} rqpn 0 type RC state RTS pid {} comm ",
            row["pdn"], row["pid"]
        );
        let text = shown(&daemon, &["show", "qp", "--device", device]);
        assert!(
            text.starts_with(&line) && text.lines().count() == 1,
            "{text}"
        );
    }
    let regions = shown_json(&daemon, &["show", "mr"]);
    let keys: BTreeSet<String> = regions
        .iter()
        .map(|row| row["rkey"].as_str().unwrap().into())
        .collect();
    let expected = [&a, &b].map(|end| format!("0x{:x}", end.mr.rkey()));
    assert_eq!(keys, BTreeSet::from(expected));
    assert!(
        regions.iter().all(|row| row["mrlen"] == 4096),
        "{regions:?}"
    );
    for (kind, count) in [
        ("cq", 2),
        ("pd", 2),
        ("srq", 0),
        ("cm-id", 2),
        ("conn", 2),
        ("ends", 0),
    ] {
        assert_eq!(shown_json(&daemon, &["show", kind]).len(), count, "{kind}");
    }
    let listener = CmListener::new(&b.cm, None, "10.77.0.2:0".parse().unwrap(), 8, 0).unwrap();
    let ids = shown(&daemon, &["show", "cm-id"]);
    let line = format!("state LISTEN ps TCP pid {}", std::process::id());
    assert!(ids.contains(&line), "{ids}");
    assert!(
        ids.contains(&format!("src-addr {} ", listener.local_addr())),
        "{ids}"
    );
    let clients = shown_json(
        &daemon,
        &["show", "clients", "--pid", &std::process::id().to_string()],
    );
    assert!(clients.len() == 2 && clients.iter().all(|client| client["queue_pairs"] == 1));
    let devices = shown_json(&daemon, &["show", "devices"]);
    assert_eq!(devices[1]["addresses"][0], "10.77.0.2");
}

/// The state of connections has the numbers of both ends.
#[test]
fn connections_show_tcp_and_rdmap() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    for _ in 0..20 {
        ping(&a, &b);
        ping(&b, &a);
    }
    let rows = shown_json(&daemon, &["show", "conn"]);
    let of = |end: &End| {
        rows.iter()
            .find(|row| row["lqpn"] == end.qp.qp_num())
            .unwrap()
    };
    let (tcp_a, tcp_b) = (&of(&a)["tcp"], &of(&b)["tcp"]);
    assert_eq!(
        (&tcp_a["local"], &tcp_a["remote"]),
        (&tcp_b["remote"], &tcp_b["local"])
    );
    assert_eq!(
        (&tcp_a["state"], &tcp_a["sack"]),
        (&"ESTAB".into(), &true.into())
    );
    assert!(tcp_a["rtt_us"].as_f64().unwrap() > 0.0);
    assert_eq!(
        (
            of(&a)["rdmap"]["ord"].clone(),
            of(&b)["rdmap"]["state"].clone()
        ),
        (of(&b)["rdmap"]["ird"].clone(), "RTS".into())
    );
    let text = shown(
        &daemon,
        &["show", "conn", "--lqpn", &a.qp.qp_num().to_string()],
    );
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[1].starts_with("ESTAB "), "{text}");
    for word in [
        "\tts sack rto:",
        " rtt:",
        " cwnd:",
        "rdma:(state:RTS phase:running crc:",
    ] {
        assert!(lines[2].contains(word), "{word}: {text}");
    }
}

#[test]
fn ends_have_their_reason() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let number = a.qp.qp_num().to_string();
    shown(&daemon, &["qp", "kill", &number]);
    for end in [&a, &b] {
        assert!(matches!(
            end.cm.get_event(Some(PATIENCE)).unwrap(),
            CmEvent::Disconnected(_)
        ));
    }
    let why = shown(&daemon, &["why", &number]);
    assert!(
        why.contains("is in ERR.")
            && why.contains("disconnected: an operator ended the queue pair"),
        "{why}"
    );
    let why = shown(&daemon, &["why", &b.qp.qp_num().to_string()]);
    assert!(
        why.contains("disconnected: the peer reset the connection"),
        "{why}"
    );
    // A connect that fails.
    let end = End::new(&daemon.context(), 64);
    let nobody = "10.77.0.2:9".parse().unwrap();
    end.qp
        .connect(&end.cm, nobody, &ConnectOptions::default())
        .unwrap();
    assert!(matches!(
        end.cm.get_event(Some(PATIENCE)).unwrap(),
        CmEvent::Rejected(_)
    ));
    let ends = shown_json(&daemon, &["show", "ends"]);
    let last = ends.last().unwrap();
    assert_eq!(ends.len(), 3, "{ends:?}");
    assert_eq!(
        (&last["event"], &last["dst_addr"]),
        (&"not connected".into(), &"10.77.0.2:9".into())
    );
    assert_eq!(last["reason"], "nothing listens at that address and port");
    // A queue pair of which the other end is missing (ibv_modify_qp to RTR).
    let lonely = End::new(&daemon.context(), 64);
    let [local, peer] = ["10.77.0.1", "10.77.0.2"].map(|ip| ip.parse().unwrap());
    lonely
        .qp
        .connect_pair(&PairOptions {
            device: 0,
            local,
            peer,
            peer_qp_num: 4_000_000,
            ord: 16,
            ird: 16,
            denied_access: Access::NONE,
        })
        .unwrap();
    let event = lonely.ctx.get_async_event(Some(PATIENCE)).unwrap();
    let reason = "10.77.0.2 has no queue pair 4000000";
    assert_eq!(event.reason, format!("not connected: {reason}"));
    let why = shown(&daemon, &["why", &lonely.qp.qp_num().to_string()]);
    for words in ["10.77.0.1:0 -> 10.77.0.2:5045 ended", reason] {
        assert!(why.contains(words), "{words}: {why}");
    }
    // An orderly close, by both ends.
    let (c, e) = pair(&daemon, 64);
    c.qp.disconnect().unwrap();
    for end in [&c, &e] {
        assert!(matches!(
            end.cm.get_event(Some(PATIENCE)).unwrap(),
            CmEvent::Disconnected(_)
        ));
    }
    let why = shown(&daemon, &["why", &e.qp.qp_num().to_string()]);
    assert!(
        why.contains("disconnected: one end closed the connection"),
        "{why}"
    );
}

#[test]
fn a_killed_client_is_closed_and_others_go_on() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let victim = End::new(&daemon.context(), 64);
    let number = victim.qp.qp_num().to_string();
    let row = &shown_json(&daemon, &["show", "qp", "--lqpn", &number, "--details"])[0];
    shown(&daemon, &["client", "kill", &row["client"].to_string()]);
    let event = victim.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert!(
        event.reason.contains("an operator ended the client"),
        "{event:?}"
    );
    ping(&a, &b);
    assert_eq!(shown_json(&daemon, &["show", "qp"]).len(), 2);
}

/// Ordinary users see and change their own objects only.
#[test]
fn users_see_only_their_own_objects() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let daemon = Daemon::loopback();
    open_to_all(&daemon);
    let (a, _b) = pair(&daemon, 4096);
    let theirs = as_user(65_534, || Context::open(Some(&daemon.socket)).unwrap());
    let own = End::new(&theirs, 64);
    let lines = |list| theirs.list_objects(list).unwrap();
    assert_eq!(lines(ObjectList::QueuePairs).lines().count(), 1);
    assert!(lines(ObjectList::QueuePairs).contains(&format!("\"lqpn\":{}", own.qp.qp_num())));
    let connected = [ObjectList::Connections, ObjectList::CmIds, ObjectList::Ends];
    assert!(connected.iter().all(|list| lines(*list).is_empty()));
    for refused in [
        theirs.end_queue_pair(a.qp.qp_num()),
        theirs.end_client(1),
        theirs.set_log_filter("off"),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains("no queue pair")
                || error.contains("no client")
                || error.contains("only operators"),
            "{error}"
        );
    }
    let seen = daemon
        .context()
        .list_objects(ObjectList::QueuePairs)
        .unwrap();
    assert_eq!(seen.lines().count(), 3);
}

/// A list longer than a page has each object once, however many clients hold them.
#[test]
fn long_lists_are_complete() {
    let daemon = Daemon::loopback();
    let ends: Vec<End> = (0..40).map(|_| End::new(&daemon.context(), 64)).collect();
    let many: Vec<End> = (0..500).map(|_| ends[0].another()).collect();
    let expected: BTreeSet<u64> = ends
        .iter()
        .chain(&many)
        .map(|end| end.qp.qp_num().into())
        .collect();
    let rows = shown_json(&daemon, &["show", "qp"]);
    assert_eq!((rows.len(), numbers(&rows, "lqpn")), (540, expected));
    assert_eq!(shown_json(&daemon, &["show", "mr"]).len(), 540);
    let clients = shown_json(&daemon, &["show", "clients"]);
    // The last one is siwctl.
    assert_eq!((clients.len(), numbers(&clients, "id").len()), (41, 41));
    let channel = CmChannel::new(&ends[0].ctx).unwrap();
    let any = "10.77.0.1:0".parse().unwrap();
    let listeners: Vec<CmListener> = (0..200)
        .map(|_| CmListener::new(&channel, None, any, 1, 0).unwrap())
        .collect();
    assert_eq!(
        shown_json(&daemon, &["show", "cm-id"]).len(),
        listeners.len()
    );
    let unused = ends[1]
        .pd
        .create_qp(&ends[1].cq, &ends[1].cq, &QpInit::default())
        .unwrap();
    drop(unused);
    assert_eq!(
        shown_json(&daemon, &["show", "qp", "--lqpn", "4000000"]).len(),
        0
    );
}

#[test]
fn bad_input_is_refused_with_the_reason() {
    let daemon = Daemon::loopback();
    let idle = End::new(&daemon.context(), 64);
    let idle = idle.qp.qp_num().to_string();
    for (args, status, reason) in [
        (&["qp", "kill", "4000000"][..], 1, "no queue pair 4000000"),
        (&["qp", "kill", &idle], 1, "is not connected"),
        (&["client", "kill", "4000000"], 1, "no client 4000000"),
        (&["why", "4000000"], 1, "knows no queue pair 4000000"),
        (&["log", "siwd=,="], 1, "invalid filter"),
        (
            &["show", "mr", "--device", "siw0"],
            1,
            "belong to no device",
        ),
        (&["show", "everything"], 2, "unrecognized subcommand"),
        (&["qp", "kill", "x"], 2, "invalid value"),
    ] {
        let (code, out, error) = siwctl(&daemon, args);
        assert_eq!(code, Some(status), "{args:?}: {error}");
        assert!(
            error.contains(reason) && out.is_empty(),
            "{args:?}: {error}"
        );
    }
    shown(&daemon, &["log", "siwd=debug"]);
    let absent = Command::new(client_program("siwctl"))
        .args(["show", "qp", "--socket", "/nonexistent/siwd.sock"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&absent.stderr).into_owned();
    assert!(
        !absent.status.success() && error.contains("/nonexistent/siwd.sock"),
        "{error}"
    );
    let completions = Command::new(client_program("siwctl"))
        .args(["completions", "bash"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&completions.stdout).contains("_siwctl"));
    let (status, _, error) = siwctl(&daemon, &["man", "/nonexistent"]);
    assert!(
        status == Some(1) && error.contains("/nonexistent"),
        "{error}"
    );
    shown(&daemon, &["man", daemon.dir.path().to_str().unwrap()]);
    for (page, words) in [
        ("siwctl.1", "siwctl\\-capture(1)"),
        ("siwctl-capture-start.1", "\\-\\-snaplen"),
        ("siwctl-qp-kill.1", "Move it to ERROR"),
    ] {
        let text = std::fs::read_to_string(daemon.dir.path().join(page)).unwrap();
        assert!(text.contains(words), "{page}: {text}");
    }
}

/// Value of a sample in Prometheus' text format.
fn sample(metrics: &str, name: &str) -> f64 {
    let found = metrics
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = found.unwrap_or_else(|| panic!("{name} is missing:\n{metrics}"));
    value.parse().unwrap()
}

/// Each counter has the value that the statistics have, and those of a transfer are what was sent.
#[test]
fn metrics_have_the_values_of_the_statistics() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    for _ in 0..20 {
        ping(&a, &b);
    }
    let metrics = shown(&daemon, &["metrics", "--text", "--clients", "100"]);
    // siwctl is a client too, with the number of the test's client plus its own runs.
    assert_eq!(sample(&metrics, "siwd_clients"), 3.0);
    assert_eq!(
        sample(&metrics, "siwd_worker_queue_pairs{worker=\"0\"}"),
        2.0
    );
    // Those of the receiver; those of the sender wait for acknowledgements.
    let completions = sample(&metrics, "siwd_worker_completions_total{worker=\"0\"}");
    assert!((20.0..=40.0).contains(&completions), "{completions}");
    assert_eq!(
        sample(&metrics, "siwd_tcp_curr_estab{device=\"siw1\"}"),
        1.0
    );
    assert!(sample(&metrics, "siwd_siw_tcp_in_bytes_total{device=\"siw1\"}") > 20.0 * 16.0);
    let stats: Value = serde_json::from_str(&shown(&daemon, &["stat", "--json"])).unwrap();
    for device in stats["devices"].as_array().unwrap() {
        for (counter, words) in [
            ("TcpPassiveOpens", "tcp_passive_opens"),
            ("TcpActiveOpens", "tcp_active_opens"),
            ("TcpRetransSegs", "tcp_retrans_segs"),
            ("TcpInCsumErrors", "tcp_in_csum_errors"),
        ] {
            let name = format!("siwd_{words}_total{{device={}}}", device["device"]);
            let value = device["merged"][counter].as_f64().unwrap();
            assert_eq!(sample(&metrics, &name), value, "{name}");
        }
    }
    let own = format!(
        "siwd_client_queue_pairs{{client=\"1\",pid=\"{}\"",
        std::process::id()
    );
    assert!(metrics.contains(&own), "{metrics}");
    // Every name in the dashboard and the alert rules exists.
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/monitoring");
    for file in ["siwd-dashboard.json", "siwd-alerts.yml"] {
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        let mut names: Vec<&str> = text
            .split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_')
            .collect();
        names.retain(|word| word.starts_with("siwd_"));
        assert!(names.len() > 5, "{file}");
        for name in names {
            assert!(
                metrics.contains(&format!("\n{name}")),
                "{file}: {name} is no metric"
            );
        }
    }
}

#[test]
fn top_prints_rates_where_there_is_no_terminal() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    let text = shown(&daemon, &["top", "--count", "1", "--interval", "0.1"]);
    for words in ["rx frames/s", "siw1    up", "cpu %", "memory MiB"] {
        assert!(text.contains(words), "{words} is missing:\n{text}");
    }
    let (status, _, error) = siwctl(&daemon, &["top", "--interval", "0"]);
    assert_eq!(status, Some(2));
    assert!(error.contains("from 0.1 to 3600"), "{error}");
}

/// Starts `siwctl metrics` on a free port; returns it and its messages.
pub fn start_exporter(daemon: &Daemon) -> (Child, BufReader<ChildStderr>) {
    let mut exporter = Command::new(client_program("siwctl"))
        .args(["metrics", "--listen", "127.0.0.1:0", "--socket"])
        .arg(&daemon.socket)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(exporter.stderr.take().unwrap());
    (exporter, said)
}

/// The exporter serves readers of both formats, and ends with the daemon.
#[test]
fn the_exporter_serves_metrics_until_the_daemon_ends() {
    use std::io::{BufRead, Read, Write};
    let daemon = Daemon::loopback();
    let (status, _, error) = siwctl(&daemon, &["metrics", "--listen", "0.0.0.0:0"]);
    assert_eq!(status, Some(1));
    assert!(error.contains("not a loopback address"), "{error}");
    let (mut exporter, mut said) = start_exporter(&daemon);
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let address = line.trim().rsplit('/').nth(1).unwrap().to_owned();
    let get = |path: &str, accept: &str| {
        let mut conn = std::net::TcpStream::connect(&address).unwrap();
        write!(
            conn,
            "GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        conn.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = get("/metrics", "application/openmetrics-text; version=1.0.0");
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("# EOF"),
        "{answer}"
    );
    let answer = get("/metrics", "text/plain");
    assert!(
        answer.contains("version=0.0.4") && !answer.contains("# EOF"),
        "{answer}"
    );
    assert!(get("/", "text/plain").starts_with("HTTP/1.1 404"));
    assert!(daemon.stop().success());
    // It may have noticed after the last request.
    if let Ok(mut conn) = std::net::TcpStream::connect(&address) {
        let _ = write!(
            conn,
            "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        );
        let mut answer = String::new();
        let _ = conn.read_to_string(&mut answer);
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 503"),
            "{answer}"
        );
    }
    assert_eq!(exporter.wait().unwrap().code(), Some(1));
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("siwd has ended"), "{rest}");
}
