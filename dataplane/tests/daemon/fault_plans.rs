//! `siwctl fault`: plans that operators load into a running daemon, with real traffic whose data is compared.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use serde_json::Value;
use siw::{CmEvent, ConnectOptions, ObjectList, SendData, SendWr, WcStatus};
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;

use super::client_faults::{as_user, open_to_all};
use super::device_changes::{SECOND_PAIR, second_pair};
use super::reload::rewrite;
use super::siwctl::{shown, shown_json, siwctl, start_siwctl};
use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::*;

/// Bytes of the memory of both ends.
const LEN: usize = 64 << 10;

/// Two devices joined by a veth pair, whose TCP checksums are computed and checked.
const PACKETS: &str = r#"
[workers]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=veth0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
[[device]]
name = "siw1"
devargs = "net_af_packet1,iface=veth1"
mac = "02:00:00:77:00:02"
addresses = ["10.77.0.2/24", "fd77::2/64"]
"#;

/// Writes a plan into the daemon's folder; returns its path.
fn write_plan(daemon: &Daemon, name: &str, text: &str) -> String {
    let path = daemon.dir.path().join(format!("{name}.toml"));
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Loads a plan of that text.
fn load(daemon: &Daemon, name: &str, text: &str) {
    let path = write_plan(daemon, name, text);
    let said = shown(daemon, &["fault", "load", &path]);
    assert!(
        said.starts_with(&format!("plan {name} is loaded: ")),
        "{said}"
    );
}

/// Number of times that the faults of a plan happened, in its order.
fn injected(daemon: &Daemon, plan: &str) -> Vec<u64> {
    let rows = shown_json(daemon, &["fault", "show"]);
    let of_plan = rows.iter().filter(|row| row["plan"] == plan);
    of_plan
        .map(|row| row["injected"].as_u64().unwrap())
        .collect()
}

/// Waits until a text has what is expected.
fn await_text(
    what: &str,
    mut read: impl FnMut() -> String,
    is_expected: impl Fn(&str) -> bool,
) -> String {
    let begin = Instant::now();
    loop {
        let text = read();
        if is_expected(&text) {
            return text;
        }
        assert!(begin.elapsed() < PATIENCE, "{what}: {text}");
    }
}

/// Writes all of the memory of `from` into that of `to`, and compares it. `false`: the connection has ended.
fn write_all(from: &End, to: &End, seed: u64) -> bool {
    from.fill(seed);
    let sge = [from.mr.sge(0, LEN)];
    let write = SendWr::write(seed, SendData::Sges(&sge), to.mr.addr(), to.mr.rkey());
    from.qp.post_send(&[write]).unwrap();
    if from.wc().status != WcStatus::SUCCESS {
        return false;
    }
    assert!(
        to.read(0, LEN) == pattern(seed, LEN),
        "round {seed} has other data"
    );
    true
}

/// Writes in both directions, `rounds` times, and compares the data.
fn exchange(a: &End, b: &End, rounds: u64) {
    for round in 0..rounds {
        assert!(write_all(a, b, 2 * round + 1), "round {round}");
        assert!(write_all(b, a, 2 * round + 2), "round {round}");
    }
}

/// Faults of the wire that TCP repairs, each often enough to happen in a few megabytes.
const REPAIRED: [(&str, &str); 6] = [
    (
        "drop",
        "kind = \"wire_drop\"\nprobability = 0.02\nburst = 2",
    ),
    (
        "delay",
        "kind = \"wire_delay\"\ndelay_ms = 0.3\njitter_ms = 0.3\nprobability = 0.2",
    ),
    (
        "duplicate",
        "kind = \"wire_duplicate\"\nlate_ms = 0.5\nprobability = 0.1",
    ),
    (
        "altered",
        "kind = \"wire_duplicate\"\nlate_ms = 0.5\naltered = true\nprobability = 0.1",
    ),
    (
        "reorder",
        "kind = \"wire_reorder\"\nlate_ms = 0.5\nprobability = 0.1",
    ),
    (
        "rate",
        "kind = \"wire_rate\"\nrate_kbit = 400_000\nqueue = 400",
    ),
];

/// Exchanges data under each fault that TCP repairs, sent and received.
fn exchange_under_all(daemon: &Daemon) {
    let (a, b) = pair(daemon, LEN);
    exchange(&a, &b, 2);
    for (name, text) in REPAIRED {
        for direction in ["out", "in"] {
            let text = format!("[[fault]]\n{text}\ndirection = \"{direction}\"\n");
            load(daemon, name, &text);
            let mut rounds = 0;
            while injected(daemon, name)[0] < 3 {
                exchange(&a, &b, 5);
                rounds += 5;
                assert!(rounds < 1000, "{name} {direction} does not happen");
            }
            let said = shown(daemon, &["fault", "clear", name]);
            assert!(
                said.starts_with(&format!("plan {name} is cleared: ")),
                "{said}"
            );
        }
    }
    exchange(&a, &b, 2);
    assert!(shown_json(daemon, &["fault", "show"]).is_empty());
}

#[test]
fn data_arrives_in_spite_of_faults_of_the_embedded_pair() {
    exchange_under_all(&Daemon::loopback());
}

#[test]
fn data_arrives_in_spite_of_faults_with_two_workers() {
    skip_if!(two_cores());
    let workers = "[workers]\ncores = [0, 1]\n";
    exchange_under_all(&Daemon::start(
        &LOOPBACK.replace("[workers]\n", workers),
        &[],
    ));
}

#[test]
fn data_arrives_in_spite_of_faults_of_an_interface() {
    skip_if!(lacks_network());
    skip_if!(missing_program("ethtool"));
    let ns = Netns::new();
    ns.veth(1500);
    exchange_under_all(&ns.siwd(PACKETS, &[]));
}

/// A changed octet passes TCP, whose checksum is changed with it, and ends the connection by the CRC of MPA.
#[test]
fn a_corrupt_segment_is_found_by_the_crc_alone() {
    skip_if!(lacks_network());
    skip_if!(missing_program("ethtool"));
    let ns = Netns::new();
    ns.veth(1500);
    let daemon = ns.siwd(PACKETS, &[]);
    for direction in ["out", "in"] {
        let (a, b) = pair(&daemon, LEN);
        exchange(&a, &b, 2);
        let text = format!(
            "[[fault]]\nkind = \"wire_corrupt\"\nafter_calls = 20\ncount = 1\nqp = {}\ndirection = \"{direction}\"\n",
            a.qp.qp_num()
        );
        load(&daemon, "corrupt", &text);
        let mut seed = 0;
        // Each end sends: the fault may be in either direction.
        while write_all(&a, &b, seed) && write_all(&b, &a, seed + 1) {
            seed += 2;
            assert!(seed < 10_000, "no segment is corrupted");
        }
        let why = |end: &End| shown(&daemon, &["why", &end.qp.qp_num().to_string()]);
        let both = await_text(
            "the cause",
            || why(&a) + &why(&b),
            |text| {
                text.matches("injected fault 1 of plan corrupt: wire_corrupt")
                    .count()
                    >= 2
            },
        );
        assert!(both.to_lowercase().contains("crc"), "{both}");
        let ends = shown(&daemon, &["show", "ends"]);
        let said = "(a fault plan injected faults into this connection)";
        assert!(ends.contains(said), "{ends}");
        shown(&daemon, &["fault", "clear", "corrupt"]);
    }
    // TCP has found no wrong checksum.
    let drops = shown_json(&daemon, &["show", "drops", "--all"]);
    let of_checksums = |row: &&Value| row["meaning"].as_str().unwrap().contains("checksum");
    let counts: Vec<_> = drops.iter().filter(of_checksums).collect();
    assert!(
        !counts.is_empty() && counts.iter().all(|row| row["count"] == 0),
        "{drops:?}"
    );
}

/// Without the CRC nothing finds the changed octet, which shows that it is one.
#[test]
fn without_the_crc_a_corrupt_segment_arrives() {
    let config = LOOPBACK.replace(
        "[[device]]\nname = \"siw1\"",
        "[device.mpa]\ncrc = \"off\"\n[[device]]\nname = \"siw1\"",
    );
    let daemon = Daemon::start(&format!("{config}[device.mpa]\ncrc = \"off\"\n"), &[]);
    let (a, b) = pair(&daemon, LEN);
    // Every 50th segment of a Write that has several: most octets are payload of the Write.
    load(
        &daemon,
        "corrupt",
        "[[fault]]\nkind = \"wire_corrupt\"\nevery = 50\ndevice = \"siw0\"\ndirection = \"out\"\n",
    );
    for seed in 1..1000 {
        a.fill(seed);
        let sge = [a.mr.sge(0, LEN)];
        let write = SendWr::write(seed, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
        a.qp.post_send(&[write]).unwrap();
        assert_eq!(a.wc().status, WcStatus::SUCCESS);
        let (sent, found) = (pattern(seed, LEN), b.read(0, LEN));
        let changed = sent
            .iter()
            .zip(&found)
            .filter(|(sent, found)| sent != found)
            .count();
        if changed > 0 {
            assert!(changed <= 2, "{changed} octets");
            return;
        }
    }
    panic!("all data is right: {:?}", injected(&daemon, "corrupt"));
}

/// A dead link stops the queue pair that it is aimed at, not the other one, and a partition only its addresses.
#[test]
fn only_those_that_are_aimed_at_meet_a_fault() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, LEN);
    let (c, d) = pair(&daemon, LEN);
    let (e, f) = pair_on(&daemon, LEN, "siw0", "[fd77::2]:0");
    let post = |from: &End, to: &End| {
        from.fill(7);
        let sge = [from.mr.sge(0, LEN)];
        let write = SendWr::write(7, SendData::Sges(&sge), to.mr.addr(), to.mr.rkey());
        from.qp.post_send(&[write]).unwrap();
    };
    let ends = |end: &End| {
        let rows = shown_json(&daemon, &["show", "conn"]);
        let row = rows
            .iter()
            .find(|row| row["lqpn"] == end.qp.qp_num())
            .unwrap();
        [&row["tcp"]["local"], &row["tcp"]["remote"]].map(|end| end.as_str().unwrap().to_owned())
    };
    let [local, remote] = ends(&a);
    let port = local.rsplit(':').next().unwrap().to_owned();
    let why = shown(&daemon, &["why", "--json", &a.qp.qp_num().to_string()]);
    let client = serde_json::from_str::<Value>(&why).unwrap()["recording"]["client"].clone();
    let aims = [
        format!("qp = {}", a.qp.qp_num()),
        format!("client = {client}"),
        format!("connection = [\"{remote}\", \"{local}\"]"),
        format!("host = \"10.77.0.1\"\nport = {port}"),
    ];
    for aim in aims {
        load(
            &daemon,
            "hole",
            &format!("[[fault]]\nkind = \"wire_black_hole\"\n{aim}\n"),
        );
        post(&a, &b);
        exchange(&c, &d, 3);
        exchange(&e, &f, 3);
        let lost = await_text(
            &aim,
            || injected(&daemon, "hole")[0].to_string(),
            |count| count != "0",
        );
        assert_eq!(
            a.cq.poll(&mut [siw::Wc::default()]).unwrap(),
            0,
            "{aim}: {lost}"
        );
        shown(&daemon, &["fault", "clear"]);
        assert_eq!(a.wc().status, WcStatus::SUCCESS, "{aim}");
        assert!(b.read(0, LEN) == pattern(7, LEN));
    }
    load(
        &daemon,
        "parted",
        "[[fault]]\nkind = \"wire_partition\"\nbetween = [\"10.77.0.2\", \"10.77.0.1\"]\n",
    );
    post(&a, &b);
    exchange(&e, &f, 3);
    await_text(
        "parted",
        || injected(&daemon, "parted")[0].to_string(),
        |count| count != "0",
    );
    assert_eq!(a.cq.poll(&mut [siw::Wc::default()]).unwrap(), 0);
    shown(&daemon, &["fault", "clear", "parted"]);
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
}

