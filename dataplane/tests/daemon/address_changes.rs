//! `siwctl addr` and `siwctl neigh flush`: a device's addresses and neighbours change in a running daemon.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde_json::Value;
use siw::{
    BindOptions, CmBinding, CmChannel, CmEvent, CmListener, ConnectOptions, Context, ListenOptions,
};

use super::client_faults::{as_user, open_to_all};
use super::siwctl::{shown, siwctl};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, client_program, pair, pair_on, ping};

/// Executes `siwctl addr` for siw1; returns its output.
fn addr(daemon: &Daemon, args: &[&str]) -> String {
    shown(daemon, &[&["addr"], args, &["--device", "siw1"]].concat())
}

/// Executes a change that is refused; returns the reason.
fn refused(daemon: &Daemon, args: &[&str]) -> String {
    let (status, out, error) = siwctl(daemon, args);
    assert_eq!(status, Some(1), "{args:?}: {out}");
    error
}

fn gids(daemon: &Daemon) -> Vec<String> {
    let folder = daemon.dir.path();
    let folder = folder.join("siwd.sock.sysfs/class/infiniband/siw1/ports/1/gids");
    let gids =
        (0..).map_while(|index| std::fs::read_to_string(folder.join(index.to_string())).ok());
    gids.map(|gid| gid.trim_end().to_owned()).collect()
}

/// Begins to connect from siw0.
fn begin_connect(end: &End, to: SocketAddr) {
    let options = ConnectOptions {
        device: Some(0),
        ..ConnectOptions::default()
    };
    end.qp.connect(&end.cm, to, &options).unwrap();
}

/// Connects to a listener that another end has.
fn connect_to(a: &End, b: &End, to: SocketAddr) {
    begin_connect(a, to);
    let CmEvent::ConnectRequest(request) = b.cm.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request");
    };
    let options = ConnectOptions::default();
    request.accept(&b.qp, None, &options).unwrap();
    for end in [b, a] {
        let event = end.cm.get_event(Some(PATIENCE)).unwrap();
        assert!(matches!(event, CmEvent::Established(_)), "{event:?}");
    }
}

#[test]
fn an_added_address_serves_until_it_is_deleted() {
    let daemon = Daemon::loopback();
    let (a, b) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    // Listeners from before the change: on all addresses, and on those of IPv4.
    let listener = CmListener::new(&b.cm, None, "0.0.0.0:0".parse().unwrap(), 8, 0).unwrap();
    let any = "0.0.0.0:0".parse().unwrap();
    let binding = CmBinding::new(&b.ctx, any, &BindOptions::default()).unwrap();
    let of_family = CmChannel::new(&b.ctx).unwrap();
    let of_family_port = binding.local_addr().port();
    let options = ListenOptions::default();
    let family_listener = CmListener::from_binding(&of_family, binding, &options);
    let _family_listener = family_listener.unwrap_or_else(|failed| panic!("{failed}"));
    let before = gids(&daemon);
    let text = addr(&daemon, &["add", "10.77.0.9/24"]);
    assert!(
        text.ends_with("10.77.0.9/24 dev siw1 added until siwd restarts\n"),
        "{text}"
    );
    assert!(shown(&daemon, &["show", "devices"]).contains("10.77.0.9"));
    let gid = "0000:0000:0000:0000:0000:ffff:0a4d:0009";
    assert!(
        gids(&daemon).iter().any(|other| other == gid),
        "{:?}",
        gids(&daemon)
    );
    let port = listener.local_addr().port();
    connect_to(&a, &b, SocketAddr::new("10.77.0.9".parse().unwrap(), port));
    ping(&a, &b);
    let (c, d) = (a.another(), b.another());
    let to = SocketAddr::new("10.77.0.9".parse().unwrap(), of_family_port);
    begin_connect(&c, to);
    let CmEvent::ConnectRequest(request) = of_family.get_event(Some(PATIENCE)).unwrap() else {
        panic!("no request at the listener of the family");
    };
    request.reject(&[]).unwrap();
    drop((c, d));
    // It stays while the connection uses it.
    let error = refused(&daemon, &["addr", "del", "10.77.0.9", "--device", "siw1"]);
    assert!(
        error.contains("in use by 1 queue pairs and 0 listeners"),
        "{error}"
    );
    ping(&a, &b);
    let context = b.ctx.clone();
    drop((a, b));
    context.await_releases().unwrap();
    // siwd destroys a queue pair when its last bytes are acknowledged.
    let start = Instant::now();
    while siwctl(
        &daemon,
        &["addr", "del", "10.77.0.9/24", "--device", "siw1"],
    )
    .0 != Some(0)
    {
        assert!(start.elapsed() < PATIENCE, "the address is still in use");
    }
    assert_eq!(gids(&daemon), before);
    shown(&daemon, &["neigh", "flush", "--device", "siw0"]);
    let end = End::new(&daemon.context(), 64);
    begin_connect(&end, to);
    let event = end.cm.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(event, CmEvent::Unreachable(_)), "{event:?}");
    // And comes back, for the listener of the family as well.
    addr(&daemon, &["add", "10.77.0.9/24"]);
    let end = End::new(&daemon.context(), 64);
    begin_connect(&end, to);
    let event = of_family.get_event(Some(PATIENCE)).unwrap();
    assert!(matches!(event, CmEvent::ConnectRequest(_)), "{event:?}");
}

