//! Unmodified programs that are killed at any moment, from the first millisecond on: the daemon
//! returns to its former state, no file is left in /tmp and /dev/shm, the program at the other end
//! exits with an error, and new programs work. `SIW_KILL_ROUNDS=n` runs more rounds,
//! `SIW_KILL_SEED=n` repeats the moments of a run.

use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::{Program, is_installed};
use crate::common::*;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Rounds of each kind of program.
const ROUNDS: u32 = 8;
/// By this time each program has long been transferring data.
const LATEST_KILL: Duration = Duration::from_millis(400);

fn rounds() -> u32 {
    let wanted = std::env::var("SIW_KILL_ROUNDS").ok();
    wanted.map_or(ROUNDS, |rounds| rounds.parse().unwrap())
}

/// Random kill times; early ones are as likely as late ones.
struct Moments(u64);

impl Moments {
    fn new() -> Moments {
        let given = std::env::var("SIW_KILL_SEED").ok();
        let seed = given.map_or_else(
            || u64::from(std::process::id()),
            |seed| seed.parse().unwrap(),
        );
        println!("SIW_KILL_SEED={seed}");
        Moments(seed)
    }

    fn draw(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn next(&mut self) -> Duration {
        let latest = LATEST_KILL.as_micros() as u64 >> (self.draw() % 6);
        Duration::from_micros(self.draw() % latest)
    }
}

/// Resources that the daemon holds for programs, and files that programs leave.
#[derive(Debug, PartialEq)]
struct Held {
    descriptors: usize,
    threads: usize,
    /// File-backed shared mappings: arenas, imported memory, rings.
    shared_mappings: usize,
    /// Clients other than the observer.
    clients: usize,
    listeners: u64,
    queue_pairs: u64,
    buffers_free: u64,
    /// Established connections of each device.
    established: Vec<u64>,
    users: serde_json::Value,
    huge_memory: String,
    files: BTreeSet<PathBuf>,
}

/// Folders in which programs may leave files.
const SHARED_FOLDERS: [&str; 2] = ["/tmp", "/dev/shm"];

/// Runs a test with private instances of the shared folders, so that they contain files of its own
/// daemon and programs only.
fn with_own_folders(test: impl FnOnce() + Send) {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: mounting empty folders needs root");
        return;
    }
    let built = Path::new(env!("CARGO_BIN_EXE_siwd"));
    if SHARED_FOLDERS
        .iter()
        .any(|folder| built.starts_with(folder))
    {
        println!(
            "skipped: {} lies in a folder that is mounted over",
            built.display()
        );
        return;
    }
    let mount = |arguments: &[&str]| {
        let status = std::process::Command::new("mount").args(arguments).status();
        assert!(status.unwrap().success(), "mount {arguments:?}");
    };
    let run = move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        mount(&["--make-rprivate", "/"]);
        for folder in SHARED_FOLDERS {
            mount(&["-t", "tmpfs", "tmpfs", folder]);
        }
        test();
    };
    // The mounts are private to this thread and its children.
    let ended = std::thread::scope(|scope| scope.spawn(run).join());
    if let Err(panic) = ended {
        std::panic::resume_unwind(panic);
    }
}

fn count_entries(folder: String) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn collect_files(folder: &Path, files: &mut BTreeSet<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_files(&entry.path(), files);
        }
        files.insert(entry.path());
    }
}

/// Takes a snapshot; `ctx` is a client that stays connected.
fn look(daemon: &Daemon, ctx: &siw::Context) -> Held {
    let pid = daemon.child.id();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let statistics: serde_json::Value = serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
    let workers = statistics["workers"].as_array().unwrap();
    let sum = |name: &str| {
        let each = workers.iter().map(|worker| worker[name].as_u64());
        each.map(Option::unwrap).sum()
    };
    let devices = statistics["total"].as_array().unwrap();
    let established = devices
        .iter()
        .map(|device| device["mib"]["TcpCurrEstab"].as_u64().unwrap());
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let huge_memory = status
        .lines()
        .find(|line| line.starts_with("HugetlbPages:"));
    let mut files = BTreeSet::new();
    for folder in SHARED_FOLDERS {
        collect_files(Path::new(folder), &mut files);
    }
    assert!(
        files.contains(daemon.dir.path()),
        "other folders: {files:?}"
    );
    Held {
        descriptors: count_entries(format!("/proc/{pid}/fd")),
        threads: count_entries(format!("/proc/{pid}/task")),
        shared_mappings: maps.matches("memfd:").count(),
        clients: statistics["clients"].as_array().unwrap().len() - 1,
        listeners: statistics["listeners"].as_u64().unwrap(),
        queue_pairs: sum("queue_pairs"),
        buffers_free: sum("buffers_free"),
        established: established.collect(),
        users: statistics["users"].clone(),
        huge_memory: huge_memory.unwrap_or_default().to_owned(),
        files,
    }
}

