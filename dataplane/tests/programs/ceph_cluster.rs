//! A Ceph cluster of one monitor and one OSD, whose messenger uses rdma_cm (iWARP).

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::Daemon;
use crate::common::programs::{Program, is_installed, received_bytes, start_listening};

/// All processes use the device of the monitor's address: rdma_cm selects it for a local peer. Clients
/// wait a minute for the monitor: on a busy machine a connection takes longer than the default of 3 s.
const CONFIG: &str = "
[global]
fsid = 6d1f5d2c-6c9f-4d55-9a7f-0d3a3a4b6a11
mon_initial_members = a
mon_host = v2:10.77.0.1:3300
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_type = async+rdma
ms_async_rdma_type = iwarp
ms_async_rdma_cm = true
ms_async_rdma_device_name = siw0
ms_async_rdma_receive_buffers = 512
ms_async_rdma_receive_queue_len = 128
ms_async_rdma_send_buffers = 128
mon_client_hunt_interval = 60
run_dir = FOLDER
admin_socket = FOLDER/$name.$pid.asok
crash_dir = FOLDER
log_to_file = false
log_to_stderr = false
mon_cluster_log_to_file = false
osd_erasure_code_plugins =
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
[mon]
public_addr = 10.77.0.1
mon_data = FOLDER/mon
mon_data_avail_crit = 0
mon_data_avail_warn = 0
[osd]
osd_data = FOLDER/osd
public_addr = 10.77.0.1
cluster_addr = 10.77.0.1
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_class_load_list =
";
const OSD_UUID: &str = "1c9f3b0e-8f0a-4d0b-9a46-5d0f4b8a7c22";

/// Asks a server to end; it has to succeed.
fn end_server(server: Program) {
    kill(Pid::from_raw(server.id() as i32), Signal::SIGTERM).unwrap();
    server.succeed();
}

fn content(size: u32) -> Vec<u8> {
    (0..size).map(|n| (n * 7 + (n >> 9)) as u8).collect()
}

#[test]
#[ignore = "a download of 120 MB: deploy/programs runs it"]
fn objects_are_kept_over_the_iwarp_messenger() {
    if !is_installed("ceph-mon", "nothing; deploy/programs unpacks it") {
        return;
    }
    let daemon = Daemon::loopback();
    let folder = daemon.dir.path();
    let path = |name: &str| folder.join(name).display().to_string();
    let config = CONFIG.replace("FOLDER", &folder.display().to_string());
    std::fs::write(folder.join("ceph.conf"), config).unwrap();
    for data in ["mon", "osd"] {
        std::fs::create_dir(folder.join(data)).unwrap();
    }
    let line = |command: &str| format!("env CEPH_CONF={} {command}", path("ceph.conf"));
    let call = |command: &str| Program::start(&daemon, &line(command)).succeed();

    let keyring = path("keyring");
    call(&format!(
        "ceph-authtool --create-keyring {keyring} --gen-key -n mon."
    ));
    call(&format!("ceph-mon --mkfs -i a --keyring {keyring}"));
    let monitor = start_listening(&daemon, &line("ceph-mon -f -i a"));
    let said = call(&format!("ceph osd new {OSD_UUID}"));
    assert!(said.lines().any(|line| line == "0"), "{said}");
    // From Ceph 17 on, an OSD ends without its plugins, which are where the package was unpacked.
    let program = std::fs::read_link(format!("/proc/{}/exe", monitor.id())).unwrap();
    let libraries = format!("lib/{}-linux-gnu/ceph", std::env::consts::ARCH);
    let plugins = program.ancestors().nth(2).unwrap().join(libraries);
    let osd = format!("ceph-osd -i 0 --plugin_dir {}", plugins.display());
    call(&format!("{osd} --mkfs --osd-uuid {OSD_UUID}"));
    let osd = Program::start(&daemon, &line(&format!("{osd} -f")));
    call("ceph osd pool create objects 8");

    // Requests wait until the OSD serves its placement groups.
    let sent = content(20_000_000);
    std::fs::write(folder.join("sent"), &sent).unwrap();
    call(&format!("rados -p objects put large {}", path("sent")));
    call(&format!("rados -p objects get large {}", path("got")));
    assert!(std::fs::read(folder.join("got")).unwrap() == sent);

    let said =
        call("rados -p objects bench 3 write -b 1048576 -t 4 --max-objects 100 --no-cleanup");
    assert!(said.contains("Total writes made"), "{said}");
    // It compares what it reads with what it wrote.
    let said = call("rados -p objects bench 3 rand -t 4");
    assert!(said.contains("Total reads made"), "{said}");
    assert!(received_bytes(&daemon, "siw0") >= 40_000_000);
    end_server(osd);
    end_server(monitor);
}
