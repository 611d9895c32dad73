//! Faults of the wire at one port of a worker: those of fault plans (`siwctl fault load`), and the loss that the
//! configuration sets for the embedded pair.
//!
//! A port has this object only while there is such a fault, so that a port without one tests one pointer for each
//! frame that it sends and each poll. With a plan, frames are copied and kept on the heap's lists without regard
//! to their cost.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use dpdk::{Mbuf, MbufCache};
use siw_faults::{Direction, Draws, Fault, FrameDecider, Kind, Plan};

use super::loss::FrameLoss;
use crate::capture::{CaptureFilter, Endpoints, TCP};

/// Reason of frames that plans lose, in status output and traces.
pub const INJECTED_LOSS: &str = "INJECTED_LOSS";
/// The meaning of [`INJECTED_LOSS`].
pub const MEANING_OF_INJECTED_LOSS: &str = "frames that a fault plan loses (siwctl fault show)";

/// Frames that wait at one port in one direction; further ones are lost, as at a full queue of a network.
const MOST_HELD: usize = 4096;
/// Share of the packet buffers, as a divisor, that has to be free for another frame to wait.
const FREE_SHARE: u32 = 4;
/// Frames of different connections or faults that one report names.
const MOST_MARKS: usize = 64;
/// Time between two reports of injected faults.
const REPORT_INTERVAL: Duration = Duration::from_millis(20);
/// Octets of the longest frame at a bottleneck, whose queue is counted in such frames.
const FULL_FRAME: u64 = 1500;

/// A fault of a loaded plan, which the control thread shares with the workers.
#[derive(Debug)]
pub struct LoadedFault {
    /// Number of the plan.
    pub number: u32,
    /// The plan.
    pub plan: Arc<Plan>,
    /// Place of the fault in the plan.
    pub index: usize,
    /// Time at which the plan was loaded.
    pub loaded: Instant,
    /// The fault in words, for captures, logs and recordings: `injected fault 1 (loss) of plan flaky-link: wire_drop`.
    pub text: Arc<str>,
    /// Number of times that it happened.
    pub injected: AtomicU64,
}

impl LoadedFault {
    /// The fault itself.
    pub fn fault(&self) -> &Fault {
        &self.plan.faults[self.index]
    }
}

/// A fault as a worker gets it.
#[derive(Debug, Clone)]
pub struct ActiveFault {
    /// The fault.
    pub loaded: Arc<LoadedFault>,
    /// Frames that it is aimed at.
    pub filter: Arc<CaptureFilter>,
}

/// Number of faults by kind, in the order of [`Kind::DAEMON_NAMES`], and of frames that had no room to wait.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct WireFaultCounts {
    /// Faults by kind.
    pub kinds: [u64; Kind::WIRE],
    /// Frames that faults lost.
    pub lost: u64,
    /// Frames among them that were to wait, and for which there was no room.
    pub overflows: u64,
}

impl WireFaultCounts {
    /// Adds the counts of another worker.
    pub fn merge(&mut self, other: &WireFaultCounts) {
        let WireFaultCounts {
            kinds,
            lost,
            overflows,
        } = other;
        for (sum, count) in self.kinds.iter_mut().zip(kinds) {
            *sum += count;
        }
        self.lost += lost;
        self.overflows += overflows;
    }

    /// All counters, with their names in status output.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let kinds = Kind::DAEMON_NAMES.into_iter().zip(self.kinds);
        kinds.chain([("wire_overflow", self.overflows)])
    }
}

/// Faults of one kind at one connection since the last report.
#[derive(Debug)]
pub struct FaultMark {
    /// The fault.
    pub loaded: Arc<LoadedFault>,
    /// The end of this device and the other one; `None` for frames without TCP or UDP.
    pub ends: Option<(SocketAddr, SocketAddr)>,
    /// Number of frames.
    pub count: u64,
}

/// Progress of a fault in one direction.
struct PortFault {
    active: ActiveFault,
    decider: FrameDecider,
    /// Frames that a loss still takes.
    burst: u32,
    /// Time at which a bottleneck has sent all that waits.
    free_at: Option<Instant>,
}

