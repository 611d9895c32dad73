//! Each kind of hostile frame against a running siwd, over a real port: a counter in `siwctl stat`, a
//! rate limit, and the answer that its RFC requires. `tcp/tests/floods/` tests the effects inside
//! the TCP engine.

use std::net::Ipv4Addr;

use crate::common::attacker::*;
use crate::common::net::{Netns, lacks_network, missing_program};
use crate::common::raw::{ACK, FIN, PSH, RST, RawTcp, SYN, Wire};
use crate::common::*;
use siw::{CmChannel, CmEvent, CmListener};
use siw_tcp_sim::Rng;
use siw_tcp_sim::forge::{Ends, Tcp, fix_ipv4};

const PORT: u16 = 7174;
/// Address of the honest peer.
const PEER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 9);

fn lacks() -> Option<String> {
    lacks_network().or_else(|| missing_program("ethtool"))
}

fn config(devargs: &str) -> String {
    format!(
        r#"
[workers]
idle = "adaptive"
[dpdk]
hugepages = "never"
buffers = 4096
[[device]]
name = "siw0"
devargs = "{devargs}"
mac = "02:00:00:77:00:01"
addresses = ["10.77.0.1/24", "fd77::1/64"]
mtu = 1500
"#
    )
}

/// A daemon, an attacker, and a listening client.
struct Rig {
    ns: Netns,
    attacker: Attacker,
    before: Counters,
    cm: CmChannel,
    _listener: CmListener,
    daemon: Daemon,
}

impl Rig {
    /// Sets up the test on a veth pair.
    fn new() -> Rig {
        let ns = Netns::new();
        ns.veth(1500);
        let daemon = ns.siwd(&config("net_af_packet0,iface=veth0"), &[]);
        Rig::with(ns, daemon, "veth1")
    }

    fn on_tap() -> Rig {
        let ns = Netns::new();
        let daemon = ns.siwd(&config("net_tap0,iface=siwtap0"), &[]);
        ns.ip("link set siwtap0 addrgenmode none");
        ns.ip("link set siwtap0 up");
        Rig::with(ns, daemon, "siwtap0")
    }

    fn with(ns: Netns, daemon: Daemon, interface: &str) -> Rig {
        let mut attacker = Attacker::on(&ns, interface);
        let cm = CmChannel::new(&daemon.context()).unwrap();
        let to = format!("{IP}:{PORT}").parse().unwrap();
        let listener = CmListener::new(&cm, None, to, 8, 0).unwrap();
        // Wait until the link and the daemon respond.
        attacker.flood([]);
        let before = Counters::of(&daemon);
        Rig {
            before,
            ns,
            attacker,
            cm,
            _listener: listener,
            daemon,
        }
    }

    /// Increase of counters since the start.
    fn counted<const N: usize>(&self, names: [&str; N]) -> [u64; N] {
        let now = Counters::of(&self.daemon);
        names.map(|n| now.since(&self.before, n))
    }

    /// Opens an honest TCP connection that has not started MPA yet.
    fn connect(&mut self) -> RawTcp {
        let wire = Wire::open(&self.ns, "veth1", PEER);
        let to = format!("{IP}:{PORT}").parse().unwrap();
        let peer = RawTcp::connect(wire, MAC, to);
        // Discard the answers so far.
        self.attacker.flood([]);
        peer
    }

    /// Starts MPA on the connection and waits for the client's event, which shows that no data was
    /// lost or altered.
    fn lives(&self, peer: &mut RawTcp) {
        peer.send(&request());
        self.requested();
    }

    fn requested(&self) {
        match self.cm.get_event(Some(PATIENCE)).unwrap() {
            CmEvent::ConnectRequest(request) => {
                assert_eq!(request.connection_info().private_data, private())
            }
            other => panic!("{other:?}"),
        }
    }

    /// Checks that all packet buffers come back and that the client gets no more events.
    fn over(self) {
        let free = |c: &Counters| c.get("buffers_free");
        let end = std::time::Instant::now() + PATIENCE;
        while free(&Counters::of(&self.daemon)) < free(&self.before) {
            assert!(std::time::Instant::now() < end, "buffers are held");
        }
        assert!(self.daemon.stop().success());
    }
}

