//! Counters of a running siwd: by device, merged and per worker. Counters that Linux has are under
//! their names in nstat, which are those of TCP-MIB (RFC 4022).

use crate::statistics::{self, rows};
use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

#[derive(Debug, Args)]
pub struct StatArgs {
    /// Only this device
    #[arg(long)]
    device: Option<String>,
    /// Only counters whose names contain this text, ignoring case
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Include counters that are zero
    #[arg(long)]
    all: bool,
}

impl StatArgs {
    /// Returns whether the counter `name` is to be shown.
    fn wants(&self, name: &str) -> bool {
        let text = self.only.as_ref().map(|text| text.to_lowercase());
        text.is_none_or(|text| name.to_lowercase().contains(&text))
    }
}

/// A number of each worker, and of all of them together.
struct Row {
    /// `None` if there is no such number.
    merged: Option<u64>,
    each: Vec<u64>,
}

type Rows = BTreeMap<String, Row>;

/// Numbers of workers that are no amounts.
const WITHOUT_SUM: [&str; 1] = ["core"];
/// Numbers of the one pool of packet buffers, which each worker sees.
const OF_THE_POOL: [&str; 2] = ["buffers", "buffers_free"];

/// The counters as text or as one JSON object.
pub fn run(daemon: &siw::Context, args: &StatArgs, as_json: bool) -> anyhow::Result<String> {
    let stats = statistics::read(daemon)?;
    if statistics::is_own(&stats) {
        return own_text(&stats, as_json);
    }
    let devices = devices(&stats, args)?;
    let workers = workers(&stats, args);
    if as_json {
        let mut all = to_json(&devices, &workers);
        all["clients"] = stats["clients"].clone();
        all["users"] = stats["users"].clone();
        all["control"] = stats["control"].clone();
        all["faults"] = stats["faults"].clone();
        return Ok(format!("{all}\n"));
    }
    let text = as_text(&devices, &workers, args.all) + &registered_text(&stats);
    Ok(text + &plans_text(&stats))
}

/// A warning while there are fault plans.
fn plans_text(stats: &Value) -> String {
    match stats["fault_plans"].as_u64().unwrap_or(0) {
        0 => String::new(),
        plans => format!("fault plans: {plans} loaded (siwctl fault show)\n"),
    }
}

/// Output for a user who is not an operator: usage and quotas of the user's own clients.
fn own_text(stats: &Value, as_json: bool) -> anyhow::Result<String> {
    let own = rows(stats, "clients").first();
    let quotas = own.and_then(|client| client["quotas"].as_object());
    let quotas = quotas.context("siwd reported no data of this client")?;
    if as_json {
        return Ok(format!("{stats}\n"));
    }
    let mut out = format!("{:<32} {:>14} {:>14}\n", "this user", "held", "limit");
    for (name, row) in quotas {
        let limit = match &row["user_limit"] {
            Value::Null => "-".to_owned(),
            limit => limit.to_string(),
        };
        let _ = writeln!(
            out,
            "  {name:<30} {:>14} {limit:>14}",
            row["user"].to_string()
        );
    }
    out += "\nOnly root, the user of siwd and the group in [control] operators can read the counters of devices.\n";
    Ok(out)
}

/// Access methods for registered memory outside arenas, by client.
fn registered_text(stats: &Value) -> String {
    let mut out = String::new();
    for client in rows(stats, "clients") {
        let registered = &client["registered"];
        let of = |method: &str| registered["bytes"][method].as_u64().unwrap_or(0);
        let (remap, shared, copy) = (of("remap"), of("shared"), of("copy"));
        if remap + shared + copy == 0 {
            continue;
        }
        if out.is_empty() {
            let _ = writeln!(
                out,
                "{:<32} {:>14} {:>13} {:>13}",
                "registered memory, bytes", "remapped", "shared", "copied"
            );
        }
        let name = client["name"].as_str().unwrap_or_default();
        let who = format!("{name} ({})", client["pid"]);
        let _ = writeln!(out, "  {who:<30} {remap:>14} {shared:>13} {copy:>13}");
        for (reason, regions) in registered["reasons"].as_object().into_iter().flatten() {
            let _ = writeln!(out, "    {regions} regions: {reason}");
        }
    }
    out
}

/// Frame counters of a device, in addition to TCP's counters.
const FRAME_COUNTERS: [&str; 4] = ["rx_frames", "tx_frames", "tx_linearized", "tx_refused"];

/// Beginning of the names of faults that plans inject.
const INJECTED: &str = "injected_";

/// Counters and link state of a device.
struct DeviceCounters {
    name: String,
    /// `up`, `down` or `removed`.
    link: String,
    rows: Rows,
}

