//! Connections in streaming mode: TCP bytes between client and worker, and the turn to RDMA. Each is a
//! [`WaitingRequest`], of a listener or of none.
//!
//! ```text
//! OPEN_STREAM -> Opening --StreamOpened--> Streaming --TURN_STREAM--> Turned --MPA request--> Requested
//! a peer connects to a listener --------------^ | '--CONNECT--> a queue pair's
//!                                               '--END_STREAM, RequestGone--> removed
//! ```

use std::net::SocketAddr;
use std::time::Duration;

use nix::libc;
use siw_host::ports::PortClaim;
use siw_net::QuotaOwner;
use siw_shm::control::messages as m;
use siw_shm::control::{CmEventKind, CmEventMessage, Text};

use super::connections::{Connections, choose_route, connect_params};
use super::listening::{RequestMode, WaitingRequest};
use crate::control::client::cm_events;
use crate::control::context::Context;
use crate::control::request::deferred::{Deferred, StreamStep, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply};
use crate::control::resources::{QpPhase, Resources};
use crate::ids::{ClientId, CmChannelId, CmListenerId, ConnectRequestId, Qpn};
use crate::worker::messages::{
    Command, ConnectFailure, RequestId, StreamAnswer, StreamCall, StreamParams,
};

fn not_streaming() -> Refusal {
    Refusal::new(
        libc::EINVAL,
        "the connection is not in streaming mode: it is being opened, or has turned to RDMA",
    )
}

fn gone(stream: u32) -> Refusal {
    Refusal::new(
        libc::ENOTCONN,
        format!("no connection {stream} in streaming mode: it has ended, or was closed"),
    )
}

/// Time of a request; `None` for the default.
fn milliseconds(value: u32) -> Option<Duration> {
    (value != 0).then(|| Duration::from_millis(value.into()))
}

fn check_channel(
    resources: &mut Resources,
    id: ClientId,
    channel: u32,
) -> Result<CmChannelId, Refusal> {
    let client = resources.client_mut(id)?;
    let channel = CmChannelId(channel);
    match client.cm_channels.contains_key(&channel) {
        true => Ok(channel),
        false => Err(Refusal::no_such("CM channel", channel.0)),
    }
}

/// Checks the number of bytes of a call.
fn check_len(len: u32) -> Result<usize, Refusal> {
    let len = len as usize;
    if (1..=m::STREAM_BYTES).contains(&len) {
        return Ok(len);
    }
    let why = format!("{len} bytes: one call transfers 1 to {}", m::STREAM_BYTES);
    Err(Refusal::new(libc::EINVAL, why))
}

/// Opens a connection in streaming mode, see [`m::OpenStream`].
pub(in crate::control) fn open_stream(
    context: &mut Context,
    id: ClientId,
    request: &m::OpenStream,
) -> Outcome {
    let (device, local, remote) = choose_route(context, request.device, request.src, request.dst)?;
    if local.is_some_and(|local| local.port() != 0) {
        let why = "the source port of a connection in streaming mode is drawn by siwd: give 0";
        return Err(Refusal::new(libc::EINVAL, why));
    }
    let channel = check_channel(&mut context.resources, id, request.cm_channel)?;
    let resources = &mut context.resources;
    let most_connections = resources.most_connections(id)?;
    let user = resources.client_mut(id)?.account.uid();
    let token = context.workers.next_token(Some(id));
    let params = StreamParams {
        token,
        owner: QuotaOwner {
            client: id.0 as u32,
            user,
        },
        most_connections,
        device,
        local: local.map(|local| local.ip()),
        remote,
        timeout: milliseconds(request.timeout_ms),
        idle_timeout: milliseconds(request.idle_timeout_ms),
    };
    let worker = context.devices.next_worker_of(device);
    let command = Command::OpenStream(Box::new(params));
    context.workers.post_command(worker, command);
    let step = StreamStep::Open {
        channel,
        cookie: request.cookie,
        device,
    };
    Ok(Served::Deferred(Deferred::new(token, Then::Stream(step))))
}

impl Connections {
    /// The client's connection of this number, which has to be in streaming mode.
    fn find_stream(&self, id: ClientId, stream: u32) -> Result<WaitingRequest, Refusal> {
        let found = self.requests.get(ConnectRequestId(stream));
        let found = found.filter(|found| found.client == id);
        let found = found.ok_or_else(|| gone(stream))?;
        match found.mode {
            RequestMode::Streaming => Ok(found),
            _ => Err(not_streaming()),
        }
    }

    fn call_worker(
        &self,
        context: &mut Context,
        id: ClientId,
        stream: u32,
        call: StreamCall,
        step: StreamStep,
    ) -> Outcome {
        let request = self.find_stream(id, stream)?.request;
        let token = context.workers.next_token(Some(id));
        let command = Command::CallStream {
            request,
            token,
            call,
        };
        context.workers.post_command(request.worker(), command);
        Ok(Served::Deferred(Deferred::new(token, Then::Stream(step))))
    }

