//! Lists of objects. Those that rdma(8) also has are printed with its fields, in its order, as text and
//! as JSON; with `--details` further fields follow.

use crate::statistics::{self, rows};
use crate::{Show, connections};
use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::Value;
use siw::ObjectList;
use std::collections::HashMap;
use std::fmt::Write;

#[derive(Debug, Args)]
pub struct Filter {
    /// Only objects of this device
    #[arg(long)]
    device: Option<String>,
    /// Only objects of this process
    #[arg(long)]
    pid: Option<u64>,
    /// Only objects of this client
    #[arg(long)]
    client: Option<u64>,
    /// Only this queue pair
    #[arg(long, value_name = "LQPN")]
    lqpn: Option<u64>,
    /// Further fields
    #[arg(short, long)]
    details: bool,
}

impl Filter {
    fn selects(&self, row: &Value) -> bool {
        let is = |key: &str, wanted: Option<u64>| wanted.is_none() || row[key].as_u64() == wanted;
        let owner = if row["client"].is_null() {
            "id"
        } else {
            "client"
        };
        let on_device = |device: &String| {
            row["device"] == device.as_str()
                || row["devices"]
                    .as_array()
                    .is_some_and(|all| all.iter().any(|name| name == device.as_str()))
        };
        is("pid", self.pid)
            && is(owner, self.client)
            && is("lqpn", self.lqpn)
            && self.device.as_ref().is_none_or(on_device)
    }
}

/// Executes `siwctl show`.
pub fn show(daemon: &siw::Context, show: &Show, json: bool) -> anyhow::Result<String> {
    match show {
        Show::Devices => devices(daemon, json),
        Show::Workers => {
            show_statistics(daemon, json, workers_text, |stats| stats["workers"].clone())
        }
        Show::Drops { all } => show_statistics(
            daemon,
            json,
            |stats| drops_text(rows(stats, "drops"), *all),
            |stats| stats["drops"].clone(),
        ),
        Show::Users => show_statistics(daemon, json, users_text, |stats| stats["users"].clone()),
        Show::Config => show_statistics(
            daemon,
            json,
            |stats| format!("{:#}\n", stats["settings"]),
            |stats| stats["settings"].clone(),
        ),
        Show::Clients(filter) => {
            let rows = read_rows(daemon, ObjectList::Clients, filter)?;
            Ok(if json {
                json_array(&rows)
            } else {
                clients_text(&rows)
            })
        }
        Show::Qp(filter) => list(daemon, ObjectList::QueuePairs, filter, &QUEUE_PAIR, json),
        Show::Cq(filter) => list(
            daemon,
            ObjectList::CompletionQueues,
            filter,
            &COMPLETION_QUEUE,
            json,
        ),
        Show::Srq(filter) => list(
            daemon,
            ObjectList::SharedReceiveQueues,
            filter,
            &SHARED_RECEIVE_QUEUE,
            json,
        ),
        Show::Mr(filter) => list(
            daemon,
            ObjectList::MemoryRegions,
            filter,
            &MEMORY_REGION,
            json,
        ),
        Show::Pd(filter) => list(
            daemon,
            ObjectList::ProtectionDomains,
            filter,
            &PROTECTION_DOMAIN,
            json,
        ),
        Show::CmId(filter) => list(daemon, ObjectList::CmIds, filter, &CM_ID, json),
        Show::Conn(filter) => {
            let rows = read_rows(daemon, ObjectList::Connections, filter)?;
            Ok(if json {
                json_array(&rows)
            } else {
                connections::text(&rows)
            })
        }
        Show::Captures => {
            let rows = read_list(daemon, ObjectList::Captures)?;
            Ok(if json {
                json_array(&rows)
            } else {
                captures_text(&rows)
            })
        }
        Show::Ends(filter) => {
            let rows = read_rows(daemon, ObjectList::Ends, filter)?;
            Ok(if json {
                json_array(&rows)
            } else {
                crate::why::ends_text(&rows)
            })
        }
    }
}

/// Reads the objects of a list that the filter selects.
pub fn read_rows(
    daemon: &siw::Context,
    list: ObjectList,
    filter: &Filter,
) -> anyhow::Result<Vec<Value>> {
    let rows = read_list(daemon, list)?;
    Ok(rows.into_iter().filter(|row| filter.selects(row)).collect())
}

