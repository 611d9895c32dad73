//! Judges the target's sending as a whole: the place of FPDUs in segments, the size of both, what was sent
//! again, and whether every octet is right.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Found, Script};
use crate::case::Alternative;
use crate::stream::{Event, SeenFpdu, Stream};
use crate::tcp::SeenSegment;
use crate::wire::opcode;

/// Octet at a place of the agent's memory after `agent fill pattern=1`.
fn pattern(at: u64) -> u8 {
    (at % 251) as u8
}

/// Payload of the FPDUs, Terminates aside.
fn payload(seen: &[SeenFpdu]) -> u64 {
    let segments = seen.iter().filter_map(|s| s.segment.as_ref());
    segments
        .filter(|s| s.opcode != opcode::TERMINATE)
        .map(|s| s.payload.len() as u64)
        .sum()
}

fn percent(part: usize, all: usize) -> u64 {
    (100 * part).checked_div(all).unwrap_or(0) as u64
}

/// Value of a field of the flow.
fn value(stream: &Stream, name: &str) -> Option<u64> {
    let seen = &stream.seen;
    let fpdus = || seen.iter().map(|s| &s.fpdu);
    let largest = || fpdus().map(|f| f.ulpdu.len()).max().unwrap_or(0);
    Some(match name {
        "octets" => payload(seen),
        "fpdus" => seen.len() as u64,
        "wrong" => seen.iter().map(|s| wrong(s, stream.lab_base)).sum(),
        "ulpdu" => largest() as u64,
        "least" => {
            let parts = seen
                .iter()
                .filter(|s| s.segment.as_ref().is_some_and(|segment| !segment.last));
            parts
                .map(|s| s.fpdu.ulpdu.len())
                .min()
                .unwrap_or_else(largest) as u64
        }
        "reads" => {
            let segments = seen.iter().filter_map(|s| s.segment.as_ref());
            segments
                .filter(|s| s.opcode == opcode::READ_REQUEST)
                .count() as u64
        }
        "markers" => fpdus().map(|f| u64::from(f.markers)).sum(),
        "most" => fpdus().map(|f| u64::from(f.markers)).max().unwrap_or(0),
        "between" => fpdus().filter(|f| f.marker_before).count() as u64,
        "beforecrc" => fpdus().filter(|f| f.marker_before_crc).count() as u64,
        "segments" => stream.tcp.seen.len() as u64,
        "segment" => stream
            .tcp
            .seen
            .iter()
            .map(|s| s.length)
            .max()
            .unwrap_or(0)
            .into(),
        "resent" => stream.tcp.seen.iter().filter(|s| s.is_repeated).count() as u64,
        "beyond" => stream.tcp.beyond.into(),
        "aligned" | "split" | "whole" | "skewed" => {
            let places = Places::of(stream);
            let whole = places.whole();
            match name {
                "aligned" => places.aligned(),
                "skewed" => places.skewed(),
                "split" => (seen.len() - whole) as u64,
                _ => percent(whole, seen.len()),
            }
        }
        _ => return None,
    })
}

/// Octets of a tagged FPDU that are not those of the pattern.
fn wrong(seen: &SeenFpdu, base: u64) -> u64 {
    let Some(segment) = seen.segment.as_ref().filter(|s| s.tagged) else {
        return 0;
    };
    let first = segment.to.wrapping_sub(base);
    let expected = (first..).map(pattern);
    let pairs = segment.payload.iter().zip(expected);
    pairs.filter(|(got, expected)| *got != expected).count() as u64
}

/// FPDUs and segments by their distance from the first of the FPDUs.
struct Places {
    /// First octet of each FPDU and the one behind it.
    fpdus: Vec<(i64, i64)>,
    segments: Vec<(i64, i64, bool)>,
}

impl Places {
    fn of(stream: &Stream) -> Places {
        let Some(first) = stream.seen.first() else {
            return Places {
                fpdus: Vec::new(),
                segments: Vec::new(),
            };
        };
        let distance = |seq: u32| i64::from(seq.wrapping_sub(first.seq) as i32);
        let fpdus: Vec<_> = stream
            .seen
            .iter()
            .map(|s| (distance(s.seq), distance(s.seq) + s.fpdu.length as i64))
            .collect();
        let end = fpdus.last().map_or(0, |(_, end)| *end);
        let place = |segment: &SeenSegment| {
            let begin = distance(segment.seq);
            (
                begin,
                begin + i64::from(segment.length),
                segment.is_repeated,
            )
        };
        let segments = stream.tcp.seen.iter().map(place);
        let segments = segments.filter(|(begin, ..)| (0..end).contains(begin));
        Places {
            segments: segments.collect(),
            fpdus,
        }
    }

    /// FPDUs that lie in one segment.
    fn whole(&self) -> usize {
        let is_whole = |fpdu: &&(i64, i64)| {
            let mut segments = self.segments.iter();
            segments.any(|(begin, end, _)| *begin <= fpdu.0 && fpdu.1 <= *end)
        };
        self.fpdus.iter().filter(is_whole).count()
    }

