//! The Linux kernel's RoCE (rxe), in a guest, with ibv_ud_pingpong as the application: datagrams between it
//! and siwd in both roles. This file plays the other end of the program. With udaddy, rdma_cm finds the queue
//! pairs, by its service ID resolution.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use siw::{Ah, AhAttr, GRH_LEN, QpInit, RecvWr, SendData, SendWr, WcFlags, WcStatus};

use crate::common::guest::{GUEST_PATIENCE, Guest, lacks_guest};
use crate::common::net::{Netns, missing_program};
use crate::common::programs::{Program, is_installed};
use crate::common::*;

const CONFIG: &str = r#"
[dpdk]
hugepages = "never"
buffers = 8192
[[device]]
name = "siw0"
devargs = "net_af_packet0,iface=lab0"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
"#;
/// Address of this machine's kernel, for the program's exchange over TCP.
const KERNEL: &str = "10.77.0.3";
const GUEST: &str = "10.77.0.2";
/// The port, the Q_Key and the messages of ibv_ud_pingpong.
const PORT: u16 = 18515;
const QKEY: u32 = 0x1111_1111;
const SIZE: usize = 500;
/// Leaves rdma_cm no other device at the guest's address than that of rxe.
const RDMA_CM: &str = "rdma link del siw0; modprobe rdma_ucm";
const ROUNDS: usize = 20;
/// "LID:QPN:PSN:GID" in hexadecimal, with a zero at the end.
const EXCHANGED: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;

fn gid_text(ip: IpAddr) -> String {
    let ip = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    ip.octets().map(|byte| format!("{byte:02x}")).concat()
}

/// Parameters that ibv_ud_pingpong tells its other end.
fn description(end: &End, own: IpAddr) -> Vec<u8> {
    let gid = gid_text(own);
    format!("0000:{:06x}:000000:{gid}\0", end.qp.qp_num()).into_bytes()
}

/// The queue pair and the address in a description.
fn described(text: &[u8]) -> (u32, IpAddr) {
    let text = std::str::from_utf8(&text[..EXCHANGED - 1]).unwrap();
    let parts: Vec<&str> = text.split(':').collect();
    let gid = u128::from_str_radix(parts[3], 16).unwrap();
    let qpn = u32::from_str_radix(parts[1], 16).unwrap();
    (qpn, Ipv6Addr::from(gid).to_canonical())
}

struct Rig {
    ns: Netns,
    guest: Guest,
    daemon: Daemon,
}

/// This end, and the other one.
struct Datagrams {
    end: End,
    ah: Ah,
    peer: u32,
}

impl Datagrams {
    fn new(end: End, (peer, address): (u32, IpAddr)) -> Datagrams {
        let attr = AhAttr {
            timeout: Some(Duration::from_secs(5)),
            ..AhAttr::new(0, address)
        };
        let ah = end.ctx.create_ah(&attr).unwrap();
        Datagrams { end, ah, peer }
    }

    fn send(&self) {
        let sges = [self.end.mr.sge(4096, SIZE)];
        let request = SendWr::send(1, SendData::Sges(&sges));
        let request = request.with_destination(self.ah.number(), self.peer, QKEY);
        self.end.qp.post_send(&[request]).unwrap();
    }

    /// Waits for the completions of a message sent and of one received.
    fn exchange(&self) {
        for _ in 0..2 {
            let done = self.end.wc();
            assert_eq!(done.status, WcStatus::SUCCESS);
            if done.wr_id == 2 {
                assert_eq!(done.byte_len as usize, GRH_LEN + SIZE);
                assert_eq!(done.src_qp, self.peer);
                assert!(done.flags.contains(WcFlags::GRH));
                post_receive(&self.end);
            }
        }
    }
}

fn post_receive(end: &End) {
    let sges = &[end.mr.sge(0, 4096)];
    end.qp.post_recv(&[RecvWr { wr_id: 2, sges }]).unwrap();
}

