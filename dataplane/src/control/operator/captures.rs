//! Captures and traces that operators start and end while the daemon runs, in addition to the configured
//! capture. The daemon opens no file for them: the reader gets a socket, and writes the file under its own
//! identity. A capture or trace ends with its client.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::libc;
use serde_json::{Value, json};
use siw_shm::control::Message;
use siw_shm::control::messages as m;
use siw_shm::control::messages::EVERY_DEVICE;

use super::viewer::Viewer;
use crate::capture::{Capture, CaptureCounters, CaptureFilter, CaptureTap, Flow};
use crate::control::context::Context;
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{Outcome, send_reply_with_fds};
use crate::control::threads::workers::WorkerSet;
use crate::device_view::DeviceView;
use crate::frame_taps::FrameTaps;
use crate::ids::{ClientId, Qpn};
use crate::trace::{MOST_RECORDS, Trace, TraceTap};
use crate::worker::messages::Command;

/// Captures at a time.
const MOST_CAPTURES: usize = 8;
/// Connections that one capture can select by queue pair or client.
const MOST_FLOWS: usize = 4096;

/// Queue pairs whose connections are captured.
#[derive(Debug, Clone, Copy)]
struct QueuePairs {
    number: Option<Qpn>,
    client: Option<ClientId>,
}

impl QueuePairs {
    fn include(self, number: Qpn, client: ClientId) -> bool {
        self.number.is_none_or(|only| only == number)
            && self.client.is_none_or(|only| only == client)
    }
}

/// Source of the records that a reader gets.
enum Recorder {
    /// Frames as pcapng.
    Capture(Capture),
    /// Steps of workers as JSON.
    Trace(Trace),
}

impl Recorder {
    fn counters(&self) -> CaptureCounters {
        match self {
            Recorder::Capture(capture) => capture.tap().counters(),
            Recorder::Trace(trace) => trace.tap().counters(),
        }
    }
}

/// A capture or trace that a client started.
struct LiveCapture {
    number: u32,
    client: ClientId,
    pid: u32,
    /// `None`: frames of all connections, and others.
    queue_pairs: Option<QueuePairs>,
    filter: CaptureFilter,
    /// The condition as status output shows it.
    description: Value,
    recorder: Recorder,
}

impl LiveCapture {
    /// Adds a connection of the captured queue pairs.
    fn add_flow(&mut self, (local, peer): (SocketAddr, SocketAddr)) {
        let flows = self.filter.flows.get_or_insert_default();
        if flows.len() < MOST_FLOWS {
            flows.insert(Flow::new(local, peer));
        } else {
            tracing::warn!(
                capture = self.number,
                "more than {MOST_FLOWS} connections: further ones are not captured"
            );
        }
    }

    fn capture_tap(&self) -> Option<CaptureTap> {
        match &self.recorder {
            Recorder::Capture(capture) => Some(capture.tap().with_filter(self.filter.clone())),
            Recorder::Trace(_) => None,
        }
    }

    fn trace_tap(&self) -> Option<TraceTap> {
        match &self.recorder {
            Recorder::Capture(_) => None,
            Recorder::Trace(trace) => Some(trace.tap().with_filter(self.filter.clone())),
        }
    }
}

/// All captures of the daemon.
pub struct Captures {
    /// Names of the devices, which are the interfaces of captures.
    devices: Vec<String>,
    /// The capture of the configuration.
    configured: Option<CaptureTap>,
    live: Vec<LiveCapture>,
    last_number: u32,
}

impl Captures {
    /// The captures of a daemon with these devices.
    pub fn new(devices: Vec<String>, configured: Option<CaptureTap>) -> Captures {
        Captures {
            devices,
            configured,
            live: Vec::new(),
            last_number: 0,
        }
    }

    /// Adds a device with the next index, or with that of a deleted device of its name: captures that start
    /// from now on have its frames.
    pub(in crate::control) fn add_device(
        &mut self,
        workers: &mut WorkerSet,
        device: usize,
        name: &str,
    ) {
        if device == self.devices.len() {
            self.devices.push(name.to_owned());
        }
        self.post_to_workers(workers);
    }

    /// Starts a capture, and replies with its number and the socket to read it from.
    pub(in crate::control) fn start_capture(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::StartCapture,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        Viewer::of(client).require_operator("capture frames")?;
        let limit = (request.limit > 0).then_some(request.limit);
        let started = self.start(context, id, request, |stream, names, filter, pid| {
            let reader = format!("of process {pid}");
            let capture = Capture::into_stream(stream, names, filter, limit, reader)?;
            Ok(Recorder::Capture(capture))
        })?;
        reply_started::<m::StartCapture>(context, id, seq, started)
    }