/// Connections that begin after the plan was loaded meet its faults, too: here those of a user, at one device.
#[test]
fn later_connections_of_a_user_meet_a_fault() {
    let daemon = Daemon::loopback();
    let uid = nix::unistd::getuid();
    let text = format!(
        "[[fault]]\nkind = \"wire_delay\"\ndelay_ms = 0.1\nuser = {uid}\ndevice = \"siw1\"\ndirection = \"out\"\n\
         [[fault]]\nkind = \"wire_drop\"\nuser = {}\n",
        uid.as_raw() + 1
    );
    load(&daemon, "mine", &text);
    let (a, b) = pair(&daemon, LEN);
    exchange(&a, &b, 3);
    let counts = injected(&daemon, "mine");
    assert!(counts[0] > 0 && counts[1] == 0, "{counts:?}");
    let stat: Value = serde_json::from_str(&shown(&daemon, &["stat", "--json"])).unwrap();
    let delays = |device: usize| {
        let devices = &stat["devices"][device];
        devices["merged"]["injected_wire_delay"].as_u64().unwrap()
    };
    assert_eq!((delays(0), delays(1)), (0, counts[0]), "{stat}");
    let rows = shown_json(&daemon, &["fault", "show"]);
    assert_eq!(
        (&rows[0]["connections"], &rows[1]["connections"]),
        (&1.into(), &0.into())
    );
    // Its addresses may be used again.
    drop((a, b));
    await_text(
        "connections",
        || shown_json(&daemon, &["fault", "show"])[0]["connections"].to_string(),
        |count| count == "0",
    );
}