/// A frame that waits.
struct HeldFrame {
    due: Instant,
    number: u64,
    mbuf: Mbuf,
}

impl HeldFrame {
    fn place(&self) -> (Instant, u64) {
        (self.due, self.number)
    }
}

impl PartialEq for HeldFrame {
    fn eq(&self, other: &HeldFrame) -> bool {
        self.place() == other.place()
    }
}

impl Eq for HeldFrame {}

impl PartialOrd for HeldFrame {
    fn partial_cmp(&self, other: &HeldFrame) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for HeldFrame {
    fn cmp(&self, other: &HeldFrame) -> Ordering {
        self.place().cmp(&other.place())
    }
}

/// Frames that wait, the one that is due first at the top.
#[derive(Default)]
pub struct HeldFrames {
    frames: BinaryHeap<Reverse<HeldFrame>>,
    held: u64,
    /// The faults are over: all frames are due.
    is_released: bool,
}

impl HeldFrames {
    /// Keeps a frame until it is due. Returns it if there is no room.
    pub fn hold(&mut self, due: Instant, mbuf: Mbuf, cache: &MbufCache) -> Result<(), Mbuf> {
        let pool = cache.pool();
        let has_room = self.frames.len() < MOST_HELD
            && pool.available_buffers() > pool.capacity() / FREE_SHARE;
        if !has_room {
            return Err(mbuf);
        }
        self.held += 1;
        self.frames.push(Reverse(HeldFrame {
            due,
            number: self.held,
            mbuf,
        }));
        Ok(())
    }

    /// Takes the first frame that is due.
    pub fn take_due(&mut self, now: Instant) -> Option<Mbuf> {
        let Reverse(first) = self.frames.peek()?;
        if first.due > now && !self.is_released {
            return None;
        }
        self.frames.pop().map(|Reverse(held)| held.mbuf)
    }

    /// Returns true if no frame waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

/// A change of a frame's content.
#[derive(Debug, Clone, Copy)]
pub struct Alteration {
    /// Number that the changed octet follows from.
    drawn: u64,
}

/// The second copy of a frame.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    /// Time after the first one.
    pub late: Duration,
    /// Change of its content.
    pub altered: Option<Alteration>,
}

/// Outcome of the faults of one frame.
#[derive(Debug, Default)]
pub struct Verdict {
    /// The frame is lost by a plan.
    pub is_lost: bool,
    /// The frame waits for this time.
    pub hold: Duration,
    /// Its content changes.
    pub altered: Option<Alteration>,
    /// Its second copy.
    pub copy: Option<Copy>,
    /// Place of its payload.
    pub payload: Option<TcpPayload>,
    /// The first fault, in words; `None`: no fault of a plan happens.
    pub text: Option<Arc<str>>,
}

/// Place of a TCP segment's payload in its frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpPayload {
    /// Start of the TCP header.
    header: usize,
    /// The payload; it is not empty.
    range: Range<usize>,
}

impl TcpPayload {
    /// `None`: no TCP, a fragment, malformed, or no payload.
    fn find(headers: &[u8], ends: &Endpoints) -> Option<TcpPayload> {
        const ETHERNET: usize = 14;
        const TAGGED: usize = 18;
        if ends.protocol != Some(TCP) {
            return None;
        }
        let header = ends.transport;
        let half = |at: usize| {
            Some(u16::from_be_bytes([
                *headers.get(at)?,
                *headers.get(at + 1)?,
            ]))
        };
        let ip = match half(12)? {
            0x8100 => TAGGED,
            _ => ETHERNET,
        };
        let end = if headers.get(ip)? >> 4 == 4 {
            // More fragments follow, or the payload's end is not this packet's.
            if half(ip + 6)? & 0x2000 != 0 {
                return None;
            }
            ip + usize::from(half(ip + 2)?)
        } else {
            ip + 40 + usize::from(half(ip + 4)?)
        };
        let start = header + usize::from(headers.get(header + 12)? >> 4) * 4;
        (start >= header + 20 && start < end).then_some(TcpPayload {
            header,
            range: start..end,
        })
    }

