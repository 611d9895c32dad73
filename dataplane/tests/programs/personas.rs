//! Personas: what programs see of a device under `siwrun --persona` and the key `persona`, and programs that
//! refuse iWARP devices.

use std::path::{Path, PathBuf};

use crate::common::c_programs::{can_compile, compile};
use crate::common::programs::{
    Program, has_infiniband_of_ucx, is_installed, received_bytes, run_over_tcp, ucx_perftest,
};
use crate::common::{Daemon, LOOPBACK};

const PERSONAS: [&str; 4] = ["iwarp", "roce", "ib", "unspecified"];

fn compile_table(daemon: &Daemon) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/personas.c");
    compile(daemon, &source).0
}

/// The loopback with a persona of each device.
fn configuration(first: &str, second: &str) -> String {
    let mut config = LOOPBACK.to_owned();
    for (name, persona) in [("siw0", first), ("siw1", second)] {
        let line = format!("name = \"{name}\"");
        assert!(config.contains(&line), "{config}");
        config = config.replace(&line, &format!("{line}\npersona = \"{persona}\""));
    }
    config
}

#[test]
fn each_persona_answers_each_query_of_a_program() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let program = compile_table(&daemon);
    let program = program.display();
    // Without a persona, and with the default one.
    let said = Program::start(&daemon, &format!("{program} iwarp iwarp")).succeed();
    assert!(said.contains("done"), "{said}");
    for persona in PERSONAS {
        let line = format!("--persona {persona} {program} {persona} {persona}");
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains("done"), "{said}");
    }
}

#[test]
fn the_configuration_gives_each_device_its_persona_and_siwrun_overrides_it() {
    if !can_compile() {
        return;
    }
    for (first, second) in [("roce", "ib"), ("unspecified", "iwarp")] {
        let daemon = Daemon::start(&configuration(first, second), &[]);
        let program = compile_table(&daemon);
        let program = program.display();
        let said = Program::start(&daemon, &format!("{program} {first} {second}")).succeed();
        assert!(said.contains("done"), "{said}");
        let line = format!("--persona iwarp {program} iwarp iwarp");
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains("done"), "{said}");
    }
}

#[test]
fn an_unknown_persona_is_refused_with_the_known_ones() {
    let daemon = Daemon::loopback();
    let (status, said) = Program::start(&daemon, "--persona RoCE true").finish();
    assert!(!status.success());
    for known in PERSONAS {
        assert!(said.contains(known), "{said}");
    }
    // The variable that siwrun sets may come from elsewhere.
    let line = "env SIW_PERSONA=infiniband ibv_devinfo -d siw0";
    let said = Program::start(&daemon, line).succeed();
    assert!(
        said.contains("unknown persona \"infiniband\"") && said.contains("iWARP (1)"),
        "{said}"
    );
}

/// Runs a test of UCX's benchmark between two devices over a transport of UCT alone, without UCP. Its messages have
/// to go over siwd.
fn run_ucx_test(daemon: &Daemon, test: &str, size: u64, layout: &str) {
    const MESSAGES: u64 = 1000;
    let count = |device| received_bytes(daemon, device);
    let before = count("siw0") + count("siw1");
    let line = |device: &str| {
        format!(
            "--persona roce {} -d {device}:1 -x rc_verbs -D {layout} -t {test} -s {size} \
             -n {MESSAGES} -w 10 -f",
            ucx_perftest()
        )
    };
    let (server, client) = run_over_tcp(daemon, &line("siw1"), &line("siw0"));
    let moved = count("siw0") + count("siw1") - before;
    let expected = MESSAGES * size;
    assert!(
        moved > expected,
        "{test}: {moved} of {expected} bytes went over siwd\n{server}\n{client}"
    );
    let mut rows = client.lines().map(|row| row.split_whitespace().next());
    assert!(rows.any(|first| first == Some("1000")), "{test}:\n{client}");
}

