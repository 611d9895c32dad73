//! Result of `siw-perf`: one line of JSON for programs, a few lines for people.

use crate::bounds::Bound;
use crate::daemon::{Retransmissions, WorkerUse};
use crate::machine::{Conditions, MachineRecord};
use crate::measurement::{Measurement, Quantiles, format_bytes, gigabits_per_second};
use crate::plan::{MeasurementPlan, Mode, Operation, each_message};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The link used by a transfer.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TransferPath {
    /// The initiator's device.
    pub from: String,
    /// The target's device, or its address if it is in another process.
    pub to: String,
    /// DPDK's driver of the initiator's port.
    pub driver: String,
    /// The smaller of both devices' MTUs.
    pub mtu: u32,
    /// True if the connections use CRCs.
    pub crc: bool,
}

/// All printed results of a measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PerfReport {
    /// Bandwidth or latency.
    pub mode: Mode,
    /// Operation that moved the data.
    pub op: Operation,
    /// Bytes of a message.
    pub size: u32,
    /// Messages in flight on each queue pair.
    pub depth: u32,
    /// Queue pairs of all threads, in one direction.
    pub qps: u32,
    /// Threads of the application, each with an equal number of queue pairs.
    #[serde(default = "one_thread")]
    pub threads: u32,
    /// True if both ends sent; bandwidth and rate are totals of both directions.
    #[serde(default)]
    pub bidirectional: bool,
    /// True if completions were awaited by events.
    #[serde(default)]
    pub events: bool,
    /// Interval in messages between requested completions.
    #[serde(default = "each_message")]
    pub cq_mod: u32,
    /// Markers requested by the target; `None`: its device's configuration.
    #[serde(default)]
    pub markers: Option<bool>,
    /// MTU of the link.
    pub mtu: u32,
    /// True if the connections use CRCs.
    pub crc: bool,
    /// Payload throughput in Gb/s.
    pub gbps: f64,
    /// Million messages per second.
    pub mmsgs: f64,
    /// Latency in microseconds.
    pub lat_us: Quantiles,
    /// Upper bounds of the machine.
    pub bound: Bound,
    /// Bandwidth divided by the bound, [`Bound::path_gbps`]; null for latency, without bounds, and if
    /// several workers carried the transfer. In results without `bound.path_gbps` it has another
    /// meaning: divided by the combined costs of the parts, which transfers could exceed.
    pub ratio: Option<f64>,
    /// Seconds measured.
    pub secs: f64,
    /// Messages completed.
    pub messages: u64,
    /// Messages whose data was verified.
    pub verified: u64,
    /// Retransmissions of the daemon during the measurement, for all clients.
    pub tcp: Retransmissions,
    /// True if payload travelled in the work requests.
    pub inline: bool,
    /// Connected idle queue pairs in addition to the measured ones.
    #[serde(default)]
    pub idle_qps: u32,
    /// Loss configured on the link, in frames per million, as given on the command line.
    #[serde(default)]
    pub link_loss_ppm: u32,
    /// Microseconds of silence before each round trip.
    #[serde(default)]
    pub pause_us: u64,
    /// Gb/s of the bulk transfer concurrent with the round trips, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bulk_gbps: Option<f64>,
    /// The initiator's device.
    pub from: String,
    /// The target's device or address.
    pub to: String,
    /// DPDK's driver of the initiator's port.
    pub driver: String,
    /// Remarks on the measurement for the reader.
    pub notes: Vec<String>,
    /// Work of the daemon's workers during the measurement, for all clients; of both daemons if the
    /// target has one of its own.
    pub workers: Vec<WorkerUse>,
    /// CPU time of the application, the measuring process, in percent of a core.
    #[serde(default)]
    pub application_percent: Option<f64>,
    /// Gb/s in each interval, if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series_gbps: Vec<f64>,
    /// Pairs of microseconds and number of messages with that latency, if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histogram: Vec<(f64, u64)>,
    /// Number of the measurement among those of the same transfer, from 1.
    pub round: u32,
    /// lat: median round trip in units of the cores' cache-line round trip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_lines: Option<f64>,
    /// bw, rate: messages per cache-line round trip between the cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages_per_line: Option<f64>,
    /// 99th percentile of the latency divided by the median.
    #[serde(default)]
    pub p99_by_p50: f64,
    /// Conditions during the measurement.
    pub conditions: Conditions,
    /// The daemon's effective settings; `None` if the client is not an operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<serde_json::Value>,
    /// The machine.
    pub machine: MachineRecord,
}

