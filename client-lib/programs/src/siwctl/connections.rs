//! Connections in the form of `ss -ti`.

use crate::objects::{command_name, printable};
use serde_json::Value;
use std::fmt::Write;

/// Causes of retransmissions, and the probes of a closed window. ss(8) has no words for them.
const CAUSES: [&str; 5] = [
    "retrans_rto",
    "retrans_fast",
    "retrans_tlp",
    "retrans_syn",
    "window_probes",
];

/// First line of the table.
pub fn title() -> String {
    format!(
        "{:<11} {:>8} {:>8} {:>24} {:>24} Process\n",
        "State", "Recv-Q", "Send-Q", "Local Address:Port", "Peer Address:Port"
    )
}

/// Adds the line of a connection to the table, followed by its state.
pub fn add_text(table: &mut String, row: &Value) {
    let tcp = &row["tcp"];
    let bytes = |key: &str| tcp[key].as_u64().unwrap_or(0);
    let _ = writeln!(
        table,
        "{:<11} {:>8} {:>8} {:>24} {:>24} users:((\"{}\",pid={},qp={}))",
        tcp["state"].as_str().unwrap_or("UNCONN"),
        bytes("readable_bytes"),
        bytes("unacked_bytes") + bytes("notsent_bytes"),
        tcp["local"].as_str().unwrap_or("*:*"),
        tcp["remote"].as_str().unwrap_or("*:*"),
        command_name(row),
        row["pid"],
        row["lqpn"],
    );
    let _ = writeln!(table, "\t{}", state_text(row));
}

/// State of a connection: TCP as ss(8) names it, then MPA and RDMAP.
pub fn state_text(row: &Value) -> String {
    let mut words = Vec::new();
    let tcp = &row["tcp"];
    for (flag, word) in [("timestamps", "ts"), ("sack", "sack"), ("ecn", "ecn")] {
        if tcp[flag] == true {
            words.push(word.to_owned());
        }
    }
    let milliseconds = |key: &str| tcp[key].as_f64().map(|us| us / 1e3);
    if let Some(rto) = milliseconds("rto_us") {
        words.push(format!("rto:{rto}"));
    }
    if let Some(rtt) = milliseconds("rtt_us") {
        words.push(format!("rtt:{rtt:.3}"));
    }
    let number = |key: &str| tcp[key].as_u64();
    let mss = number("mss").filter(|mss| *mss > 0);
    let segments = |key: &str| Some(number(key)?.div_ceil(mss?));
    let named = [
        ("mss", mss),
        ("cwnd", segments("cwnd_bytes")),
        ("ssthresh", segments("ssthresh_bytes")),
        (
            "unacked",
            segments("unacked_bytes").filter(|count| *count > 0),
        ),
        (
            "notsent",
            number("notsent_bytes").filter(|bytes| *bytes > 0),
        ),
        ("snd_wnd", number("snd_wnd")),
        ("timeouts", number("timeouts").filter(|count| *count > 0)),
    ];
    for (name, value) in named {
        if let Some(value) = value {
            words.push(format!("{name}:{value}"));
        }
    }
    if let Some(retransmitted) = number("retrans").filter(|count| *count > 0) {
        let outstanding = number("retrans_out").unwrap_or(0);
        words.push(format!("retrans:{outstanding}/{retransmitted}"));
    }
    for key in CAUSES {
        if let Some(count) = number(key).filter(|count| *count > 0) {
            words.push(format!("{key}:{count}"));
        }
    }
    words.push(format!("rdma:({})", rdma_text(row)));
    words.join(" ")
}

fn rdma_text(row: &Value) -> String {
    let rdmap = &row["rdmap"];
    let word = |value: &Value| printable(value.as_str().unwrap_or("?"));
    let mut words = vec![
        format!("state:{}", word(&rdmap["state"])),
        format!("phase:{}", word(&row["phase"])),
        format!("crc:{}", if rdmap["crc"] == true { "on" } else { "off" }),
    ];
    for (key, name) in [("markers_in", "markers_in"), ("markers_out", "markers_out")] {
        if rdmap[key] == true {
            words.push(name.to_owned());
        }
    }
    for key in ["ird", "ord", "mulpdu"] {
        words.push(format!("{key}:{}", rdmap[key]));
    }
    for key in ["terminate_sent", "terminate_received"] {
        if let Some(what) = rdmap[key].as_str() {
            words.push(format!("{key}:\"{what}\""));
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn state_has_the_names_and_units_of_ss() {
        let row = json!({
            "lqpn": 1, "phase": "running",
            "rdmap": {
                "state": "RTS", "ird": 16, "ord": 8, "crc": true, "mulpdu": 1440,
                "markers_in": false, "markers_out": true,
                "terminate_sent": null, "terminate_received": null,
            },
            "tcp": {
                "state": "ESTAB", "timestamps": false, "sack": true, "ecn": false, "rto_us": 200_000,
                "rtt_us": 24.5, "mss": 1460, "cwnd_bytes": 14_600, "ssthresh_bytes": null,
                "snd_wnd": 65_536, "unacked_bytes": 1461, "notsent_bytes": 0, "retrans": 7,
                "timeouts": 1, "retrans_out": 2, "retrans_rto": 1, "retrans_fast": 5, "retrans_tlp": 1,
                "retrans_syn": 0, "window_probes": 3,
            },
        });
        assert_eq!(
            state_text(&row),
            "sack rto:200 rtt:0.025 mss:1460 cwnd:10 unacked:2 snd_wnd:65536 timeouts:1 retrans:2/7 \
             retrans_rto:1 retrans_fast:5 retrans_tlp:1 window_probes:3 rdma:(state:RTS phase:running crc:on markers_out ird:16 ord:8 mulpdu:1440)"
        );
    }
}
