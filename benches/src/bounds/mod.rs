//! What this machine can do at most, measured on the client's core while the
//! daemon idles: raw frames over a ring pair, copying with CRC32c, CRC32c alone.
//! Called before and after a transfer; the better of both counts.
//!
//! The frames are those of the transfer: each message is cut into FPDUs of one
//! segment (RFC 5044 section 4.5), and a frame is a buffer with the headers, an
//! external buffer with the payload, and the four bytes of CRC behind it. Payload
//! that the daemon copies instead of referring to it is copied here, too.

mod framing;
mod raw_link;

pub use framing::Framing;

use crate::measurement::gbps;
use crate::plan::{Mode, Plan};
use framing::BOUND_TIME;
use raw_link::Link;
use serde::Serialize;
use siw_memory::crc;
use siw_shm::SharedMemory;
use siw_shm::shared_memory::PageSize;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Bytes between two looks at the clock.
const CLOCK_BYTES: usize = 256 << 10;

/// The bounds in Gb/s of payload; absent ones were not measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Bound {
    pub raw_gbps: Option<f64>,
    pub copy_crc_gbps: Option<f64>,
    pub crc_gbps: Option<f64>,
    /// Copying alone: counts when the connection has no CRC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy_gbps: Option<f64>,
    /// A message there and back over the rings, median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_rtt_us: Option<f64>,
}

impl Bound {
    /// What a transfer could reach if each byte costs what the parts cost one after
    /// the other: 1/(1/raw + 1/copy_crc + 1/crc). Without CRC 1/(1/raw + 1/copy).
    pub fn gbps(&self, crc: bool) -> Option<f64> {
        let cost = if crc {
            1.0 / self.raw_gbps? + 1.0 / self.copy_crc_gbps? + 1.0 / self.crc_gbps?
        } else {
            1.0 / self.raw_gbps? + 1.0 / self.copy_gbps?
        };
        Some(1.0 / cost)
    }

    /// The better of two measurements.
    pub fn best(self, other: Bound) -> Bound {
        let max = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.max(b)),
            (a, b) => a.or(b),
        };
        Bound {
            raw_gbps: max(self.raw_gbps, other.raw_gbps),
            copy_crc_gbps: max(self.copy_crc_gbps, other.copy_crc_gbps),
            crc_gbps: max(self.crc_gbps, other.crc_gbps),
            copy_gbps: max(self.copy_gbps, other.copy_gbps),
            raw_rtt_us: match (self.raw_rtt_us, other.raw_rtt_us) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            },
        }
    }
}

/// Memory and a link like those of the transfer.
pub struct Bounds {
    plan: Plan,
    framing: Framing,
    src: Arc<SharedMemory>,
    dst: SharedMemory,
    link: Option<Link>,
    crc: bool,
    round_trip: bool,
}

impl Bounds {
    /// Takes memory like the transfer's, and a ring pair if its link is one. The
    /// thread that measures calls it.
    pub fn new(
        plan: Plan,
        framing: Framing,
        huge: bool,
        ring_pair: bool,
        crc: bool,
    ) -> Result<Bounds, String> {
        let pages = if huge {
            PageSize::TryHuge
        } else {
            PageSize::Normal
        };
        let memory = |len: usize| {
            let r = SharedMemory::create_memfd("siw-perf", len, pages)
                .map_err(|e| format!("memory for the bounds: {e}"))?;
            let page = [0x5a; 4096];
            for at in (0..r.len()).step_by(page.len()) {
                r.write(at, &page).map_err(|e| e.to_string())?;
            }
            Ok::<_, String>(r)
        };
        Ok(Bounds {
            plan,
            framing,
            src: Arc::new(memory(plan.initiator_bytes())?),
            dst: memory(plan.target_bytes())?,
            link: ring_pair.then(Link::new).transpose()?,
            crc,
            round_trip: plan.mode == Mode::Lat,
        })
    }

