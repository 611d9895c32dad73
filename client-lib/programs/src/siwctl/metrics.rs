//! Metrics in the OpenMetrics format: printed once, or served to Prometheus over HTTP. They come from
//! the daemon's statistics, so a scrape costs the daemon one reading of them.

use crate::statistics::{self, rows};
use anyhow::{Context as _, bail};
use clap::Args;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use serde_json::Value;
use std::collections::HashSet;
use std::fmt::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Serve the metrics at http://ADDRESS/metrics, on a loopback address only: they name users
    #[arg(long, value_name = "ADDRESS", conflicts_with = "listen_unix")]
    listen: Option<SocketAddr>,
    /// Serve the metrics on this Unix socket
    #[arg(long, value_name = "PATH")]
    listen_unix: Option<PathBuf>,
    /// Print the text format of Prometheus, as `promtool check metrics` reads it
    #[arg(long)]
    text: bool,
    /// Include series for each client, if there are at most this many clients
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    clients: usize,
}

/// Names and values of a sample's labels.
type Labels = Vec<(&'static str, String)>;

/// A metric family with its samples.
#[derive(Debug)]
struct Family {
    name: String,
    help: String,
    unit: Option<Unit>,
    kind: MetricType,
    samples: Vec<(Labels, Sample)>,
}

/// Value of a sample.
#[derive(Debug)]
enum Sample {
    Number(f64),
    Histogram {
        /// Upper bound and number of values of each bucket; the last bound is that of `f64`.
        buckets: Vec<(f64, u64)>,
        sum: f64,
    },
}

impl Family {
    /// Encodes the value of a sample.
    fn encode_value(&self, sample: &mut MetricEncoder, value: &Sample) -> fmt::Result {
        let value = match value {
            Sample::Number(value) => *value,
            Sample::Histogram { buckets, sum } => {
                let count = buckets.iter().map(|(_, count)| count).sum();
                return sample.encode_histogram::<NoLabelSet>(*sum, count, buckets, None);
            }
        };
        if !matches!(self.kind, MetricType::Counter) {
            sample.encode_gauge(&value)
        } else if self.unit.is_some() {
            sample.encode_counter::<NoLabelSet, _, f64>(&value, None)
        } else {
            // Whole numbers stay whole up to 2^53.
            sample.encode_counter::<NoLabelSet, _, u64>(&(value as u64), None)
        }
    }
}

/// All families of one reading of the statistics.
#[derive(Debug, Default)]
struct Families(Vec<Family>);

impl Families {
    /// Adds a sample to the family with this name, which the first one makes.
    fn add(&mut self, name: &str, help: &str, kind: Kind, labels: Labels, value: f64) {
        self.add_sample(name, help, kind, labels, Sample::Number(value));
    }

    /// Adds a sample of any type, as [`Self::add`] does.
    fn add_sample(&mut self, name: &str, help: &str, kind: Kind, labels: Labels, value: Sample) {
        // The encoder writes label values as they are, and clients choose their names.
        let escape = |value: String| {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"");
            value.replace('\n', "\\n")
        };
        let labels = labels
            .into_iter()
            .map(|(name, value)| (name, escape(value)));
        let labels = labels.collect();
        let (unit, kind) = match kind {
            Kind::Counter => (None, MetricType::Counter),
            Kind::Seconds => (Some(Unit::Seconds), MetricType::Counter),
            Kind::Gauge => (None, MetricType::Gauge),
            Kind::GaugeSeconds => (Some(Unit::Seconds), MetricType::Gauge),
            Kind::GaugeBytes => (Some(Unit::Bytes), MetricType::Gauge),
            Kind::HistogramSeconds => (Some(Unit::Seconds), MetricType::Histogram),
            Kind::HistogramBytes => (Some(Unit::Bytes), MetricType::Histogram),
        };
        let found = self.0.iter().position(|family| family.name == name);
        let place = found.unwrap_or_else(|| {
            self.0.push(Family {
                name: name.to_owned(),
                help: help.to_owned(),
                unit,
                kind,
                samples: Vec::new(),
            });
            self.0.len() - 1
        });
        self.0[place].samples.push((labels, value));
    }
}

