//! Reloads the configuration. A thread reads and checks the file, because a file system or a name
//! service can be slow; the control thread then applies the settings that can change in a running daemon,
//! and names those that need a restart. A wrong file changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use nix::libc;
use nix::unistd::Gid;
use serde::Serialize;
use serde_json::Value;
use siw_shm::control::messages as m;
use toml::Spanned;

use super::loaded_configuration::LoadedConfiguration;
use crate::config::{Config, ConfigSource, DeviceConfig};
use crate::control::account::heap::heap_of_one;
use crate::control::account::quotas::{HostCapacity, QuotaLimits};
use crate::control::client::acceptor::Acceptor;
use crate::control::memory::Memory;
use crate::control::request::refusal::Refusal;
use crate::control::resources::Resources;
use crate::control::threads::helpers::Helpers;
use crate::control::threads::reports::HelperReport;
use crate::ids::CommandToken;

/// Settings of `[limits]` that workers read at their start.
const LIMITS_OF_WORKERS: [&str; 2] = ["limits.connections", "limits.pending_connections_per_user"];
/// Settings of `[control]` that can change.
const CONTROL: [&str; 5] = [
    "control.mode",
    "control.group",
    "control.operators",
    "control.process_memory",
    "control.hello_timeout_ms",
];

/// Returns true if a running daemon can apply another value of this setting.
fn is_changeable(key: &str) -> bool {
    let is_limit = key.starts_with("limits.") && !LIMITS_OF_WORKERS.contains(&key);
    is_limit || CONTROL.contains(&key)
}

/// Key of the name of the device that a setting belongs to.
fn device_of(key: &str) -> Option<String> {
    let device = key.strip_prefix("device.")?.split('.').next()?;
    Some(format!("device.{device}.name"))
}

/// A setting with another value in the file than in the daemon.
#[derive(Debug, PartialEq, Serialize)]
pub(in crate::control) struct ChangedSetting {
    key: String,
    from: Value,
    to: Value,
}

/// Outcome of a reload.
#[derive(Debug, PartialEq, Serialize)]
pub(in crate::control) struct ReloadOutcome {
    /// Settings that are in force now.
    applied: Vec<ChangedSetting>,
    /// Settings that keep their value until a restart.
    restart: Vec<ChangedSetting>,
}

impl ReloadOutcome {
    /// Compares the settings in force with those of the file.
    fn compare(old: &BTreeMap<String, Value>, new: &BTreeMap<String, Value>) -> ReloadOutcome {
        let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
        let value = |of: &BTreeMap<String, Value>, key| of.get(key).cloned().unwrap_or_default();
        let changed = keys.into_iter().filter_map(|key| {
            let (from, to) = (value(old, key), value(new, key));
            if from == to {
                return None;
            }
            // A device that one of them lacks is one change.
            if let Some(name) = device_of(key)
                && old.contains_key(&name) != new.contains_key(&name)
            {
                let key = key.strip_suffix(".name")?.to_owned();
                return Some(ChangedSetting { key, from, to });
            }
            let key = key.clone();
            Some(ChangedSetting { key, from, to })
        });
        let (applied, restart) = changed.partition(|setting| is_changeable(&setting.key));
        ReloadOutcome { applied, restart }
    }

    fn log(&self) {
        for (settings, verb) in [
            (&self.applied, "applied"),
            (&self.restart, "needs a restart"),
        ] {
            for ChangedSetting { key, from, to } in settings {
                tracing::info!("configuration reloaded: {key} {verb}: {from} -> {to}");
            }
        }
        if self.applied.is_empty() && self.restart.is_empty() {
            tracing::info!("configuration reloaded: no setting has changed");
        }
    }
}

/// The configuration in force, and its source.
pub struct Configuration {
    source: ConfigSource,
    current: Config,
    /// Settings without the changes of operators: those of the file at the start or the last reload, and
    /// of each device at its start.
    started: Config,
    /// Filter of the log that an operator has set.
    log_filter: Option<String>,
    capacity: HostCapacity,
    is_reading: bool,
    /// Tokens of the operators' requests for a reload.
    pub(in crate::control) awaiting: Vec<CommandToken>,
    /// A reload was asked for while the file was being read, perhaps before its last change.
    is_stale: bool,
}

