//! Runs a script in virtual time: makes its system calls, injects its packets, and compares every
//! packet that the stack sends with the script.
//!
//! [`Runner::run_event`] is the core: it advances time until the event is due, checks that no unexpected
//! packet was sent meanwhile, and performs the event. The rest of `Runner` is in the files of this
//! folder: `system_calls`, `packets` (with `compare`) and `values` (the names for assertions). All times
//! here are nanoseconds since the start of the script.

mod compare;
mod packets;
mod system_calls;
mod values;

use std::collections::HashMap;
use std::time::Duration;

use siw_net::Instant;

use crate::calls::StreamOffsets;
use crate::expr;
use crate::host::Host;
use crate::options::Setup;
use crate::parser;
use crate::script::{
    Action, EventTime, LineError, Script, ScriptEvent, ScriptFailure, ScriptPacket, SystemCall,
};

/// The stack's clock at the start of a script. Far from zero, so that a missing wrap-around in a
/// subtraction shows.
const START: Instant = Instant::from_millis(1_000_000);
/// Maximum time in nanoseconds until a packet without a time (`*`) must be sent: one day.
const LONGEST_WAIT: u64 = 24 * 3600 * 1_000_000_000;
/// The peer's port when the stack listens and the script specifies none.
const PEER_PORT: u16 = 45_678;

/// A packet that the stack sent or received while a script ran.
#[derive(Clone, Debug)]
pub struct CapturedPacket {
    /// Time since the start of the script.
    pub at: Duration,
    /// The peer sent it, not the stack.
    pub inbound: bool,
    /// The packet from its IP header on.
    pub packet: Vec<u8>,
}

/// Outcome of a script run.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// Success, or the first deviation from the script.
    pub result: Result<(), ScriptFailure>,
    /// Every packet in either direction up to the end or the failure.
    pub packets: Vec<CapturedPacket>,
    /// The same packets in the notation of scripts, one per line with its time.
    pub trace: Vec<String>,
}

/// Returns the payload byte at an offset of the byte stream, the same in both directions. Content that
/// depends on the position exposes data delivered or retransmitted from the wrong place.
pub(crate) fn stream_byte(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 51) as u8
}

/// Offsets between the numbers of a script and those on the wire, for one pair of ports. A script cannot
/// know the initial sequence number (RFC 6528) and the timestamp clock that the stack chooses.
#[derive(Clone, Copy, Default)]
struct FlowNumbering {
    /// The stack's sequence numbers on the wire minus those of the script; `None` before its SYN.
    seq_offset: Option<u32>,
    /// Sequence number of the stack's SYN on the wire.
    isn: u32,
    /// The stack's timestamps on the wire minus those of the script.
    timestamp_offset: Option<u32>,
    /// The peer sent another SYN, so a SYN-ACK with another initial sequence number may follow.
    reopened: bool,
    /// Sequence number of the peer's SYN.
    peer_isn: u32,
}

/// A pending system call with two times, `a...b`.
struct BlockedCall {
    line: usize,
    call: SystemCall,
    /// When it must return.
    until: u64,
}

/// A running script.
struct Runner {
    host: Host,
    /// Maximum deviation of an event from its time.
    tolerance: u64,
    streams: StreamOffsets,
    /// Numbering of each flow, by the stack's port and the peer's.
    flows: HashMap<(u16, u16), FlowNumbering>,
    /// The stack's port and the peer's for packets of the script without ports.
    current_ports: (u16, u16),
    /// Initial sequence numbers that the stack chose, in order: `isn_1`, `isn_2` ... in assertions.
    isns: Vec<u32>,
    blocked: Vec<BlockedCall>,
    /// Time of the last event, the base of relative times.
    last_event: u64,
    packets: Vec<CapturedPacket>,
    trace: Vec<String>,
}

/// Runs a script. `name` is the file name for failure reports, `text` the content of the file.
pub fn run_script(name: &str, text: &str) -> RunOutcome {
    let mut packets = vec![];
    let mut trace = vec![];
    let result = parser::parse_script(text).and_then(|script| {
        let mut runner = Runner::new(&script)?;
        let result = runner.run_events(&script.events);
        (packets, trace) = (runner.packets, runner.trace);
        result
    });
    RunOutcome {
        result: result.map_err(|error| ScriptFailure {
            file: name.into(),
            line: error.line,
            message: error.message,
        }),
        packets,
        trace,
    }
}

/// Formats nanoseconds as seconds with microseconds, as in scripts.
fn format_seconds(nanos: u64) -> String {
    format!(
        "{}.{:06}",
        nanos / 1_000_000_000,
        nanos % 1_000_000_000 / 1000
    )
}

