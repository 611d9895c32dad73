//! Live rates of devices and workers, and the clients with the most of a resource.

use crate::objects::command_name;
use crate::statistics::{self, rows};
use anyhow::Context as _;
use clap::{Args, ValueEnum};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row, Table as TableWidget};
use ratatui::{DefaultTerminal, Frame};
use serde_json::Value;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub struct TopArgs {
    /// Seconds between updates, 0.1 to 3600
    #[arg(short, long, default_value_t = 2.0, value_parser = parse_interval)]
    interval: f64,
    /// End after this number of updates
    #[arg(short = 'n', long)]
    count: Option<u64>,
    /// Print plain text, as when the output is no terminal
    #[arg(short, long)]
    batch: bool,
    /// Order of the clients
    #[arg(short, long, value_enum, default_value = "memory")]
    sort: Order,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("not a number of seconds from 0.1 to 3600".to_owned()),
    }
}

/// Resource by which clients are ordered, the most first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    Memory,
    QueuePairs,
    Connections,
}

impl Order {
    fn key(self) -> &'static str {
        match self {
            Order::Memory => "memory_bytes",
            Order::QueuePairs => "queue_pairs",
            Order::Connections => "connections",
        }
    }
}

/// The statistics at a time.
struct Reading {
    time: Instant,
    stats: Value,
}

impl Reading {
    fn take(daemon: &siw::Context) -> anyhow::Result<Reading> {
        let stats = statistics::read_all(daemon)?;
        Ok(Reading {
            time: Instant::now(),
            stats,
        })
    }
}

/// A table of the screen.
struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

/// Devices, workers and clients, with the rates between two readings.
fn tables(before: &Reading, now: &Reading, order: Order) -> [Table; 3] {
    let seconds = (now.time - before.time).as_secs_f64().max(1e-3);
    let rate = |before: &Value, now: &Value| {
        let difference = now.as_f64().unwrap_or(0.0) - before.as_f64().unwrap_or(0.0);
        (difference / seconds).max(0.0)
    };
    let count = |rate: f64| format!("{rate:.0}");
    let nothing = Value::Null;
    let earlier = |key, number: usize| rows(&before.stats, key).get(number).unwrap_or(&nothing);

    let mut devices = Table {
        head: vec![
            "device",
            "link",
            "rx frames/s",
            "tx frames/s",
            "rx Gb/s",
            "tx Gb/s",
            "retrans/s",
            "timeouts/s",
            "conns",
        ],
        rows: Vec::new(),
    };
    for (number, device) in rows(&now.stats, "total").iter().enumerate() {
        let last = earlier("total", number);
        let mib = |name: &str| rate(&last["mib"][name], &device["mib"][name]);
        let gigabits = |name: &str| format!("{:.3}", mib(name) * 8.0 / 1e9);
        devices.rows.push(vec![
            device["device"].as_str().unwrap_or_default().to_owned(),
            device["link"].as_str().unwrap_or_default().to_owned(),
            count(rate(&last["rx_frames"], &device["rx_frames"])),
            count(rate(&last["tx_frames"], &device["tx_frames"])),
            gigabits("SiwTcpInBytes"),
            gigabits("SiwTcpOutBytes"),
            count(mib("TcpRetransSegs")),
            count(mib("TcpExtTCPTimeouts")),
            device["mib"]["TcpCurrEstab"].to_string(),
        ]);
    }

    let mut workers = Table {
        head: vec![
            "worker",
            "core",
            "cpu %",
            "batches/s",
            "sleeps/s",
            "requests/s",
            "completions/s",
            "qps",
            "free buffers %",
        ],
        rows: Vec::new(),
    };
    for (number, worker) in rows(&now.stats, "workers").iter().enumerate() {
        let last = earlier("workers", number);
        let of = |key: &str| rate(&last[key], &worker[key]);
        let (free, all) = (worker["buffers_free"].as_f64(), worker["buffers"].as_f64());
        let free = 100.0 * free.unwrap_or(0.0) / all.unwrap_or(1.0).max(1.0);
        workers.rows.push(vec![
            number.to_string(),
            worker["core"].to_string(),
            format!("{:.1}", of("cpu_ns") / 1e7),
            count(of("iterations")),
            count(of("sleeps")),
            count(of("request_slots")),
            count(of("completions")),
            worker["queue_pairs"].to_string(),
            format!("{free:.0}"),
        ]);
    }

    let mut clients = Table {
        head: vec![
            "client",
            "pid",
            "user",
            "comm",
            "qps",
            "cqs",
            "mrs",
            "conns",
            "memory MiB",
        ],
        rows: Vec::new(),
    };
    let mut ordered: Vec<&Value> = rows(&now.stats, "clients").iter().collect();
    ordered.sort_by_key(|client| std::cmp::Reverse(client[order.key()].as_u64()));
    for client in ordered {
        let memory = client["memory_bytes"].as_f64().unwrap_or(0.0) / f64::from(1 << 20);
        clients.rows.push(vec![
            client["id"].to_string(),
            client["pid"].to_string(),
            client["user"].to_string(),
            command_name(client),
            client["queue_pairs"].to_string(),
            client["completion_queues"].to_string(),
            client["memory_regions"].to_string(),
            client["connections"].to_string(),
            format!("{memory:.1}"),
        ]);
    }
    [devices, workers, clients]
}

