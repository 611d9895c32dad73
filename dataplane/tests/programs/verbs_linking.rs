//! The drop-in library from the view of compilers and linkers: its symbols and versions are those
//! of the distribution's libibverbs and librdmacm, and C programs compile against it.

use crate::common::Daemon;
use crate::common::c_programs::{can_compile, compile, compile_with};
use crate::common::programs::Program;
use crate::common::siwrun;
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Symbols that a library defines, with their versions: `name@version`.
fn defined_symbols(library: &Path) -> BTreeSet<String> {
    let out = Command::new("nm")
        .args(["-D", "--with-symbol-versions", "--defined-only"])
        .arg(library)
        .output()
        .unwrap();
    assert!(out.status.success(), "nm {}", library.display());
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let names = text
        .lines()
        .filter_map(|line| line.split_whitespace().last());
    let versioned = names.filter_map(|name| name.split_once('@'));
    versioned
        .map(|(name, version)| format!("{name}@{}", version.trim_start_matches('@')))
        .collect()
}

#[test]
fn every_symbol_of_the_distribution_is_there() {
    let ours = defined_symbols(&siwrun().with_file_name("libsiw_verbs.so"));
    for library in ["libibverbs.so.1", "librdmacm.so.1"] {
        let path = Path::new("/usr/lib/x86_64-linux-gnu").join(library);
        if !path.exists() {
            println!("skipped: {} is not installed", path.display());
            continue;
        }
        let theirs = defined_symbols(&path);
        // The IBVERBS_1.0 versions of symbols that also exist in 1.1 serve programs older than
        // 2006.
        let is_old = |name: &&String| {
            name.strip_suffix("@IBVERBS_1.0")
                .is_some_and(|name| ours.contains(&format!("{name}@IBVERBS_1.1")))
        };
        // The version nodes themselves are symbols too.
        let is_node = |name: &&String| {
            name.split_once('@')
                .is_some_and(|(name, node)| name == node)
        };
        let missing: Vec<_> = theirs
            .iter()
            .filter(|name| !ours.contains(*name) && !is_old(name) && !is_node(name))
            .collect();
        assert!(missing.is_empty(), "{library}: {missing:?}");
        assert!(theirs.len() > 50, "{library}: {theirs:?}");
    }
}

/// Has siwrun make the links of a library; returns their folder.
fn make_links(library: &Path, runtime: &Path) -> PathBuf {
    let made = Command::new(siwrun())
        .arg("--library")
        .arg(library)
        .arg("--print-links")
        .env("XDG_RUNTIME_DIR", runtime)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    PathBuf::from(String::from_utf8(made.stdout).unwrap().trim_end())
}

/// An installation under another path, as in a container.
#[test]
fn the_links_of_siwrun_stay_when_the_installation_has_another_path() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    std::fs::create_dir(&first).unwrap();
    std::fs::write(first.join("libsiw_verbs.so"), "").unwrap();
    let of = |links: &Path| {
        let names = ["libibverbs.so.1", "pkgconfig/libibverbs.pc"];
        names.map(|name| std::fs::symlink_metadata(links.join(name)).unwrap().ino())
    };
    let links = make_links(&first.join("libsiw_verbs.so"), folder.path());
    let made = of(&links);
    std::fs::rename(&first, &second).unwrap();
    let moved = make_links(&second.join("libsiw_verbs.so"), folder.path());
    assert_eq!(moved, second.join("siw-verbs/lib"));
    assert_eq!(of(&moved), made);
    let found = moved.join("libibverbs.so.1").canonicalize().unwrap();
    assert_eq!(
        found,
        second.canonicalize().unwrap().join("libsiw_verbs.so")
    );
}

/// Installations in which siwrun can write nothing.
#[test]
fn siwruns_of_two_installations_have_links_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let links = ["first", "second"].map(|name| {
        let installed = folder.path().join(name);
        std::fs::create_dir(&installed).unwrap();
        std::fs::write(installed.join("libsiw_verbs.so"), "").unwrap();
        // In the place of the folder for links.
        std::fs::write(installed.join("siw-verbs"), "").unwrap();
        make_links(&installed.join("libsiw_verbs.so"), folder.path())
    });
    assert_ne!(links[0], links[1]);
    for (links, name) in links.iter().zip(["first", "second"]) {
        assert!(links.starts_with(folder.path()), "{}", links.display());
        let found = links.join("librdmacm.so.1").canonicalize().unwrap();
        assert!(found.ends_with(format!("{name}/libsiw_verbs.so")));
    }
}

