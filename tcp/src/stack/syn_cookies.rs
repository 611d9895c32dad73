//! SYN cookies (RFC 4987 section 3.6): a listener whose backlog is full answers SYNs without keeping
//! state. The sequence number of the SYN-ACK authenticates the peer's ACK. The peer's options return in
//! the low bits of the echoed timestamp; they are not used if the peer offers no timestamps.
//!
//! ```text
//! sequence number   5 bits period | 3 bits MSS | 24 bits keyed hash
//! timestamp value   clock         | ECN 1 | SACK 1 | window scale 4 (15: none)
//! ```

use siw_net::{FlowKey, Instant};

use crate::base::sequence::SeqNr;
use crate::base::time::timestamp_at;
use crate::connection::context::SharedState;
use crate::connection::handshake::syn_options;
use crate::wire::segment::{ACK, CWR, ECE, SYN, Segment};
use crate::wire::template::{SegmentFields, Template};

/// MSS values that a cookie can carry; the largest that does not exceed the peer's is used.
const MSS: [u16; 8] = [216, 536, 1220, 1440, 1460, 4036, 8940, 8960];
/// A period is 2^36 ns, about 69 s; cookies of the current and the previous one are valid.
const PERIOD_SHIFT: u32 = 36;
const PERIODS: u32 = 32;
const LIFETIME: u64 = 2 << PERIOD_SHIFT;
const NO_SCALE: u32 = 15;
const OPTION_BITS: u32 = 6;
const ECN_BIT: u32 = 1 << 5;
const SACK_BIT: u32 = 1 << 4;

fn cookie_period(now: Instant) -> u32 {
    (now.0 >> PERIOD_SHIFT) as u32 & (PERIODS - 1)
}

/// Returns the timestamp value of a cookie: the last one with these options that is not ahead of the
/// clock, or later segments would look old. With ECN it is half a unit before the one without, so that the
/// answer to a SYN that is repeated without ECN (RFC 3168 section 6.1.1.1) is not older than the first.
fn cookie_timestamp(clock: u32, options: u32) -> u32 {
    let without_ecn = options & !ECN_BIT;
    let behind = clock.wrapping_sub(without_ecn) & ((1 << OPTION_BITS) - 1);
    clock.wrapping_sub(behind + (options & ECN_BIT))
}

impl SharedState {
    fn cookie_sequence(&self, key: &FlowKey, isn: SeqNr, period: u32, mss: u32) -> u32 {
        let bound = u64::from(isn.0) << 32 | u64::from(period << 3 | mss);
        let proof = key.hash_with(self.isn_key, bound) as u32 & 0xff_ffff;
        period << 27 | mss << 24 | proof
    }

    /// Answers a SYN beyond the backlog with a cookie.
    pub(super) fn send_cookie(
        &mut self,
        key: &FlowKey,
        seg: &Segment,
        listener: u32,
        src_mac: [u8; 6],
    ) {
        let now = self.now;
        if self.net.is_half_full() {
            self.stats.listen_drops += 1;
            return;
        }
        if let Some(listener) = self.listeners.get_mut(listener) {
            listener.cookies_until = now.0 + LIFETIME;
        }
        self.stats.cookies_sent += 1;
        let offered = seg.mss.unwrap_or(if key.is_v6() { 1220 } else { 536 });
        let mss = MSS
            .iter()
            .rposition(|&candidate| candidate <= offered)
            .unwrap_or(0) as u32;
        let config = &self.config;
        let ts = config.timestamps && seg.has_ts;
        // Without timestamps the peer's ACK cannot return these options.
        let sack = ts && config.sack && seg.sack_permitted;
        let scale = seg.wscale.filter(|_| ts);
        let ecn = ts && config.wants_ecn() && seg.flags & (ECE | CWR) == ECE | CWR;
        let options = if ecn { ECN_BIT } else { 0 }
            | if sack { SACK_BIT } else { 0 }
            | scale.map_or(NO_SCALE, u32::from).min(NO_SCALE);
        let ts = ts.then(|| {
            let clock = timestamp_at(now, self.timestamp_offset(key));
            (cookie_timestamp(clock, options), seg.ts_val)
        });
        let own_mss = self.net.config.mtu - if key.is_v6() { 60 } else { 40 };
        let (options, n) = syn_options(own_mss, sack, ts, scale.map(|_| self.recv_wscale));
        let fields = SegmentFields {
            seq: SeqNr(self.cookie_sequence(key, seg.seq, cookie_period(now), mss)),
            ack: seg.seq + 1,
            flags: if ecn { SYN | ACK | ECE } else { SYN | ACK },
            window: self.recv_window.min(0xffff) as u16,
            ts: None,
            options: &options[..n],
            payload: 0,
            ect: false,
            tso: false,
        };
        let template = Template::new(self.net.config.mac, src_mac, self.net.config.vlan, key);
        self.push_segment(&template, &fields);
    }

