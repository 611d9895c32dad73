//! Upper bounds of this machine, measured on the client's core while the daemon idles. `siw-perf`
//! measures them before and after a transfer and uses the better result.
//!
//! The bound of a bandwidth is the whole path of a transfer, as fast as one core can do it: FPDU by
//! FPDU the CRC at the sender (by reference, or with a copy in one pass), segments over a ring pair,
//! CRC and copy at the receiver. It has no TCP, no queues of applications and no protocol state, and
//! works on memory of the transfer's size, so it is in the cache where the transfer is. A transfer
//! that exceeds it was measured wrongly, or its bound was.
//!
//! The parts of the path are measured too, each alone: raw frames, CRC, CRC and copy. The frames are
//! those of the transfer: each message is segmented into FPDUs of one TCP segment each (RFC 5044
//! section 4.5), and a frame holds the headers, the payload, and four bytes of CRC.

mod framing;
mod raw_link;

pub use framing::Framing;

use crate::measurement::gigabits_per_second;
use crate::plan::{MeasurementPlan, Mode};
use crate::raw::PayloadWay;
use anyhow::anyhow;
use framing::{BOUND_TIME, Piece, SCRATCH_BYTES};
pub use raw_link::RawLink;
use raw_link::{COPIED_FRAME_MAX, PathWork};
use serde::{Deserialize, Serialize};
use siw_memory::{crc, crc_copy};
use siw_shm::SharedMemory;
use siw_shm::shared_memory::PageSize;
use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Bytes between two clock readings, which cost as much as a small message.
const CLOCK_BYTES: usize = 256 << 10;

/// The bounds in Gb/s of payload; `None` if not measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Bound {
    /// Raw frames over a ring pair: the better of the two variants below.
    pub raw_gbps: Option<f64>,
    /// Raw frames with the payload copied behind the headers.
    #[serde(default)]
    pub raw_copy_gbps: Option<f64>,
    /// Raw frames with the payload in a segment that refers to it.
    #[serde(default)]
    pub raw_reference_gbps: Option<f64>,
    /// CRC32c and copy, one after the other for each FPDU.
    pub copy_crc_gbps: Option<f64>,
    /// CRC32c alone.
    pub crc_gbps: Option<f64>,
    /// Copying alone: used if the connection has no CRC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy_gbps: Option<f64>,
    /// All steps of the transfer on one core: the bound of its bandwidth. `None` also in results from
    /// before it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_gbps: Option<f64>,
    /// Median round trip of a message over the rings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw_rtt_us: Option<f64>,
}

impl Bound {
    /// The better of two measurements.
    pub fn better_of(self, other: Bound) -> Bound {
        Bound {
            raw_gbps: max(self.raw_gbps, other.raw_gbps),
            raw_copy_gbps: max(self.raw_copy_gbps, other.raw_copy_gbps),
            raw_reference_gbps: max(self.raw_reference_gbps, other.raw_reference_gbps),
            copy_crc_gbps: max(self.copy_crc_gbps, other.copy_crc_gbps),
            crc_gbps: max(self.crc_gbps, other.crc_gbps),
            copy_gbps: max(self.copy_gbps, other.copy_gbps),
            path_gbps: max(self.path_gbps, other.path_gbps),
            raw_rtt_us: match (self.raw_rtt_us, other.raw_rtt_us) {
                (Some(own), Some(other)) => Some(own.min(other)),
                (own, other) => own.or(other),
            },
        }
    }
}

/// The greater of two optional numbers; a missing one is ignored.
fn max(first: Option<f64>, second: Option<f64>) -> Option<f64> {
    match (first, second) {
        (Some(first), Some(second)) => Some(first.max(second)),
        _ => first.or(second),
    }
}

/// Memory and a link like those of the transfer, for measuring the bounds.
pub struct Bounds {
    plan: MeasurementPlan,
    framing: Framing,
    src: Arc<SharedMemory>,
    dst: SharedMemory,
    link: Option<RawLink>,
    crc: bool,
    /// The link cuts segments itself.
    tso: bool,
    round_trip: bool,
}

