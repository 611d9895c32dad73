//! Lists of objects for operators and users, a page at a time: the client names the object after which
//! a page begins, so the daemon keeps no state between pages, and a page costs the same however long
//! the list is.

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Bound;

use nix::libc;
use serde::Serialize;
use serde_json::{Value, json};
use siw_host::routes::RouteFollower;
use siw_memory::{KeyTable, Stag};
use siw_shm::Access;
use siw_shm::control::QpState;
use siw_shm::control::messages as m;
use siw_shm::control::messages::{LIST_TEXT, ListPosition, ListReply, ObjectList};

use super::captures::Captures;
use super::faults::FaultPlans;
use super::reload::Configuration;
use super::runtime_changes::running_config;
use super::statistics::client_json;
use super::viewer::Viewer;
use crate::control::connection::ends::address_text;
use crate::control::connection::listening::{ClientListener, Listeners, PortSpace};
use crate::control::context::Context;
use crate::control::memory::Memory;
use crate::control::request::deferred::{Deferred, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{Outcome, Served, send_reply};
use crate::control::resources::{Client, ClientQp, QpPhase, Resources};
use crate::ids::{ClientId, CmListenerId, CqId, PdId, Qpn, SrqId};
use crate::worker::messages::{Command, ConnectionSnapshot};

/// Clients visited for one page; a page may be empty then.
const CLIENTS_PER_PAGE: usize = 1024;
/// Set in the position of a listener, whose list follows that of the queue pairs.
const LISTENERS: u64 = 1 << 63;

/// A page of a list.
struct Page {
    reply: Box<ListReply>,
}

impl Page {
    /// An empty page after this position.
    fn new(after: ListPosition) -> Page {
        Page {
            reply: Box::new(ListReply {
                next: after,
                is_last: 0,
                len: 0,
                text: [0; LIST_TEXT],
            }),
        }
    }

    /// Adds the object at `position`. Returns false if the page has no room for it; an object that no
    /// page has room for is left out.
    fn add(&mut self, position: ListPosition, object: &impl Serialize) -> bool {
        let start = self.reply.len as usize;
        let mut room = &mut self.reply.text[start..];
        let has_room =
            serde_json::to_writer(&mut room, object).is_ok() && room.write_all(b"\n").is_ok();
        if has_room {
            self.reply.len = (LIST_TEXT - room.len()) as u32;
        } else if start > 0 {
            return false;
        }
        self.reply.next = position;
        true
    }
}

/// Parts of the control thread that lists show.
pub(in crate::control) struct ListedParts<'a> {
    pub memory: &'a Memory,
    pub listeners: &'a Listeners,
    pub captures: &'a Captures,
    pub faults: &'a FaultPlans,
    pub configuration: &'a Configuration,
    pub routes: &'a RouteFollower,
}

/// Adds the rest of a text, a row for each line. Returns true after the last one.
fn add_lines(page: &mut Page, text: &str) -> bool {
    let first = page.reply.next.minor;
    let lines = (1..).zip(text.lines()).skip(first as usize);
    for (number, line) in lines {
        let position = ListPosition {
            major: 0,
            minor: number,
        };
        if !page.add(position, &json!({ "text": line })) {
            return false;
        }
    }
    true
}

