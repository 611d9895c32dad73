//! Events of a running daemon as they happen: connections that end or fail, clients that come and go,
//! links that change, captures. siwctl looks for them at an interval, so that a reader that stalls costs
//! the daemon nothing.

use crate::objects::{command_name, printable};
use crate::why::end_text;
use clap::Args;
use serde_json::{Value, json};
use siw::{ListPosition, ObjectList};
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

#[derive(Debug, Args)]
pub struct MonitorArgs {
    /// Milliseconds between two looks at siwd
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    interval: u64,
    /// End after this number of events
    #[arg(short = 'n', long)]
    count: Option<u64>,
}

/// Objects that events tell of, by their key, each with a row that describes it.
type Seen = BTreeMap<String, Value>;

/// Prints events until siwd ends, or as many as asked for.
pub fn run(daemon: &siw::Context, args: &MonitorArgs, as_json: bool) -> anyhow::Result<String> {
    let mut position = ListPosition::default();
    // Those before the start are no events.
    daemon.list_objects_after(ObjectList::Ends, &mut position)?;
    let mut seen = look(daemon)?;
    // Whoever starts it in a script knows from this line that no later event is missed.
    eprintln!("siwctl: waiting for events");
    let mut left = args.count.unwrap_or(u64::MAX);
    while left > 0 {
        std::thread::sleep(Duration::from_millis(args.interval));
        let mut events = Vec::new();
        let ends = daemon.list_objects_after(ObjectList::Ends, &mut position)?;
        for line in ends.lines() {
            let row: Value = serde_json::from_str(line)?;
            events.push(json!({ "event": "connection", "row": row }));
        }
        let now = look(daemon)?;
        compare(&seen, &now, &mut events);
        seen = now;
        for event in events
            .iter()
            .take(usize::try_from(left).unwrap_or(usize::MAX))
        {
            left -= 1;
            let line = if as_json {
                json_line(event)
            } else {
                text_line(event)
            };
            crate::print(&format!("{line}\n"))?;
        }
    }
    Ok(String::new())
}

/// The clients and devices as of now.
fn look(daemon: &siw::Context) -> anyhow::Result<Seen> {
    let mut seen = Seen::new();
    for row in crate::objects::read_list(daemon, ObjectList::Clients)? {
        // Its counters change all the time.
        let row =
            json!({ "id": row["id"], "pid": row["pid"], "user": row["user"], "name": row["name"] });
        seen.insert(format!("client {}", row["id"]), row);
    }
    for device in daemon.query_devices()? {
        let state = if device.active { "up" } else { "down" };
        let row = json!({ "device": device.name, "link": state, "mbps": device.link_mbps });
        seen.insert(format!("device {}", device.name), row);
    }
    Ok(seen)
}

/// Adds an event for each object that came, went or changed.
fn compare(before: &Seen, now: &Seen, events: &mut Vec<Value>) {
    for (key, row) in now {
        let kind = key.split(' ').next().unwrap_or_default();
        match before.get(key) {
            None => events.push(json!({ "event": kind, "change": "new", "row": row })),
            Some(old) if old != row => {
                events.push(json!({ "event": kind, "change": "changed", "row": row }));
            }
            Some(_) => {}
        }
    }
    for (key, row) in before {
        if !now.contains_key(key) {
            let kind = key.split(' ').next().unwrap_or_default();
            events.push(json!({ "event": kind, "change": "gone", "row": row }));
        }
    }
}

fn json_line(event: &Value) -> String {
    let mut event = event.clone();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    event["seen"] = now.map_or(0.0, |now| now.as_millis() as f64 / 1e3).into();
    event.to_string()
}

fn text_line(event: &Value) -> String {
    let row = &event["row"];
    let change = event["change"].as_str().unwrap_or_default();
    let word = |key: &str| printable(row[key].as_str().unwrap_or_default());
    match event["event"].as_str() {
        Some("connection") => end_text(row),
        Some("client") => format!(
            "client {} {change}: pid {} user {} comm {}",
            row["id"],
            row["pid"],
            row["user"],
            command_name(row)
        ),
        _ => format!(
            "device {} {change}: link {} {}",
            word("device"),
            word("link"),
            match row["mbps"].as_u64() {
                None | Some(0) => "speed unknown".to_owned(),
                Some(mbps) => format!("{mbps}Mb/s"),
            }
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_speed_is_no_number() {
        let text = |mbps: u32| {
            let row = json!({ "device": "siw0", "link": "up", "mbps": mbps });
            text_line(&json!({ "event": "device", "change": "changed", "row": row }))
        };
        assert!(text(0).ends_with("link up speed unknown"), "{}", text(0));
        assert!(text(10_000).ends_with("link up 10000Mb/s"));
    }

    #[test]
    fn objects_that_come_change_and_go_are_events() {
        let seen = |rows: &[(&str, u64)]| -> Seen {
            let rows = rows.iter();
            rows.map(|(key, value)| ((*key).to_owned(), json!({ "id": value })))
                .collect()
        };
        let mut events = Vec::new();
        let before = seen(&[("client 1", 1), ("device siw0", 1)]);
        compare(
            &before,
            &seen(&[("client 2", 2), ("device siw0", 2)]),
            &mut events,
        );
        let changes: Vec<_> = events
            .iter()
            .map(|event| (event["event"].clone(), event["change"].clone()))
            .collect();
        assert_eq!(
            changes,
            [
                ("client".into(), "new".into()),
                ("device".into(), "changed".into()),
                ("client".into(), "gone".into()),
            ]
        );
    }
}
