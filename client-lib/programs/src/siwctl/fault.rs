//! Fault plans of siwd.

use anyhow::{Context as _, bail};
use clap::Subcommand;
use serde_json::{Value, json};
use siw::ObjectList;
use siw_faults::{Place, Plan, built_in_plans};
use std::fmt::Write;
use std::path::Path;

use crate::objects::{printable, read_list};
use crate::why::age;

#[derive(Debug, Subcommand)]
pub enum FaultCommand {
    /// Load a plan: a TOML file (client-lib/faults/README.md), or the name of a built-in plan
    Load {
        /// File, or name of a built-in plan
        plan: String,
        /// Name of the plan in siwd, that of the file by default
        #[arg(long)]
        name: Option<String>,
        /// Seed in place of that of the plan
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Loaded plans, and how often each fault was injected
    Show,
    /// End a plan, or all of them
    Clear {
        /// Name of the plan
        name: Option<String>,
    },
    /// Built-in plans of siwd
    Plans,
}

/// Lists the built-in plans.
pub fn plans(as_json: bool) -> String {
    let plans = built_in_plans(Place::Daemon);
    if as_json {
        let rows =
            plans.map(|plan| json!({ "name": plan.name, "description": plan.description() }));
        return format!("{}\n", Value::Array(rows.collect()));
    }
    let mut out = String::new();
    for plan in plans {
        let _ = writeln!(out, "{:<16}{}", plan.name, plan.description());
    }
    out
}

/// Executes `siwctl fault`.
pub fn run(daemon: &siw::Context, command: &FaultCommand, as_json: bool) -> anyhow::Result<String> {
    match command {
        FaultCommand::Load { plan, name, seed } => {
            load(daemon, plan, name.as_deref(), *seed, as_json)
        }
        FaultCommand::Show => show(daemon, as_json),
        FaultCommand::Clear { name } => {
            let outcome = daemon.clear_faults(name.as_deref().unwrap_or_default())?;
            describe_cleared(&outcome, as_json)
        }
        FaultCommand::Plans => Ok(plans(as_json)),
    }
}

/// Name of a plan: that of its file without folder and extension.
fn name_of(plan: &str) -> String {
    let stem = Path::new(plan).file_stem();
    stem.map_or(String::new(), |stem| stem.to_string_lossy().into_owned())
}

fn load(
    daemon: &siw::Context,
    plan: &str,
    name: Option<&str>,
    seed: Option<u64>,
    as_json: bool,
) -> anyhow::Result<String> {
    let text = Plan::find_text(plan, Place::Daemon)?;
    let name = name.map_or_else(|| name_of(plan), str::to_owned);
    let outcome = daemon.load_faults(&name, plan, &text, seed)?;
    let outcome: Value = serde_json::from_str(&outcome).context("invalid answer of siwd")?;
    if let Some(error) = outcome["error"].as_str() {
        bail!("nothing has changed: {}", printable(error));
    }
    if as_json {
        return Ok(format!("{outcome}\n"));
    }
    let mut out = format!(
        "plan {} is loaded: {} faults, seed {}; siwctl fault clear {} ends it\n",
        printable(&name),
        outcome["faults"],
        outcome["seed"],
        printable(&name)
    );
    for note in outcome["notes"].as_array().into_iter().flatten() {
        let _ = writeln!(
            out,
            "note: {}",
            printable(note.as_str().unwrap_or_default())
        );
    }
    Ok(out)
}

fn show(daemon: &siw::Context, as_json: bool) -> anyhow::Result<String> {
    let rows = read_list(daemon, ObjectList::Faults)?;
    if as_json {
        return Ok(format!("{}\n", Value::Array(rows)));
    }
    if rows.is_empty() {
        return Ok("no fault plan is loaded\n".to_owned());
    }
    let mut out = String::new();
    let mut last = &Value::Null;
    for row in &rows {
        if row["number"] != *last {
            last = &row["number"];
            let _ = writeln!(
                out,
                "plan {} seed {} loaded {} by pid {}",
                printable(row["plan"].as_str().unwrap_or_default()),
                row["seed"],
                age(row["time"].as_f64().unwrap_or(0.0)),
                row["pid"]
            );
        }
        let name = row["name"].as_str();
        let name = name.map_or(String::new(), |name| format!(" ({})", printable(name)));
        let _ = writeln!(
            out,
            "  fault {}{name} {}{} injected {}",
            row["fault"],
            row["kind"].as_str().unwrap_or_default(),
            aim_text(row),
            row["injected"]
        );
    }
    Ok(out)
}

/// The objects that a fault is aimed at.
fn aim_text(row: &Value) -> String {
    let mut out = String::new();
    let keys = [
        "device",
        "user",
        "client",
        "lqpn",
        "host",
        "port",
        "connection",
        "connections",
    ];
    for key in keys {
        match &row[key] {
            Value::Null => {}
            Value::String(text) => {
                let _ = write!(out, " {key} {}", printable(text));
            }
            value => {
                let _ = write!(out, " {key} {value}");
            }
        }
    }
    out
}

fn describe_cleared(outcome: &str, as_json: bool) -> anyhow::Result<String> {
    let rows: Vec<Value> = serde_json::from_str(outcome).context("invalid answer of siwd")?;
    if as_json {
        return Ok(format!("{}\n", Value::Array(rows)));
    }
    let mut out = String::new();
    for row in &rows {
        let name = printable(row["plan"].as_str().unwrap_or_default());
        let _ = writeln!(
            out,
            "plan {name} is cleared: {} faults were injected",
            row["injected"]
        );
    }
    Ok(out)
}