/// Each fault is marked wherever somebody may look for the cause.
#[test]
fn faults_are_marked_in_each_place() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, LEN);
    let file = daemon.dir.path().join("faults.pcapng");
    let mut capturing = start_siwctl(&daemon, &["capture", "start", file.to_str().unwrap()]);
    load(
        &daemon,
        "marked",
        "[[fault]]\nname = \"lost\"\nkind = \"wire_drop\"\nafter_calls = 10\nevery = 20\ncount = 5\n\
         device = \"siw0\"\ndirection = \"out\"\n",
    );
    while injected(&daemon, "marked")[0] < 5 {
        exchange(&a, &b, 1);
    }
    let text = "injected fault 1 (lost) of plan marked: wire_drop";
    let number = a.qp.qp_num().to_string();
    let counted = format!("{text} (5 times, last ");
    let why = await_text(
        "why",
        || shown(&daemon, &["why", &number]),
        |why| why.contains(&counted),
    );
    assert!(
        why.contains("Faults were injected on purpose, and may be the cause: "),
        "{why}"
    );
    let events = shown(&daemon, &["why", "--events", &number]);
    assert!(
        events.contains(&format!("injected fault {text}")),
        "{events}"
    );
    let stat = shown(&daemon, &["stat"]);
    assert!(
        stat.contains("injected_wire_drop") && stat.contains("fault plans: 1 loaded"),
        "{stat}"
    );
    let stat: Value = serde_json::from_str(&shown(&daemon, &["stat", "--json"])).unwrap();
    assert_eq!(stat["faults"][0]["injected"], 5, "{stat}");
    let drops = shown(&daemon, &["show", "drops"]);
    assert!(drops.contains("INJECTED_LOSS"), "{drops}");
    let metrics = shown(&daemon, &["metrics", "--text"]);
    for line in [
        "siwd_fault_plans 1",
        "siwd_fault_injected_total{plan=\"marked\",fault=\"1\",kind=\"wire_drop\"} 5",
        "siwd_device_injected_faults_total{device=\"siw0\",kind=\"wire_drop\"} ",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    shown(&daemon, &["capture", "stop"]);
    wait(&mut capturing.0);
    let comments = comments_in(&file);
    assert_eq!(comments, vec![text; 5]);
    // The counters stay when the plan is cleared.
    let cleared = shown(&daemon, &["fault", "clear", "--json"]);
    let cleared: Value = serde_json::from_str(&cleared).unwrap();
    assert_eq!(cleared[0]["injected"], 5);
    let stat = shown(&daemon, &["stat"]);
    assert!(
        stat.contains("injected_wire_drop") && !stat.contains("fault plans"),
        "{stat}"
    );
    let log = daemon.stop_and_read_log();
    for line in [
        "fault plan marked is loaded",
        text,
        "fault plan marked is cleared",
    ] {
        assert!(log.contains(line), "{line}: {log}");
    }
}

