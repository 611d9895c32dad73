//! What registered memory may be used for, and the types of memory windows: in work requests and
//! control messages.

/// What memory may be used for; bits of `enum ibv_access_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(pub u32);

impl Access {
    /// Local reads: always allowed.
    pub const NONE: Access = Access(0);
    /// Work requests of this side may write it: receives, and the sinks of READs and atomics.
    pub const LOCAL_WRITE: Access = Access(1);
    /// Peers may write it (needs LOCAL_WRITE).
    pub const REMOTE_WRITE: Access = Access(2);
    /// Peers may read it.
    pub const REMOTE_READ: Access = Access(4);
    /// Peers may run FetchAdd and CmpSwap on it (needs LOCAL_WRITE).
    pub const REMOTE_ATOMIC: Access = Access(8);
    /// Memory windows may be bound to it.
    pub const MW_BIND: Access = Access(16);
    /// Addresses count from 0 instead of from its virtual address.
    pub const ZERO_BASED: Access = Access(32);
    /// Order of placement may be relaxed; it is not.
    pub const RELAXED_ORDERING: Access = Access(1 << 20);
    /// Bits that a provider may ignore (IBV_ACCESS_OPTIONAL_RANGE).
    pub const OPTIONAL: Access = Access(0x3ff0_0000);
    /// Everything a peer may do.
    pub const REMOTE: Access = Access(2 | 4 | 8);
    /// All bits that mean something.
    pub const ALL: Access = Access(63);

    /// Whether all bits of `o` are set.
    #[inline]
    pub fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether some bit of `o` is set.
    #[inline]
    pub fn intersects(self, other: Access) -> bool {
        self.0 & other.0 != 0
    }

    /// What remains when the bits of `o` are cleared.
    #[inline]
    pub fn without(self, other: Access) -> Access {
        Access(self.0 & !other.0)
    }

    /// A peer may change the memory.
    #[inline]
    pub fn allows_remote_changes(self) -> bool {
        self.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
    }
}

impl std::ops::BitOr for Access {
    type Output = Access;
    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

/// Memory windows of ibv_alloc_mw(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowType {
    /// Any queue pair of its protection domain; bound again without being unbound.
    One,
    /// One queue pair (2B: of its protection domain); invalidated before it is bound again.
    Two,
}
