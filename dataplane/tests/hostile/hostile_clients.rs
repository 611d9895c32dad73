//! Honest clients alongside hostile ones: the honest ones lose no data, and no resources of the
//! hostile ones remain.
//!
//! The attacks are in `hostile_client/`, a separate program that depends on the ABI crate only.
//! `./benches/figures trust` measures the share of its throughput that an honest client keeps; the
//! tests here require only progress.

use crate::common::*;
use nix::libc;
use siw::{Context, SendData, SendWr, WcStatus};
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Duration of each attack: short, unless the environment sets a longer one.
fn attack_time() -> Duration {
    let seconds = std::env::var("SIW_ATTACK_SECONDS").ok();
    let seconds = seconds.map(|text| text.parse().expect("SIW_ATTACK_SECONDS: a number"));
    Duration::from_secs_f64(seconds.unwrap_or(0.5))
}

/// Size of the honest client's transfers in bytes.
const MESSAGE: usize = 4096;

/// A running attack program.
struct Hostile {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Hostile {
    fn start(daemon: &Daemon, kind: &str) -> Hostile {
        let mut command = Command::new(hostile_client());
        command.arg(kind).arg(&daemon.socket);
        command.arg(attack_time().as_secs_f64().to_string());
        // Objects of the kinds that have many: as few as a short attack can make, unless set.
        if let Ok(count) = std::env::var("SIW_ATTACK_COUNT") {
            command.args(["1", &count]);
        }
        Hostile::spawn(&mut command)
    }

    fn spawn(command: &mut Command) -> Hostile {
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "attacking", "the attack did not begin");
        Hostile { child, stdout }
    }

