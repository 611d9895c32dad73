//! The path MTU: reported by ICMP (RFC 1191, 8201), or inferred from the repeated loss of full
//! segments (RFC 8899 section 4.3), and shared by all connections to a destination. A path is
//! assumed to carry the MSS agreed by both ends until it proves narrower. Ten minutes later its
//! connections send segments of the agreed size again (RFC 1191 section 6.3); there is no search
//! for sizes in between. Times are ticks of 2^20 ns that do not wrap, because a path may be unused
//! for months.

use core::net::IpAddr;
use std::collections::HashMap;

use siw_net::{Instant, MIN_PATH_MTU_V6};

use crate::base::events::Events;
use crate::base::time::to_long_ticks;
use crate::congestion::RecoveryPhase;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::connection::path::PathState;
use crate::queues::send_buffer::{InFlightSegment, SACKED};
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendFlags;
use crate::tcb::timer::Timer;

/// BASE_PLPMTU (RFC 8899 section 5.1.2), and the size that every IPv4 host accepts (RFC 791).
const BASE: u16 = 1200;
const BASE_V4: u16 = 576;
/// Consecutive timeouts that make a black hole likely.
const SUSPICIOUS: u8 = 2;
/// Lifetime of the MTU of a narrow path: ten minutes (RFC 1191 section 6.3; PMTU_RAISE_TIMER of RFC
/// 8899 section 5.1.1).
pub(crate) const RAISE_TICKS: u64 = 600 * 954;
/// Delay after which a connection that is recovering from a loss tries the agreed size again.
const RETRY_TICKS: u64 = 954;
/// Maximum number of narrow paths.
const PATHS_MAX: usize = 4096;

/// The MTU of a narrow path.
struct NarrowPath {
    mtu: u16,
    /// The tick at which the MTU expires.
    until: u64,
}

/// The paths that are narrower than agreed, by destination (RFC 8899 section 3 item 9).
#[derive(Default)]
pub(crate) struct Paths(HashMap<IpAddr, NarrowPath>);

impl Paths {
    /// Records that the path to `to` carries packets of at most `mtu` bytes. A full table keeps its
    /// valid entries.
    pub(crate) fn learn(&mut self, to: IpAddr, mtu: u16, now: Instant) {
        let now = to_long_ticks(now.0);
        if self.0.len() >= PATHS_MAX && !self.0.contains_key(&to) {
            self.0.retain(|_, path| now < path.until);
            if self.0.len() >= PATHS_MAX {
                return;
            }
        }
        let until = now + RAISE_TICKS;
        self.0.insert(to, NarrowPath { mtu, until });
    }

    /// Returns the MTU of the path to `to` and the tick at which it expires, if the path is narrow.
    fn lookup(&mut self, to: IpAddr, now: Instant) -> Option<(u16, u64)> {
        let path = self.0.get(&to)?;
        if to_long_ticks(now.0) < path.until {
            return Some((path.mtu, path.until));
        }
        self.0.remove(&to);
        None
    }
}

impl PathState {
    fn headers(&self, tcb: &Tcb) -> u16 {
        let ip = if self.template.is_v6() { 60 } else { 40 };
        let ts = if tcb.has(ConnectionFlags::TIMESTAMPS) {
            12
        } else {
            0
        };
        ip + ts
    }

    /// Returns the payload of a segment in an IP packet of `mtu` bytes.
    pub(crate) fn emss_for(&self, tcb: &Tcb, mtu: u16) -> u16 {
        mtu.saturating_sub(self.headers(tcb)).max(1)
    }
}

impl<B, R> Connection<B, R> {
    /// Applies the known MTU of its path to a new connection.
    pub(crate) fn apply_path_mtu(&mut self, cx: &mut TcpContext<'_>) {
        if let Some((mtu, until)) = cx.shared.paths.lookup(self.path.remote(), cx.now) {
            let emss = self.path.emss_for(&self.tcb, mtu);
            if emss < self.tcb.emss {
                self.set_narrow(cx, emss, until);
            }
        }
    }

