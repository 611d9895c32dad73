//! librpma: remote access to persistent memory, here memory of a process.

use std::path::Path;
use std::process::Command;

use crate::common::Daemon;
use crate::common::c_programs::{can_compile, compile_with};
use crate::common::programs::{Program, skip_for_lack_of, start_listening};

#[test]
fn memory_is_written_flushed_and_read_by_librpma() {
    if !can_compile() {
        return;
    }
    let found = Command::new("pkg-config")
        .args(["--exists", "librpma"])
        .status();
    if !found.is_ok_and(|status| status.success()) {
        skip_for_lack_of("librpma", "librpma-dev");
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/persistent_memory.c");
    // The library comes before the program, which alone would not keep it.
    let flags = ["-Wl,--no-as-needed", "-lrpma"].map(str::to_owned);
    let (program, _) = compile_with(&daemon, &source, &flags);
    let line = |role: &str| format!("{} {role} 10.77.0.2 7204", program.display());
    let server = start_listening(&daemon, &line("server"));
    let said = Program::start(&daemon, &line("client")).succeed();
    assert!(said.contains("done"), "{said}");
    let said = server.succeed();
    assert!(said.contains("done"), "{said}");
}