impl Bounds {
    /// Allocates memory like the transfer's (`huge`: hugepages), and takes a ring pair if its link
    /// is one, which takes super-segments if `tso` is set.
    pub fn new(
        plan: MeasurementPlan,
        framing: Framing,
        huge: bool,
        link: Option<RawLink>,
        [crc, tso]: [bool; 2],
    ) -> anyhow::Result<Bounds> {
        let pages = if huge {
            PageSize::TryHuge
        } else {
            PageSize::Normal
        };
        let memory = |len: usize| {
            let region = SharedMemory::create_memfd("siw-perf", len, pages)
                .map_err(|error| anyhow!("memory for the bounds: {error}"))?;
            let page = [0x5a; 4096];
            for at in (0..region.len()).step_by(page.len()) {
                region.write(at, &page)?;
            }
            anyhow::Ok(region)
        };
        Ok(Bounds {
            plan,
            framing,
            src: Arc::new(memory(plan.initiator_bytes())?),
            dst: memory(plan.target_bytes())?,
            link,
            crc,
            tso,
            round_trip: plan.mode == Mode::Lat,
        })
    }

    /// Returns the link for reuse, since DPDK's environment can be started only once per process.
    pub fn into_link(self) -> Option<RawLink> {
        self.link
    }

    /// Measures everything once.
    pub fn measure_all(&mut self) -> anyhow::Result<Bound> {
        let (src, dst) = (self.src.clone(), &self.dst);
        let copy_crc = self.measure_memory_work(|from, to, length| {
            black_box(crc::crc32c_append_shared(0, &src, from, length)?);
            src.copy_to(from, dst, to, length)
                .map_err(anyhow::Error::new)
        })?;
        let crc = self.measure_memory_work(|from, _, length| {
            black_box(crc::crc32c_append_shared(0, &src, from, length)?);
            Ok(())
        })?;
        let copy = if self.crc {
            None
        } else {
            Some(self.measure_memory_work(|from, to, length| {
                src.copy_to(from, dst, to, length)
                    .map_err(anyhow::Error::new)
            })?)
        };
        let path = match self.plan.mode {
            Mode::Bw => self.measure_path()?,
            Mode::Lat => None,
        };
        let (mut by_copy, mut by_reference, mut rtt) = (None, None, None);
        if let Some(link) = &mut self.link {
            let (plan, framing) = (&self.plan, self.framing);
            if framing.longest_frame(plan.size as usize) <= COPIED_FRAME_MAX {
                by_copy = Some(link.measure_stream(plan, framing, PayloadWay::Copy, &self.src)?);
            }
            let by = PayloadWay::Reference;
            by_reference = Some(link.measure_stream(plan, framing, by, &self.src)?);
            if self.round_trip {
                let way = match by_copy {
                    Some(_) => PayloadWay::Copy,
                    None => PayloadWay::Reference,
                };
                rtt = Some(link.measure_round_trip(plan, framing, way, &self.src)?);
            }
        }
        Ok(Bound {
            raw_gbps: max(by_copy, by_reference),
            raw_copy_gbps: by_copy,
            raw_reference_gbps: by_reference,
            copy_crc_gbps: Some(copy_crc),
            crc_gbps: Some(crc),
            copy_gbps: copy,
            path_gbps: path,
            raw_rtt_us: rtt,
        })
    }

    /// Gb/s of the transfer's whole path on one core: the faster of payload by reference and copied.
    /// `None` without a link.
    fn measure_path(&mut self) -> anyhow::Result<Option<f64>> {
        let Some(link) = &mut self.link else {
            return Ok(None);
        };
        let (plan, framing, src, dst) = (&self.plan, self.framing, &self.src, &self.dst);
        let fpdus = framing.fpdus_per_segment(plan.size as usize, self.tso);
        let copy = |from, to, length| {
            src.copy_to(from, dst, to, length)
                .map_err(anyhow::Error::new)
        };
        if !self.crc {
            // By reference: copied payload takes one copy more.
            let work = PathWork {
                transmit: |_| Ok(()),
                receive: |piece: Piece| copy(piece.from, piece.to, piece.length),
            };
            return link.measure_path(plan, framing, fpdus, src, work).map(Some);
        }
        let by_reference = PathWork {
            transmit: |piece: Piece| {
                black_box(crc::crc32c_append_shared(0, src, piece.from, piece.length)?);
                Ok(())
            },
            receive: |piece: Piece| {
                black_box(crc::crc32c_append_shared(0, src, piece.from, piece.length)?);
                copy(piece.from, piece.to, piece.length)
            },
        };
        let by_reference = link.measure_path(plan, framing, fpdus, src, by_reference)?;
        let scratch = RefCell::new(vec![0; SCRATCH_BYTES]);
        let by_copy = PathWork {
            transmit: |piece: Piece| {
                let mut scratch = scratch.borrow_mut();
                let room = &mut scratch[piece.scratch..][..piece.length];
                black_box(crc_copy::read_with_crc(src, piece.from, room, 0)?);
                Ok(())
            },
            receive: |piece: Piece| {
                let scratch = scratch.borrow();
                let payload = &scratch[piece.scratch..][..piece.length];
                black_box(crc::crc32c_append(0, payload));
                dst.write(piece.to, payload).map_err(anyhow::Error::new)
            },
        };
        let by_copy = link.measure_path(plan, framing, fpdus, src, by_copy)?;
        Ok(Some(by_reference.max(by_copy)))
    }