/// Reads a list.
pub fn read_list(daemon: &siw::Context, list: ObjectList) -> anyhow::Result<Vec<Value>> {
    let text = daemon.list_objects(list)?;
    let rows = text.lines().map(serde_json::from_str);
    let mut rows: Vec<Value> = rows
        .collect::<Result<_, _>>()
        .context("invalid answer of siwd")?;
    name_processes(&mut rows);
    Ok(rows)
}

/// Names the clients' processes as rdma(8) does; those of other pid namespaces keep the name that their
/// library gave. Many objects belong to few processes.
pub fn name_processes(rows: &mut [Value]) {
    let mut known = HashMap::new();
    for row in rows {
        let Some(pid) = row["pid"].as_u64().filter(|pid| *pid != 0) else {
            continue;
        };
        let name = known.entry(pid).or_insert_with(|| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            name.ok().map(|name| name.trim_end().to_owned())
        });
        if let Some(name) = name {
            row["name"] = name.as_str().into();
        }
    }
}

/// One JSON array, in one line.
fn json_array(rows: &[Value]) -> String {
    let rows: Vec<String> = rows.iter().map(Value::to_string).collect();
    format!("[{}]\n", rows.join(","))
}

/// Fields of a kind of object: those of rdma(8), and the others.
struct Layout {
    /// Queue pairs and connection managers' ids belong to a port of a device; other objects to the
    /// device.
    has_port: bool,
    /// Names in rdma(8) and in siwd's lists.
    fields: &'static [(&'static str, &'static str)],
    details: &'static [&'static str],
}

const QUEUE_PAIR: Layout = Layout {
    has_port: true,
    fields: &[
        ("lqpn", "lqpn"),
        ("pdn", "pdn"),
        ("rqpn", "rqpn"),
        ("type", "type"),
        ("state", "state"),
        ("pid", "pid"),
        ("comm", "name"),
    ],
    details: &[
        "client", "worker", "send_cqn", "recv_cqn", "srqn", "ird", "ord", "src_addr", "dst_addr",
    ],
};
const COMPLETION_QUEUE: Layout = Layout {
    has_port: false,
    fields: &[
        ("cqn", "cqn"),
        ("cqe", "cqe"),
        ("users", "users"),
        ("ctxn", "client"),
        ("pid", "pid"),
        ("comm", "name"),
    ],
    details: &["channel"],
};
const SHARED_RECEIVE_QUEUE: Layout = Layout {
    has_port: false,
    fields: &[
        ("srqn", "srqn"),
        ("pdn", "pdn"),
        ("pid", "pid"),
        ("comm", "name"),
    ],
    details: &["client", "users", "max_wr", "posted"],
};
const MEMORY_REGION: Layout = Layout {
    has_port: false,
    fields: &[
        ("mrn", "mrn"),
        ("rkey", "rkey"),
        ("lkey", "lkey"),
        ("iova", "iova"),
        ("mrlen", "mrlen"),
        ("pdn", "pdn"),
        ("pid", "pid"),
        ("comm", "name"),
    ],
    details: &["client", "access"],
};
const PROTECTION_DOMAIN: Layout = Layout {
    has_port: false,
    fields: &[
        ("pdn", "pdn"),
        ("users", "users"),
        ("ctxn", "client"),
        ("pid", "pid"),
        ("comm", "name"),
    ],
    details: &[],
};
const CM_ID: Layout = Layout {
    has_port: true,
    fields: &[
        ("lqpn", "lqpn"),
        ("qp-type", "qp-type"),
        ("state", "state"),
        ("ps", "ps"),
        ("pid", "pid"),
        ("comm", "name"),
        ("cm-idn", "cm-idn"),
        ("src-addr", "src_addr"),
        ("dst-addr", "dst_addr"),
    ],
    details: &["client", "backlog", "waiting"],
};

/// Fields that rdma(8) prints in hexadecimal.
const HEXADECIMAL: [&str; 3] = ["rkey", "lkey", "iova"];
/// Device of objects that can be used on all devices.
const ANY_DEVICE: &str = "any";

fn list(
    daemon: &siw::Context,
    list: ObjectList,
    filter: &Filter,
    layout: &Layout,
    json: bool,
) -> anyhow::Result<String> {
    if filter.device.is_some() && !layout.has_port {
        bail!("these objects belong to no device: leave out --device");
    }
    let rows = read_rows(daemon, list, filter)?;
    let to_line = if json { json_object } else { text_line };
    let lines: Vec<String> = rows
        .iter()
        .map(|row| to_line(layout, row, filter.details))
        .collect();
    Ok(match json {
        true => format!("[{}]\n", lines.join(",")),
        false => lines.concat(),
    })
}

