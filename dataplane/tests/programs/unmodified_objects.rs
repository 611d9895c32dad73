//! Supported uses of verbs objects by unmodified programs: from many threads, over several
//! contexts, across fork(2), with descriptors in the program's own modes, and without privilege.
//! The C programs are in `dataplane/tests/programs/` and run by `siwrun`.

use crate::common::c_programs::{can_compile, compile_with, run_to_done};
use crate::common::programs::{Program, is_installed, skip_for_lack_of};
use crate::common::{Daemon, LOOPBACK};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles a program against the distribution's libraries, which it does not use at run time.
fn compile(daemon: &Daemon, name: &str) -> Option<PathBuf> {
    if !is_installed("cc", "gcc") || !Path::new("/usr/include/infiniband/verbs.h").exists() {
        println!("skipped: gcc or libibverbs-dev is not installed");
        return None;
    }
    let program = daemon.dir.path().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/programs/{name}.c"));
    let out = Command::new("cc")
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .args([&program, &source])
        .arg("-libverbs")
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    Some(program)
}

fn run(daemon: &Daemon, line: &str) -> String {
    Program::start(daemon, line).succeed()
}

#[test]
fn threads_share_every_object() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "verbs_threads") else {
        return;
    };
    let said = run(&daemon, &format!("{} 5000", program.display()));
    assert!(said.contains("5000 messages"), "{said}");
}

/// The library's own free(3) and realloc(3) are called while it looks for those that come next.
#[test]
fn a_dlsym_that_releases_memory_finds_the_next_functions() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/freeing_dlsym.c");
    let flags = ["-O2".to_owned(), "-rdynamic".to_owned()];
    let (program, _) = compile_with(&daemon, &source, &flags);
    let said = run(&daemon, &program.display().to_string());
    assert!(said.contains("done"), "{said}");
}

#[test]
fn batches_are_posted_all_or_not_at_all() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "verbs_batches") else {
        return;
    };
    let said = run(&daemon, &program.display().to_string());
    assert!(said.contains("all or nothing"), "{said}");
}

#[test]
fn children_have_their_own_memory_with_fork_init_and_without() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "verbs_fork") else {
        return;
    };
    for way in ["none", "init"] {
        let said = run(&daemon, &format!("{} {way}", program.display()));
        assert!(said.contains("unneeded: three children"), "{way}: {said}");
    }
}

#[test]
fn children_do_not_wait_for_threads_of_their_parent() {
    run_to_done("inherited_objects", "");
}

#[test]
fn programs_may_close_or_replace_descriptors_that_they_did_not_open() {
    for way in ["close", "range", "dup", "closeall"] {
        run_to_done("closed_descriptors", way);
    }
}

#[test]
fn a_program_with_few_descriptors_gets_the_error_of_the_limit() {
    run_to_done("closed_descriptors", "few");
}

#[test]
fn memory_stays_the_programs_in_unusual_ways() {
    for way in ["handler", "spawn", "unload", "userfaultfd", "seccomp"] {
        run_to_done("unusual_ways", way);
    }
}

#[test]
fn descriptors_of_events_block_as_the_program_says() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "verbs_events") else {
        return;
    };
    let said = run(&daemon, &program.display().to_string());
    assert!(said.contains("events are pollable"), "{said}");
}

/// Lets every user reach the daemon and the files in its folder.
fn admit_all(daemon: &Daemon) {
    for (path, mode) in [(daemon.dir.path(), 0o755), (daemon.socket.as_path(), 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
}

const NOBODY: &str = "setpriv --reuid 65534 --regid 65534 --clear-groups";

/// A count by name from the program's output.
fn count(said: &str, name: &str) -> u64 {
    let line = said.lines().find(|line| line.starts_with('{')).unwrap();
    let counts: serde_json::Value = serde_json::from_str(line).unwrap();
    counts[name].as_u64().unwrap()
}

/// Another thread's read(2) makes the kernel write to pages while they are being registered.
#[test]
fn system_calls_go_on_while_their_memory_is_registered() {
    let copies = format!("{LOOPBACK}[control]\nprocess_memory = \"all\"\n");
    let daemon = Daemon::start(&copies, &[]);
    let Some(program) = compile(&daemon, "kernel_access") else {
        return;
    };
    admit_all(&daemon);
    let check = |line: String| {
        let said = run(&daemon, &line);
        assert_eq!(count(&said, "lost"), 0, "{line}: {said}");
        assert_eq!(count(&said, "failed_reads"), 0, "{line}: {said}");
        assert_eq!(count(&said, "failed_writes"), 0, "{line}: {said}");
        assert!(count(&said, "kernel_writes") > 1000, "{line}: {said}");
    };
    let program = program.display();
    check(format!("{program} 50"));
    if !is_installed("setpriv", "util-linux") {
        return;
    }
    // Without privilege siwd copies the memory where permitted ...
    check(format!("{NOBODY} {program} 50"));
    // ... and remaps it where the userfaultfd device can be opened.
    if !Path::new("/dev/userfaultfd").exists() {
        println!("skipped: the kernel has no /dev/userfaultfd");
        return;
    }
    let daemon = Daemon::loopback();
    admit_all(&daemon);
    let script = daemon.dir.path().join("with_device");
    let device = daemon.dir.path().join("device");
    let text = format!(
        "set -e\nnumber=$(stat -c '%t %T' /dev/userfaultfd)\nset -- $number\n\
         mknod -m 666 {device} c $((0x$1)) $((0x$2))\n\
         mount --bind {device} /dev/userfaultfd\nexec {NOBODY} {program} 50\n",
        device = device.display()
    );
    std::fs::write(&script, text).unwrap();
    let said = run(&daemon, &format!("unshare -m sh {}", script.display()));
    assert_eq!(count(&said, "lost"), 0, "{said}");
    assert_eq!(count(&said, "failed_writes"), 0, "{said}");
    assert_eq!(count(&said, "failed_reads"), 0, "{said}");
}

/// Pages that io_uring has pinned are not replaced, nor given back.
#[test]
fn buffers_of_io_uring_stay_its_buffers_when_they_are_registered() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "registered_memory") else {
        return;
    };
    run_or_skip(&daemon, &format!("{} uring", program.display()));
    if !is_installed("setpriv", "util-linux") {
        return;
    }
    let copies = format!("{LOOPBACK}[control]\nprocess_memory = \"all\"\n");
    let daemon = Daemon::start(&copies, &[]);
    admit_all(&daemon);
    let Some(program) = compile(&daemon, "registered_memory") else {
        return;
    };
    run_or_skip(&daemon, &format!("{NOBODY} {} uring", program.display()));
}