/// Type and unit of a metric.
#[derive(Clone, Copy)]
enum Kind {
    Counter,
    /// A counter of seconds.
    Seconds,
    Gauge,
    GaugeSeconds,
    GaugeBytes,
    HistogramSeconds,
    HistogramBytes,
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        for family in &self.0 {
            let unit = family.unit.as_ref();
            let mut metric =
                encoder.encode_descriptor(&family.name, &family.help, unit, family.kind)?;
            for (labels, value) in &family.samples {
                if labels.is_empty() {
                    family.encode_value(&mut metric, value)?;
                } else {
                    family.encode_value(&mut metric.encode_family(labels)?, value)?;
                }
            }
        }
        Ok(())
    }
}

/// Counters of a worker in the statistics, with the names of their metrics.
const WORKER: [(&str, &str, Kind, &str); 17] = [
    ("iterations", "batches", Kind::Counter, "Batches run"),
    ("sleeps", "sleeps", Kind::Counter, "Sleeps without work"),
    (
        "request_slots",
        "requests",
        Kind::Counter,
        "Slots of work requests taken from send queues",
    ),
    (
        "request_batches",
        "request_batches",
        Kind::Counter,
        "Batches of work requests taken from send queues",
    ),
    ("doorbells", "doorbells", Kind::Counter, "Doorbells taken"),
    (
        "completions",
        "completions",
        Kind::Counter,
        "Completions written",
    ),
    (
        "frames_forwarded",
        "forwarded_frames",
        Kind::Counter,
        "Frames handed to the worker that has their connection",
    ),
    (
        "frames_taken",
        "taken_frames",
        Kind::Counter,
        "Frames taken from other workers",
    ),
    (
        "frames_copied",
        "copied_frames",
        Kind::Counter,
        "Forwarded frames that were copied",
    ),
    (
        "frames_sent_for_others",
        "frames_sent_for_others",
        Kind::Counter,
        "Frames sent for workers without a queue of the port",
    ),
    (
        "forward_drops",
        "forward_dropped_frames",
        Kind::Counter,
        "Frames dropped because the queue to another worker was full",
    ),
    (
        "placed_out_of_order",
        "out_of_order_placements",
        Kind::Counter,
        "FPDUs placed before their predecessors",
    ),
    (
        "receive_waits",
        "receive_waits",
        Kind::Counter,
        "Messages that waited for a receive work request",
    ),
    (
        "receive_wait_timeouts",
        "receive_wait_timeouts",
        Kind::Counter,
        "Messages whose receive work request did not come in time",
    ),
    ("queue_pairs", "queue_pairs", Kind::Gauge, "Queue pairs"),
    (
        "buffers",
        "packet_buffers",
        Kind::Gauge,
        "Packet buffers of the pool",
    ),
    (
        "buffers_free",
        "packet_buffers_free",
        Kind::Gauge,
        "Free packet buffers",
    ),
];

/// Distributions of a worker in the statistics, with the names of their metrics and the divisor to their unit.
const WORKER_HISTOGRAMS: [(&str, &str, Kind, f64, &str); 2] = [
    (
        "message_bytes",
        "message",
        Kind::HistogramBytes,
        1.0,
        "Lengths of messages sent: SENDs, WRITEs and responses to READs",
    ),
    (
        "round_trip_ns",
        "round_trip",
        Kind::HistogramSeconds,
        1e9,
        "Smoothed round-trip times of connections, one sample for each burst with acknowledgements",
    ),
];

/// A distribution of the statistics, whose values are divided by `scale`; `None` from an older siwd.
fn histogram_sample(histogram: &Value, scale: f64) -> Option<Sample> {
    let bounds = histogram["bounds"].as_array()?.iter();
    let bounds = bounds.map(|bound| bound.as_f64().unwrap_or(0.0) / scale);
    let counts = histogram["counts"].as_array()?.iter();
    let counts = counts.map(|count| count.as_u64().unwrap_or(0));
    Some(Sample::Histogram {
        buckets: bounds.chain([f64::MAX]).zip(counts).collect(),
        sum: histogram["sum"].as_f64()? / scale,
    })
}

