//! The flight recorder: `siwctl why` explains ends in words and numbers, also after the queue pair is gone.

use serde_json::Value;
use siw::{CmEvent, Context, ListPosition, ObjectList, QpState, SendData, SendWr, WcStatus};

use super::client_faults::{as_user, open_to_all};
use super::siwctl::{shown, siwctl};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, pair, ping};

/// The explanation of a queue pair as text, and as JSON.
fn why(daemon: &Daemon, qp: u32) -> (String, Value) {
    let number = qp.to_string();
    let text = shown(daemon, &["why", &number]);
    let json = shown(daemon, &["why", &number, "--json"]);
    (text, serde_json::from_str(&json).unwrap())
}

fn names(explained: &Value) -> Vec<&str> {
    let events = explained["events"].as_array().unwrap().iter();
    events
        .map(|event| event["event"].as_str().unwrap())
        .collect()
}

fn await_disconnect(end: &End) {
    let event = end.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(event, CmEvent::Disconnected(_)), "{event:?}");
}

#[test]
fn a_destroyed_queue_pair_is_explained() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    let numbers = [a.qp.qp_num(), b.qp.qp_num()];
    shown(&daemon, &["qp", "kill", &numbers[0].to_string()]);
    for end in [&a, &b] {
        await_disconnect(end);
    }
    let context = a.ctx.clone();
    drop(a);
    context.await_releases().unwrap();
    let (text, json) = why(&daemon, numbers[0]);
    let pid = std::process::id();
    for words in [
        &format!("Queue pair {} of ", numbers[0]),
        &format!("(pid {pid}, client "),
        "It was connected ",
        "-> 10.77.0.2:",
        "MPA revision 2, CRC on, IRD 16, ORD 16",
        "disconnected: an operator ended the queue pair.",
        "TCP had retransmitted 0 segments in 0 timeouts, with ",
        "It was destroyed ",
        ": by its client.",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(text.lines().count(), 1, "{text}");
    assert_eq!(
        names(&json),
        [
            "Connect",
            "established",
            "disconnected",
            "DestroyQp",
            "destroyed"
        ]
    );
    assert_eq!(json["recording"]["last_connection"]["rdmap"]["crc"], true);
    assert!(json["recording"]["ended"].as_f64() >= json["recording"]["created"].as_f64());
    let table = shown(&daemon, &["why", "--events", &numbers[0].to_string()]);
    assert_eq!(table.lines().count(), 6, "{table}");
    // The other end still exists, until its client leaves.
    let (text, json) = why(&daemon, numbers[1]);
    for words in ["is in ERR.", "disconnected: the peer reset the connection."] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(
        names(&json),
        ["Accept", "established", "disconnected", "QP_FATAL"]
    );
    let client = &json["recording"]["client"];
    shown(&daemon, &["client", "kill", &client.to_string()]);
    b.ctx.get_async_event(Some(PATIENCE)).unwrap();
    let start = std::time::Instant::now();
    loop {
        let (text, _) = why(&daemon, numbers[1]);
        if text.contains("its client was closed: an operator ended the client") {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{text}");
    }
    assert!(daemon.stop().success());
}

/// A wrong key: both ends name the Terminate.
#[test]
fn a_terminate_is_named_at_both_ends() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let sge = [a.mr.sge(0, 64)];
    let wrong = b.mr.rkey() ^ 0x55;
    let write = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), wrong);
    a.qp.post_send(&[write]).unwrap();
    for end in [&a, &b] {
        await_disconnect(end);
    }
    let (text, json) = why(&daemon, b.qp.qp_num());
    assert!(
        text.contains("this side had found DDP, tagged buffer"),
        "{text}"
    );
    assert!(
        names(&json).contains(&"disconnected")
            && names(&json).iter().any(|name| name.starts_with("QP_")),
        "{json}"
    );
    let (text, _) = why(&daemon, a.qp.qp_num());
    assert!(
        text.contains("the peer had reported DDP, tagged buffer"),
        "{text}"
    );
    assert!(
        text.contains("disconnected: the peer sent Terminate: DDP"),
        "{text}"
    );
}

