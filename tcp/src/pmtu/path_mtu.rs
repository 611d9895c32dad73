//! The path's MTU: told by ICMP (RFC 1191, 8201), guessed when full segments vanish for good
//! (RFC 8899 section 4.3), and shared by the connections to a destination. A path is taken for as
//! wide as the ends agreed until it shows otherwise; from then on `search` and `probe`
//! look for what it carries, upward.

use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;
use core::net::IpAddr;
use std::collections::HashMap;

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::ids::ConnId;
use crate::base::time::to_ticks;
use crate::connection::Connection;
use crate::connection::context::TcpContext;
use crate::pmtu::search::{PathSearch, RAISE_TICKS, has_passed};
use crate::queues::send_queue::{InFlightSegment, SACKED};

/// Less than any link in use carries is an attack on our packet rate (RFC 5927 section 7).
pub(crate) const MIN_V4: u16 = 552;
/// RFC 8201 section 4.
pub(crate) const MIN_V6: u16 = 1280;
/// RFC 8899 section 5.1.2 BASE_PLPMTU, and what every IPv4 host takes (RFC 791).
const BASE: u16 = 1200;
const BASE_V4: u16 = 576;
/// Timeouts in a row that make a hole likely.
const SUSPICIOUS: u8 = 2;
const PATHS_MAX: usize = 4096;

/// What is known of destinations beyond a narrow link (RFC 8899 section 3 item 9).
#[derive(Default)]
pub(crate) struct Paths(HashMap<IpAddr, PathSearch>);

/// The next hop's MTU; routers from before RFC 1191 do not say and are met with its section 7's
/// plateaus below the quoted packet's length.
pub(crate) fn from_v4(mtu: u16, quoted: u16) -> u16 {
    const PLATEAUS: [u16; 5] = [8166, 4352, 2002, 1492, 1006];
    if mtu != 0 {
        return mtu;
    }
    let below = PLATEAUS.into_iter().find(|&plateau| plateau < quoted);
    below.unwrap_or(MIN_V4)
}

impl<B: RecvBuf, R> Connection<B, R> {
    fn headers(&self) -> u16 {
        let ip = if self.template.is_v6() { 60 } else { 40 };
        let ts = if self.tcb.has(ConnectionFlags::TIMESTAMPS) {
            12
        } else {
            0
        };
        ip + ts
    }

    /// Payload of a segment in a packet of `mtu`.
    pub(crate) fn emss_for(&self, mtu: u16) -> u16 {
        mtu.saturating_sub(self.headers()).max(1)
    }

    /// The packet of a segment with `payload`.
    pub(crate) fn mtu_of(&self, payload: u16) -> u16 {
        payload.saturating_add(self.headers())
    }

    /// When a connection whose path became narrow at `t` looks after that: at once where it can
    /// probe. Without SACK a probe's loss is told late or by a timeout: there full segments are
    /// tried after ten minutes (RFC 1191 section 6.3).
    fn first_look(&self, now_ticks: u32) -> u32 {
        if self.tcb.has(ConnectionFlags::SACK) {
            now_ticks
        } else {
            now_ticks.wrapping_add(RAISE_TICKS)
        }
    }

    pub(crate) fn id(&self, index: u32) -> ConnId {
        ConnId {
            index,
            generation: self.generation,
        }
    }

    /// What is out and longer than `emss` is cut, to be sent again: the path does not carry it.
    pub(crate) fn cut(&mut self) {
        self.split_multi_segments();
        self.send_queue.resegment_to(u32::from(self.tcb.emss));
        self.start_recovery();
        if let Some(recovery) = &mut self.recovery {
            recovery.recount_lost(&mut self.tcb, &self.send_queue);
        }
    }
}

impl Paths {
    pub(crate) fn learn(&mut self, to: IpAddr, search: PathSearch, now_ticks: u32) {
        if self.room_for(to, now_ticks) {
            self.0.insert(to, search);
        }
    }

    /// Beside those that are known, expired ones gone.
    fn room_for(&mut self, to: IpAddr, now_ticks: u32) -> bool {
        if self.0.len() >= PATHS_MAX && !self.0.contains_key(&to) {
            self.0
                .retain(|_, search| !has_passed(now_ticks, search.until));
        }
        self.0.len() < PATHS_MAX || self.0.contains_key(&to)
    }