const LIST_DEVICES: &str = r#"
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <stdio.h>
int main(void)
{
    int count = 0, socket = rsocket(AF_INET, SOCK_STREAM, 0);
    struct ibv_device **list = ibv_get_device_list(&count);
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (socket < 0 || !list || !channel)
        return 1;
    for (int i = 0; i < count; i++)
        printf("%s\n", ibv_get_device_name(list[i]));
    rdma_destroy_event_channel(channel);
    ibv_free_device_list(list);
    return rclose(socket);
}
"#;

#[test]
fn a_c_program_compiles_against_the_library() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = daemon.dir.path().join("list.c");
    std::fs::write(&source, LIST_DEVICES).unwrap();
    let (program, folder) = compile(&daemon, &source);
    let said = Command::new(&program)
        .env("LD_LIBRARY_PATH", &folder)
        .env("SIWD_SOCKET", &daemon.socket)
        .output()
        .unwrap();
    assert!(said.status.success(), "{said:?}");
    assert_eq!(String::from_utf8_lossy(&said.stdout), "siw0\nsiw1\n");
}

#[test]
fn thousands_of_connections_are_open_at_once() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/programs/rdma_cm_load.c");
    let (program, _) = compile(&daemon, &source);
    let line = format!("{} 10.77.0.2 2000 32", program.display());
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains(r#"{"open":2000,"#), "{said}");
}

/// The node of functions that only this project's own libraries call.
const OWN_NODE: &str = "SIWD_PRIVATE";

/// The provider interface has a node for each release of rdma-core that changed it.
const PROVIDER_NODES: [&str; 5] = ["34", "57", "59", "64", "65"];

#[test]
fn every_symbol_works_when_it_is_looked_up_by_name() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/symbol_calls.c");
    let (program, _) = compile(&daemon, &source);
    let ours = defined_symbols(&siwrun().with_file_name("libsiw_verbs.so"));
    let symbols = ours
        .iter()
        .filter_map(|symbol| symbol.split_once('@'))
        .filter(|(name, node)| name != node && *node != OWN_NODE);
    let (private, public): (Vec<_>, Vec<_>) =
        symbols.partition(|(_, node)| node.starts_with("IBVERBS_PRIVATE_"));
    let mut line = program.display().to_string();
    for (name, node) in &private {
        line += &format!(" {name}@{node}");
    }
    let said = Program::start(&daemon, &line).succeed();
    let called: BTreeSet<&str> = said
        .lines()
        .filter_map(|line| line.strip_prefix("called "))
        .collect();
    let uncalled: Vec<_> = public
        .iter()
        .filter(|(name, _)| !called.contains(name))
        .collect();
    assert!(uncalled.is_empty(), "{uncalled:?}");
    assert!(public.len() > 150, "{public:?}");
    for release in PROVIDER_NODES {
        let node = format!("IBVERBS_PRIVATE_{release}");
        // As many as rdma-core 65 has.
        let count = private.iter().filter(|(_, of)| *of == node).count();
        assert!(count >= 92, "{node} has {count} symbols");
        let registration = format!("verbs_register_driver_{release}");
        for name in ["ibv_query_gid_type", &registration] {
            let symbol = format!("{name}@{node}");
            assert!(called.contains(symbol.as_str()), "{symbol}: {said}");
        }
    }
}

/// The folder of headers of a suite of Debian, and the release of rdma-core that they belong to. Downloaded at
/// the first use and kept in the target directory; `None`, with a message, where that fails.
fn headers_of(suite: &str) -> Option<(PathBuf, u32)> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("verbs-headers-{suite}"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/verbs-headers");
    let version = || std::fs::read_to_string(folder.join("version"));
    if version().is_err() {
        let mut fetch = Command::new(script);
        let out = fetch.arg(suite).arg(&folder).output().unwrap();
        if !out.status.success() {
            let reason = String::from_utf8_lossy(&out.stderr);
            println!("skipped: {}", reason.trim());
            // Packages of sid may be missing for a while.
            let is_needed = suite != "sid" && std::env::var_os("CI").is_some();
            assert!(!is_needed, "CI has to download them");
            return None;
        }
    }
    let release = version().unwrap().split('.').next()?.parse().unwrap();
    Some((folder.join("usr/include"), release))
}