#[test]
fn ucx_runs_its_operations_over_queue_pairs_of_a_roce_persona() {
    if !has_infiniband_of_ucx() {
        return;
    }
    let daemon = Daemon::loopback();
    for (test, size, layout) in [
        ("am_lat", 32, "short"),
        ("am_bw", 1024, "bcopy"),
        ("put_lat", 32, "short"),
        ("put_lat", 1024, "bcopy"),
        ("put_bw", 65536, "zcopy"),
        ("get", 65536, "zcopy"),
        ("fadd", 8, "short"),
        ("cswap", 8, "short"),
    ] {
        run_ucx_test(&daemon, test, size, layout);
    }
}

#[test]
fn ucx_refuses_devices_of_the_default_persona_only() {
    if !has_infiniband_of_ucx() {
        return;
    }
    let daemon = Daemon::loopback();
    let line = "ucx_info -d";
    let said = Program::start(&daemon, line).succeed();
    assert!(!said.contains("siw0:1"), "{said}");
    // UCX 1.13 takes `unspecified`, too, and 1.18 does not.
    for persona in ["roce", "ib"] {
        let said = Program::start(&daemon, &format!("--persona {persona} {line}")).succeed();
        for expected in ["Transport: rc_verbs", "Device: siw0:1", "Device: siw1:1"] {
            assert!(said.contains(expected), "{expected} is not in\n{said}");
        }
    }
}

/// UCX tests by itself that every call which changes memory reaches its hooks, without which its cache of
/// registrations is off. It replaces the code of functions, or entries of global offset tables; there UCX 1.13 hooks
/// malloc(3), too, and hangs in its test of that, also without siwd.
#[test]
fn ucx_sees_every_call_that_changes_memory() {
    if !is_installed("ucx_perftest", "ucx-utils") {
        return;
    }
    let daemon = Daemon::loopback();
    for mode in ["bistro", "reloc"] {
        for persona in ["iwarp", "roce"] {
            let line = format!(
                "--persona {persona} env UCX_MEM_MMAP_HOOK_MODE={mode} UCX_MEM_LOG_LEVEL=debug \
                 UCX_MEM_MALLOC_RELOC=n {} -l -t tag_lat -n 10 -w 1 -f",
                ucx_perftest()
            );
            let said = Program::start(&daemon, &line).succeed();
            let tests: Vec<_> = said
                .lines()
                .filter_map(|row| {
                    row.split_once("events test: got ")?
                        .1
                        .split_once(" out of ")
                })
                .collect();
            assert!(!tests.is_empty(), "{mode}, {persona}:\n{said}");
            for (got, expected) in tests {
                assert_eq!(got, expected, "{mode}, {persona}:\n{said}");
            }
        }
    }
}

#[test]
fn programs_that_know_lids_only_connect_with_the_persona_ib() {
    if !is_installed("ibv_rc_pingpong", "ibverbs-utils") || !is_installed("ib_write_bw", "perftest")
    {
        return;
    }
    let daemon = Daemon::loopback();
    for (line, result) in [
        ("ibv_rc_pingpong -n 100", "100 iters in"),
        ("ib_write_bw -n 500", "65536      500"),
    ] {
        let at = |device| format!("--persona ib {line} -d {device}");
        let (_, client) = run_over_tcp(&daemon, &at("siw1"), &at("siw0"));
        assert!(client.contains(result), "{client}");
    }
}

#[test]
fn ends_with_different_personas_work_with_each_other() {
    if !is_installed("ibv_rc_pingpong", "ibverbs-utils") {
        return;
    }
    let daemon = Daemon::loopback();
    for (server, client) in [("roce", "iwarp"), ("ib", "unspecified"), ("iwarp", "ib")] {
        let line = |persona, device| {
            format!("--persona {persona} ibv_rc_pingpong -g 0 -n 100 -d {device}")
        };
        let (_, said) = run_over_tcp(&daemon, &line(server, "siw1"), &line(client, "siw0"));
        assert!(said.contains("100 iters in"), "{said}");
    }
}

/// UCX registers every buffer for atomics, on the stack and in static data, too.
#[test]
fn memory_of_every_kind_can_be_registered_for_atomics_that_exclude_each_other() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/atomic_memory.c");
    let program = compile(&daemon, &source).0;
    for persona in ["iwarp", "roce"] {
        let line = format!("--persona {persona} {} {persona}", program.display());
        let said = Program::start(&daemon, &line).succeed();
        assert!(said.contains("done"), "{said}");
    }
}
