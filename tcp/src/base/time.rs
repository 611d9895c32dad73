//! Ticks of the connections' timers and of the timestamp clock.

use siw_net::Instant;

/// Converts nanoseconds to ticks of 2^20 ns, about a millisecond; they wrap after 52 days.
#[inline]
pub(crate) fn to_ticks(ns: u64) -> u32 {
    (ns >> 20) as u32
}

/// Converts nanoseconds to ticks that do not wrap, for times that are compared after months.
pub(crate) fn to_long_ticks(ns: u64) -> u64 {
    ns >> 20
}

/// Returns the time in nanoseconds of a tick less than 26 days from `now`.
pub(crate) fn at_ticks(ticks: u32, now: Instant) -> u64 {
    let ahead = ticks.wrapping_sub(to_ticks(now.0)) as i32;
    (now.0 >> 20).saturating_add_signed(ahead.into()) << 20
}

/// Returns the value of our timestamp clock (RFC 7323 section 5.4): about 1 ms per tick, with an
/// offset drawn for each connection.
#[inline]
pub(crate) fn timestamp_at(now: Instant, offset: u32) -> u32 {
    to_ticks(now.0).wrapping_add(offset)
}

/// Returns the time since the beginning of the tick that the peer echoes, in ns: an upper bound of
/// the round-trip time of the echoed segment. `None`: the echo is not a tick of ours.
pub(crate) fn since_timestamp(echo: u32, offset: u32, now: Instant) -> Option<u64> {
    let ticks = timestamp_at(now, offset).wrapping_sub(echo);
    let began = (now.0 >> 20)
        .checked_sub(u64::from(ticks))
        .filter(|_| ticks as i32 >= 0)?;
    Some(now.0 - (began << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_since_an_echoed_tick_covers_the_round_trip() {
        let offset = 0xffff_fff0;
        for sent_at in [5 << 20, (5 << 20) + 77, 1 << 52] {
            let echo = timestamp_at(Instant(sent_at), offset);
            for rtt in [0, 1000, 1 << 20, 300_000_000] {
                let since = since_timestamp(echo, offset, Instant(sent_at + rtt)).unwrap();
                assert!(since >= rtt && since < rtt + (1 << 20), "{since} for {rtt}");
            }
            assert_eq!(since_timestamp(echo + 1, offset, Instant(sent_at)), None);
        }
        assert_eq!(since_timestamp(0, 0, Instant(1 << 51)), None, "2^31 ticks");
    }

    #[test]
    fn ticks_name_the_nearest_time() {
        const DAY: u64 = 86_400_000_000_000;
        for now in [DAY, 51 * DAY, 53 * DAY, 1000 * DAY + 77] {
            for off in [0, 1 << 20, 20 * DAY] {
                for at in [now + off, now.saturating_sub(off)] {
                    assert_eq!(at_ticks(to_ticks(at), Instant(now)), at >> 20 << 20);
                }
            }
        }
    }
}