    /// Changes one octet of a frame's payload. `mends_checksum`: the TCP checksum is complete, and is changed with
    /// it (RFC 1624 section 3); else the port computes it later. Returns false if the frame is too short.
    fn alter(&self, frame: &mut [u8], change: Alteration, mends_checksum: bool) -> bool {
        let TcpPayload { header, range } = self;
        let mut draws = Draws::new(change.drawn);
        let place = range.start + draws.below(range.len() as u64) as usize;
        let flip = 1 + draws.below(255) as u8;
        if range.end > frame.len() {
            return false;
        }
        let before = frame[place];
        frame[place] ^= flip;
        if mends_checksum {
            let shift = match (place - header) % 2 {
                0 => 8,
                _ => 0,
            };
            let word = |octet: u8| u32::from(octet) << shift;
            let field = header + 16;
            let old = u16::from_be_bytes([frame[field], frame[field + 1]]);
            let mut sum = u32::from(!old) + (0xFFFF - word(before)) + word(before ^ flip);
            while sum >> 16 != 0 {
                sum = (sum & 0xFFFF) + (sum >> 16);
            }
            frame[field..field + 2].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        }
        true
    }
}

/// A copy of a frame in one buffer, with this change; `None` if there is no buffer, or the frame is longer.
pub fn copy_frame(
    mbuf: &Mbuf,
    change: Option<(Alteration, &TcpPayload)>,
    mends_checksum: bool,
    cache: &mut MbufCache,
) -> Option<Mbuf> {
    let mut copy = mbuf.linearize(cache)?;
    if let Some((alteration, payload)) = change
        && !payload.alter(copy.data_mut(), alteration, mends_checksum)
    {
        cache.free(copy);
        return None;
    }
    Some(copy)
}

/// Faults of the frames of a port in one direction.
#[derive(Default)]
struct OneWay {
    faults: Vec<PortFault>,
}

impl OneWay {
    /// Takes over the faults that are meant for the direction, with the progress that those of before have made.
    fn set(&mut self, active: &[ActiveFault], ordinal: u64, is_meant: impl Fn(&Fault) -> bool) {
        let mut before = std::mem::take(&mut self.faults);
        let is_same = |fault: &PortFault, active: &ActiveFault| {
            Arc::ptr_eq(&fault.active.loaded, &active.loaded)
        };
        for active in active {
            let LoadedFault { plan, index, .. } = &*active.loaded;
            if !is_meant(active.loaded.fault()) {
                continue;
            }
            let known = before.iter().position(|fault| is_same(fault, active));
            let fault = match known.map(|place| before.swap_remove(place)) {
                Some(known) => PortFault {
                    active: active.clone(),
                    ..known
                },
                None => PortFault {
                    active: active.clone(),
                    decider: FrameDecider::new(plan, *index, ordinal),
                    burst: 0,
                    free_at: None,
                },
            };
            self.faults.push(fault);
        }
    }
}

/// Outcome of one fault at one frame.
enum Effect {
    Nothing,
    Lost,
    Hold(Duration),
    Alter(Alteration),
    Copy(Copy),
}

impl PortFault {
    /// Counts a frame that the fault is aimed at, and decides.
    fn decide(&mut self, now: Instant, len: u32) -> Effect {
        let loaded = &self.active.loaded;
        let fault = loaded.fault();
        let elapsed = now.saturating_duration_since(loaded.loaded);
        if self.burst > 0 && fault.trigger.has_time(elapsed) {
            self.burst -= 1;
            return Effect::Lost;
        }
        let Some(drawn) = self.decider.decide(fault, elapsed) else {
            return Effect::Nothing;
        };
        match &fault.kind {
            Kind::WireDrop { burst } => {
                self.burst = burst - 1;
                Effect::Lost
            }
            Kind::WireBlackHole | Kind::WirePartition { .. } => Effect::Lost,
            Kind::WireDelay { delay, jitter } => {
                Effect::Hold(*delay + jitter.mul_f64(Draws::new(drawn).share()))
            }
            Kind::WireReorder { late } => Effect::Hold(*late),
            Kind::WireCorrupt => Effect::Alter(Alteration { drawn }),
            Kind::WireDuplicate { late, altered } => Effect::Copy(Copy {
                late: *late,
                altered: altered.then_some(Alteration { drawn }),
            }),
            Kind::WireRate { rate_kbit, queue } => {
                let time_of = |octets: u64| {
                    Duration::from_nanos(octets.saturating_mul(8_000_000) / (*rate_kbit).max(1))
                };
                let start = self.free_at.map_or(now, |free_at| free_at.max(now));
                if start - now > time_of(FULL_FRAME) * *queue {
                    return Effect::Lost;
                }
                let end = start + time_of(len.into());
                self.free_at = Some(end);
                Effect::Hold(end - now)
            }
            _ => Effect::Nothing,
        }
    }
}

