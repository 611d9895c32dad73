//! A script with a wrong expectation fails on the line of the expectation.

/// Opens a connection; lines 1 to 7 of each script.
const OPEN: &str = "\
0    socket(..., SOCK_STREAM, IPPROTO_TCP) = 3
+0   bind(3, ..., ...) = 0
+0   listen(3, 1) = 0
+.1  < S 0:0(0) win 32792 <mss 1000,nop,nop,sackOK>
+0   > S. 0:0(0) ack 1 <mss 1460,nop,nop,sackOK>
+.1  < . 1:1(0) ack 1 win 32792
+0   accept(3, ..., ...) = 4
";

/// Returns the line and the message of the failure of `OPEN` followed by `rest`.
fn failure_of(rest: &str) -> (usize, String) {
    let f = siw_drill::run_script("wrong.pkt", &format!("{OPEN}{rest}"))
        .result
        .expect_err(rest);
    assert_eq!(f.file, "wrong.pkt");
    assert!(
        f.to_string()
            .starts_with(&format!("wrong.pkt:{}: ", f.line))
    );
    (f.line, f.message)
}

#[test]
fn a_right_script_passes_and_is_captured() {
    let rest = "+0 write(4, ..., 100) = 100\n+0 > P. 1:101(100) ack 1\n";
    let outcome = siw_drill::run_script("right.pkt", &format!("{OPEN}{rest}"));
    assert_eq!(outcome.result, Ok(()));
    assert_eq!(outcome.packets.len(), 4);
    assert_eq!(
        outcome
            .packets
            .iter()
            .filter(|packet| packet.inbound)
            .count(),
        2
    );
    let mut file = vec![];
    siw_drill::write_pcapng(&mut file, &outcome.packets).unwrap();
    let mut r = pcap_file::pcapng::PcapNgReader::new(&file[..]).unwrap();
    let mut n = 0;
    while let Some(b) = r.next_block() {
        if let pcap_file::pcapng::Block::EnhancedPacket(p) = b.unwrap() {
            assert_eq!(p.data[0], 0x45);
            n += 1;
        }
    }
    assert_eq!(n, 4);
}

#[test]
fn a_wrong_packet_is_shown_beside_the_expected_one() {
    let write = "+0 write(4, ..., 100) = 100\n";
    for (wrong, says) in [
        ("+0 > . 1:101(100) ack 1\n", "wrong flags: P., not ."),
        (
            "+0 > P. 2:102(100) ack 1\n",
            "wrong sequence number: 1, not 2",
        ),
        (
            "+0 > P. 1:100(99) ack 1\n",
            "wrong payload length: 100, not 99",
        ),
        (
            "+0 > P. 1:101(100) ack 2\n",
            "wrong acknowledgment: 1, not 2",
        ),
        (
            "+0 > P. 1:101(100) ack 1 win 7\n",
            "wrong window: 65535, not 7",
        ),
        (
            "+0 > P. 1:101(100) ack 1 <nop,nop,sack 1:2>\n",
            "wrong TCP options",
        ),
        ("+0 > [ce] P. 1:101(100) ack 1\n", "wrong ECN bits"),
        (
            "+.2 > P. 1:101(100) ack 1\n",
            "wrong time: 0.200000, not 0.400000",
        ),
        (
            "+.1~+.2 > P. 1:101(100) ack 1\n",
            "wrong time: 0.200000, not 0.300000 to 0.400000",
        ),
    ] {
        let (line, message) = failure_of(&format!("{write}{wrong}"));
        assert_eq!(line, 9, "{wrong}: {message}");
        assert!(message.contains(says), "{wrong}: {message}");
        let packets = message.contains("  expected: ") && message.contains("  actual:   ");
        assert!(packets, "{message}");
        assert!(
            message.contains("0.200000 > P. 1:101(100) ack 1 win 65535"),
            "{message}"
        );
    }
}

#[test]
fn a_missing_packet_is_reported_with_its_time() {
    let (line, message) = failure_of("+.1 > P. 1:101(100) ack 1\n");
    assert_eq!(line, 8);
    assert!(message.starts_with("missing packet"), "{message}");
    assert!(
        message.contains("expected: 0.300000 > P. 1:101(100) ack 1"),
        "{message}"
    );
}

