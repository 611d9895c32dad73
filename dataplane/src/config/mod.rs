//! The daemon's configuration: one typed TOML file; unknown keys are refused.
//!
//! `siwd --config FILE` loads the file here; `--check` exits after it. Every error names
//! file:line:column, the mistake, and the allowed values.

mod device;
mod export;
mod mpa;
mod process;
mod schema;
mod tcp;
mod values;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toml::Spanned;

pub use device::{
    ChecksumPolicy, CrcSetting, DeviceConfig, LinkSource, PersonaSetting, PortMapPolicy,
    RouteConfig, TsoPolicy, TxPayloadPolicy, XdpCopySetting,
};
pub(crate) use device::{MAX_PERMANENT_NEIGHBOURS, reserved_in};
pub use mpa::{MarkersName, MpaSettings, OutOfOrderName, RtrName, TerminateName};
pub use process::{
    CaptureConfig, ControlSocketConfig, DpdkConfig, EalLog, HugepagePolicy, IdlePolicy,
    IovaSetting, LimitsConfig, ProcessMemoryPolicy, SocketPathError, WorkersConfig,
    check_socket_path,
};
pub use schema::configuration_schema;
pub(crate) use tcp::LEAST_WINDOW;
pub use tcp::{CongestionName, NeighbourSettings, PermanentNeighbour, TcpSettings};
pub use values::{
    ByteSize, Cidr, DeviceName, FileMode, InterfaceName, MacAddress, PciAddress, PortRange,
    ValueError,
};

/// Maximum number of workers: each completion queue has one ring per worker.
const MAX_WORKERS: usize = siw_shm::completion_queue::MAX_WORKERS as usize;
/// Sets of workers are bit masks of this many bits.
const _: () = assert!(MAX_WORKERS <= u64::BITS as usize);

/// Packet buffers beyond those in descriptor rings: for queued received data and the workers'
/// caches.
const SPARE_BUFFERS: u32 = 512;

/// Error in a configuration file, with its location.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the configuration: {source}", path.display())]
    Read {
        /// The file that was asked for.
        path: PathBuf,
        /// Why reading failed.
        source: std::io::Error,
    },
    /// The file was read, but its contents are invalid.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// The mistake, and the allowed values.
        message: String,
    },
}

/// The whole configuration file.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// One entry per NIC.
    #[serde(rename = "device")]
    #[schemars(with = "Vec<DeviceConfig>")]
    pub devices: Vec<Spanned<DeviceConfig>>,
    /// Cores and idle policy.
    #[serde(default)]
    pub workers: WorkersConfig,
    /// Limits on the resources of clients.
    #[serde(default)]
    pub limits: LimitsConfig,
    /// The control socket.
    #[serde(default)]
    pub control: ControlSocketConfig,
    /// Memory and EAL settings.
    #[serde(default)]
    pub dpdk: DpdkConfig,
    /// Packet capture to a pcapng file; absent means none.
    pub capture: Option<CaptureConfig>,
}

/// Configuration of the embedded loopback.
const EMBEDDED: &str = include_str!("../../../config/loopback.toml");

/// Source of a configuration: a file, or the embedded loopback, and the settings of the command line
/// that take precedence.
#[derive(Debug, Clone, Default)]
pub struct ConfigSource {
    /// The file; absent: the embedded loopback.
    pub file: Option<PathBuf>,
    /// `--socket`
    pub socket: Option<PathBuf>,
    /// `--capture`
    pub capture: Option<PathBuf>,
}

impl ConfigSource {
    /// Reads and checks the configuration.
    ///
    /// # Errors
    /// As [`Config::load_file`].
    pub fn load(&self) -> Result<Config, ConfigError> {
        let mut config = match &self.file {
            Some(path) => Config::load_file(path)?,
            None => Config::parse_text(self.name().as_ref(), EMBEDDED)?,
        };
        if let Some(socket) = &self.socket {
            config.control.socket = socket.clone();
        }
        if let Some(file) = &self.capture {
            let limit = config.capture.map(|capture| capture.limit);
            config.capture = Some(CaptureConfig::new(file.clone(), limit));
        }
        Ok(config)
    }

    /// Name for messages.
    pub fn name(&self) -> String {
        let file = self.file.as_ref().map(|path| path.display().to_string());
        file.unwrap_or_else(|| "(embedded loopback)".to_owned())
    }
}