/// Answers a request for a page of a list.
pub(in crate::control) fn list_objects(
    context: &mut Context,
    parts: ListedParts<'_>,
    id: ClientId,
    seq: u32,
    request: &m::ListObjects,
) -> Outcome {
    let ListedParts {
        memory,
        listeners,
        captures,
        faults,
        configuration,
        routes,
    } = parts;
    let Some(list) = ObjectList::from_u32(request.list) else {
        let why = format!("no list {}", request.list);
        return Err(Refusal::new(libc::EINVAL, why));
    };
    let after = request.after;
    let viewer = Viewer::of(context.resources.client_mut(id)?);
    let resources = &context.resources;
    let mut page = Page::new(after);
    let is_last = match list {
        ObjectList::Connections => {
            return Ok(ask_worker(context, id, viewer, after));
        }
        ObjectList::Ends => add_ends(&mut page, resources, viewer),
        ObjectList::Recording => add_recording(&mut page, context, viewer),
        ObjectList::Captures => {
            viewer.require_operator("see captures")?;
            add_numbered(&mut page, captures.rows())
        }
        ObjectList::Faults => {
            viewer.require_operator("see fault plans")?;
            add_numbered(&mut page, faults.rows())
        }
        ObjectList::Configuration => {
            viewer.require_operator("export the configuration")?;
            let config = running_config(context, configuration, routes);
            let text = config.to_toml();
            let text = text.map_err(|why| Refusal::new(libc::EIO, why.to_string()))?;
            add_lines(&mut page, &text)
        }
        ObjectList::Clients => {
            add_of_clients(&mut page, resources, viewer, |client, page, after| {
                after.is_some() || page.add(at(client, 0), &client_json(client))
            })
        }
        ObjectList::QueuePairs => add_objects(
            &mut page,
            (resources, viewer),
            |client| &client.qps,
            Qpn,
            |number| number.0,
            |number, qp| Some(QueuePairRow::new(context, *number, qp)),
        ),
        ObjectList::CompletionQueues => add_objects(
            &mut page,
            (resources, viewer),
            |client| &client.cqs,
            CqId,
            |number| number.0,
            |number, cq| {
                Some(json!({
                    "cqn": number.0,
                    "cqe": cq.entries,
                    "users": cq.qps,
                    "channel": cq.channel.map(|channel| channel.0),
                }))
            },
        ),
        ObjectList::SharedReceiveQueues => add_objects(
            &mut page,
            (resources, viewer),
            |client| &client.srqs,
            SrqId,
            |number| number.0,
            |number, srq| {
                Some(json!({
                    "srqn": number.0,
                    "pdn": srq.pd.0,
                    "users": srq.qps,
                    "max_wr": srq.max_wr,
                    "posted": srq.posted_requests(),
                }))
            },
        ),
        ObjectList::MemoryRegions => add_objects(
            &mut page,
            (resources, viewer),
            |client| client.memory.regions(),
            Stag,
            |key| key.0,
            |key, region| Some(region_json(&memory.keys, *key, region.pd)),
        ),
        ObjectList::ProtectionDomains => add_objects(
            &mut page,
            (resources, viewer),
            |client| client.memory.pds(),
            PdId,
            |number| number.0,
            |number, pd| Some(json!({ "pdn": number.0, "users": pd.users })),
        ),
        ObjectList::CmIds => add_cm_ids(&mut page, context, listeners, viewer),
    };
    page.reply.is_last = is_last.into();
    send_reply::<m::ListObjects>(context.resources.client_mut(id)?, seq, &page.reply)
}

fn at(client: &Client, object: u32) -> ListPosition {
    ListPosition {
        major: client.id.0,
        minor: object.into(),
    }
}

/// Adds objects of the clients from the page's position on. `add` gets the number of the client's last
/// object in earlier pages, and returns false if the page is full. Returns true after the last client.
fn add_of_clients(
    page: &mut Page,
    resources: &Resources,
    viewer: Viewer,
    mut add: impl FnMut(&Client, &mut Page, Option<u32>) -> bool,
) -> bool {
    let start = page.reply.next;
    let first = Bound::Included(ClientId(start.major));
    let mut clients = resources.clients.range((first, Bound::Unbounded));
    for _ in 0..CLIENTS_PER_PAGE {
        let Some((id, client)) = clients.next() else {
            return true;
        };
        let is_continued = id.0 == start.major;
        let after = is_continued.then_some(start.minor as u32);
        if viewer.sees(client.account.uid()) && !add(client, page, after) {
            return false;
        }
        // The next page begins with the next client.
        page.reply.next = ListPosition {
            major: id.0,
            minor: u32::MAX.into(),
        };
    }
    false
}

/// Adds objects of one kind of all visible clients, each with the client that has it. `to_key` and
/// `to_number` convert the number of an object; objects without a row are left out. Returns true
/// after the last object.
fn add_objects<K: Ord, V, R: Serialize>(
    page: &mut Page,
    (resources, viewer): (&Resources, Viewer),
    objects_of: impl Fn(&Client) -> &BTreeMap<K, V>,
    to_key: fn(u32) -> K,
    to_number: fn(&K) -> u32,
    to_row: impl Fn(&K, &V) -> Option<R>,
) -> bool {
    add_of_clients(page, resources, viewer, |client, page, after| {
        let first = after.map_or(Bound::Unbounded, |after| Bound::Excluded(to_key(after)));
        for (key, object) in objects_of(client).range((first, Bound::Unbounded)) {
            let Some(row) = to_row(key, object) else {
                continue;
            };
            if !page.add(at(client, to_number(key)), &OwnedRow::new(row, client)) {
                return false;
            }
        }
        true
    })
}

