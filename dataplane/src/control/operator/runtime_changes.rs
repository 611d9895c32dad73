//! Changes that operators made to a running daemon, which its end undoes.
//!
//! The list is kept in the file `SOCKET.changes`, which is written after each change, so that it survives
//! a daemon that is killed. The next start logs the changes that its configuration does not have.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use siw_host::routes::RouteFollower;
use toml::Spanned;

use super::reload::Configuration;
use crate::config::{Cidr, Config, DeviceConfig, MacAddress, PermanentNeighbour, RouteConfig};
use crate::control::context::Context;

/// Longest file that is read.
const MAX_FILE: u64 = 1 << 20;
/// Changes that a start logs one by one.
const MAX_LOGGED: usize = 50;

/// One change, as a state that the configuration does not have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum RuntimeChange {
    Limit {
        key: String,
        value: Value,
    },
    Address {
        device: String,
        address: Cidr,
        is_added: bool,
    },
    Route {
        device: String,
        to: Cidr,
        via: IpAddr,
    },
    /// A permanent neighbour; `None`: one of the configuration was removed.
    Neighbour {
        device: String,
        address: IpAddr,
        mac: Option<MacAddress>,
    },
    DeviceRemoved {
        device: String,
    },
    LogFilter {
        filter: String,
    },
}

/// The command that makes the change again.
impl fmt::Display for RuntimeChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RuntimeChange::Limit { key, value } => {
                let value = match value {
                    Value::Null => "default".to_owned(),
                    value => value.to_string(),
                };
                write!(f, "siwctl limits set {key} {value}")
            }
            RuntimeChange::Address {
                device,
                address,
                is_added: true,
            } => write!(f, "siwctl addr add {address} --device {device}"),
            RuntimeChange::Address {
                device, address, ..
            } => write!(f, "siwctl addr del {address} --device {device}"),
            RuntimeChange::Route { device, to, via } => {
                write!(f, "siwctl route add {to} --via {via} --device {device}")
            }
            RuntimeChange::Neighbour {
                device,
                address,
                mac: Some(mac),
            } => write!(
                f,
                "siwctl neigh add {address} --lladdr {mac} --device {device}"
            ),
            RuntimeChange::Neighbour {
                device, address, ..
            } => write!(f, "siwctl neigh del {address} --device {device}"),
            RuntimeChange::DeviceRemoved { device } => write!(f, "siwctl device del {device}"),
            RuntimeChange::LogFilter { filter } => write!(f, "siwctl log {filter}"),
        }
    }
}

impl RuntimeChange {
    /// Returns true if a daemon with this configuration lacks the change. Settings of a device that the
    /// configuration does not name are no loss.
    fn is_lost_with(&self, config: &Config) -> bool {
        let of_device = |name: &String, has: &dyn Fn(&DeviceConfig) -> bool| {
            config.device(name).is_some_and(|device| !has(device))
        };
        match self {
            RuntimeChange::Limit { key, value } => {
                let settings = config.settings();
                settings.get(&format!("limits.{key}")) != Some(value)
            }
            RuntimeChange::Address {
                device,
                address,
                is_added,
            } => of_device(device, &|config| {
                config.addresses.get_ref().contains(address) == *is_added
            }),
            RuntimeChange::Route { device, to, via } => of_device(device, &|config| {
                let mut routes = config.routes.iter();
                routes.any(|route| route.to == *to && route.via.get_ref() == via)
            }),
            RuntimeChange::Neighbour {
                device,
                address,
                mac,
            } => of_device(device, &|config| {
                let mut neighbours = config.neighbours.permanent.get_ref().iter();
                let found = neighbours.find(|neighbour| neighbour.address == *address);
                found.map(|neighbour| neighbour.mac) == *mac
            }),
            RuntimeChange::DeviceRemoved { device } => config.device(device).is_some(),
            RuntimeChange::LogFilter { .. } => true,
        }
    }
}

/// The settings of the running daemon: its configuration with the changes of operators.
pub(in crate::control) fn running_config(
    context: &Context,
    configuration: &Configuration,
    routes: &RouteFollower,
) -> Config {
    let mut config = configuration.current().clone();
    for device in &mut config.devices {
        let device = device.get_mut();
        let Some(index) = context.devices.find_by_name(&device.name.get_ref().0) else {
            continue;
        };
        let view = &context.devices.views[index];
        device.addresses = unplaced(view.addresses.clone());
        device.neighbours.permanent = unplaced(view.permanent_neighbours.clone());
        if routes.follows(index) {
            continue;
        }
        for added in &view.learned_routes.routes {
            let to = Cidr {
                addr: added.to.addr,
                prefix: added.to.prefix,
            };
            // Those of the configuration take precedence.
            if !device.routes.iter().any(|route| route.to == to) {
                let via = unplaced(added.via);
                device.routes.push(RouteConfig { to, via });
            }
        }
    }
    config
}

