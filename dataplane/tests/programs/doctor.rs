//! `siwrun doctor`: its findings about programs of the distribution and about files made here,
//! before they are run.

use crate::common::programs::is_installed;
use crate::common::siwrun;
use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the exit code and the text of each finding that is more than a note.
fn examine(program: impl AsRef<OsStr>) -> (i32, Vec<String>) {
    let out = Command::new(siwrun())
        .args(["doctor", "--json"])
        .arg(program)
        .output()
        .unwrap();
    let code = out.status.code().unwrap();
    if code == 2 {
        return (code, vec![String::from_utf8(out.stderr).unwrap()]);
    }
    let document: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(document["works"], code == 0, "{document:#}");
    let files = document["files"].as_array().unwrap();
    let findings = files
        .iter()
        .flat_map(|file| file["findings"].as_array().unwrap());
    let severe = findings.filter(|finding| finding["severity"] != "note");
    let what = severe.map(|finding| finding["what"].as_str().unwrap().to_owned());
    (code, what.collect())
}

fn says(findings: &[String], text: &str) -> bool {
    findings.iter().any(|what| what.contains(text))
}

/// Compiles a C program; returns `None` without a compiler.
fn compile(folder: &Path, name: &str, source: &str, flags: &[&str]) -> Option<PathBuf> {
    if !is_installed("cc", "gcc") {
        return None;
    }
    let (file, program) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&file, source).unwrap();
    let out = Command::new("cc")
        .arg("-o")
        .args([&program, &file])
        .args(flags)
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    Some(program)
}

#[test]
fn a_program_that_works_has_no_finding() {
    if is_installed("rping", "rdmacm-utils") {
        assert_eq!(examine("rping"), (0, vec![]));
    }
}

#[test]
fn multicast_is_found() {
    if is_installed("mckey", "rdmacm-utils") {
        let (code, findings) = examine("mckey");
        assert_eq!(code, 1);
        assert!(says(&findings, "rdma_join_multicast"), "{findings:?}");
        assert!(says(&findings, "ibv_create_ah"), "{findings:?}");
    }
}

#[test]
fn a_program_that_refuses_iwarp_gets_its_persona_named() {
    if is_installed("ucx_perftest", "ucx-utils") {
        let out = Command::new(siwrun())
            .args(["doctor", "ucx_perftest"])
            .output()
            .unwrap();
        let said = String::from_utf8(out.stdout).unwrap();
        assert!(
            said.contains("it contains UCX, which refuses iWARP"),
            "{said}"
        );
        assert!(said.contains("--persona roce"), "{said}");
    }
}

#[test]
fn functions_of_a_nics_own_library_are_found() {
    if is_installed("ib_write_bw", "perftest") {
        let (code, findings) = examine("ib_write_bw");
        assert_eq!(code, 1);
        assert!(says(&findings, "of libmlx5"), "{findings:?}");
    }
}

#[test]
fn what_is_no_elf_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    std::fs::write(&text, "no program\n").unwrap();
    let (code, said) = examine(&text);
    assert_eq!(code, 2);
    assert!(says(&said, "no ELF file"), "{said:?}");
    // Truncated after the identification or anywhere else: an error, not a panic.
    let whole = std::fs::read(siwrun()).unwrap();
    for length in [4, 17, 19, 63, 64, 4096] {
        std::fs::write(&text, &whole[..length]).unwrap();
        assert_eq!(examine(&text).0, 2, "{length} bytes");
    }
}

#[test]
fn another_processor_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let mut bytes = std::fs::read(siwrun()).unwrap();
    // e_machine: EM_S390, which siwd does not support.
    bytes[18] = 22;
    std::fs::write(&program, bytes).unwrap();
    let (code, findings) = examine(&program);
    assert_eq!(code, 1);
    assert!(says(&findings, "another processor"), "{findings:?}");
}

