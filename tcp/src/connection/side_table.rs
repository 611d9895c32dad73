//! What connections have besides [`Connection`](super::Connection): fields that only slow paths use.
//! They lie in an array by slot, so that a connection keeps its cache lines.

use crate::base::quota_owner::QuotaOwner;
use crate::base::time::Instant;

/// The unit of [`AnswerLimit`], 2^24 ns, as a shift: 17 ms, of which 2^16 wrap after 18 minutes.
const UNIT_SHIFT: u32 = 24;
/// Units after which one more answer is permitted: 67 ms.
const INTERVAL: u16 = 4;
/// Answers that are permitted at once.
const BURST: u16 = 8;

/// Limits how many segments of one kind a connection answers: [`BURST`] at once, then one each
/// [`INTERVAL`].
#[derive(Clone, Copy, Default)]
pub(crate) struct AnswerLimit {
    /// When all answers are permitted again, in units.
    full_at: u16,
}

impl AnswerLimit {
    /// Takes one answer; `false`: none is permitted now.
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

/// The fields of one connection.
#[derive(Clone, Copy, Default)]
pub(crate) struct SideFields {
    /// When a connection without an owner has to end, in ticks; 0: it has one, or is in TIME-WAIT.
    pub orphan_until: u32,
    /// Answers to keepalive and zero-window probes. Only who knows RCV.NXT can use them up.
    pub probe_answers: AnswerLimit,
    /// Answers to all other segments that are not acceptable, and challenge ACKs.
    pub other_answers: AnswerLimit,
    /// Retransmission timeouts so far.
    pub timeouts: u32,
    /// Whose it is, if its owner said so.
    pub quota_owner: Option<QuotaOwner>,
}

/// The fields of all connections.
#[derive(Default)]
pub(crate) struct SideTable(Vec<SideFields>);

impl SideTable {
    /// Bytes of a connection's entry.
    pub(crate) const ENTRY: usize = size_of::<SideFields>();

    /// The fields of the connection in slot `index`.
    pub(crate) fn fields_of(&mut self, index: u32) -> &mut SideFields {
        let index = index as usize;
        if index >= self.0.len() {
            self.0.resize(index + 1, SideFields::default());
        }
        &mut self.0[index]
    }

    /// Retransmission timeouts of the connection in slot `index`.
    pub(crate) fn timeouts(&self, index: u32) -> u32 {
        self.0
            .get(index as usize)
            .map_or(0, |fields| fields.timeouts)
    }

    /// Whose limits the connection in slot `index` counts for.
    pub(crate) fn quota_owner(&self, index: u32) -> Option<QuotaOwner> {
        self.0.get(index as usize)?.quota_owner
    }

    /// When the connection in slot `index` has to end for want of an owner, in ticks.
    pub(crate) fn orphan_until(&self, index: u32) -> Option<u32> {
        let fields = self.0.get(index as usize)?;
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
            // Right after a wrap a past time may look like a future one, for the burst at most.
            assert!((14..=24).contains(&n), "{n} in minute {minute}");
            let n = second(&mut limit, from + 1000 * MS);
            assert!((13..=16).contains(&n), "{n} a second later");
        }
    }
}