impl PerfReport {
    /// Builds the report of a measurement and its bounds.
    pub fn new(
        plan: &MeasurementPlan,
        path: TransferPath,
        measured: &Measurement,
        bound: Bound,
        tcp: Retransmissions,
        notes: Vec<String>,
    ) -> PerfReport {
        let secs = measured.time.as_secs_f64().max(1e-9);
        let gbps = measured.bytes as f64 * 8.0 / secs / 1e9;
        let limit = bound.path_gbps;
        PerfReport {
            mode: plan.mode,
            op: plan.op,
            size: plan.size,
            depth: plan.depth,
            qps: plan.qps,
            threads: 1,
            bidirectional: false,
            events: plan.events,
            cq_mod: plan.cq_mod,
            markers: plan.markers,
            mtu: path.mtu,
            crc: path.crc,
            gbps: round_to_micro(gbps),
            mmsgs: round_to_micro(measured.messages as f64 / secs / 1e6),
            lat_us: Quantiles::from(&measured.latency),
            bound: Bound {
                raw_gbps: bound.raw_gbps.map(round_to_micro),
                raw_copy_gbps: bound.raw_copy_gbps.map(round_to_micro),
                raw_reference_gbps: bound.raw_reference_gbps.map(round_to_micro),
                copy_crc_gbps: bound.copy_crc_gbps.map(round_to_micro),
                crc_gbps: bound.crc_gbps.map(round_to_micro),
                copy_gbps: bound.copy_gbps.map(round_to_micro),
                path_gbps: bound.path_gbps.map(round_to_micro),
                raw_rtt_us: bound.raw_rtt_us,
            },
            ratio: (plan.mode == Mode::Bw)
                .then_some(())
                .and(limit)
                .map(|limit| round_to_micro(gbps / limit)),
            secs: round_to_micro(secs),
            messages: measured.messages,
            verified: measured.verified,
            tcp,
            inline: plan.inline,
            idle_qps: 0,
            pause_us: 0,
            bulk_gbps: None,
            from: path.from,
            to: path.to,
            driver: path.driver,
            notes,
            workers: Vec::new(),
            application_percent: None,
            series_gbps: Vec::new(),
            histogram: Vec::new(),
            round: 1,
            round_trip_lines: None,
            messages_per_line: None,
            p99_by_p50: quotient(
                measured.latency.value_at_quantile(0.99) as f64,
                measured.latency.value_at_quantile(0.5) as f64,
            ),
            conditions: Conditions::default(),
            settings: None,
            link_loss_ppm: 0,
            machine: MachineRecord::default(),
        }
    }

    /// Names the transfer's deviations from the defaults; empty if there are none.
    pub fn variants(&self) -> Vec<String> {
        let mut words = Vec::new();
        for (is_so, word) in [
            (!self.crc, "CRC off"),
            (self.markers == Some(true), "markers"),
            (self.inline, "inline"),
            (self.bidirectional, "both directions"),
            (self.events, "events"),
            (self.bulk_gbps.is_some(), "beside bulk"),
        ] {
            if is_so {
                words.push(word.to_owned());
            }
        }
        if self.threads > 1 {
            words.push(format!("{} threads", self.threads));
        }
        if self.cq_mod > 1 {
            words.push(format!("{} messages to a completion", self.cq_mod));
        }
        if self.idle_qps > 0 {
            words.push(format!("{} idle QP", self.idle_qps));
        }
        if self.pause_us > 0 {
            words.push(format!("after {} us of silence", self.pause_us));
        }
        words
    }

    /// Describes the link's loss, if it has any.
    pub fn loss_in_words(&self) -> Option<String> {
        let percent = f64::from(self.link_loss_ppm) / 1e4;
        (self.link_loss_ppm > 0).then(|| format!("{percent} % loss"))
    }

    /// Returns true if the bandwidth exceeds its bound, so that one of them was measured wrongly.
    pub fn exceeds_bound(&self) -> bool {
        self.bound.path_gbps.is_some() && self.ratio.is_some_and(|ratio| ratio > 1.0)
    }

    /// Adds the work of the daemon's workers. The bound is that of one worker.
    pub fn add_workers(&mut self, workers: Vec<WorkerUse>) {
        let busy = workers.iter().filter(|worker| worker.busy_percent >= 5.0);
        if self.ratio.is_some() && busy.count() > 1 {
            self.ratio = None;
            self.notes
                .push("no ratio: the bound is that of one worker, and several worked".into());
        }
        self.workers = workers;
    }

