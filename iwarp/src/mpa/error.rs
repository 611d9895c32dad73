//! Errors of connection set-up.

use crate::rdmap::terminate::TerminateCode;
use serde::{Deserialize, Serialize};

/// Reason why a connection set-up failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum MpaError {
    /// The frame does not start with the key of RFC 5044 section 7.1.1.
    #[error("wrong MPA key: the peer does not use iWARP on this port")]
    BadKey,
    /// Both sides sent requests.
    #[error("peer sent an MPA request instead of a reply: both sides are initiators")]
    BothInitiators,
    /// A reply where a request belongs.
    #[error("peer sent an MPA reply instead of a request")]
    UnexpectedReply,
    /// A revision that is not supported.
    #[error("MPA revision {0} is not supported, only 1 and 2, up to `revision` in [device.mpa]")]
    BadRevision(u8),
    /// PD_Length above the RFC's 512, or above the configured limit.
    #[error("MPA frame has too much private data ({0} bytes)")]
    PrivateDataTooLong(u16),
    /// This side's own private data does not fit.
    #[error("private data of {0} bytes does not fit into an MPA frame")]
    OwnPrivateDataTooLong(usize),
    /// S=1 and fewer than four bytes.
    #[error("enhanced MPA frame is too short for its IRD and ORD")]
    EnhancedTooShort,
    /// Revision 1 without the depths that a Windows peer sends.
    #[error(
        "peer's private data does not begin with an IRD and an ORD above zero; it is no Windows peer, see `depths_in_private_data` in [device.mpa]"
    )]
    DepthsMissing,
    /// The S flag does not match the request.
    #[error("peer's reply lacks enhanced connection data, or has it unrequested")]
    EnhancedMismatch,
    /// Bytes arrived before it was the peer's turn to send.
    #[error("peer sent bytes after its MPA frame too early")]
    TrailingBytes,
    /// The peer requests markers.
    #[error("peer requests MPA markers, which this device is configured not to send")]
    MarkersUnsupported,
    /// The peer's reply does not enable the CRC.
    #[error("peer's reply does not enable the CRC that this device requires")]
    CrcRefused,
    /// No RTR kind in common.
    #[error("no ready-to-receive message that both sides support")]
    NoRtr,
    /// The IRD of one side is below the ORD of the other.
    #[error("peer's ORD {peer_ord} exceeds the {ird} inbound reads of this device")]
    InsufficientIrd {
        /// Outbound reads of the peer.
        peer_ord: u16,
        /// Inbound reads that this device can hold.
        ird: u16,
    },
    /// A call that is invalid in this state, such as accepting before a request arrived.
    #[error("MPA connection is in the wrong state for this call")]
    WrongState,
}

impl MpaError {
    /// The Terminate code that ends the stream, for the errors that have one (RFC 6581 section 8).
    pub fn terminate_code(self) -> Option<TerminateCode> {
        match self {
            Self::NoRtr => Some(TerminateCode::MPA_NO_RTR),
            Self::InsufficientIrd { .. } => Some(TerminateCode::MPA_INSUFFICIENT_IRD),
            // The reply is well-formed, but this side cannot comply with it.
            Self::MarkersUnsupported | Self::CrcRefused => Some(TerminateCode::MPA_CATASTROPHIC),
            _ => None,
        }
    }
}