fn private() -> Vec<u8> {
    pattern(3, 300)
}

fn request() -> Vec<u8> {
    crate::common::peer::request(crate::common::peer::C, 1, &private())
}

/// TCP segments among frames: flags, sequence and acknowledgment numbers.
fn segments(frames: &[Vec<u8>]) -> Vec<(u8, u32, u32)> {
    let word = |f: &[u8], at: usize| u32::from_be_bytes(f[at..at + 4].try_into().unwrap());
    let tcp = frames.iter().filter(|f| f[12..14] == [8, 0] && f[23] == 6);
    tcp.map(|f| (f[47], word(f, 38), word(f, 42))).collect()
}

fn icmp(frames: &[Vec<u8>]) -> usize {
    let v4 = |f: &[u8]| f[12..14] == [8, 0] && f[23] == 1;
    let v6 = |f: &[u8]| f[12..14] == [0x86, 0xdd] && f[20] == 58 && f[54] != 136;
    frames.iter().filter(|f| v4(f) || v6(f)).count()
}

/// A segment that claims to be from the honest peer.
fn forged(seq: u32, ack: u32, flags: u8) -> Tcp<'static> {
    Tcp {
        ports: [40_000, PORT],
        seq,
        ack,
        flags,
        window: 1000,
        ..Tcp::default()
    }
}

fn peer_ends() -> Ends {
    ends(&PEER.to_string())
}

#[test]
fn a_flood_of_syns_keeps_a_backlog_gets_cookies_and_lets_newcomers_in_rfc_4987() {
    skip_if!(lacks());
    let mut r = Rig::new();
    let mut rng = Rng::new(1);
    let n = 3000;
    let back = r.attacker.flood((0..n).map(|i| {
        let from = match i % 2 {
            0 => format!("10.77.0.{}", 20 + rng.below(200)),
            _ => format!("198.51.100.{}", 1 + rng.below(250)),
        };
        let mut t = forged(rng.next_u64() as u32, 0, SYN);
        t.ports[0] = 1 + rng.below(65_000) as u16;
        t.options = &[2, 4, 5, 0xb4, 4, 2, 1, 1];
        ends(&from).tcp(&t)
    }));
    let [cookies, drops, overflows, received] = r.counted([
        "TcpExtSyncookiesSent",
        "TcpExtListenDrops",
        "TcpExtListenOverflows",
        "TcpInSegs",
    ]);
    assert_eq!((received, overflows), (n, 0));
    assert!(
        (1..=8).contains(&(n - cookies - drops)),
        "{cookies} {drops}"
    );
    let answered = segments(&back);
    let answered = answered.iter().filter(|s| s.0 == SYN | ACK).count();
    assert_eq!(answered as u64, cookies);
    let mut peer = r.connect();
    assert_eq!(r.counted(["TcpExtSyncookiesRecv"]), [1]);
    r.lives(&mut peer);
    drop(peer);
    r.over();
}

#[test]
fn floods_of_acks_get_resets_and_challenges_no_faster_than_their_limits_rfc_5961() {
    skip_if!(lacks());
    let mut r = Rig::new();
    let mut rng = Rng::new(2);
    let back = r.attacker.flood((0..3000).map(|i| {
        let mut t = forged(rng.next_u64() as u32, rng.next_u64() as u32, ACK);
        t.ports = [1 + rng.below(65_000) as u16, [PORT, 9][i % 2]];
        ends("198.51.100.7").tcp(&t)
    }));
    let [strangers, resets, skipped] =
        r.counted(["SiwNoConnection", "TcpOutRsts", "SiwResetsSkipped"]);
    assert_eq!((strangers, resets + skipped), (3000, 3000));
    assert!(skipped > 0, "the limit is 1000 a second");
    assert_eq!(segments(&back).len() as u64, resets);

    // On a connection: ACKs of bytes never sent, SYNs, resets close to the next byte.
    let mut peer = r.connect();
    let (seq, ack) = (peer.next, peer.expected);
    let back = r.attacker.flood((1..=3000u32).map(|i| {
        let t = match i % 3 {
            0 => forged(seq, ack.wrapping_add(i), ACK),
            1 => forged(seq.wrapping_add(i), 0, SYN),
            _ => forged(seq.wrapping_add(i), 0, RST),
        };
        peer_ends().tcp(&t)
    }));
    let [bad, syns, sent, kept] = r.counted([
        "SiwBadAcks",
        "TcpExtTCPSYNChallenge",
        "TcpExtTCPChallengeACK",
        "TcpExtTCPACKSkippedChallenge",
    ]);
    assert_eq!((bad, syns, sent + kept), (1000, 1000, 3000));
    assert!(kept > 0, "the limit is about 1000 a second");
    let back = segments(&back);
    assert!((1..=sent).contains(&(back.len() as u64)), "one for a burst");
    assert!(back.iter().all(|s| *s == (ACK, ack, seq)), "{back:?}");
    assert_eq!(r.counted(["TcpEstabResets"]), [0]);
    r.lives(&mut peer);
    drop(peer);
    r.over();
}