/// Counters of a device in addition to those of TCP.
const DEVICE: [(&str, &str, &str); 6] = [
    (
        "rx_frames",
        "receive_frames",
        "Frames received from the port",
    ),
    (
        "tx_frames",
        "transmit_frames",
        "Frames that the port accepted",
    ),
    (
        "tx_linearized",
        "transmit_linearized_frames",
        "Frames copied into one segment for the port",
    ),
    (
        "tx_refused",
        "transmit_refused_frames",
        "Frames dropped because the port can never send them",
    ),
    (
        "link_downs",
        "link_downs",
        "Number of times that the link went down",
    ),
    (
        "tx_lost",
        "transmit_lost_frames",
        "Frames lost on purpose (loss)",
    ),
];

/// Resources of a client.
const CLIENT: [(&str, &str, Kind, &str); 8] = [
    (
        "queue_pairs",
        "queue_pairs",
        Kind::Gauge,
        "Queue pairs of a client",
    ),
    (
        "completion_queues",
        "completion_queues",
        Kind::Gauge,
        "Completion queues of a client",
    ),
    (
        "memory_regions",
        "memory_regions",
        Kind::Gauge,
        "Memory regions of a client",
    ),
    (
        "connections",
        "connections",
        Kind::Gauge,
        "Connections of a client",
    ),
    (
        "listeners",
        "listeners",
        Kind::Gauge,
        "Listeners of a client",
    ),
    (
        "memory_bytes",
        "memory",
        Kind::GaugeBytes,
        "Memory of a client's regions and queues",
    ),
    (
        "heap_bytes",
        "heap",
        Kind::GaugeBytes,
        "The daemon's own memory for a client",
    ),
    (
        "hugepage_bytes",
        "hugepages",
        Kind::GaugeBytes,
        "Memory of a client in hugepages",
    ),
];