/// Width of each column.
fn widths(table: &Table) -> Vec<usize> {
    let columns = 0..table.head.len();
    let width = |column: usize| {
        let cells = table.rows.iter().map(|row| row[column].chars().count());
        cells.chain([table.head[column].len()]).max().unwrap_or(0)
    };
    columns.map(width).collect()
}

/// The tables as plain text.
fn plain_text(tables: &[Table]) -> String {
    let mut out = String::new();
    for table in tables {
        let widths = widths(table);
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            for (cell, width) in cells.zip(&widths) {
                let _ = write!(out, "{cell:>width$}  ");
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        };
        line(&mut table.head.iter().copied());
        for row in &table.rows {
            line(&mut row.iter().map(String::as_str));
        }
        out.push('\n');
    }
    out
}

/// Draws the tables, each as high as its rows, the last one with the rest of the screen.
fn draw(frame: &mut Frame, tables: &[Table], order: Order) {
    let heights = tables.iter().enumerate().map(|(number, table)| {
        let rows = u16::try_from(table.rows.len()).unwrap_or(u16::MAX);
        match number + 1 == tables.len() {
            true => Constraint::Min(2),
            false => Constraint::Length(rows.saturating_add(2)),
        }
    });
    let areas = Layout::vertical(heights.chain([Constraint::Length(1)])).split(frame.area());
    for (table, area) in tables.iter().zip(areas.iter()) {
        let head = table
            .head
            .iter()
            .map(|name| Cell::from(Line::from(*name).right_aligned()));
        let head = Row::new(head).style(Style::new().add_modifier(Modifier::REVERSED));
        let rows = table.rows.iter().map(|row| {
            Row::new(
                row.iter()
                    .map(|cell| Cell::from(Line::from(cell.as_str()).right_aligned())),
            )
        });
        let widths = widths(table).into_iter();
        let widths =
            widths.map(|width| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX)));
        let widget = TableWidget::new(rows, widths)
            .header(head)
            .column_spacing(2);
        frame.render_widget(widget, *area);
    }
    if let Some(area) = areas.last() {
        let help = format!(
            "clients by {}; keys: m memory, p queue pairs, c connections, q quit",
            order.key()
        );
        frame.render_widget(
            Line::from(help).style(Style::new().add_modifier(Modifier::DIM)),
            *area,
        );
    }
}

/// Shows the rates until the user quits.
pub fn run(daemon: &siw::Context, args: &TopArgs) -> anyhow::Result<String> {
    let first = Reading::take(daemon)?;
    if args.batch || !std::io::stdout().is_terminal() {
        return print_updates(daemon, args, first);
    }
    let mut terminal = ratatui::try_init().context("cannot use the terminal; try --batch")?;
    let outcome = show_updates(daemon, args, first, &mut terminal);
    ratatui::restore();
    outcome.map(|()| String::new())
}

/// Prints plain tables, the first after one interval.
fn print_updates(
    daemon: &siw::Context,
    args: &TopArgs,
    mut before: Reading,
) -> anyhow::Result<String> {
    let mut updates = 0;
    loop {
        std::thread::sleep(Duration::from_secs_f64(args.interval));
        let now = Reading::take(daemon)?;
        let text = plain_text(&tables(&before, &now, args.sort));
        before = now;
        updates += 1;
        if args.count.is_some_and(|count| updates >= count) {
            return Ok(text);
        }
        crate::print(&text)?;
    }
}

