//! `siwctl trace`: each step of a worker with the counters that it moved, and drops with the reasons and
//! numbers of `siwctl show drops`.

use std::collections::BTreeMap;
use std::io::{BufReader, Read};
use std::process::{Child, ChildStderr, ChildStdout};
use std::time::Instant;

use serde_json::Value;
use siw::{Access, CmEvent, ConnectOptions, Context, PairOptions, RecvWr, SendData, SendWr};
use siw_shm::control::messages::{StartCapture, StartTrace};

use super::client_faults::{as_user, open_to_all};
use super::drops::drops;
use super::siwctl::{shown, shown_json, siwctl, start_siwctl};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, pair, ping, wait};

/// A running `siwctl trace`.
struct Tracing {
    child: Child,
    out: BufReader<ChildStdout>,
    said: BufReader<ChildStderr>,
}

impl Tracing {
    /// Starts a trace, which has begun when this returns.
    fn start(daemon: &Daemon, args: &[&str]) -> Tracing {
        let (mut child, said) = start_siwctl(daemon, &[&["trace"], args].concat());
        let out = BufReader::new(child.stdout.take().unwrap());
        Tracing { child, out, said }
    }

    /// Waits for its end; returns its output.
    fn end(mut self) -> String {
        let mut text = String::new();
        self.out.read_to_string(&mut text).unwrap();
        let mut said = String::new();
        self.said.read_to_string(&mut said).unwrap();
        assert!(wait(&mut self.child).success(), "{said}");
        text
    }

    fn end_with_records(self) -> Vec<Value> {
        let text = self.end();
        let lines = text.lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

/// Sums of the counters in a list of the records.
fn sums(records: &[Value], list: &str, name: &str) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    let rows = records
        .iter()
        .flat_map(|record| record[list].as_array().unwrap());
    for row in rows {
        let name = row[name].as_str().unwrap().to_owned();
        *sums.entry(name).or_default() += row["count"].as_u64().unwrap();
    }
    sums
}

fn dropped(records: &[Value]) -> BTreeMap<String, u64> {
    sums(records, "drops", "reason")
}

/// Value of a counter in the metrics, over all devices.
fn metric(daemon: &Daemon, name: &str) -> u64 {
    let text = shown(daemon, &["metrics"]);
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?.strip_prefix("_total{")?;
        rest.rsplit(' ').next()?.parse::<u64>().ok()
    });
    values.sum()
}

#[test]
fn drops_have_the_reasons_and_numbers_of_show_drops() {
    let daemon = Daemon::loopback();
    let end = End::new(&daemon.context(), 64);
    let tracing = Tracing::start(&daemon, &["16384", "--json"]);
    let nobody = "10.77.0.2:9".parse().unwrap();
    for _ in 0..3 {
        let options = ConnectOptions::default();
        end.qp.connect(&end.cm, nobody, &options).unwrap();
        let event = end.cm.get_event(Some(PATIENCE)).unwrap();
        assert!(matches!(event, CmEvent::Rejected(_)), "{event:?}");
    }
    shown(&daemon, &["capture", "stop"]);
    let records = tracing.end_with_records();
    let traced = dropped(&records);
    assert_eq!((traced["SiwNoPorts"], traced["CONNECT_REFUSED"]), (3, 3));
    assert_eq!(traced, drops(&daemon));
    // The frame that met no listener is the one with the SYN, on the other device.
    let unmatched = |record: &&Value| record["drops"][0]["reason"] == "SiwNoPorts";
    let record = records.iter().find(unmatched).unwrap();
    assert_eq!(
        (&record["event"], &record["device"]),
        (&"received".into(), &"siw1".into())
    );
    let frame = &record["frame"];
    assert_eq!(frame["dst_addr"], "10.77.0.2:9", "{record}");
    assert!(
        frame["flags"].as_str().unwrap().starts_with("SYN"),
        "{record}"
    );
}

/// Frames that siwd loses on purpose, and the retransmissions that follow, have the numbers of the metrics.
#[test]
fn a_loss_has_the_numbers_of_the_metrics() {
    let lossy = LOOPBACK.replacen("name = \"siw0\"", "name = \"siw0\"\nloss = 0.1", 1);
    let daemon = Daemon::start(&lossy, &[]);
    let (a, b) = pair(&daemon, 4096);
    let lost = |daemon: &Daemon| {
        let counts = drops(daemon);
        counts.get("CONFIGURED_LOSS").copied().unwrap_or(0)
    };
    let sent_again = |daemon: &Daemon| metric(daemon, "siwd_tcp_retrans_segs");
    let before = (lost(&daemon), sent_again(&daemon));
    let tracing = Tracing::start(&daemon, &["16384", "--json"]);
    for _ in 0..50 {
        ping(&a, &b);
    }
    let between = (lost(&daemon), sent_again(&daemon));
    shown(&daemon, &["capture", "stop"]);
    let records = tracing.end_with_records();
    let after = (lost(&daemon), sent_again(&daemon));
    assert!(records.len() < 16_384, "the trace ended too early");
    let traced = (
        dropped(&records)["CONFIGURED_LOSS"],
        sums(&records, "steps", "name")["TcpRetransSegs"],
    );
    assert!(traced.0 > 0 && traced.1 > 0);
    // Delayed acknowledgements may be lost, too, after the last transfer and until the end of the trace.
    for (name, traced, before, between, after) in [
        ("lost", traced.0, before.0, between.0, after.0),
        ("sent again", traced.1, before.1, between.1, after.1),
    ] {
        assert!(
            traced <= after - before && traced >= between.saturating_sub(before),
            "{name}: {traced} traced, {before}, {between}, {after} counted"
        );
    }
    let total = metric(&daemon, "siwd_device_transmit_lost_frames");
    assert!(total >= after.0 && total <= lost(&daemon));
}

