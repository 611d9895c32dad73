//! `siw-perf raw` on a pair of rings, a tap and a veth pair: its counters, its changes of frames,
//! and its answers.

use std::io::{BufRead, BufReader, Read};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::raw::Wire;
use crate::common::{PATIENCE, siw_perf};

/// `siw-perf raw` with arguments separated by spaces.
fn raw(arguments: &str) -> Command {
    let mut command = Command::new(siw_perf());
    command.arg("raw").args(arguments.split(' '));
    command
}

/// Runs it to its end; returns the result of each line.
fn run_raw(command: &mut Command) -> Vec<Value> {
    let output = command.output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {complaint}");
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// A `siw-perf raw` that runs until it is stopped.
struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    /// Starts it in a namespace and waits until its ports are open.
    fn start(ns: &Netns, arguments: &str) -> Running {
        let mut command = raw(arguments);
        let mut child = ns.run(|| command.stdout(Stdio::piped()).spawn().unwrap());
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("rx M/s") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "it ended early");
        }
        Running { child, output }
    }

    /// Stops it; returns its output since the start.
    fn stop(mut self) -> String {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM).unwrap();
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        assert!(crate::common::wait(&mut self.child).success(), "{text}");
        text
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn count(result: &Value, port: usize, key: &str) -> u64 {
    let pointer = format!("/ports/{port}/{key}");
    result.pointer(&pointer).unwrap().as_u64().unwrap()
}

/// Frames that the kernel received on an interface, including those dropped for lack of room.
fn kernel_frames(ns: &Netns, interface: &str) -> u64 {
    let text = ns.ip(&format!("-s -j link show {interface}"));
    let links: Value = serde_json::from_str(&text).unwrap();
    let rx = &links[0]["stats64"]["rx"];
    rx["packets"].as_u64().unwrap() + rx["dropped"].as_u64().unwrap()
}

#[test]
fn on_a_pair_of_rings_all_that_is_sent_is_received() {
    let arguments = "--mode txonly --size 64,1514 --payload copy,reference --secs 0.2 \
                     --interval 0.02 --json";
    let results = run_raw(&mut raw(arguments));
    let ways: Vec<&str> = results
        .iter()
        .map(|result| result["payload"].as_str().unwrap())
        .collect();
    assert_eq!(ways, ["copy", "reference", "copy", "reference"]);
    for result in &results {
        let sent = count(result, 0, "tx/frames");
        assert!(sent > 0, "{result}");
        assert_eq!(count(result, 1, "rx/frames"), sent, "{result}");
        let bytes = sent * result["size"].as_u64().unwrap();
        assert_eq!(count(result, 1, "rx/bytes"), bytes, "{result}");
        let intervals = result["series"].as_array().unwrap();
        assert!(intervals.len() >= 2, "{result}");
        let sum: u64 = intervals
            .iter()
            .map(|ports| ports[0][1]["frames"].as_u64().unwrap())
            .sum();
        assert_eq!(sum, sent, "{result}");
    }
}

#[test]
fn frames_circulate_between_rings_and_none_is_lost() {
    for mode in ["io", "macswap"] {
        let results = run_raw(&mut raw(&format!(
            "--mode {mode} --secs 0.05 --tx-first 2 --payload copy --json"
        )));
        let result = &results[0];
        // Two bursts of 32 in each direction, repeatedly.
        assert!(count(result, 0, "rx/frames") > 64, "{result}");
        for port in [0, 1] {
            let (received, sent) = (
                count(result, port, "rx/frames"),
                count(result, port, "tx/frames"),
            );
            assert!(sent.abs_diff(received) <= 64, "{result}");
            assert_eq!(count(result, port, "tx/dropped"), 0, "{result}");
        }
    }
    let results = run_raw(&mut raw("--mode pingpong --secs 0.05 --json"));
    for result in &results {
        assert_eq!(result["lost"], 0, "{result}");
        assert!(result["round_trip_us"]["p50"].as_f64().unwrap() > 0.0);
    }
    let results = run_raw(&mut raw("--mode rxonly --secs 0.05 --json"));
    assert_eq!(
        count(&results[0], 0, "rx/frames"),
        count(&results[0], 1, "tx/frames")
    );
}

#[test]
fn linux_gets_answers_to_its_echo_requests_over_a_tap() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let echo = Running::start(
        &ns,
        "--mode icmpecho --port net_tap0,iface=rawtap0 --address 10.78.0.1/24",
    );
    ns.address("rawtap0", "10.78.0.2/24");
    ns.ip("link set rawtap0 up");
    ns.wait_ping("10.78.0.1".parse().unwrap());
    let wait = Duration::from_secs(5);
    for data in [0, 56, 1400] {
        assert!(ns.ping("10.78.0.1".parse().unwrap(), data, wait), "{data}");
    }
    let stranger = "10.78.0.3".parse().unwrap();
    assert!(!ns.ping(stranger, 56, Duration::from_millis(50)));
    let text = echo.stop();
    assert!(text.contains("raw0:"), "{text}");
}

#[test]
fn what_is_sent_into_a_tap_arrives_in_linux() {
    skip_if!(lacks_network());
    let ns = Netns::new();
    let sender = Running::start(
        &ns,
        "--mode txonly --port net_tap0,iface=rawtap0 --payload reference --secs 60",
    );
    let end = Instant::now() + PATIENCE;
    while kernel_frames(&ns, "rawtap0") < 1000 {
        assert!(Instant::now() < end, "no frames");
    }
    let text = sender.stop();
    let total = text.lines().rfind(|line| line.contains("sent in"));
    let words: Vec<&str> = total.unwrap().split_whitespace().collect();
    let sent = words.iter().position(|word| *word == "sent").unwrap();
    assert!(words[sent - 1].parse::<u64>().unwrap() >= 1000, "{text}");
}

#[test]
fn over_veth_frames_are_counted_returned_and_swapped() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let ns = Netns::new();
    ns.veth(1500);
    let before = kernel_frames(&ns, "veth1");
    let mut sender = raw(
        "--mode txonly --port net_af_packet0,iface=veth0 --payload copy --size 60 --secs 0.1 --json",
    );
    let results = ns.run(|| run_raw(&mut sender));
    let sent = count(&results[0], 0, "tx/frames");
    assert!(sent > 0, "{results:?}");
    assert_eq!(kernel_frames(&ns, "veth1") - before, sent, "{results:?}");

    let mut both = raw(
        "--mode pingpong --port net_af_packet0,iface=veth0 --port net_af_packet1,iface=veth1 --secs 0.1 --json",
    );
    for result in ns.run(|| run_raw(&mut both)) {
        assert_eq!(result["lost"], 0, "{result}");
    }

    let swap = Running::start(&ns, "--mode macswap --port net_af_packet0,iface=veth0");
    let address = Ipv4Addr::new(10, 0, 0, 9);
    let wire = Wire::open(&ns, "veth1", address);
    let (to, from) = ([2, 0, 0, 0, 0, 7], [0x02, 0xee, 10, 0, 0, 9]);
    let mut frame = [to, from].concat();
    frame.extend([0x88, 0xb5]);
    frame.extend((0..100).map(|index| index as u8));
    wire.send(&frame);
    let answer = wire.recv(Instant::now() + PATIENCE).expect("an answer");
    assert_eq!((&answer[..6], &answer[6..12]), (&from[..], &to[..]));
    assert_eq!(answer[12..], frame[12..]);
    let text = swap.stop();
    assert!(text.contains("sent in"), "{text}");
}
