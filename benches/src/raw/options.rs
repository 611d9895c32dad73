//! The command line of `siw-perf raw`, and the runs that it requests.

use super::ports::PortDescription;
use crate::option_values::{parse_seconds, parse_size};
use anyhow::{anyhow, bail};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use siwd::config::Config;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Forwarding mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lowercase")]
pub enum RawMode {
    /// The first port sends as fast as it can; a second one receives and counts.
    TxOnly,
    /// Every port receives, counts and frees; on a ring pair the second end sends.
    RxOnly,
    /// Received frames are sent unchanged by the other port, or by the only one.
    Io,
    /// Like io, with swapped Ethernet addresses.
    MacSwap,
    /// One frame at a time makes a round trip: returned by a second port, or by another host.
    PingPong,
    /// Replies to ARP requests and ICMP echo requests for the ports' addresses.
    IcmpEcho,
}

impl RawMode {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            RawMode::TxOnly => "txonly",
            RawMode::RxOnly => "rxonly",
            RawMode::Io => "io",
            RawMode::MacSwap => "macswap",
            RawMode::PingPong => "pingpong",
            RawMode::IcmpEcho => "icmpecho",
        }
    }

    /// Returns true if received frames are sent on.
    pub fn forwards(self) -> bool {
        matches!(self, RawMode::Io | RawMode::MacSwap)
    }
}

/// Placement of payload in generated frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PayloadWay {
    /// Copied behind the headers.
    Copy,
    /// In a second segment that refers to the payload memory.
    Reference,
}

impl PayloadWay {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PayloadWay::Copy => "copy",
            PayloadWay::Reference => "reference",
        }
    }
}

/// Options of `siw-perf raw`.
#[derive(Debug, Clone, Args)]
pub struct RawOptions {
    /// Forwarding mode.
    #[arg(long, value_enum)]
    pub mode: RawMode,

    /// Configuration file of siwd whose first one or two devices are the ports [default: a ring
    /// pair].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["port", "address", "mtu"])]
    pub config: Option<PathBuf>,

    /// Port as devargs ("net_tap0,iface=tap0"), PCI address, or af_xdp:INTERFACE; once or twice.
    #[arg(long, value_name = "PORT")]
    pub port: Vec<String>,

    /// Address with prefix length of each port, used for replies by icmpecho and in generated
    /// frames [default: 198.18.0.1/24, 198.18.0.2/24].
    #[arg(long, value_name = "CIDR,..", value_delimiter = ',')]
    pub address: Vec<String>,

    /// MTU: maximum IP bytes in a frame.
    #[arg(long, value_name = "N", default_value_t = 1500)]
    pub mtu: u16,

    /// Bytes of a frame, without FCS.
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = parse_size, default_value = "64")]
    pub size: Vec<u32>,

    /// Maximum frames sent or received in one burst.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub burst: u16,

    /// Placement of payload in generated frames [default: both, one after the other].
    #[arg(long, value_enum)]
    pub payload: Option<PayloadWay>,

    /// io, macswap: bursts that each port sends first [default: 1 on a ring pair, else 0].
    #[arg(long, value_name = "N")]
    pub tx_first: Option<u32>,

    /// Destination MAC address of generated frames [default: the second port's, or
    /// 02:00:00:00:00:00].
    #[arg(long, value_name = "MAC", value_parser = parse_mac)]
    pub to_mac: Option<[u8; 6]>,

    /// Seconds of each run [default: 3 for txonly and pingpong and on a ring pair, else until
    /// SIGINT].
    #[arg(long, value_name = "N", value_parser = parse_seconds)]
    pub secs: Option<Duration>,

    /// Seconds between two lines of statistics.
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_seconds)]
    pub interval: Duration,

    /// The core to run on [default: that of the configuration's first worker, or the last one].
    #[arg(long, value_name = "N")]
    pub core: Option<usize>,

    /// Print each result as one line of JSON, instead of a line for each interval.
    #[arg(long)]
    pub json: bool,
}

/// One run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RawRun {
    pub(super) mode: RawMode,
    /// Size of generated frames in bytes.
    pub(super) size: usize,
    pub(super) burst: usize,
    /// `None`: no frames are generated.
    pub(super) payload: Option<PayloadWay>,
    pub(super) tx_first: u32,
    pub(super) to_mac: Option<[u8; 6]>,
    /// `None`: until a signal.
    pub(super) time: Option<Duration>,
    pub(super) interval: Duration,
}

