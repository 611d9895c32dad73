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

use crate::link::{FrameReceiver, FrameSender, Link, checksum, complement, mix};

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
    /// Segments in a row that a loss takes; zero is one. A pause of 100 ms ends the row.
    pub burst: u32,
    /// The segment of this number is lost, counted from 1; zero: none.
    pub nth: u64,
    /// From the segment of this number on nothing passes for `pause_ms`; zero: never.
    pub pause_at: u64,
    pub pause_ms: f64,
    /// Longest IP packet that passes, in octets; zero: any.
    pub mtu: usize,
    /// Share of segments with data that keep their checksum while one octet of them changes.
    pub damage: f64,
    /// Share of segments with data of which two neighbouring 16-bit words change places; the checksum stays right.
    pub swap: f64,
    /// Added to the sequence numbers.
    pub shift_seq: u32,
    /// Added to the acknowledgment numbers.
    pub shift_ack: u32,
    /// Kind of TCP option that is taken out of SYNs; zero: none.
    pub strip: u8,
    /// Largest MSS in SYNs; zero: as it comes.
    pub mss: u16,
    /// Share of lost ACKs without data.
    pub ack_loss: f64,
    /// One of this number of ACKs without data passes, or one in 50 ms; zero: all.
    pub ack_every: u64,
    /// Each ACK becomes this number of ACKs that advance by equal parts; zero: as it comes.
    pub ack_split: u32,
    /// Rate of a bottleneck, in kbit/s; zero: none.
    pub rate_kbit: u64,
    /// Frames of 1500 octets that wait at the bottleneck before it loses more.
    pub queue: u32,
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
                ("damage", direction.damage),
                ("swap", direction.swap),
                ("ack_loss", direction.ack_loss),
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
                ("pause_ms", direction.pause_ms),
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
pub(crate) struct Places {
    ip: usize,
    pub(crate) tcp: usize,
    payload: usize,
    end: usize,
}

impl Places {
    /// `None`: no TCP segment, a fragment, or malformed.
    pub(crate) fn of(frame: &[u8]) -> Option<Places> {
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
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
/// SYN, FIN and RST.
const CONTROL: u8 = 0x07;

/// Where the flags stand in a TCP header.
const FLAGS: usize = 13;

/// A pause after which a burst of losses takes no more segments.
const END_OF_BURST: Duration = Duration::from_millis(100);

/// Longest time in which `ack_every` passes no ACK.
const LONGEST_WITHOUT_ACK: Duration = Duration::from_millis(50);

/// Largest IP packet of an Ethernet frame, for the queue of a bottleneck.
const FRAME_BITS: u64 = 8 * 1500;

fn word(octets: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]])
}

impl Direction {
    /// Names of the fields that [`Self::set`] knows.
    pub const FIELDS: &'static [&'static str] = &[
        "loss",
        "late",
        "late_ms",
        "duplicate",
        "altered",
        "delay_ms",
        "jitter_ms",
        "corrupt",
        "cut",
        "window",
        "burst",
        "nth",
        "pause_at",
        "pause_ms",
        "mtu",
        "damage",
        "swap",
        "strip",
        "mss",
        "ack_loss",
        "ack_every",
        "ack_split",
        "rate_kbit",
        "queue",
    ];

    /// Sets a field by its name; shares are in thousandths. False: no field has that name.
    pub fn set(&mut self, name: &str, value: u64) -> bool {
        let number = value as f64;
        let share = number / 1000.0;
        match name {
            "loss" => self.loss = share,
            "late" => self.late = share,
            "late_ms" => self.late_ms = number,
            "duplicate" => self.duplicate = share,
            "altered" => self.duplicate_altered = value != 0,
            "delay_ms" => self.delay_ms = number,
            "jitter_ms" => self.jitter_ms = number,
            "corrupt" => self.corrupt = share,
            "cut" => self.cut = share,
            "window" => self.window = value as u16,
            "burst" => self.burst = value as u32,
            "nth" => self.nth = value,
            "pause_at" => self.pause_at = value,
            "pause_ms" => self.pause_ms = number,
            "mtu" => self.mtu = value as usize,
            "damage" => self.damage = share,
            "swap" => self.swap = share,
            "strip" => self.strip = value as u8,
            "mss" => self.mss = value as u16,
            "ack_loss" => self.ack_loss = share,
            "ack_every" => self.ack_every = value,
            "ack_split" => self.ack_split = value as u32,
            "rate_kbit" => self.rate_kbit = value,
            "queue" => self.queue = value as u32,
            _ => return false,
        }
        true
    }

    fn rewrites(&self) -> bool {
        self.window > 0
            || self.strip > 0
            || self.mss > 0
            || (self.shift_seq, self.shift_ack) != (0, 0)
    }

    /// Changes a TCP header as a box on the path does.
    fn rewrite(&self, tcp: &mut [u8]) {
        let announced = u16::from_be_bytes([tcp[14], tcp[15]]);
        if self.window > 0 && announced > self.window {
            tcp[14..16].copy_from_slice(&self.window.to_be_bytes());
        }
        let seq = word(tcp, 4).wrapping_add(self.shift_seq);
        tcp[4..8].copy_from_slice(&seq.to_be_bytes());
        if tcp[FLAGS] & ACK != 0 {
            let ack = word(tcp, 8).wrapping_add(self.shift_ack);
            tcp[8..12].copy_from_slice(&ack.to_be_bytes());
        }
        if tcp[FLAGS] & SYN != 0 {
            self.rewrite_options(tcp);
        }
    }

    fn rewrite_options(&self, tcp: &mut [u8]) {
        const MSS: u8 = 2;
        const NO_OPERATION: u8 = 1;
        let end = (usize::from(tcp[12] >> 4) * 4).min(tcp.len());
        let mut at = 20;
        while at + 1 < end && tcp[at] != 0 {
            if tcp[at] == NO_OPERATION {
                at += 1;
                continue;
            }
            let next = at + usize::from(tcp[at + 1]).max(2);
            if next > end {
                return;
            }
            if tcp[at] == self.strip {
                tcp[at..next].fill(NO_OPERATION);
            } else if tcp[at] == MSS && self.mss > 0 && next == at + 4 {
                let told = u16::from_be_bytes([tcp[at + 2], tcp[at + 3]]);
                tcp[at + 2..next].copy_from_slice(&told.min(self.mss).to_be_bytes());
            }
            at = next;
        }
    }
}

