//! The control line of a queue pair: registered memory in which two processes tell each other
//! how far a measurement is, by RDMA WRITE.
//!
//! ```text
//!  at the target     0: messages sent u64                                   31: done
//!  at the initiator  0: wrong messages u64  8: credits u8  16: compared u64  31: done
//! ```
//! A SEND without a posted receive ends an iWARP stream, so SENDs need credits: the
//! target's count of posted receives, in batches, modulo 256.

use crate::plan::Plan;

/// Bytes of a control line; each queue pair has one.
pub const LINE: usize = 64;
/// Where the count of credits is, one byte.
pub const OFF_CREDITS: usize = 8;
/// Where the number of compared messages is, 8 bytes.
pub const OFF_COMPARED: usize = 16;
/// Where the byte is that says that the rest of the line is there.
pub const OFF_DONE: usize = 31;
/// Bytes of a line as it is written at the end.
pub const END_LINE: usize = 32;

/// Receives in one credit.
pub fn batch(plan: &Plan) -> u64 {
    u64::from(plan.target_slots() / 8).max(1)
}
