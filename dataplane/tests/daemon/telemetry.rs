//! `[dpdk] telemetry`: DPDK's own tools read the ports of siwd.

use std::path::{Path, PathBuf};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, send, socket,
};
use serde_json::Value;
use std::os::fd::AsRawFd;

use crate::common::{Daemon, LOOPBACK, pair, ping};

/// The socket that dpdk-telemetry.py finds: DPDK's runtime directory depends on the user.
fn telemetry_socket(pid: u32) -> PathBuf {
    let folder = match nix::unistd::geteuid().is_root() {
        true => "/var/run".to_owned(),
        false => std::env::var("XDG_RUNTIME_DIR").unwrap_or("/tmp".to_owned()),
    };
    Path::new(&folder).join(format!("dpdk/siwd-{pid}/dpdk_telemetry.v2"))
}

#[test]
fn telemetry_lists_the_ports() {
    let config = LOOPBACK.replacen("[dpdk]", "[dpdk]\ntelemetry = true", 1);
    let daemon = Daemon::start(&config, &[]);
    let path = telemetry_socket(daemon.child.id());
    let conn = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::empty(),
        None,
    )
    .unwrap();
    connect(conn.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    let mut buffer = vec![0; 16 << 10];
    let mut read = || -> Value {
        let len = recv(conn.as_raw_fd(), &mut buffer, MsgFlags::empty()).unwrap();
        serde_json::from_slice(&buffer[..len]).unwrap()
    };
    assert_eq!(read()["pid"], daemon.child.id());
    let (a, b) = pair(&daemon, 4096);
    ping(&a, &b);
    send(conn.as_raw_fd(), b"/ethdev/list", MsgFlags::empty()).unwrap();
    assert_eq!(read()["/ethdev/list"].as_array().unwrap().len(), 2);
    send(conn.as_raw_fd(), b"/ethdev/stats,0", MsgFlags::empty()).unwrap();
    assert!(read()["/ethdev/stats"]["opackets"].as_u64().unwrap() > 0);
    ping(&a, &b);
    assert!(daemon.stop().success());
    assert!(!path.exists() && !path.parent().unwrap().exists());
    // Without the setting there is no socket.
    let daemon = Daemon::loopback();
    assert!(!telemetry_socket(daemon.child.id()).exists());
}