/// The peer's Ethernet address is wrong from now on: the connection times out, with TCP's numbers.
#[test]
fn a_silent_peer_is_explained_with_numbers() {
    let timeout = "name = \"siw0\"\ntcp = { user_timeout_s = 1 }";
    let daemon = Daemon::start(&LOOPBACK.replacen("name = \"siw0\"", timeout, 1), &[]);
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    let lladdr = "02:00:00:00:00:99";
    let device = ["--device", "siw0"];
    let add = ["neigh", "add", "10.77.0.2", "--lladdr", lladdr];
    shown(&daemon, &[&add[..], &device].concat());
    let sge = [a.mr.sge(0, 4096)];
    let write = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[write]).unwrap();
    assert_ne!(a.wc().status, WcStatus::SUCCESS);
    await_disconnect(&a);
    let (text, json) = why(&daemon, a.qp.qp_num());
    assert!(
        text.contains("disconnected: the peer stopped answering."),
        "{text}"
    );
    let tcp = &json["recording"]["last_connection"]["tcp"];
    let (timeouts, unacknowledged) = (&tcp["timeouts"], &tcp["unacked_bytes"]);
    assert!(timeouts.as_u64().unwrap() >= 3, "{json}");
    assert!(unacknowledged.as_u64().unwrap() >= 4096, "{json}");
    let numbers = format!(
        " in {timeouts} timeouts, with {unacknowledged} bytes unacknowledged and 0 not sent"
    );
    assert!(text.contains(&numbers), "{numbers}: {text}");
    // A new connection gets through once the address is forgotten.
    shown(&daemon, &["neigh", "del", "10.77.0.2", "--device", "siw0"]);
    let (c, d) = pair(&daemon, 4096);
    ping(&c, &d);
}

#[test]
fn the_number_of_events_is_bounded_and_configurable() {
    let config = format!("[limits]\nrecorded_events = 4\n{LOOPBACK}");
    let daemon = Daemon::start(&config, &[]);
    let end = End::new(&daemon.context(), 64);
    let qp = end.qp.qp_num();
    for _ in 0..10 {
        // The second one is refused: a queue pair without a connection can move to IDLE and ERROR only.
        end.qp.modify(QpState::Idle).unwrap();
        end.qp.modify(QpState::Rts).unwrap_err();
    }
    let (text, json) = why(&daemon, qp);
    let events = json["events"].as_array().unwrap();
    assert_eq!(
        (events.len(), &json["recording"]["events_dropped"]),
        (4, &26.into())
    );
    assert!(
        text.contains("Its request ModifyQp, ")
            && text.contains("was refused: a queue pair that is not"),
        "{text}"
    );
    // Equal events count as one.
    for _ in 0..10 {
        end.qp.modify(QpState::Idle).unwrap();
    }
    let (_, json) = why(&daemon, qp);
    let last = json["events"].as_array().unwrap().last().unwrap();
    assert_eq!(
        (&last["detail"], &last["count"]),
        (&"to IDLE".into(), &10.into())
    );
    let config = format!("[limits]\nrecorded_events = 0\n{LOOPBACK}");
    std::fs::write(daemon.dir.path().join("siwd.toml"), config).unwrap();
    shown(&daemon, &["reload"]);
    let (a, b) = pair(&daemon, 64);
    shown(&daemon, &["qp", "kill", &a.qp.qp_num().to_string()]);
    await_disconnect(&b);
    let (text, json) = why(&daemon, a.qp.qp_num());
    assert!(
        text.contains("disconnected: an operator ended the queue pair"),
        "{text}"
    );
    assert!(
        json["recording"].is_null() && names(&json).is_empty(),
        "{json}"
    );
}

#[test]
fn other_users_see_no_recording() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let daemon = Daemon::loopback();
    open_to_all(&daemon);
    let (a, _b) = pair(&daemon, 64);
    let theirs = as_user(65_534, || Context::open(Some(&daemon.socket)).unwrap());
    let recorded = |context: &Context| {
        let minor = a.qp.qp_num().into();
        let mut position = ListPosition { major: 0, minor };
        context.list_objects_after(ObjectList::Recording, &mut position)
    };
    assert_eq!(recorded(&daemon.context()).unwrap().lines().count(), 3);
    assert_eq!(recorded(&theirs).unwrap(), "");
    let (status, _, error) = siwctl(&daemon, &["why", "4000000"]);
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("knows no queue pair 4000000"), "{error}");
    for refused in [
        theirs.set_limit("clients", "1").map(drop),
        theirs.change_routes(0, "flush").map(drop),
        theirs.change_neighbours(0, "del 10.77.0.2"),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("only operators can"), "{error}");
    }
}