#[test]
fn flush_removes_what_was_added_and_a_configured_address_is_back_after_a_restart() {
    let daemon = Daemon::loopback();
    addr(&daemon, &["add", "10.77.0.9/24"]);
    addr(&daemon, &["add", "10.99.0.1/16"]);
    let text = addr(&daemon, &["del", "fd77::2"]);
    assert!(
        text.contains("fd77::2/64 dev siw1 removed until siwd restarts"),
        "{text}"
    );
    let rows: Value = serde_json::from_str(&addr(&daemon, &["show", "--json"])).unwrap();
    let states = rows.as_array().unwrap().iter().map(|row| {
        let word = |key: &str| row[key].as_str().unwrap();
        assert_eq!(word("device"), "siw1");
        (word("address"), word("state"))
    });
    assert_eq!(
        states.collect::<Vec<_>>(),
        [
            ("10.77.0.2/24", "configured"),
            ("10.77.0.9/24", "added"),
            ("10.99.0.1/16", "added"),
            ("fd77::2/64", "removed"),
        ]
    );
    let text = addr(&daemon, &["flush"]);
    assert!(
        !text.contains("10.77.0.9") && !text.contains("10.99.0.1"),
        "{text}"
    );
    addr(&daemon, &["add", "fd77::2/64"]);
    let (a, b) = pair_on(&daemon, 4096, "siw0", "[fd77::2]:0");
    ping(&a, &b);
}

#[test]
fn wrong_changes_are_refused_with_the_reason() {
    let config = format!("{LOOPBACK}routes = [{{ to = \"fd80::/16\", via = \"fd77::1\" }}]\n");
    let daemon = Daemon::start(&config, &[]);
    for (args, reason) in [
        (
            &["add", "10.77.0.1/24"][..],
            "device siw0 has the address 10.77.0.1 already",
        ),
        (
            &["add", "10.77.0.2/24"],
            "device siw1 has the address 10.77.0.2 already",
        ),
        (&["add", "10.77.0.9"], "the prefix length is missing"),
        (&["add", "224.0.0.1/24"], "a unicast address"),
        (&["add", "127.0.0.1/8"], "a unicast address"),
        (
            &["del", "10.77.0.9"],
            "device siw1 has no address 10.77.0.9",
        ),
        (&["del", "here"], "is not an IP address"),
        (
            &["del", "fd77::2"],
            "router fd77::1 of device siw1 is reached through this address",
        ),
    ] {
        let error = refused(&daemon, &[&["addr"], args, &["--device", "siw1"]].concat());
        assert!(error.contains(reason), "{args:?}: {error}");
    }
    let error = refused(&daemon, &["addr", "show", "--device", "siw7"]);
    assert!(error.contains("no device \"siw7\""), "{error}");
    // A listener on it, and the last address.
    let context = daemon.context();
    let channel = CmChannel::new(&context).unwrap();
    let listener = CmListener::new(&channel, None, "10.77.0.1:0".parse().unwrap(), 8, 0).unwrap();
    let delete = ["addr", "del", "10.77.0.1", "--device", "siw0"];
    let error = refused(&daemon, &delete);
    assert!(
        error.contains("in use by 0 queue pairs and 1 listeners"),
        "{error}"
    );
    drop(listener);
    context.await_releases().unwrap();
    shown(&daemon, &delete);
    let error = refused(&daemon, &["addr", "del", "fd77::1", "--device", "siw0"]);
    assert!(error.contains("needs at least one address"), "{error}");
    for number in 2..=8 {
        let address = format!("10.90.0.{number}/24");
        shown(&daemon, &["addr", "add", &address, "--device", "siw0"]);
    }
    let error = refused(
        &daemon,
        &["addr", "add", "10.90.0.9/24", "--device", "siw0"],
    );
    assert!(error.contains("8 addresses"), "{error}");
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    open_to_all(&daemon);
    let theirs = as_user(65_534, || Context::open(Some(&daemon.socket)).unwrap());
    let error = theirs.change_addresses(0, "flush").unwrap_err().to_string();
    assert!(
        error.contains("only operators can change addresses"),
        "{error}"
    );
}

#[test]
fn root_in_a_container_is_no_operator() {
    let daemon = Daemon::loopback();
    let flush = ["neigh", "flush", "--device", "siw0"];
    shown(&daemon, &flush);
    for namespace in [&["--pid"][..], &["--user", "--map-root-user"]] {
        let run = |program: &Path, arguments: &[&str]| {
            let mut unshare = Command::new("unshare");
            unshare.args(namespace).arg("--fork").arg(program);
            unshare.args(arguments).output().unwrap()
        };
        skip_if!(
            (!run("true".as_ref(), &[]).status.success())
                .then(|| format!("unshare {namespace:?} is not permitted here"))
        );
        let socket = ["--socket", daemon.socket.to_str().unwrap()];
        let done = run(&client_program("siwctl"), &[&flush[..], &socket].concat());
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(
            !done.status.success() && error.contains("only operators can"),
            "{namespace:?}: {error}"
        );
    }
}

/// A wrong Ethernet address that was set is gone, and running connections ask for the right one.
#[test]
fn flushed_neighbours_are_asked_for_again() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    shown(&daemon, &["neigh", "flush", "--device", "siw0"]);
    ping(&a, &b);
    let wrong = ["neigh", "add", "10.77.0.2", "--lladdr", "02:00:00:00:00:99"];
    shown(&daemon, &[&wrong[..], &["--device", "siw0"]].concat());
    shown(&daemon, &["neigh", "flush", "--device", "siw0"]);
    ping(&a, &b);
    let (c, d) = pair(&daemon, 4096);
    ping(&c, &d);
    let error = refused(&daemon, &["neigh", "flush", "--device", "siw9"]);
    assert!(error.contains("no device \"siw9\""), "{error}");
}
