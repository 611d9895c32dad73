//! Per-connection fields outside of [`Connection`](super::Connection) that only slow paths use.
//! They lie in an array indexed by slot, which keeps them out of the connection's cache lines.

use std::collections::HashMap;

use siw_net::{Instant, QuotaOwner};

use crate::base::retransmissions::Retransmissions;

/// The unit of [`AnswerLimit`], 2^24 ns (17 ms), as a shift; 16 bits of units wrap after 18
/// minutes.
const UNIT_SHIFT: u32 = 24;
/// Units per further answer: 67 ms.
const INTERVAL: u16 = 4;
/// Maximum burst of answers.
const BURST: u16 = 8;

/// Limits the answers of one kind that a connection sends: [`BURST`] at once, then one per
/// [`INTERVAL`].
#[derive(Clone, Copy, Default)]
pub(crate) struct AnswerLimit {
    /// The time in units at which the whole burst is available again.
    full_at: u16,
}

impl AnswerLimit {
    /// Takes one answer; returns `false` if none is allowed now.
    pub(crate) fn try_take(&mut self, now: Instant) -> bool {
        let now = (now.0 >> UNIT_SHIFT) as u16;
        let mut left = self.full_at.wrapping_sub(now);
        if left > BURST * INTERVAL {
            left = 0; // it lies in the past
        }
        let may = left <= (BURST - 1) * INTERVAL;
        if may {
            self.full_at = now.wrapping_add(left + INTERVAL);
        }
        may
    }
}

/// The owner of connections whose owner named none.
const NO_OWNER: QuotaOwner = QuotaOwner {
    client: u32::MAX,
    user: u32::MAX,
};

/// The side fields of one connection.
#[derive(Clone, Copy)]
pub(crate) struct SideFields {
    /// The tick at which a connection without an owner must end; 0 if it has an owner or is in
    /// TIME-WAIT.
    pub orphan_until: u32,
    /// Limit of answers to keepalive and zero-window probes. Only a sender that knows RCV.NXT can
    /// use them up.
    pub probe_answers: AnswerLimit,
    /// Limit of answers to all other unacceptable segments, and of challenge ACKs.
    pub other_answers: AnswerLimit,
    pub flags: SideFlags,
    /// The number of times that the receive window was doubled.
    pub window_doublings: u8,
    /// Retransmission timeouts so far; the count saturates.
    pub timeouts: u16,
    /// The stream position, in units of 2^14 bytes, and the tick at which the current round of the
    /// receive window's measurement began. Both wrap: after 1 GiB and a minute.
    pub round_position: u16,
    pub round_tick: u16,
    /// The client and user that the connection is charged to; [`NO_OWNER`] if its owner named none.
    owner: QuotaOwner,
}

impl SideFields {
    /// Sets the client and user that the connection is charged to.
    pub(crate) fn set_quota_owner(&mut self, owner: Option<QuotaOwner>) {
        self.owner = owner.unwrap_or(NO_OWNER);
    }
}

impl Default for SideFields {
    fn default() -> Self {
        SideFields {
            orphan_until: 0,
            probe_answers: AnswerLimit::default(),
            other_answers: AnswerLimit::default(),
            flags: SideFlags::default(),
            window_doublings: 0,
            timeouts: 0,
            round_position: 0,
            round_tick: 0,
            owner: NO_OWNER,
        }
    }
}

/// Boolean side fields.
#[derive(Clone, Copy, Default)]
pub(crate) struct SideFlags(u8);

impl SideFlags {
    /// During an active open, a router reported that the peer is unreachable at the moment (RFC
    /// 9293 section 3.9.2.2).
    pub const SOFT_ERROR: SideFlags = SideFlags(1);
    /// Data segments may be ECN-capable (RFC 3168 section 6.1.1): both ends have agreed by the first
    /// SYNs. The condition to echo marks is weaker; see `ConnectionFlags::ECN`.
    pub const MAY_SEND_ECT: SideFlags = SideFlags(2);
    /// The SYN was sent again behind a reset of an earlier connection.
    pub const SYN_AFTER_RESET: SideFlags = SideFlags(4);

