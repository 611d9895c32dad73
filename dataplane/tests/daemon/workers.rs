//! Several workers on one device: connections live on all of them, regardless of the queue that
//! receives a frame.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Instant;

use crate::common::net::{Netns, lacks_network};
use crate::common::*;
use siw::{
    CmChannel, CmEvent, CmListener, ConnectOptions, Context, Cq, Mr, Pd, Qp, QpInit, SendData,
    SendWr, Wc, WcStatus,
};
use siwd::resume_latency;

/// Two workers, on the cores that every test machine has.
const TWO: &str = r#"
[workers]
cores = [0, 1]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = 16384
"#;

/// One end of many connections, which share memory and completion queue.
struct Crowd {
    pd: Pd,
    cq: Cq,
    cm: CmChannel,
    mr: Mr,
    qps: HashMap<u32, Qp>,
}

impl Crowd {
    fn new(ctx: &Context, connections: usize, bytes: usize) -> Crowd {
        let pd = ctx.alloc_pd().unwrap();
        let mr = pd.alloc_mr(connections * bytes, ALL).unwrap();
        Crowd {
            mr,
            cq: Cq::new(ctx, connections as u32 + 16, None).unwrap(),
            cm: CmChannel::new(ctx).unwrap(),
            pd,
            qps: HashMap::new(),
        }
    }

    fn qp(&mut self) -> Qp {
        let init = QpInit {
            max_send_wr: 4,
            max_recv_wr: 4,
            ..QpInit::default()
        };
        let qp = self.pd.create_qp(&self.cq, &self.cq, &init).unwrap();
        self.qps.insert(qp.qp_num(), qp.clone());
        qp
    }
}

