//! The command line of `siw-perf`, and what it asks to be measured.

use crate::plan::{MeasurementPlan, Mode, Operation};
use clap::Parser;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Bandwidth and latency over siwd, beside the bounds of the same machine.
#[derive(Debug, Clone, Parser)]
#[command(name = "siw-perf", version, about)]
pub struct PerfOptions {
    /// Bandwidth or latency.
    #[arg(value_enum)]
    pub mode: Mode,

    /// How the data moves.
    #[arg(long, value_enum, default_value = "write")]
    pub op: Operation,

    /// Bytes of a message, with K, M or G for KiB, MiB, GiB [default: 1M for bw, 64 for lat].
    #[arg(long, value_name = "N", value_parser = parse_size)]
    pub size: Option<u32>,

    /// Messages in flight on each queue pair [default: 8 for bw].
    #[arg(long, value_name = "N")]
    pub depth: Option<u32>,

    /// Queue pairs, each with a connection of its own.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub qps: u32,

    /// Seconds to measure; some tenths before them are not counted.
    #[arg(long, value_name = "N", default_value = "3", value_parser = parse_seconds)]
    pub secs: Duration,

    /// Device that starts; with --connect the one to connect from.
    #[arg(long, value_name = "DEVICE")]
    pub from: Option<String>,

    /// Device that answers, in this process.
    #[arg(long, value_name = "DEVICE", conflicts_with_all = ["listen", "connect"])]
    pub to: Option<String>,

    /// Answer one measurement of another process, whose options count; port 7175
    /// unless named.
    #[arg(long, value_name = "ADDR", value_parser = parse_address, conflicts_with_all = ["connect", "from"])]
    pub listen: Option<SocketAddr>,

    /// Measure against a process that listens.
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    pub connect: Option<SocketAddr>,

    /// Print the result as one line of JSON.
    #[arg(long)]
    pub json: bool,

    /// Check all received data; wrong bytes are an error. Slower.
    #[arg(long)]
    pub verify: bool,

    /// Payload travels in the work request (at most 256 bytes).
    #[arg(long)]
    pub inline: bool,

    /// Do not measure the bounds (they need DPDK memory in this process).
    #[arg(long)]
    pub no_bounds: bool,

    /// The daemon's control socket [default: $SIWD_SOCKET, /run/siwd/siwd.sock].
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// The core to measure on; the daemon's workers should have others
    /// [default: the first that this process may use, when both ends are in it].
    #[arg(long, value_name = "N")]
    pub core: Option<usize>,
}

/// Port of --listen and --connect addresses without one.
pub const PORT: u16 = 7175;

/// Where the two ends of the measurement are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PerfEndpoints {
    /// Both ends in this process, on these devices.
    Both {
        /// The initiator's device.
        from: String,
        /// The target's device.
        to: String,
    },
    /// The target of another process, at this address.
    Listen(SocketAddr),
    /// The initiator, against a process that listens at `to`.
    Connect {
        /// Address of the target.
        to: SocketAddr,
        /// Device to connect from; none: the one that routes to `to`.
        from: Option<String>,
    },
}

impl PerfOptions {
    /// The ends that the options name, with the default devices.
    pub fn endpoints(&self) -> Result<PerfEndpoints, String> {
        Ok(match (&self.listen, &self.connect) {
            (Some(address), _) => PerfEndpoints::Listen(*address),
            (None, Some(address)) => PerfEndpoints::Connect {
                to: *address,
                from: self.from.clone(),
            },
            (None, None) => PerfEndpoints::Both {
                from: self.from.clone().unwrap_or_else(|| "siw0".into()),
                to: self.to.clone().unwrap_or_else(|| "siw1".into()),
            },
        })
    }

    /// The measurement that the options describe, checked against the limits.
    pub fn to_plan(&self) -> Result<MeasurementPlan, String> {
        let latency = self.mode == Mode::Lat;
        if latency && self.depth.is_some_and(|depth| depth != 1) {
            return Err("--depth: lat has one message in flight; leave it out".into());
        }
        let plan = MeasurementPlan {
            mode: self.mode,
            op: self.op,
            size: self.size.unwrap_or(if latency { 64 } else { 1 << 20 }),
            depth: if latency { 1 } else { self.depth.unwrap_or(8) },
            qps: self.qps,
            verify: self.verify,
            inline: self.inline,
        };
        plan.check_limits()?;
        Ok(plan)
    }
}

