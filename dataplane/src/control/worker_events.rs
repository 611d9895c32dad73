//! Worker events: each updates the control thread's state, answers a deferred request, or becomes
//! an event for a client.

use siw_iwarp::QpEvent;
use siw_shm::control::{AsyncEventKind, CmEventKind, CmEventMessage, QpState};

use super::ControlThread;
use super::cm::to_private_data;
use crate::ids::{ClientId, Qpn};
use crate::worker::messages::Event;

impl ControlThread {
    pub(super) fn on_worker_event(&mut self, worker: usize, event: Event) {
        match event {
            Event::ConnectRequest {
                request,
                listener,
                local,
                remote,
                private_data,
                peer_ird,
                peer_ord,
            } => {
                let mut event = CmEventMessage::new(CmEventKind::ConnectRequest);
                // The initiator's IRD bounds our ORD, and its ORD our IRD.
                event.ord = peer_ird.map_or(0, u32::from);
                event.ird = peer_ord.map_or(0, u32::from);
                event.local = local.into();
                event.peer = remote.into();
                event.private_data = to_private_data(&private_data);
                self.on_connect_request(worker, request, listener, event);
            }
            Event::RequestGone { request } => self.on_request_gone(request),
            Event::Established {
                qpn,
                negotiated,
                private_data,
                local,
                remote,
            } => self.on_established(qpn, &negotiated, &private_data, (local, remote)),
            Event::ConnectFailed { qpn, failure } => self.on_connect_failed(qpn, failure),
            Event::Disconnected {
                qpn,
                failure,
                has_unpolled,
            } => self.on_disconnected(qpn, failure, has_unpolled),
            Event::CompletionsPolled { qpn } => self.on_completions_polled(qpn),
            Event::QpDestroyed { qpn, windows } => {
                // The number will be reused: no window may stay bound to its next owner.
                for window in windows {
                    self.config.keys.unbind_stream(window, qpn.0);
                }
                self.finish_destroy_qp(qpn);
            }
            Event::FramesHeld { token } => self.on_frames_held(worker, token),
            Event::QpInfo { qpn, token, info } => self.on_qp_info(qpn, token, &info),
            Event::Async { client, qpn, event } => self.on_qp_event(client, qpn, event),
            Event::CqOverflow { client, cq } => {
                let why = "the completion queue overflowed: make it deeper or poll it more often";
                self.post_async_event(client, AsyncEventKind::CqErr, cq.0, why);
            }
            Event::SrqLimit { client, srq } => self.srq_limit(client, srq),
            Event::LastWqe { client, qpn } => {
                let why = "no more requests are taken from the shared receive queue";
                self.post_async_event(client, AsyncEventKind::QpLastWqeReached, qpn.0, why);
            }
            Event::BadRequest {
                client,
                qpn,
                reason,
            } => {
                let why = format!("work request refused: {reason}");
                self.post_async_event(client, AsyncEventKind::QpFatal, qpn.0, &why);
            }
            Event::ClientFault { client, qpn } => {
                let why = format!("queue pair {qpn}: invalid ring indices");
                self.close_faulty_client(client, &why);
            }
            Event::ListenFailed { listener, reason } => {
                self.on_listen_failed(listener, &reason);
            }
            Event::PortRemoved { device } => self.on_port_removed(device),
            Event::Stats {
                worker,
                token,
                stats,
            } => self.on_worker_stats(worker, token, *stats),
            Event::BarrierReached { worker, token } => self.on_barrier_passed(worker, token),
            Event::Stopped { worker } => {
                tracing::debug!(worker, "worker stopped");
                self.workers.on_stopped();
            }
        }
    }

    /// Reports an asynchronous event of a queue pair to its client.
    fn on_qp_event(&mut self, client: ClientId, qpn: Qpn, event: QpEvent) {
        let (kind, why) = match event {
            QpEvent::QpFatal => (
                AsyncEventKind::QpFatal,
                "the queue pair ended with an error",
            ),
            QpEvent::QpReqErr => (
                AsyncEventKind::QpReqErr,
                "the peer broke the protocol, or says that we did",
            ),
            QpEvent::QpAccessErr => (AsyncEventKind::QpAccessErr, "remote protection error"),
            QpEvent::SqDrained => (AsyncEventKind::SqDrained, "the send queue is drained"),
        };
        if kind != AsyncEventKind::SqDrained
            && let Some(qp) = self.resources.qp_mut(client, qpn)
        {
            qp.state = QpState::Error;
        }
        self.post_async_event(client, kind, qpn.0, why);
    }
}