#[test]
fn limits_are_set_in_a_running_daemon() {
    let daemon = Daemon::loopback();
    let set = |key: &str, value: &str| siwctl(&daemon, &["limits", "set", key, value]);
    let (status, text, error) = set("queue_pairs_per_client", "1");
    assert_eq!(status, Some(0), "{error}");
    assert_eq!(text, "applied: limits.queue_pairs_per_client 102400 -> 1\n");
    let end = End::new(&daemon.context(), 64);
    let second = end.pd.create_qp(&end.cq, &end.cq, &Default::default());
    let refused = second.err().unwrap().to_string();
    assert!(refused.contains("queue_pairs_per_client"), "{refused}");
    for (key, value, outcome) in [
        (
            "memory_per_user",
            "1 GiB",
            "limits.memory_per_user null -> 1073741824",
        ),
        (
            "memory_per_user",
            "default",
            "limits.memory_per_user 1073741824 -> null",
        ),
        (
            "queue_pairs_per_client",
            "default",
            "limits.queue_pairs_per_client 1 -> 102400",
        ),
    ] {
        let (_, text, error) = set(key, value);
        assert_eq!(text, format!("applied: {outcome}\n"), "{error}");
    }
    for (key, value, reason) in [
        ("clients", "0", "at least 1 is needed"),
        ("clients", "many", "invalid type"),
        ("no_such", "1", "unknown field `no_such`"),
        ("connections", "9", "connections needs a restart"),
        ("memory", "1 GB", "write bytes, or a number with KiB"),
    ] {
        let (status, _, error) = set(key, value);
        assert_eq!(status, Some(1), "{key} {value}");
        assert!(error.contains(reason), "{key} {value}: {error}");
    }
    end.another();
}

#[test]
fn routes_are_added_to_a_running_daemon() {
    let daemon = Daemon::loopback();
    let route =
        |args: &[&str]| siwctl(&daemon, &[&["route"], args, &["--device", "siw0"]].concat());
    let done = |args: &[&str]| {
        let (status, text, error) = route(args);
        assert_eq!(status, Some(0), "{args:?}: {error}");
        text
    };
    let context = daemon.context();
    let far = "10.80.0.1:9".parse().unwrap();
    let unreachable = context
        .resolve_address(far, None, None)
        .unwrap_err()
        .to_string();
    assert!(
        unreachable.contains("no device reaches 10.80.0.1"),
        "{unreachable}"
    );
    let added = "10.80.0.0/16 via 10.77.0.2 dev siw0\n";
    assert_eq!(done(&["add", "10.80.0.0/16", "--via", "10.77.0.2"]), added);
    assert_eq!(done(&["show"]), added);
    context.resolve_address(far, None, None).unwrap();
    for (args, reason) in [
        (
            &["add", "10.80.0.0/16", "--via", "10.77.0.2"][..],
            "has a route to 10.80.0.0/16 already",
        ),
        (
            &["add", "10.81.0.0/16", "--via", "10.99.0.2"],
            "10.99.0.2: it must be on one",
        ),
        (
            &["add", "10.81.0.0/16", "--via", "fd77::2"],
            "of the destination's family",
        ),
        (
            &["add", "10.81.0.0/99", "--via", "10.77.0.2"],
            "is not an address/prefix",
        ),
        (
            &["del", "10.81.0.0/16"],
            "no route to 10.81.0.0/16 was added",
        ),
    ] {
        let (status, _, error) = route(args);
        assert_eq!(status, Some(1), "{args:?}");
        assert!(error.contains(reason), "{args:?}: {error}");
    }
    assert_eq!(done(&["del", "10.80.0.0/16"]), "");
    context.resolve_address(far, None, None).unwrap_err();
    assert_eq!(done(&["flush"]), "");
    let (status, _, error) = siwctl(&daemon, &["route", "flush", "--device", "siw7"]);
    assert_eq!(status, Some(1));
    assert!(error.contains("no device \"siw7\""), "{error}");
}