/// A value that is not from a file.
fn unplaced<T>(value: T) -> Spanned<T> {
    Spanned::new(0..0, value)
}

/// Lists the changes from the configuration of the start to the running one.
fn compare(started: &Config, running: &Config, log_filter: Option<&str>) -> Vec<RuntimeChange> {
    let mut changes = Vec::new();
    let before = started.settings();
    let limits = running.settings().into_iter();
    let limits = limits.filter(|(key, value)| before.get(key) != Some(value));
    changes.extend(limits.filter_map(|(key, value)| {
        let key = key.strip_prefix("limits.")?.to_owned();
        Some(RuntimeChange::Limit { key, value })
    }));
    for device in started.devices.iter().map(Spanned::get_ref) {
        let name = &device.name.get_ref().0;
        match running.device(name) {
            Some(now) => add_changes_of_device(&mut changes, name, device, now),
            None => changes.push(RuntimeChange::DeviceRemoved {
                device: name.clone(),
            }),
        }
    }
    changes.extend(log_filter.map(|filter| RuntimeChange::LogFilter {
        filter: filter.to_owned(),
    }));
    changes
}

fn add_changes_of_device(
    changes: &mut Vec<RuntimeChange>,
    name: &str,
    before: &DeviceConfig,
    now: &DeviceConfig,
) {
    let device = || name.to_owned();
    let (old, new) = (before.addresses.get_ref(), now.addresses.get_ref());
    let missing = |from: &[Cidr], of: &[Cidr]| -> Vec<Cidr> {
        let missing = of.iter().filter(|address| !from.contains(address));
        missing.copied().collect()
    };
    for (addresses, is_added) in [(missing(old, new), true), (missing(new, old), false)] {
        changes.extend(addresses.into_iter().map(|address| RuntimeChange::Address {
            device: device(),
            address,
            is_added,
        }));
    }
    for route in &now.routes {
        let (to, via) = (route.to, *route.via.get_ref());
        let mut known = before.routes.iter();
        if !known.any(|route| route.to == to && *route.via.get_ref() == via) {
            let device = device();
            changes.push(RuntimeChange::Route { device, to, via });
        }
    }
    let (old, new) = (
        before.neighbours.permanent.get_ref(),
        now.neighbours.permanent.get_ref(),
    );
    let added = new.iter().filter(|neighbour| !old.contains(neighbour));
    changes.extend(added.map(|neighbour| RuntimeChange::Neighbour {
        device: device(),
        address: neighbour.address,
        mac: Some(neighbour.mac),
    }));
    let is_gone = |neighbour: &&PermanentNeighbour| {
        let mut new = new.iter();
        !new.any(|other| other.address == neighbour.address)
    };
    changes.extend(old.iter().filter(is_gone).map(|neighbour| {
        let address = neighbour.address;
        RuntimeChange::Neighbour {
            device: device(),
            address,
            mac: None,
        }
    }));
}

/// The list of changes of a running daemon, and its file.
pub(in crate::control) struct RuntimeChanges {
    path: PathBuf,
    /// As the file has them; no changes, no file.
    stored: Vec<RuntimeChange>,
}

impl RuntimeChanges {
    /// The list of the daemon with this control socket, which has no changes yet.
    pub fn new(socket: &Path) -> RuntimeChanges {
        RuntimeChanges {
            path: file_of(socket),
            stored: Vec::new(),
        }
    }

    /// Writes the file if the changes are others than before.
    pub fn update(
        &mut self,
        context: &Context,
        configuration: &Configuration,
        routes: &RouteFollower,
    ) {
        let running = running_config(context, configuration, routes);
        let changes = compare(
            configuration.started(),
            &running,
            configuration.log_filter(),
        );
        if changes == self.stored {
            return;
        }
        if let Err(error) = write_changes(&self.path, &changes) {
            tracing::warn!(
                "the next start will not tell the changes of operators: {}: {error}",
                self.path.display()
            );
        }
        self.stored = changes;
    }
}

fn file_of(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".changes");
    path.into()
}