    /// Returns whether `flag` is set.
    pub(crate) fn has(self, flag: SideFlags) -> bool {
        self.0 & flag.0 != 0
    }

    /// Sets `flag` to `value`.
    pub(crate) fn set(&mut self, flag: SideFlags, value: bool) {
        self.0 = self.0 & !flag.0 | if value { flag.0 } else { 0 };
    }
}

/// Counts of a connection that has sent segments again, or probed a closed window.
#[derive(Clone, Copy, Default)]
pub(crate) struct RepeatCounts {
    /// Segments that were sent again, by cause.
    pub retransmissions: Retransmissions,
    /// Zero-window probes sent; the count saturates.
    pub window_probes: u32,
}

/// The side fields of all connections.
#[derive(Default)]
pub(crate) struct SideTable {
    fields: Vec<SideFields>,
    /// Few connections have counts, so that an idle one needs no memory for them.
    repeats: HashMap<u32, RepeatCounts>,
}

impl SideTable {
    /// Size of a connection's entry in bytes.
    pub(crate) const ENTRY: usize = size_of::<SideFields>();

    /// Returns the fields of the connection in slot `index`.
    pub(crate) fn fields_of(&mut self, index: u32) -> &mut SideFields {
        let index = index as usize;
        if index >= self.fields.len() {
            self.fields.resize(index + 1, SideFields::default());
        }
        &mut self.fields[index]
    }

    /// Prepares slot `index` for a new connection.
    pub(crate) fn reset(&mut self, index: u32) {
        *self.fields_of(index) = SideFields::default();
        self.repeats.remove(&index);
    }

    /// Returns the counts of the connection in slot `index`, to be increased.
    #[cold]
    pub(crate) fn repeats_mut(&mut self, index: u32) -> &mut RepeatCounts {
        self.repeats.entry(index).or_default()
    }

    /// Returns the counts of the connection in slot `index`.
    pub(crate) fn repeats(&self, index: u32) -> RepeatCounts {
        self.repeats.get(&index).copied().unwrap_or_default()
    }

    /// Returns how often the connection in slot `index` has doubled its receive window.
    pub(crate) fn window_doublings(&self, index: u32) -> u8 {
        let fields = self.fields.get(index as usize);
        fields.map_or(0, |fields| fields.window_doublings)
    }

    /// Returns the number of retransmission timeouts of the connection in slot `index`.
    pub(crate) fn timeouts(&self, index: u32) -> u32 {
        self.fields
            .get(index as usize)
            .map_or(0, |fields| fields.timeouts.into())
    }

    /// Returns the client and user that the connection in slot `index` is charged to.
    pub(crate) fn quota_owner(&self, index: u32) -> Option<QuotaOwner> {
        let owner = self.fields.get(index as usize)?.owner;
        (owner != NO_OWNER).then_some(owner)
    }

    /// Returns the tick at which the connection in slot `index`, which has no owner, must end.
    pub(crate) fn orphan_until(&self, index: u32) -> Option<u32> {
        let fields = self.fields.get(index as usize)?;
        (fields.orphan_until != 0).then_some(fields.orphan_until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_limited_whenever_the_clock_wraps() {
        const MS: u64 = 1_000_000;
        let second = |limit: &mut AnswerLimit, from: u64| {
            let times = (0..1000).map(|ms| Instant(from + ms * MS));
            times.filter(|now| limit.try_take(*now)).count()
        };
        let mut limit = AnswerLimit::default();
        for minute in 0..200u64 {
            let from = minute * 60_000 * MS;
            let n = second(&mut limit, from);
            // Right after a wrap a past time may look like a future one, for the length of a burst
            // at most.
            assert!((14..=24).contains(&n), "{n} in minute {minute}");
            let n = second(&mut limit, from + 1000 * MS);
            assert!((13..=16).contains(&n), "{n} a second later");
        }
    }
}
