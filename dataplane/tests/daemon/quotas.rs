//! Limits of one client or one user, and the share that remains for others.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::*;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use siw::{
    Arena, CONTROLLED_QKEY, CmChannel, CmEvent, CmListener, CompletionChannel, ConnectOptions,
    Context, Error,
};
use siw_shm::control::messages as m;
use siw_shm::control::{CallError, ControlSocket};

/// A user that owns nothing.
const NOBODY: u32 = 65_534;

fn with_limits(limits: &str) -> Daemon {
    Daemon::start(&format!("{LOOPBACK}[limits]\n{limits}\n"), &[])
}

/// Creates objects until one is refused; returns the objects and the reason of the refusal.
fn until_refused<T>(mut make: impl FnMut() -> Result<T, Error>) -> (Vec<T>, String) {
    let mut all = Vec::new();
    loop {
        match make() {
            Ok(one) => all.push(one),
            Err(error) => return (all, error.to_string()),
        }
        assert!(all.len() < 10_000, "nothing is refused");
    }
}

#[test]
fn a_thousand_clients_live_side_by_side() {
    const CLIENTS: usize = 1000;
    const FILES: u64 = 16_000;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    // Root may raise the hard limit too.
    let files = hard.max(FILES);
    if setrlimit(Resource::RLIMIT_NOFILE, files, files).is_err() {
        println!("skipped: this process may open {hard} files, {FILES} are needed");
        return;
    }
    let d = Daemon::loopback();
    let all: Vec<End> = (0..CLIENTS).map(|_| End::new(&d.context(), 4096)).collect();
    let to = "10.77.0.2:0".parse().unwrap();
    for (a, b) in [(0, CLIENTS - 1), (CLIENTS / 2, 1)] {
        connect(&all[a], &all[b], "siw0", to);
        ping(&all[a], &all[b]);
    }
}

#[test]
fn each_limit_names_its_key_and_gives_back_what_is_gone() {
    let d = with_limits(
        "descriptors_per_client = 30\nlisteners_per_client = 3\nevent_channels_per_client = 5\n\
         memory_per_client = \"8704 KiB\"",
    );
    let (a, b) = (End::new(&d.context(), 4096), End::new(&d.context(), 4096));
    connect(&a, &b, "siw0", "10.77.0.2:0".parse().unwrap());
    let greedy = d.context();
    for _ in 0..2 {
        let (channels, why) = until_refused(|| CmChannel::new(&greedy));
        assert_eq!(channels.len(), 5, "{why}");
        assert!(why.contains("[limits] event_channels_per_client"), "{why}");
        let any = "10.77.0.1:0".parse().unwrap();
        let (listeners, why) = until_refused(|| CmListener::new(&channels[0], None, any, 4, 0));
        assert_eq!(listeners.len(), 3, "{why}");
        assert!(why.contains("[limits] listeners_per_client"), "{why}");
        drop((listeners, channels));
        let (channels, why) = until_refused(|| CompletionChannel::new(&greedy));
        assert_eq!(channels.len(), 5, "{why}");
        drop(channels);
        // Its doorbells use the rest.
        let (arenas, why) = until_refused(|| Arena::alloc(&greedy, 1 << 20, false));
        assert_eq!(arenas.len(), 8, "{why}");
        assert!(why.contains("[limits] memory_per_client"), "{why}");
        drop(arenas);
        let (arenas, why) = until_refused(|| Arena::alloc(&greedy, 4096, false));
        assert!((20..30).contains(&arenas.len()), "{why}");
        assert!(why.contains("[limits] descriptors_per_client"), "{why}");
        ping(&a, &b);
    }
}

#[test]
fn connections_of_a_user_are_bounded_and_free_again() {
    let d = with_limits("connections_per_user = 4");
    let server = End::new(&d.context(), 4096);
    let any = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new(&server.cm, None, any, 16, 0).unwrap();
    let client = d.context();
    for _ in 0..2 {
        let (ends, why) = until_refused(|| {
            let end = End::new(&client, 64);
            let to = listener.local_addr();
            end.qp.connect(&end.cm, to, &ConnectOptions::default())?;
            Ok(end)
        });
        assert_eq!(ends.len(), 4, "{why}");
        assert!(why.contains("[limits] connections_per_user"), "{why}");
        drop(ends);
    }
}

