//! `siwrun --faults`: plans that are wrong, and unmodified programs that meet the faults of built-in plans.

use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::{
    Program, is_installed, run_over_tcp, start_listening, start_over_tcp,
};
use crate::common::{Daemon, siwrun};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::Path;
use std::process::{Command, ExitStatus, Output};
use std::time::Instant;

const UTILS: &str = "ibverbs-utils";
const CM_UTILS: &str = "rdmacm-utils";

/// Runs `siwrun --faults` with arguments, without a daemon.
fn run_faults(arguments: &[&str]) -> Output {
    let mut command = Command::new(siwrun());
    command.arg("--faults").args(arguments);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Writes a plan, and returns its path.
fn write_plan(folder: &Path, plan: &str) -> String {
    let path = folder.join("plan.toml");
    std::fs::write(&path, plan).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_wrong_plan_is_refused_before_the_program_starts() {
    let folder = tempfile::tempdir().unwrap();
    let started = folder.path().join("started");
    let cases = [
        ("", ":1:1: the plan has no [[fault]]"),
        (
            "[[fault]]\nkind = \"meteor\"\n",
            ":2:8: unknown fault \"meteor\"",
        ),
        (
            "[[fault]]\nkind = \"delay\"\ndelay_ms = 1\nprobability = 2\n",
            ":4:15: probability = 2: it must be between 0 and 1",
        ),
        (
            "[[fault]]\nkind = \"disconnect\"\nspeed = 3\n",
            ":3:1: a fault of kind disconnect has no key \"speed\"",
        ),
        (
            "[[fault]]\nkind = \"post_send\"\nqp = 99999999\n",
            ":3:6: an integer between 1 and 16777215",
        ),
        (
            "[[fault]]\nkind = \"wire_drop\"\n",
            ":2:8: a fault of kind wire_drop happens in siwd: load the plan with siwctl fault load",
        ),
        ("[[fault]\n", ":1:"),
    ];
    let refuse = |plan: &str, message: &str| {
        let out = run_faults(&[plan, "--", "touch", started.to_str().unwrap()]);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{plan}: {said}");
        assert!(said.contains(&format!("error: {plan}{message}")), "{said}");
    };
    for (plan, message) in cases {
        refuse(&write_plan(folder.path(), plan), message);
    }
    refuse(
        "/nowhere/plan.toml",
        ": this is neither a file that can be read",
    );
    refuse(
        "/",
        ": this is neither a file that can be read (it is no regular file)",
    );
    assert!(!started.exists());
    let out = run_faults(&["slow-completions"]);
    assert_eq!(out.status.code(), Some(2), "{out:?}");
    assert!(text(&out.stderr).contains("no program given"), "{out:?}");
    // Options of a plan need one.
    let out = Command::new(siwrun())
        .args(["--seed", "3", "true"])
        .output();
    assert_eq!(out.unwrap().status.code(), Some(2));
}

#[test]
fn built_in_plans_are_listed_and_documented() {
    let out = run_faults(&["list"]);
    assert!(out.status.success(), "{out:?}");
    let said = text(&out.stdout);
    let names: Vec<_> = said
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(names.len() >= 10, "{said}");
    let page = include_str!("../../../client-lib/faults/README.md");
    let of_test = include_str!("fault_plans.rs");
    for name in names {
        assert!(
            page.contains(&format!("**`{name}`**")),
            "{name} has no paragraph"
        );
        assert!(
            of_test.contains(&format!("--faults {name} ")),
            "{name} has no test"
        );
    }
}

#[test]
fn the_exit_code_is_that_of_the_program() {
    let out = run_faults(&["disconnected", "--", "sh", "-c", "exit 7"]);
    assert_eq!(out.status.code(), Some(7), "{out:?}");
    let said = text(&out.stderr);
    let summary = "siwrun: no fault of disconnected was injected (seed 1)\n";
    assert!(said.ends_with(summary), "{said}");
    let out = run_faults(&["disconnected", "--", "sh", "-c", "kill -TERM $$"]);
    assert_eq!(out.status.code(), Some(128 + 15), "{out:?}");
    let out = run_faults(&["disconnected", "--", "/nowhere/program"]);
    assert_eq!(out.status.code(), Some(127), "{out:?}");
}

/// Runs `ibv_rc_pingpong` on two devices, the client with faults; returns the outputs. Both have to succeed.
fn run_pingpong(faults: &str, arguments: &str) -> (String, String) {
    let daemon = Daemon::loopback();
    run_over_tcp(
        &daemon,
        &format!("ibv_rc_pingpong -d siw1 -g 0 {arguments}"),
        &format!("{faults} ibv_rc_pingpong -d siw0 -g 0 {arguments}"),
    )
}

/// As [`run_pingpong`], with a client that has to fail; returns its output.
fn fail_pingpong(faults: &str, arguments: &str) -> String {
    let daemon = Daemon::loopback();
    let (mut server, client) = start_over_tcp(
        &daemon,
        &format!("ibv_rc_pingpong -d siw1 -g 0 {arguments}"),
        &format!("{faults} ibv_rc_pingpong -d siw0 -g 0 {arguments}"),
    );
    let (status, said) = client.finish();
    server.kill();
    assert_eq!(status.code(), Some(1), "{said}");
    said
}

#[test]
fn slow_completions_let_programs_go_on() {
    if !is_installed("ibv_rc_pingpong", UTILS) {
        return;
    }
    // It polls; and it sleeps in ibv_get_cq_event(3).
    for more in ["", "-e"] {
        let begin = Instant::now();
        let (_, said) = run_pingpong("--faults slow-completions ", &format!("-n 50 {more}"));
        assert!(begin.elapsed().as_millis() >= 50, "{said}");
        assert!(said.contains("50 iters in"), "{said}");
        assert!(said.contains("injected fault 1: delay on QP "), "{said}");
        assert!(
            said.contains("siwrun: 100 faults were injected: 100 of fault 1 (delay)"),
            "{said}"
        );
    }
}

#[test]
fn the_same_seed_injects_the_same_faults() {
    if !is_installed("ibv_rc_pingpong", UTILS) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let plan = "[[fault]]\nname = \"late\"\nkind = \"delay\"\ndelay_ms = 0.1\nprobability = 0.3\n";
    let plan = write_plan(folder.path(), plan);
    let report = folder.path().join("report.json");
    let run = |seed: u64| {
        let options = format!(
            "--faults {plan} --seed {seed} --faults-report {}",
            report.display()
        );
        run_pingpong(&options, "-n 100");
        let report = std::fs::read_to_string(&report).unwrap();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["seed"], seed);
        assert_eq!(report["faults"][0]["name"], "late");
        assert_eq!(report["faults"][0]["kind"], "delay");
        report["injected"].as_u64().unwrap()
    };
    let first = run(5);
    assert!((30..90).contains(&first), "{first}");
    assert_eq!(run(5), first);
    assert!([6, 7, 8].into_iter().any(|seed| run(seed) != first));
}

#[test]
fn completions_of_sixteen_queue_pairs_come_in_another_order() {
    if !is_installed("ibv_srq_pingpong", UTILS) {
        return;
    }
    let daemon = Daemon::loopback();
    let (_, said) = run_over_tcp(
        &daemon,
        "ibv_srq_pingpong -d siw1 -g 0 -n 300",
        "--faults reordered ibv_srq_pingpong -d siw0 -g 0 -n 300",
    );
    assert!(said.contains("injected fault 1: reorder on QP "), "{said}");
    assert!(said.contains("300 iters in"), "{said}");
}

#[test]
fn the_peer_of_a_program_dies_in_the_middle() {
    if !is_installed("ibv_rc_pingpong", UTILS) {
        return;
    }
    let said = fail_pingpong("--faults peer-dies ", "-n 1000");
    assert!(said.contains("completion RETRY_EXC_ERR on QP "), "{said}");
    assert!(
        said.contains("Failed status transport retry counter exceeded (12)"),
        "{said}"
    );
}

#[test]
fn an_access_is_refused_once_and_the_rest_is_flushed() {
    if !is_installed("ib_write_bw", "perftest") {
        return;
    }
    let daemon = Daemon::loopback();
    let (mut server, client) = start_over_tcp(
        &daemon,
        "ib_write_bw -d siw1 -x 0 -n 1000",
        "--faults access-denied ib_write_bw -d siw0 -x 0 -n 1000",
    );
    let (status, said) = client.finish();
    server.kill();
    assert!(!status.success(), "{said}");
    assert!(said.contains("completion REM_ACCESS_ERR on QP "), "{said}");
    assert!(said.contains("Failed status 10"), "{said}");
    assert!(said.contains("siwrun: 1 fault was injected: "), "{said}");
}

#[test]
fn a_receiver_that_does_not_post_ends_the_connection() {
    if !is_installed("ibv_rc_pingpong", UTILS) {
        return;
    }
    let said = fail_pingpong("--faults receiver-never-posts ", "-n 100");
    assert!(said.contains("injected fault 1: withhold on QP "), "{said}");
    assert!(said.contains("Failed status"), "{said}");
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    // Its thread sleeps until the withheld requests are flushed.
    let (_, said) = run_rping("--faults receiver-never-posts ");
    assert!(said.contains("RDMA_CM_EVENT_DISCONNECTED"), "{said}");
}

#[test]
fn a_full_queue_fails_a_program_that_does_not_repeat() {
    if !is_installed("ibv_rc_pingpong", UTILS) {
        return;
    }
    let said = fail_pingpong("--faults queue-full ", "-n 100");
    assert!(said.contains("post_send ENOMEM on QP "), "{said}");
    assert!(said.contains("Couldn't post send"), "{said}");
}

/// Runs an rping client with faults, for 1,000 rounds, to a server without; returns how it ended, and its output.
fn run_rping(faults: &str) -> (ExitStatus, String) {
    let daemon = Daemon::loopback();
    let _server = start_listening(&daemon, "rping -s -P -a 10.77.0.2");
    let line = format!("{faults} rping -c -a 10.77.0.2 -C 1000 -d");
    Program::start(&daemon, &line).finish()
}

/// As [`run_rping`]; the client has to fail.
fn fail_rping(faults: &str) -> String {
    let (status, said) = run_rping(faults);
    assert!(!status.success(), "{said}");
    said
}

#[test]
fn memory_is_short() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let said = fail_rping("--faults out-of-memory ");
    assert!(
        said.contains("injected fault 1: create mr ENOMEM on siw"),
        "{said}"
    );
    assert!(said.contains("reg_mr failed"), "{said}");
}

