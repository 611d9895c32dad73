//! iSER with target and initiator in user space: tgtd, and libiscsi in iscsi-inq and QEMU's tools.

use std::process::Command;

use crate::common::programs::{Program, free_port, is_installed, received_bytes, start_listening};
use crate::common::{Daemon, pattern};

const TARGET: &str = "iqn.2026-01.example:disk";
const INITIATOR: &str = "iqn.2026-01.example:initiator";
/// QEMU's initiator name.
const QEMU: &str = "iqn.2008-11.org.linux-kvm";
const LENGTH: usize = 4 << 20;

/// Sends an administrative command to tgtd.
fn administer(daemon: &Daemon, line: &str) {
    let out = Command::new("tgtadm")
        .args(line.split_whitespace())
        .env("TGT_IPC_SOCKET", daemon.dir.path().join("tgtd"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "tgtadm {line}: {said}");
}

/// Writes each part of the disk with a different octet, in the largest transfers of libiscsi 1.19,
/// and reads it back.
const OVERWRITE: &str = r#"
set -- "$1"
for part in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
    set -- "$@" -c "write -P $((part + 1)) $((part * 256))k 256k" \
        -c "read -P $((part + 1)) $((part * 256))k 256k"
done
url=$1
shift
exec qemu-io -f raw "$@" "$url"
"#;

#[test]
fn a_disk_is_read_and_written_over_iser() {
    check_disk("rdwr");
}

/// tgtd reads and writes its registered buffers by io_submit(2) with O_DIRECT.
#[test]
fn a_disk_is_read_and_written_over_iser_by_aio() {
    use std::os::unix::fs::OpenOptionsExt;
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut options = std::fs::File::options();
    options.read(true).custom_flags(nix::libc::O_DIRECT);
    match options.open(file.path()) {
        Ok(_) => check_disk("aio"),
        Err(error) => println!("skipped: O_DIRECT: {error}"),
    }
}

/// Copies, overwrites and reads back a disk, of a type of tgtd's backing stores.
fn check_disk(store: &str) {
    let programs = [
        ("tgtd", "tgt"),
        ("iscsi-inq", "libiscsi-bin"),
        ("qemu-io", "qemu-utils qemu-block-extra"),
    ];
    if !programs
        .iter()
        .all(|(name, package)| is_installed(name, package))
    {
        return;
    }
    let daemon = Daemon::loopback();
    let folder = daemon.dir.path();
    let [disk, copy, script] = ["disk", "copy", "overwrite.sh"].map(|name| folder.join(name));
    let written = pattern(1, LENGTH);
    std::fs::write(&disk, &written).unwrap();
    std::fs::write(&script, OVERWRITE).unwrap();
    // tgtd also opens a kernel port for iSCSI over TCP.
    let tgtd = format!(
        "env TGT_IPC_SOCKET={} tgtd -f --iser pool_sz_mb=16 --iscsi portal=127.0.0.1:{}",
        folder.join("tgtd").display(),
        free_port()
    );
    let _tgtd = start_listening(&daemon, &tgtd);
    let target = "--lld iser --mode target --tid 1 --op";
    administer(&daemon, &format!("{target} new -T {TARGET}"));
    let unit = "--lld iser --mode logicalunit --tid 1 --op new --lun 1";
    administer(
        &daemon,
        &format!("{unit} --bstype {store} -b {}", disk.display()),
    );
    // This version of tgtd requires both the initiator's address and its name.
    administer(&daemon, &format!("{target} bind -I ALL"));
    for name in [INITIATOR, QEMU] {
        administer(&daemon, &format!("{target} bind -Q {name}"));
    }
    let url = format!("iser://10.77.0.2/{TARGET}/1");

    let inquiry = format!("iscsi-inq -i {INITIATOR} {url}");
    let said = Program::start(&daemon, &inquiry).succeed();
    assert!(said.contains("DIRECT_ACCESS"), "{said}");
    let read = format!(
        "qemu-img dd -f raw -O raw bs=64k if={url} of={}",
        copy.display()
    );
    Program::start(&daemon, &read).succeed();
    assert!(std::fs::read(&copy).unwrap() == written);
    let overwrite = format!("sh {} {url}", script.display());
    let said = Program::start(&daemon, &overwrite).succeed();
    assert_eq!(said.matches("wrote 262144/262144").count(), 16, "{said}");
    assert!(!said.contains("Pattern verification failed"), "{said}");
    let now = std::fs::read(&disk).unwrap();
    let is_right = |(n, part): (usize, &[u8])| part.iter().all(|octet| *octet == n as u8 + 1);
    assert!(now.chunks(256 << 10).enumerate().all(is_right));
    // All data went over siwd: it was read once, written, and read again.
    let received = received_bytes(&daemon, "siw0") + received_bytes(&daemon, "siw1");
    assert!(received > 3 * LENGTH as u64, "{received} bytes");
}