    /// Checks whether an ACK that matches no connection returns a cookie of ours.
    #[cold]
    pub(super) fn check_cookie(
        &mut self,
        key: &FlowKey,
        seg: &Segment,
        has_data: bool,
        src_mac: [u8; 6],
    ) -> Option<CookieAck> {
        let listener = self.listeners.find(key.local())?;
        let (isn, sequence) = (seg.seq - 1, (seg.ack - 1).0);
        let socket = self.listeners.get(listener)?;
        if self.now.0 >= socket.cookies_until || !self.is_plausible_peer(key, src_mac) {
            return None;
        }
        let (of, mss) = (sequence >> 27, sequence >> 24 & 7);
        let age = cookie_period(self.now).wrapping_sub(of) & (PERIODS - 1);
        if age > 1 || sequence != self.cookie_sequence(key, isn, of, mss) {
            self.stats.cookies_failed += 1;
            // The proof is bound to the first sequence number, which a later segment does not show. A
            // peer that has lost its connection is reset in other periods.
            return (age <= 1 && has_data).then_some(CookieAck::Unproven);
        }
        Some(CookieAck::Proof(ReturnedCookie {
            listener,
            isn,
            sequence: SeqNr(sequence),
            mss: MSS[mss as usize],
        }))
    }
}

/// What an acknowledgement of a cookie of the current periods shows.
pub(super) enum CookieAck {
    /// The segment that the cookie asked for.
    Proof(ReturnedCookie),
    /// Data that may follow that segment, to be dropped in silence: the peer retransmits both.
    Unproven,
}

/// A valid cookie.
pub(super) struct ReturnedCookie {
    pub listener: u32,
    /// The peer's initial sequence number.
    pub isn: SeqNr,
    /// The sequence number of our SYN-ACK.
    pub sequence: SeqNr,
    /// The peer's MSS.
    pub mss: u16,
}

impl ReturnedCookie {
    /// Returns the SYN that the cookie answered, as far as the cookie and the echoed timestamp of `seg`
    /// tell.
    pub(super) fn syn(&self, seg: &Segment) -> Segment {
        let bits = if seg.has_ts { seg.ts_ecr } else { NO_SCALE };
        let scale = bits & NO_SCALE;
        Segment {
            seq: self.isn,
            flags: if bits & ECN_BIT != 0 {
                SYN | ECE | CWR
            } else {
                SYN
            },
            window: seg.window,
            has_ts: seg.has_ts,
            ts_val: seg.ts_val,
            sack_permitted: bits & SACK_BIT != 0,
            wscale: (scale != NO_SCALE).then_some(scale as u8),
            mss: Some(self.mss),
            ..Segment::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_carry_the_options_and_are_not_ahead_of_the_clock() {
        for clock in [0, 63, 1_000_000, u32::MAX - 70] {
            for (clock, options) in (0..140).flat_map(|later| {
                let clock = u32::wrapping_add(clock, later);
                (0..1 << OPTION_BITS).map(move |options| (clock, options))
            }) {
                let value = cookie_timestamp(clock, options);
                assert_eq!(value & ((1 << OPTION_BITS) - 1), options);
                assert!(clock.wrapping_sub(value) < 3 << (OPTION_BITS - 1));
            }
        }
    }

    #[test]
    fn a_syn_repeated_without_ecn_gets_no_older_timestamp() {
        let options = SACK_BIT | 7;
        for clock in (0..200).map(|later| u32::wrapping_add(u32::MAX - 70, later)) {
            for gap in 0..100 {
                let later = clock.wrapping_add(gap);
                for (first, second) in [
                    (options | ECN_BIT, options),
                    (options, options),
                    (options | ECN_BIT, options | ECN_BIT),
                ] {
                    let first = cookie_timestamp(clock, first);
                    let second = cookie_timestamp(later, second);
                    assert!(second.wrapping_sub(first) as i32 >= 0, "{clock} + {gap}");
                }
            }
        }
    }
}