    pub(crate) fn get(&self, to: IpAddr) -> Option<&PathSearch> {
        self.0.get(&to)
    }

    pub(crate) fn get_mut(&mut self, to: IpAddr) -> Option<&mut PathSearch> {
        self.0.get_mut(&to)
    }

    /// The search of a connection whose packets are `own` bytes long; `None`: there are too many.
    pub(crate) fn search(
        &mut self,
        to: IpAddr,
        own: u16,
        now_ticks: u32,
    ) -> Option<&mut PathSearch> {
        if !self.room_for(to, now_ticks) {
            return None;
        }
        Some(
            self.0
                .entry(to)
                .or_insert_with(|| PathSearch::starting_at(own, now_ticks)),
        )
    }

    pub(crate) fn forget(&mut self, to: IpAddr) {
        self.0.remove(&to);
    }
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// A new connection starts with what others found out.
    pub(crate) fn known_path(&mut self, cx: &mut TcpContext<'_>) {
        if cx.shared.paths.0.is_empty() {
            return;
        }
        let now_ticks = to_ticks(cx.now.0);
        let to = self.template.key().remote().ip();
        if let Some(search) = cx.shared.paths.0.get(&to) {
            if has_passed(now_ticks, search.until) {
                cx.shared.paths.0.remove(&to);
            } else if self.emss_for(search.plpmtu) < self.tcb.emss {
                self.tcb.emss = self.emss_for(search.plpmtu);
                self.tcb.flags |= ConnectionFlags::NARROW_PATH;
                self.search_at = self.first_look(now_ticks);
            }
        }
    }

    /// From now on segments carry `emss` at most; what is out and longer is cut and sent again.
    pub(crate) fn narrow(&mut self, cx: &mut TcpContext<'_>, emss: u16) {
        self.tcb.emss = emss;
        self.tcb.flags |= ConnectionFlags::NARROW_PATH;
        self.search_at = self.first_look(to_ticks(cx.now.0));
        cx.raise_event(&mut self.tcb, Events::MSS_CHANGED);
        self.split_multi_segments();
        if self
            .send_queue
            .sent
            .iter()
            .any(|segment| segment.len > u32::from(emss))
        {
            self.send_cut(cx);
        }
    }

    pub(crate) fn send_cut(&mut self, cx: &mut TcpContext<'_>) {
        self.cut();
        cx.schedule_output(&mut self.tcb, ConnectionFlags::NONE);
        if !self.tcb.is_timer(Timer::Persist) {
            self.tcb.restart_retransmission_timer(cx);
        }
    }

    /// A retransmission timeout, not the first: full segments may vanish in a hole that says
    /// nothing (RFC 8899 section 4.3).
    pub(crate) fn suspect_black_hole(&mut self, cx: &mut TcpContext<'_>) {
        if self.tcb.backoff < SUSPICIOUS {
            return;
        }
        self.split_multi_segments();
        let (first, at) = self
            .send_queue
            .sent
            .front()
            .map_or((0, 0), |segment| (segment.len, segment.at));
        let least = self.template.is_v6() || self.tcb.backoff >= 2 * SUSPICIOUS;
        let mtu = match (self.template.is_v6(), least) {
            (true, _) => MIN_V6,
            (false, false) => BASE,
            (false, true) => BASE_V4,
        };
        let base = self.emss_for(mtu);
        // A window that shrank swallows retransmissions too, but they are answered. What was sent no
        // earlier and SACKed passed the path.
        let shut = self.tcb.snd_wnd < self.tcb.flight() && self.tcb.last_rx >= at;
        let passes = |segment: &InFlightSegment| {
            segment.flags & SACKED != 0 && segment.len > u32::from(base) && segment.at >= at
        };
        if first > u32::from(base)
            && base < self.tcb.emss
            && !shut
            && !self.send_queue.sent.iter().any(passes)
        {
            cx.shared.stats.black_holes += 1;
            let now_ticks = to_ticks(cx.now.0);
            let to = self.template.key().remote().ip();
            let cut = (self.id(cx.index), self.tcb.snd_nxt);
            cx.shared.paths.learn(
                to,
                PathSearch::from_black_hole(mtu, least, cut, now_ticks),
                now_ticks,
            );
            self.narrow(cx, base);
        }
    }
}