/// Makes connections from a device to an address, writes `bytes` over each into a separate area,
/// and compares the target's memory at the end. Returns the number of queue pairs of each worker.
fn crowd(daemon: &Daemon, from: &str, to: &str, connections: usize, bytes: usize) -> Vec<u64> {
    let (ctx, target) = (daemon.context(), daemon.context());
    let mut a = Crowd::new(&ctx, connections, bytes);
    let mut b = Crowd::new(&target, connections, bytes);
    let data = pattern(7, connections * bytes);
    a.mr.write(0, &data).unwrap();
    let any: SocketAddr = SocketAddr::new(to.parse().unwrap(), 0);
    let listener = CmListener::new(&b.cm, None, any, 1024, 0).unwrap();
    let device = Some(ctx.device_by_name(from).unwrap().index);
    let mut begun = 0;
    let mut up = HashMap::new();
    while up.len() < connections {
        // At most some dozens of connects in progress.
        while begun < connections && begun < up.len() + 64 {
            let opt = ConnectOptions {
                device,
                cookie: begun as u64,
                ..ConnectOptions::default()
            };
            let qp = a.qp();
            qp.connect(&a.cm, listener.local_addr(), &opt).unwrap();
            begun += 1;
        }
        match b.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::ConnectRequest(request) => {
                let qp = b.qp();
                request
                    .accept(&qp, None, &ConnectOptions::default())
                    .unwrap();
            }
            CmEvent::Established(_) => match a.cm.get_event(Some(PATIENCE)).unwrap() {
                CmEvent::Established(info) => {
                    up.insert(info.cookie as usize, info.qp_num);
                }
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }
    for (n, qp) in &up {
        let at = n * bytes;
        let sge = [a.mr.sge(at, bytes)];
        let wr = SendWr::write(
            *n as u64,
            SendData::Sges(&sge),
            b.mr.addr() + at as u64,
            b.mr.rkey(),
        );
        a.qps[qp].post_send(&[wr]).unwrap();
    }
    let mut done = vec![false; connections];
    let mut wc = [Wc::default(); 64];
    let mut left = connections;
    while left > 0 {
        let n = a.cq.wait(&mut wc, Some(PATIENCE)).unwrap();
        assert!(n > 0, "{left} of {connections} writes do not complete");
        for w in &wc[..n] {
            assert_eq!(w.status, WcStatus::SUCCESS, "{w:?}");
            assert!(!std::mem::replace(&mut done[w.wr_id as usize], true));
            left -= 1;
        }
    }
    let mut got = vec![0; data.len()];
    b.mr.read(0, &mut got).unwrap();
    assert!(got == data, "the target's memory differs");
    by_worker(daemon)
}

/// Number of queue pairs of each worker.
fn by_worker(daemon: &Daemon) -> Vec<u64> {
    let of = |w: &serde_json::Value| w["queue_pairs"].as_u64().unwrap();
    counters(daemon).iter().map(of).collect()
}

fn counters(daemon: &Daemon) -> Vec<serde_json::Value> {
    let text = daemon.context().read_stats().unwrap();
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    all["workers"].as_array().unwrap().clone()
}

fn sum(daemon: &Daemon, name: &str) -> u64 {
    counters(daemon)
        .iter()
        .map(|w| w[name].as_u64().unwrap())
        .sum()
}

#[test]
fn a_thousand_connections_over_the_ring_pair_spread_over_two_workers() {
    skip_if!(two_cores());
    let pair = LOOPBACK.split_once("[[device]]").unwrap().1;
    let siwd = Daemon::start(&format!("{TWO}[[device]]{pair}"), &[]);
    let workers = crowd(&siwd, "siw0", "10.77.0.2", 1000, 3000);
    assert!(workers.iter().all(|n| *n > 600), "{workers:?}");
    assert_eq!(sum(&siwd, "frames_forwarded"), 0, "flows are symmetric");
    // To an address of the same device, and over IPv6.
    let workers = crowd(&siwd, "siw1", "10.77.0.2", 100, 20_000);
    assert!(workers.iter().all(|n| *n > 40), "{workers:?}");
    let workers = crowd(&siwd, "siw0", "fd77::2", 100, 20_000);
    assert!(workers.iter().all(|n| *n > 40), "{workers:?}");
}

fn device(n: u8, devargs: &str) -> String {
    format!(
        r#"
[[device]]
name = "siw{n}"
devargs = "{devargs}"
mac = "02:00:00:77:00:0{n}"
addresses = ["10.77.0.{n}/24", "fd77::{n}/64"]
"#
    )
}

#[test]
fn a_thousand_connections_over_taps_reach_their_workers_though_the_kernel_picks_the_queue() {
    skip_if!(lacks_network().or_else(two_cores));
    let ns = Netns::new();
    let config = format!(
        "{TWO}{}{}",
        device(1, "net_tap0,iface=siwtap0"),
        device(2, "net_tap1,iface=siwtap1")
    );
    let siwd = ns.siwd(&config, &[]);
    ns.ip("link add br0 type bridge");
    for link in ["siwtap0", "siwtap1"] {
        ns.ip(&format!("link set {link} master br0"));
        ns.ip(&format!("link set {link} up"));
    }
    ns.ip("link set br0 up");
    let workers = crowd(&siwd, "siw1", "10.77.0.2", 1000, 3000);
    assert!(workers.iter().all(|n| *n > 600), "{workers:?}");
    let workers = crowd(&siwd, "siw2", "fd77::1", 40, 50_000);
    assert!(workers.iter().all(|n| *n > 5), "{workers:?}");
    assert!(sum(&siwd, "frames_forwarded") > 0, "{:?}", counters(&siwd));
    // Frames of the closing connections may still be in transit between workers.
    let end = Instant::now() + PATIENCE;
    while sum(&siwd, "frames_forwarded") != sum(&siwd, "frames_taken") {
        assert!(Instant::now() < end, "{:?}", counters(&siwd));
    }
    assert!(siwd.stop().success());
}

#[test]
fn a_port_with_one_queue_is_polled_by_one_worker_that_forwards_to_the_others() {
    skip_if!(
        lacks_network()
            .or_else(two_cores)
            .or_else(|| crate::common::net::missing_program("ethtool"))
    );
    let ns = Netns::new();
    ns.veth(1500);
    ns.ip("link set veth1 arp off");
    let config = format!(
        "{TWO}{}{}",
        device(1, "net_af_packet0,iface=veth0"),
        device(2, "net_af_packet1,iface=veth1")
    );
    let siwd = ns.siwd(&config, &[]);
    let workers = crowd(&siwd, "siw1", "10.77.0.2", 200, 20_000);
    assert!(workers.iter().all(|n| *n > 100), "{workers:?}");
    let workers = crowd(&siwd, "siw2", "fd77::1", 40, 20_000);
    assert!(workers.iter().all(|n| *n > 5), "{workers:?}");
    for name in [
        "frames_forwarded",
        "frames_copied",
        "frames_sent_for_others",
    ] {
        assert!(sum(&siwd, name) > 0, "{name}: {:?}", counters(&siwd));
    }
    assert!(siwd.stop().success());
}

#[test]
fn a_connection_from_a_given_source_port_lives_where_its_answers_come() {
    skip_if!(two_cores());
    let pair = LOOPBACK.split_once("[[device]]").unwrap().1;
    let siwd = Daemon::start(&format!("{TWO}[[device]]{pair}"), &[]);
    let mut ends = Vec::new();
    for port in 20_001..20_017u16 {
        let (a, b) = (
            End::new(&siwd.context(), 4096),
            End::new(&siwd.context(), 4096),
        );
        let opt = ConnectOptions {
            src: Some(SocketAddr::new("10.77.0.1".parse().unwrap(), port)),
            ..ConnectOptions::default()
        };
        connect_with(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap(), &opt);
        a.fill(u64::from(port));
        let sge = [a.mr.sge(0, 4096)];
        let wr = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
        a.qp.post_send(&[wr]).unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        assert!(a.read(0, 4096) == b.read(0, 4096));
        ends.push((a, b));
    }
    let workers = by_worker(&siwd);
    assert!(workers.iter().all(|n| *n > 0), "{workers:?}");
}

/// Reads the kernel's resume latency limit of a core.
fn read_resume_latency(core: usize) -> String {
    let file = format!("/sys/devices/system/cpu/cpu{core}/power/pm_qos_resume_latency_us");
    std::fs::read_to_string(file).unwrap().trim().to_owned()
}

#[test]
fn cores_do_not_halt_while_a_daemon_runs_that_asks_for_it() {
    let core = *siwd::host::allowed_cores().last().unwrap();
    let access = resume_latency::check_access(resume_latency::CORES_FOLDER.as_ref(), &[core]);
    skip_if!(access.err().map(|error| error.to_string()));
    let before = read_resume_latency(core);
    let workers = format!("[workers]\ncores = [{core}]\nresume_latency_us = 0\n");
    let daemon = Daemon::start(&LOOPBACK.replace("[workers]\n", &workers), &[]);
    assert_eq!(read_resume_latency(core), "n/a");
    assert!(daemon.stop().success());
    assert_eq!(read_resume_latency(core), before);
}
