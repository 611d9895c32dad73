//! Deliberate loss of frames on the embedded pair (`loss`), for tests of programs on a bad network.

use std::hash::{BuildHasher, RandomState};

/// Reason of these drops in status output, and its meaning.
pub const CONFIGURED_LOSS: &str = "CONFIGURED_LOSS";
/// The meaning of [`CONFIGURED_LOSS`].
pub const MEANING_OF_LOSS: &str = "frames lost on purpose, as `loss` says";

/// Loses a share of the frames at random, each independently of the others.
pub struct FrameLoss {
    state: u64,
    /// A frame is lost if its random number is below.
    threshold: u64,
}

impl FrameLoss {
    /// Loses the share `loss` of all frames, between 0 and 1; `None` for 0.
    pub fn new(loss: f64) -> Option<FrameLoss> {
        (loss > 0.0).then(|| FrameLoss {
            state: RandomState::new().hash_one(0),
            threshold: (loss * u64::MAX as f64) as u64,
        })
    }

    /// Decides about the next frame.
    pub fn loses_next(&mut self) -> bool {
        // SplitMix64.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) < self.threshold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_lost() {
        let mut loss = FrameLoss::new(0.1).unwrap();
        let lost = (0..100_000).filter(|_| loss.loses_next()).count();
        assert!((9_000..11_000).contains(&lost), "{lost}");
        assert!(FrameLoss::new(0.0).is_none());
    }
}