/// Each connection occupies a slot of the device, which others need as well.
#[test]
fn connections_that_nobody_accepts_are_bounded() {
    let d = with_limits("pending_connections_per_user = 4");
    let slow = End::new(&d.context(), 64);
    let any = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new(&slow.cm, None, any, 64, 0).unwrap();
    let to = listener.local_addr();
    let caller = d.context();
    let connect = || {
        let end = End::new(&caller, 64);
        let started = end.qp.connect(&end.cm, to, &ConnectOptions::default());
        started.map(|()| end).unwrap()
    };
    let waiting: Vec<End> = (0..4).map(|_| connect()).collect();
    let mut requests = Vec::new();
    for _ in &waiting {
        match slow.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::ConnectRequest(request) => requests.push(request),
            other => panic!("{other:?}"),
        }
    }
    let late = connect();
    match late.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::ConnectError(info) => assert_eq!(info.errno, nix::libc::ECONNRESET),
        other => panic!("{other:?}"),
    }
    // After the answer to one request, another may wait.
    requests.pop().unwrap().reject(b"").unwrap();
    let next = connect();
    match slow.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::ConnectRequest(request) => {
            let accepted = request.accept(&slow.qp, None, &ConnectOptions::default());
            accepted.unwrap();
        }
        other => panic!("{other:?}"),
    }
    match next.cm.get_event(Some(PATIENCE)).unwrap() {
        CmEvent::Established(_) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_of_all_clients_is_one_sum() {
    let d = with_limits("memory = \"25 MiB\"\nmemory_per_user = \"64 MiB\"");
    let (first, second) = (d.context(), d.context());
    let _large = Arena::alloc(&second, 12 << 20, false).unwrap();
    let held = Arena::alloc(&first, 10 << 20, false).unwrap();
    let refused = Arena::alloc(&second, 4 << 20, false)
        .err()
        .unwrap()
        .to_string();
    assert!(refused.contains("see [limits] memory ("), "{refused}");
    // The client's memory is freed soon after its end.
    drop((held, first));
    let end = Instant::now() + PATIENCE;
    while Arena::alloc(&second, 4 << 20, false).is_err() {
        assert!(
            Instant::now() < end,
            "the memory of a closed client is not freed"
        );
    }
}

/// Runs this test binary as a process of another user with the given `task`. Prints a message and
/// returns `None` when that is not possible here.
fn other_user(d: &Daemon, task: &str, gid: u32) -> Option<Child> {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return None;
    }
    // A copy, because another user may be unable to reach the build folder.
    let program = d.dir.path().join("another-user");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    for path in [d.dir.path(), &d.socket, &program] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    }
    let started = Command::new(&program)
        .args([
            "--exact",
            "quotas::helper_of_another_user",
            "--include-ignored",
            "--nocapture",
        ])
        .env("SIW_TEST_SOCKET", &d.socket)
        .env("SIW_TEST_TASK", task)
        .uid(NOBODY)
        .gid(gid)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    match started {
        Ok(child) => Some(child),
        Err(error) => {
            println!("skipped: another user cannot run this test: {error}");
            None
        }
    }
}

/// The output of the other user's process.
fn said_by(child: &mut Child) -> String {
    let mut reader = BufReader::new(child.stdout.take().unwrap());
    let mut lines = reader.by_ref().lines();
    let found = lines.find_map(|line| Some(line.ok()?.strip_prefix("said: ")?.to_owned()));
    // Kept open, because the process prints more before it ends.
    child.stdout = Some(reader.into_inner());
    found.expect("the other user's process failed")
}