/// Fields of an object with their values; fields without a value are left out.
fn fields_of(layout: &Layout, row: &Value, details: bool) -> Vec<(&'static str, Value)> {
    let details = layout.details.iter().filter(|_| details);
    let fields = layout
        .fields
        .iter()
        .copied()
        .chain(details.map(|name| (*name, *name)));
    let with_values = fields.filter(|(_, key)| !row[*key].is_null());
    let with_values = with_values.map(|(name, key)| match name {
        "comm" => (name, command_name(row).into()),
        _ if HEXADECIMAL.contains(&name) => (
            name,
            format!("0x{:x}", row[key].as_u64().unwrap_or(0)).into(),
        ),
        _ => (name, row[key].clone()),
    });
    with_values.collect()
}

fn text_line(layout: &Layout, row: &Value, details: bool) -> String {
    let device = row["device"].as_str().unwrap_or(ANY_DEVICE);
    let mut line = match layout.has_port {
        true => format!("link {device}/1 "),
        false => format!("dev {device} "),
    };
    for (name, value) in fields_of(layout, row, details) {
        let _ = match &value {
            Value::String(text) => write!(line, "{name} {text} "),
            Value::Array(all) => {
                let all: Vec<&str> = all.iter().filter_map(Value::as_str).collect();
                write!(line, "{name} {} ", all.join(","))
            }
            value => write!(line, "{name} {value} "),
        };
    }
    line.push('\n');
    line
}

fn json_object(layout: &Layout, row: &Value, details: bool) -> String {
    let device = row["device"].as_str().unwrap_or(ANY_DEVICE);
    let mut object = String::from("{");
    if let Some(index) = row["device_index"].as_u64() {
        let _ = write!(object, "\"ifindex\":{index},");
    }
    let _ = write!(object, "\"ifname\":{}", Value::from(device));
    if layout.has_port {
        object.push_str(",\"port\":1");
    }
    for (name, value) in fields_of(layout, row, details) {
        let _ = write!(object, ",\"{name}\":{value}");
    }
    object.push('}');
    object
}

/// Name of the process of a row.
pub fn command_name(row: &Value) -> String {
    printable(row["name"].as_str().unwrap_or("").trim_end())
}

/// The text without control characters: names come from clients.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|letter| if letter.is_control() { '?' } else { letter })
        .collect()
}

/// A table of the daemon's statistics, which only operators can read.
fn show_statistics(
    daemon: &siw::Context,
    json: bool,
    to_text: impl Fn(&Value) -> String,
    to_json: impl Fn(&Value) -> Value,
) -> anyhow::Result<String> {
    let stats = statistics::read_all(daemon)?;
    Ok(match json {
        true => format!("{}\n", to_json(&stats)),
        false => to_text(&stats),
    })
}

fn devices(daemon: &siw::Context, json: bool) -> anyhow::Result<String> {
    let devices = daemon.query_devices()?;
    if json {
        let rows = devices.iter().map(|device| {
            let ips: Vec<String> = device.ips.iter().map(ToString::to_string).collect();
            serde_json::json!({
                "ifindex": device.index,
                "ifname": device.name,
                "driver": device.driver,
                "mac": mac_text(device.mac),
                "state": if device.active { "ACTIVE" } else { "DOWN" },
                "mtu": device.mtu,
                "speed_mbps": device.link_mbps,
                "crc": device.crc,
                "mpa_revision": device.mpa_rev,
                "addresses": ips,
            })
        });
        return Ok(json_array(&rows.collect::<Vec<_>>()));
    }
    let mut out = String::new();
    for device in &devices {
        let ips: Vec<String> = device.ips.iter().map(ToString::to_string).collect();
        let (state, physical) = match device.active {
            true => ("ACTIVE", "LINK_UP"),
            false => ("DOWN", "LINK_DOWN"),
        };
        let _ = writeln!(
            out,
            "link {}/1 state {state} physical_state {physical} driver {} mac {} mtu {} speed {} crc {} addresses {}",
            device.name,
            device.driver,
            mac_text(device.mac),
            device.mtu,
            match device.link_mbps {
                0 => "unknown".to_owned(),
                mbps => format!("{mbps}Mb/s"),
            },
            if device.crc { "on" } else { "off" },
            ips.join(",")
        );
    }
    Ok(out)
}

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn workers_text(stats: &Value) -> String {
    let mut out = format!(
        "{:<7} {:>5} {:>12} {:>14} {:>12} {:>12} {:>12} {:>12}\n",
        "worker", "core", "queue pairs", "batches", "sleeps", "cpu ms", "buffers", "free"
    );
    for (number, worker) in rows(stats, "workers").iter().enumerate() {
        let of = |key: &str| worker[key].as_u64().unwrap_or(0);
        let _ = writeln!(
            out,
            "{number:<7} {:>5} {:>12} {:>14} {:>12} {:>12} {:>12} {:>12}",
            of("core"),
            of("queue_pairs"),
            of("iterations"),
            of("sleeps"),
            of("cpu_ns") / 1_000_000,
            of("buffers"),
            of("buffers_free")
        );
    }
    out
}