#[test]
fn overlapping_and_out_of_window_segments_are_counted_and_the_stream_stays_whole() {
    skip_if!(lacks());
    let mut r = Rig::new();
    let peer = r.connect();
    let (seq, ack) = (peer.next, peer.expected);
    // Data and bare ACKs outside the window.
    let back = r.attacker.flood((0..1000u32).map(|i| {
        let far = [1 << 28, 0xf000_0000][i as usize % 2];
        let mut t = forged(seq.wrapping_add(far + i), ack, ACK);
        t.payload = &[7; 100];
        peer_ends().tcp(&t)
    }));
    assert_eq!(r.counted(["SiwOutOfWindow"]), [1000]);
    let back = segments(&back);
    assert!((1..=1000).contains(&back.len()));
    assert!(back.iter().all(|s| *s == (ACK, ack, seq)));
    // The request in pieces that overlap in every way, with the first byte last.
    let bytes = request();
    let mut rng = Rng::new(3);
    let mut pieces: Vec<_> = (0..200)
        .map(|_| {
            let at = 1 + rng.below(bytes.len() as u64 - 1) as usize;
            let len = 1 + rng.below((bytes.len() - at) as u64) as usize;
            (at, len)
        })
        .collect();
    pieces.push((1, bytes.len() - 1));
    pieces.push((0, 2));
    for (at, len) in pieces {
        peer.send_ahead(at, &bytes[at..at + len]);
    }
    r.requested();
    let [twice, queued, once] = r.counted(["SiwDupBytesIn", "TcpExtTCPOFOQueue", "SiwTcpInBytes"]);
    assert!(twice > 10_000 && queued >= 200, "{twice} {queued}");
    assert_eq!(once, bytes.len() as u64);
    // The sequence number of the peer's next byte, for its reset.
    let mut peer = peer;
    peer.next = peer.next.wrapping_add(bytes.len() as u32);
    drop(peer);
    r.over();
}

#[test]
fn options_of_length_zero_and_garbage_are_counted_and_end_nothing_rfc_9293_must_7() {
    skip_if!(lacks());
    let mut r = Rig::new();
    let mut peer = r.connect();
    let garbage: [&[u8]; 4] = [&[254, 0, 0, 0], &[1, 1, 1, 5], &[8, 255, 0, 0], &[2, 0]];
    let (seq, ack) = (peer.next, peer.expected);
    let back = r.attacker.flood((0..2000).map(|i| {
        let mut t = forged(seq, ack, ACK);
        t.options = garbage[i % 4];
        peer_ends().tcp(&t)
    }));
    assert!(segments(&back).is_empty());
    // A SYN with invalid options is handled like a SYN without options.
    for (i, o) in garbage.into_iter().enumerate() {
        let mut t = forged(9, 0, SYN);
        t.ports[0] += 1 + i as u16;
        t.options = o;
        let back = r.attacker.ask(peer_ends().tcp(&t));
        // The connection has already resolved its neighbour.
        assert_eq!(segments(&back).len(), 1);
        assert_eq!(
            (segments(&back)[0].0, segments(&back)[0].2),
            (SYN | ACK, 10)
        );
        t.flags = RST;
        t.seq = 10;
        t.options = &[];
        r.attacker.ask(peer_ends().tcp(&t));
    }
    // Random option bytes do not disturb the connection either.
    let mut rng = Rng::new(4);
    let frames: Vec<_> = (0..2000)
        .map(|_| {
            let o: Vec<u8> = (0..rng.below(41)).map(|_| rng.next_u64() as u8).collect();
            let mut t = forged(seq, ack, ACK);
            t.options = &o;
            peer_ends().tcp(&t)
        })
        .collect();
    r.attacker.flood(frames);
    let [bad, errors] = r.counted(["SiwBadOptions", "TcpOutRsts"]);
    assert!((2004 + 1000..=4004).contains(&bad), "{bad}");
    assert_eq!(errors, 0);
    r.lives(&mut peer);
    drop(peer);
    r.over();
}

