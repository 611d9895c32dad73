//! Programs that run while their devices, addresses and queue pairs change.

use crate::common::c_programs::{can_compile, compile, run_to_done_as};
use crate::common::programs::Program;
use crate::common::{Daemon, LOOPBACK, client_program};
use std::path::Path;

/// Runs a program with the path of siwctl; it has to say "done".
fn run_with_siwctl(config: &str, name: &str) {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::start(config, &[]);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{name}.c"));
    let (program, _) = compile(&daemon, &source);
    let siwctl = client_program("siwctl");
    let line = format!("{} {}", program.display(), siwctl.display());
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("done"), "{said}");
}

#[test]
fn a_refused_ibv_modify_qp_changes_nothing_and_gives_the_cause() {
    if !can_compile() {
        return;
    }
    for persona in ["iwarp", "roce", "ib", "unspecified"] {
        let said = run_to_done_as(persona, "refused_modify");
        for cause in [
            "the device has no GID index 77 (sgid_index): it has 0 (",
            "port_num of the address vector is not a port of the device",
            "no device reaches 203.77.0.1: it is on no device's network",
            "invalid state transition",
        ] {
            assert!(said.contains(cause), "{persona}: {cause} is not in\n{said}");
        }
    }
}

#[test]
fn the_gid_table_of_an_open_context_follows_the_addresses() {
    run_with_siwctl(LOOPBACK, "gid_changes");
}

#[test]
fn rdma_cm_learns_of_devices_that_go_and_come_back() {
    let second_pair = r#"
[[device]]
name = "siw2"
pair = "second"
addresses = ["10.78.0.1/24"]
[[device]]
name = "siw3"
pair = "second"
addresses = ["10.78.0.2/24"]
"#;
    run_with_siwctl(&format!("{LOOPBACK}{second_pair}"), "device_changes");
}
