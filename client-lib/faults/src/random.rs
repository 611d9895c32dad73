//! Random numbers of a seed.

/// Generator of 64-bit numbers (splitmix64 by Sebastiano Vigna, <https://prng.di.unimi.it/splitmix64.c>).
#[derive(Debug, Clone)]
pub struct Random(u64);

/// Increment of splitmix64: 2⁶⁴ divided by the golden ratio.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Finalizer of splitmix64.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

impl Random {
    /// Creates a generator from a seed and the numbers that tell it from others of the seed.
    pub fn derive(seed: u64, parts: &[u64]) -> Random {
        let fold = |state: u64, part: &u64| mix(state.wrapping_add(GAMMA)) ^ mix(part ^ GAMMA);
        Random(parts.iter().fold(seed, fold))
    }

    /// Draws a number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// Draws a number from 0 to 1, without 1.
    pub fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws a number below `end`, which is at least 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generators_of_other_objects_draw_other_numbers() {
        let draw = |parts: &[u64]| Random::derive(7, parts).next();
        assert_eq!(draw(&[1, 2]), draw(&[1, 2]));
        assert_ne!(draw(&[1, 2]), draw(&[2, 1]));
        assert_ne!(draw(&[1, 2]), draw(&[1, 3]));
        assert_ne!(draw(&[0]), draw(&[0, 0]));
        // The first number of seed 0 in the reference implementation.
        assert_eq!(Random(0).next(), 0xE220_A839_7B1D_CDAF);
    }

    #[test]
    fn shares_are_even() {
        let mut random = Random(3);
        let below = (0..10_000).filter(|_| random.share() < 0.1).count();
        assert!((900..1100).contains(&below), "{below}");
    }
}