/// A row with the client that has the object.
#[derive(Serialize)]
struct OwnedRow<'a, R> {
    #[serde(flatten)]
    row: R,
    #[serde(flatten)]
    owner: Option<Owner<'a>>,
}

#[derive(Serialize)]
struct Owner<'a> {
    client: u64,
    pid: u32,
    name: &'a str,
}

impl<'a, R: Serialize> OwnedRow<'a, R> {
    fn new(row: R, client: impl Into<Option<&'a Client>>) -> OwnedRow<'a, R> {
        let owner = client.into().map(|client| Owner {
            client: client.id.0,
            pid: client.peer.pid,
            name: &client.name,
        });
        OwnedRow { row, owner }
    }
}

/// State in the terms of verbs (ibv_query_qp(3)).
fn verbs_state(qp: &ClientQp) -> &'static str {
    match (qp.state, qp.phase) {
        (QpState::Idle, QpPhase::Connecting) => "RTR",
        (QpState::Idle, _) => "INIT",
        (QpState::Rtr, _) => "RTR",
        (QpState::Rts, _) => "RTS",
        (QpState::Sqd, _) => "SQD",
        (QpState::Closing | QpState::Terminate | QpState::Error, _) => "ERR",
    }
}

fn device_name(context: &Context, device: usize) -> &str {
    let view = context.devices.views.get(device);
    view.map_or("", |device| device.name.as_str())
}

/// Row of a queue pair. There are more of them than of other objects, so it is written without a
/// [`Value`] between.
#[derive(Serialize)]
struct QueuePairRow<'a> {
    device: &'a str,
    device_index: usize,
    lqpn: u32,
    rqpn: u32,
    pdn: u32,
    #[serde(rename = "type")]
    kind: &'static str,
    state: &'static str,
    worker: usize,
    send_cqn: u32,
    recv_cqn: u32,
    srqn: Option<u32>,
    ird: u16,
    ord: u16,
    src_addr: Option<String>,
    dst_addr: Option<String>,
}

