//! Options of rsockets, and the sizes of their streams. Options that siwd's TCP decides itself are
//! stored and have no effect.

use siw::Limits;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::time::Duration;

/// Maximum number of outstanding messages of credits and of the end.
pub const CONTROL_MESSAGES: u32 = 4;
/// Slots of the send queue for them: each may have a WRITE before it.
const CONTROL_PLACES: u32 = 2 * CONTROL_MESSAGES + 2;
/// Buffer size for gathering inline data.
pub const MOST_INLINE: usize = 256;
/// Receive work requests in addition to those for data, for messages without credits.
const SPARE_RECEIVES: u32 = 16;
const LEAST_QUEUE: u16 = 16;

/// Sizes of the parts of a stream.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub send_queue: u16,
    pub receive_queue: u16,
    pub inline: u16,
    pub send_buffer: u32,
    pub receive_buffer: u32,
    /// Up to these sizes the buffers grow with their use; those that a program has set do not grow.
    pub most_send_buffer: u32,
    pub most_receive_buffer: u32,
    /// Entries for memory of this side that is mapped for the peer.
    pub mappings: u16,
}

impl Default for Sizes {
    /// librdmacm's defaults. It has no growing buffers: their limits are of the size of the kernel's
    /// (`tcp_rmem` and `tcp_wmem` in tcp(7)).
    fn default() -> Sizes {
        Sizes {
            send_queue: 384,
            receive_queue: 384,
            inline: 64,
            send_buffer: 1 << 17,
            receive_buffer: 1 << 17,
            most_send_buffer: 1 << 21,
            most_receive_buffer: 1 << 21,
            mappings: 0,
        }
    }
}

impl Sizes {
    /// Number of posted receive work requests.
    pub fn receives(&self) -> u32 {
        u32::from(self.receive_queue) + SPARE_RECEIVES
    }

    /// Slots of the send queue.
    pub fn send_places(&self) -> u32 {
        u32::from(self.send_queue) + CONTROL_PLACES
    }

    /// Reduces the sizes to the daemon's limits. Lists for the peer are sent inline, so the inline
    /// size is at least that of a list entry.
    pub fn within(&self, limits: &Limits) -> Sizes {
        let most = |spare: u32| {
            let most = limits.max_qp_wr.saturating_sub(spare);
            u16::try_from(most).unwrap_or(u16::MAX - 1)
        };
        Sizes {
            send_queue: self.send_queue.clamp(LEAST_QUEUE, most(CONTROL_PLACES)),
            receive_queue: self.receive_queue.clamp(LEAST_QUEUE, most(SPARE_RECEIVES)),
            inline: self.inline.clamp(32, MOST_INLINE as u16),
            ..*self
        }
    }
}

/// Options set by the program.
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub sizes: Sizes,
    pub receive_timeout: Option<Duration>,
    pub send_timeout: Option<Duration>,
    pub linger: Option<c_int>,
    /// Stored options without another effect, by level and name.
    pub numbers: BTreeMap<(c_int, c_int), c_int>,
}

impl Options {
    fn is_set(&self, level: c_int, name: c_int) -> bool {
        self.numbers
            .get(&(level, name))
            .is_some_and(|value| *value != 0)
    }

    /// SO_REUSEADDR
    pub fn reuse(&self) -> bool {
        self.is_set(libc::SOL_SOCKET, libc::SO_REUSEADDR)
    }

    /// IPV6_V6ONLY
    pub fn v6_only(&self) -> bool {
        self.is_set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY)
    }
}
