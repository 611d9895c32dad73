//! Private runs on machines that lack something: shared memory, user namespaces, files of sysfs; and
//! beside the libraries of other packages.

use crate::common::programs::is_installed;
use crate::common::siwrun;
use std::path::Path;
use std::process::{Command, Output};

/// The devices, and a connection between them. The client may start before its server listens.
const PROGRAMS: &str = "set -e
    ibv_devices
    rping -s -a 10.77.0.2 -C 3 &
    for i in $(seq 100); do rping -c -a 10.77.0.2 -C 3 && break; sleep 0.05; done
    wait $!";

fn has_programs() -> bool {
    is_installed("ibv_devices", "ibverbs-utils") && is_installed("rping", "rdmacm-utils")
}

/// `siwrun --private` for a shell command, by way of another command.
fn private(by: &[&str], script: &str, folder: &Path) -> Command {
    let mut command = match by.split_first() {
        Some((program, rest)) => {
            let mut command = Command::new(program);
            command.args(rest).arg(siwrun());
            command
        }
        None => Command::new(siwrun()),
    };
    command
        .args(["--private", "--siwd", env!("CARGO_BIN_EXE_siwd")])
        .args(["--", "sh", "-c", script])
        .env("XDG_RUNTIME_DIR", folder)
        .env_remove("SIWD_SOCKET");
    command
}

fn text(out: &Output) -> String {
    let both = [&out.stdout[..], &out.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Mounts that end with their process.
const OWN_MOUNTS: [&str; 3] = ["--mount", "--propagation", "private"];

/// Runs the programs in namespaces that `setup` has changed; `kinds` are the options of unshare(1).
/// Returns `None`, with a message, where that is impossible.
fn try_in(kinds: &[&str], setup: &str) -> Option<Output> {
    let may = Command::new("unshare").args(kinds).arg("true").status();
    if !may.is_ok_and(|status| status.success()) {
        println!("skipped: this process may not create namespaces");
        return None;
    }
    if !has_programs() {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let setup = format!("set -e\n{setup}\nexec \"$@\"");
    let by = [&["unshare"], kinds, &["sh", "-c", &setup, "sh"]].concat();
    Some(private(&by, PROGRAMS, folder.path()).output().unwrap())
}

fn run_in(kinds: &[&str], setup: &str) {
    let Some(out) = try_in(kinds, setup) else {
        return;
    };
    assert!(out.status.success(), "{out:?}");
    let said = text(&out);
    assert!(said.contains("siw0") && said.contains("siw1"), "{said}");
}

#[test]
fn programs_run_with_little_shared_memory() {
    run_in(&OWN_MOUNTS, "mount -t tmpfs -o size=64k shm /dev/shm");
}

#[test]
fn programs_run_without_a_folder_of_shared_memory() {
    // A new /dev with little more than containers have.
    run_in(
        &OWN_MOUNTS,
        "new=$(mktemp -d)
        mount -t tmpfs dev $new
        for name in null zero full random urandom; do
            touch $new/$name
            mount --bind /dev/$name $new/$name
        done
        mount --rbind $new /dev
        umount -R -l $new
        rmdir $new
        test ! -e /dev/shm",
    );
}

#[test]
fn programs_run_where_no_user_namespace_can_be_made() {
    run_in(
        &["--user", "--map-root-user"],
        "echo 0 >/proc/sys/user/max_user_namespaces
        ! unshare --user true 2>/dev/null",
    );
}

#[test]
fn a_root_without_sys_is_named_with_the_remedy() {
    let Some(out) = try_in(&OWN_MOUNTS, "mount -t tmpfs none /sys") else {
        return;
    };
    assert_eq!(out.status.code(), Some(127), "{out:?}");
    let said = text(&out);
    assert!(said.contains("mount -t sysfs sysfs /sys"), "{said}");
}

/// A container that shares the socket alone. `SIW_VERBS_LOG` is the option `--verbose` of siwrun.
#[test]
fn programs_run_in_a_container_without_the_files_of_sysfs() {
    if !has_programs() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = format!("rm -r $SIWD_SOCKET.sysfs\n{PROGRAMS}\nls /sys/class/infiniband || true");
    let out = private(&[], &script, folder.path())
        .env("SIW_VERBS_LOG", "1")
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let said = text(&out);
    assert!(said.contains("siw0") && said.contains("siw1"), "{said}");
    assert!(
        said.contains("siwd.sock.sysfs: mount the folder of the socket"),
        "{said}"
    );
}

/// Those of rdma-core, and those of another build of siwd, are on the paths of the caller.
#[test]
fn libraries_of_other_packages_on_the_same_path_are_not_used() {
    if !has_programs() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let library = siwrun().with_file_name("libsiw_verbs.so");
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        std::fs::copy(&library, other.path().join(name)).unwrap();
    }
    let rdma_core = "/usr/lib/x86_64-linux-gnu";
    let [first, second] = [other.path().to_str().unwrap(), rdma_core];
    // The files that the libraries of a program come from.
    let script = format!(
        "{PROGRAMS}
        python3 -c 'import ctypes; ctypes.CDLL(\"libibverbs.so.1\"); ctypes.CDLL(\"librdmacm.so.1\")
print(open(\"/proc/self/maps\").read())'"
    );
    for path in [format!("{first}:{second}"), format!("{second}:{first}")] {
        let out = private(&[], &script, folder.path())
            .env("LD_LIBRARY_PATH", &path)
            .output()
            .unwrap();
        assert!(out.status.success(), "{path}: {out:?}");
        let said = text(&out);
        assert!(said.contains("siw0") && said.contains("siw1"), "{said}");
        assert!(said.contains("libsiw_verbs.so"), "{said}");
        let strange = said
            .lines()
            .find(|line| line.contains("libibverbs.so") || line.contains("librdmacm.so"));
        assert_eq!(strange, None, "{path}: {said}");
    }
}