/// The statistics as metric families.
fn families(stats: &Value, most_clients: usize) -> Families {
    let mut all = Families::default();
    for device in rows(stats, "total") {
        let labels = || {
            vec![(
                "device",
                device["device"].as_str().unwrap_or_default().to_owned(),
            )]
        };
        let is_up = f64::from(device["link"] == "up");
        all.add("device_up", "The link is up", Kind::Gauge, labels(), is_up);
        if let Some(mbps) = device["link_mbps"].as_f64().filter(|mbps| *mbps > 0.0) {
            let help = "Link speed, bytes in a second";
            all.add(
                "device_speed",
                help,
                Kind::GaugeBytes,
                labels(),
                mbps * 125_000.0,
            );
        }
        for (key, name, help) in DEVICE {
            let value = device[key].as_f64().unwrap_or(0.0);
            all.add(
                &format!("device_{name}"),
                help,
                Kind::Counter,
                labels(),
                value,
            );
        }
        for (kind, value) in device["faults"].as_object().into_iter().flatten() {
            // A series for each kind would be noise on devices without plans.
            let value = value.as_f64().unwrap_or(0.0);
            if value == 0.0 {
                continue;
            }
            let mut labels = labels();
            labels.push(("kind", kind.clone()));
            all.add(
                "device_injected_faults",
                "Faults that fault plans have injected on purpose",
                Kind::Counter,
                labels,
                value,
            );
        }
        for (mib, value) in device["mib"].as_object().into_iter().flatten() {
            let kind = if mib == "TcpCurrEstab" {
                Kind::Gauge
            } else {
                Kind::Counter
            };
            let help = format!("{mib} of siwctl stat");
            all.add(
                &snake_case(mib),
                &help,
                kind,
                labels(),
                value.as_f64().unwrap_or(0.0),
            );
        }
    }
    if let Some(plans) = stats["fault_plans"].as_f64() {
        let help = "Loaded fault plans: faults are injected on purpose";
        all.add("fault_plans", help, Kind::Gauge, Vec::new(), plans);
    }
    for fault in rows(stats, "faults") {
        let text = |key: &str| match &fault[key] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        all.add(
            "fault_injected",
            "Number of times that a fault of a loaded plan was injected",
            Kind::Counter,
            vec![
                ("plan", text("plan")),
                ("fault", text("fault")),
                ("kind", text("kind")),
            ],
            fault["injected"].as_f64().unwrap_or(0.0),
        );
    }
    for (number, worker) in rows(stats, "workers").iter().enumerate() {
        let labels = || vec![("worker", number.to_string())];
        let cpu = worker["cpu_ns"].as_f64().unwrap_or(0.0) / 1e9;
        all.add(
            "worker_cpu",
            "Processor time of the worker",
            Kind::Seconds,
            labels(),
            cpu,
        );
        all.add(
            "worker_longest_batch",
            "Longest processor time of a batch of the worker",
            Kind::GaugeSeconds,
            labels(),
            worker["longest_batch_ns"].as_f64().unwrap_or(0.0) / 1e9,
        );
        for (key, name, kind, help) in WORKER {
            let value = worker[key].as_f64().unwrap_or(0.0);
            all.add(&format!("worker_{name}"), help, kind, labels(), value);
        }
        for (key, name, kind, scale, help) in WORKER_HISTOGRAMS {
            if let Some(sample) = histogram_sample(&worker[key], scale) {
                all.add_sample(&format!("worker_{name}"), help, kind, labels(), sample);
            }
        }
    }
    for row in rows(stats, "drops") {
        // Those of a device are among its counters.
        if row["device"].is_null() {
            let reason = row["reason"].as_str().unwrap_or_default().to_owned();
            all.add(
                "drops",
                "Connections refused, not made or lost, and frames without a worker, by reason",
                Kind::Counter,
                vec![("reason", reason)],
                row["count"].as_f64().unwrap_or(0.0),
            );
        }
    }
    let clients = rows(stats, "clients");
    all.add(
        "clients",
        "Connected clients",
        Kind::Gauge,
        Vec::new(),
        clients.len() as f64,
    );
    let listeners = stats["listeners"].as_f64().unwrap_or(0.0);
    all.add(
        "listeners",
        "Listeners of all clients",
        Kind::Gauge,
        Vec::new(),
        listeners,
    );
    for (uid, held) in stats["users"].as_object().into_iter().flatten() {
        for (resource, amount) in held.as_object().into_iter().flatten() {
            let labels = vec![("user", uid.clone()), ("resource", resource.clone())];
            let help = "Amount of a resource that a user holds";
            all.add(
                "user_resources",
                help,
                Kind::Gauge,
                labels,
                amount.as_f64().unwrap_or(0.0),
            );
        }
    }
    let turns = stats["control"]["longest_ns"].as_object();
    for (work, nanoseconds) in turns.into_iter().flatten() {
        let help = "Longest processor time of a piece of work of the control thread";
        let seconds = nanoseconds.as_f64().unwrap_or(0.0) / 1e9;
        let labels = vec![("work", work.clone())];
        all.add(
            "control_longest_turn",
            help,
            Kind::GaugeSeconds,
            labels,
            seconds,
        );
    }
    if clients.len() <= most_clients {
        for client in clients {
            for (key, name, kind, help) in CLIENT {
                let labels = vec![
                    ("client", client["id"].to_string()),
                    ("pid", client["pid"].to_string()),
                    ("user", client["user"].to_string()),
                    (
                        "name",
                        client["name"].as_str().unwrap_or_default().to_owned(),
                    ),
                ];
                let value = client[key].as_f64().unwrap_or(0.0);
                all.add(&format!("client_{name}"), help, kind, labels, value);
            }
        }
    }
    all
}