#[test]
fn connects_fail_as_planned() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let said = fail_rping("--faults rejected-at-first ");
    assert!(
        said.contains("RDMA_CM_EVENT_REJECTED, error -111"),
        "{said}"
    );
    let begin = Instant::now();
    let said = fail_rping("--faults connect-times-out ");
    assert!(begin.elapsed().as_secs() >= 2, "{said}");
    assert!(
        said.contains("RDMA_CM_EVENT_UNREACHABLE, error -110"),
        "{said}"
    );
    let said = fail_rping("--faults no-route ");
    assert!(
        said.contains("RDMA_CM_EVENT_ROUTE_ERROR, error -101"),
        "{said}"
    );
}

/// Faults of rdma_cm that no built-in plan has.
#[test]
fn each_fault_of_rdma_cm_gives_its_event() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let fail = |plan: &str, event: &str| {
        let plan = write_plan(folder.path(), &format!("[[fault]]\n{plan}\n"));
        let said = fail_rping(&format!("--faults {plan} "));
        assert!(said.contains(event), "{event}: {said}");
    };
    fail(
        "kind = \"addr_error\"",
        "RDMA_CM_EVENT_ADDR_ERROR, error -113",
    );
    fail(
        "kind = \"unreachable\"\nerrno = \"ENETUNREACH\"\ndelay_ms = 50",
        "RDMA_CM_EVENT_UNREACHABLE, error -101",
    );
    fail(
        "kind = \"connect_error\"",
        "RDMA_CM_EVENT_CONNECT_ERROR, error -104",
    );
    // One that is aimed at another port does not happen.
    let plan = "[[fault]]\nkind = \"reject\"\nport = 9\n\
                [[fault]]\nkind = \"cm_storm\"\nevent = \"TIMEWAIT_EXIT\"\nburst = 5\nport = 7174\n";
    let plan = write_plan(folder.path(), plan);
    let (status, said) = run_rping(&format!("--faults {plan} "));
    assert!(status.success(), "{said}");
    let events = said.matches("RDMA_CM_EVENT_TIMEWAIT_EXIT").count();
    assert!(
        events >= 5 && said.contains("siwrun: 1 fault was injected: "),
        "{said}"
    );
}