#[test]
fn fragments_martians_and_broken_frames_are_counted_and_answered_by_nobody() {
    skip_if!(lacks_network());
    // DPDK makes the kernel reassemble fragments for AF_PACKET sockets, but not for a tap.
    let mut r = Rig::on_tap();
    let mut frames = Vec::new();
    for i in 0..500u16 {
        let mut f = peer_ends().udp([1, i], &[0; 64]);
        f[20..22].copy_from_slice(&(0x2000 | (i & 0x1fff)).to_be_bytes());
        fix_ipv4(&mut f[14..34]);
        frames.push(f);
        frames.push(ends("fd77::9").ip(44, &[6, 0, 0, 1, 0, 0, 0, i as u8]));
    }
    let back = r.attacker.flood(frames);
    assert!(back.is_empty(), "{back:x?}");
    assert_eq!(r.counted(["IpReasmReqds"]), [1000]);

    let mut frames = Vec::new();
    for from in [
        IP,
        "127.0.0.1",
        "0.0.0.0",
        "224.0.0.5",
        "255.255.255.255",
        "10.77.0.255",
        IP6,
        "::1",
        "ff02::1",
    ] {
        let e = ends(from);
        let echo = if e.ip[0].is_ipv4() { 8 } else { 128 };
        for _ in 0..50 {
            frames.push(e.tcp(&forged(1, 0, SYN)));
            frames.push(e.icmp([echo, 0], [0; 4], b"smurf"));
        }
    }
    // A broadcast address as the sender.
    let mut e = peer_ends();
    e.mac[0] = [0xff; 6];
    (0..100).for_each(|_| frames.push(e.tcp(&forged(1, 0, SYN))));
    let n = frames.len() as u64;
    assert!(r.attacker.flood(frames).is_empty());
    assert_eq!(r.counted(["IpInAddrErrors"]), [n]);

    let good = peer_ends().tcp(&forged(1, 0, SYN));
    let broken = |at: usize, what: u8| {
        let mut f = good.clone();
        f[at] ^= what;
        f
    };
    let mut frames = vec![];
    for _ in 0..100 {
        frames.push(broken(50, 1)); // wrong TCP checksum
        frames.push(broken(24, 1)); // wrong IP checksum
        frames.push(broken(16, 0x40)); // longer than the frame
        let mut short = broken(46, 0x10); // TCP header of 16 bytes
        let sum = u16::from_be_bytes([short[50], short[51]]);
        short[50..52].copy_from_slice(&(sum + 0x1000).to_be_bytes());
        frames.push(short);
    }
    assert!(r.attacker.flood(frames).is_empty());
    assert_eq!(r.counted(["TcpInCsumErrors", "TcpInErrs"]), [200, 200]);
    r.over();
}

