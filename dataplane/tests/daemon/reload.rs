//! A running daemon reads its configuration again, by SIGHUP and by `siwctl reload`.

use std::time::Instant;

use nix::sys::signal::Signal;
use serde_json::Value;
use siw::Context;

use super::client_faults::{as_user, open_to_all};
use super::siwctl::{shown, siwctl};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, pair, ping};

/// Writes another configuration for a running daemon.
pub fn rewrite(daemon: &Daemon, config: &str) {
    std::fs::write(daemon.dir.path().join("siwd.toml"), config).unwrap();
}

/// Limit of queue pairs that new clients are told.
fn most_queue_pairs(daemon: &Daemon) -> u32 {
    daemon.context().limits().max_qp
}

#[test]
fn a_reload_applies_what_it_can_and_names_the_rest() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    assert_eq!(
        shown(&daemon, &["reload"]),
        "no setting has changed\n",
        "the settings of the command line are no change"
    );
    let changed = format!("[limits]\nqueue_pairs_per_client = 2\nclients = 4096\n{LOOPBACK}")
        .replacen("name = \"siw0\"", "name = \"siw0\"\nmtu = 9000", 1);
    rewrite(&daemon, &changed);
    let text = shown(&daemon, &["reload"]);
    assert_eq!(
        text,
        "applied: limits.queue_pairs_per_client 102400 -> 2\n\
         needs a restart: device.siw0.mtu 1500 -> 9000\n"
    );
    // Connections are not touched; the limit holds for clients that are connected as well.
    ping(&a, &b);
    assert_eq!(most_queue_pairs(&daemon), 2);
    let second = a.another();
    let refused = second
        .pd
        .create_qp(&second.cq, &second.cq, &Default::default())
        .err()
        .unwrap();
    assert!(
        refused.to_string().contains("queue_pairs_per_client"),
        "{refused}"
    );
    // Settings that need a restart are named until it comes; the applied ones are in force.
    let again: Value = serde_json::from_str(&shown(&daemon, &["reload", "--json"])).unwrap();
    assert_eq!(again["applied"], serde_json::json!([]));
    assert_eq!(again["restart"][0]["key"], "device.siw0.mtu");
    assert!(daemon.stop().success());
}

#[test]
fn a_hangup_reloads_the_configuration() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    rewrite(
        &daemon,
        &format!("[limits]\nqueue_pairs_per_client = 7\n{LOOPBACK}"),
    );
    daemon.signal(Signal::SIGHUP);
    let start = Instant::now();
    while most_queue_pairs(&daemon) != 7 {
        assert!(start.elapsed() < PATIENCE, "SIGHUP changes nothing");
    }
    ping(&a, &b);
    let log = daemon.stop_and_read_log();
    let line = "limits.queue_pairs_per_client applied: 102400 -> 7";
    assert!(log.contains(line), "{log}");
}

#[test]
fn a_wrong_configuration_changes_nothing() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let good = format!("[limits]\nqueue_pairs_per_client = 7\n{LOOPBACK}");
    for (wrong, reason) in [
        (format!("{good}\nno_such = 1"), "no_such"),
        (good.replace("= 7", "= 0"), "at least 1 is needed"),
        (
            format!("[control]\noperators = \"no-such-group\"\n{good}"),
            "groupadd no-such-group",
        ),
        (
            format!("[control]\ngroup = \"no-such-group\"\n{good}"),
            "groupadd no-such-group",
        ),
        (good.replace("\"siw1\"", "\"siw0\""), "used twice"),
    ] {
        rewrite(&daemon, &wrong);
        let (status, out, error) = siwctl(&daemon, &["reload"]);
        assert_eq!((status, out.as_str()), (Some(1), ""), "{error}");
        assert!(
            error.contains("nothing has changed") && error.contains(reason),
            "{error}"
        );
        assert_eq!(most_queue_pairs(&daemon), 102_400, "{reason}");
    }
    std::fs::remove_file(daemon.dir.path().join("siwd.toml")).unwrap();
    let (status, _, error) = siwctl(&daemon, &["reload"]);
    assert_eq!(status, Some(1));
    assert!(error.contains("cannot read the configuration"), "{error}");
    ping(&a, &b);
    assert!(daemon.stop().success());
}

/// A change of the operators holds for clients that are connected.
#[test]
fn only_operators_reload() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let daemon = Daemon::loopback();
    open_to_all(&daemon);
    let theirs = as_user(65_534, || Context::open(Some(&daemon.socket)).unwrap());
    let refused = theirs.reload_configuration().unwrap_err().to_string();
    assert!(refused.contains("only operators"), "{refused}");
    // Their process has the group of this test.
    let gid = nix::unistd::getegid();
    let Some(group) = nix::unistd::Group::from_gid(gid).ok().flatten() else {
        println!("skipped: the group {gid} has no name");
        return;
    };
    let control = format!("[control]\nmode = \"0666\"\noperators = \"{}\"", group.name);
    rewrite(&daemon, &format!("{control}\n{LOOPBACK}"));
    let end = End::new(&daemon.context(), 64);
    shown(&daemon, &["reload"]);
    let again = theirs.reload_configuration();
    drop(end);
    assert!(again.is_ok(), "{again:?}");
}