#[test]
fn a_server_rejects_a_request_that_it_does_not_see() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let plan = "[[fault]]\nkind = \"reject\"\nside = \"passive\"\nport = 7174\ncount = 1\n";
    let plan = write_plan(folder.path(), plan);
    let daemon = Daemon::loopback();
    let server = start_listening(
        &daemon,
        &format!("--faults {plan} rping -s -a 10.77.0.2 -C 3 -d"),
    );
    let client = "rping -c -a 10.77.0.2 -C 3 -d";
    let (status, said) = Program::start(&daemon, client).finish();
    assert!(!status.success(), "{said}");
    assert!(said.contains("RDMA_CM_EVENT_REJECTED"), "{said}");
    Program::start(&daemon, client).succeed();
    let said = server.succeed();
    assert_eq!(
        said.matches("RDMA_CM_EVENT_CONNECT_REQUEST").count(),
        1,
        "{said}"
    );
    assert!(
        said.contains("injected fault 1: reject on the request of 10.77.0."),
        "{said}"
    );
}

#[test]
fn random_plans_find_a_program_that_fails_and_become_smaller() {
    if !can_compile() || !is_installed("ibv_devices", UTILS) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let run = |options: &[&str], script: &str| {
        let mut command = Command::new(siwrun());
        command
            .args(["--private", "--siwd", env!("CARGO_BIN_EXE_siwd")])
            .args(options)
            .args(["--", "sh", "-c", script])
            .env("XDG_RUNTIME_DIR", folder.path())
            .env_remove("SIWD_SOCKET");
        command.output().unwrap()
    };
    let out = run(&["--fuzz", "1", "3"], "ibv_devices");
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    assert!(
        text(&out.stderr).contains("succeeded under 3 plans"),
        "{out:?}"
    );
    let out = run(&["--fuzz", "1", "3"], "exit 4");
    assert_eq!(out.status.code(), Some(127), "{out:?}");
    assert!(
        text(&out.stderr).contains("fails without a fault"),
        "{out:?}"
    );
    // A program that moves data through a queue pair connected with itself, and ends at the first fault.
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/self_connected.c");
    let (program, _) = compile(&daemon, &source);
    let script = program.to_str().unwrap();
    let out = run(&["--fuzz", "1", "8", "--fuzz-time", "10"], script);
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    let plans = text(&out.stdout);
    assert!(plans.starts_with("# seed "), "{out:?}");
    // The smallest plan comes first, and makes the command fail again.
    let second = plans[1..].find("# seed ").map_or(plans.len(), |at| at + 1);
    let plan = write_plan(folder.path(), &plans[..second]);
    let out = run(&["--faults", &plan], script);
    assert!(!out.status.success(), "{plans}: {out:?}");
    assert!(text(&out.stderr).contains("injected fault 1: "), "{out:?}");
}