/// A connection that is not made because of a plan names it: here ARP gets no answer.
#[test]
fn a_connection_that_is_not_made_names_the_plan() {
    let daemon = Daemon::loopback();
    load(&daemon, "hole", "[[fault]]\nkind = \"wire_black_hole\"\n");
    let end = End::new(&daemon.context(), 64);
    let options = ConnectOptions {
        device: Some(end.ctx.device_by_name("siw0").unwrap().index),
        ..ConnectOptions::default()
    };
    let peer = "10.77.0.2:9".parse().unwrap();
    end.qp.connect(&end.cm, peer, &options).unwrap();
    let event = end.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(!matches!(event, CmEvent::Established(_)), "{event:?}");
    let why = shown(&daemon, &["why", &end.qp.qp_num().to_string()]);
    assert!(
        why.contains("injected fault 1 of plan hole: wire_black_hole"),
        "{why}"
    );
}

/// The trace names the fault at the frame that meets it.
#[test]
fn a_trace_has_the_faults() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, LEN);
    load(
        &daemon,
        "traced",
        "[[fault]]\nkind = \"wire_drop\"\nevery = 20\n[[fault]]\nkind = \"wire_delay\"\ndelay_ms = 0.1\nevery = 7\n",
    );
    let (mut tracing, _said) = start_siwctl(&daemon, &["trace", "--json", "400"]);
    let mut traced = tracing.stdout.take().unwrap();
    let mut text = String::new();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                exchange(&a, &b, 1);
            }
        });
        traced.read_to_string(&mut text).unwrap();
    });
    wait(&mut tracing);
    for name in ["INJECTED_LOSS", "injected_fault"] {
        assert!(text.contains(name), "{name}: {text}");
    }
}