/// Reads a number of bytes: `64`, `4K`, `1M`, `1MiB`.
pub fn parse_size(text: &str) -> Result<u32, String> {
    let digits = text.trim_end_matches(|character: char| character.is_ascii_alphabetic());
    let shift = match &text[digits.len()..].to_ascii_lowercase()[..] {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err("write bytes as 64, 4K, 1M or 1G".into()),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| "write bytes as 64, 4K, 1M or 1G".to_owned())?;
    number
        .checked_shl(shift)
        .filter(|bytes| bytes >> shift == number)
        .and_then(|bytes| u32::try_from(bytes).ok())
        .ok_or_else(|| "a message has less than 4 GiB".into())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("write seconds from 0.01 to 86400".into()),
    }
}

fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse() {
        return Ok(SocketAddr::new(ip, PORT));
    }
    if let Some(port) = text.strip_prefix(':').and_then(|port| port.parse().ok()) {
        return Ok(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port));
    }
    Err("write an address with or without port: 10.77.0.2, 10.77.0.2:7175, [fd77::2]:7175".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<PerfOptions, String> {
        PerfOptions::try_parse_from(line.split(' ')).map_err(|error| error.to_string())
    }

    #[test]
    fn a_full_command_line_says_everything() {
        let a = parse(
            "siw-perf bw --op read --size 64K --depth 16 --qps 4 --secs 0.5 --from siw0 --to siw1 --json --verify",
        )
        .unwrap();
        let port = a.to_plan().unwrap();
        assert_eq!(
            (port.op, port.size, port.depth, port.qps),
            (Operation::Read, 65536, 16, 4)
        );
        assert_eq!(a.secs, Duration::from_millis(500));
        let both = PerfEndpoints::Both {
            from: "siw0".into(),
            to: "siw1".into(),
        };
        assert_eq!(a.endpoints().unwrap(), both);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("64"), Ok(64));
        assert_eq!(parse_size("1MiB"), Ok(1 << 20));
        assert_eq!(parse_size("4k"), Ok(4096));
        for bad in [
            "",
            "k",
            "4x",
            "-1",
            "1.5M",
            "4G",
            "99999999999999999999",
            "ü",
        ] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bad_sizes_are_refused_with_what_is_allowed() {
        let error = parse("siw-perf bw --size lots").unwrap_err();
        assert!(error.contains("write bytes as 64, 4K, 1M or 1G"), "{error}");
        let error = parse("siw-perf bw --size 0")
            .unwrap()
            .to_plan()
            .unwrap_err();
        assert!(error.contains("--size 0"), "{error}");
        let error = parse("siw-perf bw --secs 0").unwrap_err();
        assert!(error.contains("0.01 to 86400"), "{error}");
    }

    #[test]
    fn an_unknown_operation_lists_those_that_exist() {
        let error = parse("siw-perf bw --op atomic").unwrap_err();
        assert!(error.contains("write, read, send"), "{error}");
    }

    #[test]
    fn ends_that_contradict_each_other_are_refused() {
        assert!(parse("siw-perf bw --listen 10.77.0.2 --connect 10.77.0.2").is_err());
        assert!(parse("siw-perf bw --listen 10.77.0.2 --to siw1").is_err());
    }

    #[test]
    fn latency_has_one_message_in_flight() {
        let a = parse("siw-perf lat --depth 4").unwrap();
        assert!(a.to_plan().unwrap_err().contains("one message in flight"));
        let port = parse("siw-perf lat").unwrap().to_plan().unwrap();
        assert_eq!((port.size, port.depth), (64, 1));
    }

    #[test]
    fn addresses_may_leave_the_port_out() {
        let a = parse("siw-perf lat --connect fd77::2").unwrap();
        let to = "[fd77::2]:7175".parse().unwrap();
        assert_eq!(
            a.endpoints().unwrap(),
            PerfEndpoints::Connect { to, from: None }
        );
        let error = parse("siw-perf lat --connect somewhere").unwrap_err();
        assert!(error.contains("10.77.0.2:7175"), "{error}");
    }
}
