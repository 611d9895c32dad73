//! The daemon's configuration: one TOML file, typed, unknown keys refused.
//!
//! `siwd --config FILE` loads it here; `--check` stops after it. Every error names
//! file:line:column, what is wrong and what is allowed.

mod mpa;
mod tcp;
mod values;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

pub use mpa::{MarkersName, MpaSettings, OutOfOrderName, RtrName, TerminateName};
pub use tcp::{CongestionName, NeighbourSettings, TcpSettings};
pub use values::{ByteSize, Cidr, DeviceName, FileMode, MacAddress, PciAddress};

/// Workers that completion queues have rings for.
const MAX_WORKERS: usize = siw_shm::completion_queue::MAX_WORKERS as usize;

/// What is wrong with a configuration file, and where.
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
    /// The file was read and something in it is wrong.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// What is wrong and what is allowed.
        message: String,
    },
}

/// The whole file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// One entry per NIC.
    #[serde(rename = "device")]
    pub devices: Vec<Spanned<DeviceConfig>>,
    /// Cores and idle policy.
    #[serde(default)]
    pub workers: WorkersConfig,
    /// Bounds on what clients may hold.
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

/// How a worker behaves when nothing is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IdlePolicy {
    /// Spin for ever: lowest latency, one whole core.
    Poll,
    /// Spin for a while, then sleep until a doorbell, a frame or a timer.
    Adaptive,
}

/// `[workers]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkersConfig {
    /// The cores that workers are pinned to, one worker each.
    pub cores: Spanned<Vec<usize>>,
    /// What a worker does when idle.
    pub idle: IdlePolicy,
    /// Microseconds without work before an adaptive worker sleeps.
    pub spin_us: u32,
}

impl Default for WorkersConfig {
    fn default() -> Self {
        WorkersConfig {
            cores: Spanned::new(0..0, vec![]),
            idle: IdlePolicy::Adaptive,
            spin_us: 50,
        }
    }
}

/// `[limits]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Clients connected at once.
    pub clients: u32,
    /// Queue pairs of one client.
    pub queue_pairs_per_client: u32,
    /// Completion queues of one client.
    pub completion_queues_per_client: u32,
    /// Memory regions of one client.
    pub memory_regions_per_client: u32,
    /// Arena bytes of one client.
    pub memory_per_client: ByteSize,
    /// Work requests in one queue.
    pub work_requests: u32,
    /// Entries in one completion queue.
    pub completions: u32,
    /// TCP connections of one worker on one device.
    pub connections: u32,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        LimitsConfig {
            clients: 1024,
            queue_pairs_per_client: 102_400,
            completion_queues_per_client: 102_400,
            memory_regions_per_client: 1_024_000,
            memory_per_client: ByteSize(8 << 30),
            work_requests: 32_768,
            completions: 3_276_800,
            connections: 100_000,
        }
    }
}

/// `[control]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlSocketConfig {
    /// Path of the Unix socket that clients connect to.
    pub socket: PathBuf,
    /// Permission bits of the socket, as octal text ("0660").
    pub mode: FileMode,
    /// Group that owns the socket; absent means the daemon's.
    pub group: Option<Spanned<String>>,
}

impl Default for ControlSocketConfig {
    fn default() -> Self {
        ControlSocketConfig {
            socket: PathBuf::from("/run/siwd/siwd.sock"),
            mode: FileMode(0o660),
            group: None,
        }
    }
}

/// Whether hugepages back the daemon's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugepagePolicy {
    /// Use them when enough are free, fall back to normal pages and say so.
    Auto,
    /// Refuse to start without them.
    Require,
    /// Never use them.
    Never,
}

/// `[dpdk]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DpdkConfig {
    /// Hugepage policy for packet buffers and arenas.
    pub hugepages: HugepagePolicy,
    /// Packet buffers in all; rounded up by DPDK.
    pub buffers: u32,
    /// EAL log level: emergency .. debug.
    pub log: EalLog,
}

impl Default for DpdkConfig {
    fn default() -> Self {
        DpdkConfig {
            hugepages: HugepagePolicy::Require,
            buffers: 16_384,
            log: EalLog::Error,
        }
    }
}

/// DPDK's own log level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EalLog {
    /// Errors only.
    Error,
    /// And warnings.
    Warning,
    /// And notices.
    Notice,
    /// And information.
    Info,
    /// Everything.
    Debug,
}