impl Rig {
    fn new(capture: &str) -> Rig {
        let ns = Netns::new();
        let args = ["--ip", "10.77.0.2/24", "--ip6", "fd77::2/64"];
        let guest = Guest::boot(&ns, &args);
        ns.ip("link set lab0 arp on");
        ns.ip(&format!("addr add {KERNEL}/24 dev lab0"));
        guest.run("modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0");
        let daemon = ns.siwd(CONFIG, &["--capture", capture]);
        Rig { ns, guest, daemon }
    }

    fn end(&self) -> End {
        let end = End::with(&self.daemon.context(), 8192, &QpInit::default());
        post_receive(&end);
        end.qp.start_datagrams(0, QKEY).unwrap();
        end
    }

    /// The arguments of the program in the guest, whose address is `ip`.
    fn command(&self, ip: IpAddr, server: &str) -> String {
        let gid = gid_text(ip);
        let gids = "/sys/class/infiniband/rxe0/ports/1/gids";
        format!(
            "for i in $(seq 0 15); do g=$(cat {gids}/$i | tr -d :); \
             [ $g = {gid} ] && exec ibv_ud_pingpong -d rxe0 -g $i -s {SIZE} -n {ROUNDS} {server}; \
             done; echo no GID {gid}; exit 9"
        )
    }

    /// The guest's program is the server: it answers each datagram.
    fn as_client(&self, own: &str, of_guest: &str) {
        let program = self
            .guest
            .start(&self.command(of_guest.parse().unwrap(), ""));
        self.guest.run(&format!("wait-listen {PORT}"));
        let to = SocketAddr::new(GUEST.parse().unwrap(), PORT);
        let mut socket = self.ns.run(|| TcpStream::connect(to)).unwrap();
        let end = self.end();
        socket
            .write_all(&description(&end, own.parse().unwrap()))
            .unwrap();
        let mut answer = [0; EXCHANGED];
        socket.read_exact(&mut answer).unwrap();
        socket.write_all(b"done\0").unwrap();
        let datagrams = Datagrams::new(end, described(&answer));
        for _ in 0..ROUNDS {
            datagrams.send();
            datagrams.exchange();
        }
        let done = program.wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{done:?}");
    }

    /// The guest's program is the client: it sends first.
    fn as_server(&self, own: &str, of_guest: &str) {
        let at: SocketAddr = format!("{KERNEL}:{PORT}").parse().unwrap();
        let listener = self.ns.run(|| TcpListener::bind(at)).unwrap();
        let command = self.command(of_guest.parse().unwrap(), KERNEL);
        let program = self.guest.start(&command);
        let (mut socket, _) = listener.accept().unwrap();
        let mut asked = [0; EXCHANGED];
        socket.read_exact(&mut asked).unwrap();
        let datagrams = Datagrams::new(self.end(), described(&asked));
        let description = description(&datagrams.end, own.parse().unwrap());
        socket.write_all(&description).unwrap();
        for round in 0..ROUNDS {
            // The completion of the answer before, and the next message.
            if round > 0 {
                datagrams.exchange();
            } else {
                let done = datagrams.end.wc();
                assert_eq!((done.wr_id, done.status), (2, WcStatus::SUCCESS));
                post_receive(&datagrams.end);
            }
            datagrams.send();
        }
        assert_eq!(datagrams.end.wc().status, WcStatus::SUCCESS);
        let done = program.wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{done:?}");
    }
}

#[test]
fn datagrams_cross_between_siwd_and_linux_rxe_in_both_roles() {
    skip_if!(lacks_guest());
    let dir = tempfile::tempdir().unwrap();
    let capture = dir.path().join("rxe.pcapng");
    let rig = Rig::new(capture.to_str().unwrap());
    for (own, of_guest) in [("10.77.0.1", GUEST), ("fd77::1", "fd77::2")] {
        rig.as_client(own, of_guest);
        rig.as_server(own, of_guest);
    }
    assert!(rig.daemon.stop().success());
    if let Some(why) = missing_program("tshark") {
        println!("not dissected: {why}");
        return;
    }
    let count = |filter: &str| {
        let mut command = Command::new("tshark");
        let command = command.arg("-r").arg(&capture).args(["-Y", filter]);
        let out = command.output().unwrap();
        String::from_utf8_lossy(&out.stdout).lines().count()
    };
    // Sent and received, in four runs.
    assert_eq!(count("infiniband.bth.opcode == 100"), 8 * ROUNDS);
    assert_eq!(count("_ws.malformed"), 0);
}

