//! The transmission control block (RFC 9293 section 3.3.1): the variables of a connection that every
//! segment accesses, in two cache lines, and the small types that they use.
//!
//! ```text
//! Tcb               the state, the flags, the timer, and what both directions need
//! ReceiveVariables  RCV.*, part of the Receiver
//! SendVariables     SND.*, part of the Sender
//! ```
//!
//! The rest of a connection is in [`crate::connection`].

pub(crate) mod flags;
pub(crate) mod receive_variables;
pub(crate) mod rtt;
pub(crate) mod send_variables;
pub(crate) mod timer;

use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::timer::Timer;

/// The window scale factors of both directions (RFC 7323 section 2.3), each at most 14.
#[derive(Clone, Copy, Default)]
pub(crate) struct WindowScales(u8);

impl WindowScales {
    /// `send`: shift of the peer's windows, `receive`: shift of ours.
    pub(crate) fn new(send: u8, receive: u8) -> Self {
        WindowScales(send << 4 | receive)
    }

    /// Returns the shift of the peer's windows.
    #[inline]
    pub(crate) fn send(self) -> u8 {
        self.0 >> 4
    }

    /// Returns the shift of our windows.
    #[inline]
    pub(crate) fn receive(self) -> u8 {
        self.0 & 15
    }

    /// Returns whether the ends agreed on window scaling, with a factor other than 0.
    #[inline]
    pub(crate) fn is_scaled(self) -> bool {
        self.0 != 0
    }
}

/// The state of a connection, its flags and timer, and what both directions need.
#[repr(C)]
pub(crate) struct Tcb {
    pub flags: ConnectionFlags,
    pub state: TcpState,
    /// Purpose of the running timer; see [`timer`].
    timer: Option<Timer>,
    pub scales: WindowScales,
    /// Keepalive probes without an answer.
    pub probes: u8,
    /// Sequence number of the peer's FIN once it has been seen (`FIN_SEEN`), in order or not.
    pub fin_at: SeqNr,
    /// Eff.snd.MSS (RFC 9293 section 3.7.1): payload bytes of a full segment.
    pub emss: u16,
    /// [`crate::Events`] not yet reported to the owner.
    pub events: u16,
    /// When the running timer fires, in ns.
    timer_at: u64,
    /// Position of the connection in the timer wheel, in ns; `u64::MAX`: not in the wheel.
    pub wheel_at: u64,
    /// The user value of the owner.
    pub user: u64,
    /// When the last segment of the peer was received, in ns.
    pub last_rx: u64,
}

impl Tcb {
    /// Creates the block of a connection that is being opened, with segments of `emss` bytes.
    pub(crate) fn new(emss: u16) -> Self {
        Tcb {
            flags: ConnectionFlags::IN_FLOW_TABLE,
            state: TcpState::SynSent,
            timer: None,
            scales: WindowScales::default(),
            probes: 0,
            fin_at: SeqNr(0),
            emss,
            events: 0,
            timer_at: 0,
            wheel_at: u64::MAX,
            user: 0,
            last_rx: 0,
        }
    }

    /// Returns whether any of these flags is set.
    #[inline]
    pub(crate) fn has(&self, flags: ConnectionFlags) -> bool {
        self.flags.intersects(flags)
    }

    /// Returns whether data or our FIN may be sent in this state.
    #[inline]
    pub(crate) fn can_send_data(&self) -> bool {
        matches!(
            self.state,
            TcpState::Established
                | TcpState::CloseWait
                | TcpState::FinWait1
                | TcpState::Closing
                | TcpState::LastAck
        )
    }

    /// Returns whether the owner closed its direction and our FIN waits to be sent.
    #[inline]
    pub(crate) fn is_fin_pending(&self) -> bool {
        self.flags & (ConnectionFlags::FIN_QUEUED | ConnectionFlags::FIN_SENT)
            == ConnectionFlags::FIN_QUEUED
    }

    /// Drops ACKs and keepalive probes that cannot be sent, as if the link had lost them: the peer
    /// retransmits its segment, and the keepalive timer the probe.
    pub(crate) fn drop_unsent_acks(&mut self) {
        self.flags.remove(ConnectionFlags::NEED_MASK);
    }

    /// Returns whether the connection has ended, has no owner, and has nothing left to send.
    #[inline]
    pub(crate) fn is_done(&self) -> bool {
        self.state == TcpState::Closed
            && self.has(ConnectionFlags::RELEASED)
            && !self.has(ConnectionFlags::NEED_RESET)
    }

    /// Returns the purpose of the connection's timer (RFC 8985 section 8), if it runs.
    #[inline]
    pub(crate) fn timer(&self) -> Option<Timer> {
        self.timer
    }

    /// Returns when the timer fires, in ns; `None`: it does not run.
    #[inline]
    pub(crate) fn timer_at(&self) -> Option<u64> {
        self.timer.map(|_| self.timer_at)
    }

    /// Returns whether the timer runs for this purpose.
    #[inline]
    pub(crate) fn is_timer(&self, timer: Timer) -> bool {
        self.timer == Some(timer)
    }

    /// Sets the timer to fire at `at` (ns) for `timer`, replacing any earlier purpose. The caller
    /// registers the time with the wheel.
    #[inline]
    pub(crate) fn set_timer(&mut self, timer: Timer, at: u64) {
        (self.timer, self.timer_at) = (Some(timer), at);
    }

    /// Disarms the timer.
    #[inline]
    pub(crate) fn stop_timer(&mut self) {
        self.timer = None;
    }
}
