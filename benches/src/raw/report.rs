//! Output of `siw-perf raw`: a line for each interval and port, and the result.

use super::options::{FrameSize, LAYER_1_BYTES, PayloadWay, RawMode, RawRun};
use super::ports::RawPort;
use super::search::RateTrial;
use crate::machine::{Conditions, MachineRecord};
use crate::measurement::Quantiles;
use serde::{Deserialize, Serialize};
use std::fmt::{self, Write};
use std::time::{Duration, Instant};

/// Counts of one direction of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FrameCount {
    pub(super) frames: u64,
    /// Bytes of the frames, without FCS.
    pub(super) bytes: u64,
    /// Frames lost: receive ring full or no buffers; transmit ring full, or refused by the driver.
    pub(super) dropped: u64,
}

/// Counts of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PortCount {
    pub(super) rx: FrameCount,
    pub(super) tx: FrameCount,
}

impl FrameCount {
    fn since(self, before: FrameCount) -> FrameCount {
        FrameCount {
            frames: self.frames - before.frames,
            bytes: self.bytes - before.bytes,
            dropped: self.dropped.saturating_sub(before.dropped),
        }
    }
}

impl PortCount {
    pub(super) fn since(self, before: PortCount) -> PortCount {
        PortCount {
            rx: self.rx.since(before.rx),
            tx: self.tx.since(before.tx),
        }
    }
}

/// One direction of a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct DirectionReport {
    /// Frames received or sent.
    pub frames: u64,
    /// Bytes of the frames, without FCS.
    pub bytes: u64,
    /// Frames lost at the port.
    pub dropped: u64,
    /// Million frames per second.
    pub mframes: f64,
    /// Gb/s of these bytes.
    pub gbps: f64,
    /// Gb/s that the frames take on an Ethernet link, with preamble, FCS and gap.
    #[serde(default)]
    pub l1_gbps: f64,
}

impl DirectionReport {
    fn new(count: FrameCount, time: Duration) -> DirectionReport {
        let per_second = |value: f64| value / time.as_secs_f64().max(1e-9);
        let rounded = |value: f64| (value * 1e6).round() / 1e6;
        DirectionReport {
            frames: count.frames,
            bytes: count.bytes,
            dropped: count.dropped,
            mframes: rounded(per_second(count.frames as f64 / 1e6)),
            gbps: rounded(per_second(count.bytes as f64 * 8.0 / 1e9)),
            l1_gbps: rounded(per_second(
                (count.bytes as f64 + count.frames as f64 * LAYER_1_BYTES) * 8.0 / 1e9,
            )),
        }
    }
}

/// Results of one port.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RawPortReport {
    /// Name of the device.
    pub name: String,
    /// DPDK's driver.
    pub driver: String,
    /// Received frames.
    pub rx: DirectionReport,
    /// Sent frames.
    pub tx: DirectionReport,
    /// Speed of the link in Mb/s; `None` for rings, and if the port does not know it.
    #[serde(default)]
    pub link_mbps: Option<u32>,
}

/// The result of one run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RawReport {
    /// The mode.
    pub raw: RawMode,
    /// Size of generated frames in bytes; of a mix the average.
    pub size: u32,
    /// True if frames of several sizes were generated.
    #[serde(default)]
    pub imix: bool,
    /// Flows of generated frames.
    #[serde(default = "one_flow")]
    pub flows: u16,
    /// Cores of the threads, each with a queue of each port.
    #[serde(default)]
    pub cores: Vec<usize>,
    /// VLAN of generated frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// Trials of the search for the highest rate without loss, whose last trial without loss this
    /// report describes; empty without a search.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trials: Vec<RateTrial>,
    /// Remarks for the reader.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Maximum frames of a burst.
    pub burst: u32,
    /// Placement of payload in generated frames; `None` if none were generated.
    pub payload: Option<PayloadWay>,
    /// Seconds of the run.
    pub secs: f64,
    /// The ports, over the whole run.
    pub ports: Vec<RawPortReport>,
    /// For each interval, the ports in the same order.
    pub series: Vec<Vec<(DirectionReport, DirectionReport)>>,
    /// pingpong: round trips in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<Quantiles>,
    /// pingpong: frames that did not return.
    #[serde(default)]
    pub lost: u64,
    /// Conditions during the measurement.
    pub conditions: Conditions,
    /// The machine.
    pub machine: MachineRecord,
}