/// A device that comes later has the faults of the plans.
#[test]
fn devices_that_are_added_have_the_faults() {
    let daemon = Daemon::loopback();
    load(
        &daemon,
        "early",
        "[[fault]]\nkind = \"wire_delay\"\ndelay_ms = 0.1\n",
    );
    rewrite(&daemon, &format!("{LOOPBACK}{SECOND_PAIR}"));
    for name in ["siw2", "siw3"] {
        shown(&daemon, &["device", "add", name]);
    }
    let (a, b) = second_pair(&daemon);
    ping(&a, &b);
    let stat: Value = serde_json::from_str(&shown(&daemon, &["stat", "--json"])).unwrap();
    let devices = stat["devices"].as_array().unwrap();
    let added = devices
        .iter()
        .find(|device| device["device"] == "siw2")
        .unwrap();
    assert!(
        added["merged"]["injected_wire_delay"].as_u64().unwrap() > 0,
        "{stat}"
    );
}

/// Comments of the frames in a capture.
fn comments_in(file: &Path) -> Vec<String> {
    let bytes = std::fs::read(file).unwrap();
    let mut reader = PcapNgReader::new(&bytes[..]).unwrap();
    let mut comments = Vec::new();
    while let Some(block) = reader.next_block() {
        if let Block::EnhancedPacket(packet) = block.unwrap() {
            comments.extend(packet.options.iter().filter_map(|option| match option {
                EnhancedPacketOption::Comment(comment) => Some(comment.to_string()),
                _ => None,
            }));
        }
    }
    comments
}

