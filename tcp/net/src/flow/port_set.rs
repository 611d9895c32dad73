//! A set of TCP ports, from which a stack may choose local ports at addresses that it shares with
//! another stack of the same machine.

use core::ops::RangeInclusive;
use std::sync::Arc;

/// Number of ports in one word of the bitmap.
const WORD: usize = 64;

/// A set of ports, cheap to clone: the stacks of all workers share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSet {
    first: u16,
    /// Number of ports from `first` to the last one of the set.
    span: u32,
    bits: Arc<[u64]>,
}

impl PortSet {
    /// Returns the set of the ports of `range` for which `contains` is true.
    pub fn new(range: RangeInclusive<u16>, mut contains: impl FnMut(u16) -> bool) -> PortSet {
        let (first, last) = (*range.start(), *range.end());
        let mut bits = vec![0u64; (usize::from(last) + 1).div_ceil(WORD)];
        for port in range.filter(|port| contains(*port)) {
            bits[usize::from(port) / WORD] |= 1 << (usize::from(port) % WORD);
        }
        PortSet {
            first,
            span: (u32::from(last) + 1).saturating_sub(u32::from(first)),
            bits: bits.into(),
        }
    }

    /// Returns the empty set.
    pub fn none() -> PortSet {
        PortSet::new(1..=1, |_| false)
    }

    /// Returns whether the port is in the set.
    #[inline]
    pub fn contains(&self, port: u16) -> bool {
        let word = self.bits.get(usize::from(port) / WORD);
        word.is_some_and(|word| word >> (usize::from(port) % WORD) & 1 != 0)
    }

    /// Returns the number of ports in the set.
    pub fn len(&self) -> usize {
        self.bits
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.bits.iter().all(|word| *word == 0)
    }

    /// Maps any number to a port of the set's range, which the set need not contain.
    pub fn nth_of_range(&self, number: u32) -> u16 {
        // The last port is at most 65535.
        self.first + (number % self.span.max(1)) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_ports_of_its_range_that_were_chosen() {
        let set = PortSet::new(61_000..=65_535, |port| !port.is_multiple_of(2));
        assert_eq!(set.len(), 2268);
        for (port, is_in) in [
            (61_000, false),
            (61_001, true),
            (65_535, true),
            (60_999, false),
            (0, false),
        ] {
            assert_eq!(set.contains(port), is_in, "{port}");
        }
        let drawn: Vec<u16> = (0..4536).map(|number| set.nth_of_range(number)).collect();
        assert_eq!((drawn[0], drawn[4535]), (61_000, 65_535));
        assert_eq!(set.nth_of_range(4536), 61_000);
        assert!(PortSet::none().is_empty() && !set.is_empty());
    }
}
