//! The running configuration as a file.

use anyhow::Context as _;
use clap::Subcommand;
use serde_json::Value;
use siw::ObjectList;

use crate::objects::read_list;

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print the running configuration, with what siwctl has changed since the start (limits, addresses,
    /// routes, neighbours, devices), as a file for `siwd --config`: all settings that differ from their
    /// defaults
    Export,
}

/// First line of an exported file.
const TITLE: &str =
    "# The running configuration of siwd: all settings that differ from their defaults.";

/// Executes `siwctl config export`.
pub fn export(daemon: &siw::Context, as_json: bool) -> anyhow::Result<String> {
    let lines = read_list(daemon, ObjectList::Configuration)?;
    let lines = lines
        .iter()
        .map(|row| row["text"].as_str().context("invalid answer of siwd"));
    let mut text = String::new();
    for line in lines {
        text += line?;
        text.push('\n');
    }
    if as_json {
        let settings: Value = toml::from_str(&text).context("invalid answer of siwd")?;
        return Ok(format!("{settings}\n"));
    }
    Ok(format!("{TITLE}\n{text}"))
}