#[test]
fn a_client_that_tries_again_is_rejected_only_at_first() {
    if !is_installed("ucmatose", CM_UTILS) {
        return;
    }
    let daemon = Daemon::loopback();
    let _server = start_listening(&daemon, "ucmatose -b 10.77.0.2 -c 2");
    let line = "--faults rejected-at-first ucmatose -s 10.77.0.2 -c 2";
    let (_, said) = Program::start(&daemon, line).finish();
    assert!(said.contains("siwrun: 1 fault was injected: "), "{said}");
}

#[test]
fn a_connection_ends_in_order_in_the_middle() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    // rping takes the end of a connection for that of its work.
    let (_, said) = run_rping("--faults disconnected ");
    assert!(
        said.contains("injected fault 1: disconnect on QP "),
        "{said}"
    );
    assert!(said.contains("RDMA_CM_EVENT_DISCONNECTED"), "{said}");
    let rounds = said.matches("RDMA addr ").count();
    assert!((10..100).contains(&rounds), "{said}");
}

#[test]
fn a_storm_of_events_is_survived() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let daemon = Daemon::loopback();
    let server = start_listening(&daemon, "rping -s -a 10.77.0.2 -C 10 -V");
    let line = "--faults event-storm rping -c -a 10.77.0.2 -C 10 -V -d";
    let said = Program::start(&daemon, line).succeed();
    server.succeed();
    let events = said.matches("RDMA_CM_EVENT_ADDR_CHANGE").count();
    assert!(events > 0, "{said}");
    assert!(
        said.contains("injected fault 1: cm_storm ADDR_CHANGE on "),
        "{said}"
    );
}

