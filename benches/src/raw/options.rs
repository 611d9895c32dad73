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

    /// Bytes of a frame, without FCS; imix: frames of 60, 590 and 1514 bytes, 7 to 4 to 1.
    #[arg(long, short = 's', value_name = "N,..", value_delimiter = ',',
          value_parser = parse_frame_size, default_value = "64")]
    pub size: Vec<FrameSize>,

    /// Generated flows: UDP source ports, used in turn.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub flows: u16,

    /// VLAN of generated frames (IEEE 802.1Q); the tag counts in their size.
    #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u16).range(1..=4094))]
    pub vlan: Option<u16>,

    /// txonly: frames per second to send, with k or M for thousands or millions [default: as many as
    /// possible].
    #[arg(long, value_name = "N", value_parser = parse_rate)]
    pub rate: Option<f64>,

    /// txonly: percent of the link's speed to send, with preamble, FCS and gap of each frame.
    #[arg(long, value_name = "N", value_parser = parse_percent, conflicts_with = "rate")]
    pub percent: Option<f64>,

    /// txonly: search for the highest rate without loss (RFC 2544 section 26.1), in trials of --secs
    /// each; needs a second port, or a peer that returns the frames.
    #[arg(long, conflicts_with_all = ["rate", "percent"])]
    pub search: bool,

    /// Maximum frames sent or received in one burst.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub burst: u16,

    /// Placement of payload in generated frames; both for a comparison.
    #[arg(
        long,
        value_enum,
        value_name = "copy,reference",
        value_delimiter = ',',
        default_value = "copy"
    )]
    pub payload: Vec<PayloadWay>,

    /// io, macswap: bursts that each port sends first [default: 1 on a ring pair, else 0].
    #[arg(long, value_name = "N")]
    pub tx_first: Option<u32>,

    /// Destination MAC address of generated frames [default: the second port's, or
    /// 02:00:00:00:00:00].
    #[arg(long, value_name = "MAC", value_parser = parse_mac)]
    pub to_mac: Option<[u8; 6]>,

    /// Seconds of each run [default: 3 for txonly and pingpong and on a ring pair, else until
    /// SIGINT].
    #[arg(long, short = 'D', visible_alias = "duration", value_name = "N", value_parser = parse_seconds)]
    pub secs: Option<Duration>,

    /// Seconds between two lines of statistics.
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_seconds)]
    pub interval: Duration,

    /// The cores to run on, each with a queue of each port; one for pingpong and icmpecho [default:
    /// that of the configuration's first worker, or the last one].
    #[arg(long, alias = "core", value_name = "N,..", value_delimiter = ',')]
    pub cores: Vec<usize>,

    /// Print each result as one line of JSON, instead of a line for each interval.
    #[arg(long)]
    pub json: bool,
}

/// One run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RawRun {
    pub(super) mode: RawMode,
    /// Size of generated frames.
    pub(super) size: FrameSize,
    pub(super) flows: u16,
    pub(super) vlan: Option<u16>,
    /// `None`: as many frames as possible.
    pub(super) offered: Option<OfferedRate>,
    /// Search for the highest rate without loss.
    pub(super) search: bool,
    pub(super) burst: usize,
    /// `None`: no frames are generated.
    pub(super) payload: Option<PayloadWay>,
    pub(super) tx_first: u32,
    pub(super) to_mac: Option<[u8; 6]>,
    /// `None`: until a signal.
    pub(super) time: Option<Duration>,
    pub(super) interval: Duration,
}

/// Size of generated frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameSize {
    /// All frames have this number of bytes, without FCS.
    Fixed(u32),
    /// A mix of sizes.
    Imix,
}

/// The frames of a mix with IP packets of up to 46, 576 and 1500 bytes, 7 to 4 to 1, spread evenly.
const IMIX: [usize; 12] = [60, 590, 60, 60, 590, 60, 1514, 60, 590, 60, 60, 590];

impl FrameSize {
    /// Bytes of the frames, in the order of their generation.
    pub(super) fn list(self) -> Vec<usize> {
        match self {
            FrameSize::Fixed(size) => vec![size as usize],
            FrameSize::Imix => IMIX.to_vec(),
        }
    }

    /// Average bytes of a frame.
    pub(super) fn average(self) -> f64 {
        let all = self.list();
        all.iter().sum::<usize>() as f64 / all.len() as f64
    }

