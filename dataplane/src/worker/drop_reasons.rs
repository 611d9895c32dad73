//! Named reasons for which connections are refused, not made or lost, and datagrams dropped, counted by
//! each worker.

use siw_iwarp::TerminateCode;
use siw_iwarp::mpa::MpaError;

use super::messages::{ConnectFailure, DisconnectReason};

macro_rules! drop_reasons {
    ($(#[doc = $meaning:literal] $variant:ident = $name:literal;)*) => {
        /// Why a connection was refused, not made or lost, or a datagram dropped.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum DropReason { $(#[doc = $meaning] $variant),* }

        impl DropReason {
            /// All reasons.
            pub const ALL: &[DropReason] = &[$(DropReason::$variant),*];

            /// Name in status output and metrics.
            pub fn name(self) -> &'static str {
                match self { $(DropReason::$variant => $name),* }
            }

            /// Human-readable meaning.
            pub fn meaning(self) -> &'static str {
                match self { $(DropReason::$variant => $meaning.trim_ascii()),* }
            }
        }
    };
}

drop_reasons! {
    /// request refused: it has no MPA key
    MpaKey = "MPA_KEY";
    /// request refused: invalid MPA frame
    MpaFrame = "MPA_FRAME";
    /// request refused: MPA revision
    MpaRevision = "MPA_REVISION";
    /// request refused: more private data than private_data allows
    MpaPrivateData = "MPA_PRIVATE_DATA";
    /// request refused: the peer sent data before the reply
    MpaEarlyData = "MPA_EARLY_DATA";
    /// request refused: the peer wants markers, and markers = "never"
    MpaMarkers = "MPA_MARKERS";
    /// request refused: CRC
    MpaCrc = "MPA_CRC";
    /// request refused: no ready-to-receive message in common
    MpaRtr = "MPA_RTR";
    /// request refused: ORD of the peer above the IRD here
    MpaIrd = "MPA_IRD";
    /// connection closed: no MPA request within request_timeout_ms
    RequestTimeout = "MPA_REQUEST_TIMEOUT";
    /// connection reset: no byte in streaming mode within accept_timeout_ms, or the time that the application set
    StreamTimeout = "STREAM_TIMEOUT";
    /// request refused: the application did not answer within accept_timeout_ms
    AnswerTimeout = "ANSWER_TIMEOUT";
    /// request rejected by the application, or because its backlog is full
    ApplicationReject = "APPLICATION_REJECT";
    /// connection reset: pending_connections_per_user reached
    PendingLimit = "PENDING_LIMIT";
    /// connection reset: its listener is gone
    ListenerGone = "LISTENER_GONE";
    /// the peer left before its request was answered
    PeerGone = "PEER_GONE";
    /// not connected: rejected by the peer's application
    ConnectRejected = "CONNECT_REJECTED";
    /// not connected: nothing listens there
    ConnectRefused = "CONNECT_REFUSED";
    /// not connected: no neighbour or router answers
    ConnectUnreachable = "CONNECT_UNREACHABLE";
    /// not connected: no answer in time
    ConnectTimeout = "CONNECT_TIMEOUT";
    /// not connected: closed or reset during the set-up
    ConnectReset = "CONNECT_RESET";
    /// not connected: the peer's MPA frame is not acceptable
    ConnectProtocol = "CONNECT_PROTOCOL";
    /// not connected: no port, route or room on this side
    ConnectLocal = "CONNECT_LOCAL";
    /// not connected: a limit of the client or user
    ConnectQuota = "CONNECT_QUOTA";
    /// connection lost: reset by the peer
    PeerReset = "PEER_RESET";
    /// connection lost: the peer stopped answering
    PeerTimeout = "PEER_TIMEOUT";
    /// connection lost: closed within a message
    PeerClosed = "PEER_CLOSED";
    /// connection lost: Terminate received
    TerminateReceived = "TERMINATE_RECEIVED";
    /// connection lost: CRC error in a received FPDU
    FpduCrc = "FPDU_CRC";
    /// connection lost: invalid FPDU received
    FpduFrame = "FPDU_FRAME";
    /// connection lost: invalid DDP segment received
    DdpSegment = "DDP_SEGMENT";
    /// connection lost: SEND received without a receive work request
    DdpNoBuffer = "DDP_NO_BUFFER";
    /// connection lost: access of the peer to memory refused
    MemoryAccess = "MEMORY_ACCESS";
    /// connection lost: invalid RDMAP message received
    RdmapMessage = "RDMAP_MESSAGE";
    /// datagram dropped: its headers are incomplete or invalid
    UdMalformed = "UD_MALFORMED";
    /// datagram dropped: an operation of RoCE other than UD SEND (RC over RoCE is not served: siwd's RC is iWARP)
    UdOpcode = "UD_OPCODE";
    /// datagram dropped: wrong ICRC
    UdIcrc = "UD_ICRC";
    /// datagram dropped: no such queue pair of datagrams
    UdUnknownQueuePair = "UD_UNKNOWN_QP";
    /// datagram dropped: the P_Key is not the default one
    UdPkey = "UD_PKEY";
    /// datagram dropped: Q_Key of another queue pair
    UdQkey = "UD_QKEY";
    /// datagram dropped: no receive work request
    UdNoReceive = "UD_NO_RECEIVE";
    /// datagram not sent: no route, or the neighbour does not answer any more
    UdNotSent = "UD_NOT_SENT";
    /// management datagram dropped: of another class than communication management, or another message than SIDR
    MadUnsupported = "MAD_UNSUPPORTED";
    /// management datagram dropped: its sender, or all together, sent too many in this second
    MadFlood = "MAD_FLOOD";
    /// request for a datagram service refused: of another port space than RDMA_PS_UDP
    SidrUnserved = "SIDR_UNSERVED";
}

