//! Access rights of registered memory, and the types of memory windows, as used in work requests and
//! control messages.

/// Access rights of memory; bits of `enum ibv_access_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Access(pub u32);

impl Access {
    /// Local reads: always allowed.
    pub const NONE: Access = Access(0);
    /// Work requests of this side may write to it: receives, and the sinks of READs and atomics.
    pub const LOCAL_WRITE: Access = Access(1);
    /// Peers may write to it (needs LOCAL_WRITE).
    pub const REMOTE_WRITE: Access = Access(2);
    /// Peers may read from it.
    pub const REMOTE_READ: Access = Access(4);
    /// Peers may run FetchAdd and CmpSwap on it (needs LOCAL_WRITE).
    pub const REMOTE_ATOMIC: Access = Access(8);
    /// Memory windows may be bound to it.
    pub const MW_BIND: Access = Access(16);
    /// Addresses count from 0 instead of from its virtual address.
    pub const ZERO_BASED: Access = Access(32);
    /// Placement may be reordered; siwd never does.
    pub const RELAXED_ORDERING: Access = Access(1 << 20);
    /// With REMOTE_ATOMIC: operations need to exclude only each other (IBV_ATOMIC_HCA), which memory that is
    /// copied allows, too. No bit of programs; a daemon that does not know it ignores it.
    pub const DEVICE_ATOMIC: Access = Access(1 << 29);
    /// Bits that a provider may ignore (IBV_ACCESS_OPTIONAL_RANGE).
    pub const OPTIONAL: Access = Access(0x3ff0_0000);
    /// All rights that a peer can have.
    pub const REMOTE: Access = Access(2 | 4 | 8);
    /// All bits with a meaning.
    pub const ALL: Access = Access(63);

    /// Returns whether all bits of `other` are set.
    #[inline]
    pub const fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns whether any bit of `other` is set.
    #[inline]
    pub const fn intersects(self, other: Access) -> bool {
        self.0 & other.0 != 0
    }

    /// The rights of both; `|` for constants.
    #[inline]
    pub const fn union(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }

    /// The rights without those of `other`.
    #[inline]
    pub const fn without(self, other: Access) -> Access {
        Access(self.0 & !other.0)
    }

    /// Returns whether a peer may change the memory.
    #[inline]
    pub fn allows_remote_changes(self) -> bool {
        self.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
    }

    /// Returns whether the memory must be shared with the daemon: a peer's atomics and those of the
    /// processor exclude each other.
    #[inline]
    pub fn needs_shared_memory(self) -> bool {
        self.contains(Access::REMOTE_ATOMIC) && !self.contains(Access::DEVICE_ATOMIC)
    }
}

impl std::ops::BitOr for Access {
    type Output = Access;
    fn bitor(self, other: Access) -> Access {
        self.union(other)
    }
}

impl std::ops::BitOrAssign for Access {
    fn bitor_assign(&mut self, other: Access) {
        *self = self.union(other);
    }
}

/// Memory windows of ibv_alloc_mw(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum WindowType {
    /// Type 1: usable by any queue pair of its protection domain; can be rebound without unbinding.
    One,
    /// Type 2: usable by one queue pair (2B: within its protection domain); must be invalidated
    /// before it is bound again.
    Two,
}