    /// The size in words.
    pub(super) fn describe(self) -> String {
        match self {
            FrameSize::Fixed(size) => format!("{size} B"),
            FrameSize::Imix => "IMIX".into(),
        }
    }
}

/// Rate at which frames are offered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum OfferedRate {
    /// Frames per second.
    Frames(f64),
    /// Percent of the link's speed at layer 1.
    Percent(f64),
}

/// Bytes on an Ethernet link in addition to a frame without FCS: preamble and start delimiter, FCS,
/// and the gap between frames.
pub(super) const LAYER_1_BYTES: f64 = 8.0 + 4.0 + 12.0;

impl OfferedRate {
    /// Frames per second on a link of `link_mbps` Mb/s, `None` if its speed is unknown.
    pub(super) fn frames_per_second(
        self,
        size: FrameSize,
        link_mbps: Option<u32>,
    ) -> anyhow::Result<f64> {
        match (self, link_mbps) {
            (OfferedRate::Frames(rate), _) => Ok(rate),
            (OfferedRate::Percent(percent), Some(mbps)) => {
                let bits = (size.average() + LAYER_1_BYTES) * 8.0;
                Ok(percent / 100.0 * f64::from(mbps) * 1e6 / bits)
            }
            (OfferedRate::Percent(_), None) => {
                bail!("--percent: the port does not know its speed; use --rate")
            }
        }
    }
}

