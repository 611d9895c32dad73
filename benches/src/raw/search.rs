//! Search for the highest rate without loss, RFC 2544 section 26.1: trials at rates between the
//! highest one that lost nothing and the lowest one that lost something.

use serde::{Deserialize, Serialize};

/// The search ends when the two rates differ by this share of the first trial's rate.
const RESOLUTION: f64 = 0.005;

/// One trial of a search.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RateTrial {
    /// Offered million frames per second.
    pub offered_mframes: f64,
    /// Frames offered.
    pub frames: u64,
    /// Frames that did not arrive.
    pub lost: u64,
}

/// State of a search.
#[derive(Debug, Clone, Copy)]
pub(super) struct RateSearch {
    /// Frames per second of the first trial.
    first: f64,
    /// Highest rate that lost nothing.
    low: f64,
    /// Lowest rate that lost something.
    high: Option<f64>,
}

impl RateSearch {
    /// Begins with a trial at `first` frames per second.
    pub(super) fn new(first: f64) -> RateSearch {
        RateSearch {
            first,
            low: 0.0,
            high: None,
        }
    }

    /// Rate of the next trial in frames per second; `None` once the search is over.
    pub(super) fn next_rate(&self) -> Option<f64> {
        match self.high {
            None if self.low == 0.0 => Some(self.first),
            None => None,
            Some(high) if high - self.low <= RESOLUTION * self.first => None,
            Some(high) => Some((self.low + high) / 2.0),
        }
    }

    /// Records a trial.
    pub(super) fn record(&mut self, rate: f64, lost: u64) {
        match lost {
            0 => self.low = rate,
            _ => self.high = Some(rate),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(first: f64, capacity: f64) -> (f64, usize) {
        let mut search = RateSearch::new(first);
        let mut trials = 0;
        while let Some(rate) = search.next_rate() {
            trials += 1;
            search.record(rate, u64::from(rate > capacity));
        }
        (search.low, trials)
    }

    #[test]
    fn the_highest_rate_without_loss_is_found() {
        let (rate, trials) = search(10e6, 3.21e6);
        assert!(rate <= 3.21e6 && rate > 3.15e6, "{rate}");
        assert!(trials < 12, "{trials}");
    }

    #[test]
    fn a_first_trial_without_loss_is_the_result() {
        assert_eq!(search(10e6, 11e6), (10e6, 1));
    }

    #[test]
    fn a_link_that_carries_nothing_ends_the_search() {
        let (rate, trials) = search(10e6, 0.0);
        assert_eq!(rate, 0.0);
        assert!(trials < 12, "{trials}");
    }
}