    /// Percentage of segments that begin with an FPDU, repeated ones aside.
    fn aligned(&self) -> u64 {
        let starts: BTreeSet<i64> = self.fpdus.iter().map(|(begin, _)| *begin).collect();
        let first: Vec<_> = self.segments.iter().filter(|s| !s.2).collect();
        let aligned = first.iter().filter(|s| starts.contains(&s.0)).count();
        percent(aligned, first.len())
    }

    /// Repeated segments that begin or end within an FPDU.
    fn skewed(&self) -> u64 {
        let borders: BTreeSet<i64> = self.fpdus.iter().flat_map(|f| [f.0, f.1]).collect();
        let repeated = self.segments.iter().filter(|s| s.2);
        let is_skewed = |s: &&(i64, i64, bool)| !borders.contains(&s.0) || !borders.contains(&s.1);
        repeated.filter(is_skewed).count() as u64
    }
}

impl Script<'_> {
    /// Receives until the FPDUs have this payload together; without a number until the time is over.
    fn gather(&mut self, octets: Option<u64>, within: Duration) -> Result<()> {
        let until = Instant::now() + within;
        let stream = self.stream()?;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let is_enough = octets.is_some_and(|octets| payload(&stream.seen) >= octets);
            if is_enough || left.is_zero() {
                return Ok(());
            }
            if matches!(stream.event(left), Event::Quiet | Event::Fin | Event::Reset) {
                return Ok(());
            }
        }
    }

    /// Compares the flow since the last look.
    pub(super) fn want_flow(&mut self, wanted: &Alternative) -> Result<bool> {
        let mut octets = None;
        for comparison in wanted.comparisons.iter().filter(|c| c.field == "octets") {
            let crate::case::Value::Expr(expr) = &comparison.value else {
                bail!("octets is a number");
            };
            octets = Some(self.number(expr)?);
        }
        let otherwise = octets.map_or(self.target.quiet, |_| self.target.patience);
        self.gather(octets, wanted.within.unwrap_or(otherwise))?;
        let (mut actual, mut is_good) = (Vec::new(), true);
        for comparison in &wanted.comparisons {
            let name = comparison.field.as_str();
            let found = value(self.stream()?, name)
                .with_context(|| format!("{name} is no property of a flow"))?;
            actual.push(format!("{name} {found}"));
            is_good &= self.holds(comparison, &Found::Number(found))?;
        }
        let stream = self.stream()?;
        stream.seen.clear();
        stream.tcp.seen.clear();
        stream.tcp.beyond = 0;
        self.decide(wanted, is_good, &actual.join(", "))
    }

    /// Receives segments until this many octets of data have come, acknowledging them.
    pub(super) fn await_octets(&mut self, octets: u64) -> Result<()> {
        let patience = self.target.patience;
        let until = Instant::now() + patience;
        let tcp = &mut self.stream()?.tcp;
        let first = |tcp: &crate::tcp::Tcp| -> u64 {
            let first = tcp.seen.iter().filter(|s| !s.is_repeated);
            first.map(|s| u64::from(s.length)).sum()
        };
        while first(tcp) < octets && tcp.ending.is_none() {
            if !tcp.pump(until) {
                bail!("{octets} octets did not come within {patience:?}");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three FPDUs of 100 octets.
    fn places(segments: &[(i64, i64, bool)]) -> Places {
        Places {
            fpdus: vec![(0, 100), (100, 200), (200, 300)],
            segments: segments.to_vec(),
        }
    }

    #[test]
    fn fpdus_in_segments_of_their_own_are_whole_and_aligned() {
        let one = places(&[(0, 100, false), (100, 200, false), (200, 300, false)]);
        assert_eq!((one.whole(), one.aligned(), one.skewed()), (3, 100, 0));
        let together = places(&[(0, 300, false)]);
        assert_eq!((together.whole(), together.aligned()), (3, 100));
    }

    #[test]
    fn a_segment_that_ends_within_an_fpdu_splits_it() {
        let cut = places(&[(0, 150, false), (150, 300, false)]);
        assert_eq!((cut.whole(), cut.aligned(), cut.skewed()), (2, 50, 0));
    }

    #[test]
    fn a_repeated_segment_counts_by_its_borders_alone() {
        let right = places(&[(0, 100, false), (200, 300, false), (100, 200, true)]);
        assert_eq!((right.aligned(), right.skewed()), (100, 0));
        let wrong = places(&[(0, 100, false), (200, 300, false), (100, 190, true)]);
        assert_eq!((wrong.whole(), wrong.skewed()), (2, 1));
    }

    #[test]
    fn octets_are_compared_with_the_pattern_of_their_place() {
        let octets: Vec<u8> = (300..340).map(pattern).collect();
        let mut seen = SeenFpdu {
            seq: 0,
            fpdu: crate::wire::Fpdu {
                ulpdu: Vec::new(),
                crc_good: true,
                pad_zero: true,
                markers: 0,
                markers_right: true,
                marker_before: false,
                marker_before_crc: false,
                length: 60,
            },
            segment: Some(crate::wire::Segment {
                tagged: true,
                to: 1300,
                payload: octets,
                ..crate::wire::Segment::default()
            }),
        };
        assert_eq!(wrong(&seen, 1000), 0);
        if let Some(segment) = &mut seen.segment {
            segment.payload[7] ^= 1;
        }
        assert_eq!(wrong(&seen, 1000), 1);
    }
}
