//! Placement of what arrived beyond a hole in the stream (RFC 5041 section 5.2, RFC 5044 sections
//! 4.3 and 5): payload goes to its memory when it arrives, delivery stays in order.
//!
//! TCP shows the worker a segment that it keeps behind a hole, and the worker shows it to
//! [`QueuePair::receive_out_of_order`]. What is sound and allowed there is placed and remembered by
//! its place in the stream; when [`QueuePair::receive_in_order`] comes to the same FPDU, every check is made
//! again and only the copy is left out. What is not sound or not allowed waits for its turn: an
//! error is found, told and answered in order.

use std::collections::VecDeque;

use crate::ddp::placement::place;
use crate::ddp::{
    ControlOctets, DDP_VERSION, MAX_HDR_LEN, QN_SEND, TAGGED_HDR_LEN, TaggedHeader,
    UNTAGGED_HDR_LEN, UntaggedHeader,
};
use crate::environment::QpEnv;
use crate::mpa::fpdu::{Frame, LEN_FIELD};
use crate::mpa::marker::{FpduSource, INTERVAL, MARKER_LEN, MarkerPosition, Plain, Unmarked};
use crate::queue_pair::{QueuePair, RdmapState};
use crate::rdmap::{RDMAP_VERSION, RdmapOpcode};
use crate::stream::RxStream;
use siw_memory::RegisteredMemory;
use siw_memory::key_table::Stag;
use siw_shm::Access;

/// So many FPDUs are remembered; those beyond are placed in order.
const MAX_PLACED: usize = 4096;

/// Which streams may place payload beyond a hole. All of them need the CRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum OutOfOrderPolicy {
    /// None: everything is placed in order.
    #[default]
    Off,
    /// Those with markers, which prove where an FPDU begins.
    Markers,
    /// Also those in which every FPDU so far lay inside one segment: a sender that aligns.
    Aligned,
}

/// An FPDU that was placed before its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Placed {
    /// Its place in the stream.
    at: u64,
    ulpdu_len: u16,
    hdr: [u8; MAX_HDR_LEN],
}

/// What a queue pair remembers of its stream for it.
#[derive(Debug, Default)]
pub(crate) struct Early {
    pub policy: OutOfOrderPolicy,
    /// An FPDU lay across two pieces of the stream: the sender, or somebody on the way, does not align.
    pub unaligned: bool,
    /// Octets of the stream that are consumed.
    pub position: u64,
    /// By place.
    placed: VecDeque<Placed>,
}

impl Early {
    pub fn new(policy: OutOfOrderPolicy) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.placed.is_empty()
    }

    /// Alignment is being watched.
    #[inline]
    pub fn watches(&self) -> bool {
        self.policy == OutOfOrderPolicy::Aligned && !self.unaligned
    }

    /// The FPDU at `at` has its turn: it was placed before, and is the same.
    #[cold]
    pub fn take(&mut self, at: u64, f: &Frame) -> bool {
        while self.placed.front().is_some_and(|p| p.at < at) {
            self.placed.pop_front();
        }
        match self.placed.front() {
            Some(p) if p.at == at => {
                let same = p.ulpdu_len == f.ulpdu_len && p.hdr == f.hdr;
                self.placed.pop_front();
                same
            }
            _ => false,
        }
    }

    fn index(&self, at: u64) -> Result<usize, usize> {
        self.placed.binary_search_by_key(&at, |p| p.at)
    }
}

/// A stream that begins `at` octets into another.
struct Tail<'a, R> {
    rx: &'a R,
    at: usize,
}

impl<R: RxStream> RxStream for Tail<'_, R> {
    fn available(&self) -> usize {
        self.rx.available().saturating_sub(self.at)
    }
    fn peek(&self, off: usize, out: &mut [u8]) {
        self.rx.peek(self.at + off, out);
    }
    fn for_each_slice(&self, off: usize, len: usize, f: impl FnMut(&[u8])) {
        self.rx.for_each_slice(self.at + off, len, f);
    }
    fn consume(&mut self, n: usize) {
        self.at += n;
    }
}

/// A stream whose payload is in its memory already: headers can be looked at, nothing is copied.
pub(crate) struct Done<'a, R>(pub &'a R);

impl<R: RxStream> RxStream for Done<'_, R> {
    fn available(&self) -> usize {
        self.0.available()
    }
    fn peek(&self, off: usize, out: &mut [u8]) {
        self.0.peek(off, out);
    }
    fn for_each_slice(&self, _off: usize, _len: usize, _f: impl FnMut(&[u8])) {}
    fn copy_to_memory(
        &self,
        _off: usize,
        _len: usize,
        _mr: &RegisteredMemory,
        _region_off: u64,
    ) -> bool {
        true
    }
    fn consume(&mut self, _n: usize) {}
}

/// Where in `rx`, which begins at `marker_position`, the first FPDU begins that its markers know of.
fn first_start(rx: &impl RxStream, marker_position: MarkerPosition) -> Option<usize> {
    let mut at = marker_position.until_marker();
    while at + MARKER_LEN <= rx.available() {
        let mut m = [0; MARKER_LEN];
        rx.peek(at, &mut m);
        let back = usize::from(u16::from_be_bytes([m[2], m[3]]) & !3);
        // One that stands before its FPDU begins it.
        if let Some(start) = at.checked_sub(back) {
            return Some(start);
        }
        at += INTERVAL;
    }
    None
}

