//! Captures that operators start and end while the daemon runs, in addition to the configured one. The
//! daemon opens no file for them: the reader gets a socket, and writes the file under its own identity. A
//! capture ends with its client.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::libc;
use serde_json::{Value, json};
use siw_shm::control::messages as m;
use siw_shm::control::messages::EVERY_DEVICE;
use toml::Spanned;

use super::context::Context;
use super::lists::Viewer;
use super::refusal::Refusal;
use super::replies::{Outcome, send_reply_with_fds};
use super::workers::WorkerSet;
use crate::capture::{Capture, CaptureFilter, CaptureTap, CaptureTaps, Flow};
use crate::config::DeviceConfig;
use crate::ids::{ClientId, Qpn};
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

/// A capture that a client started.
struct LiveCapture {
    number: u32,
    client: ClientId,
    pid: u32,
    /// `None`: frames of all connections, and others.
    queue_pairs: Option<QueuePairs>,
    filter: CaptureFilter,
    /// The condition as status output shows it.
    description: Value,
    capture: Capture,
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

    fn tap(&self) -> CaptureTap {
        self.capture.tap().with_filter(self.filter.clone())
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

    /// Starts a capture, and replies with its number and the socket to read it from.
    pub(super) fn start(
        &mut self,
        context: &mut Context,
        devices: &[Spanned<DeviceConfig>],
        id: ClientId,
        seq: u32,
        request: &m::StartCapture,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        Viewer::of(client).require_operator("capture frames")?;
        let pid = client.peer.pid;
        if self.live.len() >= MOST_CAPTURES {
            let why = format!("{MOST_CAPTURES} captures are running: end one of them first");
            return Err(Refusal::new(libc::EUSERS, why));
        }
        let queue_pairs = selected_queue_pairs(context, request)?;
        let host = request.host.to_socket_addr().map(|address| address.ip());
        let flows = queue_pairs.map(|selected| current_flows(context, selected));
        let filter = CaptureFilter {
            interfaces: interfaces_of(devices, request.device)?,
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
        let limit = (request.limit > 0).then_some(request.limit);
        let reader = format!("of process {pid}");
        let capture = Capture::into_stream(ours, &self.devices, filter.clone(), limit, reader);
        let capture = capture.map_err(failed)?;
        self.last_number = self.last_number.wrapping_add(1).max(1);
        let number = self.last_number;
        let description = json!({
            "device": self.devices.get(request.device as usize),
            "lqpn": (request.qp_num != 0).then_some(request.qp_num),
            "of_client": (request.client != 0).then_some(request.client),
            "host": host,
            "port": filter.port,
            "snaplen": request.snap_len,
            "limit": limit,
        });
        tracing::warn!(pid, number, "capture started: {description}");
        self.live.push(LiveCapture {
            number,
            client: id,
            pid,
            queue_pairs,
            filter,
            description,
            capture,
        });
        self.post_to_workers(&context.workers);
        let reply = m::IdReply {
            id: number,
            reserved: 0,
        };
        let client = context.resources.client_mut(id)?;
        send_reply_with_fds::<m::StartCapture>(client, seq, &reply, &[theirs.as_fd()])
    }

    /// Ends a live capture, or with 0 all of them.
    pub(super) fn stop(&mut self, workers: &WorkerSet, number: u64) -> Result<(), Refusal> {
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
    pub(super) fn end_of_client(&mut self, workers: &WorkerSet, client: ClientId) {
        if self.live.iter().any(|capture| capture.client == client) {
            self.end_those(workers, |capture| capture.client == client);
        }
    }

    /// Captures the connection of a queue pair that is captured.
    pub(super) fn on_established(
        &mut self,
        context: &Context,
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
            self.post_to_workers(&context.workers);
        }
    }

    /// Rows of the list of captures; number 0 is the configured one.
    pub(super) fn rows(&self) -> impl Iterator<Item = Value> {
        let row = |number: u32, pid: Option<u32>, filter: Value, tap: &CaptureTap| {
            let counters = tap.counters();
            json!({
                "number": number,
                "pid": pid,
                "filter": filter,
                "frames": counters.frames,
                "bytes": counters.bytes,
                "dropped": counters.dropped,
            })
        };
        let configured = self.configured.iter();
        let configured = configured.map(move |tap| row(0, None, json!({}), tap));
        let live = self.live.iter().map(move |live| {
            let filter = live.description.clone();
            row(live.number, Some(live.pid), filter, live.capture.tap())
        });
        configured.chain(live)
    }

    fn end_those(&mut self, workers: &WorkerSet, is_meant: impl Fn(&LiveCapture) -> bool) {
        // The workers go first: the thread then writes all that they have recorded.
        let (ended, live) = std::mem::take(&mut self.live)
            .into_iter()
            .partition(is_meant);
        self.live = live;
        self.post_to_workers(workers);
        drop(ended);
    }

    fn post_to_workers(&self, workers: &WorkerSet) {
        let live = self.live.iter().map(LiveCapture::tap);
        let taps = CaptureTaps::new(self.configured.iter().cloned().chain(live));
        workers.post_to_all(|| Command::SetCaptures(taps.clone()));
    }
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
fn interfaces_of(
    devices: &[Spanned<DeviceConfig>],
    device: u32,
) -> Result<Option<Vec<u32>>, Refusal> {
    if device == EVERY_DEVICE {
        return Ok(None);
    }
    let Some(config) = devices.get(device as usize) else {
        return Err(Refusal::new(libc::ENODEV, format!("no device {device}")));
    };
    let pair = config.get_ref().pair.as_ref();
    let interfaces = devices.iter().zip(0..).filter(|(other, number)| {
        let is_other_end = pair.is_some() && other.get_ref().pair.as_ref() == pair;
        *number == device || is_other_end
    });
    Ok(Some(interfaces.map(|(_, number)| number).collect()))
}