    /// Gb/s of `work`, which is called with source offset, destination offset and length of each
    /// FPDU's payload, for all messages of the working set.
    fn measure_memory_work(
        &self,
        mut work: impl FnMut(usize, usize, usize) -> anyhow::Result<()>,
    ) -> anyhow::Result<f64> {
        let (size, stride) = (self.plan.size as usize, self.plan.slot_stride());
        let slots = self.plan.initiator_bytes() / stride;
        let to_slots = self.plan.target_bytes() / stride;
        let (mut message, mut bytes, mut unclocked) = (0, 0u64, 0);
        // One uncounted pass warms up pages and caches, as in the middle of a transfer.
        let mut start = Instant::now();
        let mut warm = false;
        loop {
            let (from, to) = ((message % slots) * stride, (message % to_slots) * stride);
            for (at, length) in self.framing.payload_ranges(size) {
                work(from + at, to + at, length)?;
            }
            message += 1;
            bytes += size as u64;
            unclocked += size;
            if unclocked >= CLOCK_BYTES || message == to_slots {
                unclocked = 0;
                let now = Instant::now();
                if !warm && (message >= to_slots || now - start > BOUND_TIME / 4) {
                    (warm, start, bytes) = (true, now, 0);
                } else if warm && now - start >= BOUND_TIME {
                    return Ok(gigabits_per_second(bytes, now - start));
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
        let best = a.better_of(b);
        assert_eq!(best.raw_gbps, Some(4.0));
        assert_eq!(best.raw_rtt_us, Some(2.0));
        assert_eq!(best.crc_gbps, Some(1.0));
        assert_eq!(best.copy_gbps, None);
    }

    #[test]
    fn a_bound_is_measured_over_rings_of_its_own() {
        let plan = MeasurementPlan {
            size: 4096,
            mode: Mode::Lat,
            ..example()
        };
        let framing = Framing::new(1500, false, plan.op);
        let link = match RawLink::new() {
            Ok(link) => link,
            Err(error) => {
                println!("skipped: {error}");
                return;
            }
        };
        let mut bounds = Bounds::new(plan, framing, false, Some(link), [false; 2]).unwrap();
        let b = bounds.measure_all().unwrap();
        assert_eq!(b.path_gbps, None, "a round trip has no bandwidth");
        for value in [
            b.raw_gbps,
            b.copy_crc_gbps,
            b.crc_gbps,
            b.copy_gbps,
            b.raw_rtt_us,
        ] {
            assert!(value.unwrap() > 0.0, "{b:?}");
        }
        // CRC alone is faster than copying with CRC, unless something interrupts it.
        let is_faster = |b: Bound| b.crc_gbps > b.copy_crc_gbps;
        let repeated = (0..50).any(|_| is_faster(bounds.measure_all().unwrap()));
        assert!(repeated, "{b:?}");
        // The whole path is measured with and without CRC, frame by frame and in super-segments.
        let bulk = MeasurementPlan {
            mode: Mode::Bw,
            ..plan
        };
        let mut link = bounds.into_link();
        for choices in [[false, false], [false, true], [true, false], [true, true]] {
            let mut bounds = Bounds::new(bulk, framing, false, link.take(), choices).unwrap();
            let path = bounds.measure_path().unwrap().unwrap();
            assert!(path > 0.0, "{choices:?}: {path}");
            link = bounds.into_link();
        }
        let mut without = Bounds::new(bulk, framing, false, None, [true; 2]).unwrap();
        assert_eq!(without.measure_path().unwrap(), None);
    }
}