impl QueuePair {
    /// Which streams of this queue pair may place payload beyond a hole; before
    /// [`set_rts`](Self::set_rts).
    pub fn set_out_of_order(&mut self, policy: OutOfOrderPolicy) {
        self.early.policy = policy;
    }

    /// `held` is a segment that TCP keeps behind a hole, `offset` octets after the first octet that
    /// [`receive_in_order`](Self::receive_in_order) has not consumed. Places what may be placed of it and returns how
    /// many FPDUs that were. Completes nothing, reports nothing.
    #[cold]
    pub fn receive_out_of_order<E: QpEnv>(
        &mut self,
        env: &mut E,
        offset: usize,
        held: &impl RxStream,
    ) -> u32 {
        if self.state != RdmapState::Rts || !self.crc || !self.first_seen {
            return 0;
        }
        let marker_position = self.rx_marker_position.advanced_by(offset);
        let start = match self.early.policy {
            OutOfOrderPolicy::Off => None,
            _ if marker_position.has_markers() => first_start(held, marker_position),
            OutOfOrderPolicy::Aligned if !self.early.unaligned => Some(0),
            _ => None,
        };
        let Some(mut at) = start else { return 0 };
        let mut placed = 0;
        loop {
            let mut tail = Tail { rx: held, at };
            let p = self.early.position + (offset + at) as u64;
            let taken = if marker_position.has_markers() {
                let mut u = Unmarked::new(&mut tail, marker_position.advanced_by(at));
                self.place_early(env, &mut u, p)
            } else {
                self.place_early(env, &mut Plain(&mut tail), p)
            };
            let Some((n, done)) = taken else {
                return placed;
            };
            placed += u32::from(done);
            at += n;
        }
    }

    /// The FPDU at the start of `rx`, which lies at `at` in the stream: its length in the stream and
    /// whether it was placed; `None` when there is no whole and sound one.
    fn place_early<E: QpEnv>(
        &mut self,
        env: &mut E,
        rx: &mut impl FpduSource,
        at: u64,
    ) -> Option<(usize, bool)> {
        let f = rx.next_fpdu()?;
        rx.verify(&f, true).ok()?;
        let done = match self.early.index(at) {
            // A duplicate: what was placed may be in use already.
            Ok(_) => false,
            Err(_) if self.early.placed.len() >= MAX_PLACED => false,
            Err(i) => {
                let done = self.place_payload(env, rx, &f);
                if done {
                    let p = Placed {
                        at,
                        ulpdu_len: f.ulpdu_len,
                        hdr: f.hdr,
                    };
                    self.early.placed.insert(i, p);
                }
                done
            }
        };
        rx.take(&f);
        Some((f.stream_len, done))
    }

    /// Payload whose memory is known already: of Writes, of responses to outstanding Read Requests,
    /// of the Send that is being received.
    fn place_payload<E: QpEnv>(&mut self, env: &mut E, rx: &impl RxStream, f: &Frame) -> bool {
        let c = ControlOctets {
            ddp: f.hdr[0],
            rdmap: f.hdr[1],
        };
        let len = usize::from(f.ulpdu_len);
        if len <= c.header_len()
            || c.ddp_version() != DDP_VERSION
            || c.rdmap_version() != RDMAP_VERSION
        {
            return false;
        }
        let n = (len - c.header_len()) as u32;
        let op = RdmapOpcode::from_wire(c.opcode());
        if !c.is_tagged() {
            let h = UntaggedHeader::parse(&f.hdr);
            let sends = op.is_some_and(|o| o.is_send() && o as u8 == self.recv.rdmap);
            return sends
                && h.qn == QN_SEND
                && self.recv.active
                && h.msn == self.rx_send_msn
                && h.mo >= self.recv.received
                && h.mo <= self.recv.capacity
                && n <= self.recv.capacity - h.mo
                && self.scatter(env, rx, h.mo, n).is_ok();
        }
        let h = TaggedHeader::parse(&f.hdr);
        let access = match op {
            Some(RdmapOpcode::Write) => Access::REMOTE_WRITE,
            Some(RdmapOpcode::ReadResponse) => {
                let asked = self.outbound.iter().any(|r| {
                    let off = h.to.wrapping_sub(r.sink_to);
                    r.atomic.is_none()
                        && r.sink_stag == h.stag
                        && off >= u64::from(r.placed)
                        && off <= u64::from(r.len)
                        && u64::from(n) <= u64::from(r.len) - off
                });
                if !asked {
                    return false;
                }
                Access::LOCAL_WRITE
            }
            _ => return false,
        };
        debug_assert_eq!(c.header_len(), TAGGED_HDR_LEN);
        env.keys()
            .check_access(Stag(h.stag), h.to, n, access, self.attr.pd, self.attr.qpn)
            .is_ok_and(|(mr, off)| {
                place(rx, LEN_FIELD + TAGGED_HDR_LEN, n as usize, mr, off).is_ok()
            })
    }
}

const _: () = assert!(UNTAGGED_HDR_LEN == MAX_HDR_LEN);