    /// Starts a trace, and replies with its number and the socket to read it from.
    pub(in crate::control) fn start_trace(
        &mut self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::StartTrace,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        Viewer::of(client).require_operator("trace")?;
        let records = u64::from(request.records);
        if !(1..=MOST_RECORDS).contains(&records) {
            let why = format!("{records} records: 1 to {MOST_RECORDS} are allowed");
            return Err(Refusal::new(libc::EINVAL, why));
        }
        let mut live = self.live.iter();
        if let Some(other) = live.find(|live| matches!(live.recorder, Recorder::Trace(_))) {
            let why = format!(
                "process {} has a trace: end it with siwctl capture stop {}",
                other.pid, other.number
            );
            return Err(Refusal::new(libc::EBUSY, why));
        }
        let selection = &request.selection;
        let started = self.start(context, id, selection, |stream, names, filter, pid| {
            let reader = format!("of process {pid}");
            let trace = Trace::into_stream(stream, names, filter, records, reader)?;
            Ok(Recorder::Trace(trace))
        })?;
        reply_started::<m::StartTrace>(context, id, seq, started)
    }

    /// Starts what `record` makes of a socket, the devices' names, the filter and the client's process.
    /// Returns its number and the reader's end.
    fn start(
        &mut self,
        context: &mut Context,
        id: ClientId,
        request: &m::StartCapture,
        record: impl FnOnce(UnixStream, &[String], CaptureFilter, u32) -> std::io::Result<Recorder>,
    ) -> Result<(u32, UnixStream), Refusal> {
        let pid = context.resources.client_mut(id)?.peer.pid;
        if self.live.len() >= MOST_CAPTURES {
            let why = format!("{MOST_CAPTURES} captures are running: end one of them first");
            return Err(Refusal::new(libc::EUSERS, why));
        }
        let queue_pairs = selected_queue_pairs(context, request)?;
        let host = request.host.to_socket_addr().map(|address| address.ip());
        let flows = queue_pairs.map(|selected| current_flows(context, selected));
        let filter = CaptureFilter {
            interfaces: interfaces_of(&context.devices.views, request.device)?,
            host,
            port: (request.port != 0).then_some(request.port),
            flows: flows.transpose()?,
            snap_len: request.snap_len,
        };
        let failed = |error: std::io::Error| {
            let errno = error.raw_os_error().unwrap_or(libc::ENOMEM);
            Refusal::new(errno, format!("the capture cannot be started: {error}"))
        };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let recorder = record(ours, &self.devices, filter.clone(), pid).map_err(failed)?;
        self.last_number = self.last_number.wrapping_add(1).max(1);
        let number = self.last_number;
        let description = json!({
            "device": self.devices.get(request.device as usize),
            "lqpn": (request.qp_num != 0).then_some(request.qp_num),
            "of_client": (request.client != 0).then_some(request.client),
            "host": host,
            "port": filter.port,
            "snaplen": request.snap_len,
            "limit": (request.limit > 0).then_some(request.limit),
        });
        let kind = match recorder {
            Recorder::Capture(_) => "capture",
            Recorder::Trace(_) => "trace",
        };
        tracing::warn!(pid, number, "{kind} started: {description}");
        self.live.push(LiveCapture {
            number,
            client: id,
            pid,
            queue_pairs,
            filter,
            description,
            recorder,
        });
        self.post_to_workers(&mut context.workers);
        Ok((number, theirs))
    }

    /// Ends a live capture, or with 0 all of them.
    pub(in crate::control) fn stop(
        &mut self,
        workers: &mut WorkerSet,
        number: u64,
    ) -> Result<(), Refusal> {
        let is_meant = |capture: &LiveCapture| number == 0 || u64::from(capture.number) == number;
        if !self.live.iter().any(is_meant) {
            let why = match number {
                0 => "no capture is running".to_owned(),
                number => format!("no capture {number}"),
            };
            return Err(Refusal::new(libc::ENOENT, why));
        }
        self.end_those(workers, is_meant);
        Ok(())
    }

    /// Ends the captures of a client that has left.
    pub(in crate::control) fn end_of_client(&mut self, workers: &mut WorkerSet, client: ClientId) {
        if self.live.iter().any(|capture| capture.client == client) {
            self.end_those(workers, |capture| capture.client == client);
        }
    }

    /// Captures the connection of a queue pair that is captured.
    pub(in crate::control) fn on_established(
        &mut self,
        context: &mut Context,
        qpn: Qpn,
        ends: (SocketAddr, SocketAddr),
    ) {
        if self.live.is_empty() {
            return;
        }
        let Some(owner) = context.resources.owner_of_qp(qpn) else {
            return;
        };
        let mut has_changed = false;
        for capture in &mut self.live {
            if capture
                .queue_pairs
                .is_some_and(|those| those.include(qpn, owner))
            {
                capture.add_flow(ends);
                has_changed = true;
            }
        }
        if has_changed {
            self.post_to_workers(&mut context.workers);
        }
    }