/// Pages that a disk is writing meanwhile are not replaced.
#[test]
fn reads_under_way_lose_nothing_when_their_memory_is_registered() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "registered_memory") else {
        return;
    };
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.write_all(&vec![0x5a; 64 << 20]).unwrap();
    file.as_file().sync_all().unwrap();
    run_or_skip(
        &daemon,
        &format!("{} aio {}", program.display(), file.path().display()),
    );
}

/// After the last registration MADV_DONTNEED, MADV_FREE, mremap(2) and fork(2) work as before.
#[test]
fn memory_is_private_again_after_its_last_registration() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "registered_memory") else {
        return;
    };
    for what in ["private", "threads", "maps"] {
        println!("{}", run(&daemon, &format!("{} {what}", program.display())));
    }
    if !is_installed("setpriv", "util-linux") {
        return;
    }
    admit_all(&daemon);
    run(&daemon, &format!("{NOBODY} {} private", program.display()));
}

/// Long memory stays with the library for its next registration, of which the program sees nothing.
#[test]
fn idle_pages_are_the_memory_of_the_program() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "idle_pages") else {
        return;
    };
    for what in ["fork", "give-up", "cycle", "short", "close"] {
        println!("{}", run(&daemon, &format!("{} {what}", program.display())));
    }
}

#[test]
fn registered_memory_keeps_the_attributes_of_its_mapping() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "mapping_attributes") else {
        return;
    };
    println!("{}", run(&daemon, &program.display().to_string()));
}

/// In a container the threads of a program are stopped while its memory is registered, and no update
/// of theirs is lost.
#[test]
fn memory_is_registered_beside_threads_where_userfaultfd_is_denied() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "registered_memory") else {
        return;
    };
    let line = format!("{} denied", program.display());
    run(&daemon, &line);
    if is_installed("setpriv", "util-linux") {
        admit_all(&daemon);
        let said = run(&daemon, &format!("{NOBODY} {line}"));
        assert!(said.contains("registered"), "{said}");
    }
}

/// Where they cannot be stopped, the error names the setting that helps.
#[test]
fn a_program_that_may_not_freeze_memory_is_told_how_to_permit_it() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "registered_memory") else {
        return;
    };
    if !is_installed("setpriv", "util-linux") {
        return;
    }
    admit_all(&daemon);
    let line = format!("{} blocked", program.display());
    let said = run(&daemon, &format!("{NOBODY} {line}"));
    assert!(said.contains("Operation not permitted"), "{said}");
    assert!(said.contains("--device /dev/userfaultfd"), "{said}");
    assert!(said.contains("process_memory"), "{said}");
    // Root's memory can be copied.
    let said = run(&daemon, &line);
    assert!(said.contains("registered"), "{said}");
}

/// Runs a program that ends with 77 where the machine lacks something.
fn run_or_skip(daemon: &Daemon, line: &str) {
    let (status, said) = Program::start(daemon, line).finish();
    if status.code() == Some(77) {
        println!("skipped: {said}");
        return;
    }
    assert!(status.success(), "{line}: {status}: {said}");
    println!("{said}");
}

/// Without either, updates are still not lost, and the region gives the reason for its method.
#[test]
fn no_update_is_lost_without_privilege() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "kernel_access") else {
        return;
    };
    if !is_installed("setpriv", "util-linux") {
        return;
    }
    admit_all(&daemon);
    let said = run(&daemon, &format!("{NOBODY} {} 50", program.display()));
    assert_eq!(count(&said, "lost"), 0, "{said}");
    assert_eq!(count(&said, "failed_reads"), 0, "{said}");
}

