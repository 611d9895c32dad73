//! The state of a connection.

/// States of RFC 9293 section 3.3.2. LISTEN is not a connection state here, see
/// [`crate::Stack::listen`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TcpState {
    /// Our SYN is sent (SYN-SENT).
    SynSent,
    /// The peer's SYN is received and answered (SYN-RECEIVED).
    SynReceived,
    /// Data flows in both directions (ESTABLISHED).
    Established,
    /// We closed; our FIN is not acknowledged (FIN-WAIT-1).
    FinWait1,
    /// We closed; our FIN is acknowledged, the peer has not closed (FIN-WAIT-2).
    FinWait2,
    /// The peer closed, we have not (CLOSE-WAIT).
    CloseWait,
    /// Both closed at the same time; our FIN is not acknowledged (CLOSING).
    Closing,
    /// The peer closed first, then we; our FIN is not acknowledged (LAST-ACK).
    LastAck,
    /// Both closed; the connection waits for late segments (TIME-WAIT).
    TimeWait,
    /// The connection is over (CLOSED).
    Closed,
}

impl TcpState {
    /// Name of the state as ss(8) prints it.
    pub fn name(self) -> &'static str {
        match self {
            TcpState::SynSent => "SYN-SENT",
            TcpState::SynReceived => "SYN-RECV",
            TcpState::Established => "ESTAB",
            TcpState::FinWait1 => "FIN-WAIT-1",
            TcpState::FinWait2 => "FIN-WAIT-2",
            TcpState::CloseWait => "CLOSE-WAIT",
            TcpState::Closing => "CLOSING",
            TcpState::LastAck => "LAST-ACK",
            TcpState::TimeWait => "TIME-WAIT",
            TcpState::Closed => "UNCONN",
        }
    }
}
