//! A hostile host on the link: sends arbitrary frames through a packet socket.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt};
use nix::sys::time::TimeVal;
use serde_json::Value;
use siw_tcp_sim::forge::Ends;

use super::net::Netns;
use super::raw::packet_socket;
use super::{Daemon, PATIENCE, client_program};

/// The device under attack, as the tests configure it.
pub const MAC: [u8; 6] = [2, 0, 0, 0x77, 0, 1];
pub const IP: &str = "10.77.0.1";
pub const IP6: &str = "fd77::1";
/// The attacker's MAC address.
pub const STRANGER: [u8; 6] = [2, 6, 6, 6, 6, 6];

/// Frames between two marks: fewer than the receive ring and the queue of answers hold.
const BURST: usize = 100;

pub struct Attacker {
    socket: OwnedFd,
    marks: u16,
}

/// Endpoints of a frame to the device from a stranger that claims the address `from`.
pub fn ends(from: &str) -> Ends {
    let from: IpAddr = from.parse().unwrap();
    let to = if from.is_ipv4() { IP } else { IP6 };
    Ends {
        mac: [STRANGER, MAC],
        ip: [from, to.parse().unwrap()],
    }
}

impl Attacker {
    pub fn on(ns: &Netns, interface: &str) -> Attacker {
        let socket = packet_socket(ns, interface);
        let _ = setsockopt(&socket, sockopt::RcvBufForce, &(16 << 20));
        Attacker { socket, marks: 0 }
    }

    pub fn send(&self, frame: &[u8]) {
        loop {
            match send(self.socket.as_raw_fd(), frame, MsgFlags::empty()) {
                Ok(n) => return assert_eq!(n, frame.len()),
                Err(Errno::ENOBUFS) => std::thread::yield_now(),
                Err(error) => panic!("sending {} bytes: {error}", frame.len()),
            }
        }
    }

    /// Sends all frames in bursts; the device has processed a burst before the next is sent.
    /// Returns the frames that the device sent meanwhile.
    pub fn flood(&mut self, frames: impl IntoIterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
        let mut back = Vec::new();
        let mut n = 0;
        for f in frames {
            self.send(&f);
            n += 1;
            if n % BURST == 0 {
                self.settle(&mut back);
            }
        }
        // The device serves connections after unmatched frames: their pending output has left once
        // a second request is answered.
        self.settle(&mut back);
        self.settle(&mut back);
        back
    }

    /// Sends one frame and returns the answers.
    pub fn ask(&mut self, frame: Vec<u8>) -> Vec<Vec<u8>> {
        self.flood([frame])
    }

    /// Waits until the device has processed every frame sent so far: sends an ARP probe, which the
    /// device answers last.
    fn settle(&mut self, back: &mut Vec<Vec<u8>>) {
        self.marks += 1;
        let [a, b] = self.marks.to_be_bytes();
        let mark = [2, 0x4d, 0x41, 0x52, a, b];
        // A probe claims no address (RFC 5227 section 2.1).
        let mut error = ends("0.0.0.0");
        error.mac = [mark, [0xff; 6]];
        self.send(&error.arp(1));
        let end = Instant::now() + PATIENCE;
        while let Some(f) = self.recv(end) {
            if f[..6] == mark {
                return;
            }
            if f[6..12] == MAC && !is_own_probe(&f) {
                back.push(f);
            }
        }
        panic!("the device is silent");
    }

    /// Number of ARP probes sent by `settle`, in addition to the test's own.
    pub fn marks(&self) -> u64 {
        self.marks.into()
    }

    /// The next `N` frames on the link that carry a segment with SYN.
    pub fn syns<const N: usize>(&self) -> [Vec<u8>; N] {
        let end = Instant::now() + PATIENCE;
        [0; N].map(|_| {
            loop {
                let f = self.recv(end).expect("a segment with SYN");
                if f.len() >= 54 && f[12..14] == [8, 0] && f[23] == 6 && f[47] & 2 != 0 {
                    return f;
                }
            }
        })
    }

    fn recv(&self, until: Instant) -> Option<Vec<u8>> {
        let mut b = vec![0; 65_536];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let left = left.max(Duration::from_millis(1));
            let t = TimeVal::new(left.as_secs() as i64, left.subsec_micros().into());
            setsockopt(&self.socket, sockopt::ReceiveTimeout, &t).unwrap();
            match recv(self.socket.as_raw_fd(), &mut b, MsgFlags::empty()) {
                Ok(n) if n >= 14 => {
                    b.truncate(n);
                    return Some(b);
                }
                _ => {}
            }
        }
    }
}

/// Merged counters of a daemon's first device and its workers, as `siwctl stat` shows them.
pub struct Counters(BTreeMap<String, u64>);

impl Counters {
    pub fn of(d: &Daemon) -> Counters {
        static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
        let program = PROGRAM.get_or_init(|| client_program("siwctl"));
        let out = Command::new(program)
            .args(["stat", "--json", "--socket"])
            .arg(&d.socket)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let err = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "siwctl stat: {err}");
        let v: Value = serde_json::from_slice(&out.stdout).unwrap();
        let both = [&v["devices"][0]["merged"], &v["merged"]];
        let rows = both.into_iter().filter_map(Value::as_object).flatten();
        Counters(
            rows.map(|(k, v)| (k.clone(), v.as_u64().unwrap()))
                .collect(),
        )
    }

    pub fn get(&self, name: &str) -> u64 {
        match self.0.get(name) {
            Some(n) => *n,
            None => panic!("siwctl stat shows no {name}"),
        }
    }

    /// Increase of a counter since `before`.
    pub fn since(&self, before: &Counters, name: &str) -> u64 {
        self.get(name) - before.get(name)
    }
}

/// Returns whether a frame is the device's probe of an address of its own, which it sends in the first
/// seconds after its start (RFC 5227 section 2.1.1, RFC 4862 section 5.4.2).
fn is_own_probe(frame: &[u8]) -> bool {
    let is_arp = frame[12..14] == [8, 6] && frame[28..32] == [0; 4];
    let is_solicitation = frame.len() >= 78 && frame[12..14] == [0x86, 0xdd] && frame[54] == 135;
    is_arp || is_solicitation && frame[22..38] == [0; 16]
}
