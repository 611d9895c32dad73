//! A NIC that siwd owns through vfio and shares with the guest's kernel by a TAP interface: ping
//! and TCP of both kernels at the RDMA address, concurrently with RDMA.
//!
//! ```text
//! guest:      kernel -- rdma0 (TAP) -- siwd -- vfio -- virtio-net
//! namespace:  kernel -- lab1 (tap), and AF_PACKET -- another siwd
//! ```

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::process::Stdio;

use crate::common::PATIENCE;
use crate::common::guest::{GUEST_PATIENCE, lacks_guest};
use crate::common::net::{Netns, missing_program, siw_ping};
use crate::common::typing::Typist;
use crate::lab::{Lab, lacks_lab};
use crate::{alone, skip_if};

/// Address shared by siwd in the guest and the guest's kernel.
const SHARED: &str = "10.77.0.1";
const SHELL_PORT: u16 = 22;
/// Lines typed while RDMA runs.
const LINES: u64 = 20;
const BULK_PORT: u16 = 5200;
/// Path of iperf3 in Debian.
const IPERF3: &str = "/usr/bin/iperf3";
/// Bytes per direction that a TCP stream of the kernels carries while RDMA runs.
const BULK_LEN: usize = 4 << 20;

/// Sends data through a stream to an echo server, in both directions at once, and compares it.
fn exchange_bulk(mut stream: TcpStream) {
    let data: Vec<u8> = (0..BULK_LEN).map(|index| (index / 7) as u8).collect();
    let mut returned = Vec::new();
    let mut reader = stream.try_clone().unwrap();
    reader.set_read_timeout(Some(PATIENCE)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stream.write_all(&data).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        reader.read_to_end(&mut returned).unwrap();
    });
    assert!(returned == data, "{} of {BULK_LEN} bytes", returned.len());
}

/// Runs iperf3 between the kernels, to the guest and from it; returns the received bytes per
/// second.
fn run_iperf3(ns: &Netns, lab: &Lab) -> [u64; 2] {
    ["-J", "-J -R"].map(|format| {
        let server = lab.guest.start("iperf3 -s -1");
        lab.guest.run("wait-listen 5201");
        let line = format!("-c {SHARED} -t 1 {format}");
        let report: serde_json::Value = serde_json::from_str(&ns.command(IPERF3, &line)).unwrap();
        assert_eq!(server.wait(GUEST_PATIENCE).status, Some(0), "{report}");
        report["end"]["sum_received"]["bytes"].as_u64().unwrap()
    })
}

#[test]
fn the_guests_kernel_shares_a_nic_that_siwd_owns() {
    skip_if!(
        lacks_lab()
            .or_else(lacks_guest)
            .or_else(|| missing_program(IPERF3))
    );
    let _alone = alone();
    let ns = Netns::new();
    ns.ip("tuntap add lab1 mode tap");
    ns.ip("link set lab1 addrgenmode none up");
    ns.address("lab1", "10.77.0.2/24");
    // The peer's tap does not compute checksums.
    ns.command("ethtool", "-K lab1 tx off");
    let lab = ns.run(|| Lab::boot(&["--tap", "virtio=lab1", "--program", IPERF3]));
    lab.guest.run("modprobe tun; nics bind vfio-pci");
    let host = "host_interface = \"rdma0\"\nhost_ports = \"61000-61099\"";
    lab.start_siwd_on(&["0000:00:10.0".into()], "", host);
    let far = ns.siwd(
        "[dpdk]\nhugepages = \"never\"\nbuffers = 4096\n[[device]]\nname = \"siw0\"\n\
         devargs = \"net_af_packet0,iface=lab1\"\nmac = \"02:00:00:77:00:03\"\naddresses = [\"10.77.0.3/24\"]\n",
        &[],
    );
    let address: IpAddr = SHARED.parse().unwrap();
    ns.wait_ping(address);
    lab.guest.run("ping -c 3 -W 10 10.77.0.2");

    // RDMA runs in both directions while lines are typed.
    let mut server = siw_ping(&far, "-s -a 10.77.0.3 -P")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let once = "siw-ping -c -a 10.77.0.3 -C 1";
    let pings = "siw-ping -c -a 10.77.0.3 -C 1000000 -S 4000 -V";
    lab.start_in_background(
        &format!("{{ while ! {once}; do sleep 0.1; done; echo started; {pings}; }}"),
        "/tmp/pings",
    );
    lab.await_line("/tmp/pings", "started");
    let shell = lab.guest.start(&format!("nc -l -p {SHELL_PORT} -e cat"));
    lab.guest.run(&format!("wait-listen {SHELL_PORT}"));
    let mut typist = Typist::new(
        ns.run(|| TcpStream::connect_timeout(&(address, SHELL_PORT).into(), PATIENCE))
            .unwrap(),
    );
    while typist.lines() < LINES {
        typist.type_line();
        assert!(ns.ping(address, 1400, PATIENCE), "line {}", typist.lines());
    }
    drop(typist);
    assert_eq!(shell.wait(GUEST_PATIENCE).status, Some(0));
    let stats = lab.guest.run("siwctl stat --json");
    let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
    let counters = &stats["devices"][0]["merged"];
    let counter = |name: &str| counters[name].as_u64().unwrap();
    println!(
        "{} frames to the kernel, {} of RDMA",
        counter("SiwHostFrames"),
        counter("TcpInSegs")
    );
    assert!(
        counter("SiwHostFrames") > LINES && counter("TcpInSegs") > LINES,
        "{counters}"
    );
    assert_eq!(counter("SiwHostDrops"), 0, "{counters}");
    let echo = lab.guest.start(&format!("nc -l -p {BULK_PORT} -e cat"));
    lab.guest.run(&format!("wait-listen {BULK_PORT}"));
    let connect = || TcpStream::connect_timeout(&(address, BULK_PORT).into(), PATIENCE);
    exchange_bulk(ns.run(connect).unwrap());
    assert_eq!(echo.wait(GUEST_PATIENCE).status, Some(0));
    let streams = run_iperf3(&ns, &lab);
    println!("iperf3: {streams:?} bytes");
    assert!(streams.iter().all(|bytes| *bytes > 1 << 20), "{streams:?}");
    // RDMA ran all the time, and neither stack took the other's frames.
    let pings = lab.guest.run("pidof siw-ping; cat /tmp/pings");
    assert!(!pings.contains("ended"), "{pings}");
    lab.guest.run("kill $(pidof siw-ping)");
    let _ = server.kill();
    let _ = server.wait();
    let log = lab.stop_siwd();
    assert!(!log.contains("ERROR siwd"), "{log}");
    assert!(!lab.guest.run("ip link").contains("rdma0"));
    assert!(far.stop().success());
    lab.assert_no_iommu_faults();
}