#[test]
fn scans_of_ports_and_protocols_over_a_tap_are_told_what_the_rfcs_say() {
    skip_if!(lacks_network());
    let mut r = Rig::on_tap();
    let scan = |port, flags| {
        let mut t = forged(500, 900, flags);
        t.ports[1] = port;
        peer_ends().tcp(&t)
    };
    // RFC 9293 section 3.10.7.1.
    for (flags, want) in [
        (SYN, (RST | ACK, 0, 501)),
        (ACK, (RST, 900, 0)),
        (FIN, (RST | ACK, 0, 501)),
        (0, (RST | ACK, 0, 500)),
        (FIN | PSH | 0x20, (RST | ACK, 0, 501)),
    ] {
        let back = r.attacker.ask(scan(9, flags));
        assert_eq!(segments(&back), [want], "{flags:#x}");
    }
    // Section 3.10.7.2: the listener does not answer segments without SYN or ACK.
    for flags in [FIN, 0, FIN | PSH | 0x20, RST] {
        assert!(r.attacker.ask(scan(PORT, flags)).is_empty(), "{flags:#x}");
    }
    let ports = || (1..=8000).filter(|p| *p != PORT);
    let back = r.attacker.flood(ports().map(|p| scan(p, SYN)));
    let [closed, resets, skipped] = r.counted(["SiwNoPorts", "TcpOutRsts", "SiwResetsSkipped"]);
    assert_eq!(closed, 8000);
    assert_eq!(resets + skipped, 7999 + 5);
    assert_eq!(segments(&back).len() as u64, resets - 5);
    // RFC 1122 section 3.2.2.1, RFC 8200 section 4.
    let back = r.attacker.flood((0..3000).map(|i| {
        let from = ["10.77.0.9", "fd77::9"][i % 2];
        ends(from).udp([53, i as u16], b"scan")
    }));
    let [unknown, told4, told6, kept] = r.counted([
        "IpInUnknownProtos",
        "IcmpOutDestUnreachs",
        "IcmpOutParmProbs",
        "SiwControlDrops",
    ]);
    let told = told4 + told6;
    // The tap's kernel itself sends reports about groups that it joins, at any time.
    assert!((3000..3020).contains(&unknown), "{unknown}");
    assert_eq!(told + kept, 3000);
    assert!(told4 > 0 && told6 > 0);
    assert!(kept > 0, "the limit is 1000 a second");
    assert_eq!(icmp(&back) as u64, told);
    r.over();
}

#[test]
fn storms_and_spoofs_of_arp_and_neighbour_discovery_are_counted_and_bounded() {
    skip_if!(lacks());
    let mut r = Rig::new();
    let mut peer = r.connect();
    let start = r.counted(["ArpOut", "NdpOut"]);
    let marks = r.attacker.marks();
    // Hundreds of senders ask for the device's address.
    let back = r.attacker.flood((0..2000u32).map(|i| match i % 2 {
        0 => ends(&format!("10.77.0.{}", 10 + i % 240)).arp(1),
        _ => ends(&format!("fd77::{:x}:{:x}", 1 + i, i)).solicit(),
    }));
    let marks = r.attacker.marks() - marks;
    let [arp, ndp, arp_out, ndp_out, drops] =
        r.counted(["ArpIn", "NdpIn", "ArpOut", "NdpOut", "SiwControlDrops"]);
    assert!(arp >= 1000 + marks && ndp == 1000, "{arp} {ndp}");
    let answers = arp_out + ndp_out - start[0] - start[1] - marks;
    assert_eq!((answers + drops, back.len() as u64), (2000, answers));
    // One sender claims the peer's address, another the device's.
    let spoof = |from: &str| {
        let e = ends(from);
        [e.arp(1), e.arp(2)]
    };
    let frames = (0..500).flat_map(|_| spoof("10.77.0.9").into_iter().chain(spoof(IP)));
    let back = r.attacker.flood(frames.collect::<Vec<_>>());
    // Claims of the device's own address are not answered one by one. The device announces its
    // address at most every 10 s (RFC 5227 section 2.4 (c)).
    let defences = back.iter().filter(|f| f[38..42] == [10, 77, 0, 1]).count();
    assert!(defences <= 1, "{defences}");
    // Forwarded neighbour discovery (RFC 4861 section 7.1).
    let mut far = ends("fd77::9").solicit();
    far[21] = 254;
    assert!(r.attacker.flood((0..100).map(|_| far.clone())).is_empty());
    assert_eq!(r.counted(["IpInAddrErrors"]), [100]);
    // Entries follow claims (RFC 826), those of the peer itself, too.
    let mut announcement = ends(&PEER.to_string());
    (announcement.mac[0], announcement.ip[1]) = (peer.wire.mac, PEER.into());
    r.attacker.send(&announcement.arp(1));
    r.lives(&mut peer);
    peer.await_ack();
    drop(peer);
    r.over();
}