impl Configuration {
    /// A configuration of a daemon on a host with this capacity.
    pub fn new(source: ConfigSource, current: Config, capacity: HostCapacity) -> Configuration {
        Configuration {
            source,
            started: current.clone(),
            current,
            log_filter: None,
            capacity,
            is_reading: false,
            awaiting: Vec::new(),
            is_stale: false,
        }
    }

    /// The settings in force.
    pub(in crate::control) fn current(&self) -> &Config {
        &self.current
    }

    /// The source of the settings.
    pub(in crate::control) fn source(&self) -> &ConfigSource {
        &self.source
    }

    /// The settings that a restart would have, as far as siwd has read them.
    pub(in crate::control) fn started(&self) -> &Config {
        &self.started
    }

    /// The filter of the log that an operator has set.
    pub(in crate::control) fn log_filter(&self) -> Option<&str> {
        self.log_filter.as_deref()
    }

    /// Remembers the filter of the log that an operator has set.
    pub(in crate::control) fn set_log_filter(&mut self, filter: String) {
        self.log_filter = Some(filter);
    }

    /// Adds a device that an operator has added to the file.
    pub(in crate::control) fn add_device(&mut self, device: DeviceConfig) {
        let is_other = |other: &Spanned<DeviceConfig>| other.get_ref().name != device.name;
        self.started.devices.retain(is_other);
        self.started
            .devices
            .push(Spanned::new(0..0, device.clone()));
        self.readd_device(device);
    }

    /// Adds a device that was open before, whose interface is back.
    pub(in crate::control) fn readd_device(&mut self, device: DeviceConfig) {
        self.current.devices.push(Spanned::new(0..0, device));
    }

    /// Removes a device.
    pub(in crate::control) fn remove_device(&mut self, name: &str) {
        let is_other = |device: &Spanned<DeviceConfig>| device.get_ref().name.get_ref().0 != name;
        self.current.devices.retain(is_other);
    }

    /// Limits of each client, of each user and of all clients together.
    pub(in crate::control) fn quotas(&self) -> QuotaLimits {
        QuotaLimits::new(&self.current.limits, &self.capacity, heap_of_one)
    }

    /// Starts to read the configuration again; [`HelperReport::ConfigurationRead`] follows.
    pub(in crate::control) fn begin_reload(&mut self, helpers: &Helpers) {
        if self.is_reading {
            self.is_stale = true;
            return;
        }
        let (source, reporter) = (self.source.clone(), helpers.reporter().clone());
        let read = move || {
            let loaded = LoadedConfiguration::read(&source);
            reporter.send(HelperReport::ConfigurationRead(Box::new(loaded)));
        };
        let thread = std::thread::Builder::new().name("siwd-reload".into());
        match thread.spawn(read) {
            Ok(_) => self.is_reading = true,
            Err(error) => {
                let why = format!("a thread cannot be started: {error}");
                let report = HelperReport::ConfigurationRead(Box::new(Err(why)));
                helpers.reporter().send(report);
            }
        }
    }

    /// Ends a reload, and begins the next one if it was asked for meanwhile.
    pub(in crate::control) fn end_reload(&mut self, helpers: &Helpers) {
        self.is_reading = false;
        if std::mem::take(&mut self.is_stale) {
            self.begin_reload(helpers);
        }
    }