#[test]
#[ignore = "a process for the tests below"]
fn helper_of_another_user() {
    let Ok(socket) = std::env::var("SIW_TEST_SOCKET") else {
        return;
    };
    let open = || Context::open(Some(socket.as_ref()));
    let task = std::env::var("SIW_TEST_TASK").unwrap();
    match task.as_str() {
        "clients" => {
            let (all, why) = until_refused(open);
            println!("\nsaid: {} {why}", all.len());
            // Waits until the other process kills this one.
            let _ = std::io::stdin().read(&mut [0]);
        }
        "connections" => {
            let server = End::new(&open().unwrap(), 64);
            let any = "10.77.0.2:0".parse().unwrap();
            let listener = CmListener::new(&server.cm, None, any, 8, 0).unwrap();
            let client = open().unwrap();
            let mut ends = Vec::new();
            let why = loop {
                let (end, accepted) = (End::new(&client, 64), server.another());
                let to = listener.local_addr();
                let options = ConnectOptions::default();
                end.qp.connect(&end.cm, to, &options).unwrap();
                // Refused before a request arrives, or accepted.
                match end.cm.get_event(Some(Duration::from_millis(100))) {
                    Ok(CmEvent::ConnectError(info)) => {
                        break format!("{} {}", info.errno, info.reason);
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(_) => {}
                }
                loop {
                    match server.cm.get_event(Some(PATIENCE)).unwrap() {
                        CmEvent::ConnectRequest(request) => {
                            let accepted = &accepted.qp;
                            request.accept(accepted, None, &options).unwrap();
                            break;
                        }
                        // The accepted end of the connection before.
                        CmEvent::Established(_) => {}
                        other => panic!("{other:?}"),
                    }
                }
                match end.cm.get_event(Some(PATIENCE)).unwrap() {
                    CmEvent::Established(_) => ends.push((end, accepted)),
                    other => panic!("{other:?}"),
                }
            };
            println!("\nsaid: {} {why}", ends.len());
            let _ = std::io::stdin().read(&mut [0]);
        }
        "statistics" => println!("\nsaid: {}", open().unwrap().read_stats().unwrap()),
        "controlled Q_Key" => {
            let end = End::new(&open().unwrap(), 64);
            let refused = end.qp.start_datagrams(0, 1 | CONTROLLED_QKEY).unwrap_err();
            end.qp.start_datagrams(0, 1).unwrap();
            let changed = end.qp.start_datagrams(0, CONTROLLED_QKEY).unwrap_err();
            println!("\nsaid: {} {} {refused}", refused.errno(), changed.errno());
        }
        "neighbours" => {
            let clients: Vec<Context> = (0..3).map(|_| open().unwrap()).collect();
            let mut asking = Vec::new();
            let mut refused = Vec::new();
            for (client, may_ask) in clients.iter().zip([2, 1, 0]) {
                for place in 0..4 {
                    let end = End::new(client, 64);
                    let host = 100 + asking.len();
                    let to = format!("10.77.0.{host}:1").parse().unwrap();
                    let options = ConnectOptions::default();
                    end.qp.connect(&end.cm, to, &options).unwrap();
                    if place >= may_ask {
                        refused.push(why_not_connected(&end));
                    }
                    asking.push(end);
                }
            }
            println!("\nsaid: {}", refused.join(" | "));
            let _ = std::io::stdin().read(&mut [0]);
        }
        other => panic!("{other}"),
    }
}

/// The errno and reason of a failed connect.
fn why_not_connected(end: &End) -> String {
    match end.cm.get_event(Some(PATIENCE)) {
        Ok(CmEvent::ConnectError(info)) => format!("{} {}", info.errno, info.reason),
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_operators_set_controlled_q_keys() {
    let d = Daemon::loopback();
    let Some(mut child) = other_user(&d, "controlled Q_Key", NOBODY) else {
        return;
    };
    let said = said_by(&mut child);
    let eperm = nix::libc::EPERM;
    assert!(said.starts_with(&format!("{eperm} {eperm} ")), "{said}");
    assert!(said.contains("only operators may set it"), "{said}");
    child.wait().unwrap();
    let end = End::new(&d.context(), 64);
    end.qp.start_datagrams(0, CONTROLLED_QKEY).unwrap();
}

/// One client may wait for two address resolutions, one user for three. The table has room for
/// eight entries, and none of them times out during this test.
#[test]
fn a_user_that_asks_for_silent_neighbours_leaves_others_the_table() {
    let table = "[device.neighbours]\nentries = 8\nretransmit_ms = 60000\n\
                 unresolved_per_client = 2\nunresolved_per_user = 3\n";
    let second = "[[device]]\nname = \"siw1\"";
    let config = LOOPBACK.replace(second, &format!("{table}{second}"));
    let d = Daemon::start(&config, &[]);
    let Some(mut child) = other_user(&d, "neighbours", NOBODY) else {
        return;
    };
    let said = said_by(&mut child);
    let refused: Vec<&str> = said.split(" | ").collect();
    assert_eq!(refused.len(), 9, "{said}");
    let errno = format!("{} ", nix::libc::ENOBUFS);
    assert!(refused.iter().all(|why| why.starts_with(&errno)), "{said}");
    assert!(refused[0].contains("unresolved_per_client"), "{said}");
    assert!(refused[8].contains("unresolved_per_user"), "{said}");
    // The table has room for the honest user's request and its answer.
    let (a, b) = pair(&d, 4096);
    ping(&a, &b);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_user_that_takes_all_clients_leaves_others_theirs() {
    let d = with_limits("clients = 8\nclients_per_user = 4");
    let Some(mut child) = other_user(&d, "clients", NOBODY) else {
        return;
    };
    let said = said_by(&mut child);
    assert!(said.starts_with("4 "), "{said}");
    assert!(said.contains("[limits] clients_per_user"), "{said}");
    let mine = [d.context(), d.context()];
    for context in &mine {
        context.alloc_pd().unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The last eighth of a worker's connections is kept for others.
#[test]
fn a_user_that_takes_all_connections_leaves_others_theirs() {
    let d = with_limits("connections = 32\nconnections_per_user = 100");
    let Some(mut child) = other_user(&d, "connections", NOBODY) else {
        return;
    };
    let said = said_by(&mut child);
    // Both ends of each are on one device.
    let start = format!("14 {} ", nix::libc::ENOBUFS);
    assert!(said.starts_with(&start), "{said}");
    assert!(said.contains("kept for operators"), "{said}");
    let (a, b) = pair(&d, 4096);
    ping(&a, &b);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_client_sees_its_own_counters_and_names_alone() {
    let group = nix::unistd::Group::from_gid(1.into()).unwrap().unwrap();
    let operators = format!("[control]\noperators = \"{}\"\n", group.name);
    let d = Daemon::start(&format!("{LOOPBACK}{operators}"), &[]);
    let _other = End::new(&d.context(), 4096);
    for (gid, is_operator) in [(NOBODY, false), (1, true)] {
        let Some(mut child) = other_user(&d, "statistics", gid) else {
            return;
        };
        let stats: serde_json::Value = serde_json::from_str(&said_by(&mut child)).unwrap();
        let clients = stats["clients"].as_array().unwrap();
        let pid = child.id();
        assert!(clients.iter().any(|client| client["pid"] == pid));
        if is_operator {
            assert_eq!(stats["scope"], "all");
            assert!(clients.len() > 1 && stats["workers"][0]["iterations"].is_u64());
            let device = &stats["settings"]["devices"][0];
            assert_eq!(
                (&device["device"], &device["tso"]),
                (&"siw0".into(), &true.into())
            );
        } else {
            assert_eq!((clients.len(), &stats["scope"]), (1, &"client".into()));
            assert!(stats["workers"].is_null() && stats["total"].is_null());
            assert!(stats["settings"].is_null());
            assert!(clients[0]["quotas"]["queue pairs"]["user_limit"].is_u64());
        }
        child.wait().unwrap();
    }
    // The daemon's own user also sees everything.
    let stats: serde_json::Value =
        serde_json::from_str(&d.context().read_stats().unwrap()).unwrap();
    assert!(stats["clients"].as_array().unwrap().len() >= 2);
}

#[test]
fn a_connection_that_says_nothing_is_closed_in_words() {
    let d = Daemon::start(
        &format!("{LOOPBACK}[control]\nhello_timeout_ms = 50\n"),
        &[],
    );
    let (a, b) = pair(&d, 4096);
    let silent = ControlSocket::connect_to(&d.socket).unwrap();
    let packet = silent.recv_packet().unwrap().bytes;
    match siw_shm::control::codec::decode_reply::<m::ClientHello>(0, &packet) {
        Err(CallError::Refused { errno, reason }) => {
            assert_eq!(errno, nix::libc::ETIMEDOUT);
            assert!(reason.contains("HELLO"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(silent.recv_packet().is_err());
    // A client that has sent HELLO may be silent for any time.
    ping(&a, &b);
    a.ctx.query_devices().unwrap();
}

/// Processor time of a process's main thread, in clock ticks.
fn main_thread_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn limit_files(pid: u32, most: u64) -> bool {
    let done = Command::new("prlimit")
        .arg(format!("--pid={pid}"))
        .arg(format!("--nofile={most}:"))
        .status();
    done.is_ok_and(|status| status.success())
}

#[test]
fn a_daemon_without_descriptors_serves_its_clients_and_does_not_spin() {
    const WATCHED: Duration = Duration::from_millis(400);
    let d = Daemon::loopback();
    let (a, b) = pair(&d, 4096);
    let pid = d.child.id();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count() as u64;
    if !limit_files(pid, open) {
        println!("skipped: prlimit is missing, or refuses");
        return;
    }
    let late = ControlSocket::connect_to(&d.socket).unwrap();
    a.ctx.query_devices().unwrap();
    let before = main_thread_ticks(pid);
    std::thread::sleep(WATCHED);
    // A tick is 10 ms; a spinning thread would use 40.
    assert!(
        main_thread_ticks(pid) - before < 10,
        "the control thread spins"
    );
    ping(&a, &b);
    a.ctx.query_devices().unwrap();
    assert!(limit_files(pid, open + 100));
    let (reply, _fds) = late
        .call_and_wait(1, &m::ClientHello::new("late"), &[])
        .unwrap();
    assert!(reply.n_workers > 0);
}

#[test]
fn the_daemon_may_open_as_many_files_as_the_hard_limit_allows() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = daemon_command(dir.path(), LOOPBACK, &[]);
    let mut limited = Command::new("prlimit");
    limited.arg("--nofile=256:3000").arg(command.get_program());
    limited.args(command.get_args());
    command = limited;
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(child) = child else {
        println!("skipped: prlimit is missing");
        return;
    };
    let d = Daemon::wait_ready(dir, child);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", d.child.id())).unwrap();
    let files = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .unwrap();
    let soft = files.split_whitespace().nth(3).unwrap();
    assert_eq!(soft, "3000", "{files}");
}

/// The client requests connections that are refused and never reads the events.
#[test]
fn a_client_that_reads_no_events_ends_at_its_limit() {
    let d = with_limits("events_per_client = 64");
    let (a, b) = pair(&d, 4096);
    let deaf = End::new(&d.context(), 64);
    let nobody = "10.77.0.2:9".parse().unwrap();
    let options = ConnectOptions::default();
    let mut asked = 0;
    let end = Instant::now() + PATIENCE;
    let closed = loop {
        let qp = deaf
            .pd
            .create_qp(&deaf.cq, &deaf.cq, &siw::QpInit::default());
        match qp.and_then(|qp| qp.connect(&deaf.cm, nobody, &options)) {
            Ok(()) => asked += 1,
            Err(error) => break error,
        }
        assert!(
            asked < 20_000 && Instant::now() < end,
            "its events have no bound"
        );
    };
    assert!(matches!(closed, Error::DaemonGone), "{closed}");
    let event = deaf.ctx.get_async_event(Some(PATIENCE)).unwrap();
    assert!(event.reason.contains("events_per_client"), "{event:?}");
    ping(&a, &b);
}

/// Peers of a listener whose application reads no events are rejected instead of waiting.
#[test]
fn peers_of_a_client_that_reads_no_events_are_rejected() {
    let d = with_limits("events_per_client = 16");
    let deaf = End::new(&d.context(), 64);
    let any = "10.77.0.2:0".parse().unwrap();
    let listener = CmListener::new(&deaf.cm, None, any, 1024, 0).unwrap();
    let caller = d.context();
    let mut waiting = Vec::new();
    let end = Instant::now() + PATIENCE;
    loop {
        let one = End::new(&caller, 64);
        let to = listener.local_addr();
        one.qp
            .connect(&one.cm, to, &ConnectOptions::default())
            .unwrap();
        // The rejection of this connect or an earlier one.
        let rejected = waiting.iter().chain([&one]).any(|one: &End| {
            matches!(
                one.cm.get_event(Some(Duration::ZERO)),
                Ok(CmEvent::Rejected(_))
            )
        });
        waiting.push(one);
        if rejected {
            break;
        }
        assert!(Instant::now() < end, "no connection is rejected");
    }
    drop(waiting);
    assert!(deaf.ctx.is_alive(), "peers cannot end the client");
}