#[test]
fn plans_are_loaded_and_cleared_under_load() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, LEN);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&is_over);
        let traffic = scope.spawn(|| {
            let mut rounds = 0;
            while !is_over.load(Ordering::Relaxed) {
                exchange(&a, &b, 1);
                rounds += 1;
            }
            rounds
        });
        for round in 0..10 {
            load(
                &daemon,
                "one",
                "[[fault]]\nkind = \"wire_delay\"\ndelay_ms = 3\nprobability = 0.1\n",
            );
            load(
                &daemon,
                "two",
                "[[fault]]\nkind = \"wire_drop\"\nprobability = 0.01\n",
            );
            let both = || {
                let counts = [injected(&daemon, "one"), injected(&daemon, "two")].concat();
                counts
                    .iter()
                    .filter(|count| **count > 0)
                    .count()
                    .to_string()
            };
            await_text("both plans", both, |count| count == "2");
            // Frames that wait are still sent.
            let name = ["one", "two"][round % 2];
            shown(&daemon, &["fault", "clear", name]);
            shown(&daemon, &["fault", "clear"]);
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(traffic.join().unwrap() > 0);
    });
    exchange(&a, &b, 2);
}

#[test]
fn wrong_plans_are_refused_and_change_nothing() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, LEN);
    load(
        &daemon,
        "kept",
        "[[fault]]\nkind = \"wire_drop\"\nprobability = 0\n",
    );
    let before = shown(&daemon, &["fault", "show", "--json"]);
    let refuse = |args: &[&str], message: &str| {
        let (status, out, error) = siwctl(&daemon, &[&["fault", "load"], args].concat());
        assert_eq!(status, Some(1), "{args:?}: {out}{error}");
        assert!(
            out.is_empty() && error.contains(message),
            "{args:?}: {error}"
        );
        assert_eq!(shown(&daemon, &["fault", "show", "--json"]), before);
    };
    let wire = "[[fault]]\nkind = \"wire_drop\"\n";
    let cases = [
        (
            format!("{wire}probability = 2\n"),
            ":3:15: probability = 2: it must be between 0 and 1",
        ),
        (
            "[[fault]]\nkind = \"wire_fire\"\n".into(),
            ":2:8: unknown fault \"wire_fire\"",
        ),
        (
            "[[fault]]\nkind = \"post_send\"\n".into(),
            ":2:8: a fault of kind post_send happens in a program",
        ),
        (
            format!("{wire}device = \"siw9\"\n"),
            ":3:10: no device siw9: siwd has siw0, siw1",
        ),
        (format!("{wire}qp = 9999\n"), ":3:6: no queue pair 9999"),
        (format!("{wire}client = 9999\n"), ":3:10: no client 9999"),
        (
            format!("{wire}connection = [\"10.77.0.1:1\", \"10.77.0.2:2\"]\n"),
            ":3:14: no connection between 10.77.0.1:1 and 10.77.0.2:2",
        ),
        (
            "[[fault]]\nkind = \"worker_stall\"\nstall_ms = 1\nworker = 900\n".into(),
            ":4:10: no worker 900",
        ),
        (
            "[[fault]]\nkind = \"wire_drop\"\n[[fault]]\nkind = \"wire_drop\"\nseed = 1\n".into(),
            ":5:1: a fault of kind wire_drop has no key \"seed\"",
        ),
        (String::new(), ":1:1: the plan has no [[fault]]"),
        ("fault = 3\n".into(), ":1:9: faults are tables"),
        (wire.repeat(65), "the plan has 65 faults: at most 64"),
        (
            format!("# {}\n{wire}", "x".repeat(70_000)),
            " bytes: at most 32768",
        ),
    ];
    for (text, message) in &cases {
        let path = write_plan(&daemon, "wrong", text);
        refuse(&[&path], message);
    }
    refuse(&["/nowhere.toml"], "neither a file that can be read");
    refuse(&["/"], "it is no regular file");
    refuse(&["slow-completions"], "nor a built-in plan (flaky-link, ");
    let kept = write_plan(&daemon, "kept", wire);
    refuse(&[&kept], "a plan kept is loaded: clear it");
    refuse(&["--name", "", &kept], "the plan has no name");
    let (status, _, error) = siwctl(&daemon, &["fault", "clear", "other"]);
    assert!(
        status == Some(1) && error.contains("no fault plan other is loaded"),
        "{error}"
    );
    for number in 1..8 {
        shown(
            &daemon,
            &["fault", "load", "--name", &format!("plan{number}"), &kept],
        );
    }
    let (status, _, error) = siwctl(&daemon, &["fault", "load", "--name", "ninth", &kept]);
    assert!(
        status == Some(1) && error.contains("8 plans are loaded"),
        "{error}"
    );
    shown(&daemon, &["fault", "clear"]);
    let (status, _, error) = siwctl(&daemon, &["fault", "clear"]);
    assert!(
        status == Some(1) && error.contains("no fault plan is loaded"),
        "{error}"
    );
    exchange(&a, &b, 2);
}

