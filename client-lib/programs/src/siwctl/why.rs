//! Why connections ended or were not made.

use crate::connections::state_text;
use crate::objects::{ProcessNames, command_name, printable, read_list};
use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};
use siw::{ListPosition, ObjectList};
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// The table of ends, the oldest first.
pub fn ends_text(rows: &[Value]) -> String {
    let mut out = String::new();
    for row in rows {
        let _ = writeln!(out, "{}", end_text(row));
    }
    out
}

/// An end in one line.
pub fn end_text(row: &Value) -> String {
    let address = |key: &str| row[key].as_str().unwrap_or("*").to_owned();
    format!(
        "{} lqpn {} pid {} comm {} src-addr {} dst-addr {} {}: {}",
        age(row["time"].as_f64().unwrap_or(0.0)),
        row["lqpn"],
        row["pid"],
        command_name(row),
        address("src_addr"),
        address("dst_addr"),
        row["event"].as_str().unwrap_or_default(),
        printable(row["reason"].as_str().unwrap_or_default()),
    )
}

/// Time since an event, such as `12.3s ago`.
pub fn age(time: f64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = (now.map_or(0.0, |now| now.as_secs_f64()) - time).max(0.0);
    match seconds {
        seconds if seconds < 120.0 => format!("{seconds:.1}s ago"),
        seconds if seconds < 7200.0 => format!("{:.0}min ago", seconds / 60.0),
        seconds => format!("{:.1}h ago", seconds / 3600.0),
    }
}

#[derive(Debug, Args)]
pub struct WhyArgs {
    /// Number of the queue pair
    #[arg(value_name = "LQPN")]
    qp: u32,
    /// Also the recorded events
    #[arg(short, long)]
    events: bool,
}

/// Explains the state of a queue pair: its recording, its latest end, and its connection if it has one.
pub fn explain(daemon: &siw::Context, args: &WhyArgs, as_json: bool) -> anyhow::Result<String> {
    let qp = args.qp;
    let is_meant = |row: &Value| row["lqpn"] == qp;
    let ends = read_list(daemon, ObjectList::Ends)?;
    let end = ends.into_iter().rev().find(is_meant);
    let connections = read_list(daemon, ObjectList::Connections)?;
    let connection = connections.into_iter().find(is_meant);
    let queue_pairs = read_list(daemon, ObjectList::QueuePairs)?;
    let queue_pair = queue_pairs.into_iter().find(is_meant);
    let (recording, events) = read_recording(daemon, qp)?;
    if as_json {
        return Ok(format!(
            "{}\n",
            json!({
                "lqpn": qp,
                "queue_pair": queue_pair,
                "connection": connection,
                "end": end,
                "recording": recording,
                "events": events,
            })
        ));
    }
    let mut sentences = Vec::new();
    if let Some(recording) = &recording {
        sentences.extend(describe_recording(recording, &events, end.as_ref()));
    }
    if let Some(queue_pair) = &queue_pair {
        sentences.push(format!(
            "Queue pair {qp} of {} (pid {}) is in {}.",
            command_name(queue_pair),
            queue_pair["pid"],
            queue_pair["state"].as_str().unwrap_or("an unknown state")
        ));
    }
    if let Some(connection) = connection.filter(|connection| !connection["tcp"].is_null()) {
        sentences.push(format!(
            "Its connection {} -> {}: {}",
            connection["tcp"]["local"].as_str().unwrap_or("*"),
            connection["tcp"]["remote"].as_str().unwrap_or("*"),
            state_text(&connection)
        ));
    }
    match &end {
        Some(_) if recording.is_some() => {}
        Some(end) => sentences.push(end_text(end)),
        None if sentences.is_empty() => bail!(
            "siwd knows no queue pair {qp}, nor an end of its connection; it keeps the last 256 ends of each user"
        ),
        None => sentences.push("No connection of it has ended or failed.".to_owned()),
    }
    let mut out = sentences.join(" ") + "\n";
    if args.events {
        out += &events_text(&events);
    }
    Ok(out)
}

/// Reads the recording of a queue pair, and its events, the oldest first.
fn read_recording(daemon: &siw::Context, qp: u32) -> anyhow::Result<(Option<Value>, Vec<Value>)> {
    let mut position = ListPosition {
        major: 0,
        minor: qp.into(),
    };
    let text = daemon.list_objects_after(ObjectList::Recording, &mut position)?;
    let rows = text.lines().map(serde_json::from_str);
    let mut rows: Vec<Value> = rows.collect::<Result<_, _>>()?;
    if rows.is_empty() {
        return Ok((None, rows));
    }
    let mut recording = rows.remove(0);
    if let Some(name) = ProcessNames::default().find(recording["pid"].as_u64()) {
        recording["name"] = name.into();
    }
    Ok((Some(recording), rows))
}