/// Length of the Ethernet header.
pub(super) const ETHERNET_HEADER: usize = 14;
/// Minimum Ethernet frame without FCS.
const MIN_FRAME: u32 = 60;
const DEFAULT_TIME: Duration = Duration::from_secs(3);

impl RawOptions {
    /// Builds siwd's configuration of the ports.
    pub(super) fn to_config(&self) -> anyhow::Result<Config> {
        let mut config = match &self.config {
            Some(path) => Config::load_file(path),
            None => Config::parse_text(Path::new("(--port)"), &self.to_toml()?),
        }?;
        config.devices.truncate(2);
        if let Some(core) = self.core {
            config.workers.cores = toml::Spanned::new(0..0, vec![core]);
        }
        Ok(config)
    }

    /// Text of a configuration with the named ports.
    fn to_toml(&self) -> anyhow::Result<String> {
        if self.port.len() > 2 {
            bail!("--port: at most two ports take part");
        }
        let links: Vec<String> = match &self.port[..] {
            [] => vec!["pair = \"raw\"".into(), "pair = \"raw\"".into()],
            ports => ports.iter().map(|port| link_line(port)).collect(),
        };
        if self.address.len() > links.len() {
            bail!(
                "--address: {} addresses for {} ports",
                self.address.len(),
                links.len()
            );
        }
        // The rings of a port can hold this many buffers; those of a ring pair are short.
        let buffers = if self.port.is_empty() { 4096 } else { 8192 };
        let mut text = format!("[dpdk]\nbuffers = {buffers}\n");
        for (index, link) in links.iter().enumerate() {
            let default = format!("198.18.0.{}/24", index + 1);
            let address = self.address.get(index).unwrap_or(&default);
            // Writing into a string never fails.
            let _ = write!(
                text,
                "[[device]]\nname = \"raw{index}\"\n{link}\naddresses = [{}]\nmtu = {}\n",
                quote(address),
                self.mtu
            );
        }
        Ok(text)
    }

    /// The runs: every size, and each payload placement if frames are generated.
    pub(super) fn to_runs(&self, ports: &[PortDescription]) -> anyhow::Result<Vec<RawRun>> {
        let on_rings = ports.iter().all(|port| port.in_process);
        if on_rings && ports.len() == 1 {
            bail!("a pair of rings needs both of its devices");
        }
        let tx_first = self.tx_first.unwrap_or(u32::from(on_rings));
        let makes_frames = match self.mode {
            RawMode::TxOnly | RawMode::PingPong => true,
            RawMode::RxOnly => on_rings,
            RawMode::Io | RawMode::MacSwap => tx_first > 0,
            RawMode::IcmpEcho => false,
        };
        let measures = matches!(self.mode, RawMode::TxOnly | RawMode::PingPong) || on_rings;
        let time = self.secs.or(measures.then_some(DEFAULT_TIME));
        let most = ports.iter().map(|port| u32::from(port.mtu)).min();
        // A ring pair carries packets longer than a packet buffer.
        let most =
            (most.unwrap_or(0) + ETHERNET_HEADER as u32).min(u32::from(u16::MAX - dpdk::HEADROOM));
        if let Some(size) = self
            .size
            .iter()
            .find(|size| !(MIN_FRAME..=most).contains(size))
        {
            bail!(
                "--size {size}: frames have {MIN_FRAME} to {most} bytes here; raise mtu for longer ones"
            );
        }
        let refusal = ports.iter().find(|port| !port.takes_references);
        let ways = match (self.payload, refusal) {
            _ if !makes_frames => vec![None],
            (Some(PayloadWay::Reference), Some(port)) => {
                bail!(
                    "--payload reference: {} ({}) sends from packet buffers alone",
                    port.name,
                    port.driver
                );
            }
            (Some(way), _) => vec![Some(way)],
            (None, Some(_)) => vec![Some(PayloadWay::Copy)],
            (None, None) => vec![Some(PayloadWay::Copy), Some(PayloadWay::Reference)],
        };
        // Without generated frames, sizes make no difference.
        let sizes = &self.size[..if makes_frames { self.size.len() } else { 1 }];
        let run = |size: u32, payload| RawRun {
            mode: self.mode,
            size: size as usize,
            burst: usize::from(self.burst),
            payload,
            tx_first,
            to_mac: self.to_mac,
            time,
            interval: self.interval,
        };
        let runs = sizes
            .iter()
            .flat_map(|size| ways.iter().map(|way| run(*size, *way)))
            .collect();
        Ok(runs)
    }
}

