//! The path's MTU: told by ICMP (RFC 1191, 8201), guessed when full segments vanish for good
//! (RFC 8899 section 4.3), and shared by the connections to a destination. A path is taken for as
//! wide as the ends agreed until it shows otherwise; from then on `search` and `probe`
//! look for what it carries, upward.

use core::net::IpAddr;
use std::collections::HashMap;

use crate::base::buffer::RecvBuf;
use crate::base::events::Events;
use crate::base::ids::ConnId;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::base::time::ticks;
use crate::connection::context::Shared;
use crate::connection::{Conn, flag};
use crate::pmtu::search::{RAISE, Search, past};
use crate::queues::send_queue::{SACKED, Sent};
use crate::stack::Stack;
use crate::wire::flow_key::FlowKey;

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

/// What is known of destinations beyond a narrow link (RFC 8899 section 3 item 9).
#[derive(Default)]
pub(crate) struct Paths(HashMap<IpAddr, Search>);

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
    fn headers(&self) -> u16 {
        let ip = if self.template.is_v6() { 60 } else { 40 };
        let ts = if self.hot.has(flag::TIMESTAMPS) {
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
    fn first_look(&self, t: u32) -> u32 {
        if self.hot.has(flag::SACK) {
            t
        } else {
            t.wrapping_add(RAISE)
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
        self.split_trains();
        self.tx.resegment(u32::from(self.hot.emss));
        self.start_recovery();
        if let Some(r) = &mut self.recovery {
            r.recount(&mut self.hot, &self.tx);
        }
    }
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// A router says that what `key` sent at `seq` was too big. Believed when that is in flight
    /// (RFC 5927 section 4.1), was longer, and the size is not absurd (RFC 8899 section 4.6.1).
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
        if h.state == TcpState::SynSent || seq.lt(h.snd_una) || seq.ge(h.snd_nxt) || mtu < min {
            return;
        }
        let emss = c.emss_for(mtu);
        let Some(s) = c.tx.sent.get(c.tx.first_after(seq)) else {
            return;
        };
        // Of several that left together, each is as long as their EMSS was.
        let len = if s.mss == 0 { s.len } else { u32::from(s.mss) };
        if len <= u32::from(emss) {
            return;
        }
        let t = ticks(now.0);
        let to = key.remote().ip();
        let probe = s.is_probe(u32::from(c.hot.emss));
        if emss < c.hot.emss {
            self.sh.stats.pmtu_reductions += 1;
            self.sh.paths.learn(to, Search::told(mtu, t), t);
            self.sh.narrow(index, c, emss, now);
        } else if probe {
            // The probe's answer (section 4.6.2): what is in use stays, the search goes on below.
            if let Some(path) = self.sh.paths.known(to)
                && path.probe_of(c.id(index)).is_some()
            {
                path.limited(mtu, t);
                c.search_at = t;
            }
            self.sh.send_cut(index, c, now);
        }
    }
}

impl Paths {
    fn learn(&mut self, to: IpAddr, s: Search, t: u32) {
        if self.room_for(to, t) {
            self.0.insert(to, s);
        }
    }

    /// Beside those that are known, expired ones gone.
    fn room_for(&mut self, to: IpAddr, t: u32) -> bool {
        if self.0.len() >= PATHS_MAX && !self.0.contains_key(&to) {
            self.0.retain(|_, s| !past(t, s.until));
        }
        self.0.len() < PATHS_MAX || self.0.contains_key(&to)
    }

    pub(crate) fn get(&self, to: IpAddr) -> Option<&Search> {
        self.0.get(&to)
    }

    pub(crate) fn known(&mut self, to: IpAddr) -> Option<&mut Search> {
        self.0.get_mut(&to)
    }

    /// The search of a connection whose packets are `own` bytes long; `None`: there are too many.
    pub(crate) fn search(&mut self, to: IpAddr, own: u16, t: u32) -> Option<&mut Search> {
        if !self.room_for(to, t) {
            return None;
        }
        Some(self.0.entry(to).or_insert_with(|| Search::from(own, t)))
    }

    pub(crate) fn forget(&mut self, to: IpAddr) {
        self.0.remove(&to);
    }
}

impl Shared {
    /// A new connection starts with what others found out.
    pub(crate) fn known_path<B: RecvBuf, R>(&mut self, c: &mut Conn<B, R>, now: Instant) {
        if self.paths.0.is_empty() {
            return;
        }
        let t = ticks(now.0);
        let to = c.template.key().remote().ip();
        if let Some(s) = self.paths.0.get(&to) {
            if past(t, s.until) {
                self.paths.0.remove(&to);
            } else if c.emss_for(s.plpmtu) < c.hot.emss {
                c.hot.emss = c.emss_for(s.plpmtu);
                c.hot.flags |= flag::NARROW;
                c.search_at = c.first_look(t);
            }
        }
    }

    /// From now on segments carry `emss` at most; what is out and longer is cut and sent again.
    fn narrow<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, emss: u16, now: Instant) {
        c.hot.emss = emss;
        c.hot.flags |= flag::NARROW;
        c.search_at = c.first_look(ticks(now.0));
        self.event(index, &mut c.hot, Events::MSS_CHANGED);
        c.split_trains();
        if c.tx.sent.iter().any(|s| s.len > u32::from(emss)) {
            self.send_cut(index, c, now);
        }
    }

    fn send_cut<B: RecvBuf, R>(&mut self, index: u32, c: &mut Conn<B, R>, now: Instant) {
        c.cut();
        self.owe(index, &mut c.hot, 0);
        if !c.hot.has(flag::PERSIST) {
            self.restart_rto(index, &mut c.hot, now);
        }
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
        let least = c.template.is_v6() || c.hot.backoff >= 2 * SUSPICIOUS;
        let mtu = match (c.template.is_v6(), least) {
            (true, _) => MIN_V6,
            (false, false) => BASE,
            (false, true) => BASE_V4,
        };
        let base = c.emss_for(mtu);
        // A window that shrank swallows repetitions too, but they are answered. What was sent no
        // earlier and SACKed passed the path.
        let shut = c.hot.snd_wnd < c.hot.flight() && c.hot.last_rx >= at;
        let passes = |s: &Sent| s.flags & SACKED != 0 && s.len > u32::from(base) && s.at >= at;
        if first > u32::from(base) && base < c.hot.emss && !shut && !c.tx.sent.iter().any(passes) {
            self.stats.black_holes += 1;
            let t = ticks(now.0);
            let to = c.template.key().remote().ip();
            let cut = (c.id(index), c.hot.snd_nxt);
            self.paths.learn(to, Search::base(mtu, least, cut, t), t);
            self.narrow(index, c, base, now);
        }
    }
}
