//! I/O addresses for memory whose virtual address an IOMMU cannot translate: IOMMUs of client
//! platforms translate 39 bits, and the kernel maps process memory above them.

use parking_lot::Mutex;
use std::sync::Arc;

/// Alignment of every range: the largest supported page size.
const ALIGNMENT: u64 = 2 << 20;
/// Width of the address space of a process (x86-64, four levels of page tables).
const ADDRESS_BITS: u8 = 47;

/// I/O addresses of one IOMMU that DPDK does not use: DPDK's own memory is at the bottom, from 4
/// GiB on, and this space is the upper half. Clones allocate from the same space.
#[derive(Clone)]
pub struct IovaSpace {
    width: u8,
    /// First address and length of each range in use, in order.
    used: Arc<Mutex<Vec<(u64, u64)>>>,
}

/// A range of I/O addresses, freed when dropped.
pub(crate) struct IovaRange {
    pub(crate) base: u64,
    space: IovaSpace,
}

impl IovaSpace {
    /// Creates the space of an IOMMU that translates addresses of `width` bits.
    pub fn new(width: u8) -> IovaSpace {
        IovaSpace {
            width: width.clamp(ALIGNMENT.trailing_zeros() as u8 + 1, ADDRESS_BITS + 1),
            used: Arc::default(),
        }
    }

    /// Returns true if memory at `addr` can use its own address as I/O address.
    pub(crate) fn translates(&self, addr: u64, len: u64) -> bool {
        addr.checked_add(len)
            .is_some_and(|end| end <= 1 << self.width)
    }

    /// Allocates `len` bytes in the first gap that is large enough; `None` if there is none.
    pub(crate) fn allocate(&self, len: u64) -> Option<IovaRange> {
        let len = len.checked_next_multiple_of(ALIGNMENT)?;
        let mut used = self.used.lock();
        let mut base = 1 << (self.width - 1);
        let mut index = 0;
        for (start, used_len) in used.iter() {
            if start - base >= len {
                break;
            }
            base = start + used_len;
            index += 1;
        }
        if base + len > 1 << self.width {
            return None;
        }
        used.insert(index, (base, len));
        Some(IovaRange {
            base,
            space: self.clone(),
        })
    }
}

impl Drop for IovaRange {
    fn drop(&mut self) {
        let mut used = self.space.used.lock();
        used.retain(|(start, _)| *start != self.base);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 2 << 20;

    #[test]
    fn ranges_fit_the_width_and_are_used_again() {
        let space = IovaSpace::new(23);
        let first = space.allocate(1).unwrap();
        let second = space.allocate(PAGE).unwrap();
        assert_eq!((first.base, second.base), (2 * PAGE, 3 * PAGE));
        assert!(space.allocate(1).is_none(), "the space is full");
        drop(first);
        assert!(space.allocate(PAGE + 1).is_none());
        assert_eq!(space.allocate(PAGE).unwrap().base, 2 * PAGE);
    }

    #[test]
    fn addresses_within_the_width_are_kept() {
        let narrow = IovaSpace::new(39);
        assert!(narrow.translates(0x10_0000, 4096));
        assert!(narrow.translates((1 << 39) - 4096, 4096));
        assert!(!narrow.translates((1 << 39) - 4095, 4096));
        assert!(!narrow.translates(0x7f00_0000_0000, 4096));
        assert!(IovaSpace::new(48).translates(0x7fff_ffff_0000, 4096));
    }
}
