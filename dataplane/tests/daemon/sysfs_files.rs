//! The files in which programs look for RDMA devices: siwd writes them next to its socket,
//! libibverbs uses their folder, and `siwrun` redirects the kernel's paths to them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use siw::{SendData, SendWr, WcStatus};

use super::device_changes::{SECOND_PAIR, add_again, second_pair};
use crate::common::programs::{Program, is_installed};
use crate::common::{Daemon, End, LOOPBACK, PATIENCE, StopOnDrop, pair, ping};

fn tree(daemon: &Daemon) -> PathBuf {
    daemon.dir.path().join("siwd.sock.sysfs")
}

/// Checks that everything below a folder is world-readable; returns the number of files.
fn check_readable(folder: &Path) -> usize {
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let metadata = path.symlink_metadata().unwrap();
        let mode = metadata.permissions().mode() & 0o777;
        if metadata.is_dir() {
            assert_eq!(mode, 0o755, "{}", path.display());
            files += check_readable(&path);
        } else if metadata.is_file() {
            assert_eq!(mode, 0o444, "{}", path.display());
            files += 1;
        }
    }
    files
}

#[test]
fn siwd_writes_the_tree_and_removes_it_at_its_end() {
    let mut daemon = Daemon::loopback();
    let root = tree(&daemon);
    assert!(check_readable(&root) > 60);
    let device = root.join("class/infiniband/siw1");
    let read = |name: &str| std::fs::read_to_string(device.join(name)).unwrap();
    let mac = daemon.context().device_by_name("siw1").unwrap().mac;
    let mac_line = mac.map(|octet| format!("{octet:02x}")).join(":") + "\n";
    assert_eq!(read("device/net/siw1/address"), mac_line);
    assert_eq!(read("node_type"), "4: RNIC\n");
    assert_eq!(read("ports/1/state"), "4: ACTIVE\n");
    assert_eq!(
        read("ports/1/gids/0"),
        "0000:0000:0000:0000:0000:ffff:0a4d:0002\n"
    );
    daemon.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(crate::common::wait(&mut daemon.child).success());
    assert!(daemon.dir.path().exists() && !root.exists());
}

#[test]
fn a_tree_that_a_killed_daemon_left_is_replaced() {
    let mut daemon = Daemon::loopback();
    let root = tree(&daemon);
    daemon.kill();
    std::fs::write(root.join("stale"), "").unwrap();
    let config = LOOPBACK.replace("siw1", "other");
    let child = crate::common::spawn(daemon.dir.path(), &config, &[]);
    daemon.child = child;
    let deadline = std::time::Instant::now() + crate::common::PATIENCE;
    while !root.join("class/infiniband/other/ports/1/state").exists() {
        assert!(std::time::Instant::now() < deadline, "no new tree");
        std::thread::yield_now();
    }
    assert!(!root.join("stale").exists());
    assert!(!root.join("class/infiniband/siw1").exists());
}

/// Looks at devices with calls of Python and of the C library, like other programs.
const LOOK: &str = r#"
import ctypes, os, stat
CLASS = "/sys/class/infiniband"
assert sorted(os.listdir(CLASS)) == ["siw0", "siw1"], os.listdir(CLASS)
assert os.path.isdir(CLASS + "/") and os.access(CLASS, os.R_OK) and os.path.islink(CLASS + "/siw1")
assert sorted(e.name for e in os.scandir("/sys/class/infiniband_verbs")) == [
    "abi_version", "uverbs0", "uverbs1"]

def read(path):
    with open(f"{CLASS}/siw1/{path}") as file:
        return file.read().rstrip("\n")

assert read("ports/1/link_layer") == "Ethernet"
assert read("ports/1/gid_attrs/types/0") == "RoCE v2"
assert read("ports/1/gid_attrs/ndevs/0") == "siw1"
assert read("ports/1/pkeys/0") == "0xffff"
assert read("ports/1/state") == "4: ACTIVE"
assert os.listdir(f"{CLASS}/siw1/device/net") == ["siw1"]

libc = ctypes.CDLL(None, use_errno=True)
libc.realpath.restype = libc.opendir.restype = libc.fopen.restype = ctypes.c_void_p
place = ctypes.create_string_buffer(4096)
assert libc.realpath(f"{CLASS}/siw1/../..".encode(), place)
assert os.path.exists(place.value + b"/numa_node"), place.value
assert libc.opendir(b"/dev/infiniband") and libc.fopen(CLASS.encode() + b"/siw0/node_guid", b"r")
length = libc.readlink(f"{CLASS}/siw1".encode(), place, 4096)
assert place.value[:length].endswith(b"/infiniband/siw1"), place.value
assert not libc.opendir(b"/sys/class/infiniband_of_nobody") and ctypes.get_errno() == 2

