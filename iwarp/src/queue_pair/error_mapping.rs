//! How an error of one layer appears in another: a failed key check as a Terminate code, a received
//! Terminate as a completion status, either as an asynchronous event (PROTOCOL.md sections 6 and 5.3).

use crate::ddp::QN_SEND;
use crate::environment::QpEvent;
use crate::rdmap::RdmapOpcode;
use crate::rdmap::terminate::TerminateCode;
use siw_memory::KeyError;
use siw_shm::WcStatus;

/// Why a tagged segment may not be placed (RFC 5041 section 7.1; access rights are a matter of
/// RDMAP, RFC 5040 section 7.2).
pub(crate) fn tagged_buffer_code(error: KeyError) -> TerminateCode {
    match error {
        KeyError::Stag => TerminateCode::DDP_STAG,
        KeyError::Access => TerminateCode::RDMAP_ACCESS,
        KeyError::Pd | KeyError::Stream => TerminateCode::DDP_NOT_ASSOCIATED,
        KeyError::Bounds => TerminateCode::DDP_BOUNDS,
        KeyError::Wrap => TerminateCode::DDP_WRAP,
    }
}

/// Why the source of a Read, or the target of an atomic, may not be accessed (RFC 5040 section 7.2).
pub(crate) fn remote_access_code(error: KeyError) -> TerminateCode {
    match error {
        KeyError::Stag => TerminateCode::RDMAP_STAG,
        KeyError::Access => TerminateCode::RDMAP_ACCESS,
        KeyError::Pd | KeyError::Stream => TerminateCode::RDMAP_NOT_ASSOCIATED,
        KeyError::Bounds => TerminateCode::RDMAP_BOUNDS,
        KeyError::Wrap => TerminateCode::RDMAP_WRAP,
    }
}

/// Why the peer may not invalidate an STag (RFC 5040 sections 5.3 and 7.2).
pub(crate) fn invalidation_code(error: KeyError) -> TerminateCode {
    match error {
        KeyError::Pd | KeyError::Stream => TerminateCode::RDMAP_CANNOT_INVALIDATE_PROT,
        _ => TerminateCode::RDMAP_CANNOT_INVALIDATE,
    }
}

/// Status of the work request that a received Terminate is about; `opcode`: of the message that it
/// quotes, if it quotes one. No buffer for a Read Request means that there are more than IRD.
pub(crate) fn completion_status(code: TerminateCode, opcode: Option<RdmapOpcode>) -> WcStatus {
    let takes_receive = opcode.and_then(RdmapOpcode::queue_number) == Some(QN_SEND);
    match (code.layer, code.error_type) {
        (0, 1) | (1, 1) => WcStatus::REM_ACCESS_ERR,
        // Local catastrophic errors are local to the peer: it could not do what it was asked for.
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

/// The event that reports an error to the consumer besides the completions.
pub(crate) fn event_for_code(code: TerminateCode) -> QpEvent {
    match (code.layer, code.error_type) {
        (0 | 1, 1) => QpEvent::QpAccessErr,
        (0 | 1, 2) => QpEvent::QpReqErr,
        _ => QpEvent::QpFatal,
    }
}

/// The vendor error of a completion: the Terminate code in one number.
pub(crate) fn vendor_error(code: TerminateCode) -> u32 {
    u32::from(code.layer) << 12 | u32::from(code.error_type) << 8 | u32::from(code.code)
}