/// Returns true if a fault changes the content of frames, which only TCP segments with payload have.
fn needs_payload(kind: &Kind) -> bool {
    matches!(
        kind,
        Kind::WireCorrupt | Kind::WireDuplicate { altered: true, .. }
    )
}

/// Returns true if a fault of frames is meant for those between these addresses.
fn is_between(kind: &Kind, ends: Option<&Endpoints>) -> bool {
    let Kind::WirePartition { between: (a, b) } = kind else {
        return true;
    };
    let is =
        |from: &IpAddr, to: &IpAddr| ends.is_some_and(|ends| (&ends.from, &ends.to) == (from, to));
    is(a, b) || is(b, a)
}

/// The faults of a port.
#[derive(Default)]
pub struct WireFaults {
    /// The loss that the configuration sets.
    configured: Option<FrameLoss>,
    out: OneWay,
    received: OneWay,
    /// Sent frames that wait; they are ready for the port.
    pub held_out: HeldFrames,
    /// Received frames that wait.
    pub held_in: HeldFrames,
    marks: Vec<FaultMark>,
    reported: Option<Instant>,
    /// Numbers of faults.
    pub counts: WireFaultCounts,
}

/// Properties of a port that decide which faults it has.
#[derive(Debug, Clone, Copy)]
pub struct FaultyPort {
    /// Its device, and the worker's index.
    pub device: usize,
    /// Index of the worker.
    pub worker: usize,
    /// Its peer is a port of this daemon.
    pub in_process: bool,
}

impl WireFaults {
    /// The faults of a port whose configuration has this loss; `None` for 0.
    pub fn of_loss(loss: f64) -> Option<Box<WireFaults>> {
        let configured = FrameLoss::new(loss)?;
        Some(Box::new(WireFaults {
            configured: Some(configured),
            ..WireFaults::default()
        }))
    }

    /// Replaces the faults of plans; those that go on keep their progress.
    pub fn set(&mut self, active: &[ActiveFault], port: FaultyPort) {
        let here: Vec<_> = active
            .iter()
            .filter(|active| active.filter.selects_interface(port.device as u32))
            .cloned()
            .collect();
        self.set_here(&here, port);
        let is_over = !self.has_faults();
        self.held_out.is_released = is_over;
        self.held_in.is_released = is_over;
    }

    /// Replaces the faults of plans by those of this device.
    fn set_here(&mut self, here: &[ActiveFault], port: FaultyPort) {
        // The queues of a port: two for each worker of a device.
        let ordinal = ((port.device as u64) << 32) | ((port.worker as u64) << 1);
        self.out
            .set(here, ordinal, |fault| fault.aim.direction != Direction::In);
        self.received.set(here, ordinal | 1, |fault| {
            // A frame meets a fault once: between two devices of this daemon where it is sent.
            let is_met_before = port.in_process && fault.aim.device.is_none();
            match fault.aim.direction {
                Direction::Out => false,
                Direction::In => true,
                Direction::Both => !is_met_before,
            }
        });
    }

    /// Returns true if there is a fault of a plan.
    pub fn has_faults(&self) -> bool {
        !self.out.faults.is_empty() || !self.received.faults.is_empty()
    }

    /// Returns true if neither a fault nor anything of one is left.
    pub fn is_over(&self) -> bool {
        let has_more = self.configured.is_some()
            || self.has_faults()
            || !self.held_out.is_empty()
            || !self.held_in.is_empty()
            || !self.marks.is_empty();
        !has_more
    }

