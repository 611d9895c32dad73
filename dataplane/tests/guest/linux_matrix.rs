//! All operations that siwd and the Linux kernel's iWARP (siw) have in common, between the two, in
//! every boundary size: transfers are checked byte for byte at both ends, captures are checked with
//! tshark.

use std::path::{Path, PathBuf};

use crate::common::guest::{Evidence, Guest, NEWER_SUITE, lacks_guest, lacks_newer_guest};
use crate::common::matrix::{BURST, INBOXES, Loss, Outcome, Plan, Role, play};
use crate::common::net::{Netns, judge, missing_program, tshark_fields};
use crate::common::*;
use siw::{Wc, WcOpcode, WcStatus};

const V4: (&str, &str) = ("10.77.0.1", "10.77.0.2");
const V6: (&str, &str) = ("fd77::1", "fd77::2");

const MAC: &str = "02:00:00:77:00:01";
const MIB: usize = 1 << 20;

/// 1 % of the frames of each direction.
const LOSS: &str = "tc qdisc add dev eth0 root netem loss 1% && tc qdisc add dev eth0 ingress && \
    tc filter add dev eth0 ingress matchall action gact pass random netrand drop 100";

fn lacks() -> Option<String> {
    lacks_guest().or_else(|| missing_program("tshark"))
}

fn config(mtu: usize) -> String {
    format!(
        r#"
[dpdk]
hugepages = "never"
buffers = 8192
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=lab0"
mac = "{MAC}"
addresses = ["10.77.0.1/24", "fd77::1/64"]
mtu = {mtu}
# The guest may pause for a while.
[device.mpa]
request_timeout_ms = 60000
reply_timeout_ms = 60000
wake_silent_peer_ms = 50
"#
    )
}

/// Resources shared by the tests of a guest.
struct Lab {
    guest: Guest,
    ns: Netns,
    mtu: usize,
    port: u16,
}

impl Lab {
    fn new(mtu: usize) -> Lab {
        Lab::with(mtu, &[])
    }

    /// Boots a guest with further arguments.
    fn with(mtu: usize, more: &[&str]) -> Lab {
        let ns = Netns::new();
        let width = mtu.to_string();
        let mut args = vec!["--ip", "10.77.0.2/24", "--ip6", "fd77::2/64"];
        args.extend(["--mtu", &width]);
        args.extend(more);
        Lab {
            guest: Guest::boot(&ns, &args),
            ns,
            mtu,
            port: 7200,
        }
    }

    fn siwd(&self) -> (Daemon, PathBuf, Evidence) {
        self.siwd_with("")
    }

    /// Starts siwd with additional lines in `[device.mpa]`.
    fn siwd_with(&self, more: &str) -> (Daemon, PathBuf, Evidence) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("siw.pcapng");
        let args = ["--capture", file.to_str().unwrap()];
        let config = config(self.mtu) + more;
        (self.ns.siwd(&config, &args), file, Evidence(dir))
    }

    fn play(&self, siwd: &Daemon, plan: &Plan) -> Outcome {
        play(siwd, &self.guest, plan, None)
    }

    fn plan(&mut self, role: Role, (us, them): (&str, &str), length: usize) -> Plan {
        self.port += 1;
        Plan {
            role,
            us: us.parse().unwrap(),
            them: them.parse().unwrap(),
            port: self.port,
            crc: true,
            length,
            depth: (16, 16),
            guest_depth: (16, 16),
            ops: Vec::new(),
        }
    }
}

/// TCP payload of a full frame with timestamps, which both sides use.
fn segment(mtu: usize, us: &str) -> usize {
    mtu - if us.contains(':') { 40 } else { 20 } - 20 - 12
}

/// All operations of both sides with all sizes; each boundary size comes with its neighbours.
/// Zero-length READs from siw are left out: if the response has to wait for siw's send queue, siw
/// sends as many bytes as the request before had, and siwd refuses that response
/// (deploy/lab/linux-siw/README.md has the frames).
fn ops(segment: usize, large: &[usize]) -> Vec<String> {
    let ulpdu = segment - 6 - segment % 4;
    let mut sizes = vec![0, 1, 4, 63, 64, 65];
    for edge in [segment, ulpdu - 14, ulpdu - 18] {
        sizes.extend(edge - 1..=edge + 1);
    }
    sizes.extend(large);
    sizes.sort_unstable();
    sizes.dedup();
    let all = sizes.iter();
    all.flat_map(|size| "wrsiWRSI".chars().map(move |op| format!("{op}{size}")))
        .filter(|op| op != "R0")
        .collect()
}