    /// Sends bytes, see [`m::SendStream`].
    pub(in crate::control) fn send_stream(
        &self,
        context: &mut Context,
        id: ClientId,
        request: &m::SendStream,
    ) -> Outcome {
        let len = check_len(request.len)?;
        let call = StreamCall::Send(request.bytes[..len].into());
        self.call_worker(context, id, request.stream, call, StreamStep::Send)
    }

    /// Reads bytes, see [`m::ReceiveStream`].
    pub(in crate::control) fn receive_stream(
        &self,
        context: &mut Context,
        id: ClientId,
        request: &m::ReceiveStream,
    ) -> Outcome {
        let call = StreamCall::Receive(check_len(request.len)?);
        self.call_worker(context, id, request.stream, call, StreamStep::Receive)
    }

    /// Becomes the MPA responder, see [`m::TurnStream`].
    pub(in crate::control) fn turn_stream(
        &self,
        context: &mut Context,
        id: ClientId,
        request: &m::TurnStream,
    ) -> Outcome {
        let step = StreamStep::Turn {
            stream: ConnectRequestId(request.stream),
            channel: check_channel(&mut context.resources, id, request.cm_channel)?,
            cookie: request.cookie,
        };
        self.call_worker(context, id, request.stream, StreamCall::Turn, step)
    }

    /// Turns a connection to RDMA with a queue pair as the MPA initiator, see [`m::Connect::stream`].
    pub(in crate::control) fn connect_stream(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::Connect,
    ) -> Outcome {
        let waiting = self.find_stream(id, request.stream)?;
        let device = waiting.device;
        context.devices.check_crc(&[device], request.params.crc)?;
        let (qpn, channel) = (Qpn(request.qp_num), CmChannelId(request.cm_channel));
        context
            .resources
            .client_mut(id)?
            .detached_qp(qpn, channel)?;
        let listening = self.listeners.get(waiting.listener);
        let port_claim = listening.map_or_else(PortClaim::default, |listening| {
            PortClaim::share_all(&listening.port_claims)
        });
        context.resources.count_connection(id, qpn, port_claim)?;
        self.take_request(id, ConnectRequestId(request.stream))?;
        let worker = waiting.request.worker();
        let client = context.resources.client_mut(id)?;
        let qp = client.detached_qp(qpn, channel)?;
        qp.phase = QpPhase::Connecting;
        qp.end_is_recorded = false;
        qp.worker = worker;
        qp.device = device;
        qp.waits_for_receives = request.params.waits_for_receives != 0;
        qp.cookie = request.cookie;
        qp.cm_channel = Some(channel);
        let setup = Box::new(client.worker_setup(qpn)?);
        // The worker has the addresses.
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let params = Box::new(connect_params(request, device, None, nowhere));
        let command = Command::ConnectStream {
            setup,
            request: waiting.request,
            params,
        };
        context.workers.post_command(worker, command);
        send_reply::<m::Connect>(context.resources.client_mut(id)?, seq, &EMPTY)
    }

    /// Closes a connection, see [`m::EndStream`]. One that has ended is no error.
    pub(in crate::control) fn end_stream(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::EndStream,
    ) -> Outcome {
        if request.flags & !(m::END_RESET | m::END_SENDING) != 0 {
            return Err(Refusal::new(libc::EINVAL, "EndStream: unknown flags"));
        }
        let number = ConnectRequestId(request.stream);
        let found = self.requests.get(number).filter(|found| found.client == id);
        let only_sending = request.flags & m::END_SENDING != 0;
        if let Some(found) = found {
            let is_requested = found.mode == RequestMode::Requested;
            if is_requested || (only_sending && found.mode != RequestMode::Streaming) {
                return Err(not_streaming());
            }
            if !only_sending {
                self.take_request(id, number)?;
            }
            let command = Command::EndStream {
                request: found.request,
                reset: request.flags & m::END_RESET != 0,
                only_sending,
            };
            context
                .workers
                .post_command(found.request.worker(), command);
        }
        send_reply::<m::EndStream>(context.resources.client_mut(id)?, seq, &EMPTY)
    }

