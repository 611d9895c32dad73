//! Converts reports of workers about queue pairs' connections into CM events.

use std::net::SocketAddr;

use nix::libc;
use siw_iwarp::{NegotiatedParameters, TerminateCode};
use siw_net::NetError;
use siw_shm::control::messages::CM_HOLD_DISCONNECTS;
use siw_shm::control::{CmEventKind, CmEventMessage, PrivateData, QpState, Text};
use siw_tcp::StackError;

use crate::control::resources::{QpPhase, Resources};
use crate::ids::{ClientId, CmChannelId, Qpn};
use crate::worker::messages::{ConnectFailure, DisconnectReason, ResolutionFailure};

pub(in crate::control) fn has_channel_flag(
    resources: &Resources,
    id: ClientId,
    channel: Option<CmChannelId>,
    flag: u64,
) -> bool {
    let client = resources.clients.get(&id);
    let outbox = channel.and_then(|channel| client?.cm_channels.get(&channel));
    outbox.is_some_and(|outbox| outbox.flags & flag != 0)
}

/// Reports an established connection of a queue pair.
pub(in crate::control) fn on_established(
    resources: &mut Resources,
    qpn: Qpn,
    negotiated: &NegotiatedParameters,
    private_data: &[u8],
    (local, remote): (SocketAddr, SocketAddr),
) {
    let Some(id) = resources.owner_of_qp(qpn) else {
        return;
    };
    let Some(qp) = resources.qp_mut(id, qpn) else {
        return;
    };
    if qp.phase == QpPhase::Connecting {
        qp.phase = QpPhase::Attached;
    }
    qp.state = QpState::Rts;
    qp.ird = negotiated.ird;
    qp.ord = negotiated.ord;
    qp.local = local.into();
    qp.peer = remote.into();
    let mut event = CmEventMessage::new(CmEventKind::Established);
    event.cookie = qp.cookie;
    event.qp_num = qpn.0;
    event.worker = qp.worker as u32;
    event.device = qp.device as u32;
    event.ird = negotiated.ird.into();
    event.ord = negotiated.ord.into();
    event.crc = negotiated.crc.into();
    event.mpa_rev = negotiated.revision;
    event.local = local.into();
    event.peer = remote.into();
    event.private_data = to_private_data(private_data);
    let channel = qp.cm_channel;
    resources.post_cm_event(id, channel, &event);
}

/// Handles the end of a queue pair's connection; without a reason it was an orderly close. If its
/// client has completions to poll, the report may be held until
/// [`on_completions_polled`].
pub(in crate::control) fn on_disconnected(
    resources: &mut Resources,
    qpn: Qpn,
    reason: Option<DisconnectReason>,
    has_unpolled: bool,
) {
    let Some(id) = resources.owner_of_qp(qpn) else {
        return;
    };
    let Some(qp) = resources.qp_mut(id, qpn) else {
        return;
    };
    if qp.pair.is_some() {
        // Its client learns of it with its next work request.
        return;
    }
    qp.state = QpState::Error;
    qp.held_disconnect = Some(reason);
    let channel = qp.cm_channel;
    if !has_unpolled || !has_channel_flag(resources, id, channel, CM_HOLD_DISCONNECTS) {
        on_completions_polled(resources, qpn);
    }
}

/// Reports the end of a queue pair's connection that was held, if one was.
pub(in crate::control) fn on_completions_polled(resources: &mut Resources, qpn: Qpn) {
    let Some(id) = resources.owner_of_qp(qpn) else {
        return;
    };
    let Some(qp) = resources.qp_mut(id, qpn) else {
        return;
    };
    let Some(reason) = qp.held_disconnect.take() else {
        return;
    };
    let mut event = CmEventMessage::new(CmEventKind::Disconnected);
    event.cookie = qp.cookie;
    event.qp_num = qpn.0;
    event.device = qp.device as u32;
    event.local = qp.local;
    event.peer = qp.peer;
    if let Some(reason) = reason {
        let (errno, text) = describe_disconnect(&reason);
        event.errno = errno as u32;
        event.reason = Text::new(&text);
    }
    let channel = qp.cm_channel;
    resources.post_cm_event(id, channel, &event);
}