# Like UCX.
assert stat.S_ISCHR(os.stat("/dev/infiniband/uverbs1").st_mode)
assert stat.S_ISCHR(os.stat("/dev/infiniband/rdma_cm").st_mode)

class Glob(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("paths", ctypes.POINTER(ctypes.c_char_p)),
                ("rest", ctypes.c_size_t * 7)]

def glob(pattern, call=libc.glob):
    found = Glob()
    assert call(pattern.encode(), 0, None, ctypes.byref(found)) in (0, 3)
    paths = [found.paths[n].decode() for n in range(found.count)]
    libc.globfree(ctypes.byref(found))
    return paths

# The paths are those of the request.
for call in (libc.glob, libc.glob64):
    assert glob(CLASS + "/*", call) == [CLASS + "/siw0", CLASS + "/siw1"]
    assert glob("/dev/infiniband/uverbs[1-9]", call) == ["/dev/infiniband/uverbs1"]
    assert glob(CLASS + "/*/ports/1/gid_attrs/ndevs/0", call) == [
        f"{CLASS}/siw{n}/ports/1/gid_attrs/ndevs/0" for n in range(2)]
    assert glob("/sys/class/infiniband/of_nobody*", call) == []
    assert glob("/sys/class/n[e]t", call) == ["/sys/class/net"]

# Tree walks, which the C library implements internally.
VISIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
VISIT_PLACE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int,
                               ctypes.POINTER(ctypes.c_int * 2))

def walk(call, path):
    names = []
    assert call(path.encode(), VISIT(lambda name, *_: names.append(name.decode()) or 0), 8) == 0
    return sorted(names)

def walk_with_places(call, path):
    found = []
    def visit(name, _, kind, place):
        base, level = place.contents
        found.append((level, name.decode()[base:], name.decode()))
        return 0
    assert call(path.encode(), VISIT_PLACE(visit), 8, 1) == 0  # FTW_PHYS
    return sorted(found)

port = f"{CLASS}/siw1/ports/1"
for call in (libc.ftw, libc.ftw64):
    assert walk(call, port + "/pkeys") == [port + "/pkeys", port + "/pkeys/0"]
    assert walk(call, port + "/pkeys//") == [port + "/pkeys", port + "/pkeys/0"]
for call in (libc.nftw, libc.nftw64):
    assert walk_with_places(call, port + "/pkeys") == [
        (0, "pkeys", port + "/pkeys"), (1, "0", port + "/pkeys/0")]
    assert walk_with_places(call, CLASS)[0] == (0, "infiniband", CLASS)
    assert walk_with_places(call, "/sys/class/net/lo")[0] == (0, "lo", "/sys/class/net/lo")
# A walk within a walk; the return value of the function ends it.
inner = []
stop = VISIT(lambda name, *_: inner.append(walk(libc.ftw, port + "/pkeys")) or 7)
assert libc.ftw(CLASS.encode(), stop, 8) == 7 and len(inner[0]) == 2
libc.fts_open.restype = ctypes.c_void_p
libc.fts_read.restype = ctypes.c_void_p
libc.fts_read.argtypes = libc.fts_close.argtypes = [ctypes.c_void_p]
for call in (libc.fts_open, libc.fts64_open):
    call.restype = ctypes.c_void_p
    paths = (ctypes.c_char_p * 3)((port + "/pkeys").encode(), b"/sys/class/net/lo", None)
    files = call(paths, 16, None)  # FTS_PHYSICAL
    assert files
    entries = 0
    while libc.fts_read(files):
        entries += 1
    # The folder twice, the file in it, and the link.
    assert libc.fts_close(files) == 0 and entries == 4, entries

os.chdir(CLASS + "/siw1")
assert open("ports/1/state").read().startswith("4:")
os.chdir("/")
assert os.statvfs(CLASS).f_bsize > 0

# Nothing else has changed.
assert os.path.realpath("/sys/class") == "/sys/class"
assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and os.path.exists("/sys/class/net")
assert not os.path.exists("/sys/class/infinibandit") and not os.path.exists("/dev/infiniband2")

ibverbs = ctypes.CDLL("libibverbs.so.1")
ibverbs.ibv_get_sysfs_path.restype = ctypes.c_char_p
root = ibverbs.ibv_get_sysfs_path()
value = ctypes.create_string_buffer(64)
found = ibverbs.ibv_read_sysfs_file(root + b"/class/infiniband/siw0", b"node_type", value, 64)
assert found == 7 and value.value == b"4: RNIC", (found, value.value)
print("all as expected")
"#;

