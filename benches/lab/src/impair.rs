//! The lab between two real peers: it passes frames from one link to the other, and loses, delays, repeats,
//! changes and cuts TCP segments by a profile. One seed decides all of it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use etherparse::IpNumber;
use serde::{Deserialize, Serialize};

use crate::link::{FrameReceiver, FrameSender, Link, checksum, complement};
use crate::script::mix;

/// Profiles that are part of the program, by name.
const BUILT_IN: [(&str, &str); 8] = [
    ("loss", include_str!("../profiles/loss.toml")),
    ("reorder", include_str!("../profiles/reorder.toml")),
    ("duplicate", include_str!("../profiles/duplicate.toml")),
    ("delay", include_str!("../profiles/delay.toml")),
    ("corrupt", include_str!("../profiles/corrupt.toml")),
    ("cut", include_str!("../profiles/cut.toml")),
    ("window", include_str!("../profiles/window.toml")),
    ("rough", include_str!("../profiles/rough.toml")),
];

/// Impairments of the TCP segments of one direction; shares are probabilities from 0 to 1. All other frames
/// pass as they are.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Direction {
    /// Share of lost segments.
    pub loss: f64,
    /// Share of segments that come `late_ms` later than the others.
    pub late: f64,
    pub late_ms: f64,
    /// Share of segments that come a second time, `late_ms` later.
    pub duplicate: f64,
    /// The second copy has another content, and a right checksum.
    pub duplicate_altered: bool,
    /// Delay of every segment.
    pub delay_ms: f64,
    /// Greatest addition to the delay; it may change the order.
    pub jitter_ms: f64,
    /// Share of segments with data of which one octet changes; the checksum is repaired.
    pub corrupt: f64,
    /// Share of segments with data that become two, cut at a random octet.
    pub cut: f64,
    /// Largest window that is announced, before scaling; zero: as it comes.
    pub window: u16,
}

/// Impairments of both directions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profile {
    /// Of segments that come from the left link.
    pub left: Direction,
    /// Of segments that come from the right link.
    pub right: Direction,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    both: Option<Direction>,
    left: Option<Direction>,
    right: Option<Direction>,
}

impl Profile {
    /// The built-in profile of this name, or that of a file.
    pub fn find(name: &str) -> Result<Profile> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
            return Profile::parse(text).with_context(|| format!("profile {name}"));
        }
        let text = std::fs::read_to_string(Path::new(name)).with_context(|| {
            let names: Vec<_> = BUILT_IN.iter().map(|(name, _)| *name).collect();
            format!(
                "{name} is neither a profile ({}) nor a file that can be read",
                names.join(", ")
            )
        })?;
        Profile::parse(&text).with_context(|| format!("{name} has an error"))
    }

    fn parse(text: &str) -> Result<Profile> {
        let text: Text = toml::from_str(text)?;
        let both = text.both.unwrap_or_default();
        let profile = Profile {
            left: text.left.unwrap_or_else(|| both.clone()),
            right: text.right.unwrap_or(both),
        };
        for direction in [&profile.left, &profile.right] {
            let shares = [
                ("loss", direction.loss),
                ("late", direction.late),
                ("duplicate", direction.duplicate),
                ("corrupt", direction.corrupt),
                ("cut", direction.cut),
            ];
            for (name, share) in shares {
                if !(0.0..=1.0).contains(&share) {
                    bail!("{name} = {share}: a share is from 0 to 1");
                }
            }
            let times = [
                ("late_ms", direction.late_ms),
                ("delay_ms", direction.delay_ms),
                ("jitter_ms", direction.jitter_ms),
            ];
            for (name, time) in times {
                if !(0.0..=60_000.0).contains(&time) {
                    bail!("{name} = {time}: a time is from 0 to 60000 ms");
                }
            }
        }
        Ok(profile)
    }
}

/// Segments of one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub segments: u64,
    pub lost: u64,
    pub late: u64,
    pub duplicated: u64,
    pub corrupted: u64,
    pub cut: u64,
}

/// Random numbers of a seed.
struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.drawn += 1;
        mix(self.seed.wrapping_add(self.drawn), "impair")
    }

    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Places within a frame with a TCP segment.
#[derive(Clone, Copy)]
struct Places {
    ip: usize,
    tcp: usize,
    payload: usize,
    end: usize,
}

