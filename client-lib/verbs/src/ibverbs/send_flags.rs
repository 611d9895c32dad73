//! Flags of send work requests.

use crate::abi::*;
use siw::{Error, WrFlags};

/// Converts flags of a request, except INLINE.
#[inline]
pub(super) fn to_flags(flags: u32) -> Result<WrFlags, Error> {
    let known = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
    if flags & !known != 0 {
        return Err(Error::Invalid("unknown send flags"));
    }
    let flag = |bit: u32, to: WrFlags| if flags & bit != 0 { to.0 } else { 0 };
    Ok(WrFlags(
        flag(IBV_SEND_FENCE, WrFlags::FENCE)
            | flag(IBV_SEND_SIGNALED, WrFlags::SIGNALED)
            | flag(IBV_SEND_SOLICITED, WrFlags::SOLICITED),
    ))
}