/// Waits until the daemon holds the same resources as before.
fn await_release(daemon: &Daemon, ctx: &siw::Context, before: &Held, what: &str) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = look(daemon, ctx);
        if now == *before {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{what}: left behind\nnow    {now:?}\nbefore {before:?}"
        );
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// Number of queue pairs of a process, according to the daemon.
fn queue_pairs_of(ctx: &siw::Context, pid: u32) -> u64 {
    let statistics: serde_json::Value = serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
    let clients = statistics["clients"].as_array().unwrap();
    let own = clients.iter().filter(|client| client["pid"] == pid);
    own.map(|client| client["queue_pairs"].as_u64().unwrap())
        .sum()
}

/// Waits for a program to end whose peer was killed. It must report an error; rping's exit code is
/// not reliable.
fn await_failure(program: Program, what: &str) {
    println!("waiting for the other end of {what}");
    let (status, said) = program.finish();
    let has_failed = !status.success() || said.contains("DISCONNECT");
    assert!(has_failed, "{what}: {status}, it said:\n{said}");
}

/// A server and a client that would run for ever.
struct Pair {
    server: String,
    client: String,
}

impl Pair {
    fn new(server: &str, client: &str) -> Pair {
        Pair {
            server: server.to_owned(),
            client: client.to_owned(),
        }
    }

    /// Kills one end at a random moment, and waits for the other.
    fn kill_one(&self, daemon: &Daemon, ctx: &siw::Context, moments: &mut Moments) {
        let (at, kills_client) = (moments.next(), moments.draw().is_multiple_of(2));
        let what = format!(
            "{}, {} killed after {at:?}",
            self.client,
            if kills_client { "client" } else { "server" }
        );
        // A client that starts too early is refused. In a quarter of the rounds the kill may hit
        // the start of the server.
        let mut server = Program::start(daemon, &self.server);
        let waits = !moments.draw().is_multiple_of(4);
        let deadline = Instant::now() + PATIENCE;
        while waits && look(daemon, ctx).listeners == 0 {
            assert!(Instant::now() < deadline, "{}: no listener", self.server);
        }
        let mut client = Program::start(daemon, &self.client);
        std::thread::sleep(at);
        if !kills_client {
            server.kill();
            await_failure(client, &what);
            return;
        }
        let was_connected = queue_pairs_of(ctx, server.id()) > 0;
        client.kill();
        if was_connected {
            await_failure(server, &what);
        } else {
            // The server may go on listening.
            server.kill();
        }
    }
}

fn kill_pairs(pair: &Pair) {
    with_own_folders(|| kill_pairs_of(&Daemon::loopback(), pair));
}

fn kill_pairs_of(daemon: &Daemon, pair: &Pair) {
    let mut moments = Moments::new();
    let ctx = daemon.context();
    // The first program makes siwrun create its links.
    Program::start(daemon, "true").succeed();
    let before = look(daemon, &ctx);
    for round in 0..rounds() {
        pair.kill_one(daemon, &ctx, &mut moments);
        let what = format!("{} in round {round}", pair.client);
        await_release(daemon, &ctx, &before, &what);
    }
    // New programs work.
    let (from, to) = crate::common::pair(daemon, 8192);
    ping(&from, &to);
}

#[test]
fn rping_can_be_killed_at_any_moment() {
    if is_installed("rping", "rdmacm-utils") {
        kill_pairs(&Pair::new(
            "rping -s -a 10.77.0.2",
            "rping -c -a 10.77.0.2 -S 4096 -V",
        ));
    }
}