#[test]
fn an_unexpected_packet_fails_the_next_line() {
    let write = "+0 write(4, ..., 100) = 100\n";
    let (line, message) = failure_of(&format!("{write}+.1 < . 1:1(0) ack 1 win 9\n"));
    assert_eq!(line, 9);
    assert!(
        message.starts_with("unexpected packet before this line"),
        "{message}"
    );
    assert!(
        message.contains("0.200000 > P. 1:101(100) ack 1"),
        "{message}"
    );
    let (line, message) = failure_of(write);
    assert_eq!(line, 8);
    assert!(
        message.starts_with("unexpected packet after the last line"),
        "{message}"
    );
}

#[test]
fn a_wrong_result_of_a_call_is_reported() {
    for (wrong, says) in [
        ("+0 write(4, ..., 100) = 99\n", "write returned 100, not 99"),
        (
            "+0 read(4, ..., 100) = 1\n",
            "read returned -1 EAGAIN, not 1",
        ),
        (
            "+0 read(4, ..., 100) = -1 EPIPE\n",
            "-1 EAGAIN, not -1 EPIPE",
        ),
        ("+0 close(9) = 0\n", "-1 EBADF"),
        (
            "+0...0.4 read(4, ..., 10) = 10\n+1 > . 1:1(0) ack 1\n",
            "still blocks at 0.401",
        ),
        ("+0...1 read(4, ..., 10) = 10\n", "still blocks at the end"),
        (
            "+0...1 read(4, ..., 10) = 10\n+.1 < P. 1:11(10) ack 1 win 9\n",
            "ended at 0.3",
        ),
        ("+0 dance(4) = 0\n", "not a system call"),
        (
            "+0 setsockopt(4, SOL_TCP, TCP_DANCE, [1], 4) = 0\n",
            "TCP_DANCE",
        ),
        (
            "+0 poll([{fd=4, events=POLLIN, revents=POLLIN}], 1, 0) = 1\n",
            "revents of 4",
        ),
    ] {
        let (line, message) = failure_of(wrong);
        assert_eq!(line, 8, "{wrong}: {message}");
        assert!(message.contains(says), "{wrong}: {message}");
    }
}

#[test]
fn a_failed_assertion_reports_its_values() {
    let (line, message) =
        failure_of("+0 %{\nassert state == ESTABLISHED\nassert cwnd == 3 * mss }%\n");
    assert_eq!(line, 10);
    assert!(message.contains("cwnd = 10000, mss = 1000"), "{message}");
}

#[test]
fn times_that_go_back_are_refused() {
    let (line, message) = failure_of("0.1 < . 1:1(0) ack 1 win 9\n");
    assert_eq!(line, 8);
    assert!(message.contains("before the last event"), "{message}");
}

#[test]
fn syntax_errors_and_bad_options_name_their_line() {
    let (line, message) = failure_of("+0 < . 1:1(0 ack 1 win 9\n");
    assert_eq!(line, 8);
    assert!(
        message.contains("syntax error: expected `)`, found `ack`"),
        "{message}"
    );
    for (option, says) in [
        ("--mtu=100\n", "MTU 100"),
        ("--wine=1\n", "--wine"),
        ("--ip_version=ipv5\n", "ipv4 or ipv6"),
        (
            "--so_flags=\"congestion=vegas\"\n",
            "cubic, newreno or dctcp",
        ),
    ] {
        let f = siw_drill::run_script("o.pkt", &format!("{option}{OPEN}"))
            .result
            .unwrap_err();
        assert_eq!(f.line, 1, "{f}");
        assert!(f.message.contains(says), "{f}");
    }
}

#[test]
fn the_program_exits_with_1_and_reports_in_json() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("good.pkt"), OPEN).unwrap();
    let bad = dir.path().join("bad.pkt");
    std::fs::write(&bad, format!("{OPEN}+0 close(9) = 0\n")).unwrap();
    let capture = dir.path().join("run.pcapng");
    let run = |args: &[&str]| {
        std::process::Command::new(env!("CARGO_BIN_EXE_siw-drill"))
            .args(args)
            .output()
            .unwrap()
    };
    let path = dir.path().to_str().unwrap();
    let o = run(&["--json", "--pcapng", capture.to_str().unwrap(), path]);
    assert_eq!(o.status.code(), Some(1));
    let lines: Vec<serde_json::Value> = String::from_utf8(o.stdout)
        .unwrap()
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(
        (&lines[0]["passed"], &lines[0]["line"]),
        (&false.into(), &8.into())
    );
    assert_eq!(lines[1]["passed"], true);
    assert!(capture.metadata().unwrap().len() > 100);
    assert_eq!(run(&["/nonexistent.pkt"]).status.code(), Some(2));
}