/// The name of a MIB counter as that of a metric: `TcpExtTCPTimeouts` is `tcp_ext_tcp_timeouts`.
fn snake_case(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    let mut out = String::new();
    for (place, letter) in letters.iter().enumerate() {
        let is_upper = |place: usize| letters.get(place).is_some_and(char::is_ascii_uppercase);
        // The plural of an acronym is one word, as in `DelayedACKs`.
        let ends_acronym = place + 2 == letters.len() && letters.last() == Some(&'s');
        let begins_word = place > 0
            && is_upper(place)
            && (!is_upper(place - 1)
                || (place + 1 < letters.len() && !is_upper(place + 1) && !ends_acronym));
        if begins_word {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    out
}

/// Format of the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Text,
}

impl Format {
    fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// The format that a reader accepts.
    fn of(request: &tiny_http::Request) -> Format {
        let accepts = request.headers().iter().any(|header| {
            let is_accept = header.field.equiv("Accept");
            is_accept
                && header
                    .value
                    .as_str()
                    .contains("application/openmetrics-text")
        });
        if accepts {
            Format::OpenMetrics
        } else {
            Format::Text
        }
    }
}

/// Converts OpenMetrics: in the text format, the descriptions of counters have the suffix of the samples,
/// and there are no units and no end.
fn to_text_format(open_metrics: &str) -> String {
    let counters: HashSet<&str> = open_metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut out = String::new();
    for line in open_metrics.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("UNIT" | "EOF"), ..) => {}
            (Some("#"), Some(what), Some(name), Some(rest)) if counters.contains(name) => {
                let _ = writeln!(out, "# {what} {name}_total {rest}");
            }
            _ => {
                let _ = writeln!(out, "{line}");
            }
        }
    }
    out
}

/// Reads the statistics and encodes them.
fn encode(daemon: &siw::Context, most_clients: usize, format: Format) -> anyhow::Result<String> {
    let stats = statistics::read_all(daemon)?;
    let mut registry = Registry::with_prefix("siwd");
    registry.register_collector(Box::new(families(&stats, most_clients)));
    let mut out = String::new();
    text::encode(&mut out, &registry)?;
    Ok(match format {
        Format::OpenMetrics => out,
        Format::Text => to_text_format(&out),
    })
}