/// A child has pages of its own, whatever the number of mappings.
#[test]
fn a_child_of_a_process_without_room_for_mappings_has_its_own_pages() {
    let daemon = Daemon::loopback();
    if let Some(program) = compile(&daemon, "crowded_fork") {
        run_or_skip(&daemon, &program.display().to_string());
    }
}

/// The first blocks of a thread's heap lie beside the state of malloc(3).
#[test]
fn every_block_of_a_threads_heap_can_be_registered_for_atomics() {
    let daemon = Daemon::loopback();
    if let Some(program) = compile(&daemon, "thread_heaps") {
        run_or_skip(&daemon, &program.display().to_string());
    }
}

/// Pages that stay remapped after deregistration keep their content wherever another thread moves them.
#[test]
fn moved_pages_keep_their_content_while_their_old_addresses_are_registered() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "moved_memory") else {
        return;
    };
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (program, path) = (program.display(), file.path().display());
    run_or_skip(&daemon, &format!("{program} 200 {path}"));
}

/// realloc(3) of glibc moves large blocks by mremap(2), which the library cannot override there.
#[test]
fn blocks_that_grow_after_their_registration_show_no_other_memory() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "grown_chunk") else {
        return;
    };
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (program, path) = (program.display(), file.path().display());
    run_or_skip(&daemon, &format!("{program} {path}"));
}

/// Programs with caches of registrations (UCX, Open MPI, libfabric) hook calls that change memory.
#[test]
fn programs_that_hook_memory_calls_see_those_on_registered_memory() {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "hooked_memory") else {
        return;
    };
    for what in [
        "code",
        "code late",
        "own",
        "own late",
        "table",
        "table late",
    ] {
        run_or_skip(&daemon, &format!("{} {what}", program.display()));
    }
}

/// Runs a program with an allocator's library preloaded behind those of siwd.
const WITH_ALLOCATOR: &str = "export LD_PRELOAD=\"$LD_PRELOAD:$1\"\nshift\nexec \"$@\"\n";

/// Allocators: name, and in each suite the package and its library.
const ALLOCATORS: [(&str, &[(&str, &str)]); 3] = [
    ("jemalloc", &[("libjemalloc2", "libjemalloc.so.2")]),
    (
        "mimalloc",
        &[
            ("libmimalloc3", "libmimalloc.so.3"),
            ("libmimalloc2.0", "libmimalloc.so.2"),
        ],
    ),
    (
        "tcmalloc",
        &[
            ("libtcmalloc-minimal4t64", "libtcmalloc_minimal.so.4"),
            ("libtcmalloc-minimal4", "libtcmalloc_minimal.so.4"),
        ],
    ),
];

/// The library under the first of its names that this machine has.
fn find_library(names: &[(&str, &str)]) -> Option<PathBuf> {
    let unpacked = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../programs");
    let found = names.iter().find_map(|(package, library)| {
        let path = format!("usr/lib/{}-linux-gnu/{library}", std::env::consts::ARCH);
        let roots = [PathBuf::from("/"), unpacked.join(package)];
        let mut paths = roots.iter().map(|root| root.join(&path));
        paths.find(|path| path.exists())
    });
    if found.is_none() {
        let (package, library) = names[names.len() - 1];
        skip_for_lack_of(library, package);
    }
    found
}

/// Steps of each thread in one run of the program.
const STEPS_OF_RUN: u64 = 1500;

/// Threads register, use, free and reallocate blocks of one allocator, for `SIWD_HEAP_STEPS` steps or
/// one run; all zeroes that it promises are zeroes, and no other byte changes.
fn check_allocator(allocator: Option<&Path>) {
    let daemon = Daemon::loopback();
    let Some(program) = compile(&daemon, "registered_heap") else {
        return;
    };
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for page in 1..=64 {
        file.write_all(&[page; 4096]).unwrap();
    }
    file.as_file().sync_all().unwrap();
    let start = match allocator {
        Some(library) => {
            let script = daemon.dir.path().join("with_allocator");
            std::fs::write(&script, WITH_ALLOCATOR).unwrap();
            format!("sh {} {} ", script.display(), library.display())
        }
        None => String::new(),
    };
    let (program, path) = (program.display(), file.path().display());
    let steps = std::env::var("SIWD_HEAP_STEPS").map_or(0, |text| text.parse().unwrap());
    for _ in 0..(steps / STEPS_OF_RUN).max(1) {
        for disk in [String::new(), format!("{path}"), format!("{path} -")] {
            run_or_skip(&daemon, &format!("{start}{program} {STEPS_OF_RUN} {disk}"));
        }
    }
}

#[test]
fn no_byte_is_wrong_in_registered_blocks_of_glibc() {
    check_allocator(None);
}

#[test]
fn no_byte_is_wrong_in_registered_blocks_of_other_allocators() {
    for (name, names) in ALLOCATORS {
        if let Some(library) = find_library(names) {
            println!("{name}");
            check_allocator(Some(&library));
        }
    }
}