    /// Waits for its end and returns its report.
    fn finish(mut self) -> String {
        let mut report = String::new();
        self.stdout.read_to_string(&mut report).unwrap();
        assert!(wait(&mut self.child).success());
        report.trim().to_owned()
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Times of transfers.
struct Times {
    /// The first ones, in their order.
    first: Vec<Duration>,
    longest: Duration,
}

impl Times {
    /// Median and 99th percentile of the transfers with these numbers.
    fn percentiles(&self, numbers: Range<u64>) -> [Duration; 2] {
        let end = self.first.len().min(numbers.end as usize);
        let mut times = self.first[end.min(numbers.start as usize)..end].to_vec();
        times.sort_unstable();
        let at = |share: usize| times.get(times.len() * share / 100);
        [50, 99].map(|share| at(share).copied().unwrap_or_default())
    }
}

/// Performs WRITEs of a pattern until `stop`, checks each of them, and counts them in `transfers`.
/// Returns the times that they took.
fn transfer_until(ends: &(End, End), stop: &AtomicBool, transfers: &AtomicU64) -> Times {
    /// Transfers whose times are kept.
    const KEPT: usize = 1 << 20;
    let (from, to) = ends;
    let mut times = Times {
        first: Vec::with_capacity(KEPT),
        longest: Duration::ZERO,
    };
    let sges = [from.mr.sge(0, MESSAGE)];
    let request = SendWr::write(1, SendData::Sges(&sges), to.mr.addr(), to.mr.rkey());
    let mut seed = 1;
    while !stop.load(Ordering::Relaxed) {
        seed += 1;
        if seed % 64 == 0 {
            from.fill(seed);
        }
        let posted = Instant::now();
        from.qp.post_send(&[request]).unwrap();
        assert_eq!(from.wc().status, WcStatus::SUCCESS);
        let time = posted.elapsed();
        times.longest = times.longest.max(time);
        if times.first.len() < KEPT {
            times.first.push(time);
        }
        if seed % 64 == 0 {
            assert_eq!(to.read(0, MESSAGE), from.read(0, MESSAGE));
        }
        transfers.fetch_add(1, Ordering::Relaxed);
    }
    times
}

/// Longest batch of a worker since the daemon's start, in processor time.
fn longest_batch(ctx: &Context) -> Duration {
    let stats: serde_json::Value = serde_json::from_str(&ctx.read_stats().unwrap()).unwrap();
    let workers = stats["workers"].as_array().unwrap().iter();
    let longest = workers.map(|worker| worker["longest_batch_ns"].as_u64().unwrap());
    Duration::from_nanos(longest.max().unwrap())
}

/// Ends the honest client's transfers, also when the test fails before it asks for that.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Number of open descriptors of the daemon.
fn descriptors(daemon: &Daemon) -> usize {
    let folder = format!("/proc/{}/fd", daemon.child.id());
    std::fs::read_dir(folder).unwrap().count()
}

/// Waits until the daemon has at most `before` descriptors.
fn wait_for_descriptors(daemon: &Daemon, before: usize) {
    let end = Instant::now() + PATIENCE;
    while descriptors(daemon) > before {
        assert!(
            Instant::now() < end,
            "{} descriptors, {before} before",
            descriptors(daemon)
        );
        std::thread::yield_now();
    }
}

/// Transfers a message between two new clients.
fn exchange_once(daemon: &Daemon) {
    let (from, to) = pair(daemon, MESSAGE);
    from.fill(9);
    let sges = [from.mr.sge(0, MESSAGE)];
    let request = SendWr::write(1, SendData::Sges(&sges), to.mr.addr(), to.mr.rkey());
    from.qp.post_send(&[request]).unwrap();
    assert_eq!(from.wc().status, WcStatus::SUCCESS);
    assert_eq!(to.read(0, MESSAGE), from.read(0, MESSAGE));
}

/// Runs `attack` beside the transfers of an honest client: new clients are served before and after it,
/// and the daemon returns to its former state. The attack gets the number of transfers so far, and
/// whether the honest client still runs. Returns the times of the transfers, and the longest batch of a
/// worker.
fn attack_beside_transfers(
    daemon: Daemon,
    attack: impl FnOnce(&Daemon, &AtomicU64, &dyn Fn() -> bool),
) -> (Times, Duration) {
    exchange_once(&daemon);
    let ends = pair(&daemon, MESSAGE);
    let before = descriptors(&daemon);
    let (stop, transfers) = (AtomicBool::new(false), AtomicU64::new(0));
    let times = std::thread::scope(|scope| {
        let stopping = StopOnDrop(&stop);
        let honest = scope.spawn(|| transfer_until(&ends, &stop, &transfers));
        attack(&daemon, &transfers, &|| !honest.is_finished());
        drop(stopping);
        honest.join().unwrap()
    });
    let batch = longest_batch(&ends.0.ctx);
    println!("longest stall {:?}, longest batch {batch:?}", times.longest);
    // Clients of the same user are refused while the attacker's descriptors are being closed.
    wait_for_descriptors(&daemon, before);
    exchange_once(&daemon);
    wait_for_descriptors(&daemon, before);
    assert!(daemon.stop().success());
    (times, batch)
}

/// An honest client makes progress beside an attack of this kind. Returns its longest stall, and the
/// longest batch of a worker.
fn stays_honest_beside(kind: &str) -> (Duration, Duration) {
    stays_honest_with(LOOPBACK, kind)
}

fn stays_honest_with(config: &str, kind: &str) -> (Duration, Duration) {
    // Built before the measurement.
    hostile_client();
    let daemon = Daemon::start(config, &[]);
    let (mut alone_numbers, mut beside_numbers) = (0..0, 0..0);
    let (times, batch) = attack_beside_transfers(daemon, |daemon, transfers, is_running| {
        let measure = |during: Duration| {
            let (start, begin) = (transfers.load(Ordering::Relaxed), Instant::now());
            while begin.elapsed() < during && is_running() {
                std::thread::yield_now();
            }
            let end = transfers.load(Ordering::Relaxed);
            let rate = (end - start) as f64 / begin.elapsed().as_secs_f64();
            (rate, start..end)
        };
        let (alone, numbers) = measure(Duration::from_millis(100));
        alone_numbers = numbers;
        let hostile = Hostile::start(daemon, kind);
        let (beside, numbers) = measure(attack_time() * 3 / 4);
        beside_numbers = numbers;
        let report = hostile.finish();
        println!("{kind}: {alone:.0}/s alone, {beside:.0}/s during {report}");
        assert!(beside > 0.0, "{kind}: the honest client came to a halt");
    });
    let [alone, _] = times.percentiles(alone_numbers);
    let [p50, p99] = times.percentiles(beside_numbers);
    println!("{kind}: p50 {alone:?} alone, {p50:?} during the attack, p99 {p99:?}");
    (times.longest, batch)
}

/// Page faults of workers wait for no client.
#[test]
fn holes_that_take_long_stop_nobody() {
    /// Longest stall of the honest client.
    const LONGEST: Duration = Duration::from_millis(20);
    const ATTEMPTS: usize = 5;
    let (mut beside_holes, mut beside_work) = (Duration::MAX, Duration::MAX);
    for _ in 0..ATTEMPTS {
        beside_holes = beside_holes.min(stays_honest_beside(SLOW_HOLES).0);
        if beside_holes < LONGEST {
            return;
        }
        // A busy machine stalls clients, too.
        beside_work = beside_work.min(stays_honest_beside("own-holes").0);
    }
    assert!(
        beside_holes < beside_work * 2,
        "holes stall the honest client for {beside_holes:?}, and other work for {beside_work:?}"
    );
}

const SLOW_HOLES: &str = "slow-holes";

/// [`LOOPBACK`] with two workers.
fn two_workers() -> String {
    let config = LOOPBACK.replacen("[workers]", "[workers]\ncores = [0, 1]", 1);
    config.replacen("buffers = 4096", "buffers = 16384", 1)
}

#[test]
fn memory_taken_away_in_flight_stops_nobody_on_two_workers() {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if processors < 2 {
        println!("skipped: two workers need two processors");
        return;
    }
    stays_honest_with(&two_workers(), "dereg-in-flight");
}

macro_rules! attacks {
    ($($test:ident: $kind:literal;)*) => {
        /// All kinds that run until they are stopped.
        const KINDS: &[&str] =
            &[SLOW_HOLES, PARKED_SENDS, MASS_DEPARTURE, SLOW_FILES, $($kind),*];

        $(#[test]
        fn $test() {
            stays_honest_beside($kind);
        })*
    };
}

/// SENDs wait for receive requests: without `receive_wait_ms` they end their connections.
#[test]
fn sends_that_nobody_receives_stop_nobody() {
    let waits = "[device.mpa]\nreceive_wait_ms = 60000\n";
    stays_honest_with(&format!("{LOOPBACK}{waits}"), PARKED_SENDS);
}

const PARKED_SENDS: &str = "parked-sends";

/// A batch removes some of the queue pairs of a client that is gone.
#[test]
fn clients_that_leave_many_connected_queue_pairs_stop_nobody() {
    /// Longest batch: some milliseconds are the first access to a transparent huge page, for which the
    /// host of a virtual machine may have no memory yet (see `daemon/turn_times.rs`). `./benches/figures
    /// trust` has the floor of siwd's own work.
    const LONGEST: Duration = Duration::from_millis(20);
    let (_, batch) = stays_honest_beside(MASS_DEPARTURE);
    assert!(batch <= LONGEST, "a batch took {batch:?}");
}

const MASS_DEPARTURE: &str = "mass-departure";

/// Reason to skip tests with a FUSE file system.
fn lacks_fuse() -> Option<String> {
    let opened = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse");
    opened.err().map(|error| format!("/dev/fuse: {error}"))
}

#[test]
fn files_that_never_close_stop_nobody() {
    match lacks_fuse() {
        Some(reason) => println!("skipped: {reason}"),
        None => drop(stays_honest_beside(SLOW_FILES)),
    }
}

const SLOW_FILES: &str = "slow-files";

/// Lets all users use the daemon. Returns the attack's program where they can run it.
fn open_to_all_users(daemon: &Daemon) -> PathBuf {
    // A copy, because another user may be unable to reach the build folder.
    let program = daemon.dir.path().join("hostile-client");
    std::fs::copy(hostile_client(), &program).unwrap();
    for path in [daemon.dir.path(), &daemon.socket, &program] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    }
    program
}

/// True if a thread that frees things for clients is in the system call close.
fn hangs_in_a_close(daemon: &Daemon) -> bool {
    let tasks = format!("/proc/{}/task", daemon.child.id());
    std::fs::read_dir(tasks).unwrap().flatten().any(|task| {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let call = read("syscall");
        let call = call.split(' ').next().unwrap_or_default();
        read("comm").trim() == "siwd-disposal" && call == libc::SYS_close.to_string()
    })
}

/// Mappings of arenas in the daemon, and descriptors of arenas in all tables of its threads.
fn arena_references(daemon: &Daemon) -> usize {
    const ARENA: &str = "memfd:siwd-arena";
    let process = format!("/proc/{}", daemon.child.id());
    let maps = std::fs::read_to_string(format!("{process}/maps")).unwrap();
    let mappings = maps.lines().filter(|line| line.contains(ARENA)).count();
    let tasks = std::fs::read_dir(format!("{process}/task"))
        .unwrap()
        .flatten();
    let tables = tasks.filter_map(|task| std::fs::read_dir(task.path().join("fd")).ok());
    let is_arena = |file: &PathBuf| file.to_string_lossy().contains(ARENA);
    let files =
        tables.flat_map(|table| table.flatten().filter_map(|fd| fd.path().read_link().ok()));
    mappings + files.filter(is_arena).count()
}

#[test]
fn files_that_never_close_keep_no_memory_of_another_user() {
    if let Some(reason) = lacks_fuse() {
        println!("skipped: {reason}");
        return;
    }
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let daemon = Daemon::loopback();
    let program = open_to_all_users(&daemon);
    let wait_until = |condition: &dyn Fn() -> bool, failure: &str| {
        let end = Instant::now() + PATIENCE;
        while !condition() {
            assert!(Instant::now() < end, "{failure}");
            std::thread::yield_now();
        }
    };
    let before = arena_references(&daemon);
    let context = daemon.context();
    let honest = End::new(&context, 64 << 20);
    honest.fill(1);
    assert!(arena_references(&daemon) > before);
    // Longer than the test waits.
    let mut command = Command::new(&program);
    command.args([
        SLOW_FILES.as_ref(),
        daemon.socket.as_os_str(),
        "600".as_ref(),
    ]);
    command.uid(NOBODY).gid(NOBODY);
    let attack = Hostile::spawn(&mut command);
    wait_until(
        &|| hangs_in_a_close(&daemon),
        "each close of the attack ends",
    );
    drop((honest, context));
    let given_back = || arena_references(&daemon) <= before;
    wait_until(&given_back, "memory of a client that has left is kept");
    assert!(hangs_in_a_close(&daemon), "the attack is over");
    exchange_once(&daemon);
    wait_until(&given_back, "memory of a later client is kept");
    // Its end lets the closes end.
    drop(attack);
    assert!(daemon.stop().success());
}

/// A user that owns nothing.
const NOBODY: u32 = 65_534;

attacks! {
    wake_descriptors_made_blocking_stop_nobody: "blocking-wake";
    rings_that_are_always_full_stop_nobody: "full-rings";
    doorbells_without_end_stop_nobody: "doorbells";
    flushes_without_end_stop_nobody: "flush-loops";
    scribbled_rings_stop_nobody: "scribbled-rings";
    requests_beyond_the_queue_stop_nobody: "too-many-requests";
    holes_in_memory_stop_nobody: "punched-holes";
    long_holes_in_memory_stop_nobody: "long-holes";
    giant_arenas_stop_nobody: "giant-arenas";
    memory_taken_away_in_flight_stops_nobody: "dereg-in-flight";
    exhausted_descriptors_stop_nobody: "descriptors";
    a_socket_that_nobody_reads_stops_nobody: "slow-socket";
    events_that_nobody_reads_stop_nobody: "unread-events";
    floods_of_statistics_stop_nobody: "stats-flood";
    objects_made_and_destroyed_without_end_stop_nobody: "create-destroy";
    regions_of_thousands_of_extents_stop_nobody: "endless-extents";
    pairs_asked_for_without_end_stop_nobody: "endless-pairs";
    sockets_that_are_slow_to_close_stop_nobody: "lingering-sockets";
    a_flood_of_log_messages_stops_nobody: "log-flood";
    large_files_that_the_daemon_closes_stop_nobody: "large-imports";
    clients_that_leave_many_regions_stop_nobody: "departures";
    ports_bound_without_end_stop_nobody: "port-binds";
    clients_that_do_nothing_stop_nobody: "idle-clients";
    idle_queues_beside_connects_stop_nobody: "idle-queues-and-connects";
    regions_of_thousands_of_arenas_stop_nobody: "many-arenas";
    clients_that_come_and_go_stop_nobody: "clients-come-and-go";
}

/// Attacks of all kinds at once, each by one of three users, on two workers, beside an honest client of
/// one of the users. One round of attacks, unless `SIW_SOAK_SECONDS` sets a longer duration.
#[test]
fn all_attacks_at_once_leave_the_honest_client_its_data() {
    /// The user of kinds that take all that a user may hold: other kinds would be refused.
    const GREEDY: u32 = 65_533;
    /// Seconds of a round; then the attacks start again.
    const ROUND: f64 = 10.0;
    if let Some(reason) = two_cores() {
        println!("skipped: {reason}");
        return;
    }
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let seconds = std::env::var("SIW_SOAK_SECONDS").ok();
    let seconds = seconds.map(|text| text.parse().expect("SIW_SOAK_SECONDS: a number"));
    let daemon = Daemon::start(&two_workers(), &[]);
    let program = open_to_all_users(&daemon);
    attack_beside_transfers(daemon, |daemon, transfers, is_running| {
        let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(1));
        let mut seed = 0;
        while Instant::now() < end {
            let start = transfers.load(Ordering::Relaxed);
            let mut attacks: Vec<Child> = Vec::new();
            for (place, kind) in KINDS.iter().enumerate() {
                seed += 1;
                let uid = match *kind {
                    "descriptors" | "idle-clients" => GREEDY,
                    _ if place % 2 == 0 => 0,
                    _ => NOBODY,
                };
                let mut command = Command::new(&program);
                command.arg(kind).arg(&daemon.socket);
                command.args([ROUND.to_string(), seed.to_string()]);
                command.stdin(Stdio::null()).stdout(Stdio::null());
                // Thousands of refusals.
                command.stderr(Stdio::null());
                attacks.push(command.uid(uid).gid(uid).spawn().unwrap());
            }
            for mut attack in attacks {
                wait(&mut attack);
            }
            assert!(is_running(), "the honest client ended");
            let count = transfers.load(Ordering::Relaxed) - start;
            assert!(count > 0, "the honest client came to a halt");
        }
    });
}

