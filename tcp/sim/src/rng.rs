//! The random number generator of the simulated network.

/// SplitMix64: fast, deterministic and the same on every platform.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator; the same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }
    /// Returns the next number, uniform over all 64-bit numbers.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Returns a number in `0..bound`; 0 if the range is empty.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            0
        } else {
            self.next_u64() % bound
        }
    }
    /// Returns a number between the two, uniform on a logarithmic scale.
    pub fn log_uniform(&mut self, low: u64, high: u64) -> u64 {
        let (low_bits, high_bits) = ((low as f64).ln(), (high as f64).ln());
        let part = self.below(1 << 20) as f64 / f64::from(1 << 20);
        (low_bits + (high_bits - low_bits) * part).exp() as u64
    }
    /// Returns `true` with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        ((self.next_u64() >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}