    /// Returns true if a frame waits, or a report does.
    pub fn has_work(&self) -> bool {
        !self.held_out.is_empty() || !self.held_in.is_empty() || !self.marks.is_empty()
    }

    /// Decides about the next frame by the loss of the configuration.
    pub fn loses_by_configuration(&mut self) -> bool {
        self.configured.as_mut().is_some_and(FrameLoss::loses_next)
    }

    /// Decides about a frame that is sent.
    pub fn judge_sent(&mut self, now: Instant, mbuf: &Mbuf) -> Verdict {
        let mut faults = std::mem::take(&mut self.out.faults);
        let verdict = self.judge(&mut faults, now, mbuf, false);
        self.out.faults = faults;
        verdict
    }

    /// Decides about a frame that is received.
    pub fn judge_received(&mut self, now: Instant, mbuf: &Mbuf) -> Verdict {
        let mut faults = std::mem::take(&mut self.received.faults);
        let verdict = self.judge(&mut faults, now, mbuf, true);
        self.received.faults = faults;
        verdict
    }

    fn judge(
        &mut self,
        faults: &mut [PortFault],
        now: Instant,
        mbuf: &Mbuf,
        is_received: bool,
    ) -> Verdict {
        let mut verdict = Verdict::default();
        if faults.is_empty() {
            return verdict;
        }
        let headers = mbuf.data();
        let ends = Endpoints::parse(headers);
        verdict.payload = ends
            .as_ref()
            .and_then(|ends| TcpPayload::find(headers, ends));
        for fault in faults {
            let filter = &fault.active.filter;
            let is_aimed = !filter.is_of_addresses()
                || ends.as_ref().is_some_and(|ends| filter.selects_ends(ends));
            let loaded = fault.active.loaded.clone();
            let kind = &loaded.fault().kind;
            if !is_aimed
                || !is_between(kind, ends.as_ref())
                || (needs_payload(kind) && verdict.payload.is_none())
            {
                continue;
            }
            match fault.decide(now, mbuf.pkt_len()) {
                Effect::Nothing => continue,
                Effect::Lost => verdict.is_lost = true,
                Effect::Hold(time) => verdict.hold += time,
                Effect::Alter(change) => verdict.altered = Some(change),
                Effect::Copy(copy) => verdict.copy = Some(copy),
            }
            if let Some(count) = kind
                .wire_index()
                .and_then(|kind| self.counts.kinds.get_mut(kind))
            {
                *count += 1;
            }
            loaded.injected.fetch_add(1, Relaxed);
            verdict.text.get_or_insert_with(|| loaded.text.clone());
            let local = ends.as_ref().and_then(|ends| {
                let (from_port, to_port) = ends.ports?;
                let from = SocketAddr::new(ends.from, from_port);
                let to = SocketAddr::new(ends.to, to_port);
                Some(if is_received { (to, from) } else { (from, to) })
            });
            self.mark(loaded, local);
            if verdict.is_lost {
                self.counts.lost += 1;
                break;
            }
        }
        verdict
    }

    /// Notes a fault for the next report.
    fn mark(&mut self, loaded: Arc<LoadedFault>, ends: Option<(SocketAddr, SocketAddr)>) {
        let is_same =
            |mark: &&mut FaultMark| Arc::ptr_eq(&mark.loaded, &loaded) && mark.ends == ends;
        if let Some(mark) = self.marks.iter_mut().find(is_same) {
            mark.count += 1;
        } else if self.marks.len() < MOST_MARKS {
            self.marks.push(FaultMark {
                loaded,
                ends,
                count: 1,
            });
        }
    }

    /// Notes that a frame that was to wait is lost.
    pub fn note_overflow(&mut self) {
        self.counts.lost += 1;
        self.counts.overflows += 1;
    }

    /// Takes the faults since the last report, if it is time for one.
    pub fn take_marks(&mut self, now: Instant) -> Option<Vec<FaultMark>> {
        let is_due = self
            .reported
            .is_none_or(|reported| now.saturating_duration_since(reported) >= REPORT_INTERVAL);
        if !is_due {
            return None;
        }
        let marks = self.take_all_marks()?;
        self.reported = Some(now);
        Some(marks)
    }