    /// Adds the conditions, and the results in units of their cache-line round trip.
    pub fn add_conditions(&mut self, mut conditions: Conditions) {
        if self.exceeds_bound() {
            let reason = "the transfer exceeded its bound: one of them was measured wrongly";
            conditions.disturbed.get_or_insert_with(|| reason.into());
        }
        let line = conditions.shortest_cache_line_ns();
        let (line_us, lat) = (line.map(|ns| ns / 1e3), self.mode == Mode::Lat);
        self.round_trip_lines = line_us
            .filter(|_| lat)
            .map(|us| quotient(self.lat_us.p50, us));
        self.messages_per_line = line_us
            .filter(|_| !lat)
            .map(|us| round_to_micro(self.mmsgs * us));
        self.conditions = conditions;
    }

    /// Adds the bandwidth of each `interval` of the measurement.
    pub fn add_series(&mut self, measured: &Measurement, interval: Duration) {
        self.series_gbps = measured
            .series
            .iter()
            .map(|messages| {
                let bytes = messages * u64::from(self.size);
                round_to_micro(gigabits_per_second(bytes, interval))
            })
            .collect();
    }

    /// Adds the full latency distribution.
    pub fn add_histogram(&mut self, measured: &Measurement) {
        self.histogram = measured
            .latency
            .iter_recorded()
            .map(|step| {
                let us = step.value_iterated_to() as f64 / 1e3;
                (us, step.count_since_last_iteration())
            })
            .collect();
    }

    /// The report as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl PerfReport {
    /// CPU time of all workers in percent of a core; `None` if the client may not see them.
    pub fn worker_percent(&self) -> Option<f64> {
        let all = self.workers.iter().map(|worker| worker.busy_percent);
        (!self.workers.is_empty()).then(|| all.sum())
    }

    /// Name of the time that [`Self::lat_us`] measures.
    fn latency_name(&self) -> &'static str {
        match self.mode {
            Mode::Lat => "round trip",
            Mode::Bw => "from posting to completion",
        }
    }

    /// Results in units of the time that a cache line takes between the cores, with an explanation.
    fn format_cache_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for lines in self.workers.iter().filter_map(|one| one.lines_per_message) {
            writeln!(f, "  {lines}")?;
        }
        let amount = match (self.round_trip_lines, self.messages_per_line) {
            (Some(trips), _) => format!("a round trip takes {trips:.1} of them"),
            (None, Some(messages)) => format!("{messages:.3} messages in one of them"),
            (None, None) => return Ok(()),
        };
        let ns = match self.conditions.shortest_cache_line_ns() {
            Some(ns) => format!("{ns:.0} ns"),
            None => "unknown".into(),
        };
        writeln!(
            f,
            "  cache-line round trip ({ns} now): a cache line from the application's core to the \
             worker's and back, the unit in which machines can be compared; {amount}"
        )
    }
}

fn one_thread() -> u32 {
    1
}

fn quotient(value: f64, by: f64) -> f64 {
    round_to_micro(value / by.max(1e-9))
}