/// Quotes a string for TOML.
fn quote(text: &str) -> String {
    toml::Value::String(text.into()).to_string()
}

/// The configuration line for the link of a port.
fn link_line(port: &str) -> String {
    if let Some(interface) = port.strip_prefix("af_xdp:") {
        return format!("af_xdp = {}", quote(interface));
    }
    let address = port.as_bytes();
    let is_pci = address.len() == 12 && (address[4], address[7], address[10]) == (b':', b':', b'.');
    format!(
        "{} = {}",
        if is_pci { "pci" } else { "devargs" },
        quote(port)
    )
}

fn parse_mac(text: &str) -> anyhow::Result<[u8; 6]> {
    let refuse = || anyhow!("write an Ethernet address as 02:00:00:00:00:01");
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for octet in &mut mac {
        let part = parts.next().ok_or_else(refuse)?;
        *octet = u8::from_str_radix(part, 16).map_err(|_| refuse())?;
    }
    match parts.next() {
        None => Ok(mac),
        Some(_) => Err(refuse()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        raw: RawOptions,
    }

    fn parse(line: &str) -> RawOptions {
        let words = std::iter::once("raw").chain(line.split(' '));
        Line::try_parse_from(words).unwrap().raw
    }

    fn port(in_process: bool, takes_references: bool) -> PortDescription {
        PortDescription {
            name: "raw0".into(),
            driver: "net_x".into(),
            mtu: 1500,
            in_process,
            takes_references,
        }
    }

    #[test]
    fn a_pair_of_rings_is_the_default() {
        let options = parse("--mode txonly --size 64,1514");
        let config = options.to_config().unwrap();
        assert_eq!(config.devices.len(), 2);
        let runs = options.to_runs(&[port(true, true), port(true, true)]);
        let runs = runs.unwrap();
        let ways: Vec<_> = runs.iter().map(|run| (run.size, run.payload)).collect();
        let (copy, reference) = (Some(PayloadWay::Copy), Some(PayloadWay::Reference));
        assert_eq!(
            ways,
            [(64, copy), (64, reference), (1514, copy), (1514, reference)]
        );
        assert_eq!(runs[0].time, Some(DEFAULT_TIME));
    }

    #[test]
    fn ports_are_named_in_three_ways() {
        assert_eq!(link_line("af_xdp:eth0"), "af_xdp = \"eth0\"");
        assert_eq!(link_line("0000:03:00.0"), "pci = \"0000:03:00.0\"");
        assert_eq!(
            link_line("net_tap0,iface=x"),
            "devargs = \"net_tap0,iface=x\""
        );
        let options = parse("--mode icmpecho --port net_tap0,iface=x --address 10.0.0.1/24");
        let config = options.to_config().unwrap();
        assert_eq!(config.devices.len(), 1);
        let runs = options.to_runs(&[port(false, true)]).unwrap();
        assert_eq!((runs.len(), runs[0].payload, runs[0].time), (1, None, None));
    }

    #[test]
    fn what_a_port_cannot_do_is_refused_in_words() {
        let error = |line: &str, ports: &[PortDescription]| {
            let options = parse(line);
            options.to_runs(ports).unwrap_err().to_string()
        };
        let copies = [port(false, false)];
        let said = error("--mode txonly --payload reference", &copies);
        assert!(said.contains("packet buffers alone"), "{said}");
        let said = error("--mode txonly --size 1515", &copies);
        assert!(said.contains("60 to 1514"), "{said}");
        let said = error("--mode io", &[port(true, true)]);
        assert!(said.contains("both of its devices"), "{said}");
        let options = parse("--mode io --port a --port b --port c");
        assert!(
            options
                .to_config()
                .unwrap_err()
                .to_string()
                .contains("at most two")
        );
        let options = parse("--mode io --port a --address nonsense");
        assert!(
            options
                .to_config()
                .unwrap_err()
                .to_string()
                .contains("nonsense")
        );
    }

    #[test]
    fn ethernet_addresses_have_six_octets() {
        assert_eq!(
            parse_mac("02:00:00:00:00:fE").unwrap(),
            [2, 0, 0, 0, 0, 0xfe]
        );
        for bad in ["", "02:00", "02:00:00:00:00:00:00", "x2:00:00:00:00:00"] {
            assert!(parse_mac(bad).is_err(), "{bad}");
        }
    }
}
