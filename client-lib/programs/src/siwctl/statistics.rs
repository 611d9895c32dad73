//! The daemon's statistics, from which counters, metrics and rates are made.

use anyhow::{Context as _, bail};
use serde_json::Value;

/// Reads the statistics: those of all clients for an operator, else those of the caller's own.
pub fn read(daemon: &siw::Context) -> anyhow::Result<Value> {
    serde_json::from_str(&daemon.read_stats()?).context("invalid answer of siwd")
}

/// True if the statistics are those of the caller only.
pub fn is_own(stats: &Value) -> bool {
    stats["scope"] == "client"
}

/// Reads the statistics of all clients, which only operators can.
pub fn read_all(daemon: &siw::Context) -> anyhow::Result<Value> {
    let stats = read(daemon)?;
    if is_own(&stats) {
        bail!(
            "only operators can see this: root, the user of siwd and the group in [control] operators"
        );
    }
    Ok(stats)
}

/// The rows of a list in the statistics.
pub fn rows<'a>(stats: &'a Value, key: &str) -> &'a [Value] {
    stats[key].as_array().map_or(&[], Vec::as_slice)
}
