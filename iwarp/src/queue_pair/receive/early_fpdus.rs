//! FPDUs that were placed or processed before the stream reached them, by their position in it.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

use crate::ddp::MAX_HDR_LEN;
use crate::mpa::OutOfOrderPolicy;
use crate::mpa::fpdu::FpduInfo;

/// Maximum number of remembered FPDUs; further ones are placed in order.
const MAX_PLACED_FPDUS: usize = 4096;

/// Maximum octets of a stream: at 400 Gbit/s it lasts for years.
const MAX_POSITION: u64 = 1 << 62;

/// An FPDU that was placed before its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct PlacedFpdu {
    /// Octets of the stream before the FPDU.
    position: u64,
    ulpdu_len: u16,
    hdr: [u8; MAX_HDR_LEN],
}

/// State of a queue pair's stream for out-of-order placement.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct OutOfOrderPlacement {
    pub policy: OutOfOrderPolicy,
    /// An FPDU spanned two pieces of the stream: the sender, or a device on the path, does not align
    /// FPDUs.
    pub is_unaligned: bool,
    /// Octets of the stream that were consumed.
    pub position: u64,
    /// Placed FPDUs, sorted by position.
    placed: VecDeque<PlacedFpdu>,
}

impl OutOfOrderPlacement {
    /// Creates the state of a stream with no placed FPDUs.
    pub fn new(policy: OutOfOrderPolicy) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }

    /// Returns whether a restored state is one that a stream can have.
    pub fn is_consistent(&self) -> bool {
        let is_sorted = self
            .placed
            .iter()
            .is_sorted_by(|one, next| one.position < next.position);
        is_sorted && self.placed.len() <= MAX_PLACED_FPDUS && self.position <= MAX_POSITION
    }

    /// Returns whether no placed FPDU waits for its turn.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.placed.is_empty()
    }

    /// Returns whether the alignment of FPDUs to segments still has to be observed.
    #[inline]
    pub fn is_watching_alignment(&self) -> bool {
        self.policy == OutOfOrderPolicy::Aligned && !self.is_unaligned
    }

    /// Removes the entry of the FPDU at `position`, whose turn it is. `true`: the same FPDU was
    /// already placed.
    #[cold]
    pub fn take(&mut self, position: u64, fpdu: &FpduInfo) -> bool {
        let is_past = |placed: &PlacedFpdu| placed.position < position;
        while self.placed.front().is_some_and(is_past) {
            self.placed.pop_front();
        }
        match self.placed.front() {
            Some(placed) if placed.position == position => {
                let is_same = placed.ulpdu_len == fpdu.ulpdu_len && placed.hdr == fpdu.hdr;
                self.placed.pop_front();
                is_same
            }
            _ => false,
        }
    }

    /// Returns whether an FPDU at `position` was placed and its turn has not come.
    pub fn is_placed(&self, position: u64) -> bool {
        self.search(position).is_ok()
    }

    /// Index of the placed FPDU at `position`, or the index to insert one at.
    fn search(&self, position: u64) -> Result<usize, usize> {
        self.placed
            .binary_search_by_key(&position, |placed| placed.position)
    }

    /// Index for [`insert`](Self::insert) of an FPDU at `position`. `None`: it is already there, and its
    /// placed data may be in use, or the queue is full.
    pub fn insertion_index(&self, position: u64) -> Option<usize> {
        if self.placed.len() >= MAX_PLACED_FPDUS {
            return None;
        }
        self.search(position).err()
    }

    /// Remembers that the FPDU at `position` was placed.
    pub fn insert(&mut self, index: usize, position: u64, fpdu: &FpduInfo) {
        let placed = PlacedFpdu {
            position,
            ulpdu_len: fpdu.ulpdu_len,
            hdr: fpdu.hdr,
        };
        self.placed.insert(index, placed);
    }
}

/// FPDUs processed ahead of a waiting message.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessedAhead {
    /// Stream position of the waiting message.
    pub waiting_at: u64,
    /// Stream position of the first FPDU not examined.
    pub examined_to: u64,
    /// Number of FPDUs examined behind this message.
    pub examined: u32,
    /// Stream positions of the processed FPDUs, ascending.
    pub processed: VecDeque<u64>,
}

impl ProcessedAhead {
    /// Returns whether a restored state is one that a stream can have.
    pub fn is_consistent(&self) -> bool {
        (self.waiting_at..=MAX_POSITION).contains(&self.examined_to)
    }

    /// Returns whether the FPDU at this stream position was processed, and forgets it.
    #[inline]
    pub fn take(&mut self, position: u64) -> bool {
        let is_next = self.processed.front() == Some(&position);
        if is_next {
            self.processed.pop_front();
        }
        is_next
    }
}
