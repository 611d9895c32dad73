//! Retransmissions of a queue pair over a link that loses known frames: every interface of siwd shows
//! the same numbers.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use siw::{SendData, SendWr, WcStatus};

use crate::common::impaired_link::{ImpairedLink, Impairment};
use crate::common::net::{lacks_network, missing_program};
use crate::common::{Daemon, End, client_program, connect};

const CONFIG: &str = r#"
[workers]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = 8192
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=veth0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24"]
[[device]]
name = "siw1"
devargs = "net_af_packet1,iface=veth3"
mac = "02:00:00:77:00:03"
addresses = ["10.77.0.3/24"]
"#;

/// Bytes of a transfer.
const LEN: usize = 64 << 10;

fn siwctl(daemon: &Daemon, args: &[&str]) -> String {
    let out = Command::new(client_program("siwctl"))
        .args(args)
        .arg("--socket")
        .arg(&daemon.socket)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{args:?}: {error}");
    String::from_utf8(out.stdout).unwrap()
}

fn json(daemon: &Daemon, args: &[&str]) -> Value {
    serde_json::from_str(&siwctl(daemon, &[args, &["--json"]].concat())).unwrap()
}

fn transfer(a: &End, b: &End) {
    a.fill(7);
    let sge = [a.mr.sge(0, LEN)];
    let write = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[write]).unwrap();
    // All of it is acknowledged.
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
}

#[test]
fn losses_show_with_one_number_in_connections_counters_and_metrics() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let how = Impairment {
        delay: Duration::from_millis(1),
        ..Impairment::default()
    };
    let link = ImpairedLink::new(1500, how);
    let daemon = link.ns.siwd(CONFIG, &[]);
    let ends = [(); 2].map(|()| End::new(&daemon.context(), LEN));
    let [a, b] = &ends;
    connect(a, b, "siw0", "10.77.0.3:0".parse().unwrap());
    transfer(a, b);
    let row_of_sender = || {
        let rows = json(&daemon, &["show", "conn"]);
        let mut rows = rows.as_array().unwrap().iter();
        let row = rows.find(|row| row["lqpn"] == a.qp.qp_num()).unwrap();
        row["tcp"].clone()
    };
    let before = row_of_sender()["retrans"].as_u64().unwrap();
    let lost_before = link.counts.lost();
    link.lose_long_frames(3);
    transfer(a, b);
    assert_eq!(link.counts.lost() - lost_before, 3);
    let tcp = row_of_sender();
    let count = |key: &str| tcp[key].as_u64().unwrap();
    println!("{tcp}");
    assert!(count("retrans") - before >= 3, "{tcp}");
    assert_eq!(count("retrans_out"), 0, "{tcp}");
    let causes = ["retrans_rto", "retrans_fast", "retrans_tlp", "retrans_syn"];
    let sum: u64 = causes.into_iter().map(count).sum();
    assert_eq!(sum, count("retrans"), "{tcp}");

    let stats = json(&daemon, &["stat"]);
    let mut devices = stats["devices"].as_array().unwrap().iter();
    let device = devices.find(|row| row["device"] == "siw0").unwrap();
    let metrics = siwctl(&daemon, &["metrics", "--text"]);
    for (key, counter, metric) in [
        ("retrans", "TcpRetransSegs", "tcp_retrans_segs"),
        (
            "retrans_rto",
            "TcpExtTCPSlowStartRetrans",
            "tcp_ext_tcp_slow_start_retrans",
        ),
        (
            "retrans_fast",
            "TcpExtTCPFastRetrans",
            "tcp_ext_tcp_fast_retrans",
        ),
        ("retrans_tlp", "SiwTailRetrans", "siw_tail_retrans"),
        (
            "retrans_syn",
            "TcpExtTCPSynRetrans",
            "tcp_ext_tcp_syn_retrans",
        ),
        (
            "window_probes",
            "TcpExtTCPWinProbe",
            "tcp_ext_tcp_win_probe",
        ),
    ] {
        assert_eq!(device["merged"][counter], tcp[key], "{counter}");
        let name = format!("siwd_{metric}_total{{device=\"siw0\"}} ");
        let sample = metrics.lines().find_map(|line| line.strip_prefix(&name));
        let value: f64 = sample
            .unwrap_or_else(|| panic!("no {name}"))
            .parse()
            .unwrap();
        assert_eq!(value, count(key) as f64, "{name}");
    }
    let words = format!("retrans:0/{} ", count("retrans"));
    let text = siwctl(
        &daemon,
        &["show", "conn", "--lqpn", &a.qp.qp_num().to_string()],
    );
    assert!(text.contains(&words), "{text}");
}