/// Parts of a plan that do not fit together end the loading, not the client.
#[test]
fn parts_that_do_not_fit_are_refused() {
    let daemon = Daemon::loopback();
    let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
    conn.set_call_timeout(PATIENCE).unwrap();
    conn.call_and_wait(1, &m::ClientHello::new("parts"), &[])
        .unwrap();
    let text = b"[[fault]]\nkind = \"wire_drop\"\nprobability = 0\n";
    let mut first = m::LoadFaults {
        total: text.len() as u32,
        offset: 0,
        len: 10,
        has_seed: 0,
        seed: 0,
        name: m::Text::new("parts"),
        path: m::Text::new("parts.toml"),
        text: [0; m::PLAN_PART],
    };
    first.text[..text.len()].copy_from_slice(text);
    let call = |request: &m::LoadFaults| {
        let called = conn.call_and_wait(2, request, &[]);
        called
            .map(|(reply, _)| reply.read_text())
            .map_err(|error| error.to_string())
    };
    let with = |change: fn(&mut m::LoadFaults)| {
        let mut request = first;
        change(&mut request);
        request
    };
    for wrong in [
        with(|part| part.len = 5000),
        with(|part| part.total = u32::MAX),
        with(|part| part.offset = 10),
        with(|part| part.len = 0),
        with(|part| part.len = 100),
    ] {
        assert!(call(&wrong).is_err(), "{wrong:?}");
    }
    // A part in the middle is missing.
    assert_eq!(call(&first).as_deref(), Ok(""));
    assert!(call(&with(|part| part.offset = 11)).is_err());
    assert!(
        call(&with(|part| part.offset = 10)).is_err(),
        "the text is forgotten"
    );
    assert_eq!(call(&first).as_deref(), Ok(""));
    let mut rest = with(|part| (part.offset, part.len) = (10, part.total - 10));
    rest.text[..text.len() - 10].copy_from_slice(&text[10..]);
    let outcome = call(&rest).unwrap();
    assert!(outcome.contains("\"plan\":\"parts\""), "{outcome}");
    // Bytes that are no text.
    let mut bytes = with(|part| part.len = part.total);
    bytes.name = m::Text::new("bytes");
    bytes.text[3] = 0xFF;
    assert!(call(&bytes).unwrap().contains("is no UTF-8"));
}

#[test]
fn only_operators_load_plans() {
    if !nix::unistd::geteuid().is_root() {
        println!("\nskipped: changing the user needs root");
        return;
    }
    let daemon = Daemon::loopback();
    open_to_all(&daemon);
    let theirs = as_user(65_534, || daemon.context());
    let text = "[[fault]]\nkind = \"wire_drop\"\n";
    let refused = |outcome: Result<String, siw::Error>, what: &str| {
        let error = outcome.err().unwrap().to_string();
        assert!(
            error.contains(&format!("only operators can {what}")),
            "{error}"
        );
    };
    refused(
        theirs.load_faults("theirs", "theirs.toml", text, None),
        "load fault plans",
    );
    refused(theirs.clear_faults(""), "clear fault plans");
    refused(theirs.list_objects(ObjectList::Faults), "see fault plans");
    assert!(shown_json(&daemon, &["fault", "show"]).is_empty());
}