    /// Limits segments to `emss` bytes until the tick `until`.
    fn set_narrow(&mut self, cx: &mut TcpContext<'_>, emss: u16, until: u64) {
        self.tcb.emss = emss;
        self.tcb.flags |= ConnectionFlags::NARROW_PATH;
        self.path.widen_at = until as u32;
        cx.schedule_timer(&mut self.tcb, until << 20);
    }

    /// Allows segments of the size agreed in the handshake, because the path may be whole again. A
    /// recovery in progress is finished first: a full segment that was lost then would not show that
    /// the path is narrow.
    pub(crate) fn widen_path(&mut self, cx: &mut TcpContext<'_>) {
        let snd = &self.sender.snd;
        if snd.phase != RecoveryPhase::Open || snd.has(SendFlags::RECOVERING) {
            self.path.widen_at = (to_long_ticks(cx.now.0) + RETRY_TICKS) as u32;
            return;
        }
        self.tcb.emss = self.sender.emss_agreed;
        self.tcb.flags.remove(ConnectionFlags::NARROW_PATH);
        cx.raise_event(&mut self.tcb, Events::MSS_CHANGED);
    }

    /// Limits segments to `emss` bytes from now on; longer ones in flight are resegmented and
    /// retransmitted.
    pub(crate) fn narrow_path(&mut self, cx: &mut TcpContext<'_>, emss: u16) {
        let until = to_long_ticks(cx.now.0) + RAISE_TICKS;
        self.set_narrow(cx, emss, until);
        cx.raise_event(&mut self.tcb, Events::MSS_CHANGED);
        self.sender.split_multi_segments();
        let mut in_flight = self.sender.send_buffer.sent.iter();
        if in_flight.any(|segment| segment.len > u32::from(emss)) {
            self.sender.resegment(emss);
            cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
            if !self.tcb.is_timer(Timer::Persist) {
                self.tcb.restart_retransmission_timer(&self.sender.snd, cx);
            }
        }
    }

    /// Checks for a black hole at a retransmission timeout: after several in a row, a router may be
    /// dropping full segments without an ICMP error (RFC 8899 section 4.3).
    pub(crate) fn suspect_black_hole(&mut self, cx: &mut TcpContext<'_>) {
        let Connection {
            tcb, sender, path, ..
        } = self;
        if sender.timeouts_in_row() < SUSPICIOUS {
            return;
        }
        sender.split_multi_segments();
        let (first, at) = sender
            .send_buffer
            .sent
            .front()
            .map_or((0, 0), |segment| (segment.len, segment.at));
        // The peer's answer may take several timeouts, so their number alone does not select the
        // smallest size.
        let mtu = if path.template.is_v6() {
            MIN_PATH_MTU_V6
        } else if first > u32::from(path.emss_for(tcb, BASE)) {
            BASE
        } else if sender.timeouts_in_row() >= 2 * SUSPICIOUS {
            BASE_V4
        } else {
            return;
        };
        let base = path.emss_for(tcb, mtu);
        // Not if the peer shrank its window: then the peer itself refuses the retransmissions. And
        // not if a segment longer than `base`, sent no earlier, was SACKed.
        let shut = sender.snd.wnd < sender.snd.flight() && tcb.last_rx >= at;
        let passes = |segment: &InFlightSegment| {
            segment.flags & SACKED != 0 && segment.len > u32::from(base) && segment.at >= at
        };
        if first > u32::from(base)
            && base < tcb.emss
            && !shut
            && !sender.send_buffer.sent.iter().any(passes)
        {
            // In an outage no packet arrives. A probe without payload goes with the retransmission:
            // if only the probe is answered, the path carries short packets only.
            if !sender
                .recovery
                .as_ref()
                .is_some_and(|recovery| recovery.is_answered)
            {
                cx.schedule_output(tcb, ConnectionFlags::NEED_PROBE);
                return;
            }
            cx.shared.stats.black_holes += 1;
            cx.shared.paths.learn(path.remote(), mtu, cx.now);
            self.narrow_path(cx, base);
        }
    }
}