#[test]
fn static_linking_is_found() {
    let folder = tempfile::tempdir().unwrap();
    for flags in [["-static"], ["-static-pie"]] {
        let source = "int main(void) { return 0; }";
        let Some(program) = compile(folder.path(), "static", source, &flags) else {
            return;
        };
        let (code, findings) = examine(&program);
        assert_eq!(code, 1);
        assert!(says(&findings, "statically linked"), "{findings:?}");
    }
}

/// Tests a libibverbs replacement with a function and a version node that siwd's library lacks.
#[test]
fn missing_functions_and_versions_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let map = path.join("map");
    std::fs::write(
        &map,
        "IBVERBS_1.1 { global: ibv_of_nobody; };\nIBVERBS_9.9 { global: ibv_of_tomorrow; };",
    )
    .unwrap();
    let script = format!("-Wl,--version-script={}", map.display());
    let source = "int ibv_of_nobody(void) { return 0; } int ibv_of_tomorrow(void) { return 0; }";
    let flags = ["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1", &script];
    let Some(library) = compile(path, "libibverbs.so.1", source, &flags) else {
        return;
    };
    let source = "int ibv_of_nobody(void); int ibv_of_tomorrow(void);\n\
                  int main(void) { return ibv_of_nobody() + ibv_of_tomorrow(); }";
    let flags = [library.to_str().unwrap()];
    let program = compile(path, "program", source, &flags).unwrap();
    let (code, findings) = examine(&program);
    assert_eq!(code, 1);
    assert!(says(&findings, "ibv_of_nobody@IBVERBS_1.1"), "{findings:?}");
    assert!(says(&findings, "version IBVERBS_9.9"), "{findings:?}");
    // The folder holds the program and the library; the library counts as a copy only.
    assert_eq!(examine(path), (1, findings));
}

#[test]
fn a_script_is_examined_by_its_interpreter() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    std::fs::write(&script, "#!/usr/bin/env -S sh -e\nexit 0\n").unwrap();
    assert_eq!(examine(&script), (0, vec![]));
    std::fs::write(&script, "#!/of/nobody\n").unwrap();
    assert_eq!(examine(&script).0, 2);
}

#[test]
fn libraries_that_a_program_needs_are_examined() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let source = "int rdma_join_multicast(void *, void *, void *);\n\
                  int join(void) { return rdma_join_multicast(0, 0, 0); }";
    let flags = ["-shared", "-fPIC", "-Wl,-soname,libmiddle.so", "-lrdmacm"];
    let Some(library) = compile(path, "libmiddle.so", source, &flags) else {
        return;
    };
    let source = "int join(void);\nint main(void) { return join(); }";
    let flags = [library.to_str().unwrap(), "-Wl,-rpath,$ORIGIN"];
    let program = compile(path, "program", source, &flags).unwrap();
    let (code, findings) = examine(&program);
    assert_eq!(code, 1);
    assert!(says(&findings, "rdma_join_multicast"), "{findings:?}");
}

/// ld.so looks up versions in the file that a program was linked with; the copy in a wheel has
/// them.
#[test]
fn a_copy_under_another_name_has_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let map = path.join("map");
    std::fs::write(&map, "IBVERBS_9.9 { global: ibv_of_tomorrow; };").unwrap();
    let script = format!("-Wl,--version-script={}", map.display());
    let source = "int ibv_of_tomorrow(void) { return 0; }";
    let flags = [
        "-shared",
        "-fPIC",
        "-Wl,-soname,libibverbs-12.so.1",
        &script,
    ];
    let Some(library) = compile(path, "libibverbs-12.so.1", source, &flags) else {
        return;
    };
    let source = "int ibv_of_tomorrow(void);\nint main(void) { return ibv_of_tomorrow(); }";
    let flags = [library.to_str().unwrap(), "-Wl,-rpath,$ORIGIN"];
    let program = compile(path, "program", source, &flags).unwrap();
    let (code, findings) = examine(&program);
    assert_eq!(code, 1);
    assert!(says(&findings, "version IBVERBS_9.9"), "{findings:?}");
    // It starts, with the remaining symbols from siwd's library.
    let links = path.join("links");
    let status = Command::new(siwrun())
        .arg("--links")
        .args([&links, &program])
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
}