/// Runs all operations and sizes, each side in each role, CRC on and off, over IPv4 and IPv6.
fn all_sizes(mut lab: Lab) {
    let mtu = lab.mtu;
    let (siwd, file, _dir) = lab.siwd();
    for role in [Role::Initiator, Role::Responder] {
        for family in [V4, V6] {
            for crc in [true, false] {
                let mut plan = lab.plan(role, family, MIB);
                plan.crc = crc;
                let large: &[usize] = if crc { &[65_536, MIB] } else { &[65_536] };
                plan.ops = ops(segment(mtu, family.0), large);
                assert_eq!(lab.play(&siwd, &plan).info.crc, crc);
            }
        }
    }
    assert!(siwd.stop().success());
    // Each of the four connections with CRC moves at least eight times the large sizes.
    let least = 4 * 8 * (MIB + 65_536) / mtu;
    assert!(judge(&file).good_crcs > least);
}

#[test]
fn every_operation_moves_every_size_in_ethernet_frames() {
    skip_if!(lacks());
    all_sizes(Lab::new(1500));
}

#[test]
fn every_operation_moves_every_size_with_a_newer_kernel() {
    skip_if!(lacks_newer_guest().or_else(|| missing_program("tshark")));
    all_sizes(Lab::with(1500, &["--suite", NEWER_SUITE]));
}

#[test]
fn every_operation_moves_every_size_in_jumbo_frames() {
    skip_if!(lacks());
    all_sizes(Lab::new(9000));
}

#[test]
fn messages_of_64_mib_arrive_whole_by_every_operation_of_either_side() {
    skip_if!(lacks());
    let mut lab = Lab::new(9000);
    // SEND_WITH_INV follows a WRITE of the same size.
    for (role, ops) in [
        (Role::Initiator, ["i67108864", "R67108864"]),
        (Role::Responder, ["I67108864", "r67108864"]),
    ] {
        let (siwd, file, _dir) = lab.siwd();
        let mut plan = lab.plan(role, V4, 64 * MIB);
        plan.ops = ops.map(String::from).into();
        lab.play(&siwd, &plan);
        assert!(siwd.stop().success());
        assert!(judge(&file).good_crcs > 3 * 64 * MIB / 9000);
    }
}

#[test]
fn everything_arrives_once_over_a_link_that_loses_packets() {
    skip_if!(lacks());
    let mut lab = Lab::new(1500);
    lab.guest.run(LOSS);
    let (siwd, file, _dir) = lab.siwd();
    for role in [Role::Initiator, Role::Responder] {
        for (family, crc) in [(V4, true), (V6, false)] {
            let mut plan = lab.plan(role, family, MIB);
            plan.crc = crc;
            plan.ops = ops(segment(1500, family.0), &[65_536, MIB]);
            lab.play(&siwd, &plan);
        }
    }
    // By the counters of either side: tshark cannot tell from the times whether packets that the
    // guest lost before the capture were lost or reordered.
    let ours = siwd.tcp_counter("retrans_segs");
    let theirs = lab.guest.counter("Tcp", "RetransSegs");
    assert!(siwd.stop().success());
    judge(&file);
    assert!(ours > 10 && theirs > 10, "retransmitted: {ours}, {theirs}");
}

#[test]
fn no_side_has_more_reads_outstanding_than_was_agreed() {
    skip_if!(lacks());
    let mut lab = Lab::new(1500);
    // ORD and IRD requested by each side, and those agreed on this side. siw raises its IRD to an
    // initiator's ORD, and its ORD to a responder's IRD.
    for (role, depth, guest_depth, agreed) in [
        (Role::Initiator, (2, 4), (16, 16), (2, 4)),
        (Role::Initiator, (16, 16), (2, 4), (16, 2)),
        (Role::Initiator, (1, 1), (1, 1), (1, 1)),
        (Role::Initiator, (4, 0), (0, 4), (4, 0)),
        (Role::Responder, (2, 4), (16, 16), (2, 4)),
        (Role::Responder, (16, 16), (2, 4), (4, 16)),
        (Role::Responder, (1, 1), (1, 1), (1, 1)),
        (Role::Responder, (4, 0), (0, 4), (4, 0)),
    ] {
        let (siwd, file, _dir) = lab.siwd();
        let mut plan = lab.plan(role, V4, MIB);
        (plan.depth, plan.guest_depth) = (depth, guest_depth);
        plan.ops = vec!["Q4096".into()];
        if agreed.1 > 0 {
            plan.ops.push("q4096".into());
        }
        let outcome = lab.play(&siwd, &plan);
        assert!(siwd.stop().success());
        judge(&file);
        assert_eq!(outcome.info.ord, agreed.0, "{plan:?}");
        assert!(outcome.info.ird >= agreed.1, "{plan:?}");
        let (ours, theirs) = most_reads(&file);
        assert!(theirs <= agreed.1 as usize, "{theirs}, {plan:?}");
        assert!(ours <= agreed.0 as usize, "{ours}, {plan:?}");
    }
}