/// Releases lengthen structs by members, which a program finds NULL where siwd lacks the operation; they follow
/// or precede the struct of the header that the library was compiled with.
#[test]
fn programs_of_other_releases_find_each_member_of_a_struct_in_its_place() {
    if !can_compile() {
        return;
    }
    let daemon = Daemon::loopback();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/struct_layouts.c");
    let run = |flags: &[String]| {
        let (program, _) = compile_with(&daemon, &source, flags);
        let said = Program::start(&daemon, &program.display().to_string()).succeed();
        assert!(said.contains("done"), "{said}");
    };
    // With the members of every release from 44 on.
    run(&["-DRELEASE=44".into()]);
    for suite in ["trixie", "sid"] {
        if let Some((headers, release)) = headers_of(suite) {
            assert!(release >= 56, "{suite} has rdma-core {release}");
            let include = format!("-I{}", headers.display());
            run(&[include, format!("-DRELEASE={release}")]);
        }
    }
}

fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, files);
        } else {
            files.push(path);
        }
    }
}

/// The macros of `export.rs` keep panics from leaving functions that C programs call; a function that
/// is defined without them would end the program.
#[test]
fn no_function_of_the_c_interface_lets_a_panic_out() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client-lib/verbs/src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    let unguarded: Vec<String> = files
        .iter()
        // `waiting.rs` declares functions of the C library, and has a clean-up handler that contains panics.
        .filter(|path| !path.ends_with("export.rs") && !path.ends_with("waiting.rs"))
        .filter(|path| !path.starts_with(source.join("bin")))
        .flat_map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            let lines = text.lines().map(str::to_owned).collect::<Vec<_>>();
            lines.into_iter().map(|line| (path.clone(), line))
        })
        // Types of functions have no name behind `fn`.
        .filter(|(_, line)| {
            line.contains("extern \"C\" fn ") || line.contains("extern \"C-unwind\"")
        })
        .map(|(path, line)| format!("{}: {line}", path.display()))
        .collect();
    assert!(files.len() > 40, "{files:?}");
    assert!(unguarded.is_empty(), "{unguarded:#?}");
}

/// Calls of the C library that are cancellation points unwind a cancelled thread through the functions that
/// override them; one with the ABI "C" would end the program.
#[test]
fn every_overriding_function_can_be_unwound() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client-lib");
    let mut files = Vec::new();
    rust_files(&root.join("mirror/src"), &mut files);
    rust_files(&root.join("preload/src"), &mut files);
    let mut count = 0;
    for path in &files {
        let text = std::fs::read_to_string(path).unwrap();
        for function in text.split("#[unsafe(export_name").skip(1) {
            let abi = function
                .find("extern \"C-unwind\" fn")
                .unwrap_or(usize::MAX);
            // Behind the attribute, and the documentation at most.
            assert!(abi < 600, "{}: {function:.80}", path.display());
            count += 1;
        }
    }
    assert!(count > 50, "{count} functions");
}

/// The locks of `client-lib/src/locking.rs` know their process. Another one that a thread holds at fork(2)
/// would block the child for ever, except in state that a child does not share (`PerProcess`) or that
/// the handlers of fork(2) keep usable (`client-lib/src/app_memory/`).
#[test]
fn every_lock_of_the_libraries_knows_its_process() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client-lib");
    let mut files = Vec::new();
    for folder in ["src", "verbs/src"] {
        rust_files(&root.join(folder), &mut files);
    }
    let exempt = ["src/locking.rs", "src/app_memory", "verbs/src/bin"].map(|path| root.join(path));
    files.retain(|path| !exempt.iter().any(|exempt| path.starts_with(exempt)));
    let types = ["Mutex<", "RwLock<", "SpinLock<", "ReentrantLock<"];
    let mut others = Vec::new();
    for path in &files {
        let text = std::fs::read_to_string(path).unwrap();
        for line in text.lines() {
            let line = line
                .replace("ProcessMutex<", "")
                .replace("ProcessSpinLock<", "");
            let is_lock = types.iter().any(|kind| line.contains(kind));
            if is_lock && !line.contains("PerProcess<") {
                others.push(format!("{}: {line}", path.display()));
            }
        }
    }
    assert!(files.len() > 80, "{files:?}");
    assert!(others.is_empty(), "{others:#?}");
}