/// `[capture]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureConfig {
    /// The pcapng file to write (replaced at start).
    pub file: PathBuf,
    /// Stop writing after this many bytes.
    #[serde(default = "default_capture_limit")]
    pub limit: ByteSize,
}

fn default_capture_limit() -> ByteSize {
    ByteSize(256 << 20)
}

/// Whether an FPDU carries a CRC32c (RFC 5044, section 7.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CrcSetting {
    /// Not asked for; used when the peer asks.
    Off,
    /// Asked for.
    On,
    /// Asked for. A reply that leaves it out is refused, and no application turns it off.
    Required,
}

/// Who computes TCP checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChecksumPolicy {
    /// The port when it can; nobody on the embedded pair, whose frames never leave
    /// memory (captures still show right sums); siwd otherwise.
    Auto,
    /// Always siwd.
    Software,
}

/// Whether the port cuts TCP segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TsoPolicy {
    /// When it can.
    Auto,
    /// It has to: a port that cannot is an error.
    On,
    /// Never.
    Off,
}

/// One `[[device]]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// Verbs device name: siw0.
    pub name: Spanned<DeviceName>,
    /// Two devices that name the same pair are joined by two DPDK rings.
    pub pair: Option<String>,
    /// A DPDK virtual device: "net_tap0,iface=siwtap0".
    pub devargs: Option<String>,
    /// A PCI NIC bound to vfio-pci: "0000:03:00.0".
    pub pci: Option<PciAddress>,
    /// Ethernet address; absent: the port's own, or one drawn from the name.
    pub mac: Option<MacAddress>,
    /// Addresses with prefix length: "10.77.0.1/24", "fd77::1/64".
    pub addresses: Spanned<Vec<Cidr>>,
    /// IPv4 router for other networks.
    pub gateway: Option<Spanned<Ipv4Addr>>,
    /// IPv6 router for other networks.
    pub gateway6: Option<Spanned<Ipv6Addr>>,
    /// Networks behind other routers than the gateway; the longest prefix wins.
    #[serde(default)]
    pub routes: Vec<RouteConfig>,
    /// IP bytes in a frame, 1280 to 9000 (576 without IPv6).
    #[serde(default = "default_mtu")]
    pub mtu: Spanned<u16>,
    /// 802.1Q tag, 1 to 4094.
    pub vlan: Option<Spanned<u16>>,
    /// Workers that serve the device; absent: all. Those beyond the port's queues receive and
    /// send through the others.
    pub queues: Option<Spanned<u16>>,
    /// Who computes checksums.
    #[serde(default = "default_checksum")]
    pub checksum: ChecksumPolicy,
    /// Whether the port cuts super-segments of whole FPDUs (TSO); needs its checksums.
    #[serde(default = "default_tso")]
    pub tso: Spanned<TsoPolicy>,
    /// `[device.mpa]`
    #[serde(default)]
    pub mpa: MpaSettings,
    /// `[device.tcp]`
    #[serde(default)]
    pub tcp: TcpSettings,
    /// `[device.neighbours]`
    #[serde(default)]
    pub neighbours: NeighbourSettings,
}

fn default_mtu() -> Spanned<u16> {
    Spanned::new(0..0, 1500)
}

fn default_tso() -> Spanned<TsoPolicy> {
    Spanned::new(0..0, TsoPolicy::Auto)
}

fn default_checksum() -> ChecksumPolicy {
    ChecksumPolicy::Auto
}

/// A route: `{ to = "10.80.0.0/16", via = "10.77.0.254" }`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// Destinations.
    pub to: Cidr,
    /// A router on one of the device's networks.
    pub via: Spanned<IpAddr>,
}

/// Where a device's frames go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkSource {
    /// One end of a pair of rings.
    Pair(String),
    /// A DPDK virtual device by devargs.
    Vdev(String),
    /// A PCI NIC.
    Pci(String),
}

