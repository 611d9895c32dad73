//! Reloading the daemon's configuration.

use crate::objects::printable;
use anyhow::{Context as _, bail};
use serde_json::Value;
use std::fmt::Write;

/// Executes `siwctl reload`.
pub fn run(daemon: &siw::Context, as_json: bool) -> anyhow::Result<String> {
    describe_outcome(&daemon.reload_configuration()?, as_json)
}

/// Lists the settings that have changed.
pub fn describe_outcome(text: &str, as_json: bool) -> anyhow::Result<String> {
    let outcome: Value = serde_json::from_str(text).context("invalid answer of siwd")?;
    if let Some(error) = outcome["error"].as_str() {
        bail!("nothing has changed: {}", printable(error));
    }
    if as_json {
        return Ok(format!("{outcome}\n"));
    }
    let mut out = String::new();
    for (list, heading) in [("applied", "applied"), ("restart", "needs a restart")] {
        for setting in outcome[list].as_array().into_iter().flatten() {
            let key = printable(setting["key"].as_str().unwrap_or_default());
            let _ = writeln!(
                out,
                "{heading}: {key} {} -> {}",
                setting["from"], setting["to"]
            );
        }
    }
    if out.is_empty() {
        out.push_str("no setting has changed\n");
    }
    Ok(out)
}