/// Length of the Ethernet header.
pub(super) const ETHERNET_HEADER: usize = 14;
/// Length of a VLAN tag.
pub(super) const VLAN_TAG: usize = 4;
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
        if !self.cores.is_empty() {
            config.workers.cores = toml::Spanned::new(0..0, self.cores.clone());
        }
        Ok(config)
    }

    /// Number of threads.
    pub(super) fn threads(&self) -> usize {
        self.cores.len().max(1)
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
        // Without hugepages it works too, as for testpmd --no-huge, but slower.
        let mut text = format!("[dpdk]\nhugepages = \"auto\"\nbuffers = {buffers}\n");
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
        let header = ETHERNET_HEADER + self.vlan.map_or(0, |_| VLAN_TAG);
        let most = (most.unwrap_or(0) + header as u32).min(u32::from(u16::MAX - dpdk::HEADROOM));
        let sizes = self.size.iter().flat_map(|size| size.list());
        if let Some(size) = sizes
            .map(|size| size as u32)
            .find(|size| !(MIN_FRAME..=most).contains(size))
        {
            bail!(
                "--size {size}: frames have {MIN_FRAME} to {most} bytes here; raise mtu for longer ones"
            );
        }
        if self.cores.len() > 1 && matches!(self.mode, RawMode::PingPong | RawMode::IcmpEcho) {
            bail!("--cores: {} runs on one core", self.mode.name());
        }
        let paced = [
            ("--rate", self.rate.is_some()),
            ("--percent", self.percent.is_some()),
            ("--search", self.search),
        ];
        if let (false, Some((option, _))) = (
            self.mode == RawMode::TxOnly,
            paced.iter().find(|(_, is_set)| *is_set),
        ) {
            bail!("{option}: only txonly offers frames at a rate");
        }
        let refusal = ports.iter().find(|port| !port.takes_references);
        let by_reference = self.payload.contains(&PayloadWay::Reference);
        let ways = match refusal {
            _ if !makes_frames => vec![None],
            Some(port) if by_reference => {
                bail!(
                    "--payload reference: {} ({}) sends from packet buffers alone",
                    port.name,
                    port.driver
                );
            }
            _ => self.payload.iter().copied().map(Some).collect(),
        };
        let rate = self.rate.map(OfferedRate::Frames);
        let offered = rate.or(self.percent.map(OfferedRate::Percent));
        // Without generated frames, sizes make no difference.
        let sizes = &self.size[..if makes_frames { self.size.len() } else { 1 }];
        let run = |size: FrameSize, payload| RawRun {
            mode: self.mode,
            size,
            flows: self.flows,
            vlan: self.vlan,
            offered,
            search: self.search,
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

fn parse_frame_size(text: &str) -> anyhow::Result<FrameSize> {
    match text.eq_ignore_ascii_case("imix") {
        true => Ok(FrameSize::Imix),
        false => parse_size(text).map(FrameSize::Fixed),
    }
}

/// Parses a number of frames per second: `1000`, `2.5M`.
fn parse_rate(text: &str) -> anyhow::Result<f64> {
    let digits = text.trim_end_matches(['k', 'K', 'm', 'M']);
    let scale = match &text[digits.len()..] {
        "" => Some(1.0),
        "k" | "K" => Some(1e3),
        "m" | "M" => Some(1e6),
        _ => None,
    };
    let rate = scale.and_then(|scale| Some(digits.parse::<f64>().ok()? * scale));
    rate.filter(|rate| (1.0..=1e10).contains(rate))
        .ok_or_else(|| anyhow!("write frames per second as 1000, 500k or 2.5M"))
}

fn parse_percent(text: &str) -> anyhow::Result<f64> {
    let percent = text.trim_end_matches('%').parse::<f64>().ok();
    percent
        .filter(|percent| *percent > 0.0 && *percent <= 100.0)
        .ok_or_else(|| anyhow!("write percent of the link above 0, up to 100"))
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
            link_mbps: None,
        }
    }

    #[test]
    fn a_pair_of_rings_is_the_default() {
        let options = parse("--mode txonly --size 64,1514 --payload copy,reference");
        let config = options.to_config().unwrap();
        assert_eq!(config.devices.len(), 2);
        let runs = options.to_runs(&[port(true, true), port(true, true)]);
        let runs = runs.unwrap();
        let ways: Vec<_> = runs.iter().map(|run| (run.size, run.payload)).collect();
        let (copy, reference) = (Some(PayloadWay::Copy), Some(PayloadWay::Reference));
        let (small, large) = (FrameSize::Fixed(64), FrameSize::Fixed(1514));
        assert_eq!(
            ways,
            [
                (small, copy),
                (small, reference),
                (large, copy),
                (large, reference)
            ]
        );
        assert_eq!(runs[0].time, Some(DEFAULT_TIME));
    }

    #[test]
    fn payload_is_copied_unless_asked_otherwise() {
        let both_ends = [port(true, true), port(true, true)];
        let runs = parse("--mode txonly").to_runs(&both_ends).unwrap();
        let ways: Vec<_> = runs.iter().map(|run| run.payload).collect();
        assert_eq!(ways, [Some(PayloadWay::Copy)]);
    }

    #[test]
    fn hugepages_are_not_required() {
        let config = parse("--mode txonly").to_config().unwrap();
        assert_eq!(config.dpdk.hugepages, siwd::config::HugepagePolicy::Auto);
    }

    #[test]
    fn frames_are_mixed_tagged_and_offered_at_a_rate() {
        let both_ends = [port(true, true), port(true, true)];
        let line = "--mode txonly -s imix --vlan 7 --flows 16 --rate 2.5M -D 1";
        let run = &parse(line).to_runs(&both_ends).unwrap()[0];
        assert_eq!(
            (run.size, run.vlan, run.flows),
            (FrameSize::Imix, Some(7), 16)
        );
        assert_eq!(run.offered, Some(OfferedRate::Frames(2.5e6)));
        let count = |size| IMIX.iter().filter(|other| **other == size).count();
        assert_eq!((count(60), count(590), count(1514)), (7, 4, 1));
        let error = parse("--mode io --search").to_runs(&both_ends).unwrap_err();
        assert!(error.to_string().contains("only txonly"), "{error}");
        let error = parse("--mode pingpong --cores 0,1").to_runs(&both_ends);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("runs on one core"), "{error}");
        // A tag makes the longest frame longer.
        let longest = parse("--mode txonly --size 1518 --vlan 7").to_runs(&both_ends);
        assert!(longest.is_ok());
    }

    #[test]
    fn percent_of_a_link_count_what_a_frame_takes_there() {
        let percent = OfferedRate::Percent(100.0);
        // 14.88 million frames of 64 bytes with FCS at 10 Gb/s.
        let rate = percent.frames_per_second(FrameSize::Fixed(60), Some(10_000));
        assert_eq!(rate.unwrap().round(), 14_880_952.0);
        let error = percent
            .frames_per_second(FrameSize::Imix, None)
            .unwrap_err();
        assert!(error.to_string().contains("use --rate"), "{error}");
        assert_eq!(parse_rate("500k").unwrap(), 500_000.0);
        assert!(parse_rate("fast").is_err() && parse_rate("0").is_err());
        assert!(parse_percent("101").is_err() && parse_percent("0").is_err());
        assert_eq!(parse_percent("12.5%").unwrap(), 12.5);
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