    /// Replies to a request with the answer of the connection's worker.
    pub(in crate::control) fn reply_stream(
        &mut self,
        resources: &mut Resources,
        (id, seq): (ClientId, u32),
        step: StreamStep,
        answer: StreamAnswer,
    ) -> Outcome {
        match (step, answer) {
            (
                StreamStep::Open {
                    channel,
                    cookie,
                    device,
                },
                StreamAnswer::Opening(request),
            ) => {
                let number = self.requests.next_number();
                let waiting = WaitingRequest {
                    request,
                    listener: CmListenerId(0),
                    client: id,
                    cm_channel: channel,
                    cookie,
                    device,
                    mode: RequestMode::Opening,
                };
                self.requests.insert(number, waiting);
                let reply = m::IdReply {
                    id: number.0,
                    reserved: 0,
                };
                send_reply::<m::OpenStream>(resources.client_mut(id)?, seq, &reply)
            }
            (StreamStep::Open { .. }, StreamAnswer::NotOpened(failure)) => {
                let event = cm_events::failure_event(Qpn(0), 0, &failure);
                Err(Refusal::new(event.errno as i32, event.reason.to_text()))
            }
            (StreamStep::Send, StreamAnswer::Sent(len)) => {
                let reply = m::SendStreamReply {
                    len: len as u32,
                    reserved: 0,
                };
                send_reply::<m::SendStream>(resources.client_mut(id)?, seq, &reply)
            }
            (StreamStep::Receive, StreamAnswer::Received { bytes, is_closed }) => {
                let mut reply = m::ReceiveStreamReply {
                    len: bytes.len() as u32,
                    flags: if is_closed { m::STREAM_CLOSED } else { 0 },
                    bytes: [0; m::STREAM_BYTES],
                };
                reply.bytes[..bytes.len()].copy_from_slice(&bytes);
                send_reply::<m::ReceiveStream>(resources.client_mut(id)?, seq, &reply)
            }
            (
                StreamStep::Turn {
                    stream,
                    channel,
                    cookie,
                },
                StreamAnswer::Turned,
            ) => {
                if let Some(found) = self.requests.get_mut(stream) {
                    found.mode = RequestMode::Turned;
                    found.cm_channel = channel;
                    found.cookie = cookie;
                }
                send_reply::<m::TurnStream>(resources.client_mut(id)?, seq, &EMPTY)
            }
            (_, StreamAnswer::Closed) => Err(Refusal::new(
                libc::EPIPE,
                "this end has closed its direction of the connection",
            )),
            (_, StreamAnswer::Gone) => Err(Refusal::new(
                libc::ENOTCONN,
                "the connection has ended, or is not in streaming mode any more",
            )),
            _ => Err(Refusal::unexpected_report()),
        }
    }

    /// Reports a connection that has reached streaming mode.
    pub(in crate::control) fn on_stream_opened(
        &mut self,
        context: &mut Context,
        worker: usize,
        request: RequestId,
        listener: CmListenerId,
        (local, remote): (SocketAddr, SocketAddr),
    ) {
        let mut event = CmEventMessage::new(CmEventKind::StreamOpened);
        event.local = local.into();
        event.peer = remote.into();
        let Some(number) = self.requests.number_of(request) else {
            let mode = RequestMode::Streaming;
            return self.admit_request(context, worker, (request, mode), listener, event);
        };
        if let Some(found) = self.requests.get_mut(number) {
            found.mode = RequestMode::Streaming;
            event.request = number.0;
            event.cookie = found.cookie;
            event.device = found.device as u32;
            let (client, channel) = (found.client, found.cm_channel);
            let resources = &mut context.resources;
            resources.post_cm_event(client, Some(channel), &event);
        }
    }

    /// Reports that a call which transferred nothing is to be repeated.
    pub(in crate::control) fn on_stream_ready(
        &mut self,
        resources: &mut Resources,
        request: RequestId,
    ) {
        let number = self.requests.number_of(request);
        let Some((number, found)) =
            number.and_then(|number| Some((number, self.requests.get(number)?)))
        else {
            return;
        };
        let mut event = CmEventMessage::new(CmEventKind::StreamReady);
        event.request = number.0;
        event.cookie = found.cookie;
        resources.post_cm_event(found.client, Some(found.cm_channel), &event);
    }

    /// Passes the MPA request on a connection that was in streaming mode to its application.
    pub(super) fn on_turned_request(
        &mut self,
        resources: &mut Resources,
        request: RequestId,
        mut event: CmEventMessage,
    ) {
        let number = self.requests.number_of(request);
        let Some((number, found)) =
            number.and_then(|number| Some((number, self.requests.get_mut(number)?)))
        else {
            return;
        };
        found.mode = RequestMode::Requested;
        event.request = number.0;
        event.listener = found.listener.0;
        event.cookie = found.cookie;
        event.device = found.device as u32;
        let (client, channel) = (found.client, found.cm_channel);
        resources.post_cm_event(client, Some(channel), &event);
    }
}

/// Closes a connection that a worker has opened for a client which has left meanwhile.
pub(in crate::control) fn close_unclaimed(context: &mut Context, answer: &StreamAnswer) {
    if let StreamAnswer::Opening(request) = *answer {
        let command = Command::EndStream {
            request,
            reset: true,
            only_sending: false,
        };
        context.workers.post_command(request.worker(), command);
    }
}

/// Reports the end of a connection whose peer has not sent an MPA request.
pub(super) fn report_end(
    resources: &mut Resources,
    number: ConnectRequestId,
    found: &WaitingRequest,
    failure: &ConnectFailure,
) {
    let mut event = cm_events::failure_event(Qpn(0), found.cookie, failure);
    if found.mode == RequestMode::Streaming {
        event.kind = CmEventKind::StreamReady as u32;
        let text = event.reason.to_text();
        event.reason = Text::new(match failure {
            ConnectFailure::TimedOut => "no byte in either direction for too long",
            ConnectFailure::Reset => "the peer reset the connection",
            _ => &text,
        });
    }
    event.request = number.0;
    event.device = found.device as u32;
    resources.post_cm_event(found.client, Some(found.cm_channel), &event);
}
