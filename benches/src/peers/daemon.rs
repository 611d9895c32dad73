//! A siwd instance with two devices on one link, started for a contender.

use super::run_program::RunningProgram;
use anyhow::{anyhow, bail};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;
use toml::{Table, Value};

/// A running daemon; stopped when dropped.
pub(super) struct OwnDaemon {
    program: RunningProgram,
    folder: PathBuf,
}

/// Path of a program in the same folder as this one.
pub(super) fn sibling_program(name: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.parent().unwrap_or(Path::new(".")).join(name)
}

/// Differences of the link from the embedded default.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LinkSettings {
    /// MTU, if it differs.
    pub(super) mtu: Option<u32>,
    /// True if FPDUs have CRCs.
    pub(super) crc: bool,
}

impl OwnDaemon {
    /// Starts the daemon with one worker.
    pub(super) fn start(worker_core: usize, link: LinkSettings) -> anyhow::Result<OwnDaemon> {
        let folder = std::env::temp_dir().join(format!("siw-perf-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let config = folder.join("siwd.toml");
        let socket = folder.join("siwd.sock");
        let text = embedded_configuration(worker_core, &socket, link)?;
        std::fs::write(&config, text)?;
        let mut command = Command::new(sibling_program("siwd"));
        command.arg("--config").arg(&config).arg("--json");
        let mut program = RunningProgram::start_piped(&mut command)?;
        let stdout = program
            .child()
            .stdout
            .take()
            .ok_or_else(|| anyhow!("siwd has no output"))?;
        let mut line = String::new();
        // The daemon prints a line when it is ready, and none if it exits.
        BufReader::new(stdout).read_line(&mut line)?;
        if line.is_empty() {
            bail!("siwd did not start; run siwd --check for the reason");
        }
        Ok(OwnDaemon { program, folder })
    }

    /// Process id of the daemon.
    pub(super) fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Path of its control socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.join("siwd.sock")
    }
}

/// Configuration of siwd without --config; the worker's core and the socket are replaced.
const EMBEDDED_DEFAULT: &str = include_str!("../../../config/loopback.toml");

fn embedded_configuration(
    worker_core: usize,
    socket: &Path,
    link: LinkSettings,
) -> anyhow::Result<String> {
    let mut config: Table = EMBEDDED_DEFAULT
        .parse()
        .map_err(|error| anyhow!("config/loopback.toml: {error}"))?;
    let cores = vec![Value::Integer(worker_core as i64)];
    section(&mut config, "workers")?.insert("cores".into(), cores.into());
    let socket = socket.display().to_string();
    section(&mut config, "control")?.insert("socket".into(), socket.into());
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

impl Drop for OwnDaemon {
    fn drop(&mut self) {
        self.program.stop();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_run_but_for_core_socket_and_link() {
        let embedded: Table = EMBEDDED_DEFAULT.parse().unwrap();
        let text =
            embedded_configuration(3, Path::new("/tmp/s.sock"), LinkSettings::default()).unwrap();
        let config: Table = text.parse().unwrap();
        assert_eq!(config["workers"]["cores"], vec![Value::Integer(3)].into());
        assert_eq!(config["control"]["socket"].as_str(), Some("/tmp/s.sock"));
        assert_eq!(config["device"], embedded["device"]);
        let link = LinkSettings {
            mtu: Some(1500),
            crc: true,
        };
        let text = embedded_configuration(3, Path::new("/tmp/s.sock"), link).unwrap();
        let config: Table = text.parse().unwrap();
        let devices = config["device"].as_array().unwrap();
        for device in devices {
            assert_eq!(device["mtu"], Value::Integer(1500));
            assert_eq!(device["mpa"]["crc"].as_str(), Some("on"));
        }
    }
}
