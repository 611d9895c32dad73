//! How errors of one layer look in another: key check -> Terminate code, received Terminate ->
//! completion status, either -> asynchronous event (protocol.md sections 3 to 5).

use crate::environment::QpEvent;
use crate::rdmap::terminate::TerminateCode;
use siw_memory::KeyError;
use siw_shm::WcStatus;

/// A tagged segment may not be placed (RFC 5041 section 7.2; access rights are RDMAP's, RFC 5040
/// section 7.2).
pub(crate) fn tagged(e: KeyError) -> TerminateCode {
    match e {
        KeyError::Stag => TerminateCode::DDP_STAG,
        KeyError::Access => TerminateCode::RDMAP_ACCESS,
        KeyError::Pd | KeyError::Stream => TerminateCode::DDP_NOT_ASSOCIATED,
        KeyError::Bounds => TerminateCode::DDP_BOUNDS,
        KeyError::Wrap => TerminateCode::DDP_WRAP,
    }
}

/// The source of a Read may not be read (RFC 5040 section 7.2).
pub(crate) fn read_source(e: KeyError) -> TerminateCode {
    match e {
        KeyError::Stag => TerminateCode::RDMAP_STAG,
        KeyError::Access => TerminateCode::RDMAP_ACCESS,
        KeyError::Pd | KeyError::Stream => TerminateCode::RDMAP_NOT_ASSOCIATED,
        KeyError::Bounds => TerminateCode::RDMAP_BOUNDS,
        KeyError::Wrap => TerminateCode::RDMAP_WRAP,
    }
}

/// Status of the work request that a received Terminate is about.
pub(crate) fn status_of(c: TerminateCode) -> WcStatus {
    match (c.layer, c.error_type) {
        (0, 1) | (1, 1) => WcStatus::REM_ACCESS_ERR,
        (0, 2) => WcStatus::REM_OP_ERR,
        (1, 2) if c == TerminateCode::DDP_TOO_LONG => WcStatus::REM_INV_REQ_ERR,
        (1, 2) => WcStatus::REM_OP_ERR,
        (2, _) => WcStatus::GENERAL_ERR,
        _ => WcStatus::FATAL_ERR,
    }
}

/// What the consumer hears besides completions.
pub(crate) fn event_of(c: TerminateCode) -> QpEvent {
    match (c.layer, c.error_type) {
        (0 | 1, 1) => QpEvent::QpAccessErr,
        (0 | 1, 2) => QpEvent::QpReqErr,
        _ => QpEvent::QpFatal,
    }
}

/// Vendor error of a completion: the Terminate code in one number.
pub(crate) fn vendor(c: TerminateCode) -> u32 {
    u32::from(c.layer) << 12 | u32::from(c.error_type) << 8 | u32::from(c.code)
}