/// Prints the metrics once, or serves them until the process is stopped.
pub fn run(daemon: &siw::Context, args: &MetricsArgs) -> anyhow::Result<String> {
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| anyhow::anyhow!("{error}");
    let server = match (args.listen, &args.listen_unix) {
        (Some(address), _) if !address.ip().is_loopback() => bail!(
            "{address} is not a loopback address: the metrics name users and programs, and have no access control; let a proxy publish them"
        ),
        (Some(address), _) => tiny_http::Server::http(address)
            .map_err(failed)
            .with_context(|| format!("cannot listen on {address}"))?,
        (None, Some(path)) => tiny_http::Server::http_unix(path)
            .map_err(failed)
            .with_context(|| format!("cannot listen on {}", path.display()))?,
        (None, None) => {
            let format = if args.text {
                Format::Text
            } else {
                Format::OpenMetrics
            };
            return encode(daemon, args.clients, format);
        }
    };
    match server.server_addr() {
        tiny_http::ListenAddr::IP(address) => eprintln!("siwctl: serving http://{address}/metrics"),
        tiny_http::ListenAddr::Unix(_) => eprintln!("siwctl: serving /metrics"),
    }
    for request in server.incoming_requests() {
        let answer = match request.url() {
            "/metrics" => match encode(daemon, args.clients, Format::of(&request)) {
                Ok(text) => {
                    let mut answer = tiny_http::Response::from_string(text);
                    let kind = Format::of(&request).content_type();
                    if let Ok(header) = tiny_http::Header::from_bytes("Content-Type", kind) {
                        answer.add_header(header);
                    }
                    answer
                }
                Err(error) => {
                    eprintln!("siwctl: {error:#}");
                    tiny_http::Response::from_string(format!("{error:#}\n")).with_status_code(503)
                }
            },
            _ => tiny_http::Response::from_string("the metrics are at /metrics\n")
                .with_status_code(404),
        };
        // A reader that is gone is no error of this server.
        let _ = request.respond(answer);
        // siwd has ended: so does its exporter, which a service manager starts again.
        if let Err(siw::Error::DaemonGone) = daemon.read_stats() {
            bail!("siwd has ended");
        }
    }
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeMap;

    #[test]
    fn names_of_counters_are_words() {
        for (mib, name) in [
            ("TcpRetransSegs", "tcp_retrans_segs"),
            ("TcpExtDelayedACKs", "tcp_ext_delayed_acks"),
            ("TcpExtTCPTimeouts", "tcp_ext_tcp_timeouts"),
            ("TcpExtTCPHPHits", "tcp_ext_tcphp_hits"),
            ("SiwTsoFrames", "siw_tso_frames"),
        ] {
            assert_eq!(snake_case(mib), name);
        }
    }

    #[test]
    fn metrics_follow_the_conventions() {
        let stats = json!({
            "total": [{
                "device": "siw\"0", "link": "up", "link_mbps": 10_000, "rx_frames": 7, "tx_frames": 8,
                "tx_linearized": 0, "tx_refused": 0,
                "mib": { "TcpCurrEstab": 2, "TcpRetransSegs": 5 },
            }],
            "workers": [{
                "cpu_ns": 1_500_000_000u64, "longest_batch_ns": 125_000, "completions": 12,
                "message_bytes": { "bounds": [64, 128], "counts": [3, 0, 2], "sum": 500 },
                "round_trip_ns": { "bounds": [4096, 8192], "counts": [0, 1, 0], "sum": 5000 },
            }],
            "clients": [{ "id": 1, "pid": 2, "user": 3, "name": "x", "memory_bytes": 4096 }],
            "users": { "3": { "connections": 2 } },
            "control": { "longest_ns": { "RegMr": 250_000 } },
            "listeners": 1,
        });
        let encode = |most_clients| {
            let mut registry = Registry::with_prefix("siwd");
            registry.register_collector(Box::new(families(&stats, most_clients)));
            let mut out = String::new();
            text::encode(&mut out, &registry).unwrap();
            out
        };
        let text = encode(1);
        for line in [
            "# TYPE siwd_tcp_retrans_segs counter",
            "siwd_tcp_retrans_segs_total{device=\"siw\\\"0\"} 5",
            "# TYPE siwd_tcp_curr_estab gauge",
            "siwd_device_receive_frames_total{device=\"siw\\\"0\"} 7",
            "siwd_device_speed_bytes{device=\"siw\\\"0\"} 1250000000.0",
            "# UNIT siwd_worker_cpu_seconds seconds",
            "siwd_worker_cpu_seconds_total{worker=\"0\"} 1.5",
            "siwd_worker_completions_total{worker=\"0\"} 12",
            "siwd_worker_longest_batch_seconds{worker=\"0\"} 0.000125",
            "# TYPE siwd_worker_message_bytes histogram",
            "siwd_worker_message_bytes_sum{worker=\"0\"} 500.0",
            "siwd_worker_message_bytes_count{worker=\"0\"} 5",
            "siwd_worker_message_bytes_bucket{le=\"64.0\",worker=\"0\"} 3",
            "siwd_worker_message_bytes_bucket{le=\"128.0\",worker=\"0\"} 3",
            "siwd_worker_message_bytes_bucket{le=\"+Inf\",worker=\"0\"} 5",
            "siwd_worker_round_trip_seconds_bucket{le=\"0.000008192\",worker=\"0\"} 1",
            "siwd_clients 1.0",
            "siwd_user_resources{user=\"3\",resource=\"connections\"} 2.0",
            "siwd_control_longest_turn_seconds{work=\"RegMr\"} 0.00025",
            "siwd_client_memory_bytes{client=\"1\",pid=\"2\",user=\"3\",name=\"x\"} 4096.0",
            "# EOF",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "{line} is missing:\n{text}"
            );
        }
        assert!(
            !encode(0).contains("siwd_client_"),
            "series of clients are off by default"
        );
        let classic = to_text_format(&text);
        let counter = "# TYPE siwd_tcp_retrans_segs_total counter\nsiwd_tcp_retrans_segs_total{";
        assert!(classic.contains(counter), "{classic}");
        assert!(!classic.contains("# UNIT") && !classic.contains("# EOF"));
        let names: BTreeMap<&str, usize> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
            .fold(BTreeMap::new(), |mut seen, name| {
                *seen.entry(name).or_default() += 1;
                seen
            });
        assert!(names.values().all(|count| *count == 1), "{names:?}");
    }
}