/// Runs ibv_asyncwatch with faults until it has seen that number of events; returns its output.
fn watch_events(faults: &str, seconds: u64) -> String {
    let daemon = Daemon::loopback();
    let watch = Program::start(
        &daemon,
        &format!("{faults} stdbuf -oL ibv_asyncwatch -d siw0"),
    );
    // Nothing else tells when the last event has come.
    std::thread::sleep(std::time::Duration::from_secs(seconds));
    kill(Pid::from_raw(watch.id().cast_signed()), Signal::SIGTERM).unwrap();
    watch.finish().1
}

#[test]
fn a_port_flaps_and_a_device_fails() {
    if !is_installed("ibv_asyncwatch", UTILS) {
        return;
    }
    let said = watch_events("--faults port-flaps ", 4);
    let count = |event: &str| said.matches(&format!("IBV_EVENT_{event} ")).count();
    assert_eq!((count("PORT_ERR"), count("PORT_ACTIVE")), (5, 5), "{said}");
    assert!(
        said.contains("siwrun: 10 faults were injected: 5 of fault 1 (down)"),
        "{said}"
    );
    let said = watch_events("--faults device-fails ", 3);
    assert!(said.contains("IBV_EVENT_DEVICE_FATAL "), "{said}");
}

#[test]
fn the_device_of_a_program_is_removed() {
    if !is_installed("rping", CM_UTILS) {
        return;
    }
    let daemon = Daemon::loopback();
    let _server = start_listening(&daemon, "rping -s -P -a 10.77.0.2");
    let line = "--faults device-fails rping -c -a 10.77.0.2 -C 100000000 -d";
    let (_, said) = Program::start(&daemon, line).finish();
    assert!(said.contains("RDMA_CM_EVENT_DEVICE_REMOVAL"), "{said}");
}

/// Each fault at verbs, seen by a C program that knows the plan.
#[test]
fn each_fault_at_verbs_happens_as_planned() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/planned_faults.c");
    let (program, _) = compile(&daemon, &source);
    let run = |case: &str, plan: &str| {
        let plan = write_plan(daemon.dir.path(), plan);
        let line = format!("--faults {plan} {} {case}", program.display());
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains("done"), "{case}: {said}");
        said
    };
    for object in ["pd", "mr", "mw", "cq", "qp", "srq"] {
        let plan = format!(
            "[[fault]]\nkind = \"create\"\nobject = \"{object}\"\nerrno = \"ENOSPC\"\ncount = 1\n"
        );
        let said = run(&format!("create {object}"), &plan);
        assert!(
            said.contains(&format!("create {object} ENOSPC on siw0")),
            "{said}"
        );
    }
    run(
        "post",
        "[[fault]]\nkind = \"post_send\"\nerrno = \"EAGAIN\"\nafter_calls = 2\ncount = 1\n\
                 [[fault]]\nkind = \"post_receive\"\nerrno = \"EINVAL\"\ncount = 1\nnth = 1\n",
    );
    run(
        "withhold",
        "[[fault]]\nkind = \"withhold\"\ndelay_ms = 300\nnth = 2\n",
    );
    run(
        "withheld-flush",
        "[[fault]]\nkind = \"withhold\"\nnth = 2\n",
    );
    run(
        "status",
        "[[fault]]\nkind = \"completion\"\nstatus = \"LOC_PROT_ERR\"\nnth = 1\nafter_calls = 1\n",
    );
    run(
        "overrun",
        "[[fault]]\nkind = \"cq_overrun\"\nafter_calls = 2\n",
    );
    run("sleep", "[[fault]]\nkind = \"delay\"\ndelay_ms = 100\n");
    run(
        "events",
        "[[fault]]\nkind = \"event\"\nevent = \"QP_FATAL\"\nafter_calls = 1\ncount = 1\n\
                   [[fault]]\nkind = \"event\"\nevent = \"GID_CHANGE\"\nafter_calls = 2\ncount = 1\n\
                   [[fault]]\nkind = \"event\"\nevent = \"SRQ_LIMIT_REACHED\"\nafter = \"100ms\"\n",
    );
}

/// Without a plan nothing is exchanged, and nothing is told.
#[test]
fn a_program_without_a_plan_is_told_of_none() {
    if !is_installed("ibv_rc_pingpong", UTILS) {
        return;
    }
    let (_, said) = run_pingpong("", "-n 20");
    assert!(
        !said.contains("injected") && !said.contains("fault"),
        "{said}"
    );
}