impl Places {
    /// `None`: no TCP segment, a fragment, or malformed.
    fn of(frame: &[u8]) -> Option<Places> {
        let half = |at: usize| Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]));
        let ip = 14;
        let (tcp, end) = match half(12)? {
            0x0800 => {
                let is_whole = half(ip + 6)? & 0x3FFF == 0;
                if frame.get(ip + 9) != Some(&IpNumber::TCP.0) || !is_whole {
                    return None;
                }
                let header = usize::from(frame[ip] & 0xF) * 4;
                (ip + header, ip + usize::from(half(ip + 2)?))
            }
            0x86DD => {
                if frame.get(ip + 6) != Some(&IpNumber::TCP.0) {
                    return None;
                }
                (ip + 40, ip + 40 + usize::from(half(ip + 4)?))
            }
            _ => return None,
        };
        let payload = tcp + usize::from(frame.get(tcp + 12)? >> 4) * 4;
        (payload >= tcp + 20 && payload <= end && end <= frame.len()).then_some(Places {
            ip,
            tcp,
            payload,
            end,
        })
    }
}

/// The frame with another payload, with right lengths and checksums.
fn with_payload(
    frame: &[u8],
    places: Places,
    payload: &[u8],
    change: impl Fn(&mut [u8]),
) -> Vec<u8> {
    let Places { ip, tcp, .. } = places;
    let mut new = frame[..places.payload].to_vec();
    new.extend(payload);
    change(&mut new[tcp..]);
    let length = new.len();
    let addresses: (IpAddr, IpAddr) = if frame[ip] >> 4 == 4 {
        new[ip + 2..ip + 4].copy_from_slice(&((length - ip) as u16).to_be_bytes());
        new[ip + 10..ip + 12].fill(0);
        let sum = complement(&new[ip..tcp]);
        new[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
        let at = |from: usize| -> IpAddr {
            let octets: [u8; 4] = std::array::from_fn(|i| frame[from + i]);
            Ipv4Addr::from(octets).into()
        };
        (at(ip + 12), at(ip + 16))
    } else {
        new[ip + 4..ip + 6].copy_from_slice(&((length - tcp) as u16).to_be_bytes());
        let at = |from: usize| -> IpAddr {
            let octets: [u8; 16] = std::array::from_fn(|i| frame[from + i]);
            Ipv6Addr::from(octets).into()
        };
        (at(ip + 8), at(ip + 24))
    };
    new[tcp + 16..tcp + 18].fill(0);
    let sum = checksum(addresses.0, addresses.1, IpNumber::TCP, &new[tcp..]);
    new[tcp + 16..tcp + 18].copy_from_slice(&sum.to_be_bytes());
    new
}

const FIN_AND_PSH: u8 = 0x01 | 0x08;

/// Impairs the segments of one direction.
pub struct Impairer {
    plan: Direction,
    random: Random,
    counts: Counts,
}

impl Impairer {
    pub fn new(plan: &Direction, seed: u64) -> Impairer {
        Impairer {
            plan: plan.clone(),
            random: Random { seed, drawn: 0 },
            counts: Counts::default(),
        }
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The frames that leave for one that came, each with its delay.
    pub fn pass(&mut self, frame: Vec<u8>) -> Vec<(Duration, Vec<u8>)> {
        let Some(places) = Places::of(&frame) else {
            return vec![(Duration::ZERO, frame)];
        };
        // Each segment draws the same numbers, whatever happens to it: a change of one share leaves the
        // others' choices as they are.
        let mut draw = || self.random.share();
        let [loss, late, duplicate, corrupt, cut, jitter] = std::array::from_fn(|_| draw());
        let size = places.end - places.payload;
        let place = self.random.below(size);
        let other = (1 + self.random.below(255)) as u8;
        self.counts.segments += 1;
        if loss < self.plan.loss {
            self.counts.lost += 1;
            return Vec::new();
        }
        let payload = frame[places.payload..places.end].to_vec();
        let altered = || {
            let mut altered = payload.clone();
            if let Some(octet) = altered.get_mut(place) {
                *octet ^= other;
            }
            altered
        };
        let window = self.plan.window;
        let clamp = |tcp: &mut [u8]| {
            let announced = u16::from_be_bytes([tcp[14], tcp[15]]);
            if window > 0 && announced > window {
                tcp[14..16].copy_from_slice(&window.to_be_bytes());
            }
        };
        let seconds = |ms: f64| Duration::from_secs_f64(ms / 1000.0);
        let mut delay = seconds(self.plan.delay_ms + jitter * self.plan.jitter_ms);
        let again = delay + seconds(self.plan.late_ms);
        if late < self.plan.late {
            self.counts.late += 1;
            delay = again;
        }
        let is_corrupt = size > 0 && corrupt < self.plan.corrupt;
        let sent = if is_corrupt {
            altered()
        } else {
            payload.clone()
        };
        let mut out = Vec::new();
        if size > 1 && cut < self.plan.cut {
            self.counts.cut += 1;
            let at = 1 + place % (size - 1);
            out.push((
                delay,
                with_payload(&frame, places, &sent[..at], |tcp| {
                    clamp(tcp);
                    tcp[13] &= !FIN_AND_PSH;
                }),
            ));
            out.push((
                delay,
                with_payload(&frame, places, &sent[at..], |tcp| {
                    clamp(tcp);
                    let seq = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
                    tcp[4..8].copy_from_slice(&seq.wrapping_add(at as u32).to_be_bytes());
                }),
            ));
        } else if is_corrupt || window > 0 {
            out.push((delay, with_payload(&frame, places, &sent, clamp)));
        } else {
            out.push((delay, frame.clone()));
        }
        self.counts.corrupted += u64::from(is_corrupt);
        if duplicate < self.plan.duplicate {
            self.counts.duplicated += 1;
            let copy = if self.plan.duplicate_altered && size > 0 {
                with_payload(&frame, places, &altered(), clamp)
            } else {
                frame
            };
            out.push((again, copy));
        }
        out
    }
}

/// A frame on its way; the one that is due first is the greatest.
type Due = Reverse<(Instant, u64, Vec<u8>)>;

/// Sends frames when they are due, until the channel closes.
fn send_when_due(frames: &Receiver<(Instant, Vec<u8>)>, sender: &mut dyn FrameSender) {
    let mut waiting: BinaryHeap<Due> = BinaryHeap::new();
    let mut number = 0;
    loop {
        while let Some(Reverse((due, ..))) = waiting.peek()
            && *due <= Instant::now()
        {
            if let Some(Reverse((_, _, frame))) = waiting.pop() {
                // A full queue loses the frame, as a network may.
                let _ = sender.send(&frame);
            }
        }
        let next = waiting.peek().map(|Reverse((due, ..))| *due);
        let got = match next {
            Some(due) => frames.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => frames.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match got {
            Ok((due, frame)) => {
                number += 1;
                waiting.push(Reverse((due, number, frame)));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn pass_on(
    receiver: &mut dyn FrameReceiver,
    mut impairer: Impairer,
    to: &Sender<(Instant, Vec<u8>)>,
    stop: &AtomicBool,
) -> Counts {
    while !stop.load(Ordering::Relaxed) {
        match receiver.receive() {
            Ok(Some(frame)) => {
                let now = Instant::now();
                for (delay, frame) in impairer.pass(frame) {
                    if to.send((now + delay, frame)).is_err() {
                        return impairer.counts();
                    }
                }
            }
            Ok(None) => {}
            Err(_) => break,
        }
    }
    impairer.counts()
}

/// The lab between two links; it ends when dropped or asked for its counts.
pub struct Between {
    stop: Arc<AtomicBool>,
    directions: Vec<JoinHandle<Counts>>,
}

impl Between {
    pub fn start(left: Link, right: Link, profile: &Profile, seed: u64) -> Between {
        let stop = Arc::new(AtomicBool::new(false));
        let (left_sender, left_receiver) = left;
        let (right_sender, right_receiver) = right;
        let directions = [
            (left_receiver, right_sender, &profile.left, "left"),
            (right_receiver, left_sender, &profile.right, "right"),
        ];
        let directions = directions.map(|(mut receiver, mut sender, plan, name)| {
            let impairer = Impairer::new(plan, mix(seed, name));
            let (to, frames) = channel();
            let stop = stop.clone();
            std::thread::spawn(move || {
                let sending = std::thread::spawn(move || send_when_due(&frames, sender.as_mut()));
                let counts = pass_on(receiver.as_mut(), impairer, &to, &stop);
                drop(to);
                let _ = sending.join();
                counts
            })
        });
        Between {
            stop,
            directions: directions.into(),
        }
    }

    /// A link is gone.
    pub fn ended(&self) -> bool {
        self.directions.iter().any(JoinHandle::is_finished)
    }

    /// Ends; returns the segments that came from the left, and those from the right.
    pub fn end(mut self) -> (Counts, Counts) {
        self.stop.store(true, Ordering::Relaxed);
        let mut counts = self
            .directions
            .drain(..)
            .map(|direction| direction.join().unwrap_or_default());
        (
            counts.next().unwrap_or_default(),
            counts.next().unwrap_or_default(),
        )
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for direction in self.directions.drain(..) {
            let _ = direction.join();
        }
    }
}