#[test]
fn a_request_is_followed_to_its_completion() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let (c, d) = pair(&daemon, 4096);
    let number = a.qp.qp_num();
    let tracing = Tracing::start(&daemon, &["4", "--json", "--qp", &number.to_string()]);
    ping(&c, &d);
    for _ in 0..4 {
        ping(&a, &b);
    }
    // It ends by itself.
    let records = tracing.end_with_records();
    assert_eq!(records.len(), 4, "{records:#?}");
    let first = &records[0];
    let events: Vec<&str> = records
        .iter()
        .map(|record| record["event"].as_str().unwrap())
        .collect();
    // The frame leaves during the turn.
    assert!(
        events[..2].contains(&"turn") && events[..2].contains(&"sent"),
        "{events:?}"
    );
    let turn = records
        .iter()
        .find(|record| record["event"] == "turn")
        .unwrap();
    assert_eq!(turn["lqpn"], number, "{first}");
    let steps = sums(std::slice::from_ref(turn), "steps", "name");
    assert_eq!(steps["SiwFramesOut"], 1, "{turn}");
    let received = records.iter().find(|record| record["event"] == "received");
    let received = received.unwrap();
    assert_eq!(received["lqpn"], b.qp.qp_num(), "{received}");
    assert!(
        received["frame"]["payload"].as_u64().unwrap() >= 4096,
        "{received}"
    );
    // As text, of one more transfer.
    let tracing = Tracing::start(&daemon, &["3", "--qp", &number.to_string()]);
    ping(&a, &b);
    ping(&a, &b);
    let text = tracing.end();
    let words = format!("turn lqpn {number}");
    assert!(
        text.contains(&words) && text.contains("SiwFramesOut 1"),
        "{text}"
    );
    // Without a trace, nothing is left behind.
    let start = Instant::now();
    while !shown_json(&daemon, &["show", "captures"]).is_empty() {
        assert!(start.elapsed() < PATIENCE, "the trace is still listed");
    }
    ping(&a, &b);
}

/// A queue pair that is connected with itself: each frame has a record where it is sent, and another where
/// it is received.
#[test]
fn loopback_frames_are_recorded_at_both_ends() {
    let daemon = Daemon::loopback();
    let end = End::new(&daemon.context(), 4096);
    let tracing = Tracing::start(&daemon, &["16384", "--json"]);
    let address = "10.77.0.1".parse().unwrap();
    let options = PairOptions {
        device: 0,
        local: address,
        peer: address,
        peer_qp_num: end.qp.qp_num(),
        ord: 1,
        ird: 1,
        denied_access: Access::NONE,
    };
    end.qp.connect_pair(&options).unwrap();
    for round in 0..50 {
        let sges = &[end.mr.sge(2048, 2048)];
        end.qp.post_recv(&[RecvWr { wr_id: round, sges }]).unwrap();
        let sges = [end.mr.sge(0, 2048)];
        let send = SendWr::send(round, SendData::Sges(&sges));
        end.qp.post_send(&[send]).unwrap();
        end.wc();
        end.wc();
    }
    shown(&daemon, &["capture", "stop"]);
    let records = tracing.end_with_records();
    let frames = |event: &str| {
        let mut counts = BTreeMap::<String, i64>::new();
        for record in records.iter().filter(|record| record["event"] == event) {
            *counts.entry(record["frame"].to_string()).or_default() += 1;
        }
        counts
    };
    let (mut sent, received) = (frames("sent"), frames("received"));
    assert!(sent.values().sum::<i64>() > 50, "{sent:?}");
    for (frame, count) in received {
        *sent.entry(frame).or_default() -= count;
    }
    // The trace may end between the two records of a frame.
    let left: i64 = sent.values().map(|count| count.abs()).sum();
    assert!(left <= 1, "{sent:?}");
}

#[test]
fn mistakes_are_refused_with_the_reason() {
    let daemon = Daemon::loopback();
    let (status, _, error) = siwctl(&daemon, &["trace", "0"]);
    assert!(status == Some(2) && error.contains("16384"), "{error}");
    let (status, _, error) = siwctl(&daemon, &["trace", "5", "--qp", "4000000"]);
    assert!(
        status == Some(1) && error.contains("no queue pair 4000000"),
        "{error}"
    );
    let tracing = Tracing::start(&daemon, &["5", "--port", "9"]);
    let rows = shown_json(&daemon, &["show", "captures"]);
    assert_eq!(
        (&rows[0]["kind"], &rows[0]["frames"]),
        (&"trace".into(), &0.into())
    );
    let (status, _, error) = siwctl(&daemon, &["trace", "5"]);
    let end = format!("end it with siwctl capture stop {}", rows[0]["number"]);
    assert!(status == Some(1) && error.contains(&end), "{error}");
    // Traffic that is not traced goes on.
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    shown(
        &daemon,
        &["capture", "stop", &rows[0]["number"].to_string()],
    );
    assert_eq!(tracing.end(), "");
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    open_to_all(&daemon);
    let theirs = as_user(65_534, || Context::open(Some(&daemon.socket)).unwrap());
    let request = StartTrace {
        selection: StartCapture::ALL_FRAMES,
        records: 1,
        reserved: 0,
    };
    let refused = theirs.start_trace(&request).err().unwrap().to_string();
    assert!(refused.contains("only operators can trace"), "{refused}");
}
