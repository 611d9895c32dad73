//! Mapping of errors between layers: from failed key checks to Terminate codes, from received
//! Terminates to completion statuses, and from Terminate codes to asynchronous events (PROTOCOL.md
//! sections 6 and 5.3).

use crate::ddp::QN_SEND;
use crate::environment::QpEvent;
use crate::rdmap::RdmapOpcode;
use crate::rdmap::terminate::TerminateCode;
use siw_memory::KeyError;
use siw_shm::WcStatus;

/// Terminate code for a tagged segment that must not be placed (RFC 5041 section 7.1; access rights
/// belong to RDMAP, RFC 5040 section 7.2).
pub(crate) fn tagged_buffer_code(error: KeyError) -> TerminateCode {
    match error {
        KeyError::Stag => TerminateCode::DDP_STAG,
        KeyError::Access => TerminateCode::RDMAP_ACCESS,
        KeyError::Pd | KeyError::Stream => TerminateCode::DDP_NOT_ASSOCIATED,
        KeyError::Bounds => TerminateCode::DDP_BOUNDS,
        KeyError::Wrap => TerminateCode::DDP_WRAP,
    }
}

/// Terminate code for a failed check of a Read's source or an atomic's target (RFC 5040 section 7.2).
pub(crate) fn remote_access_code(error: KeyError) -> TerminateCode {
    match error {
        KeyError::Stag => TerminateCode::RDMAP_STAG,
        KeyError::Access => TerminateCode::RDMAP_ACCESS,
        KeyError::Pd | KeyError::Stream => TerminateCode::RDMAP_NOT_ASSOCIATED,
        KeyError::Bounds => TerminateCode::RDMAP_BOUNDS,
        KeyError::Wrap => TerminateCode::RDMAP_WRAP,
    }
}

/// Terminate code for an STag that the peer may not invalidate (RFC 5040 sections 5.3 and 7.2).
pub(crate) fn invalidation_code(error: KeyError) -> TerminateCode {
    match error {
        KeyError::Pd | KeyError::Stream => TerminateCode::RDMAP_CANNOT_INVALIDATE_PROT,
        _ => TerminateCode::RDMAP_CANNOT_INVALIDATE,
    }
}

/// Status of the work request that a received Terminate refers to. `opcode`: opcode of the message
/// that it quotes, if any. "No buffer" for a Read Request means that more than IRD are outstanding.
pub(crate) fn completion_status(code: TerminateCode, opcode: Option<RdmapOpcode>) -> WcStatus {
    let takes_receive = opcode.and_then(RdmapOpcode::queue_number) == Some(QN_SEND);
    match (code.layer, code.error_type) {
        (0, 1) | (1, 1) => WcStatus::REM_ACCESS_ERR,
        // Local catastrophic errors are local to the peer: it could not execute the request.
        (0, 0 | 2) | (1, 0) => WcStatus::REM_OP_ERR,
        (1, 2) if code == TerminateCode::DDP_TOO_LONG => WcStatus::REM_INV_REQ_ERR,
        (1, 2) if code == TerminateCode::DDP_NO_BUFFER && takes_receive => {
            WcStatus::RNR_RETRY_EXC_ERR
        }
        (1, 2) => WcStatus::REM_OP_ERR,
        (2, _) => WcStatus::GENERAL_ERR,
        _ => WcStatus::FATAL_ERR,
    }
}

/// The asynchronous event that reports an error to the consumer in addition to completions.
pub(crate) fn event_for_code(code: TerminateCode) -> QpEvent {
    match (code.layer, code.error_type) {
        (0 | 1, 1) => QpEvent::QpAccessErr,
        (0 | 1, 2) => QpEvent::QpReqErr,
        _ => QpEvent::QpFatal,
    }
}

/// The vendor error of a completion: the Terminate code as one number.
pub(crate) fn vendor_error(code: TerminateCode) -> u32 {
    u32::from(code.layer) << 12 | u32::from(code.error_type) << 8 | u32::from(code.code)
}