    /// Takes the faults since the last report; `None` if there were none.
    pub fn take_all_marks(&mut self) -> Option<Vec<FaultMark>> {
        let marks = std::mem::take(&mut self.marks);
        (!marks.is_empty()).then_some(marks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::test_environment;
    use siw_faults::Place;
    use std::path::Path;

    fn active(text: &str, filter: CaptureFilter) -> ActiveFault {
        let text = format!("[[fault]]\n{text}\n");
        let plan = Plan::parse(Path::new("plan.toml"), &text, Place::Daemon).unwrap();
        ActiveFault {
            loaded: Arc::new(LoadedFault {
                number: 1,
                plan: Arc::new(plan),
                index: 0,
                loaded: Instant::now(),
                text: "injected".into(),
                injected: AtomicU64::new(0),
            }),
            filter: Arc::new(filter),
        }
    }

    const PORT: FaultyPort = FaultyPort {
        device: 0,
        worker: 0,
        in_process: false,
    };

    /// An IPv4 frame with TCP ports 1 and 2, and this payload, and its checksum.
    fn segment(payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 54];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&(40 + payload.len() as u16).to_be_bytes());
        frame[23] = 6;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[34..38].copy_from_slice(&[0, 1, 0, 2]);
        frame[46] = 5 << 4;
        frame.extend_from_slice(payload);
        let sum = !sum_of(&frame);
        frame[50..52].copy_from_slice(&sum.to_be_bytes());
        frame
    }