/// Event for a failed connect or accept of a queue pair with this cookie.
pub(in crate::control) fn failure_event(
    qpn: Qpn,
    cookie: u64,
    failure: &ConnectFailure,
) -> CmEventMessage {
    let (kind, errno, reason) = match failure {
        ConnectFailure::Rejected(_) => (
            CmEventKind::Rejected,
            libc::ECONNREFUSED,
            "the application at the other end rejected the connection".to_owned(),
        ),
        ConnectFailure::Refused => (
            CmEventKind::Rejected,
            libc::ECONNREFUSED,
            "nothing listens at that address and port".to_owned(),
        ),
        ConnectFailure::Unreachable => (
            CmEventKind::Unreachable,
            libc::EHOSTUNREACH,
            "no neighbour answers for that address".to_owned(),
        ),
        ConnectFailure::TimedOut => (
            CmEventKind::Unreachable,
            libc::ETIMEDOUT,
            "the peer did not answer in time".to_owned(),
        ),
        ConnectFailure::Reset => (
            CmEventKind::ConnectError,
            libc::ECONNRESET,
            "the peer closed the connection during set-up".to_owned(),
        ),
        ConnectFailure::Protocol(why) => (CmEventKind::ConnectError, libc::EPROTO, why.clone()),
        ConnectFailure::Local(why) => (CmEventKind::ConnectError, libc::EADDRNOTAVAIL, why.clone()),
        ConnectFailure::OverQuota(why) => (CmEventKind::ConnectError, libc::ENOBUFS, why.clone()),
    };
    let mut event = CmEventMessage::new(kind);
    event.cookie = cookie;
    event.qp_num = qpn.0;
    event.errno = errno as u32;
    event.reason = Text::new(&reason);
    if let ConnectFailure::Rejected(data) = failure {
        event.private_data = to_private_data(data);
    }
    event
}

/// Errno and text for an address that was not resolved.
pub(in crate::control) fn describe_resolution_failure(
    failure: &ResolutionFailure,
) -> (i32, String) {
    match failure {
        ResolutionFailure::TimedOut => (
            libc::ETIMEDOUT,
            "no neighbour answered for that address in time".to_owned(),
        ),
        ResolutionFailure::NoDevice => (libc::ENODEV, "the device was removed".to_owned()),
        ResolutionFailure::Local(why) => {
            let errno = match why {
                StackError::NoRoute(_) => libc::EHOSTUNREACH,
                StackError::Net(NetError::TooManyUnresolved { .. }) => libc::ENOBUFS,
                _ => libc::EADDRNOTAVAIL,
            };
            (errno, why.to_string())
        }
    }
}

/// Errno and text for an abnormal end of a connection.
pub(in crate::control) fn describe_disconnect(reason: &DisconnectReason) -> (i32, String) {
    match reason {
        DisconnectReason::Reset => (libc::ECONNRESET, "the peer reset the connection".to_owned()),
        DisconnectReason::TimedOut => (libc::ETIMEDOUT, "the peer stopped answering".to_owned()),
        DisconnectReason::TerminateReceived(code) => (
            libc::EREMOTEIO,
            format!("the peer sent Terminate: {}", code.describe()),
        ),
        DisconnectReason::TerminateSent(TerminateCode::MPA_TCP_LOST) => (
            libc::ECONNRESET,
            "the peer closed the connection within a message".to_owned(),
        ),
        DisconnectReason::TerminateSent(code) => (
            libc::EPROTO,
            format!("ended by this side: {}", code.describe()),
        ),
    }
}

pub(in crate::control) fn to_private_data(data: &[u8]) -> PrivateData {
    PrivateData::new(data).unwrap_or(PrivateData {
        len: 0,
        data: [0; 512],
    })
}