    /// Measures everything once.
    pub fn measure(&mut self) -> Result<Bound, String> {
        let oob = |e: siw_shm::OutOfBounds| e.to_string();
        let (src, dst) = (self.src.clone(), &self.dst);
        let copy_crc = self.walk(|from, to, n| {
            black_box(crc::crc32c_append_shared(0, &src, from, n).map_err(oob)?);
            src.copy_to(from, dst, to, n).map_err(oob)
        })?;
        let crc = self.walk(|from, _, n| {
            black_box(crc::crc32c_append_shared(0, &src, from, n).map_err(oob)?);
            Ok(())
        })?;
        let copy = if self.crc {
            None
        } else {
            Some(self.walk(|from, to, n| src.copy_to(from, dst, to, n).map_err(oob))?)
        };
        let (mut raw, mut rtt) = (None, None);
        if let Some(link) = &mut self.link {
            raw = Some(link.stream(&self.plan, self.framing, &self.src)?);
            if self.round_trip {
                rtt = Some(link.round_trip(&self.plan, self.framing, &self.src)?);
            }
        }
        Ok(Bound {
            raw_gbps: raw,
            copy_crc_gbps: Some(copy_crc),
            crc_gbps: Some(crc),
            copy_gbps: copy,
            raw_rtt_us: rtt,
        })
    }

    /// Gb/s of `work` over the FPDUs of all messages of the working set.
    fn walk(
        &self,
        mut work: impl FnMut(usize, usize, usize) -> Result<(), String>,
    ) -> Result<f64, String> {
        let (size, stride) = (self.plan.size as usize, self.plan.stride());
        let slots = self.plan.initiator_bytes() / stride;
        let to_slots = self.plan.target_bytes() / stride;
        let (mut i, mut bytes, mut unclocked) = (0, 0u64, 0);
        // Once without counting: pages and caches as in the middle of a transfer.
        let mut start = Instant::now();
        let mut warm = false;
        loop {
            let (from, to) = ((i % slots) * stride, (i % to_slots) * stride);
            for (at, n) in self.framing.pieces(size) {
                work(from + at, to + at, n)?;
            }
            i += 1;
            bytes += size as u64;
            unclocked += size;
            if unclocked >= CLOCK_BYTES || i == to_slots {
                unclocked = 0;
                let now = Instant::now();
                if !warm && (i >= to_slots || now - start > BOUND_TIME / 4) {
                    (warm, start, bytes) = (true, now, 0);
                } else if warm && now - start >= BOUND_TIME {
                    return Ok(gbps(bytes, now - start));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::example;

    #[test]
    fn the_bound_adds_the_costs_of_a_byte() {
        let b = Bound {
            raw_gbps: Some(100.0),
            copy_crc_gbps: Some(50.0),
            crc_gbps: Some(100.0),
            ..Bound::default()
        };
        // 10 + 20 + 10 ps a bit.
        assert!((b.gbps(true).unwrap() - 25.0).abs() < 1e-9);
        assert_eq!(b.gbps(false), None);
        let plain = Bound {
            copy_gbps: Some(100.0),
            ..b
        };
        assert!((plain.gbps(false).unwrap() - 50.0).abs() < 1e-9);
        assert_eq!(Bound::default().gbps(true), None);
    }

    #[test]
    fn the_better_of_two_measurements_counts() {
        let a = Bound {
            raw_gbps: Some(3.0),
            raw_rtt_us: Some(2.0),
            ..Bound::default()
        };
        let b = Bound {
            raw_gbps: Some(4.0),
            raw_rtt_us: Some(3.0),
            crc_gbps: Some(1.0),
            ..Bound::default()
        };
        let best = a.best(b);
        assert_eq!(best.raw_gbps, Some(4.0));
        assert_eq!(best.raw_rtt_us, Some(2.0));
        assert_eq!(best.crc_gbps, Some(1.0));
        assert_eq!(best.copy_gbps, None);
    }

    #[test]
    fn a_bound_is_measured_over_rings_of_its_own() {
        let plan = Plan {
            size: 4096,
            mode: Mode::Lat,
            ..example()
        };
        let framing = Framing::new(1500, false, plan.op);
        let mut bounds = match Bounds::new(plan, framing, false, true, false) {
            Ok(b) => b,
            Err(e) => {
                println!("skipped: {e}");
                return;
            }
        };
        let b = bounds.measure().unwrap();
        for value in [
            b.raw_gbps,
            b.copy_crc_gbps,
            b.crc_gbps,
            b.copy_gbps,
            b.raw_rtt_us,
        ] {
            assert!(value.unwrap() > 0.0, "{b:?}");
        }
        assert!(b.crc_gbps > b.copy_crc_gbps, "{b:?}");
    }
}