impl DropReason {
    /// Reason of a refused MPA request.
    pub fn of_request(error: MpaError) -> DropReason {
        match error {
            MpaError::BadKey => DropReason::MpaKey,
            MpaError::BadRevision(_) => DropReason::MpaRevision,
            MpaError::PrivateDataTooLong(_) => DropReason::MpaPrivateData,
            MpaError::TrailingBytes => DropReason::MpaEarlyData,
            MpaError::MarkersUnsupported => DropReason::MpaMarkers,
            MpaError::CrcRefused => DropReason::MpaCrc,
            MpaError::NoRtr => DropReason::MpaRtr,
            MpaError::InsufficientIrd { .. } => DropReason::MpaIrd,
            MpaError::BothInitiators
            | MpaError::UnexpectedReply
            | MpaError::OwnPrivateDataTooLong(_)
            | MpaError::EnhancedTooShort
            | MpaError::DepthsMissing
            | MpaError::EnhancedMismatch
            | MpaError::WrongState => DropReason::MpaFrame,
        }
    }

    /// Reason of a failed connect or accept.
    pub fn of_connect(failure: &ConnectFailure) -> DropReason {
        match failure {
            ConnectFailure::Rejected(_) => DropReason::ConnectRejected,
            ConnectFailure::Refused => DropReason::ConnectRefused,
            ConnectFailure::Unreachable => DropReason::ConnectUnreachable,
            ConnectFailure::TimedOut => DropReason::ConnectTimeout,
            ConnectFailure::Reset => DropReason::ConnectReset,
            ConnectFailure::Protocol(_) => DropReason::ConnectProtocol,
            ConnectFailure::Local(_) => DropReason::ConnectLocal,
            ConnectFailure::OverQuota(_) => DropReason::ConnectQuota,
        }
    }

    /// Reason of a lost connection.
    pub fn of_end(reason: &DisconnectReason) -> DropReason {
        match reason {
            DisconnectReason::Reset => DropReason::PeerReset,
            DisconnectReason::TimedOut => DropReason::PeerTimeout,
            DisconnectReason::TerminateReceived(_) => DropReason::TerminateReceived,
            DisconnectReason::TerminateSent(code) => DropReason::of_found_error(*code),
        }
    }

    fn of_found_error(code: TerminateCode) -> DropReason {
        const RDMAP: u8 = 0;
        const DDP: u8 = 1;
        /// Error type of RDMAP's remote protection errors, and of DDP's tagged buffers.
        const PROTECTION: u8 = 1;
        match code {
            TerminateCode::MPA_TCP_LOST => DropReason::PeerClosed,
            TerminateCode::MPA_CRC => DropReason::FpduCrc,
            TerminateCode::DDP_NO_BUFFER => DropReason::DdpNoBuffer,
            TerminateCode::DDP_TAGGED_VERSION => DropReason::DdpSegment,
            code if code.layer <= DDP && code.error_type == PROTECTION => DropReason::MemoryAccess,
            code if code.layer == RDMAP => DropReason::RdmapMessage,
            code if code.layer == DDP => DropReason::DdpSegment,
            _ => DropReason::FpduFrame,
        }
    }
}

/// Number of events by reason.
#[derive(Debug, Clone)]
pub struct DropCounts([u64; DropReason::ALL.len()]);

impl Default for DropCounts {
    fn default() -> Self {
        DropCounts([0; DropReason::ALL.len()])
    }
}

impl DropCounts {
    /// Counts an event.
    #[inline]
    pub fn count(&mut self, reason: DropReason) {
        self.0[reason as usize] += 1;
    }

    /// Adds the counts of another worker.
    pub fn merge(&mut self, other: &DropCounts) {
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            *sum += count;
        }
    }

    /// Each reason with its count.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::ALL.iter().copied().zip(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_name_of_its_own() {
        let mut names: Vec<&str> = DropReason::ALL.iter().map(|reason| reason.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DropReason::ALL.len());
        let mut counts = DropCounts::default();
        for reason in DropReason::ALL {
            counts.count(*reason);
        }
        assert!(counts.iter().all(|(_, count)| count == 1));
    }

    #[test]
    fn errors_of_the_peer_are_told_apart() {
        let of = |code| DropReason::of_end(&DisconnectReason::TerminateSent(code));
        for (code, reason) in [
            (TerminateCode::MPA_CRC, DropReason::FpduCrc),
            (TerminateCode::MPA_LENGTH, DropReason::FpduFrame),
            (TerminateCode::MPA_TCP_LOST, DropReason::PeerClosed),
            (TerminateCode::DDP_STAG, DropReason::MemoryAccess),
            (TerminateCode::DDP_MSN, DropReason::DdpSegment),
            (TerminateCode::DDP_NO_BUFFER, DropReason::DdpNoBuffer),
            (TerminateCode::RDMAP_ACCESS, DropReason::MemoryAccess),
            (TerminateCode::RDMAP_OPCODE, DropReason::RdmapMessage),
        ] {
            assert_eq!(of(code), reason, "{code}");
        }
    }
}