fn show_updates(
    daemon: &siw::Context,
    args: &TopArgs,
    mut before: Reading,
    terminal: &mut DefaultTerminal,
) -> anyhow::Result<()> {
    let interval = Duration::from_secs_f64(args.interval);
    let mut order = args.sort;
    // The first screen has rates over a short time.
    std::thread::sleep(interval.min(Duration::from_millis(200)));
    let mut now = Reading::take(daemon)?;
    let mut updates = 1;
    loop {
        terminal.draw(|frame| draw(frame, &tables(&before, &now, order), order))?;
        if args.count.is_some_and(|count| updates >= count) {
            return Ok(());
        }
        let due = now.time + interval;
        if event::poll(due.saturating_duration_since(Instant::now()))? {
            let Event::Key(key) = event::read()? else {
                continue;
            };
            let is_interrupt =
                key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                _ if is_interrupt => return Ok(()),
                KeyCode::Char('m') => order = Order::Memory,
                KeyCode::Char('p') => order = Order::QueuePairs,
                KeyCode::Char('c') => order = Order::Connections,
                _ => {}
            }
            continue;
        }
        before = std::mem::replace(&mut now, Reading::take(daemon)?);
        updates += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    /// Two readings, two seconds apart.
    fn readings() -> (Reading, Reading) {
        let stats = |n: u64| {
            json!({
                "total": [{
                    "device": "siw0", "link": "up", "rx_frames": 100 * n, "tx_frames": 200 * n,
                    "mib": {
                        "SiwTcpInBytes": 500_000_000 * n, "SiwTcpOutBytes": 0, "TcpRetransSegs": 6 * n,
                        "TcpExtTCPTimeouts": 0, "TcpCurrEstab": 3,
                    },
                }],
                "workers": [{
                    "core": 1, "cpu_ns": 1_000_000_000 * n, "iterations": 10 * n, "sleeps": 0,
                    "request_slots": 4 * n, "completions": 8 * n, "queue_pairs": 3, "buffers": 200,
                    "buffers_free": 50,
                }],
                "clients": [
                    { "id": 1, "pid": 0, "user": 7, "name": "small", "queue_pairs": 2, "memory_bytes": 1 << 20 },
                    { "id": 2, "pid": 0, "user": 8, "name": "large", "queue_pairs": 1, "memory_bytes": 5 << 20 },
                ],
            })
        };
        let time = Instant::now();
        let at = |n: u64| Reading {
            time: time + Duration::from_secs(2 * n),
            stats: stats(n),
        };
        (at(0), at(1))
    }

    #[test]
    fn rates_are_differences_by_time() {
        let (before, now) = readings();
        let [devices, workers, clients] = tables(&before, &now, Order::Memory);
        let row = &devices.rows[0];
        assert_eq!(
            row[..],
            ["siw0", "up", "50", "100", "2.000", "0.000", "3", "0", "3"]
        );
        assert_eq!(
            workers.rows[0],
            ["0", "1", "50.0", "5", "0", "2", "4", "3", "25"]
        );
        let names = |table: &Table| {
            table
                .rows
                .iter()
                .map(|row| row[3].clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&clients), ["large", "small"]);
        let [_, _, clients] = tables(&before, &now, Order::QueuePairs);
        assert_eq!(names(&clients), ["small", "large"]);
    }

    #[test]
    fn the_screen_has_all_tables_and_the_keys() {
        let (before, now) = readings();
        let mut terminal = Terminal::new(TestBackend::new(110, 14)).unwrap();
        let shown = tables(&before, &now, Order::Memory);
        terminal
            .draw(|frame| draw(frame, &shown, Order::Memory))
            .unwrap();
        let text = terminal.backend().to_string();
        for words in [
            "device", "siw0", "cpu %", "50.0", "comm", "large", "small", "q quit",
        ] {
            assert!(text.contains(words), "{words} is missing:\n{text}");
        }
        // A screen that is too small shows less, without an error.
        let mut small = Terminal::new(TestBackend::new(10, 2)).unwrap();
        small
            .draw(|frame| draw(frame, &shown, Order::Memory))
            .unwrap();
        assert!(plain_text(&shown).contains("siw0    up"));
    }
}