/// Rounds to six decimal places, so that small rates stay visible.
fn round_to_micro(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

impl fmt::Display for PerfReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let latency = &self.lat_us;
        let what = match self.mode {
            Mode::Bw => format!(
                "depth {}, {} QP{}{}",
                self.depth,
                self.qps,
                match self.threads {
                    1 => String::new(),
                    threads => format!(" of {threads} threads"),
                },
                if self.bidirectional {
                    " in each direction"
                } else {
                    ""
                }
            ),
            Mode::Lat => "round trips".into(),
        };
        writeln!(
            f,
            "{} {}, {what}, {} -> {} ({}), MTU {}, CRC {}",
            self.op.json_name().to_uppercase(),
            format_bytes(self.size),
            self.from,
            self.to,
            self.driver,
            self.mtu,
            if self.crc { "on" } else { "off" }
        )?;
        writeln!(
            f,
            "  {:.2} Gb/s ({:.2} MB/s)  {:.4} M messages/s  {} messages in {:.2} s{}",
            self.gbps,
            self.gbps * 1e3 / 8.0,
            self.mmsgs,
            self.messages,
            self.secs,
            match self.verified {
                0 => String::new(),
                checked => format!(", {checked} of them checked"),
            }
        )?;
        writeln!(
            f,
            "  {} p50 {:.2}  p99 {:.2}  p99.9 {:.2} us{}",
            self.latency_name(),
            latency.p50,
            latency.p99,
            latency.p999,
            match self.bound.raw_rtt_us {
                Some(raw) => format!("; raw frame round trip {raw:.2} us"),
                None => String::new(),
            }
        )?;
        if self.mode == Mode::Lat {
            writeln!(
                f,
                "  min {:.2}  avg {:.2}  max {:.2}  standard deviation {:.2} us{}",
                latency.min,
                latency.avg,
                latency.max,
                latency.stddev,
                match self.op.has_response() {
                    true => String::new(),
                    false => format!(
                        "; half a round trip, as perftest reports it: avg {:.2} us",
                        latency.avg / 2.0
                    ),
                }
            )?;
        }
        if let Some(gbps) = self.bulk_gbps {
            writeln!(f, "  during a bulk transfer of {gbps:.2} Gb/s")?;
        }
        if self.idle_qps > 0 {
            writeln!(f, "  with {} idle queue pairs", self.idle_qps)?;
        }
        let bound = &self.bound;
        let parts: Vec<String> = [
            ("raw frames by copy", bound.raw_copy_gbps),
            ("by reference", bound.raw_reference_gbps),
            ("copy+CRC", bound.copy_crc_gbps),
            ("CRC", bound.crc_gbps),
            ("copy", bound.copy_gbps),
        ]
        .iter()
        .filter_map(|(name, value)| value.map(|value| format!("{name} {value:.1}")))
        .collect();
        if !parts.is_empty() {
            writeln!(f, "  parts alone: {} Gb/s", parts.join(", "))?;
        }
        if let Some(limit) = bound.path_gbps {
            write!(f, "  bound: {limit:.1} Gb/s, all parts in turn on one core")?;
            match self.ratio {
                Some(ratio) => writeln!(f, "; ratio {ratio:.2}")?,
                None => writeln!(f)?,
            }
        }
        if self.tcp != Retransmissions::default() {
            writeln!(
                f,
                "  TCP retransmitted {} segments, {} retransmission timeouts",
                self.tcp.retrans_segs, self.tcp.timeouts
            )?;
        }
        for worker in &self.workers {
            writeln!(f, "  {worker}")?;
        }
        if let (true, Some(percent)) = (self.events, self.application_percent) {
            writeln!(f, "  the application ran {percent:.0} % of the time")?;
        }
        self.format_cache_lines(f)?;
        if !self.series_gbps.is_empty() {
            let series: Vec<String> = self
                .series_gbps
                .iter()
                .map(|gbps| format!("{gbps:.2}"))
                .collect();
            writeln!(f, "  Gb/s by interval: {}", series.join(" "))?;
        }
        if let Some(reason) = &self.conditions.disturbed {
            writeln!(f, "  disturbed: {reason}")?;
        }
        for note in &self.notes {
            writeln!(f, "  note: {note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
fn report_with(mode: Mode, bound: Bound) -> PerfReport {
    let mut latency = crate::measurement::new_histogram().unwrap();
    for us in 1..=1000u64 {
        latency.saturating_record(us * 1000);
    }
    let measured = Measurement {
        messages: 2000,
        bytes: 2000 << 20,
        time: Duration::from_secs(1),
        all_messages: 2500,
        latency,
        verified: 0,
        series: vec![1000, 1000],
    };
    let path = TransferPath {
        from: "siw0".into(),
        to: "siw1".into(),
        driver: "net_ring".into(),
        mtu: 1500,
        crc: true,
    };
    let plan = MeasurementPlan {
        mode,
        ..crate::plan::example()
    };
    PerfReport::new(
        &plan,
        path,
        &measured,
        bound,
        Retransmissions::default(),
        vec![],
    )
}

#[cfg(test)]
fn bound() -> Bound {
    Bound {
        raw_gbps: Some(100.0),
        raw_copy_gbps: Some(80.0),
        raw_reference_gbps: Some(100.0),
        copy_crc_gbps: Some(100.0),
        crc_gbps: Some(100.0),
        path_gbps: Some(100.0 / 3.0),
        ..Bound::default()
    }
}

/// An example result for tests.
#[cfg(test)]
pub(crate) fn example_report(mode: Mode) -> PerfReport {
    report_with(mode, bound())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::new_histogram;

    fn report(mode: Mode, bound: Bound) -> PerfReport {
        super::report_with(mode, bound)
    }

    #[test]
    fn the_json_has_the_keys_that_programs_read() {
        let r = report(Mode::Bw, bound());
        let value: serde_json::Value = serde_json::from_str(&r.to_json()).unwrap();
        for key in [
            "op", "size", "qps", "mtu", "crc", "gbps", "mmsgs", "lat_us", "bound", "ratio",
        ] {
            assert!(value.get(key).is_some(), "{key} is missing in {value}");
        }
        for key in ["p50", "p99", "p999", "max"] {
            assert!(value["lat_us"][key].is_f64(), "{key} in {value}");
        }
        for key in ["raw_gbps", "copy_crc_gbps", "crc_gbps"] {
            assert!(value["bound"][key].is_f64(), "{key} in {value}");
        }
        assert_eq!(value["op"], "write");
        assert_eq!(value["crc"], true);
        assert!(!r.to_json().contains('\n'));
    }

    #[test]
    fn bounds_that_were_not_measured_are_null() {
        let r = report(Mode::Bw, Bound::default());
        let value: serde_json::Value = serde_json::from_str(&r.to_json()).unwrap();
        assert!(
            value["bound"]["raw_gbps"].is_null() && value["ratio"].is_null(),
            "{value}"
        );
    }

    #[test]
    fn a_ratio_above_one_is_an_error_of_the_measurement() {
        let mut r = report(Mode::Bw, bound());
        r.add_conditions(Conditions::default());
        assert!(!r.exceeds_bound() && r.conditions.disturbed.is_none());
        let low = Bound {
            path_gbps: Some(10.0),
            ..bound()
        };
        let mut r = report(Mode::Bw, low);
        r.add_conditions(Conditions::default());
        assert!(r.exceeds_bound());
        assert!(r.to_string().contains("exceeded its bound"), "{r}");
        // Two workers may exceed the bound of one.
        let worker = |busy_percent| WorkerUse {
            busy_percent,
            ..WorkerUse::default()
        };
        let mut r = report(Mode::Bw, low);
        r.add_workers(vec![worker(90.0), worker(0.1)]);
        assert!(r.exceeds_bound());
        r.add_workers(vec![worker(90.0), worker(80.0)]);
        assert!(!r.exceeds_bound() && r.ratio.is_none());
    }

    #[test]
    fn the_ratio_is_bandwidth_over_the_bound() {
        let r = report(Mode::Bw, bound());
        let gbps = 2000.0 * f64::from(1 << 20) * 8.0 / 1e9;
        assert!((r.gbps - gbps).abs() < 1e-3);
        assert!((r.ratio.unwrap() - gbps / (100.0 / 3.0)).abs() < 1e-3);
        assert_eq!(report(Mode::Lat, bound()).ratio, None);
    }

    #[test]
    fn a_series_has_the_bandwidth_of_each_interval() {
        let mut r = report(Mode::Bw, bound());
        let measured = Measurement {
            messages: 3000,
            bytes: 3000 << 20,
            time: Duration::from_secs(3),
            all_messages: 3000,
            latency: new_histogram().unwrap(),
            verified: 0,
            series: vec![1000, 2000],
        };
        r.add_series(&measured, Duration::from_secs(1));
        assert_eq!(r.series_gbps, [8.388608, 16.777216]);
    }

    #[test]
    fn quantiles_are_microseconds() {
        let quantile = report(Mode::Lat, bound()).lat_us;
        assert!((quantile.p50 - 500.0).abs() < 1.0, "{quantile:?}");
        assert!((quantile.p99 - 990.0).abs() < 1.0, "{quantile:?}");
        assert!((quantile.p999 - 999.0).abs() < 1.0, "{quantile:?}");
    }

    #[test]
    fn a_latency_says_that_it_is_a_round_trip() {
        let mut report = report(Mode::Lat, bound());
        report.add_conditions(Conditions {
            cache_line_ns_before: Some(100.0),
            ..Conditions::default()
        });
        let text = report.to_string();
        for part in [
            "round trip p50 500",
            "min 1.00  avg 500.",
            "standard deviation 288.",
            "half a round trip, as perftest reports it: avg 250.",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
        // The unusual unit comes last, and is explained.
        let last = text.lines().last().unwrap();
        assert!(
            last.contains("cache-line round trip (100 ns now)"),
            "{text}"
        );
        report.op = Operation::Read;
        assert!(!report.to_string().contains("half a round trip"));
    }

    #[test]
    fn people_see_the_figures_and_their_bounds() {
        let text = report(Mode::Bw, bound()).to_string();
        for part in [
            "WRITE 1 MiB",
            "siw0 -> siw1",
            "CRC on",
            "16.78 Gb/s (2097.15 MB/s)",
            "from posting to completion p50",
            "raw frames by copy 80.0, by reference 100.0",
            "bound: 33.3 Gb/s",
            "ratio 0.50",
        ] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
    }
}