    /// Applies the settings that can change.
    pub(in crate::control) fn apply(
        &mut self,
        loaded: LoadedConfiguration,
        resources: &mut Resources,
        acceptor: &mut Acceptor,
        memory: &mut Memory,
    ) -> Result<ReloadOutcome, String> {
        let LoadedConfiguration {
            config: mut new,
            operators,
            group,
        } = loaded;
        let outcome = ReloadOutcome::compare(&self.current.settings(), &new.settings());
        let had_group = self.current.control.group.is_some();
        let group = group.or_else(|| had_group.then(Gid::effective));
        // The call that can fail comes first.
        acceptor.apply_settings(resources, &new.control, group, operators)?;
        memory.process_memory = new.control.process_memory;
        new.control.socket = std::mem::take(&mut self.current.control.socket);
        new.control.sysfs_counters_ms = self.current.control.sysfs_counters_ms;
        new.limits.connections = self.current.limits.connections;
        new.limits.pending_connections_per_user = self.current.limits.pending_connections_per_user;
        self.current.control = new.control;
        self.current.limits = new.limits;
        self.started.control = self.current.control.clone();
        self.started.limits = self.current.limits.clone();
        resources.limits = self.current.limits.clone();
        resources.ledger.set_limits(self.quotas());
        outcome.log();
        Ok(outcome)
    }

    /// Sets a limit until the next reload. `text`: its key, a space, and the value, or `default`.
    /// Returns the outcome as JSON, like that of a reload.
    ///
    /// # Errors
    /// There is no such limit, it needs a restart, or the value is invalid.
    pub(in crate::control) fn set_limit(
        &mut self,
        resources: &mut Resources,
        text: &str,
    ) -> Result<String, String> {
        let (key, value) = text.trim().split_once(' ').ok_or("the value is missing")?;
        if !is_changeable(&format!("limits.{key}")) {
            return Err(format!("{key} needs a restart: change it in the file"));
        }
        let limits = self.current.limits.with_setting(key, value)?;
        let mut new = self.current.clone();
        new.limits = limits;
        let outcome = ReloadOutcome::compare(&self.current.settings(), &new.settings());
        self.current = new;
        resources.limits = self.current.limits.clone();
        resources.ledger.set_limits(self.quotas());
        outcome.log();
        Ok(serde_json::to_string(&outcome).unwrap_or_default())
    }
}

/// Text of a reload's outcome for operators.
///
/// # Errors
/// The text is too long for a reply.
pub(in crate::control) fn outcome_text(
    outcome: &Result<ReloadOutcome, String>,
) -> Result<String, Refusal> {
    let text = match outcome {
        Ok(outcome) => serde_json::to_string(outcome).unwrap_or_default(),
        Err(why) => serde_json::json!({ "error": why }).to_string(),
    };
    if text.len() > m::OPERATE_TEXT {
        let why = "reloaded, but the list of changes is too long: see the log of siwd";
        return Err(Refusal::new(libc::EMSGSIZE, why));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::GOOD;

    fn settings(text: &str) -> BTreeMap<String, Value> {
        let text = format!("{text}\n{GOOD}");
        let config = Config::parse_text("x.toml".as_ref(), &text).unwrap();
        config.settings()
    }

    #[test]
    fn changes_are_divided_by_what_a_running_daemon_can_apply() {
        let old = settings("[limits]\nclients = 4096");
        assert_eq!(
            ReloadOutcome::compare(&old, &settings("")),
            ReloadOutcome {
                applied: vec![],
                restart: vec![]
            },
            "a default that is written out is no change"
        );
        let new = settings("[limits]\nclients = 7\nconnections = 9\n[control]\nmode = \"0666\"");
        let outcome = ReloadOutcome::compare(&old, &new);
        let keys = |settings: &[ChangedSetting]| -> Vec<String> {
            settings.iter().map(|setting| setting.key.clone()).collect()
        };
        assert_eq!(keys(&outcome.applied), ["control.mode", "limits.clients"]);
        assert_eq!(keys(&outcome.restart), ["limits.connections"]);
        assert_eq!(
            (&outcome.applied[0].from, &outcome.applied[0].to),
            (&"0660".into(), &"0666".into())
        );
        let mut fewer = old.clone();
        fewer.retain(|key, _| !key.starts_with("device.siw1."));
        let outcome = ReloadOutcome::compare(&old, &fewer);
        assert_eq!(keys(&outcome.restart), ["device.siw1"]);
        assert!(outcome.applied.is_empty());
    }
}