/// Impairs the segments of one direction.
pub struct Impairer {
    plan: Direction,
    random: Random,
    counts: Counts,
    /// Segments that the current burst still takes, and when it took the last one.
    burst: u32,
    burst_took: Instant,
    paused_until: Option<Instant>,
    /// ACKs without data, and when the last one passed.
    acks: u64,
    ack_passed: Instant,
    last_ack: Option<u32>,
    /// When the bottleneck has sent all that waits.
    free_at: Option<Instant>,
}

impl Impairer {
    pub fn new(plan: &Direction, seed: u64) -> Impairer {
        Impairer {
            plan: plan.clone(),
            random: Random { seed, drawn: 0 },
            counts: Counts::default(),
            burst: 0,
            burst_took: Instant::now(),
            paused_until: None,
            acks: 0,
            ack_passed: Instant::now(),
            last_ack: None,
            free_at: None,
        }
    }

    /// Whether a segment is lost; `loss` and `ack_loss` are its random numbers.
    fn loses(
        &mut self,
        now: Instant,
        [loss, ack_loss]: [f64; 2],
        is_ack: bool,
        length: usize,
    ) -> bool {
        let plan = &self.plan;
        let number = self.counts.segments;
        if plan.pause_at > 0 && number == plan.pause_at {
            let pause = Duration::from_secs_f64(plan.pause_ms / 1000.0);
            self.paused_until = Some(now + pause);
        }
        // A sender without ACKs repeats one segment at a time, ever later: without an end, one burst
        // would be an outage of minutes.
        if self.burst > 0 && now - self.burst_took < END_OF_BURST {
            self.burst -= 1;
            self.burst_took = now;
            return true;
        }
        if loss < plan.loss {
            self.burst = plan.burst.saturating_sub(1);
            self.burst_took = now;
            return true;
        }
        let is_paused = self.paused_until.is_some_and(|until| now < until);
        let is_too_long = plan.mtu > 0 && length > plan.mtu;
        if is_paused || is_too_long || plan.nth == number {
            return true;
        }
        if !is_ack {
            return false;
        }
        self.acks += 1;
        let is_between = plan.ack_every > 0
            && !self.acks.is_multiple_of(plan.ack_every)
            && now - self.ack_passed < LONGEST_WITHOUT_ACK;
        let is_lost = ack_loss < plan.ack_loss || is_between;
        if !is_lost {
            self.ack_passed = now;
        }
        is_lost
    }

    /// When a bottleneck has sent a packet of `length` octets; `None`: its queue is full.
    fn bottleneck(&mut self, now: Instant, length: usize) -> Option<Instant> {
        if self.plan.rate_kbit == 0 {
            return Some(now);
        }
        let time = |bits: u64| Duration::from_micros(bits * 1000 / self.plan.rate_kbit);
        let start = self.free_at.map_or(now, |at| at.max(now));
        if start - now > time(FRAME_BITS) * self.plan.queue {
            return None;
        }
        let done = start + time(8 * length as u64);
        self.free_at = Some(done);
        Some(done)
    }

