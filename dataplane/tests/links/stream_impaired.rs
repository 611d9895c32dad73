//! Our TCP against the kernel's over a link that loses, delays, reorders and duplicates frames.
//! Each test prints its seed; `SIW_SEED=N` runs it with another.

use std::net::{Shutdown, TcpListener};
use std::time::Duration;

use crate::common::impaired_link::{ImpairedLink, Impairment};
use crate::common::net::{lacks_network, missing_program};
use crate::common::stream::*;

fn seed(default: u64) -> u64 {
    let seed = std::env::var("SIW_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(default);
    println!("SIW_SEED={seed}");
    seed
}

/// Linux sends and reads `bytes` at the same time on each of several connections; all data must
/// arrive on both sides.
fn exchange(how: Impairment, mtu: u32, ip: &str, connections: usize, bytes: u64) -> (Outcome, u64) {
    let link = ImpairedLink::new(mtu, how);
    let e = Endpoint::start(
        &link.ns,
        &format!("--mtu {mtu} --listen exchange:2000 --bytes {bytes}"),
    );
    std::thread::scope(|s| {
        for _ in 0..connections {
            s.spawn(|| {
                let tcp = dial(&link.ns, ip, 2000).unwrap();
                std::thread::scope(|t| {
                    t.spawn(|| {
                        write_pattern(&tcp, bytes);
                        tcp.shutdown(Shutdown::Write).unwrap();
                    });
                    read_pattern(&tcp, bytes);
                });
            });
        }
    });
    let o = e.stop();
    let n = connections as u64;
    assert_eq!(o.count("bytes_checked"), n * bytes, "{}", o.result);
    assert_eq!(o.count("bytes_out"), n * bytes, "{}", o.result);
    assert_eq!(o.count("bad_streams"), 0);
    println!(
        "{:.2} s, link {:?}, retransmitted {}, timeouts {}, dsacks {}/{}",
        o.result["seconds"].as_f64().unwrap(),
        link.counts,
        o.tcp("retrans_segs"),
        o.tcp("timeouts"),
        o.tcp("dsacks_in"),
        o.tcp("dsacks_out"),
    );
    (o, link.counts.lost())
}

#[test]
fn streams_survive_loss_reordering_and_duplication_with_a_delay() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let how = Impairment {
        seed: seed(11),
        delay: Duration::from_millis(2),
        loss: 10,
        late: 20,
        lateness: Duration::from_millis(1),
        duplicate: 10,
        ..Impairment::default()
    };
    let (o, lost) = exchange(how, 1500, OURS, 2, 4 << 20);
    assert!(lost > 0 && o.tcp("retrans_segs") > 0);
    assert!(o.tcp("ofo_queue") > 0, "no segment arrived out of order");
}

#[test]
fn streams_survive_bursts_of_loss_without_a_delay_over_ipv6() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let how = Impairment {
        seed: seed(12),
        loss: 3,
        burst: 8,
        ..Impairment::default()
    };
    let (o, lost) = exchange(how, 1500, OURS6, 2, 4 << 20);
    assert!(lost > 0 && o.tcp("retrans_segs") > 0);
}

#[test]
fn streams_in_jumbo_frames_survive_a_tenth_of_all_frames_lost() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let how = Impairment {
        seed: seed(13),
        delay: Duration::from_micros(100),
        loss: 100,
        ..Impairment::default()
    };
    let (o, _) = exchange(how, 9000, OURS, 4, 512 << 10);
    assert!(o.tcp("retrans_segs") > 0);
}

#[test]
fn connections_that_we_open_come_about_and_carry_their_streams_though_a_tenth_is_lost() {
    skip_if!(lacks_network().or_else(|| missing_program("ethtool")));
    let how = Impairment {
        seed: seed(14),
        delay: Duration::from_micros(500),
        loss: 100,
        ..Impairment::default()
    };
    let (link, count, bytes) = (ImpairedLink::new(1500, how), 8, 256 << 10);
    let listener = link.ns.run(|| TcpListener::bind((LINUX, 0)).unwrap());
    let to = listener.local_addr().unwrap();
    let args = format!("--connect {to} --role exchange --count {count} --bytes {bytes}");
    let e = Endpoint::start(&link.ns, &args);
    std::thread::scope(|s| {
        for _ in 0..count {
            let (tcp, _) = listener.accept().unwrap();
            patient(&tcp);
            s.spawn(move || {
                std::thread::scope(|t| {
                    t.spawn(|| {
                        write_pattern(&tcp, bytes);
                        tcp.shutdown(Shutdown::Write).unwrap();
                    });
                    read_pattern(&tcp, bytes);
                });
            });
        }
    });
    let o = e.wait();
    assert!(o.success, "{}", o.result);
    assert_eq!((o.count("connected"), o.count("closed")), (count, count));
    assert_eq!(o.count("bytes_checked"), count * bytes);
    assert!(link.counts.lost() > 0 && o.tcp("retrans_segs") > 0);
}
