//! The control line of a queue pair: registered memory in which two processes tell each other
//! how far a measurement is, by RDMA WRITE.
//!
//! ```text
//!  at the target     0: messages sent u64                                   31: done
//!  at the initiator  0: wrong messages u64  8: credits u8  16: compared u64  31: done
//! ```
//! A SEND without a posted receive ends an iWARP stream, so SENDs need credits: the
//! target's count of posted receives, in batches, modulo 256.

use crate::plan::MeasurementPlan;

/// Bytes of a control line; each queue pair has one at each end.
pub const CONTROL_LINE_BYTES: usize = 64;
/// Where the count of credits is, one byte.
pub const CREDITS_OFFSET: usize = 8;
/// Where the number of compared messages is, 8 bytes.
pub const COMPARED_OFFSET: usize = 16;
/// Where the byte is that says that the rest of the line is there.
pub const DONE_OFFSET: usize = 31;
/// Bytes of a line as it is written at the end.
pub const FINAL_LINE_BYTES: usize = 32;

/// How many receives of the target one credit stands for.
pub fn receives_per_credit(plan: &MeasurementPlan) -> u64 {
    u64::from(plan.target_slots() / 8).max(1)
}
