//! The control line of a queue pair: registered memory through which two processes exchange the
//! progress of a measurement by RDMA WRITE.
//!
//! ```text
//!  at the target     0: messages sent u64                                   31: done
//!  at the initiator  0: wrong messages u64  8: credits u8  16: compared u64  31: done
//! ```
//! A SEND without a posted receive ends an iWARP stream, so SENDs need credits: the target's count
//! of posted receives, in batches, modulo 256.

use crate::plan::MeasurementPlan;

/// Size of a control line; each queue pair has one at each end.
pub const CONTROL_LINE_BYTES: usize = 64;
/// Offset of the credit count, one byte.
pub const CREDITS_OFFSET: usize = 8;
/// Offset of the number of compared messages, 8 bytes.
pub const COMPARED_OFFSET: usize = 16;
/// Offset of the byte that marks the line as complete.
pub const DONE_OFFSET: usize = 31;
/// Size of the final write of a line.
pub const FINAL_LINE_BYTES: usize = 32;

/// Receives of the target that one credit stands for.
pub fn receives_per_credit(plan: &MeasurementPlan) -> u64 {
    u64::from(plan.target_slots() / 8).max(1)
}