#[test]
fn paths_of_the_kernels_devices_lead_to_the_tree() {
    if !is_installed("python3", "python3") {
        return;
    }
    let daemon = Daemon::loopback();
    let script = daemon.dir.path().join("look.py");
    std::fs::write(&script, LOOK).unwrap();
    let line = format!("python3 {}", script.display());
    let said = Program::start(&daemon, &line).succeed();
    assert!(said.contains("all as expected"), "{said}");
    // With the system calls of other programs.
    let said = Program::start(&daemon, "cat /sys/class/infiniband/siw1/fw_ver").succeed();
    assert!(said.starts_with(env!("CARGO_PKG_VERSION")), "{said}");
    let said = Program::start(&daemon, "ls -l /sys/class/infiniband/").succeed();
    assert!(said.contains("siw0 -> ") && said.contains("siw1"), "{said}");
}

/// The loopback with counters in files.
fn counting() -> Daemon {
    Daemon::start(
        &format!("{LOOPBACK}[control]\nsysfs_counters_ms = 100\n"),
        &[],
    )
}

/// Value of a counter's file of a device.
fn counter(daemon: &Daemon, device: &str, name: &str) -> u64 {
    let path = tree(daemon).join(format!("class/infiniband/{device}/ports/1/{name}"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
    text.trim_end().parse().unwrap()
}

/// Waits until the files have counters that were taken after the call.
fn await_update(daemon: &Daemon) {
    let folder = tree(daemon).join("class/infiniband/siw1/ports/1/hw_counters");
    let modified = || {
        let metadata = std::fs::metadata(folder.join("tcpRetransSegs")).ok()?;
        metadata.modified().ok()
    };
    // Two updates may have been taken before the call: one is being written, the other waits.
    for _ in 0..3 {
        let (before, deadline) = (modified(), std::time::Instant::now() + PATIENCE);
        while modified() == before {
            assert!(std::time::Instant::now() < deadline, "no update");
            std::thread::yield_now();
        }
    }
}

/// Transfers `bytes` bytes by WRITE, and returns when siwd has counted them.
fn transfer(daemon: &Daemon, bytes: usize) -> (End, End) {
    let (a, b) = pair(daemon, bytes);
    let sge = [a.mr.sge(0, bytes)];
    let write = SendWr::write(1, SendData::Sges(&sge), b.mr.addr(), b.mr.rkey());
    a.qp.post_send(&[write]).unwrap();
    assert_eq!(a.wc().status, WcStatus::SUCCESS);
    await_update(daemon);
    (a, b)
}

/// A device's counter of TCP, as `siwctl stat` has it.
fn tcp_counter(daemon: &Daemon, device: &str, name: &str) -> u64 {
    let text = daemon.context().read_stats().unwrap();
    let stats: serde_json::Value = serde_json::from_str(&text).unwrap();
    let workers = stats["workers"].as_array().unwrap().iter();
    let devices = workers.flat_map(|worker| worker["devices"].as_array().unwrap());
    let of_device = devices.filter(|row| row["device"] == device);
    of_device
        .map(|row| row["tcp"][name].as_u64().unwrap())
        .sum()
}

#[test]
fn counter_files_have_the_octets_that_were_sent_in_units_of_four() {
    let daemon = counting();
    let bytes = 1 << 20;
    let _ends = transfer(&daemon, bytes);
    for (file, name, factor) in [
        ("counters/port_xmit_data", "out_bytes", 4),
        ("counters/port_xmit_packets", "out_segs", 1),
        ("hw_counters/tcpInSegs", "in_segs", 1),
        ("hw_counters/tcpRetransSegs", "retrans_segs", 1),
    ] {
        let sent = tcp_counter(&daemon, "siw0", name);
        assert_eq!(counter(&daemon, "siw0", file), sent / factor, "{file}");
    }
    // An end of the pair asks for the other's address by broadcast. The files may be of two updates.
    let of = |device: &str, name: &str| counter(&daemon, device, &format!("counters/{name}"));
    let start = std::time::Instant::now();
    for (sender, receiver) in [("siw0", "siw1"), ("siw1", "siw0")] {
        for kind in ["unicast", "multicast"] {
            let (sent, received) = (
                format!("{kind}_xmit_packets"),
                format!("{kind}_rcv_packets"),
            );
            while of(sender, &sent) != of(receiver, &received) {
                assert!(start.elapsed() < PATIENCE, "{kind} frames of {sender}");
                std::thread::yield_now();
            }
        }
        assert!(of(sender, "unicast_xmit_packets") > 0);
        assert_eq!(of(sender, "link_downed"), 0);
        assert_eq!(counter(&daemon, sender, "hw_counters/link_downed"), 0);
    }
    assert!(of("siw0", "multicast_xmit_packets") > 0);
    let received = 4 * counter(&daemon, "siw1", "counters/port_rcv_data");
    // The headers of FPDUs add a few percent.
    let expected = bytes as u64..bytes as u64 * 11 / 10;
    assert!(expected.contains(&received), "{received}");
    assert!(check_readable(&tree(&daemon).join("class/infiniband/siw0/ports/1")) > 20);
    let quiet = Daemon::loopback();
    let port = tree(&quiet).join("class/infiniband/siw1/ports/1");
    assert!(port.join("state").exists() && !port.join("counters").exists());
}

/// An unmodified node_exporter reports the bytes that were sent.
#[test]
fn node_exporter_reports_what_was_sent() {
    if !is_installed("prometheus-node-exporter", "prometheus-node-exporter") {
        return;
    }
    let daemon = counting();
    let _ends = transfer(&daemon, 1 << 20);
    let mut exporter = Command::new("prometheus-node-exporter")
        .arg(format!("--path.sysfs={}", tree(&daemon).display()))
        .args(["--collector.disable-defaults", "--collector.infiniband"])
        .arg("--web.listen-address=127.0.0.1:0")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(exporter.stderr.take().unwrap()).lines();
    let address = log.find_map(|line| {
        let line = line.unwrap();
        let (_, rest) = line.split_once("address=127.0.0.1:")?;
        rest.split_whitespace().next()?.parse::<u16>().ok()
    });
    let port = address.expect("node_exporter names its port");
    let mut server = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(server, "GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut metrics = String::new();
    server.read_to_string(&mut metrics).unwrap();
    exporter.kill().unwrap();
    exporter.wait().unwrap();
    for (metric, device, name) in [
        ("port_data_transmitted_bytes_total", "siw0", "out_bytes"),
        ("port_data_received_bytes_total", "siw1", "in_bytes"),
    ] {
        let sample = format!("node_infiniband_{metric}{{device=\"{device}\",port=\"1\"}} ");
        let found = metrics.lines().find_map(|line| line.strip_prefix(&sample));
        let value: f64 = found
            .unwrap_or_else(|| panic!("{metrics}"))
            .parse()
            .unwrap();
        let sent = tcp_counter(&daemon, device, name) / 4 * 4;
        assert_eq!(value, sent as f64, "{metric}");
    }
    assert!(metrics.contains("node_scrape_collector_success{collector=\"infiniband\"} 1"));
}

/// Reads a counter of a device's port again and again while the device is visible, and checks that it is there
/// and does not fall. Returns the number of devices seen.
fn watch_counter(link: &Path, name: &str, is_over: &AtomicBool) -> usize {
    let (mut last, mut seen) = (PathBuf::new(), 0);
    let mut highest = 0;
    while !is_over.load(Ordering::Relaxed) {
        let Ok(folder) = link.canonicalize() else {
            continue;
        };
        let Ok(text) = std::fs::read_to_string(folder.join("ports/1").join(name)) else {
            let is_visible = link.canonicalize().is_ok_and(|now| now == folder);
            assert!(!is_visible, "{} is there without {name}", folder.display());
            continue;
        };
        let value: u64 = text.trim_end().parse().unwrap();
        if folder != last {
            (last, highest) = (folder, 0);
            seen += 1;
        }
        assert!(value >= highest, "{name} fell from {highest} to {value}");
        highest = value;
    }
    seen
}

/// prometheus-node-exporter reports no counters of any device while one has none.
#[test]
fn a_device_is_visible_with_its_counters_or_not_at_all() {
    const ROUNDS: usize = 8;
    const COUNTER: &str = "counters/unicast_rcv_packets";
    let config = format!("{LOOPBACK}{SECOND_PAIR}[control]\nsysfs_counters_ms = 100\n");
    let daemon = Daemon::start(&config, &[]);
    let link = tree(&daemon).join("class/infiniband/siw2");
    assert!(link.join("ports/1").join(COUNTER).exists(), "at the start");
    let is_over = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch_counter(&link, COUNTER, &is_over));
        let stop = StopOnDrop(&is_over);
        for _ in 0..ROUNDS {
            let (a, b) = second_pair(&daemon);
            ping(&a, &b);
            drop((a, b));
            let start = Instant::now();
            while counter(&daemon, "siw2", COUNTER) == 0 {
                assert!(start.elapsed() < PATIENCE, "no new counters");
                std::thread::yield_now();
            }
            add_again(&daemon, &["siw2", "siw3"]);
        }
        drop(stop);
        watch.join().unwrap()
    });
    assert!(seen > ROUNDS / 2, "{seen} devices seen");
}