/// udaddy at both ends: the service on the kernel and on siwd, and a port that nothing serves.
#[test]
fn rdma_cm_finds_datagram_services_of_linux_rxe_and_the_other_way_round() {
    skip_if!(lacks_guest());
    if !is_installed("udaddy", "rdmacm-utils") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new(dir.path().join("rxe.pcapng").to_str().unwrap());
    rig.guest.run(RDMA_CM);
    let start = |args: &str| {
        let line = format!("--persona roce udaddy {args}");
        Program::start_in(&rig.ns, &rig.daemon, &line)
    };
    let is_done = |said: &str| {
        assert!(said.contains("return status 0"), "{said}");
        assert!(said.contains("data transfers complete"), "{said}");
    };
    // One connection: udaddy repeats no datagram, and with several of them an emulated guest beside other work
    // sometimes waits for one without end.
    let args = "-c 1";
    // The server says nothing when it listens: the client tries until it does.
    let server = rig.guest.start(&format!("udaddy {args} -b {GUEST}"));
    let deadline = std::time::Instant::now() + GUEST_PATIENCE;
    let said = loop {
        let (_, said) = start(&format!("{args} -s {GUEST}")).finish();
        let is_early = said.contains("UNREACHABLE, error: 1");
        if !is_early || std::time::Instant::now() > deadline {
            break said;
        }
    };
    if !said.contains("return status 0") {
        panic!("{said}\n{:?}", server.wait(GUEST_PATIENCE));
    }
    is_done(&said);
    let done = server.wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{done:?}");

    let server = start(&format!("{args} -b 10.77.0.1"));
    crate::common::programs::await_listeners(&rig.daemon, 1);
    let client = rig.guest.start(&format!("udaddy {args} -s 10.77.0.1"));
    let done = client.wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{done:?}");
    is_done(&server.succeed());
    // The kernel gets the status of the refusal.
    let client = rig.guest.start("udaddy -s 10.77.0.1; true");
    let done = client.wait(GUEST_PATIENCE);
    assert!(
        format!("{done:?}").contains("UNREACHABLE, error: 1"),
        "{done:?}"
    );
    assert!(rig.daemon.stop().success());
}

/// mckey at both ends: the receiver on the kernel and on siwd.
#[test]
fn multicast_crosses_between_siwd_and_linux_rxe() {
    skip_if!(lacks_guest());
    if !is_installed("mckey", "rdmacm-utils") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::new(dir.path().join("rxe.pcapng").to_str().unwrap());
    rig.guest.run(RDMA_CM);
    rig.guest.run("ip route add 239.0.0.0/8 dev eth0");
    let start = |args: &str| {
        let line = format!("--persona roce mckey -m 239.1.2.3 -b 10.77.0.1 {args}");
        Program::start_in(&rig.ns, &rig.daemon, &line)
    };
    let guest = |args: &str| {
        let line = format!("mckey -m 239.1.2.3 -b {GUEST} {args}");
        rig.guest.start(&line)
    };
    let receiver = guest("");
    // 239.1.2.3 in the byte order of this file.
    rig.guest
        .run("while ! grep -q 030201EF /proc/net/igmp; do sleep 0.05; done");
    let said = start("-s").succeed();
    assert!(said.contains("data transfers complete"), "{said}");
    let done = receiver.wait(GUEST_PATIENCE);
    assert_eq!(done.status, Some(0), "{done:?}");

    // Of several messages, rxe of Linux 6.12 and 7.2 sends the first one, and then mckey, which does not look at
    // the status of its completions, says that all are sent.
    let mut receiver = start("-C 1");
    while !receiver.has_ended() {
        let done = guest("-s -C 1").wait(GUEST_PATIENCE);
        assert_eq!(done.status, Some(0), "{done:?}");
    }
    let said = receiver.succeed();
    assert!(said.contains("data transfers complete"), "{said}");
    assert!(rig.daemon.stop().success());
}