    /// Rows of the list of captures; number 0 is the configured one.
    pub(in crate::control) fn rows(&self) -> impl Iterator<Item = Value> {
        let row = |kind: &str, number: u32, pid: Option<u32>, filter: Value, counters| {
            let counters: CaptureCounters = counters;
            json!({
                "kind": kind,
                "number": number,
                "pid": pid,
                "filter": filter,
                "frames": counters.frames,
                "bytes": counters.bytes,
                "dropped": counters.dropped,
            })
        };
        let configured = self.configured.iter();
        let configured =
            configured.map(move |tap| row("capture", 0, None, json!({}), tap.counters()));
        let live = self.live.iter().map(move |live| {
            let filter = live.description.clone();
            let kind = match live.recorder {
                Recorder::Capture(_) => "capture",
                Recorder::Trace(_) => "trace",
            };
            let counters = live.recorder.counters();
            row(kind, live.number, Some(live.pid), filter, counters)
        });
        configured.chain(live)
    }

    fn end_those(&mut self, workers: &mut WorkerSet, is_meant: impl Fn(&LiveCapture) -> bool) {
        // The workers go first: the thread then writes all that they have recorded.
        let (ended, live) = std::mem::take(&mut self.live)
            .into_iter()
            .partition(is_meant);
        self.live = live;
        self.post_to_workers(workers);
        drop(ended);
    }

    fn post_to_workers(&self, workers: &mut WorkerSet) {
        let live = self.live.iter().filter_map(LiveCapture::capture_tap);
        let trace = self.live.iter().find_map(LiveCapture::trace_tap);
        let taps = FrameTaps::new(self.configured.iter().cloned().chain(live), trace);
        workers.post_to_all(|| Command::SetTaps(taps.clone()));
    }
}

/// Replies with the number of a capture or trace, and the socket to read it from.
fn reply_started<R: Message<Reply = m::IdReply>>(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    (number, stream): (u32, UnixStream),
) -> Outcome {
    let reply = m::IdReply {
        id: number,
        reserved: 0,
    };
    let client = context.resources.client_mut(id)?;
    send_reply_with_fds::<R>(client, seq, &reply, &[stream.as_fd()])
}

/// Queue pairs that a request selects; `None` if it does not.
fn selected_queue_pairs(
    context: &Context,
    request: &m::StartCapture,
) -> Result<Option<QueuePairs>, Refusal> {
    let number = (request.qp_num != 0).then_some(Qpn(request.qp_num));
    let client = (request.client != 0).then_some(ClientId(request.client));
    if number.is_some_and(|number| context.resources.owner_of_qp(number).is_none()) {
        let why = format!("no queue pair {}", request.qp_num);
        return Err(Refusal::new(libc::ENOENT, why));
    }
    if client.is_some_and(|client| !context.resources.clients.contains_key(&client)) {
        let why = format!("no client {}", request.client);
        return Err(Refusal::new(libc::ENOENT, why));
    }
    let is_selective = number.is_some() || client.is_some();
    Ok(is_selective.then_some(QueuePairs { number, client }))
}

/// The connections that these queue pairs have now.
fn current_flows(context: &Context, selected: QueuePairs) -> Result<HashSet<Flow>, Refusal> {
    let owner = selected
        .number
        .and_then(|number| context.resources.owner_of_qp(number));
    let client = selected.client.or(owner);
    let client = client.and_then(|client| context.resources.clients.get(&client));
    let mut flows = HashSet::new();
    for (number, qp) in client.iter().flat_map(|client| &client.qps) {
        let ends = qp.local.to_socket_addr().zip(qp.peer.to_socket_addr());
        let (Some(client), Some((local, peer))) = (client, ends) else {
            continue;
        };
        if selected.include(*number, client.id) {
            flows.insert(Flow::new(local, peer));
        }
        if flows.len() > MOST_FLOWS {
            let why = format!(
                "the client has more than {MOST_FLOWS} connections: select by host, port or queue pair"
            );
            return Err(Refusal::new(libc::E2BIG, why));
        }
    }
    Ok(flows)
}

/// Interfaces with the frames of a device: on a pair those that its other end sends are among them.
fn interfaces_of(devices: &[DeviceView], device: u32) -> Result<Option<Vec<u32>>, Refusal> {
    if device == EVERY_DEVICE {
        return Ok(None);
    }
    let found = devices.get(device as usize).filter(|view| !view.is_deleted);
    let Some(view) = found else {
        return Err(Refusal::new(libc::ENODEV, format!("no device {device}")));
    };
    let pair = view.config.pair.as_ref();
    let interfaces = devices.iter().zip(0..).filter(|(other, number)| {
        let is_other_end = pair.is_some() && other.config.pair.as_ref() == pair;
        *number == device || is_other_end
    });
    Ok(Some(interfaces.map(|(_, number)| number).collect()))
}