/// Counts of an interval or of a whole run.
pub(super) struct Interval {
    /// Time since the run began.
    pub(super) end: Duration,
    pub(super) length: Duration,
    pub(super) counts: Vec<PortCount>,
}

impl Interval {
    /// The interval from `start` to `now` in a run that began at `begin`.
    pub(super) fn between(
        (start, before): &(Instant, Vec<PortCount>),
        (now, counts): (Instant, &[PortCount]),
        begin: Instant,
    ) -> Interval {
        let pairs = counts.iter().zip(before);
        Interval {
            end: now - begin,
            length: now - *start,
            counts: pairs.map(|(count, before)| count.since(*before)).collect(),
        }
    }

    pub(super) fn directions(&self) -> Vec<(DirectionReport, DirectionReport)> {
        self.counts
            .iter()
            .map(|count| {
                (
                    DirectionReport::new(count.rx, self.length),
                    DirectionReport::new(count.tx, self.length),
                )
            })
            .collect()
    }
}

impl RawReport {
    pub(super) fn new(run: &RawRun, ports: &[RawPort], whole: &Interval) -> RawReport {
        let port = |(port, (rx, tx)): (&RawPort, _)| RawPortReport {
            name: port.description.name.clone(),
            driver: port.description.driver.clone(),
            rx,
            tx,
            link_mbps: port.description.link_mbps,
        };
        RawReport {
            raw: run.mode,
            size: run.size.average().round() as u32,
            imix: run.size == FrameSize::Imix,
            flows: run.flows,
            vlan: run.vlan,
            cores: Vec::new(),
            trials: Vec::new(),
            notes: Vec::new(),
            burst: run.burst as u32,
            payload: run.payload,
            secs: (whole.length.as_secs_f64() * 1e6).round() / 1e6,
            ports: ports.iter().zip(whole.directions()).map(port).collect(),
            series: Vec::new(),
            round_trip_us: None,
            lost: 0,
            conditions: Conditions::default(),
            machine: MachineRecord::default(),
        }
    }

    /// Frames that were offered, and those of them that did not arrive at the other port, or back at
    /// the only one.
    pub(super) fn offered_and_lost(&self) -> (u64, u64) {
        let offered = self
            .ports
            .first()
            .map_or(0, |port| port.tx.frames + port.tx.dropped);
        let arrived: u64 = match &self.ports[..] {
            [only] => only.rx.frames,
            ports => ports.iter().skip(1).map(|port| port.rx.frames).sum(),
        };
        (offered, offered.saturating_sub(arrived))
    }

    /// The report as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Short description of the run.
    pub fn title(&self) -> String {
        let frames = match self.payload {
            Some(way) => {
                let size = match self.imix {
                    true => FrameSize::Imix,
                    false => FrameSize::Fixed(self.size),
                };
                let mut text = format!(" {} by {}", size.describe(), way.name());
                // Writing into a string never fails.
                if self.flows > 1 {
                    let _ = write!(text, ", {} flows", self.flows);
                }
                if self.cores.len() > 1 {
                    let _ = write!(text, ", {} cores", self.cores.len());
                }
                if let Some(id) = self.vlan {
                    let _ = write!(text, ", VLAN {id}");
                }
                if !self.trials.is_empty() {
                    text += ", highest rate without loss";
                }
                text
            }
            None => String::new(),
        };
        let ports: Vec<String> = self
            .ports
            .iter()
            .map(|port| format!("{} ({})", port.name, port.driver))
            .collect();
        format!("{}{frames}, {}", self.raw.name(), ports.join(", "))
    }
}

const COLUMNS: &str =
    "       s  port          rx M/s   rx Gb/s   rx lost    tx M/s   tx Gb/s   tx lost";

/// Header line printed before a run.
pub(super) fn format_header(run: &RawRun, ports: &[RawPort]) -> String {
    let mut text = format!("{}, bursts of {}", run.mode.name(), run.burst);
    if let Some(way) = run.payload {
        // Writing into a string never fails.
        let _ = write!(
            text,
            ", frames of {}, payload by {}",
            run.size.describe(),
            way.name()
        );
    }
    for port in ports {
        let mac: Vec<String> = port
            .mac()
            .iter()
            .map(|octet| format!("{octet:02x}"))
            .collect();
        let description = &port.description;
        let _ = write!(
            text,
            "\n  {}: {}, {}, MTU {}",
            description.name,
            description.driver,
            mac.join(":"),
            description.mtu
        );
    }
    let _ = writeln!(text, "\n{COLUMNS}");
    text
}

