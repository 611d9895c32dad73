//! The counters of a running daemon as shown to users: `siwctl stat`, over its DPDK ring pair.

use super::siwctl::shown;
use crate::common::{Daemon, client_program, pair, ping};
use serde_json::Value;
use siw::{RecvWr, SendData, SendWr};
use std::process::{Command, Stdio};

fn stat(d: &Daemon, args: &[&str]) -> (bool, String, String) {
    let out = Command::new(client_program("siwctl"))
        .arg("stat")
        .arg("--socket")
        .arg(&d.socket)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    (out.status.success(), text(&out.stdout), text(&out.stderr))
}

/// Connects from siw0 to siw1 and exchanges some data: at least five segments each way.
fn traffic(daemon: &Daemon) {
    let (a, b) = crate::common::pair(daemon, 4096);
    for _ in 0..5 {
        crate::common::ping(&a, &b);
        crate::common::ping(&b, &a);
    }
}

#[test]
fn counters_have_the_names_of_tcp_mib_merged_and_for_each_worker() {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if processors > 1 { "[0, 1]" } else { "[0]" };
    let pair = crate::common::LOOPBACK.split_once("[[device]]").unwrap().1;
    let head = format!("[workers]\ncores = {cores}\nidle = \"adaptive\"\n");
    let pool = "[dpdk]\nhugepages = \"never\"\nbuffers = 16384\n";
    let daemon = Daemon::start(&format!("{head}{pool}[[device]]{pair}"), &[]);
    traffic(&daemon);
    let (ok, out, err) = stat(&daemon, &["--json"]);
    assert!(ok, "{err}");
    let v: Value = serde_json::from_str(&out).unwrap();
    let devices = v["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    for device in devices {
        let (merged, workers) = (&device["merged"], device["workers"].as_array().unwrap());
        assert_eq!(workers.len(), processors.min(2));
        for (name, n) in merged.as_object().unwrap() {
            let sum: u64 = workers.iter().map(|w| w[name].as_u64().unwrap()).sum();
            assert_eq!(n.as_u64(), Some(sum), "{name}");
        }
        // RFC 4022, and Linux's names.
        for name in [
            "TcpActiveOpens",
            "TcpPassiveOpens",
            "TcpAttemptFails",
            "TcpEstabResets",
            "TcpCurrEstab",
            "TcpInSegs",
            "TcpOutSegs",
            "TcpRetransSegs",
            "TcpInErrs",
            "TcpOutRsts",
            "TcpExtTCPTimeouts",
            "TcpExtTCPLostRetransmit",
            "TcpExtTCPFastRetrans",
            "TcpExtTCPSackRecovery",
            "TcpExtTCPLossProbes",
            "TcpExtTCPOFOQueue",
            "TcpExtTCPDSACKRecv",
            "TcpExtPAWSEstab",
            "TcpExtListenOverflows",
            "TcpExtSyncookiesSent",
            "IpInAddrErrors",
            "IcmpInMsgs",
            "ArpIn",
        ] {
            assert!(merged[name].is_u64(), "{name}");
        }
        assert!(merged["TcpInSegs"].as_u64() > Some(4) && merged["rx_frames"].as_u64() > Some(4));
    }
    assert!(devices[0]["merged"]["TcpActiveOpens"].as_u64() > Some(0));
    assert!(devices[1]["merged"]["TcpPassiveOpens"].as_u64() > Some(0));
    assert!(v["merged"]["iterations"].as_u64() > Some(0));
}

#[test]
fn what_passes_through_the_queues_of_applications_is_counted() {
    let daemon = Daemon::loopback();
    let (a, b) = crate::common::pair(&daemon, 4096);
    let names = [
        "request_slots",
        "request_batches",
        "doorbells",
        "completions",
    ];
    let before = names.map(|name| a.count_of_workers(name));
    for number in 0..10 {
        let sges = &[b.mr.sge(0, 64)];
        let wr_id = number;
        b.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
        let sge = [a.mr.sge(0, 64)];
        let send = SendWr::send(number, SendData::Sges(&sge));
        a.qp.post_send(&[send]).unwrap();
        a.wc();
        b.wc();
    }
    let after = names.map(|name| a.count_of_workers(name));
    let [slots, batches, doorbells, completions] = std::array::from_fn(|n| after[n] - before[n]);
    // One slot for each Send and each receive, which the worker takes one by one.
    assert_eq!((slots, batches, completions), (20, 20, 20));
    assert!((1..=10).contains(&doorbells), "{doorbells}");
}

