//! The next frames and turns of queue pairs of a running daemon, step by step.

use crate::capture::{Selection, copy_stream, watch_signals};
use crate::objects::printable;
use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::Value;
use siw_shm::control::messages::StartTrace;
use std::fmt::Write as _;
use std::io::{ErrorKind, Write};

#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Number of frames and turns of queue pairs
    #[arg(value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=16384))]
    count: u32,
    #[command(flatten)]
    selection: Selection,
}

/// Executes `siwctl trace`: prints each step when it arrives.
pub fn run(daemon: &siw::Context, args: &TraceArgs, as_json: bool) -> anyhow::Result<()> {
    let request = StartTrace {
        selection: args.selection.to_request(daemon)?,
        records: args.count,
        reserved: 0,
    };
    let signals = watch_signals().context("cannot watch signals")?;
    let (number, stream) = daemon.start_trace(&request)?;
    eprintln!("siwctl: trace {number}; Ctrl-C ends it");
    let mut rest = Vec::new();
    let mut records = 0;
    let mut start = None;
    let mut out = std::io::stdout().lock();
    let copied = copy_stream(daemon, number, stream, &signals, |bytes| {
        rest.extend_from_slice(bytes);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            records += 1;
            if as_json {
                out.write_all(&line)?;
                continue;
            }
            let row: Value = serde_json::from_slice(&line)?;
            let time = row["time"].as_f64().unwrap_or(0.0);
            let since = time - *start.get_or_insert(time);
            out.write_all(describe(&row, since).as_bytes())?;
        }
        out.flush()
    });
    match copied {
        Ok(()) => {}
        // The reader has seen enough, like `head`.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
        Err(error) => bail!("cannot write the trace: {error}"),
    }
    eprintln!("siwctl: {records} records");
    if records == 0 {
        eprintln!("siwctl: nothing matched: see siwctl show conn for addresses and ports");
    }
    Ok(())
}

/// A record in lines: the frame or turn, the counters that it moved, and its drops.
fn describe(row: &Value, since: f64) -> String {
    let text = |value: &Value| printable(value.as_str().unwrap_or_default());
    let mut out = format!(
        "{since:>12.6} worker {} {} {}",
        row["worker"],
        text(&row["device"]),
        text(&row["event"])
    );
    if let Some(qp) = row["lqpn"].as_u64() {
        let _ = write!(out, " lqpn {qp}");
    }
    let frame = &row["frame"];
    if !frame.is_null() {
        let _ = write!(out, " {} bytes", frame["bytes"]);
    }
    if let Some(from) = frame["src_addr"].as_str() {
        let _ = write!(out, " {from} > {}", text(&frame["dst_addr"]));
    }
    if let Some(flags) = frame["flags"].as_str() {
        let _ = write!(
            out,
            " {flags} seq {} ack {} window {} payload {}",
            frame["seq"], frame["ack"], frame["window"], frame["payload"]
        );
    } else if let Some(ether_type) = frame["ether_type"].as_u64() {
        let _ = write!(out, " ethertype 0x{ether_type:04x}");
    }
    out.push('\n');
    let steps = row["steps"].as_array().into_iter().flatten();
    let steps: Vec<String> = steps
        .map(|step| format!("{} {}", text(&step["name"]), step["count"]))
        .collect();
    if !steps.is_empty() {
        let _ = writeln!(out, "{:>13}{}", "", steps.join(", "));
    }
    for drop in row["drops"].as_array().into_iter().flatten() {
        let (reason, meaning) = (text(&drop["reason"]), text(&drop["meaning"]));
        let count = &drop["count"];
        let _ = writeln!(out, "{:>13}dropped: {reason} {count}: {meaning}", "");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_record_is_described_in_lines() {
        let row = json!({
            "worker": 0, "device": "siw1", "event": "received", "lqpn": null,
            "frame": {
                "bytes": 74, "src_addr": "10.77.0.1:4000", "dst_addr": "10.77.0.2:9",
                "flags": "SYN", "seq": 7, "ack": 0, "window": 9, "payload": 0,
            },
            "steps": [{ "name": "TcpInSegs", "count": 1 }],
            "drops": [{ "reason": "SiwNoPorts", "meaning": "no listener", "count": 1 }],
        });
        let text = describe(&row, 0.5);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "    0.500000 worker 0 siw1 received 74 bytes 10.77.0.1:4000 > 10.77.0.2:9 SYN seq 7 ack 0 window 9 payload 0",
                "             TcpInSegs 1",
                "             dropped: SiwNoPorts 1: no listener",
            ]
        );
    }
}