impl<'a> QueuePairRow<'a> {
    fn new(context: &'a Context, number: Qpn, qp: &ClientQp) -> QueuePairRow<'a> {
        QueuePairRow {
            device: device_name(context, qp.device),
            device_index: qp.device,
            lqpn: number.0,
            rqpn: qp.pair.as_ref().map_or(0, |pair| pair.peer_qpn.0),
            pdn: qp.attr.pd,
            kind: "RC",
            state: verbs_state(qp),
            worker: qp.worker,
            send_cqn: qp.send_cq.0,
            recv_cqn: qp.recv_cq.0,
            srqn: qp.srq.map(|srq| srq.0),
            ird: qp.ird,
            ord: qp.ord,
            src_addr: address_text(qp.local),
            dst_addr: address_text(qp.peer),
        }
    }
}

fn region_json(keys: &KeyTable, key: Stag, pd: PdId) -> Value {
    let fields = keys.with_entry(key, |region| {
        let access = region.access_rights();
        let rights = [
            (Access::LOCAL_WRITE, "local_write"),
            (Access::REMOTE_WRITE, "remote_write"),
            (Access::REMOTE_READ, "remote_read"),
            (Access::REMOTE_ATOMIC, "remote_atomic"),
            (Access::MW_BIND, "mw_bind"),
        ];
        let rights = rights.iter().filter(|(right, _)| access.contains(*right));
        let rights: Vec<&str> = rights.map(|(_, name)| *name).collect();
        (region.base_address(), region.len(), rights)
    });
    let (iova, len, rights) = fields.unwrap_or_default();
    json!({
        "mrn": key.0 >> 8,
        "rkey": key.0,
        "lkey": key.0,
        "iova": iova,
        "mrlen": len,
        "pdn": pd.0,
        "access": rights,
    })
}

/// Adds connected queue pairs, and then listeners and bindings.
fn add_cm_ids(page: &mut Page, context: &Context, listeners: &Listeners, viewer: Viewer) -> bool {
    let resources = &context.resources;
    if page.reply.next.major & LISTENERS == 0 {
        let complete = add_objects(
            page,
            (resources, viewer),
            |client| &client.qps,
            Qpn,
            |number| number.0,
            |number, qp| cm_id_json(context, *number, qp),
        );
        if !complete {
            return false;
        }
        page.reply.next = ListPosition {
            major: LISTENERS,
            minor: 0,
        };
    }
    let after = CmListenerId((page.reply.next.major & !LISTENERS) as u32);
    for (number, listener) in listeners.after(after).take(CLIENTS_PER_PAGE) {
        let position = ListPosition {
            major: LISTENERS | u64::from(number.0),
            minor: 0,
        };
        let owner = resources.clients.get(&listener.client);
        let Some(client) = owner.filter(|client| viewer.sees(client.account.uid())) else {
            page.reply.next = position;
            continue;
        };
        let row = listener_json(context, number, listener);
        if !page.add(position, &OwnedRow::new(row, client)) {
            return false;
        }
    }
    let last = CmListenerId((page.reply.next.major & !LISTENERS) as u32);
    listeners.after(last).next().is_none()
}

/// Row of a queue pair that is or was connected.
fn cm_id_json(context: &Context, number: Qpn, qp: &ClientQp) -> Option<Value> {
    let state = match (qp.state, qp.phase) {
        (_, QpPhase::Detached) => return None,
        (_, QpPhase::Connecting) | (QpState::Rts | QpState::Sqd, _) => "CONNECT",
        _ => "DISCONNECT",
    };
    Some(json!({
        "device": device_name(context, qp.device),
        "device_index": qp.device,
        "lqpn": number.0,
        "qp-type": "RC",
        "state": state,
        "ps": "TCP",
        "src_addr": address_text(qp.local),
        "dst_addr": address_text(qp.peer),
    }))
}

fn listener_json(context: &Context, number: CmListenerId, listener: &ClientListener) -> Value {
    let devices = listener.devices.iter();
    let devices: Vec<&str> = devices
        .map(|device| device_name(context, *device))
        .collect();
    json!({
        "device": devices.first(),
        "device_index": listener.devices.first(),
        "devices": devices,
        "cm-idn": number.0,
        "state": if listener.listening { "LISTEN" } else { "ADDR_BOUND" },
        "ps": match listener.space {
            PortSpace::Tcp => "TCP",
            PortSpace::Datagrams => "UDP",
        },
        "src_addr": listener.scope.to_socket_addr(listener.port).to_string(),
        "backlog": listener.backlog,
        "waiting": listener.waiting,
    })
}

/// Adds ended connections. Returns true after the last one.
fn add_ends(page: &mut Page, resources: &Resources, viewer: Viewer) -> bool {
    let after = page.reply.next.major;
    for (number, end) in resources.ends.after(after) {
        let position = ListPosition {
            major: number,
            minor: 0,
        };
        if viewer.sees(end.user) && !page.add(position, &end.to_json()) {
            return false;
        }
        page.reply.next = position;
    }
    true
}

/// Adds the recorded events of the queue pair that the position names, after the event that it names.
/// Returns true after the last one.
fn add_recording(page: &mut Page, context: &Context, viewer: Viewer) -> bool {
    let ListPosition { major, minor } = page.reply.next;
    let recorder = &context.resources.recorder;
    let qpn = u32::try_from(minor).map(Qpn);
    let recording = qpn
        .ok()
        .and_then(|qpn| recorder.find(qpn, |user| viewer.sees(user)));
    let Some(recording) = recording else {
        return true;
    };
    let connection = recording.last_connection.as_ref();
    let head = json!({
        "lqpn": recording.qpn.0,
        "client": recording.owner.client.0,
        "pid": recording.owner.pid,
        "name": recording.owner.name,
        "created": recording.created,
        "ended": recording.ended,
        "events_dropped": recording.dropped,
        "injected_faults": recording.injected.iter().collect::<Vec<_>>(),
        "last_connection": connection.map(|last| connection_json(context, None, last)),
    });
    if major == 0 && !page.add(ListPosition { major: 1, minor }, &head) {
        return false;
    }
    // Events have numbers from the creation on, however many are kept.
    let numbered = recording.events.iter().zip(recording.dropped + 2..);
    let mut rest = numbered.filter(|(_, number)| *number > major);
    rest.all(|(event, number)| {
        let major = number;
        page.add(ListPosition { major, minor }, event)
    })
}

/// Adds the rows of a short list, by their places. Returns true after the last one.
fn add_numbered(page: &mut Page, rows: impl Iterator<Item = Value>) -> bool {
    let after = page.reply.next.major;
    let mut rows = rows.zip(1..).skip(after as usize);
    rows.all(|(row, major)| page.add(ListPosition { major, minor: 0 }, &row))
}

/// Asks a worker for its connections from a position on: worker, and slot in its table.
fn ask_worker(context: &mut Context, id: ClientId, viewer: Viewer, from: ListPosition) -> Served {
    let token = context.workers.next_token(Some(id));
    let last_worker = context.workers.worker_count().saturating_sub(1);
    let worker = usize::try_from(from.major).unwrap_or(0).min(last_worker);
    let command = Command::ListConnections {
        token,
        from: u32::try_from(from.minor).unwrap_or(u32::MAX),
        user: viewer.only_user(),
    };
    context.workers.post_command(worker, command);
    Served::Deferred(Deferred::new(token, Then::ReplyConnections))
}

/// Answers a request for connections with a worker's snapshots. `next` is the worker's slot at which the
/// next page begins.
pub(in crate::control) fn reply_connections(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    worker: usize,
    connections: &[ConnectionSnapshot],
    next: Option<u32>,
) -> Outcome {
    let mut page = Page::new(ListPosition {
        major: worker as u64,
        minor: 0,
    });
    let mut next = next;
    for connection in connections {
        let position = ListPosition {
            major: worker as u64,
            minor: u64::from(connection.slot) + 1,
        };
        let row = connection_json(context, Some(worker), connection);
        let owner = context.resources.clients.get(&connection.client);
        if !page.add(position, &OwnedRow::new(row, owner)) {
            next = Some(connection.slot);
            break;
        }
    }
    let workers = context.workers.worker_count();
    let (major, minor) = match next {
        Some(slot) => (worker, slot),
        None => (worker + 1, 0),
    };
    page.reply.next = ListPosition {
        major: major as u64,
        minor: minor.into(),
    };
    page.reply.is_last = (major >= workers).into();
    send_reply::<m::ListObjects>(context.resources.client_mut(id)?, seq, &page.reply)
}

/// State of a connection; an ended one is in no worker.
fn connection_json(
    context: &Context,
    worker: Option<usize>,
    connection: &ConnectionSnapshot,
) -> Value {
    let mut row = json!({
        "device": device_name(context, connection.device),
        "lqpn": connection.qpn.0,
        "worker": worker,
        "phase": connection.phase,
        "rdmap": {
            "state": connection.rdmap.state.name(),
            "ird": connection.rdmap.ird,
            "ord": connection.rdmap.ord,
            "crc": connection.rdmap.crc,
            "mulpdu": connection.rdmap.mulpdu,
            "markers_in": connection.rdmap.markers_in,
            "markers_out": connection.rdmap.markers_out,
            "terminate_sent": connection.rdmap.terminate_sent.map(|code| code.describe()),
            "terminate_received": connection.rdmap.terminate_received.map(|code| code.describe()),
        },
    });
    if let Some(tcp) = &connection.tcp {
        row["tcp"] = json!({
            "state": tcp.state.name(),
            "local": tcp.local.to_string(),
            "remote": tcp.remote.to_string(),
            "timestamps": tcp.timestamps,
            "sack": tcp.sack,
            "ecn": tcp.ecn,
            "rto_us": tcp.rto.as_micros() as u64,
            "rtt_us": tcp.srtt.map(|time| time.as_nanos() as f64 / 1e3),
            "mss": tcp.effective_mss,
            "cwnd_bytes": tcp.cwnd,
            "ssthresh_bytes": (tcp.ssthresh != u32::MAX).then_some(tcp.ssthresh),
            "snd_wnd": tcp.send_window,
            "unacked_bytes": tcp.in_flight,
            "notsent_bytes": tcp.unsent,
            "readable_bytes": tcp.readable,
            "retrans_out": tcp.retransmitted_in_flight,
            "retrans": tcp.retransmissions.total(),
            "retrans_rto": tcp.retransmissions.timeout,
            "retrans_fast": tcp.retransmissions.fast,
            "retrans_tlp": tcp.retransmissions.tail_probe,
            "retrans_syn": tcp.retransmissions.handshake,
            "window_probes": tcp.window_probes,
            "timeouts": tcp.timeouts,
            "peer_fin": tcp.peer_fin,
        });
    }
    row
}
