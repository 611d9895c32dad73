//! The path's MTU: told by ICMP (RFC 1191, 8201), guessed when full segments vanish for good
//! (RFC 4821, 8899), remembered for later connections, and tried anew after a while.

use core::net::IpAddr;
use std::collections::HashMap;

use crate::conn::{Conn, flag};
use crate::flow_table::FlowKey;
use crate::send_queue::{SACKED, Sent};
use crate::shared::Shared;
use crate::stack::{Stack, State};
use crate::{Events, Instant, RecvBuf, SeqNr};

/// RFC 1191 section 6.3: ten minutes; a guess is doubted sooner. In 2^20 ns.
const TOLD: u32 = 600 * 954;
const GUESSED: u32 = 60 * 954;
/// Less than any link in use carries is an attack on our packet rate (RFC 5927 section 7).
const MIN_V4: u16 = 552;
/// RFC 8201 section 4.
const MIN_V6: u16 = 1280;
/// RFC 8899 section 5.1.2 BASE_PLPMTU, and what every IPv4 host takes (RFC 791).
const BASE: u16 = 1200;
const BASE_V4: u16 = 576;
/// Timeouts in a row that make a hole likely.
const SUSPICIOUS: u8 = 2;
const PATHS_MAX: usize = 4096;

/// What is known of destinations beyond a narrow link.
#[derive(Default)]
pub(crate) struct Paths(HashMap<IpAddr, (u16, u32)>);

fn ticks(now: Instant) -> u32 {
    (now.0 >> 20) as u32
}

/// The next hop's MTU; routers from before RFC 1191 do not say and are met with its section 7's
/// plateaus below the quoted packet's length.
pub(crate) fn from_v4(mtu: u16, quoted: u16) -> u16 {
    const PLATEAUS: [u16; 5] = [8166, 4352, 2002, 1492, 1006];
    if mtu != 0 {
        return mtu;
    }
    let below = PLATEAUS.into_iter().find(|&p| p < quoted);
    below.unwrap_or(MIN_V4)
}

impl<B: RecvBuf, R> Conn<B, R> {
    /// Payload of a segment in a packet of `mtu`.
    fn emss_for(&self, mtu: u16) -> u16 {
        let ip = if self.template.is_v6() { 60 } else { 40 };
        let ts = if self.hot.has(flag::TIMESTAMPS) {
            12
        } else {
            0
        };
        mtu.saturating_sub(ip + ts).max(1)
    }
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// A router says that what `key` sent at `seq` was too big. Believed when that is in flight
    /// (RFC 5927 section 4.1) and smaller than what we use.
    pub(crate) fn too_big(&mut self, key: &FlowKey, seq: SeqNr, mtu: u16, now: Instant) {
        self.sh.stats.icmp_errors_in += 1;
        let hash = key.hash::<1, 3>(self.sh.hash_key);
        let conns = &self.conns;
        let found = self
            .sh
            .table
            .find(hash, |i| conns[i as usize].template.carries(key));
        let Some(index) = found else { return };
        let c = &mut self.conns[index as usize];
        let h = &c.hot;
        let min = if key.is_v6() { MIN_V6 } else { MIN_V4 };
        if h.state == State::SynSent || seq.lt(h.snd_una) || seq.ge(h.snd_nxt) || mtu < min {
            return;
        }
        let emss = c.emss_for(mtu);
        if emss < c.hot.emss {
            self.sh.stats.pmtu_reductions += 1;
            self.sh
                .paths
                .learn(key.remote().ip(), mtu, ticks(now) + TOLD, ticks(now));
            self.sh.narrow(index, c, emss, ticks(now) + TOLD, now);
        }
    }
}

impl Paths {
    fn learn(&mut self, to: IpAddr, mtu: u16, until: u32, now: u32) {
        if self.0.len() >= PATHS_MAX && !self.0.contains_key(&to) {
            self.0.retain(|_, (_, until)| now < *until);
            if self.0.len() >= PATHS_MAX {
                return;
            }
        }
        self.0.insert(to, (mtu, until));
    }
}

impl Shared {
    /// A new connection starts with what others found out.
    pub(crate) fn known_path<B: RecvBuf, R>(&mut self, c: &mut Conn<B, R>, now: Instant) {
        if self.paths.0.is_empty() {
            return;
        }
        let to = c.template.key().remote().ip();
        if let Some(&(mtu, until)) = self.paths.0.get(&to) {
            if ticks(now) >= until {
                self.paths.0.remove(&to);
            } else if c.emss_for(mtu) < c.hot.emss {
                c.hot.emss = c.emss_for(mtu);
                c.hot.flags |= flag::NARROW;
                c.narrow_until = until;
            }
        }
    }

    /// From now on segments carry `emss` at most; what is out and longer is cut and sent again.
    fn narrow<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        emss: u16,
        until: u32,
        now: Instant,
    ) {
        c.hot.emss = emss;
        c.hot.flags |= flag::NARROW;
        c.narrow_until = until;
        self.event(index, &mut c.hot, Events::EMSS_CHANGED);
        c.split_trains();
        if c.tx.sent.iter().any(|s| s.len > u32::from(emss)) {
            c.tx.resegment(u32::from(emss));
            c.start_recovery();
            if let Some(r) = &mut c.recovery {
                r.recount(&mut c.hot, &c.tx);
            }
            self.owe(index, &mut c.hot, 0);
            if !c.hot.has(flag::PERSIST) {
                self.restart_rto(index, &mut c.hot, now);
            }
        }
    }

    /// The time of a narrow path is over: the full segment is tried again.
    #[cold]
    pub(crate) fn widen<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, now: Instant) {
        if (ticks(now).wrapping_sub(c.narrow_until) as i32) < 0 {
            return;
        }
        c.hot.flags &= !flag::NARROW;
        c.hot.emss = c.emss_agreed;
        self.event(index, &mut c.hot, Events::EMSS_CHANGED);
    }

    /// A retransmission timeout, not the first: full segments may vanish in a hole that says
    /// nothing (RFC 8899 section 4.3).
    pub(crate) fn suspect_black_hole<B: RecvBuf, R>(
        &mut self,
        index: u32,
        c: &mut Conn<B, R>,
        now: Instant,
    ) {
        if c.hot.backoff < SUSPICIOUS {
            return;
        }
        c.split_trains();
        let (first, at) = c.tx.sent.front().map_or((0, 0), |s| (s.len, s.at));
        let base = if c.template.is_v6() {
            c.emss_for(MIN_V6)
        } else if c.hot.backoff < 2 * SUSPICIOUS {
            c.emss_for(BASE)
        } else {
            c.emss_for(BASE_V4)
        };
        // A window that shrank swallows repetitions too, but they are answered. What was sent no
        // earlier and SACKed passed the path.
        let shut = c.hot.snd_wnd < c.hot.flight() && c.hot.last_rx >= at;
        let passes = |s: &Sent| s.flags & SACKED != 0 && s.len > u32::from(base) && s.at >= at;
        if first > u32::from(base) && base < c.hot.emss && !shut && !c.tx.sent.iter().any(passes) {
            self.stats.black_holes += 1;
            self.narrow(index, c, base, ticks(now) + GUESSED, now);
        }
    }
}
