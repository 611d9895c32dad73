//! Counters of workers and clients as JSON.

use std::collections::VecDeque;

use siw_shm::control::messages as m;

use super::counter_files::sum_of_device;
use super::faults::FaultPlans;
use super::pieced_text::PiecedText;
use crate::control::account::quotas::Quota;
use crate::control::context::Context;
use crate::control::request::deferred::{Deferred, Then};
use crate::control::request::replies::{Outcome, Served, send_reply};
use crate::control::resources::{Client, Resources};
use crate::datapath::loss::{CONFIGURED_LOSS, MEANING_OF_LOSS};
use crate::datapath::wire_faults::{INJECTED_LOSS, MEANING_OF_INJECTED_LOSS};
use crate::ids::{ClientId, CommandToken};
use crate::worker::drop_reasons::DropCounts;
use crate::worker::histogram::Histogram;
use crate::worker::messages::{Command, WorkerStats};

/// Rows of clients or users written to an operator's statistics in one turn.
const ROWS_PER_TURN: usize = 32;

/// An operator's statistics: the text so far, and the rows to add.
struct StatisticsText {
    text: PiecedText,
    sections: VecDeque<Section>,
}

/// A list or object of the statistics.
struct Section {
    /// Its name and opening bracket; empty when they are written.
    open: &'static str,
    rows: VecDeque<Row>,
    close: &'static str,
}

impl Section {
    fn new(open: &'static str, rows: impl Iterator<Item = Row>, close: &'static str) -> Section {
        let rows = rows.collect();
        Section { open, rows, close }
    }
}

/// A row of a section.
#[derive(Clone, Copy)]
enum Row {
    /// Counters of a worker.
    Worker(usize),
    /// Counters of a device, summed over all workers.
    Device(usize),
    Client(ClientId),
    User(u32),
    /// Discarded frames of a device by reason, over all workers.
    DeviceDrops(usize),
    /// Refused and lost connections by reason, over all workers.
    ConnectionDrops,
}

impl StatisticsText {
    /// Appends the separator between rows, and a row.
    fn add_row(&mut self, row: &str) {
        if !matches!(self.text.last_byte(), Some(b'[' | b'{')) {
            self.text.push_str(",");
        }
        self.text.push_str(row);
    }
}

/// Statistics that operators read.
pub(in crate::control) struct Statistics {
    /// Effective settings of the daemon.
    settings: serde_json::Value,
    /// Requests of operators whose statistics are being written, a part in each turn.
    reading: VecDeque<(CommandToken, StatisticsText)>,
}

impl Statistics {
    /// Statistics of a daemon with these settings.
    pub fn new(settings: serde_json::Value) -> Statistics {
        Statistics {
            settings,
            reading: VecDeque::new(),
        }
    }

    /// Returns true if statistics are being written.
    pub fn is_writing(&self) -> bool {
        !self.reading.is_empty()
    }