#[test]
fn a_table_shows_what_is_not_zero_and_a_wrong_device_is_named() {
    let daemon = Daemon::loopback();
    traffic(&daemon);
    let (ok, out, err) = stat(&daemon, &["--device", "siw0"]);
    assert!(ok, "{err}");
    assert!(out.contains("merged") && out.contains("worker 0"), "{out}");
    assert!(out.contains("TcpActiveOpens"), "{out}");
    assert!(
        !out.contains("TcpPassiveOpens") && !out.contains("siw1"),
        "{out}"
    );
    let (_, all, _) = stat(&daemon, &["--device", "siw0", "--all", "--only", "passive"]);
    assert!(
        all.contains("TcpPassiveOpens") && !all.contains("TcpActiveOpens"),
        "{all}"
    );
    let (ok, _, err) = stat(&daemon, &["--device", "eth0"]);
    assert!(
        !ok && err.contains("eth0") && err.contains("siw0, siw1"),
        "{err}"
    );
}

/// Messages are counted once whatever the number of their FPDUs, and READs by their responses.
#[test]
fn messages_and_round_trips_are_counted_by_size() {
    let daemon = Daemon::loopback();
    let len = 100_000;
    let (a, b) = pair(&daemon, len);
    for _ in 0..5 {
        ping(&a, &b);
    }
    let whole = [a.mr.sge(0, len)];
    let part = [a.mr.sge(0, 1000)];
    for request in [
        SendWr::write(1, SendData::Sges(&whole), b.mr.addr(), b.mr.rkey()),
        SendWr::read(2, &part, b.mr.addr(), b.mr.rkey()),
        SendWr::write_with_imm(3, SendData::Sges(&whole), b.mr.addr(), b.mr.rkey(), 7),
    ] {
        if request.wr_id == 3 {
            b.qp.post_recv(&[RecvWr {
                wr_id: 4,
                sges: &[],
            }])
            .unwrap();
        }
        a.qp.post_send(&[request]).unwrap();
        assert_eq!(a.wc().status, siw::WcStatus::SUCCESS);
    }
    let metrics = shown(&daemon, &["metrics"]);
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{name}: {metrics}"))
            .trim()
            .parse()
            .unwrap()
    };
    let messages = |suffix: &str, le: &str| {
        value(&format!(
            "siwd_worker_message_bytes_{suffix}{{{le}worker=\"0\"}}"
        ))
    };
    for (le, count) in [
        ("512", 0.0),
        ("1024", 1.0),
        ("2048", 1.0),
        ("4096", 6.0),
        ("65536", 6.0),
    ] {
        assert_eq!(
            messages("bucket", &format!("le=\"{le}.0\",")),
            count,
            "{le}"
        );
    }
    assert_eq!(messages("bucket", "le=\"131072.0\","), 8.0);
    assert_eq!(messages("bucket", "le=\"+Inf\","), 8.0);
    assert_eq!(messages("count", ""), 8.0);
    let sum = (5 * 4096 + 1000 + 2 * len) as f64;
    assert_eq!(messages("sum", ""), sum);
    // Each burst with acknowledgements has one sample. The sum is between the bounds of the buckets.
    let round_trips = "siwd_worker_round_trip_seconds";
    let count = value(&format!("{round_trips}_count{{worker=\"0\"}}"));
    let sum = value(&format!("{round_trips}_sum{{worker=\"0\"}}"));
    assert!(count >= 3.0, "{count}");
    let buckets = metrics.lines().filter_map(|line| {
        let rest = line.strip_prefix(&format!("{round_trips}_bucket{{le=\""))?;
        let (le, rest) = rest.split_once('"')?;
        let le = if le == "+Inf" {
            3600.0
        } else {
            le.parse::<f64>().ok()?
        };
        Some((le, rest.rsplit(' ').next()?.parse::<f64>().ok()?))
    });
    let (mut least, mut most, mut before) = (0.0, 0.0, (0.0, 0.0));
    for (le, cumulative) in buckets {
        let here = cumulative - before.1;
        assert!(here >= 0.0, "{metrics}");
        least += here * before.0;
        most += here * le;
        before = (le, cumulative);
    }
    assert_eq!(before.1, count);
    assert!(least <= sum && sum <= most, "{least} <= {sum} <= {most}");
}