/// Collects the counters of each device.
fn devices(stats: &Value, args: &StatArgs) -> anyhow::Result<Vec<DeviceCounters>> {
    let mut out = Vec::new();
    let mut names = Vec::new();
    for total in rows(stats, "total") {
        let name = total["device"].as_str().unwrap_or_default();
        names.push(name);
        if args.device.as_ref().is_some_and(|device| device != name) {
            continue;
        }
        let of = |value: &Value, key: &str| match key {
            key if FRAME_COUNTERS.contains(&key) => value[key].as_u64(),
            key => match key.strip_prefix(INJECTED) {
                Some(kind) => value["faults"][kind].as_u64(),
                None => value["mib"][key].as_u64(),
            },
        };
        let keys_of = |part: &str| total[part].as_object().into_iter().flat_map(Map::keys);
        let faults: Vec<_> = keys_of("faults")
            .map(|kind| format!("{INJECTED}{kind}"))
            .collect();
        let keys = FRAME_COUNTERS.into_iter();
        let keys = keys.chain(faults.iter().map(String::as_str));
        let keys = keys.chain(keys_of("mib").map(String::as_str));
        let keys = keys.filter(|key| args.wants(key));
        let rows = keys.map(|key| {
            let each = rows(stats, "workers").iter().map(|worker| {
                let lane = rows(worker, "devices")
                    .iter()
                    .find(|device| device["device"] == name);
                lane.and_then(|device| of(device, key)).unwrap_or(0)
            });
            let row = Row {
                merged: Some(of(total, key).unwrap_or(0)),
                each: each.collect(),
            };
            (key.to_owned(), row)
        });
        out.push(DeviceCounters {
            name: name.to_owned(),
            link: total["link"].as_str().unwrap_or("unknown").to_owned(),
            rows: rows.collect(),
        });
    }
    match &args.device {
        Some(device) if out.is_empty() => {
            bail!("no device {device:?}; siwd has {}", names.join(", "))
        }
        _ => Ok(out),
    }
}

/// Counters of workers that belong to no device.
fn workers(stats: &Value, args: &StatArgs) -> Rows {
    let workers = rows(stats, "workers");
    let mut rows = Rows::new();
    for (i, worker) in workers.iter().enumerate() {
        for (name, value) in worker.as_object().into_iter().flatten() {
            let Some(value) = value.as_u64().filter(|_| args.wants(name)) else {
                continue;
            };
            let row = rows.entry(name.clone()).or_insert_with(|| Row {
                merged: (!WITHOUT_SUM.contains(&name.as_str())).then_some(0),
                each: vec![0; workers.len()],
            });
            row.merged = row.merged.map(|merged| {
                if OF_THE_POOL.contains(&name.as_str()) {
                    merged.max(value)
                } else {
                    merged + value
                }
            });
            row.each[i] = value;
        }
    }
    rows
}

fn to_json(devices: &[DeviceCounters], workers: &Rows) -> Value {
    let section = |rows: &Rows| {
        let merged: Map<_, _> = rows
            .iter()
            .filter_map(|(name, row)| Some((name.clone(), row.merged?.into())))
            .collect();
        let count = rows.values().next().map_or(0, |row| row.each.len());
        let each = (0..count).map(|i| {
            let of = rows
                .iter()
                .map(|(name, row)| (name.clone(), row.each[i].into()));
            Value::Object(of.collect())
        });
        (merged, each.collect::<Vec<_>>())
    };
    let devices = devices.iter().map(|device| {
        let (merged, each) = section(&device.rows);
        json!({ "device": device.name, "link": device.link, "merged": merged, "workers": each })
    });
    let devices: Vec<_> = devices.collect();
    let (merged, each) = section(workers);
    json!({ "devices": devices, "merged": merged, "workers": each })
}

fn as_text(devices: &[DeviceCounters], workers: &Rows, all: bool) -> String {
    let mut out = String::new();
    let mut table = |title: &str, rows: &Rows| {
        let count = rows.values().next().map_or(0, |row| row.each.len());
        let _ = write!(out, "{title:<32} {:>14}", "merged");
        for worker in 0..count {
            let _ = write!(out, " {:>13}", format!("worker {worker}"));
        }
        out.push('\n');
        let shown = |row: &Row| all || row.merged.is_none_or(|merged| merged > 0);
        for (name, row) in rows.iter().filter(|(_, row)| shown(row)) {
            let merged = row
                .merged
                .map_or("-".to_owned(), |merged| merged.to_string());
            let _ = write!(out, "  {name:<30} {merged:>14}");
            for value in &row.each {
                let _ = write!(out, " {value:>13}");
            }
            out.push('\n');
        }
        out.push('\n');
    };
    table("siwd", workers);
    for device in devices {
        let title = format!("{} (link {})", device.name, device.link);
        table(&title, &device.rows);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats() -> Value {
        let worker = |core: u64, sleeps: u64| {
            let (buffers, free) = (4096, 4000);
            json!({ "core": core, "sleeps": sleeps, "buffers": buffers, "buffers_free": free })
        };
        json!({ "workers": [worker(3, 5), worker(4, 6)], "total": [] })
    }

    fn args(only: Option<&str>) -> StatArgs {
        StatArgs {
            device: None,
            only: only.map(str::to_owned),
            all: false,
        }
    }

    #[test]
    fn only_amounts_of_workers_are_added_up() {
        let workers = workers(&stats(), &args(None));
        let json = to_json(&[], &workers);
        let merged = json!({ "sleeps": 11, "buffers": 4096, "buffers_free": 4000 });
        assert_eq!(json["merged"], merged);
        assert_eq!(json["workers"][1]["core"], 4);
        let text = as_text(&[], &workers, false);
        let core = text.lines().find(|line| line.contains("core"));
        let words: Vec<_> = core.unwrap_or_default().split_whitespace().collect();
        assert_eq!(words, ["core", "-", "3", "4"]);
    }

    #[test]
    fn only_selects_counters_of_workers_too() {
        let workers = workers(&stats(), &args(Some("Sleep")));
        assert!(workers.keys().eq(["sleeps"]));
    }
}