/// A link that is dead for a time delays a transfer by that time.
#[test]
fn a_black_hole_lasts_as_long_as_the_plan_says() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, LEN);
    exchange(&a, &b, 2);
    let begin = Instant::now();
    load(
        &daemon,
        "hole",
        "[[fault]]\nkind = \"wire_black_hole\"\nlasts = \"400ms\"\n",
    );
    // Loaded before the first frame, and within the time.
    let is_within = begin.elapsed() < Duration::from_millis(350);
    exchange(&a, &b, 1);
    assert!(!is_within || begin.elapsed() >= Duration::from_millis(400));
    assert!(!is_within || injected(&daemon, "hole")[0] > 0);
    exchange(&a, &b, 1);
}

#[test]
fn workers_and_the_control_thread_stall() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, LEN);
    let stall = |kind: &str| {
        format!("[[fault]]\nkind = \"{kind}\"\nstall_ms = 300\ncount = 1\nafter = \"1ms\"\n")
    };
    let begin = Instant::now();
    load(&daemon, "worker", &stall("worker_stall"));
    await_text(
        "worker",
        || injected(&daemon, "worker")[0].to_string(),
        |count| count == "1",
    );
    // The control thread has told the worker, which stalls before it serves requests that are posted now.
    exchange(&a, &b, 1);
    assert!(
        begin.elapsed() >= Duration::from_millis(300),
        "{:?}",
        begin.elapsed()
    );
    let begin = Instant::now();
    load(&daemon, "control", &stall("control_stall"));
    await_text(
        "control",
        || injected(&daemon, "control")[0].to_string(),
        |count| count == "1",
    );
    assert!(
        begin.elapsed() >= Duration::from_millis(300),
        "{:?}",
        begin.elapsed()
    );
    exchange(&a, &b, 1);
    let log = daemon.stop_and_read_log();
    for kind in ["worker_stall", "control_stall"] {
        assert!(log.contains(&format!(": {kind} times=1")), "{log}");
    }
}

#[test]
fn the_daemon_ends_as_a_plan_says() {
    let end = |how: &str| {
        let mut daemon = Daemon::loopback();
        let (a, b) = pair(&daemon, LEN);
        exchange(&a, &b, 1);
        let path = write_plan(
            &daemon,
            "end",
            &format!("[[fault]]\nkind = \"daemon_end\"\nhow = \"{how}\"\nafter = \"10ms\"\n"),
        );
        let said = shown(&daemon, &["fault", "load", &path]);
        assert!(said.contains("note: siwd has no service manager"), "{said}");
        // The client is told.
        while a.cq.poll(&mut [siw::Wc::default()]).is_ok() && a.ctx.read_stats().is_ok() {}
        wait(&mut daemon.child)
    };
    assert_eq!(end("abort").signal(), Some(9));
    assert!(end("stop").success());
}

#[test]
fn built_in_plans_are_listed() {
    let daemon = Daemon::loopback();
    let rows = shown_json(&daemon, &["fault", "plans"]);
    let listed = shown(&daemon, &["fault", "plans"]);
    assert!(rows.len() >= 6);
    for row in &rows {
        let name = row["name"].as_str().unwrap();
        assert!(listed.contains(name));
        shown(&daemon, &["fault", "load", name]);
        shown(&daemon, &["fault", "clear", name]);
    }
    let outcome = shown(
        &daemon,
        &[
            "fault",
            "load",
            "lossy-link",
            "--seed",
            "9",
            "--name",
            "x",
            "--json",
        ],
    );
    let outcome: Value = serde_json::from_str(&outcome).unwrap();
    assert_eq!(
        (&outcome["plan"], &outcome["seed"]),
        (&"x".into(), &9.into())
    );
    assert!(shown(&daemon, &["fault", "show"]).starts_with("plan x seed 9 loaded "));
}