#[test]
fn perftest_can_be_killed_at_any_moment() {
    if is_installed("ib_write_bw", "perftest") {
        let line = "ib_write_bw -d siw1 -R -F -n 100000000 -s 65536";
        kill_pairs(&Pair::new(line, &format!("{line} 10.77.0.2")));
    }
}

#[test]
fn users_of_arenas_can_be_killed_at_any_moment() {
    let program = siw_ping().display();
    let pair = Pair::new(
        &format!("{program} -s -a 10.77.0.2"),
        &format!("{program} -c -a 10.77.0.2 -S 65536"),
    );
    // With hugepages where some are free, and with normal pages.
    for hugepages in ["auto", "never"] {
        let config = LOOPBACK.replace("\"never\"", &format!("\"{hugepages}\""));
        with_own_folders(|| kill_pairs_of(&Daemon::start(&config, &[]), &pair));
    }
}

/// Registers memory of each kind repeatedly.
const REGISTRATIONS: &str = r#"
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#define CHECK(what) do { if (!(what)) { perror(#what); exit(1); } } while (0)
int main(int count, char **arguments)
{
    enum { SIZE = 1 << 20 };
    int protection = PROT_READ | PROT_WRITE, rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
    int shared = memfd_create("shared", 0);
    CHECK(pd && shared >= 0 && count == 2 && ftruncate(shared, SIZE) == 0);
    char on_stack[SIZE];
    for (int left = atoi(arguments[1]); left; left--) {
        char *kinds[3] = {
            mmap(NULL, SIZE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
            mmap(NULL, SIZE, protection, MAP_SHARED, shared, 0),
            on_stack,
        };
        struct ibv_mr *regions[3];
        for (int i = 0; i < 3; i++) {
            CHECK(kinds[i] != MAP_FAILED);
            kinds[i][(unsigned)left % SIZE] = 1;
            regions[i] = ibv_reg_mr(pd, kinds[i], SIZE, rights);
            CHECK(regions[i]);
        }
        if (arguments[1][0] == '1')
            pause();
        for (int i = 0; i < 3; i++)
            CHECK(ibv_dereg_mr(regions[i]) == 0 && (i == 2 || munmap(kinds[i], SIZE) == 0));
    }
    return 0;
}
"#;

#[test]
fn programs_that_register_can_be_killed_at_any_moment() {
    if can_compile() {
        with_own_folders(kill_programs_that_register);
    }
}

fn kill_programs_that_register() {
    let (daemon, mut moments) = (Daemon::loopback(), Moments::new());
    let ctx = daemon.context();
    let source = daemon.dir.path().join("register.c");
    std::fs::write(&source, REGISTRATIONS).unwrap();
    let (program, _) = compile(&daemon, &source);
    let before = look(&daemon, &ctx);
    // A client that runs longer shows that each method is used.
    let mut one = Program::start(&daemon, &format!("{} 1", program.display()));
    let deadline = Instant::now() + PATIENCE;
    let methods = ["remap", "shared", "copy"];
    while methods
        .iter()
        .any(|method| registered_bytes(&ctx, one.id(), method) < 1 << 20)
    {
        assert!(
            Instant::now() < deadline && !one.has_ended(),
            "not registered"
        );
    }
    one.kill();
    await_release(&daemon, &ctx, &before, "one that sleeps");
    for round in 0..rounds() {
        let at = moments.next();
        let mut some =
            [0, 1].map(|_| Program::start(&daemon, &format!("{} -1", program.display())));
        std::thread::sleep(at);
        for program in &mut some {
            assert!(!program.has_ended(), "{}", program.said());
            program.kill();
        }
        await_release(
            &daemon,
            &ctx,
            &before,
            &format!("round {round}, after {at:?}"),
        );
    }
    Program::start(&daemon, &format!("{} 2", program.display())).succeed();
}

fn registered_bytes(ctx: &siw::Context, pid: u32, method: &str) -> u64 {
    let statistics: serde_json::Value = serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
    let clients = statistics["clients"].as_array().unwrap();
    let own = clients.iter().filter(|client| client["pid"] == pid);
    own.map(|client| client["registered"]["bytes"][method].as_u64().unwrap())
        .sum()
}