impl Runner {
    /// Creates a host with the options of the script.
    fn new(script: &Script) -> Result<Runner, LineError> {
        let version = script
            .options
            .iter()
            .rev()
            .find(|(_, name, _)| name == "ip_version");
        let v6 = match version {
            None => false,
            Some((_, _, value)) if value == "ipv4" => false,
            Some((_, _, value)) if value == "ipv6" => true,
            Some((line, _, value)) => {
                return Err(LineError::new(
                    *line,
                    format!("--ip_version={value}: ipv4 or ipv6"),
                ));
            }
        };
        let mut setup = Setup::new(v6);
        for (line, name, value) in &script.options {
            if name != "ip_version" {
                setup
                    .set_option(name, value)
                    .map_err(|message| LineError::new(*line, message))?;
            }
        }
        // The stack is created by the first `listen` or `connect`. A configuration that it would reject is
        // reported now, on the line of the last option.
        let line = script.options.last().map_or(1, |(line, _, _)| *line);
        siw_tcp::Stack::<siw_net::VecBuf, Vec<u8>>::new(setup.stack_config(), START)
            .map_err(|error| LineError::new(line, error.to_string()))?;
        Ok(Runner {
            tolerance: setup.tolerance.as_nanos() as u64,
            current_ports: (setup.bind_port, PEER_PORT),
            host: Host::new(setup, START),
            streams: StreamOffsets::default(),
            flows: HashMap::new(),
            isns: vec![],
            blocked: vec![],
            last_event: 0,
            packets: vec![],
            trace: vec![],
        })
    }

    /// Returns the time since the start of the script, in nanoseconds.
    fn now(&self) -> u64 {
        self.host.now().duration_since(START).as_nanos() as u64
    }

    fn run_events(&mut self, events: &[ScriptEvent]) -> Result<(), LineError> {
        for event in events {
            self.run_event(event)?;
        }
        let last = events.last().map_or(0, |event| event.line);
        if let Some(blocked) = self.blocked.first() {
            return Err(LineError::new(
                blocked.line,
                format!("{} still blocks at the end", blocked.call.name),
            ));
        }
        self.check_no_packet_before(u64::MAX, last, "after the last line")
    }

    /// Returns the earliest and the latest time of an event.
    fn time_range(&self, when: EventTime, line: usize) -> Result<(u64, u64), LineError> {
        let base = self.last_event;
        let (from, to) = match when {
            EventTime::Absolute(time) => (time, time),
            EventTime::Relative(time) => (base + time, base + time),
            EventTime::AbsoluteRange(earliest, latest) => (earliest, latest),
            EventTime::RelativeRange(earliest, latest) => (base + earliest, base + latest),
            EventTime::Any => (base, base + LONGEST_WAIT),
        };
        if to < base {
            return Err(LineError::new(
                line,
                format!(
                    "the time {} is before the last event, at {}",
                    format_seconds(to),
                    format_seconds(base)
                ),
            ));
        }
        Ok((from, to))
    }

    fn run_event(&mut self, event: &ScriptEvent) -> Result<(), LineError> {
        let (from, to) = self.time_range(event.when, event.line)?;
        if let Action::Expect(spec) = &event.action {
            let at = self.expect_packet(spec, from, to, event)?;
            self.last_event = match event.when {
                EventTime::Absolute(_) | EventTime::Relative(_) => from,
                _ => at.max(self.last_event),
            };
            return Ok(());
        }
        self.advance_to(from)?;
        self.last_event = from;
        self.check_no_packet_before(from, event.line, "before this line")?;
        match &event.action {
            Action::Call(call) => self.make_call(call, event.line, from)?,
            Action::Inject(ScriptPacket::Tcp(spec)) => self.inject_segment(spec),
            Action::Inject(ScriptPacket::Icmp(spec)) => self.inject_icmp_error(spec, event.line)?,
            Action::Code(code) => {
                let value = |name: &str| self.named_value(name);
                expr::check_assertions(code, event.line, &value)?;
            }
            Action::Expect(_) => {}
        }
        self.retry_blocked_calls()
    }

    /// Fails if the stack sent an unexpected packet before `time` less the tolerance. `place` describes
    /// the position in the script for the message.
    fn check_no_packet_before(
        &mut self,
        time: u64,
        line: usize,
        place: &str,
    ) -> Result<(), LineError> {
        match self.host.oldest_packet_time() {
            Some(at)
                if (at.duration_since(START).as_nanos() as u64)
                    < time.saturating_sub(self.tolerance) =>
            {
                let at = at.duration_since(START).as_nanos() as u64;
                let Some((_, raw)) = self.host.take_packet() else {
                    return Ok(());
                };
                let description = self.describe_packet(&raw);
                Err(LineError::new(
                    line,
                    format!(
                        "unexpected packet {place}\n  actual:   {} > {description}",
                        format_seconds(at)
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Advances time to `time`.
    fn advance_to(&mut self, time: u64) -> Result<(), LineError> {
        while self.advance_once(time)? {}
        Ok(())
    }

    /// Advances time until the stack or a blocked call needs attention, at most to `time`. Returns
    /// `false` once `time` is reached.
    fn advance_once(&mut self, time: u64) -> Result<bool, LineError> {
        // Stop just after the latest time at which a blocked call may return: a call that is still blocked
        // then has failed.
        let overdue = self
            .blocked
            .iter()
            .map(|blocked| blocked.until + self.tolerance + 1)
            .min();
        let limit = overdue
            .map_or(time, |overdue| overdue.min(time))
            .max(self.now());
        let more = self.host.advance_once(START + Duration::from_nanos(limit));
        self.retry_blocked_calls()?;
        Ok(more || limit < time)
    }
}