    /// Sum of the segment with its pseudo-header; all ones if the checksum is right.
    fn sum_of(frame: &[u8]) -> u16 {
        let mut sum = 6 + (frame.len() as u32 - 34);
        for pair in frame[26..].chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
        }
        while sum >> 16 != 0 {
            sum = (sum & 0xFFFF) + (sum >> 16);
        }
        sum as u16
    }

    #[test]
    fn an_altered_segment_has_another_octet_and_a_right_checksum() {
        for len in [1, 2, 3, 64, 1001] {
            let frame = segment(&vec![0xA5; len]);
            let payload = TcpPayload::find(&frame, &Endpoints::parse(&frame).unwrap()).unwrap();
            assert_eq!(payload.range, 54..54 + len);
            for drawn in 0..200 {
                let mut altered = frame.clone();
                assert!(payload.alter(&mut altered, Alteration { drawn }, true));
                assert_eq!(sum_of(&altered), 0xFFFF, "{len} {drawn}");
                let changed = frame[54..].iter().zip(&altered[54..]);
                assert_eq!(changed.filter(|(a, b)| a != b).count(), 1);
                assert_eq!(frame[..50], altered[..50]);
            }
            assert!(!payload.alter(&mut frame[..53].to_vec(), Alteration { drawn: 1 }, true));
        }
        let empty = segment(&[]);
        assert_eq!(
            TcpPayload::find(&empty, &Endpoints::parse(&empty).unwrap()),
            None
        );
        for len in 0..54 {
            let cut = &segment(&[1; 9])[..len];
            if let Some(ends) = Endpoints::parse(cut) {
                TcpPayload::find(cut, &ends);
            }
        }
    }

    #[test]
    fn a_frame_between_two_devices_of_this_daemon_meets_a_fault_once() {
        let faults = |text: &str, in_process| {
            let mut faults = WireFaults::default();
            let port = FaultyPort { in_process, ..PORT };
            faults.set(&[active(text, CaptureFilter::default())], port);
            (faults.out.faults.len(), faults.received.faults.len())
        };
        let drop = "kind = \"wire_drop\"";
        assert_eq!(faults(drop, false), (1, 1));
        assert_eq!(faults(drop, true), (1, 0));
        let aimed = format!("{drop}\ndevice = \"siw0\"");
        assert_eq!(faults(&aimed, true), (1, 1));
        for in_process in [false, true] {
            assert_eq!(
                faults(&format!("{drop}\ndirection = \"in\""), in_process),
                (0, 1)
            );
            assert_eq!(
                faults(&format!("{drop}\ndirection = \"out\""), in_process),
                (1, 0)
            );
        }
    }

    #[test]
    fn faults_that_go_on_keep_their_progress() {
        let first = active("kind = \"wire_drop\"\ncount = 1", CaptureFilter::default());
        let second = active("kind = \"wire_drop\"\ncount = 1", CaptureFilter::default());
        let mut faults = WireFaults::default();
        faults.set(std::slice::from_ref(&first), PORT);
        let now = Instant::now();
        let lost = |faults: &mut WireFaults| {
            let all = faults.out.faults.iter_mut();
            all.map(|fault| matches!(fault.decide(now, 60), Effect::Lost))
                .filter(|is_lost| *is_lost)
                .count()
        };
        assert_eq!(lost(&mut faults), 1);
        faults.set(&[first.clone(), second], PORT);
        assert_eq!(lost(&mut faults), 1, "the second one only");
        assert_eq!(lost(&mut faults), 0);
        faults.set(&[], PORT);
        assert!(faults.is_over());
        // Another device.
        let filter = CaptureFilter {
            interfaces: Some(vec![7]),
            ..CaptureFilter::default()
        };
        faults.set(
            &[ActiveFault {
                filter: Arc::new(filter),
                ..first
            }],
            PORT,
        );
        assert!(!faults.has_faults());
    }

    #[test]
    fn frames_that_wait_come_in_order_and_at_once_when_the_faults_are_over() {
        let pool = dpdk::Mempool::new(test_environment(), "held", 1023, 0, 2048, None).unwrap();
        let mut cache = MbufCache::new(&pool);
        let mut faults = WireFaults::default();
        let delay = active(
            "kind = \"wire_delay\"\ndelay_ms = 50",
            CaptureFilter::default(),
        );
        faults.set(&[delay], PORT);
        let now = Instant::now();
        let after = |ms| now + Duration::from_millis(ms);
        for (ms, len) in [(70, 3), (50, 1), (50, 2), (60_000, 4)] {
            let mut mbuf = cache.alloc().unwrap();
            assert!(mbuf.append_slice(&vec![0; len]));
            assert!(faults.held_out.hold(after(ms), mbuf, &cache).is_ok());
        }
        let lens = |faults: &mut WireFaults, now| {
            let due = std::iter::from_fn(|| faults.held_out.take_due(now));
            due.map(|mbuf| mbuf.pkt_len()).collect::<Vec<_>>()
        };
        assert_eq!(lens(&mut faults, after(49)), [0; 0]);
        assert_eq!(lens(&mut faults, after(50)), [1, 2]);
        assert!(faults.has_work());
        faults.set(&[], PORT);
        assert!(!faults.is_over());
        assert_eq!(lens(&mut faults, after(51)), [3, 4]);
        assert!(faults.is_over());
        // The pool keeps buffers for other frames.
        let mut held = 0;
        while let Some(mbuf) = cache.alloc()
            && faults.held_out.hold(after(1), mbuf, &cache).is_ok()
        {
            held += 1;
        }
        assert!((512..800).contains(&held), "{held}");
    }

    #[test]
    fn losses_come_in_bursts_and_bottlenecks_have_a_queue() {
        let now = Instant::now();
        let mut faults = WireFaults::default();
        let burst = active(
            "kind = \"wire_drop\"\nafter_calls = 2\ncount = 1\nburst = 3",
            CaptureFilter::default(),
        );
        faults.set(&[burst], PORT);
        let fault = &mut faults.out.faults[0];
        let lost: Vec<_> = (0..8)
            .map(|_| matches!(fault.decide(now, 60), Effect::Lost))
            .collect();
        assert_eq!(lost, [false, false, true, true, true, false, false, false]);
        // 12 Mbit/s: a frame of 1500 octets in a millisecond.
        let rate = active(
            "kind = \"wire_rate\"\nrate_kbit = 12000\nqueue = 2",
            CaptureFilter::default(),
        );
        faults.set(&[rate], PORT);
        let fault = &mut faults.out.faults[0];
        let holds: Vec<_> = (0..4)
            .map(|_| match fault.decide(now, 1500) {
                Effect::Hold(time) => Some(time.as_millis()),
                _ => None,
            })
            .collect();
        assert_eq!(holds, [Some(1), Some(2), Some(3), None]);
    }
}