/// Sentences about a queue pair's life: its creation, its latest connection with the numbers at its end,
/// and its own end.
fn describe_recording(recording: &Value, events: &[Value], end: Option<&Value>) -> Vec<String> {
    let time = |of: &Value| of.as_f64().unwrap_or(0.0);
    let detail = |event: &Value| printable(event["detail"].as_str().unwrap_or("no reason given"));
    let mut sentences = vec![format!(
        "Queue pair {} of {} (pid {}, client {}) was created {}.",
        recording["lqpn"],
        command_name(recording),
        recording["pid"],
        recording["client"],
        age(time(&recording["created"])),
    )];
    let latest = |name: &str| events.iter().rev().find(|event| event["event"] == name);
    let established = latest("established");
    if let Some(event) = established {
        let connected = age(time(&event["time"]));
        sentences.push(format!("It was connected {connected}: {}.", detail(event)));
    }
    let closes = ["disconnected", "not connected"];
    let closed = events.iter().rev().find(|event| {
        let name = event["event"].as_str().unwrap_or_default();
        closes.contains(&name)
    });
    if let Some(event) = closed {
        let ended = time(&event["time"]);
        let name = event["event"].as_str().unwrap_or_default();
        let lasted = established
            .map(|start| ended - time(&start["time"]))
            .filter(|lasted| *lasted >= 0.0 && name == "disconnected");
        let lasted = lasted.map_or(String::new(), |time| format!(" after {time:.3} s"));
        let reason = detail(event);
        let addresses = end.map_or(String::new(), |end| {
            let address = |key: &str| end[key].as_str().unwrap_or("*").to_owned();
            format!(" {} -> {}", address("src_addr"), address("dst_addr"))
        });
        sentences.push(format!(
            "The connection{addresses} ended {}{lasted}: {name}: {reason}.",
            age(ended)
        ));
        if !recording["last_connection"].is_null() {
            sentences.push(describe_last_connection(&recording["last_connection"]));
        }
    }
    sentences.extend(describe_faults(&recording["injected_faults"]));
    for name in ["QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR"] {
        if let Some(event) = latest(name) {
            let when = age(time(&event["time"]));
            sentences.push(format!("Its event {name}, {when}: {}.", detail(event)));
        }
    }
    let refused = |event: &&Value| event["refused"] == true;
    if let Some(event) = events.iter().rev().find(refused) {
        let (when, request) = (age(time(&event["time"])), &event["event"]);
        let request = request.as_str().unwrap_or("?");
        let reason = detail(event);
        sentences.push(format!(
            "Its request {request}, {when}, was refused: {reason}."
        ));
    }
    if let Some(event) = latest("destroyed") {
        let when = age(time(&event["time"]));
        let reason = detail(event);
        sentences.push(format!("It was destroyed {when}: {reason}."));
    }
    sentences
}

/// Faults that plans have injected, which may be the cause of everything else.
fn describe_faults(faults: &Value) -> Option<String> {
    let faults = faults.as_array().filter(|faults| !faults.is_empty())?;
    let words = faults.iter().map(|fault| {
        let text = printable(fault["fault"].as_str().unwrap_or_default());
        let last = age(fault["time"].as_f64().unwrap_or(0.0));
        format!("{text} ({} times, last {last})", fault["count"])
    });
    let words: Vec<_> = words.collect();
    Some(format!(
        "Faults were injected on purpose, and may be the cause: {}.",
        words.join("; ")
    ))
}

/// Numbers of TCP, and errors of RDMAP, at the end of a connection.
fn describe_last_connection(connection: &Value) -> String {
    let tcp = &connection["tcp"];
    let number = |key: &str| tcp[key].as_u64().unwrap_or(0);
    let mut words = vec![format!(
        "At its end it was {}",
        connection["phase"]
            .as_str()
            .unwrap_or("in an unknown state")
    )];
    if !tcp.is_null() {
        let causes = [
            ("retrans_rto", "after timeouts"),
            ("retrans_fast", "after reported losses"),
            ("retrans_tlp", "as tail loss probes"),
            ("retrans_syn", "in the handshake"),
        ];
        let causes = causes.iter().filter(|(key, _)| number(key) > 0);
        let causes: Vec<String> = causes
            .map(|(key, cause)| format!("{} {cause}", number(key)))
            .collect();
        let causes = match causes.is_empty() {
            true => String::new(),
            false => format!(" ({})", causes.join(", ")),
        };
        words.push(format!(
            "TCP had retransmitted {} segments{causes} in {} timeouts, with {} bytes unacknowledged and {} not sent",
            number("retrans"),
            number("timeouts"),
            number("unacked_bytes"),
            number("notsent_bytes"),
        ));
        if let Some(rtt) = tcp["rtt_us"].as_f64() {
            let rto = number("rto_us") as f64 / 1e3;
            let window = number("snd_wnd");
            words.push(format!(
                "the round-trip time was {:.3} ms, the retransmission timeout {rto} ms, the peer's window {window} bytes",
                rtt / 1e3
            ));
        }
    }
    let rdmap = &connection["rdmap"];
    for (key, verb) in [
        ("terminate_sent", "this side had found"),
        ("terminate_received", "the peer had reported"),
    ] {
        if let Some(error) = rdmap[key].as_str() {
            words.push(format!("{verb} {}", printable(error)));
        }
    }
    words.join("; ") + "."
}

/// The table of recorded events, the oldest first.
fn events_text(events: &[Value]) -> String {
    let mut out = String::new();
    for event in events {
        let count = event["count"].as_u64().unwrap_or(1);
        let times = match count {
            1 => String::new(),
            count => format!(" ({count} times)"),
        };
        let refused = match event["refused"] == true {
            true => "refused: ",
            false => "",
        };
        let _ = writeln!(
            out,
            "  {:>12}  {}{times} {refused}{}",
            age(event["time"].as_f64().unwrap_or(0.0)),
            event["event"].as_str().unwrap_or_default(),
            printable(event["detail"].as_str().unwrap_or_default()),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refused_requests_are_explained_as_refused() {
        let recording = json!({ "lqpn": 7, "pid": 1, "client": 2, "created": 0.0 });
        let event = |refused: bool| {
            json!({
                "time": 0.0, "event": "Connect", "count": 1, "refused": refused,
                "detail": "refused: 10.77.0.9:9",
            })
        };
        let explain =
            |event: Value| describe_recording(&recording, std::slice::from_ref(&event), None);
        assert_eq!(explain(event(false)).len(), 1);
        let refused = &explain(event(true))[1];
        assert!(
            refused.contains("was refused: refused: 10.77.0.9:9"),
            "{refused}"
        );
    }
}