/// Objects of the daemon, all clients together: clients, queue pairs, connections, regions.
fn objects(ctx: &Context) -> [u64; 4] {
    let text = ctx.read_stats().unwrap();
    let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
    let sum = |list: &str, value: &dyn Fn(&serde_json::Value) -> u64| {
        stats[list].as_array().unwrap().iter().map(value).sum()
    };
    [
        stats["clients"].as_array().unwrap().len() as u64,
        sum("workers", &|worker| worker["queue_pairs"].as_u64().unwrap()),
        sum("total", &|device| {
            device["mib"]["TcpCurrEstab"].as_u64().unwrap()
        }),
        sum("clients", &|client| {
            client["memory_regions"].as_u64().unwrap()
        }),
    ]
}

#[test]
fn clients_killed_at_random_points_leave_nothing() {
    /// Clients killed by each of two threads.
    const KILLS: u64 = 120;
    hostile_client();
    let daemon = Daemon::loopback();
    let ends = pair(&daemon, MESSAGE);
    let before = (objects(&ends.0.ctx), descriptors(&daemon));
    let (stop, transfers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let stopping = StopOnDrop(&stop);
        let honest = scope.spawn(|| transfer_until(&ends, &stop, &transfers));
        let killers: Vec<_> = (0..2)
            .map(|thread| {
                let socket = &daemon.socket;
                scope.spawn(move || {
                    for round in 0..KILLS {
                        // One round of a client takes some milliseconds; it repeats.
                        let micros = (round * 2 + thread) * 7919 % 30_000;
                        let ended = Command::new(hostile_client())
                            .arg("killed")
                            .arg(socket)
                            .arg(format!("{}", micros as f64 / 1e6))
                            .arg(format!("{round}"))
                            .stdin(Stdio::null())
                            .stdout(Stdio::null())
                            .stderr(Stdio::null())
                            .status()
                            .unwrap();
                        assert!(!ended.success(), "the client was not killed");
                    }
                })
            })
            .collect();
        for killer in killers {
            killer.join().unwrap();
        }
        drop(stopping);
        honest.join().unwrap();
    });
    assert!(transfers.load(Ordering::Relaxed) > 0);
    let end = Instant::now() + PATIENCE;
    loop {
        let now = (objects(&ends.0.ctx), descriptors(&daemon));
        if now == before {
            break;
        }
        assert!(Instant::now() < end, "{now:?}, {before:?} before");
        std::thread::yield_now();
    }
    assert!(daemon.stop().success());
}
