//! Why connections ended or were not made.

use crate::connections::state_text;
use crate::objects::{command_name, printable, read_list};
use anyhow::bail;
use serde_json::{Value, json};
use siw::ObjectList;
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
fn age(time: f64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = (now.map_or(0.0, |now| now.as_secs_f64()) - time).max(0.0);
    match seconds {
        seconds if seconds < 120.0 => format!("{seconds:.1}s ago"),
        seconds if seconds < 7200.0 => format!("{:.0}min ago", seconds / 60.0),
        seconds => format!("{:.1}h ago", seconds / 3600.0),
    }
}

/// Explains the state of a queue pair: its latest end, and its connection if it has one.
pub fn explain(daemon: &siw::Context, qp: u32, as_json: bool) -> anyhow::Result<String> {
    let is_meant = |row: &Value| row["lqpn"] == qp;
    let ends = read_list(daemon, ObjectList::Ends)?;
    let end = ends.into_iter().rev().find(is_meant);
    let connections = read_list(daemon, ObjectList::Connections)?;
    let connection = connections.into_iter().find(is_meant);
    let queue_pairs = read_list(daemon, ObjectList::QueuePairs)?;
    let queue_pair = queue_pairs.into_iter().find(is_meant);
    if as_json {
        return Ok(format!(
            "{}\n",
            json!({ "lqpn": qp, "queue_pair": queue_pair, "connection": connection, "end": end })
        ));
    }
    let mut out = String::new();
    if let Some(queue_pair) = &queue_pair {
        let _ = writeln!(
            out,
            "Queue pair {qp} of {} (pid {}) is in {}.",
            command_name(queue_pair),
            queue_pair["pid"],
            queue_pair["state"].as_str().unwrap_or("an unknown state")
        );
    }
    if let Some(connection) = &connection {
        let _ = writeln!(
            out,
            "Its connection {} -> {}: {}",
            connection["tcp"]["local"].as_str().unwrap_or("*"),
            connection["tcp"]["remote"].as_str().unwrap_or("*"),
            state_text(connection)
        );
    }
    match &end {
        Some(end) => {
            let _ = writeln!(out, "{}", end_text(end));
        }
        None if out.is_empty() => bail!(
            "siwd knows no queue pair {qp}, nor an end of its connection; it keeps the last 256 ends of each user"
        ),
        None => out.push_str("No connection of it has ended or failed.\n"),
    }
    Ok(out)
}