impl Config {
    /// Effective values by key, such as `limits.clients` or `device.siw0.tcp.ecn`.
    pub fn settings(&self) -> BTreeMap<String, Value> {
        let mut settings = BTreeMap::new();
        let mut tables = serde_json::to_value(self).unwrap_or_default();
        let devices = tables["device"].take();
        for device in devices.as_array().into_iter().flatten() {
            let name = device["name"].as_str().unwrap_or_default();
            add_settings(&mut settings, &format!("device.{name}"), device);
        }
        for (table, value) in tables.as_object().into_iter().flatten() {
            if table != "device" {
                add_settings(&mut settings, table, value);
            }
        }
        settings
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigError`], with the location of the first mistake.
    pub fn load_file(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Config::parse_text(path, &text)
    }

    /// Parses and checks `text`; `path` appears in errors only.
    ///
    /// # Errors
    /// As [`Config::load_file`].
    pub fn parse_text(path: &Path, text: &str) -> Result<Config, ConfigError> {
        let at = |span: Range<usize>, message: String| {
            let before = &text[..span.start.min(text.len())];
            let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
            ConfigError::Invalid {
                path: path.to_owned(),
                line: before.matches('\n').count() + 1,
                column: before[line_start..].chars().count() + 1,
                message,
            }
        };
        let config: Config = toml::from_str(text).map_err(|error| {
            at(
                error.span().unwrap_or(0..0),
                error.message().trim().to_owned(),
            )
        })?;
        config
            .check_settings()
            .map_err(|(span, message)| at(span, message))?;
        Ok(config)
    }

    /// Checks the settings together. Returns the place and the text of the first mistake.
    pub(crate) fn check_settings(&self) -> Result<(), (Range<usize>, String)> {
        let fail = |span: Range<usize>, message: String| Err((span, message));
        if self.devices.is_empty() {
            return fail(0..0, "no [[device]]: name at least one".into());
        }
        self.dpdk.check_settings()?;
        let cores = &self.workers.cores;
        for (index, core) in cores.get_ref().iter().enumerate() {
            if cores.get_ref()[..index].contains(core) {
                return fail(
                    cores.span(),
                    format!("core {core} is named twice: one worker per core"),
                );
            }
        }
        if cores.get_ref().len() > MAX_WORKERS {
            return fail(
                cores.span(),
                format!(
                    "{} cores: at most {} workers",
                    cores.get_ref().len(),
                    MAX_WORKERS
                ),
            );
        }
        let workers = self.workers.cores.get_ref().len().max(1);
        let in_rings: u32 = self
            .devices
            .iter()
            .map(|device| device.get_ref().ring_buffers(workers))
            .sum();
        if in_rings > 0 && self.dpdk.buffers < in_rings + SPARE_BUFFERS {
            return fail(
                self.devices[0].span(),
                format!(
                    "buffers {}: the descriptor rings of the NICs alone can hold {in_rings}; raise buffers in [dpdk] to at least {}, or lower rx_descriptors and tx_descriptors",
                    self.dpdk.buffers,
                    in_rings + SPARE_BUFFERS
                ),
            );
        }
        let ports = self.devices.iter().filter(|device| {
            // AF_XDP sockets are no ports of DPDK.
            device.get_ref().af_xdp.is_none()
        });
        if ports.count() > dpdk::MAX_PORTS {
            return fail(
                self.devices[dpdk::MAX_PORTS].span(),
                format!(
                    "{} devices: DPDK was built for at most {} ports",
                    self.devices.len(),
                    dpdk::MAX_PORTS
                ),
            );
        }
        for (index, spanned) in self.devices.iter().enumerate() {
            let device = spanned.get_ref();
            let name = &device.name.get_ref().0;
            if self.devices[..index]
                .iter()
                .any(|other| other.get_ref().name.get_ref().0 == *name)
            {
                return fail(
                    device.name.span(),
                    format!("device name {name:?} is used twice"),
                );
            }
            device.check_settings(spanned.span())?;
            if let Some(interface) = &device.host_interface {
                let name = interface.get_ref();
                let twice = self.devices[..index].iter().any(|other| {
                    let other = other.get_ref().host_interface.as_ref();
                    other.is_some_and(|other| other.get_ref() == name)
                });
                if twice {
                    return fail(
                        interface.span(),
                        format!("host_interface {:?} is used twice", name.0),
                    );
                }
            }
            for cidr in device.addresses.get_ref() {
                let twice = self.devices[..index].iter().any(|other| {
                    other
                        .get_ref()
                        .addresses
                        .get_ref()
                        .iter()
                        .any(|other| other.addr == cidr.addr)
                });
                if twice {
                    return fail(
                        device.addresses.span(),
                        format!("address {} is used twice", cidr.addr),
                    );
                }
            }
            let links = device.exclusive_links();
            for other in self.devices[..index].iter().map(Spanned::get_ref) {
                let mut shared = other.exclusive_links().into_iter();
                if let Some(link) = shared.find(|link| links.contains(link)) {
                    return fail(
                        device.link_span(),
                        format!(
                            "{link} is already used by device {:?}: give one device all addresses",
                            other.name.get_ref().0
                        ),
                    );
                }
            }
            if let Some(pair) = &device.pair {
                let ends = self
                    .devices
                    .iter()
                    .filter(|other| other.get_ref().pair.as_ref() == Some(pair))
                    .count();
                if ends != 2 {
                    return fail(
                        device.name.span(),
                        format!("pair {pair:?} has {ends} end(s): exactly two devices name it"),
                    );
                }
            }
        }
        Ok(())
    }
}

impl Config {
    /// The table of the device of this name.
    pub fn device(&self, name: &str) -> Option<&DeviceConfig> {
        let mut devices = self.devices.iter().map(Spanned::get_ref);
        devices.find(|device| device.name.get_ref().0 == name)
    }
}

/// Adds the settings of a table and its sub-tables.
fn add_settings(settings: &mut BTreeMap<String, Value>, key: &str, value: &Value) {
    match value {
        Value::Object(table) => {
            for (name, value) in table {
                add_settings(settings, &format!("{key}.{name}"), value);
            }
        }
        value => {
            settings.insert(key.to_owned(), value.clone());
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A pair of devices.
    pub(crate) const GOOD: &str = r#"
[[device]]
name = "siw0"
pair = "lo"
addresses = ["10.77.0.1/24"]

[[device]]
name = "siw1"
pair = "lo"
addresses = ["10.77.0.2/24", "fd77::2/64"]
"#;

    fn error(text: &str) -> String {
        Config::parse_text(Path::new("x.toml"), text)
            .unwrap_err()
            .to_string()
    }

    /// Debug output of `c` without the spans.
    fn values(c: &Config) -> String {
        let all = format!("{c:?}");
        let mut parts = all.split("span: ");
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            out += part.split_once(", ").map_or(part, |p| p.1);
        }
        out
    }

    #[test]
    fn the_reference_names_every_setting_with_its_default() {
        let text = include_str!("../../../config/reference.toml");
        let all = Config::parse_text(Path::new("reference.toml"), text).unwrap();
        let short = GOOD
            .replace("\"lo\"", "\"loopback\"")
            .replace("\"10.77.0.1/24\"", "\"10.77.0.1/24\", \"fd77::1/64\"");
        let few = Config::parse_text(Path::new("x.toml"), &short).unwrap();
        assert_eq!(values(&all), values(&few));
        for table in [
            "workers",
            "limits",
            "control",
            "dpdk",
            "capture",
            "device.mpa",
            "device.tcp",
            "device.neighbours",
        ] {
            let e = error(&format!("{GOOD}\n[{table}]\nno_such = 1"));
            for name in e.split('`').skip(3).step_by(2) {
                let named = |l: &str| {
                    l.trim_start_matches("# ")
                        .starts_with(&format!("{name} = "))
                };
                assert!(text.lines().any(named), "[{table}] {name}: {e}");
            }
        }
        let e = error(&GOOD.replacen("pair", "no_such = 1\npair", 1));
        for name in e.split('`').skip(3).step_by(2) {
            assert!(text.contains(name), "{name}: {e}");
        }
    }

    #[test]
    fn a_small_file_gets_every_default() {
        let c = Config::parse_text(Path::new("x.toml"), GOOD).unwrap();
        assert_eq!(c.devices.len(), 2);
        assert_eq!(*c.devices[0].get_ref().mtu.get_ref(), 1500);
        assert_eq!(c.workers.idle, IdlePolicy::Adaptive);
        assert_eq!(c.devices[0].get_ref().mpa.crc, CrcSetting::On);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_place() {
        let e = error(&GOOD.replacen("pair = \"lo\"", "pear = \"lo\"", 1));
        assert!(e.starts_with("x.toml:4:1: "), "{e}");
        assert!(e.contains("pear") && e.contains("pair"), "{e}");
    }

    #[test]
    fn an_ill_typed_key_is_named_with_its_place() {
        let e = error(&GOOD.replacen("pair = \"lo\"", "pair = \"lo\"\nmtu = \"big\"", 1));
        assert!(e.starts_with("x.toml:5:7: "), "{e}");
    }

    #[test]
    fn a_bad_address_says_how_to_write_one() {
        let e = error(&GOOD.replacen("10.77.0.1/24", "10.77.0.1", 1));
        assert!(e.starts_with("x.toml:5:"), "{e}");
        assert!(e.contains("10.77.0.1/24"), "{e}");
    }

    #[test]
    fn a_pair_with_one_end_is_refused() {
        let e = error(GOOD.split("[[device]]\nname = \"siw1\"").next().unwrap());
        assert!(e.contains("pair \"lo\" has 1 end"), "{e}");
    }

    #[test]
    fn an_mtu_out_of_range_says_the_range() {
        let with_mtu =
            |mtu| GOOD.replacen("pair = \"lo\"", &format!("pair = \"lo\"\nmtu = {mtu}"), 1);
        let e = error(&with_mtu("500"));
        assert!(e.contains("576 to 65535"), "{e}");
        let tap = "devargs = \"net_tap0,iface=x\"";
        let e = error(&with_mtu("9001").replacen("pair = \"lo\"", tap, 1));
        assert!(e.contains("576 to 9000"), "{e}");
    }

    #[test]
    fn a_device_with_two_links_or_none_is_refused() {
        let two = GOOD.replacen("pair = \"lo\"", "pair = \"lo\"\npci = \"0000:03:00.0\"", 1);
        assert!(error(&two).contains("names 2 links"));
        let none = GOOD.replacen("pair = \"lo\"\n", "", 1);
        assert!(error(&none).contains("names 0 links"));
    }

    #[test]
    fn a_route_through_a_router_that_is_not_on_the_link_is_refused() {
        let with = |via: &str| {
            let route =
                format!("pair = \"lo\"\nroutes = [{{ to = \"10.80.0.0/16\", via = \"{via}\" }}]");
            GOOD.replacen("pair = \"lo\"", &route, 1)
        };
        assert!(Config::parse_text(Path::new("x.toml"), &with("10.77.0.254")).is_ok());
        assert!(error(&with("10.78.0.1")).contains("router 10.78.0.1"));
        assert!(error(&with("10.77.0.1")).contains("not the device itself"));
    }

    #[test]
    fn a_gateway_has_to_be_a_neighbour_too() {
        let with =
            |line: &str| GOOD.replacen("\"fd77::2/64\"]", &format!("\"fd77::2/64\"]\n{line}"), 1);
        for good in [
            "gateway = \"10.77.0.254\"",
            "gateway6 = \"fd77::fe\"",
            "gateway6 = \"fe80::1\"",
        ] {
            assert!(
                Config::parse_text(Path::new("x.toml"), &with(good)).is_ok(),
                "{good}"
            );
        }
        for bad in ["gateway = \"10.78.0.254\"", "gateway6 = \"fd78::fe\""] {
            let e = error(&with(bad));
            assert!(e.starts_with("x.toml:11:") && e.contains("router"), "{e}");
        }
        let e = error(&GOOD.replacen("\"10.77.0.1/24\"", "\"10.77.0.1/24\", \"10.77.0.1/16\"", 1));
        assert!(e.contains("given twice"), "{e}");
    }

    #[test]
    fn sizes_are_read_with_units() {
        assert_eq!("64MiB".parse::<ByteSize>().unwrap().0, 64 << 20);
        assert_eq!("17".parse::<ByteSize>().unwrap().0, 17);
        assert!("64MB".parse::<ByteSize>().is_err());
        assert!("99999999999TiB".parse::<ByteSize>().is_err());
    }
}
