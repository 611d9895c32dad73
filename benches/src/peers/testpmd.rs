//! Frames over rings, without TCP: `siw-perf raw` and DPDK's testpmd on the same kind of port. Both
//! swap the Ethernet addresses of circulating frames on one core.

use super::PeerFigure::RingMframes;
use super::contenders::Contender;
use super::run_program::run_to_end;
use crate::own_daemon::sibling_program;
use crate::running_program::RunningProgram;
use anyhow::anyhow;
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// Burst size of both programs.
const BURST: &str = "32";
/// Memory for testpmd in MiB.
const MEMORY_MB: u32 = 128;
/// Interval of the rates that testpmd prints.
const RATE_INTERVAL: Duration = Duration::from_secs(1);

/// Both contenders.
pub(super) fn contenders(cores: [usize; 2], time: Duration) -> [Contender; 2] {
    [own_frames(cores, time), testpmd_frames(cores, time)]
}

fn own_frames([_, core]: [usize; 2], time: Duration) -> Contender {
    let measure = move || {
        let mut command = Command::new(sibling_program("siw-perf"));
        command
            .args(["raw", "--mode", "macswap", "--size", "64", "--burst", BURST])
            .args(["--payload", "copy", "--json", "--core", &core.to_string()])
            .args(["--secs", &time.as_secs_f64().to_string()]);
        let text = run_to_end(&mut command)?;
        let result: serde_json::Value = serde_json::from_str(text.trim())
            .map_err(|error| anyhow!("siw-perf raw printed no result: {error}"))?;
        let ports = result["ports"].as_array().cloned().unwrap_or_default();
        let rates = ports
            .iter()
            .filter_map(|port| port["rx"]["mframes"].as_f64());
        Ok(vec![(RingMframes, rates.sum())])
    };
    Contender {
        name: "siw-perf raw, macswap on rings".into(),
        differs: "one core".into(),
        needs: vec![],
        measure: Box::new(measure),
    }
}

fn testpmd_frames([first, core]: [usize; 2], time: Duration) -> Contender {
    let measure = move || {
        let mut command = Command::new("dpdk-testpmd");
        // Its first core prints, the second one forwards.
        command
            .args(["-l", &format!("{first},{core}")])
            .args(["--main-lcore", &first.to_string()])
            .args(["--no-pci", "--no-telemetry", "-m", &MEMORY_MB.to_string()])
            .arg(match has_hugepages() {
                true => "--in-memory",
                false => "--no-huge",
            })
            .args(["--vdev", "net_ring0", "--vdev", "net_ring1", "--"])
            .args(["--forward-mode=macswap", "--tx-first", "--stats-period=1"])
            .args([&format!("--burst={BURST}"), "--total-num-mbufs=8192"]);
        let mut testpmd = RunningProgram::start_piped(&mut command, Stdio::null())?;
        sleep(time.max(2 * RATE_INTERVAL) + RATE_INTERVAL);
        testpmd.stop();
        let mut text = String::new();
        if let Some(mut stdout) = testpmd.child().stdout.take() {
            stdout
                .read_to_string(&mut text)
                .map_err(|error| anyhow!("dpdk-testpmd: {error}"))?;
        }
        Ok(vec![(RingMframes, rx_mframes(&text)?)])
    };
    Contender {
        name: "testpmd, macswap on rings".into(),
        differs: "one core, and one that prints".into(),
        needs: vec![("dpdk-testpmd", "dpdk-dev")],
        measure: Box::new(measure),
    }
}

fn has_hugepages() -> bool {
    let free = |size: &dpdk::HugepageSize| size.free * size.page_kb;
    let free_kb: u64 = dpdk::hugepage_sizes().iter().map(free).sum();
    free_kb >= u64::from(MEMORY_MB) * 1024
}

/// Sum of the two ports' last rates.
fn rx_mframes(text: &str) -> anyhow::Result<f64> {
    let rates: Vec<f64> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Rx-pps:"))
        .filter_map(|rest| rest.split_whitespace().next()?.parse().ok())
        .collect();
    match rates[..] {
        // The first two rates include the start-up.
        [_, _, .., first, second] => Ok((first + second) / 1e6),
        _ => Err(anyhow!("dpdk-testpmd printed no rates")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rates_of_both_ports_count() {
        let of = |rate: u32| format!("  Rx-pps:     {rate}          Rx-bps:            0\n");
        let text = [1, 2, 3_000_000, 4_500_000].map(of).concat();
        assert_eq!(rx_mframes(&text).unwrap(), 7.5);
        assert!(rx_mframes(&of(1)).is_err());
        assert!(rx_mframes("EAL: Cannot init memory").is_err());
    }
}