/// Maximum of outstanding READs, of this side and of the other.
fn most_reads(file: &Path) -> (usize, usize) {
    let fields = ["eth.src", "iwarp_rdma.opcode", "iwarp_ddp.last_flag"];
    let (mut now, mut most) = ([0usize; 2], [0usize; 2]);
    for row in tshark_fields(file, "iwarp_ddp_rdmap", &fields) {
        let side = usize::from(row[0] != MAC);
        for (opcode, last) in row[1].split(',').zip(row[2].split(',')) {
            match opcode {
                "0x01" => {
                    now[side] += 1;
                    most[side] = most[side].max(now[side]);
                }
                "0x02" if last == "1" => now[1 - side] -= 1,
                _ => {}
            }
        }
    }
    assert_eq!(now, [0, 0], "READs without a response");
    (most[0], most[1])
}

#[test]
fn an_invalidated_key_is_refused_by_both_sides() {
    skip_if!(lacks());
    let mut lab = Lab::new(1500);
    // siw swaps layer and type in its Terminate, and expects the same.
    let (siwd, file, _dir) = lab.siwd_with("preset = \"siw\"\n");
    for role in [Role::Initiator, Role::Responder] {
        let mut plan = lab.plan(role, V4, 4096);
        plan.ops = vec!["i64".into(), "I64".into(), "k64".into()];
        let out = lab.play(&siwd, &plan).out;
        assert!(out.contains("refused: "), "{out}");
        let mut plan = lab.plan(role, V4, 4096);
        plan.ops = vec!["i64".into(), "I64".into(), "K64".into()];
        let last = lab.play(&siwd, &plan).last;
        let read = last.iter().find(|wc| wc.opcode == WcOpcode::RDMA_READ);
        assert_eq!(read.unwrap().status, WcStatus::REM_ACCESS_ERR, "{last:?}");
    }
    assert!(siwd.stop().success());
    judge(&file);
}

#[test]
fn everything_outstanding_completes_once_when_a_connection_is_lost_in_the_middle() {
    skip_if!(lacks());
    let mut lab = Lab::new(1500);
    let (siwd, file, _dir) = lab.siwd();
    for role in [Role::Initiator, Role::Responder] {
        // This side resets the connection while the guest's requests are in progress.
        let mut plan = lab.plan(role, V4, 2 * MIB);
        plan.ops = vec![format!("b{MIB}")];
        let out = lab.play(&siwd, &plan).out;
        let lost = out.lines().find_map(|l| l.strip_prefix("lost ")).unwrap();
        let counts: Vec<u64> = lost.split(' ').map(|n| n.parse().unwrap()).collect();
        assert_eq!(counts.iter().sum::<u64>(), BURST + INBOXES as u64);
        assert!(counts[1] > INBOXES as u64, "{out}");

        // The guest's kernel resets the connection, or the guest's program is killed, while this
        // side's requests are in progress.
        for loss in [Loss::Command("ss -K dst 10.77.0.1"), Loss::Kill] {
            let mut plan = lab.plan(role, V4, 2 * MIB);
            plan.ops = vec![format!("B{MIB}")];
            let is_killed = matches!(loss, Loss::Kill);
            let last = play(&siwd, &lab.guest, &plan, Some(loss)).last;
            let (receives, sends): (Vec<Wc>, Vec<Wc>) =
                last.iter().partition(|wc| wc.opcode == WcOpcode::RECV);
            assert_eq!((receives.len(), sends.len()), (INBOXES, BURST as usize));
            let good = |wc: &Wc| wc.status == WcStatus::SUCCESS;
            assert_eq!(receives.iter().filter(|wc| good(wc)).count(), 0);
            let (done, failed) = sends.split_at(sends.iter().take_while(|wc| good(wc)).count());
            assert!(!done.is_empty() && !failed.is_empty(), "{last:?}");
            // The memory of a killed program may be freed before its connection ends: a request for
            // that memory is then refused by a Terminate.
            let flushed = |wc: &Wc| wc.status == WcStatus::WR_FLUSH_ERR;
            let refused = is_killed && failed[0].status == WcStatus::REM_ACCESS_ERR;
            let others = &failed[usize::from(refused)..];
            assert!(others.iter().all(flushed), "{last:?}");
        }
        // Other connections still work.
        let mut plan = lab.plan(role, V4, 4096);
        plan.ops = ops(1448, &[]);
        lab.play(&siwd, &plan);
    }
    assert!(siwd.stop().success());
    judge(&file);
    let resets = tshark_fields(&file, "tcp.flags.reset == 1", &["eth.src", "tcp.stream"]);
    for ours in [true, false] {
        let mut streams: Vec<&String> = resets
            .iter()
            .filter(|r| (r[0] == MAC) == ours)
            .map(|r| &r[1])
            .collect();
        streams.dedup();
        assert!(streams.len() >= 2, "{resets:?}");
    }
}