/// Makes a wheel with these files in its folder `package.libs`; python3 compresses them.
fn pack_wheel(folder: &Path, files: &[&Path]) -> Option<PathBuf> {
    if !is_installed("python3", "python3") {
        return None;
    }
    let wheel = folder.join("package-1.0-cp312-cp312-linux_x86_64.whl");
    let script = "import sys, zipfile\n\
                  with zipfile.ZipFile(sys.argv[1], 'w', zipfile.ZIP_DEFLATED) as wheel:\n  \
                    wheel.writestr('package/__init__.py', 'import package.core')\n  \
                    wheel.writestr('package/empty', '')\n  \
                    [wheel.write(f, 'package.libs/' + f.rsplit('/', 1)[1]) for f in sys.argv[2:]]";
    let status = Command::new("python3")
        .args(["-c", script])
        .arg(&wheel)
        .args(files)
        .status()
        .unwrap();
    assert!(status.success());
    Some(wheel)
}

#[test]
fn the_libraries_in_a_wheel_are_examined() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let source = "int rdma_join_multicast(void *, void *, void *);\n\
                  int join(void) { return rdma_join_multicast(0, 0, 0); }";
    let flags = ["-shared", "-fPIC", "-lrdmacm"];
    let Some(refused) = compile(path, "libjoin.so", source, &flags) else {
        return;
    };
    let source = "int ibv_fork_init(void);\nint init(void) { return ibv_fork_init(); }";
    let flags = ["-shared", "-fPIC", "-libverbs"];
    let fine = compile(path, "libfine.so", source, &flags).unwrap();
    let wheels = path.join("wheels");
    std::fs::create_dir(&wheels).unwrap();

    let Some(wheel) = pack_wheel(&wheels, &[&fine, &refused]) else {
        return;
    };
    let (code, findings) = examine(&wheel);
    assert_eq!(code, 1);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert!(says(&findings, "rdma_join_multicast"), "{findings:?}");
    // The output names the file; a wheel in a folder is found too.
    let doctor = |what: &Path| Command::new(siwrun()).arg("doctor").arg(what).output();
    for what in [&wheel, &wheels] {
        let said = String::from_utf8(doctor(what).unwrap().stdout).unwrap();
        let inner = |name: &str| wheel.join("package.libs").join(name).display().to_string();
        assert!(said.contains(&inner("libjoin.so")), "{said}");
        assert!(said.contains(&inner("libfine.so")), "{said}");
    }

    pack_wheel(&wheels, &[&fine]).unwrap();
    assert_eq!(examine(&wheel), (0, vec![]));
    // A wheel without ELF files.
    pack_wheel(&wheels, &[]).unwrap();
    let (code, said) = examine(&wheel);
    assert_eq!(code, 2);
    assert!(says(&said, "no ELF files"), "{said:?}");
}

#[test]
fn a_damaged_wheel_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = "int ibv_fork_init(void);\nint init(void) { return ibv_fork_init(); }";
    let flags = ["-shared", "-fPIC", "-libverbs"];
    let Some(library) = compile(folder.path(), "library.so", source, &flags) else {
        return;
    };
    let Some(wheel) = pack_wheel(folder.path(), &[&library]) else {
        return;
    };
    let whole = std::fs::read(&wheel).unwrap();
    for length in [4, 30, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&wheel, &whole[..length]).unwrap();
        let (code, said) = examine(&wheel);
        assert_eq!(code, 2, "{length} bytes: {said:?}");
        assert!(says(&said, "cannot read"), "{said:?}");
    }
    // A corrupted byte in the compressed library.
    let mut bytes = whole;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x55;
    std::fs::write(&wheel, &bytes).unwrap();
    let (code, said) = examine(&wheel);
    assert_eq!(code, 2, "{said:?}");
}
