//! Lists of objects. Those that rdma(8) also has are printed with its fields, in its order, as text and
//! as JSON; with `--details` further fields follow.

use crate::statistics::{self, rows};
use crate::{Show, connections};
use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::Value;
use serde_json_borrow::Value as Row;
use siw::ObjectList;
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write;

#[derive(Debug, Default, Args)]
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
    fn selects(&self, row: &Row) -> bool {
        let is =
            |key: &str, wanted: Option<u64>| wanted.is_none() || field(row, key).as_u64() == wanted;
        let owner = if field(row, "client").is_null() {
            "id"
        } else {
            "client"
        };
        let on_device = |device: &String| {
            let all = field(row, "devices").as_array().unwrap_or_default();
            let mut names = std::iter::once(field(row, "device")).chain(all);
            names.any(|name| name.as_str() == Some(device))
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
        Show::Conn(filter) if json => {
            let mut array = JsonArray::default();
            for_each_row(daemon, ObjectList::Connections, filter, |row| {
                array.push(&json_text(row));
            })?;
            Ok(array.finish())
        }
        Show::Conn(filter) => {
            let mut table = connections::title();
            for_each_row(daemon, ObjectList::Connections, filter, |row| {
                connections::add_text(&mut table, &row.into());
            })?;
            Ok(table)
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
    let mut rows = Vec::new();
    for_each_row(daemon, list, filter, |row| rows.push(row.into()))?;
    Ok(rows)
}

/// Reads a list.
pub fn read_list(daemon: &siw::Context, list: ObjectList) -> anyhow::Result<Vec<Value>> {
    read_rows(daemon, list, &Filter::default())
}

/// Reads the objects of a list one by one, as rows that borrow from the daemon's answer. A list with a map
/// for each of 20,000 queue pairs took three times the processor time.
fn for_each_row(
    daemon: &siw::Context,
    list: ObjectList,
    filter: &Filter,
    mut on_row: impl FnMut(&Row),
) -> anyhow::Result<()> {
    let text = daemon.list_objects(list)?;
    let mut names = ProcessNames::default();
    for line in text.lines() {
        let mut row: Row = serde_json::from_str(line).context("invalid answer of siwd")?;
        let name = names.find(field(&row, "pid").as_u64());
        if let (Row::Object(fields), Some(name)) = (&mut row, name) {
            fields.insert("name", Row::from(name.to_owned()));
        }
        if filter.selects(&row) {
            on_row(&row);
        }
    }
    Ok(())
}

/// A field of a row; null if it does not have the field.
fn field<'row, 'text>(row: &'row Row<'text>, key: &str) -> &'row Row<'text> {
    let fields = row.as_object();
    fields
        .and_then(|fields| fields.get(key))
        .unwrap_or(&Row::Null)
}

/// Names of the clients' processes, as rdma(8) has them. Many objects belong to few processes.
#[derive(Default)]
pub struct ProcessNames {
    known: HashMap<u64, Option<String>>,
}

impl ProcessNames {
    /// The name of a process; `None` for those of other pid namespaces, which keep the name that their
    /// library gave.
    pub fn find(&mut self, pid: Option<u64>) -> Option<&str> {
        let pid = pid.filter(|pid| *pid != 0)?;
        let name = self.known.entry(pid).or_insert_with(|| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            name.ok().map(|name| name.trim_end().to_owned())
        });
        name.as_deref()
    }
}

/// JSON of a row or a field. `to_string` would convert it to a map first.
fn json_text(row: &Row) -> String {
    serde_json::to_string(row).unwrap_or_default()
}

/// One JSON array, in one line.
#[derive(Default)]
struct JsonArray {
    text: String,
}

impl JsonArray {
    fn push(&mut self, element: &str) {
        self.text.push(if self.text.is_empty() { '[' } else { ',' });
        self.text.push_str(element);
    }

    fn finish(mut self) -> String {
        if self.text.is_empty() {
            self.text.push('[');
        }
        self.text + "]\n"
    }
}

fn json_array(rows: &[Value]) -> String {
    let mut array = JsonArray::default();
    for row in rows {
        array.push(&row.to_string());
    }
    array.finish()
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
    let details = filter.details;
    if json {
        let mut array = JsonArray::default();
        for_each_row(daemon, list, filter, |row| {
            array.push(&json_object(layout, row, details));
        })?;
        return Ok(array.finish());
    }
    let mut text = String::new();
    for_each_row(daemon, list, filter, |row| {
        text += &text_line(layout, row, details);
    })?;
    Ok(text)
}

/// Calls `on_field` for the fields of an object that have a value.
fn for_each_field(
    layout: &Layout,
    row: &Row,
    details: bool,
    mut on_field: impl FnMut(&'static str, &Row),
) {
    let details = layout.details.iter().filter(|_| details);
    let details = details.map(|name| (*name, *name));
    for (name, key) in layout.fields.iter().copied().chain(details) {
        let value = field(row, key);
        if value.is_null() {
            continue;
        }
        let printed = match name {
            "comm" => Cow::Owned(Row::from(printable(
                value.as_str().unwrap_or("").trim_end(),
            ))),
            _ if HEXADECIMAL.contains(&name) => {
                Cow::Owned(Row::from(format!("0x{:x}", value.as_u64().unwrap_or(0))))
            }
            _ => Cow::Borrowed(value),
        };
        on_field(name, &printed);
    }
}

fn device_of<'row>(row: &'row Row) -> &'row str {
    field(row, "device").as_str().unwrap_or(ANY_DEVICE)
}

fn text_line(layout: &Layout, row: &Row, details: bool) -> String {
    let device = device_of(row);
    let mut line = match layout.has_port {
        true => format!("link {device}/1 "),
        false => format!("dev {device} "),
    };
    for_each_field(layout, row, details, |name, value| {
        let _ = match value {
            Row::Str(text) => write!(line, "{name} {text} "),
            Row::Array(all) => {
                let all: Vec<&str> = all.iter().filter_map(Row::as_str).collect();
                write!(line, "{name} {} ", all.join(","))
            }
            value => write!(line, "{name} {value} "),
        };
    });
    line.push('\n');
    line
}

fn json_object(layout: &Layout, row: &Row, details: bool) -> String {
    let mut object = String::from("{");
    if let Some(index) = field(row, "device_index").as_u64() {
        let _ = write!(object, "\"ifindex\":{index},");
    }
    let device = json_text(&Row::from(device_of(row)));
    let _ = write!(object, "\"ifname\":{device}");
    if layout.has_port {
        object.push_str(",\"port\":1");
    }
    for_each_field(layout, row, details, |name, value| {
        let _ = write!(object, ",\"{name}\":{}", json_text(value));
    });
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
        let row = row.to_string();
        let row: Row = serde_json::from_str(&row).unwrap();
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