/// Replaces the file. One that was cut short by a crash would not be read.
fn write_changes(path: &Path, changes: &[RuntimeChange]) -> std::io::Result<()> {
    if changes.is_empty() {
        return remove(path);
    }
    let temporary = path.with_extension("changes.new");
    remove(&temporary)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(&serde_json::to_vec(changes)?)?;
    fs::rename(&temporary, path)
}

fn remove(path: &Path) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads the changes of the last daemon at this path; none if the file is not of this user.
fn read_changes(path: &Path) -> std::io::Result<Vec<RuntimeChange>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.uid() != nix::unistd::geteuid().as_raw() {
        return Err(ErrorKind::PermissionDenied.into());
    }
    let mut text = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Logs the changes of the daemon that had this control socket before, as far as the configuration lacks
/// them, and forgets them.
pub fn tell_lost_changes(socket: &Path, config: &Config) {
    let path = file_of(socket);
    let changes = match read_changes(&path) {
        Ok(changes) => changes,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!("{}: {error}: not read", path.display());
            }
            return;
        }
    };
    let lost = changes.iter().filter(|change| change.is_lost_with(config));
    let lost: Vec<String> = lost.map(ToString::to_string).collect();
    for command in lost.iter().take(MAX_LOGGED) {
        tracing::warn!("the restart has undone a change of an operator: {command}");
    }
    if let Some(more) = lost.len().checked_sub(MAX_LOGGED).filter(|more| *more > 0) {
        tracing::warn!("the restart has undone {more} more changes of operators");
    }
    if !lost.is_empty() {
        tracing::warn!(
            "to keep changes, write them into the configuration, or all at once before a restart: \
             siwctl config export >FILE"
        );
    }
    if let Err(error) = remove(&path) {
        tracing::warn!("{}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::GOOD;

    fn parse(text: &str) -> Config {
        Config::parse_text(Path::new("x.toml"), text).unwrap()
    }

    fn commands(changes: &[RuntimeChange]) -> Vec<String> {
        changes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn changes_are_told_as_commands_unless_the_configuration_has_them() {
        let started = parse(&format!("[limits]\nmemory_per_user = \"1 GiB\"\n{GOOD}"));
        let changed = GOOD
            .replace("\"10.77.0.1/24\"]", "\"10.77.0.9/24\"]\nroutes = [{ to = \"10.80.0.0/16\", via = \"10.77.0.254\" }]\nneighbours.permanent = [{ address = \"10.77.0.7\", mac = \"02:00:00:00:00:07\" }]");
        let running = parse(&format!("[limits]\nclients = 7\n{changed}"));
        let changes = compare(&started, &running, Some("debug"));
        assert_eq!(
            commands(&changes),
            [
                "siwctl limits set clients 7",
                "siwctl limits set memory_per_user default",
                "siwctl addr add 10.77.0.9/24 --device siw0",
                "siwctl addr del 10.77.0.1/24 --device siw0",
                "siwctl route add 10.80.0.0/16 --via 10.77.0.254 --device siw0",
                "siwctl neigh add 10.77.0.7 --lladdr 02:00:00:00:00:07 --device siw0",
                "siwctl log debug",
            ]
        );
        let lost = |config: &Config| changes.iter().filter(|c| c.is_lost_with(config)).count();
        assert_eq!((lost(&started), lost(&running)), (7, 1));
        let back = compare(&running, &started, None);
        let removed = "siwctl neigh del 10.77.0.7 --device siw0";
        assert!(commands(&back).iter().any(|command| command == removed));
        // A device that the configuration no longer names.
        let other = parse(&GOOD.replace("siw0", "siw7"));
        assert_eq!(compare(&started, &started, None), []);
        let gone = compare(&started, &other, None);
        assert!(commands(&gone).contains(&"siwctl device del siw0".to_owned()));
        assert_eq!(lost(&other), 2, "a limit and the log");
    }

    #[test]
    fn the_file_holds_the_latest_list_and_vanishes_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = file_of(&folder.path().join("siwd.sock"));
        let change = RuntimeChange::LogFilter {
            filter: "debug".into(),
        };
        for _ in 0..2 {
            write_changes(&path, std::slice::from_ref(&change)).unwrap();
            assert_eq!(read_changes(&path).unwrap(), std::slice::from_ref(&change));
        }
        write_changes(&path, &[]).unwrap();
        write_changes(&path, &[]).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(read_changes(&path).is_err(), "follows no link");
    }
}