/// Reasons with their counts; without `all` those that have occurred.
fn drops_text(rows: &[Value], all: bool) -> String {
    let mut out = String::new();
    for row in rows {
        let count = row["count"].as_u64().unwrap_or(0);
        if count == 0 && !all {
            continue;
        }
        let _ = writeln!(
            out,
            "{:<8} {:<24} {count:>12}  {}",
            row["device"].as_str().unwrap_or("-"),
            row["reason"].as_str().unwrap_or_default(),
            row["meaning"].as_str().unwrap_or_default()
        );
    }
    if out.is_empty() {
        out.push_str("nothing was dropped or refused\n");
    }
    out
}

fn users_text(stats: &Value) -> String {
    let mut out = String::new();
    for (uid, held) in stats["users"].as_object().into_iter().flatten() {
        let _ = writeln!(out, "user {uid}");
        for (name, amount) in held.as_object().into_iter().flatten() {
            let _ = writeln!(out, "  {name:<32} {amount:>16}");
        }
    }
    out
}

fn captures_text(rows: &[Value]) -> String {
    let mut out = String::new();
    for row in rows {
        let started = match row["pid"].as_u64() {
            Some(pid) => format!("of pid {pid}"),
            None => "of the configuration".to_owned(),
        };
        let filter = row["filter"].as_object().into_iter().flatten();
        let filter = filter.filter(|(_, value)| !value.is_null());
        let filter: String = filter
            .map(|(name, value)| format!(" {name} {}", value.to_string().trim_matches('"')))
            .collect();
        let _ = writeln!(
            out,
            "{} {} {started}{filter}: frames {} bytes {} dropped {}",
            row["kind"].as_str().unwrap_or("capture"),
            row["number"],
            row["frames"],
            row["bytes"],
            row["dropped"]
        );
    }
    out
}

fn clients_text(rows: &[Value]) -> String {
    let mut out = format!(
        "{:>8} {:>8} {:>8} {:<16} {:>8} {:>8} {:>8} {:>8} {:>14}\n",
        "client", "pid", "user", "comm", "qp", "cq", "mr", "conn", "memory bytes"
    );
    for row in rows {
        let of = |key: &str| row[key].as_u64().unwrap_or(0);
        let _ = writeln!(
            out,
            "{:>8} {:>8} {:>8} {:<16} {:>8} {:>8} {:>8} {:>8} {:>14}",
            of("id"),
            of("pid"),
            of("user"),
            command_name(row),
            of("queue_pairs"),
            of("completion_queues"),
            of("memory_regions"),
            of("connections"),
            of("memory_bytes")
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn queue_pairs_look_as_rdma_prints_them() {
        let row = json!({
            "device": "siw0", "device_index": 0, "lqpn": 5, "rqpn": 0, "pdn": 2, "type": "RC",
            "state": "RTS", "pid": 0, "name": "ib_write_bw", "client": 3, "worker": 0, "srqn": null,
        });
        let text = "link siw0/1 lqpn 5 pdn 2 rqpn 0 type RC state RTS pid 0 comm ib_write_bw ";
        assert_eq!(text_line(&QUEUE_PAIR, &row, false), format!("{text}\n"));
        assert_eq!(
            text_line(&QUEUE_PAIR, &row, true),
            format!("{text}client 3 worker 0 \n")
        );
        assert_eq!(
            json_object(&QUEUE_PAIR, &row, false),
            r#"{"ifindex":0,"ifname":"siw0","port":1,"lqpn":5,"pdn":2,"rqpn":0,"type":"RC","state":"RTS","pid":0,"comm":"ib_write_bw"}"#
        );
    }

    #[test]
    fn names_of_clients_cannot_control_the_terminal() {
        let row = json!({ "pid": 0, "name": "a\u{1b}[2Jb\n" });
        assert_eq!(command_name(&row), "a?[2Jb");
    }
}