    /// Begins to write the statistics that an operator reads, after all workers have reported.
    pub(in crate::control) fn begin(
        &mut self,
        context: &mut Context,
        listeners: usize,
        faults: &FaultPlans,
        id: ClientId,
    ) -> Served {
        let listed = |device: &usize| !context.devices.views[*device].is_deleted;
        let views = context.devices.views.iter();
        let views = views.filter(|view| !view.is_deleted);
        let mut settings = self.settings.clone();
        settings["devices"] = views.map(|view| view.settings.clone()).collect();
        let mut text = serde_json::json!({
            "scope": "all",
            "settings": settings,
            "control": { "longest_ns": context.times.to_json() },
            "listeners": listeners,
            "fault_plans": faults.count(),
            "faults": faults.rows().collect::<Vec<_>>(),
        })
        .to_string();
        // Without its closing brace.
        text.pop();
        let workers = (0..context.workers.stats.len()).map(Row::Worker);
        let devices: Vec<usize> = (0..context.devices.views.len()).filter(listed).collect();
        let drops: Vec<Row> = devices.iter().copied().map(Row::DeviceDrops).collect();
        let devices = devices.into_iter().map(Row::Device);
        let drops = drops.into_iter().chain([Row::ConnectionDrops]);
        let clients = context.resources.clients.keys().copied().map(Row::Client);
        let users = context.resources.ledger.users().map(Row::User);
        let statistics = StatisticsText {
            text: text.as_str().into(),
            sections: VecDeque::from([
                Section::new(r#","workers":["#, workers, "]"),
                Section::new(r#","total":["#, devices, "]"),
                Section::new(r#","drops":["#, drops, "]"),
                Section::new(r#","clients":["#, clients, "]"),
                Section::new(r#","users":{"#, users, "}"),
            ]),
        };
        let token = context.workers.next_token(Some(id));
        self.reading.push_back((token, statistics));
        Served::Deferred(Deferred::new(token, Then::ReplyStatistics))
    }

    /// Writes some rows of the statistics of one operator. Returns the whole text after the last one.
    pub fn continue_statistics(
        &mut self,
        context: &mut Context,
    ) -> Option<(CommandToken, PiecedText)> {
        let (token, mut statistics) = self.reading.pop_front()?;
        // The client may have left.
        context.resources.deferred_mut(token)?;
        if write_rows(context, &mut statistics) {
            return Some((token, statistics.text));
        }
        self.reading.push_back((token, statistics));
        None
    }
}

/// Sends the begin of an operator's statistics, and keeps the rest to be read.
pub(in crate::control) fn reply_statistics(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    text: PiecedText,
) -> Outcome {
    let client = resources.client_mut(id)?;
    let part = statistics_part(&text, 0);
    client.stats_text = rest_to_read(text, &part);
    send_reply::<m::ReadStats>(client, seq, &part)
}

pub(in crate::control) fn read_statistics(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    offset: u32,
) -> Outcome {
    let client = context.resources.client_mut(id)?;
    if offset > 0 {
        let part = statistics_part(&client.stats_text, offset);
        // Read to its end.
        if u64::from(offset) + u64::from(part.len) >= client.stats_text.len() as u64 {
            client.stats_text = PiecedText::default();
        }
        return send_reply::<m::ReadStats>(client, seq, &part);
    }
    if !client.account.is_operator() {
        let text = own_statistics(&context.resources, id);
        return reply_statistics(&mut context.resources, id, seq, text.as_str().into());
    }
    let token = context.workers.next_token(Some(id));
    let left = context.workers.worker_count();
    context.workers.post_to_all(|| Command::Stats { token });
    let then = Then::WriteStatistics;
    Ok(Served::Deferred(Deferred { token, left, then }))
}

/// Adds rows; returns true if the text is complete.
fn write_rows(context: &Context, statistics: &mut StatisticsText) -> bool {
    for _ in 0..ROWS_PER_TURN {
        let Some(section) = statistics.sections.front_mut() else {
            statistics.text.push_str("}");
            return true;
        };
        statistics.text.push_str(std::mem::take(&mut section.open));
        let Some(row) = section.rows.pop_front() else {
            statistics.text.push_str(section.close);
            statistics.sections.pop_front();
            continue;
        };
        match row {
            Row::Worker(worker) => {
                if let Some(stats) = context.workers.stats.get(worker) {
                    statistics.add_row(&worker_json(context, stats).to_string());
                }
                // Hundreds of counters.
                return false;
            }
            Row::Device(device) => {
                statistics.add_row(&device_json(context, device).to_string());
                return false;
            }
            Row::DeviceDrops(device) => {
                for row in device_drops(context, device) {
                    statistics.add_row(&row.to_string());
                }
                return false;
            }
            Row::ConnectionDrops => {
                for row in connection_drops(context) {
                    statistics.add_row(&row.to_string());
                }
                return false;
            }
            Row::Client(id) => {
                if let Some(client) = context.resources.clients.get(&id) {
                    statistics.add_row(&client_json(client).to_string());
                }
            }
            Row::User(uid) => {
                if let Some(user) = context.resources.ledger.user_to_json(uid) {
                    statistics.add_row(&format!("\"{uid}\":{user}"));
                }
            }
        }
    }
    false
}

fn worker_json(context: &Context, worker: &WorkerStats) -> serde_json::Value {
    let devices: Vec<serde_json::Value> = worker
        .devices
        .iter()
        .filter_map(|port| {
            let device = context.devices.views.get(port.device);
            let device = device.filter(|device| !device.is_deleted)?;
            Some(serde_json::json!({
                "device": device.name,
                "rx_frames": port.frames_received,
                "tx_frames": port.frames_sent,
                "tx_linearized": port.frames_linearized,
                "tx_refused": port.frames_refused,
                "tx_lost": port.frames_lost,
                "faults": counter_map(port.faults.iter()),
                "host_tx": port.host_frames_sent,
                "host_dropped": port.host_frames_dropped,
                "tcp": counter_map(port.tcp.iter()),
                "mib": counter_map(port.tcp.mib_counters()),
            }))
        })
        .collect();
    serde_json::json!({
        "queue_pairs": worker.queue_pairs,
        "iterations": worker.iterations,
        "sleeps": worker.sleeps,
        "core": worker.core,
        "cpu_ns": worker.cpu_ns,
        "longest_batch_ns": worker.longest_batch_ns,
        "request_slots": worker.shared_lines.request_slots,
        "request_batches": worker.shared_lines.request_batches,
        "doorbells": worker.shared_lines.doorbells,
        "completions": worker.shared_lines.completions,
        "frames_forwarded": worker.forward.forwarded,
        "frames_taken": worker.forward.taken,
        "frames_copied": worker.forward.copied,
        "frames_sent_for_others": worker.forward.sent_for_others,
        "forward_drops": worker.forward.dropped,
        "placed_out_of_order": worker.placed_out_of_order,
        "receive_waits": worker.receive_waits,
        "receive_wait_timeouts": worker.receive_wait_timeouts,
        "buffers": worker.buffers,
        "buffers_free": worker.buffers_free,
        "message_bytes": histogram_json(&worker.messages),
        "round_trip_ns": histogram_json(&worker.round_trips),
        "devices": devices,
    })
}

/// Number of values up to each bound, and above the last one.
fn histogram_json<const FIRST: u32>(histogram: &Histogram<FIRST>) -> serde_json::Value {
    serde_json::json!({
        "bounds": Histogram::<FIRST>::bounds(),
        "counts": histogram.counts(),
        "sum": histogram.sum(),
    })
}

/// Counters of a device, summed over all workers.
fn device_json(context: &Context, number: usize) -> serde_json::Value {
    let sum = sum_of_device(&context.workers.stats, number);
    let device = &context.devices.views[number];
    serde_json::json!({
        "device": device.name.as_str(),
        "link": match (device.is_gone, device.link_up) {
            (true, _) => "removed",
            (false, true) => "up",
            (false, false) => "down",
        },
        "link_mbps": device.link_mbps,
        "link_downs": device.link_downs,
        "unserved_queues": device.unserved_queues,
        "rx_frames": sum.frames_received,
        "tx_frames": sum.frames_sent,
        "tx_linearized": sum.frames_linearized,
        "tx_refused": sum.frames_refused,
        "tx_lost": sum.frames_lost,
        "faults": counter_map(sum.faults.iter()),
        "mib": counter_map(sum.tcp.mib_counters()),
    })
}

/// Rows of the list of drops: frames and segments that were discarded on a device.
fn device_drops(context: &Context, number: usize) -> Vec<serde_json::Value> {
    let sum = sum_of_device(&context.workers.stats, number);
    let ports = [
        (
            "TX_REFUSED",
            "frames that the port can never send: longer than its MTU",
            sum.frames_refused,
        ),
        (
            "HOST_QUEUE_FULL",
            "frames between port and kernel without room",
            sum.host_frames_dropped,
        ),
        (CONFIGURED_LOSS, MEANING_OF_LOSS, sum.frames_lost),
        (INJECTED_LOSS, MEANING_OF_INJECTED_LOSS, sum.faults.lost),
    ];
    let tcp = sum.tcp.drops();
    let tcp = tcp.map(|(name, count)| (name, siw_tcp::StackStats::meaning_of(name), count));
    let device = context.devices.views[number].name.as_str();
    tcp.chain(ports)
        .map(|(reason, meaning, count)| {
            serde_json::json!({
                "device": device, "reason": reason, "meaning": meaning, "count": count,
            })
        })
        .collect()
}

/// Rows of the list of drops: connections that were refused, not made or lost, and frames that another
/// worker could not take.
fn connection_drops(context: &Context) -> Vec<serde_json::Value> {
    let mut sum = DropCounts::default();
    let mut forward_drops = 0;
    for worker in &context.workers.stats {
        sum.merge(&worker.drops);
        forward_drops += worker.forward.dropped;
    }
    let forward = (
        "FORWARD_FULL",
        "frames whose worker's queue was full",
        forward_drops,
    );
    let reasons = sum.iter();
    let reasons = reasons.map(|(reason, count)| (reason.name(), reason.meaning(), count));
    reasons
        .chain([forward])
        .map(|(reason, meaning, count)| {
            serde_json::json!({ "reason": reason, "meaning": meaning, "count": count })
        })
        .collect()
}

/// Statistics for a client that is not an operator: itself, and the usage and limits of it and
/// its user.
fn own_statistics(resources: &Resources, id: ClientId) -> String {
    let clients: Vec<serde_json::Value> = resources
        .clients
        .get(&id)
        .map(|client| {
            let mut own = client_json(client);
            own["quotas"] = resources.ledger.to_json(&client.account);
            own
        })
        .into_iter()
        .collect();
    serde_json::json!({ "scope": "client", "clients": clients }).to_string()
}

/// Access methods to the application's existing memory: bytes by method, and the reasons for memory
/// that is not remapped with their number of regions.
fn registered_json(client: &Client) -> serde_json::Value {
    let sums = client.memory.registered_sums();
    let mut reasons = counter_map(
        sums.reasons
            .iter()
            .map(|(why, count)| (why.as_str(), *count)),
    );
    if sums.other_reasons > 0 {
        reasons.insert("other reasons".into(), sums.other_reasons.into());
    }
    let by_method = m::ExtentMethod::ALL.iter().zip(sums.bytes);
    let by_method = by_method.map(|(method, bytes)| (method.as_str(), bytes));
    serde_json::json!({ "bytes": counter_map(by_method), "reasons": reasons })
}

/// A client, as operators see it.
pub(in crate::control) fn client_json(client: &Client) -> serde_json::Value {
    let held = |quota| client.account.amount(quota);
    serde_json::json!({
        "id": client.id.0,
        "pid": client.peer.pid,
        "uid": client.peer.uid,
        "user": client.account.uid(),
        "name": client.name,
        "queue_pairs": client.qps.len(),
        "completion_queues": client.cqs.len(),
        "memory_regions": client.memory.regions().len(),
        "registered": registered_json(client),
        "memory_bytes": held(Quota::Memory),
        "heap_bytes": held(Quota::Heap),
        "hugepage_bytes": held(Quota::HugeMemory),
        "descriptors": held(Quota::Descriptors),
        "connections": held(Quota::Connections),
        "listeners": held(Quota::Listeners),
    })
}

fn counter_map<'a>(
    counters: impl Iterator<Item = (&'a str, u64)>,
) -> serde_json::Map<String, serde_json::Value> {
    counters
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect()
}

/// The text to keep for further requests after its first part was sent.
fn rest_to_read(text: PiecedText, first: &m::StatsReply) -> PiecedText {
    if text.len() > first.len as usize {
        text
    } else {
        PiecedText::default()
    }
}

fn statistics_part(text: &PiecedText, offset: u32) -> m::StatsReply {
    let mut reply = m::StatsReply {
        total: text.len() as u32,
        len: 0,
        text: [0; 4096],
    };
    reply.len = text.copy_from(offset as usize, &mut reply.text) as u32;
    reply
}