impl DeviceConfig {
    /// The link that this device names; `validate` made sure that there is exactly one.
    pub fn link_source(&self) -> LinkSource {
        if let Some(pair) = &self.pair {
            LinkSource::Pair(pair.clone())
        } else if let Some(address) = &self.pci {
            LinkSource::Pci(address.0.clone())
        } else {
            LinkSource::Vdev(self.devargs.clone().unwrap_or_default())
        }
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigError`], with the place of the first thing that is wrong.
    pub fn load_file(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Config::parse_text(path, &text)
    }

    /// Checks a text that came from `path`.
    ///
    /// # Errors
    /// As [`Config::load`].
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

    fn check_settings(&self) -> Result<(), (Range<usize>, String)> {
        let fail = |span: Range<usize>, message: String| Err((span, message));
        if self.devices.is_empty() {
            return fail(0..0, "no [[device]]: name at least one".into());
        }
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

impl DeviceConfig {
    fn check_settings(&self, whole: Range<usize>) -> Result<(), (Range<usize>, String)> {
        let name = &self.name.get_ref().0;
        let links = [
            self.pair.is_some(),
            self.devargs.is_some(),
            self.pci.is_some(),
        ];
        let count = links.iter().filter(|named| **named).count();
        if count != 1 {
            return Err((
                whole,
                format!(
                    "device {name:?} names {count} links: give exactly one of pair = \"NAME\", devargs = \"net_...\", pci = \"0000:03:00.0\""
                ),
            ));
        }
        if self.addresses.get_ref().is_empty() {
            return Err((
                self.addresses.span(),
                format!("device {name:?} needs at least one address"),
            ));
        }
        let six = self
            .addresses
            .get_ref()
            .iter()
            .any(|cidr| cidr.addr.is_ipv6());
        let least = if six { 1280 } else { 576 };
        let mtu = *self.mtu.get_ref();
        if !(least..=9000).contains(&mtu) {
            return Err((
                self.mtu.span(),
                format!("mtu {mtu}: {least} to 9000 are allowed here"),
            ));
        }
        if let Some(vlan) = &self.vlan
            && !(1..=4094).contains(vlan.get_ref())
        {
            return Err((
                vlan.span(),
                format!("vlan {}: 1 to 4094 are allowed", vlan.get_ref()),
            ));
        }
        if let Some(queues) = &self.queues
            && !(1..=MAX_WORKERS as u16).contains(queues.get_ref())
        {
            return Err((
                queues.span(),
                format!(
                    "queues {}: 1 to {} are allowed",
                    queues.get_ref(),
                    MAX_WORKERS
                ),
            ));
        }
        if *self.tso.get_ref() == TsoPolicy::On && self.checksum == ChecksumPolicy::Software {
            return Err((
                self.tso.span(),
                "tso \"on\": the port can cut only what it computes the checksums of; leave checksum = \"auto\"".into(),
            ));
        }
        let addresses = self.addresses.get_ref();
        for (index, address) in addresses.iter().enumerate() {
            if addresses[..index]
                .iter()
                .any(|earlier| earlier.addr == address.addr)
            {
                return Err((
                    self.addresses.span(),
                    format!("address {} is given twice", address.addr),
                ));
            }
        }
        let gateways = [
            self.gateway
                .as_ref()
                .map(|gateway| (IpAddr::V4(*gateway.get_ref()), gateway.span())),
            self.gateway6
                .as_ref()
                .map(|gateway| (IpAddr::V6(*gateway.get_ref()), gateway.span())),
        ];
        for (router, span) in gateways.into_iter().flatten() {
            self.check_router(router, router, span)?;
        }
        for route in &self.routes {
            self.check_router(*route.via.get_ref(), route.to.addr, route.via.span())?;
        }
        self.tcp.check_ranges()?;
        self.neighbours.check_ranges()?;
        self.mpa.check_ranges()
    }

    /// A router has to be a neighbour: on a network of the device, or of IPv6's link.
    fn check_router(
        &self,
        router: IpAddr,
        to: IpAddr,
        span: Range<usize>,
    ) -> Result<(), (Range<usize>, String)> {
        let near = self.addresses.get_ref().iter().any(|cidr| match router {
            IpAddr::V6(address) if address.is_unicast_link_local() => cidr.addr.is_ipv6(),
            _ => {
                cidr.addr != router && siw_tcp::IpCidr::new(cidr.addr, cidr.prefix).contains(router)
            }
        });
        if near && router.is_ipv4() == to.is_ipv4() {
            return Ok(());
        }
        Err((
            span,
            format!(
                "router {router}: it has to be on one of the device's own networks (or fe80::/10), of the destination's family, and not the device itself"
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
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

    /// Without the places in the file.
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
        let text = include_str!("../../config/reference.toml");
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
        let e = error(&GOOD.replacen("pair = \"lo\"", "pair = \"lo\"\nmtu = 9001", 1));
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