    /// The ACKs that go before one, if ACKs are split.
    fn partial_acks(&mut self, frame: &[u8], places: Places) -> Vec<Vec<u8>> {
        let parts = self.plan.ack_split;
        let ack = word(frame, places.tcp + 8);
        let Some(before) = self.last_ack.replace(ack).filter(|_| parts > 1) else {
            return Vec::new();
        };
        let step = ack.wrapping_sub(before);
        if step < parts || step > u32::from(u16::MAX) {
            return Vec::new();
        }
        let part = |number| {
            with_payload(frame, places, &[], |tcp| {
                let ack = before.wrapping_add(step / parts * number);
                tcp[8..12].copy_from_slice(&ack.to_be_bytes());
            })
        };
        (1..parts).map(part).collect()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The frames that leave for one that came at `now`, each with the time when it is due.
    pub fn pass(&mut self, now: Instant, frame: Vec<u8>) -> Vec<(Instant, Vec<u8>)> {
        let Some(places) = Places::of(&frame) else {
            return vec![(now, frame)];
        };
        // Each segment draws the same numbers, whatever happens to it: a change of one share leaves the
        // others' choices as they are.
        let mut draw = || self.random.share();
        let [loss, late, duplicate, corrupt, cut, jitter] = std::array::from_fn(|_| draw());
        let size = places.end - places.payload;
        let place = self.random.below(size);
        let other = (1 + self.random.below(255)) as u8;
        let [damage, swap, ack_loss] = std::array::from_fn(|_| self.random.share());
        self.counts.segments += 1;
        let flags = frame[places.tcp + FLAGS];
        let is_ack = size == 0 && flags & CONTROL == 0;
        let length = places.end - places.ip;
        if self.loses(now, [loss, ack_loss], is_ack, length) {
            self.counts.lost += 1;
            return Vec::new();
        }
        let Some(queued) = self.bottleneck(now, length) else {
            self.counts.lost += 1;
            return Vec::new();
        };
        let mut out = Vec::new();
        if is_ack {
            for partial in self.partial_acks(&frame, places) {
                out.push((queued, partial));
            }
        }
        let payload = frame[places.payload..places.end].to_vec();
        let altered = || {
            let mut altered = payload.clone();
            if let Some(octet) = altered.get_mut(place) {
                *octet ^= other;
            }
            altered
        };
        let clamp = |tcp: &mut [u8]| self.plan.rewrite(tcp);
        let seconds = |ms: f64| Duration::from_secs_f64(ms / 1000.0);
        let mut due = queued + seconds(self.plan.delay_ms + jitter * self.plan.jitter_ms);
        let again = due + seconds(self.plan.late_ms);
        if late < self.plan.late {
            self.counts.late += 1;
            due = again;
        }
        let mut is_corrupt = size > 0 && corrupt < self.plan.corrupt;
        let mut sent = if is_corrupt {
            altered()
        } else {
            payload.clone()
        };
        // Whole 16-bit words of TCP, so that the sum is the same.
        let even = place & !1;
        if swap < self.plan.swap
            && even + 4 <= size
            && sent[even..even + 2] != sent[even + 2..even + 4]
        {
            sent[even..even + 4].rotate_left(2);
            is_corrupt = true;
        }
        if size > 1 && cut < self.plan.cut {
            self.counts.cut += 1;
            let at = 1 + place % (size - 1);
            out.push((
                due,
                with_payload(&frame, places, &sent[..at], |tcp| {
                    clamp(tcp);
                    tcp[13] &= !FIN_AND_PSH;
                }),
            ));
            out.push((
                due,
                with_payload(&frame, places, &sent[at..], |tcp| {
                    clamp(tcp);
                    let seq = word(tcp, 4);
                    tcp[4..8].copy_from_slice(&seq.wrapping_add(at as u32).to_be_bytes());
                }),
            ));
        } else if size > 0 && damage < self.plan.damage {
            self.counts.corrupted += 1;
            let mut damaged = with_payload(&frame, places, &sent, clamp);
            damaged[places.payload + place] ^= other;
            out.push((due, damaged));
        } else if is_corrupt || self.plan.rewrites() {
            out.push((due, with_payload(&frame, places, &sent, clamp)));
        } else {
            out.push((due, frame.clone()));
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

/// One direction of an impaired path: frames go in, and come out at `sender` when they are due.
pub(crate) struct Way {
    impairer: Impairer,
    to: Sender<(Instant, Vec<u8>)>,
}

impl Way {
    pub(crate) fn start(plan: &Direction, seed: u64, mut sender: Box<dyn FrameSender>) -> Way {
        let (to, frames) = channel();
        std::thread::spawn(move || send_when_due(&frames, sender.as_mut()));
        Way {
            impairer: Impairer::new(plan, seed),
            to,
        }
    }

    pub(crate) fn pass(&mut self, frame: Vec<u8>) {
        for due in self.impairer.pass(Instant::now(), frame) {
            // The thread lives as long as this sender.
            let _ = self.to.send(due);
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.impairer.counts()
    }
}

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
                for due in impairer.pass(Instant::now(), frame) {
                    if to.send(due).is_err() {
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
