//! The embedded default of siwd, two devices on one link, started for a contender.

use crate::own_daemon::OwnDaemon;
use anyhow::anyhow;
use toml::{Table, Value};

/// Differences of the link from the embedded default.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LinkSettings {
    /// MTU, if it differs.
    pub(super) mtu: Option<u32>,
    /// True if FPDUs have CRCs.
    pub(super) crc: bool,
}

/// Configuration of siwd without --config; the worker's core is replaced.
const EMBEDDED_DEFAULT: &str = include_str!("../../../config/loopback.toml");

/// Starts a siwd with one worker and two devices on one link.
pub(super) fn start_default_daemon(
    worker_core: usize,
    link: LinkSettings,
) -> anyhow::Result<OwnDaemon> {
    OwnDaemon::start(|_| embedded_configuration(worker_core, link))
}

fn embedded_configuration(worker_core: usize, link: LinkSettings) -> anyhow::Result<String> {
    let mut config: Table = EMBEDDED_DEFAULT
        .parse()
        .map_err(|error| anyhow!("config/loopback.toml: {error}"))?;
    let cores = vec![Value::Integer(worker_core as i64)];
    section(&mut config, "workers")?.insert("cores".into(), cores.into());
    let devices = config.get_mut("device").and_then(Value::as_array_mut);
    for device in devices
        .into_iter()
        .flatten()
        .filter_map(Value::as_table_mut)
    {
        if let Some(mtu) = link.mtu {
            device.insert("mtu".into(), Value::Integer(mtu.into()));
        }
        if link.crc {
            section(device, "mpa")?.insert("crc".into(), "on".into());
        }
    }
    Ok(config.to_string())
}

/// A section of the configuration, which is made if it is missing.
fn section<'a>(config: &'a mut Table, name: &str) -> anyhow::Result<&'a mut Table> {
    let found = config.entry(name).or_insert_with(|| Table::new().into());
    let found = found.as_table_mut();
    found.ok_or_else(|| anyhow!("config/loopback.toml: {name} is no section"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_run_but_for_core_and_link() {
        let embedded: Table = EMBEDDED_DEFAULT.parse().unwrap();
        let text = embedded_configuration(3, LinkSettings::default()).unwrap();
        let config: Table = text.parse().unwrap();
        assert_eq!(config["workers"]["cores"], vec![Value::Integer(3)].into());
        assert_eq!(config["device"], embedded["device"]);
        let link = LinkSettings {
            mtu: Some(1500),
            crc: true,
        };
        let text = embedded_configuration(3, link).unwrap();
        let config: Table = text.parse().unwrap();
        let devices = config["device"].as_array().unwrap();
        for device in devices {
            assert_eq!(device["mtu"], Value::Integer(1500));
            assert_eq!(device["mpa"]["crc"].as_str(), Some("on"));
        }
    }
}