/// Formats a line for each port.
pub(super) fn format_interval(ports: &[RawPort], interval: &Interval) -> String {
    let mut text = String::new();
    for (port, (rx, tx)) in ports.iter().zip(interval.directions()) {
        let second = format!("{:.1}", interval.end.as_secs_f64());
        text += &format_line(&second, &port.description.name, &rx, &tx);
    }
    text
}

fn format_line(second: &str, name: &str, rx: &DirectionReport, tx: &DirectionReport) -> String {
    format!(
        "{second:>8}  {name:<10} {:>9.4} {:>9.3} {:>9} {:>9.4} {:>9.3} {:>9}\n",
        rx.mframes, rx.gbps, rx.dropped, tx.mframes, tx.gbps, tx.dropped
    )
}

/// Formats the rate at layer 1, with its share of the link if the speed is known.
fn format_layer_1(direction: &DirectionReport, link_mbps: Option<u32>) -> String {
    let gbps = direction.l1_gbps;
    match link_mbps {
        Some(mbps) => {
            let link = f64::from(mbps) / 1e3;
            format!(
                "{gbps:.3} Gb/s, {:.1} % of {link} Gb/s",
                100.0 * gbps / link
            )
        }
        None => format!("{gbps:.3} Gb/s"),
    }
}

fn one_flow() -> u16 {
    1
}

impl fmt::Display for RawReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for port in &self.ports {
            f.write_str(&format_line("all", &port.name, &port.rx, &port.tx))?;
            writeln!(
                f,
                "          {}: {} frames received, {} sent in {:.2} s",
                port.name, port.rx.frames, port.tx.frames, self.secs
            )?;
            writeln!(
                f,
                "          {}: layer 1 rx {}, tx {}",
                port.name,
                format_layer_1(&port.rx, port.link_mbps),
                format_layer_1(&port.tx, port.link_mbps)
            )?;
        }
        if !self.trials.is_empty() {
            let sent = self.ports.first().map_or(0.0, |port| port.tx.mframes);
            writeln!(
                f,
                "          highest rate without loss (RFC 2544): {sent:.4} M frames/s, trials: {}",
                self.trials.len()
            )?;
        }
        for note in &self.notes {
            writeln!(f, "          note: {note}")?;
        }
        if let Some(times) = &self.round_trip_us {
            writeln!(
                f,
                "          round trip p50 {:.2}  p99 {:.2}  p99.9 {:.2} us; {} lost",
                times.p50, times.p99, times.p999, self.lost
            )?;
        }
        if let Some(reason) = &self.conditions.disturbed {
            writeln!(f, "          disturbed: {reason}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_has_rates_of_what_it_counted() {
        let count = |frames| PortCount {
            rx: FrameCount {
                frames,
                bytes: frames * 1000,
                dropped: 2,
            },
            tx: FrameCount::default(),
        };
        let interval = Interval {
            end: Duration::from_secs(4),
            length: Duration::from_millis(500),
            counts: vec![count(3_000_000).since(count(1_000_000))],
        };
        let (rx, tx) = interval.directions()[0];
        assert_eq!((rx.frames, rx.dropped), (2_000_000, 0));
        assert!((rx.mframes - 4.0).abs() < 1e-6, "{rx:?}");
        assert!((rx.gbps - 32.0).abs() < 1e-6, "{rx:?}");
        // 24 bytes more for each frame.
        assert!((rx.l1_gbps - 32.768).abs() < 1e-6, "{rx:?}");
        assert_eq!(
            format_layer_1(&rx, Some(40_000)),
            "32.768 Gb/s, 81.9 % of 40 Gb/s"
        );
        assert_eq!(tx, DirectionReport::default());
    }

    #[test]
    fn lines_have_the_columns_of_their_header() {
        let rx = DirectionReport {
            mframes: 12.5,
            gbps: 6.4,
            ..DirectionReport::default()
        };
        let line = format_line("1.0", "raw0", &rx, &DirectionReport::default());
        assert_eq!(line.trim_end().len(), COLUMNS.len(), "{line}");
        assert_eq!(line.split_whitespace().count(), 8);
    }
}
