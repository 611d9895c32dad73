//! Every command of README.md's quick start and of the table of symptoms in deploy/README.md does what it
//! is there for. A command without a rule here fails, and so does a rule without its command.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::net::missing_program;
use crate::common::*;

const README: &str = include_str!("../../../README.md");
const GUIDE: &str = include_str!("../../../deploy/README.md");

/// What the test does with a command.
enum Rule {
    /// Runs it as it is written.
    Run,
    /// Runs this text in place of it: with names filled in, and an end.
    As(&'static str),
    /// Runs this text, if the program is installed.
    If(&'static str, &'static str),
    /// As `As`; the status may be another one of these, too.
    Status(&'static str, &'static [i32]),
    /// Starts it; it has to succeed after the next command.
    Background(&'static str),
    /// Leaves it out, for this reason.
    Skip(&'static str),
}

use Rule::{As, Background, If, Run, Skip, Status};

const QUICK_START: &[(&str, Rule)] = &[
    (
        "./deploy/demo",
        Skip("it builds everything in release mode"),
    ),
    ("./deploy/test", Skip("it runs this test")),
    (
        "apt install build-essential pkg-config libdpdk-dev libclang-dev libibverbs-dev librdmacm-dev",
        As(
            "apt-get install --simulate build-essential pkg-config libdpdk-dev libclang-dev libibverbs-dev librdmacm-dev",
        ),
    ),
    (
        "cargo build --release -p siwd -p siw-programs -p siw-bench -p siw-verbs -p siw-mirror -p siw-preload",
        As(
            "cd $SOURCES && for name in siwd siw-programs siw-bench siw-verbs siw-mirror siw-preload; do cargo pkgid --offline $name || exit 1; done",
        ),
    ),
    ("export PATH=$PWD/target/release:$PATH", Run),
    (
        "siwd &",
        As("siwd --check --socket $OTHER_SOCKET || [ $? = 4 ]"),
    ),
    (
        "siw-ping -s -a 10.77.0.2 -C 10 &",
        Background("siw-ping -s -a 10.77.0.2 -C 10"),
    ),
    ("siw-ping -c -a 10.77.0.2 -C 10 -v -V --device siw0", Run),
    (
        "siw-perf bw --op write --size 64K --depth 16 --from siw0 --to siw1",
        As(
            "siw-perf bw --op write --size 64K --depth 16 --from siw0 --to siw1 --secs 0.3 --no-bounds",
        ),
    ),
    ("siwctl stat", Run),
    ("siwctl show conn", Run),
    (
        "siwctl capture start - | tshark -r -",
        If("tshark", "siwctl capture start - | tshark -r - -c 5"),
    ),
];

const SYMPTOMS: &[(&str, Rule)] = &[
    // 1: something of this machine is not as siwd would have it.
    ("siwctl doctor", Status("siwctl doctor", &[1])),
    (
        "siwd --config FILE --check",
        Status("siwd --config $FILE --check --socket $OTHER_SOCKET", &[4]),
    ),
    (
        "siwrun ibv_devices",
        If("ibv_devices", "siwrun ibv_devices | grep siw0"),
    ),
    ("ls -l", As("ls -l $SIWD_SOCKET")),
    (
        "siwrun --verbose PROGRAM",
        If("ibv_devices", "siwrun --verbose ibv_devices"),
    ),
    (
        "siwrun doctor PROGRAM",
        If("ibv_devices", "siwrun doctor $(command -v ibv_devices)"),
    ),
    (
        "siwrun --persona roce PROGRAM",
        If(
            "ibv_devinfo",
            "siwrun --persona roce ibv_devinfo | grep 'InfiniBand (0)'",
        ),
    ),
    ("siwrun --self-test", Run),
    ("siwrun --faults list", Run),
    ("siwctl fault plans", Run),
    (
        "siwctl fault load flaky-link",
        As("siwctl fault load flaky-link && siwctl fault clear flaky-link"),
    ),
    ("siwctl fault show", Run),
    (
        "siwctl fault clear",
        As("siwctl fault load lossy-link && siwctl fault clear"),
    ),
    ("siwctl why LQPN", As("siwctl why $LQPN")),
    ("siwctl why --events LQPN", As("siwctl why --events $LQPN")),
    ("siwctl show ends", Run),
    (
        "siwctl monitor",
        As(
            "siwctl monitor -n 1 & while kill -0 $! 2>/dev/null; do siw-ping -c -a 10.77.0.2 -p 9 2>/dev/null; done; wait $!",
        ),
    ),
    ("siwctl top", As("siwctl top --batch -n 2 --interval 0.1")),
    ("siwctl show clients", Run),
    ("show qp", As("siwctl show qp")),
    ("show mr", As("siwctl show mr")),
    ("show cm-id", As("siwctl show cm-id")),
    ("rdma resource show", Skip("names a form of output")),
    ("siwctl show drops", Run),
    ("siwctl show conn", Run),
    ("ss -ti", Skip("names a form of output")),
    ("siwctl stat --only retrans", Run),
    ("siwctl stat --only Timeouts", Run),
    (
        "siwctl stat --only buffers",
        As("siwctl stat --only buffers | grep buffers_free"),
    ),
    ("siwctl stat --only Csum", Run),
    (
        "siwctl stat --only sleeps",
        As("siwctl stat --only sleeps | grep sleeps"),
    ),
    (
        "siwctl config export",
        As("siwctl config export | grep siw0"),
    ),
    ("siwctl reload", Run),
    ("siwctl log siwd=debug", Run),
    (
        "siwctl capture start FILE.pcapng",
        As(
            "siwctl capture start FILE.pcapng & until test -s FILE.pcapng; do sleep 0.05; done; kill -INT $!; wait $!",
        ),
    ),
    ("--qp", Skip("an option, see the next ones")),
    ("--client", Skip("an option")),
    ("--host", Skip("an option")),
    ("--port", Skip("an option")),
    ("--device", Skip("an option")),
    (
        "siwctl capture start - | tshark -r -",
        If(
            "tshark",
            "siwctl capture start --device siw0 - | tshark -r - -c 5",
        ),
    ),
    (
        "--rotate 64MiB --ring 10",
        As(
            "siwctl capture start ring.pcapng --rotate 64MiB --ring 10 & until ls ring* >/dev/null 2>&1; do sleep 0.05; done; kill -INT $!; wait $!",
        ),
    ),
    (
        "siwd --capture FILE.pcapng",
        Status(
            "siwd --capture other.pcapng --check --socket $OTHER_SOCKET",
            &[4],
        ),
    ),
    ("siwctl trace 50", Run),
    ("--json", As("siwctl trace 5 --device siw0 --json")),
    ("siwctl report", Run),
    ("siwctl show users", Run),
    ("siwctl stat --json", Run),
];

/// Commands of the code blocks below a heading.
fn commands_below(heading: &str, text: &str) -> Vec<String> {
    let (_, section) = text.split_once(heading).expect("the heading");
    let section = section.split("\n## ").next().unwrap_or_default();
    let blocks = section.split("```sh\n").skip(1);
    let lines = blocks.flat_map(|block| block.split("```").next().unwrap_or_default().lines());
    let commands = lines.map(|line| line.split(" #").next().unwrap_or_default().trim());
    commands
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Words in code font in the column of commands, in the rows of the table below a heading.
fn commands_of_table(heading: &str, text: &str) -> Vec<String> {
    let (_, section) = text.split_once(heading).expect("the heading");
    let rows = section.split("\n## ").next().unwrap_or_default().lines();
    let rows = rows.filter(|line| line.starts_with("| ")).skip(1);
    let mut commands = Vec::new();
    for row in rows {
        let row = row.replace("\\|", "\u{1}");
        let cell = row.split('|').nth(2).unwrap_or_default();
        let words = cell.split('`').skip(1).step_by(2);
        commands.extend(words.map(|word| word.replace('\u{1}', "|")));
    }
    commands
}

/// The daemon that the commands meet, with a connection.
struct Scene {
    ends: (End, End),
    daemon: Daemon,
    folder: tempfile::TempDir,
    programs: PathBuf,
}

impl Scene {
    fn new() -> Scene {
        let programs = siwrun().parent().unwrap().to_owned();
        for program in [client_program("siwctl"), siw_ping().to_owned(), siw_perf()] {
            assert_eq!(program.parent(), Some(programs.as_path()));
        }
        let daemon = Daemon::loopback();
        let (a, b) = pair(&daemon, 4096);
        ping(&a, &b);
        Scene {
            ends: (a, b),
            daemon,
            folder: tempfile::tempdir().unwrap(),
            programs,
        }
    }

    fn spawn(&self, command: &str) -> Child {
        let path = std::env::var("PATH").unwrap_or_default();
        let folder = self.folder.path();
        Command::new("sh")
            .args(["-c", command])
            .current_dir(folder)
            .env("PATH", format!("{}:{path}", self.programs.display()))
            .env("SIWD_SOCKET", &self.daemon.socket)
            .env("OTHER_SOCKET", folder.join("other.sock"))
            .env("FILE", self.daemon.dir.path().join("siwd.toml"))
            .env("LQPN", self.ends.0.qp.qp_num().to_string())
            .env("SOURCES", env!("CARGO_MANIFEST_DIR"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Returns the complaint about a command that fails.
    fn finish(command: &str, child: Child, allowed: &[i32]) -> Option<String> {
        let out = child.wait_with_output().unwrap();
        let is_fine = out.status.success()
            || out
                .status
                .code()
                .is_some_and(|code| allowed.contains(&code));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (!is_fine).then(|| {
            let (out, error) = (text(&out.stdout), text(&out.stderr));
            format!("{command}\n  {out}\n  {error}")
        })
    }

    /// Runs the commands in their order; returns what failed.
    fn run_all(&self, documented: &[String], rules: &[(&str, Rule)]) -> Vec<String> {
        let named: BTreeSet<&str> = documented.iter().map(String::as_str).collect();
        let ruled: BTreeSet<&str> = rules.iter().map(|(command, _)| *command).collect();
        let without_rule: Vec<_> = named.symmetric_difference(&ruled).collect();
        assert!(
            without_rule.is_empty(),
            "no rule, or no command: {without_rule:?}"
        );
        let mut failed = Vec::new();
        let mut background = None;
        for (command, rule) in rules {
            let (text, allowed): (&str, &[i32]) = match rule {
                Run => (command, &[]),
                As(text) => (text, &[]),
                Status(text, allowed) => (text, allowed),
                If(program, text) => match missing_program(program) {
                    None => (text, &[]),
                    Some(why) => {
                        println!("{command}: left out: {why}");
                        continue;
                    }
                },
                Background(text) => {
                    let mut child = self.spawn(text);
                    // It is ready when it has said something.
                    let mut said = BufReader::new(child.stderr.take().unwrap());
                    said.read_line(&mut String::new()).unwrap();
                    background = Some((text, child, said));
                    continue;
                }
                Skip(why) => {
                    println!("{command}: left out: {why}");
                    continue;
                }
            };
            failed.extend(Scene::finish(text, self.spawn(text), allowed));
            if let Some((text, child, _said)) = background.take() {
                failed.extend(Scene::finish(text, child, &[]));
            }
        }
        failed
    }
}

/// Sends without end while `body` runs.
fn with_traffic<T>(daemon: &Daemon, body: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    let (a, b) = pair(daemon, 4096);
    std::thread::scope(|scope| {
        let over = &is_over;
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                ping(&a, &b);
            }
        });
        let _stop = StopOnDrop(&is_over);
        body()
    })
}

#[test]
fn every_command_of_the_quick_start_works() {
    let documented = commands_below("## Quick start", README);
    assert!(documented.len() > 10, "{documented:?}");
    let scene = Scene::new();
    let failed = with_traffic(&scene.daemon, || scene.run_all(&documented, QUICK_START));
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn every_command_of_the_table_of_symptoms_works() {
    let documented = commands_of_table("## What to look at", GUIDE);
    assert!(documented.len() > 30, "{documented:?}");
    let scene = Scene::new();
    let failed = with_traffic(&scene.daemon, || scene.run_all(&documented, SYMPTOMS));
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
