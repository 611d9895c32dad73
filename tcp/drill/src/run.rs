//! Runs a script: makes its calls, injects its packets, holds what leaves against what it says.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use siw_tcp::{Instant, State};

use crate::calls::{self, Answer, Streams};
use crate::errno::Errno;
use crate::expr;
use crate::host::Host;
use crate::notation;
use crate::options::Setup;
use crate::packet::{self, ACK, Ecn, IcmpSpec, SYN, Segment, TcpOption, TcpSpec};
use crate::parser;
use crate::script::{At, Call, Event, Failure, Packet, Script, What, When};

/// The stack's clock at the start: far from zero, as any clock is.
const START: Instant = Instant::from_millis(1_000_000);
/// Packets of any time are waited for so long.
const PATIENCE: u64 = 24 * 3600 * 1_000_000_000;
/// The peer's port when the stack listens and the script does not say.
const PEER_PORT: u16 = 45_678;

/// A packet of a run.
#[derive(Clone, Debug)]
pub struct Captured {
    /// Since the start of the script.
    pub at: Duration,
    /// The peer sent it.
    pub inbound: bool,
    /// An IP packet.
    pub packet: Vec<u8>,
}

/// How a run went.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub result: Result<(), Failure>,
    /// Every packet in either direction, as far as the run came.
    pub packets: Vec<Captured>,
    /// The same in the notation of scripts, with times.
    pub trace: Vec<String>,
}

/// The byte at a place of either stream.
pub(crate) fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 51) as u8
}

/// One four-tuple, as the script numbers it.
#[derive(Clone, Copy, Default)]
struct Flow {
    /// The stack's sequence numbers less the script's.
    seq: Option<u32>,
    /// Of the stack's SYN, on the wire.
    isn: u32,
    /// The stack's timestamps less the script's.
    ts: Option<u32>,
    /// The peer opens anew: so may the stack.
    reopened: bool,
    /// Of the peer's SYN.
    peer_isn: u32,
}

/// A call that waits.
struct Blocked {
    line: usize,
    call: Call,
    until: u64,
}

struct Runner {
    host: Host,
    tolerance: u64,
    streams: Streams,
    flows: HashMap<(u16, u16), Flow>,
    /// The local and the peer's port of packets that do not say.
    current: (u16, u16),
    isns: Vec<u32>,
    blocked: Vec<Blocked>,
    /// Time of the event before.
    base: u64,
    packets: Vec<Captured>,
    trace: Vec<String>,
}

/// Runs the text of a script; `name` is for messages.
pub fn run(name: &str, text: &str) -> Outcome {
    let mut packets = vec![];
    let mut trace = vec![];
    let result = parser::parse(text).and_then(|script| {
        let mut r = Runner::new(&script)?;
        let result = r.events(&script.events);
        (packets, trace) = (r.packets, r.trace);
        result
    });
    Outcome {
        result: result.map_err(|at| Failure {
            file: name.into(),
            line: at.line,
            message: at.message,
        }),
        packets,
        trace,
    }
}

fn seconds(nanos: u64) -> String {
    format!(
        "{}.{:06}",
        nanos / 1_000_000_000,
        nanos % 1_000_000_000 / 1000
    )
}

impl Runner {
    fn new(script: &Script) -> Result<Runner, At> {
        let version = script
            .options
            .iter()
            .rev()
            .find(|(_, n, _)| n == "ip_version");
        let v6 = match version {
            None => false,
            Some((_, _, v)) if v == "ipv4" => false,
            Some((_, _, v)) if v == "ipv6" => true,
            Some((line, _, v)) => {
                return Err(At::new(*line, format!("--ip_version={v}: ipv4 or ipv6")));
            }
        };
        let mut setup = Setup::new(v6);
        for (line, name, value) in &script.options {
            if name != "ip_version" {
                setup.option(name, value).map_err(|m| At::new(*line, m))?;
            }
        }
        // What the stack would refuse is told here, where there is a line for it.
        let line = script.options.last().map_or(1, |(l, _, _)| *l);
        siw_tcp::Stack::<siw_tcp::VecBuf, Vec<u8>>::new(setup.stack_config(), START)
            .map_err(|e| At::new(line, e.to_string()))?;
        Ok(Runner {
            tolerance: setup.tolerance.as_nanos() as u64,
            current: (setup.bind_port, PEER_PORT),
            host: Host::new(setup, START),
            streams: Streams::default(),
            flows: HashMap::new(),
            isns: vec![],
            blocked: vec![],
            base: 0,
            packets: vec![],
            trace: vec![],
        })
    }

    fn now(&self) -> u64 {
        self.host.now().since(START).as_nanos() as u64
    }

    fn events(&mut self, events: &[Event]) -> Result<(), At> {
        for e in events {
            self.event(e)?;
        }
        let last = events.last().map_or(0, |e| e.line);
        if let Some(b) = self.blocked.first() {
            return Err(At::new(
                b.line,
                format!("{} still blocks at the end", b.call.name),
            ));
        }
        self.nothing_before(u64::MAX, last, "after the last line")
    }

    /// The span of times that an event may have.
    fn span(&self, when: When, line: usize) -> Result<(u64, u64), At> {
        let base = self.base;
        let (from, to) = match when {
            When::Absolute(t) => (t, t),
            When::Relative(t) => (base + t, base + t),
            When::AbsoluteRange(a, b) => (a, b),
            When::RelativeRange(a, b) => (base + a, base + b),
            When::Any => (base, base + PATIENCE),
        };
        if to < base {
            return Err(At::new(
                line,
                format!(
                    "the time {} is before the event before it, at {}",
                    seconds(to),
                    seconds(base)
                ),
            ));
        }
        Ok((from, to))
    }

    fn event(&mut self, e: &Event) -> Result<(), At> {
        let (from, to) = self.span(e.when, e.line)?;
        if let What::Expect(p) = &e.what {
            let at = self.expect(p, from, to, e)?;
            self.base = match e.when {
                When::Absolute(_) | When::Relative(_) => from,
                _ => at.max(self.base),
            };
            return Ok(());
        }
        self.advance(from)?;
        self.base = from;
        self.nothing_before(from, e.line, "before this line")?;
        match &e.what {
            What::Call(c) => self.call(c, e.line, from)?,
            What::Inject(Packet::Tcp(p)) => self.inject(p),
            What::Inject(Packet::Icmp(p)) => self.inject_icmp(p, e.line)?,
            What::Code(c) => {
                let value = |n: &str| self.value(n);
                expr::check(c, e.line, &value)?;
            }
            What::Expect(_) => {}
        }
        self.unblock()
    }

    /// A packet that left well before `time` and that no line expected is an error.
    fn nothing_before(&mut self, time: u64, line: usize, place: &str) -> Result<(), At> {
        match self.host.packet_since() {
            Some(at)
                if (at.since(START).as_nanos() as u64) < time.saturating_sub(self.tolerance) =>
            {
                let at = at.since(START).as_nanos() as u64;
                let Some((_, raw)) = self.host.take_packet() else {
                    return Ok(());
                };
                let said = self.say(&raw);
                Err(At::new(
                    line,
                    format!(
                        "unexpected packet {place}\n  actual:   {} > {said}",
                        seconds(at)
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Lets time pass until `time`.
    fn advance(&mut self, time: u64) -> Result<(), At> {
        while self.step(time)? {}
        Ok(())
    }

    fn step(&mut self, time: u64) -> Result<bool, At> {
        // A call that must be over by then is looked at then.
        let due = self
            .blocked
            .iter()
            .map(|b| b.until + self.tolerance + 1)
            .min();
        let limit = due.map_or(time, |d| d.min(time)).max(self.now());
        let more = self.host.step(START + Duration::from_nanos(limit));
        self.unblock()?;
        Ok(more || limit < time)
    }

    // Calls.

    fn call(&mut self, c: &Call, line: usize, from: u64) -> Result<(), At> {
        if let Some(until) = c.until {
            let until = match until {
                When::Absolute(t) => t,
                When::Relative(t) => from + t,
                _ => return Err(At::new(line, "a call ends at one time, not in a range")),
            };
            if until < from {
                return Err(At::new(line, "the call ends before it begins"));
            }
            self.blocked.push(Blocked {
                line,
                call: c.clone(),
                until,
            });
            return Ok(());
        }
        match calls::make(&mut self.host, &mut self.streams, c).map_err(|m| At::new(line, m))? {
            answer if matches(c, &answer) => Ok(()),
            answer => Err(At::new(line, wrong(c, &answer))),
        }
    }

    /// Tries the calls that wait.
    fn unblock(&mut self) -> Result<(), At> {
        let now = self.now();
        let mut i = 0;
        while i < self.blocked.len() {
            let b = &self.blocked[i];
            let (line, until) = (b.line, b.until);
            let answer = calls::make(&mut self.host, &mut self.streams, &b.call)
                .map_err(|m| At::new(line, m))?;
            let waits = matches!(
                answer,
                Answer::Error(Errno::EAGAIN | Errno::EINPROGRESS | Errno::EALREADY)
            );
            if waits {
                if now > until + self.tolerance {
                    return Err(At::new(
                        line,
                        format!(
                            "{} still blocks at {}; it was to end at {}",
                            b.call.name,
                            seconds(now),
                            seconds(until)
                        ),
                    ));
                }
                i += 1;
                continue;
            }
            let b = self.blocked.remove(i);
            if !matches(&b.call, &answer) {
                return Err(At::new(line, wrong(&b.call, &answer)));
            }
            if now.abs_diff(until) > self.tolerance {
                return Err(At::new(
                    line,
                    format!(
                        "{} ended at {}; expected at {}",
                        b.call.name,
                        seconds(now),
                        seconds(until)
                    ),
                ));
            }
        }
        Ok(())
    }

    // Packets of the peer.

    fn ports(&self, p: &TcpSpec) -> (u16, u16) {
        p.ports.map_or(self.current, |(from, to)| (to, from))
    }

    fn inject(&mut self, p: &TcpSpec) {
        let (local, remote) = self.ports(p);
        let flow = self.flows.entry((local, remote)).or_default();
        if p.flags & SYN != 0 {
            if p.flags & ACK == 0 && p.seq != flow.peer_isn {
                flow.reopened = true;
            }
            flow.peer_isn = p.seq;
        }
        let offset = flow.seq.unwrap_or(0);
        let mut options = p.options.clone().unwrap_or_default();
        for o in &mut options {
            match o {
                TcpOption::Sack(blocks) => {
                    for (lo, hi) in blocks {
                        *lo = lo.wrapping_add(offset);
                        *hi = hi.wrapping_add(offset);
                    }
                }
                TcpOption::Timestamps { ecr, .. } if p.flags & ACK != 0 => {
                    *ecr = ecr.wrapping_add(flow.ts.unwrap_or(0));
                }
                _ => {}
            }
        }
        let first = p.seq.wrapping_sub(flow.peer_isn).wrapping_sub(1);
        let payload = (0..p.len)
            .map(|i| byte(first.wrapping_add(i).into()))
            .collect();
        let s = Segment {
            src: SocketAddr::new(self.host.setup.remote, remote),
            dst: SocketAddr::new(self.host.setup.local, local),
            ecn: match p.ecn {
                Some(Ecn::Is(bits)) => bits,
                _ => 0,
            },
            flags: p.flags,
            seq: p.seq,
            ack: p.ack.map_or(0, |a| a.wrapping_add(offset)),
            window: p.window.unwrap_or(0),
            urgent: p.urgent.unwrap_or(0),
            options,
            payload,
        };
        self.trace
            .push(format!("{} < {}", seconds(self.now()), notation::spec(p)));
        self.receive(s.packet());
    }

    fn receive(&mut self, packet: Vec<u8>) {
        self.host.receive(&packet);
        self.packets.push(Captured {
            at: Duration::from_nanos(self.now()),
            inbound: true,
            packet,
        });
    }

    fn inject_icmp(&mut self, p: &IcmpSpec, line: usize) -> Result<(), At> {
        let v6 = self.host.setup.local.is_ipv6();
        let (kind, code) = packet::icmp_numbers(v6, p).map_err(|m| At::new(line, m))?;
        let flow = self.flows.get(&self.current).copied().unwrap_or_default();
        let quoted = Segment {
            src: SocketAddr::new(self.host.setup.local, self.current.0),
            dst: SocketAddr::new(self.host.setup.remote, self.current.1),
            ecn: 0,
            flags: ACK,
            seq: p.quoted.0.wrapping_add(flow.seq.unwrap_or(0)),
            ack: 0,
            window: 0,
            urgent: 0,
            options: vec![],
            payload: vec![0; p.quoted.1 as usize],
        };
        self.trace.push(format!(
            "{} < icmp {} {}",
            seconds(self.now()),
            p.kind,
            p.code.as_deref().unwrap_or("")
        ));
        self.receive(packet::icmp_error(kind, code, p.mtu.unwrap_or(0), &quoted));
        Ok(())
    }

    // Packets of the stack.

    /// A packet as the script would say it, for messages.
    fn say(&self, raw: &[u8]) -> String {
        match Segment::parse(raw) {
            Err(e) => format!("a packet of {} bytes: {e}", raw.len()),
            Ok(s) => {
                let key = (s.src.port(), s.dst.port());
                let flow = self.flows.get(&key).copied().unwrap_or_default();
                let ports = (key != self.current).then_some(key);
                notation::spec(&TcpSpec {
                    ports,
                    ..scripted(&s, &flow)
                })
            }
        }
    }

    /// Waits for the next packet and compares. Returns when it left.
    fn expect(&mut self, p: &TcpSpec, from: u64, to: u64, e: &Event) -> Result<u64, At> {
        let limit = to.saturating_add(self.tolerance);
        while self.host.packet_since().is_none() && self.step(limit)? {}
        let expected = notation::spec(p);
        let Some((at, raw)) = self.host.take_packet() else {
            return Err(At::new(
                e.line,
                format!(
                    "missing packet: none left until {}\n  expected: {} > {expected}",
                    seconds(limit),
                    seconds(from)
                ),
            ));
        };
        let at = at.since(START).as_nanos() as u64;
        let fail = |said: &str, what: String| {
            Err(At::new(
                e.line,
                format!(
                    "{what}\n  expected: {} > {expected}\n  actual:   {} > {said}",
                    seconds(from),
                    seconds(at)
                ),
            ))
        };
        self.packets.push(Captured {
            at: Duration::from_nanos(at),
            inbound: false,
            packet: raw.clone(),
        });
        let s = match Segment::parse(&raw) {
            Ok(s) => s,
            Err(why) => return fail("a broken packet", format!("bad packet: {why}")),
        };
        let key = (s.src.port(), s.dst.port());
        let wanted = p
            .ports
            .unwrap_or(if s.flags & (SYN | ACK) == SYN && p.flags == s.flags {
                key
            } else {
                self.current
            });
        if key == wanted {
            self.number(&s, p);
            if p.ports.is_none() {
                self.current = key;
            }
        }
        let said = self.say(&raw);
        self.trace.push(format!("{} > {said}", seconds(at)));
        let flow = self.flows.get(&key).copied().unwrap_or_default();
        if key != wanted {
            return fail(&said, format!("wrong ports: {} > {}", key.0, key.1));
        }
        if let Err(what) = compare(p, &s, &flow, self.tolerance) {
            return fail(&said, what);
        }
        if at.saturating_add(self.tolerance) < from || at > limit {
            let span = if from == to {
                seconds(from)
            } else {
                format!("{} to {}", seconds(from), seconds(to))
            };
            return fail(&said, format!("wrong time: {}, not {span}", seconds(at)));
        }
        Ok(at)
    }

    /// A SYN of the stack sets how its numbers are told; the first timestamp, how its clock is.
    fn number(&mut self, s: &Segment, p: &TcpSpec) {
        let f = self.flows.entry((s.src.port(), s.dst.port())).or_default();
        if s.flags & SYN != 0
            && (f.seq.is_none() || f.reopened || (s.flags & ACK == 0 && s.seq != f.isn))
        {
            f.seq = Some(s.seq.wrapping_sub(p.seq));
            (f.isn, f.ts, f.reopened) = (s.seq, None, false);
            self.isns.push(s.seq);
        }
        if f.ts.is_none()
            && let (Some(live), Some(script)) = (
                timestamp(&s.options),
                p.options.as_deref().map_or(Some(0), timestamp),
            )
        {
            f.ts = Some(live.wrapping_sub(script));
        }
    }

    // Code.

    fn value(&self, name: &str) -> Option<i64> {
        const STATES: [(&str, State); 10] = [
            ("SYN_SENT", State::SynSent),
            ("SYN_RECEIVED", State::SynReceived),
            ("ESTABLISHED", State::Established),
            ("FIN_WAIT_1", State::FinWait1),
            ("FIN_WAIT_2", State::FinWait2),
            ("CLOSE_WAIT", State::CloseWait),
            ("CLOSING", State::Closing),
            ("LAST_ACK", State::LastAck),
            ("TIME_WAIT", State::TimeWait),
            ("CLOSED", State::Closed),
        ];
        if let Some((_, s)) = STATES.iter().find(|(n, _)| *n == name) {
            return Some(*s as i64);
        }
        if let Some(n) = name.strip_prefix("isn_") {
            let n: usize = n.parse().ok()?;
            return self.isns.get(n.checked_sub(1)?).map(|v| i64::from(*v));
        }
        if name == "connections" {
            return Some(self.host.connections() as i64);
        }
        let stats = self.host.stats();
        if let Some((_, v)) = stats.iter().find(|(n, _)| *n == name) {
            return Some(v as i64);
        }
        let c = self.host.newest()?;
        let mss = (c.emss as i64).max(1);
        let micros = |d: Duration| d.as_micros() as i64;
        Some(match name {
            "state" => c.state as i64,
            "mss" | "tcpi_snd_mss" => c.emss as i64,
            "cwnd" => c.cwnd.into(),
            "ssthresh" => c.ssthresh.into(),
            "send_window" => c.send_window.into(),
            "in_flight" => c.in_flight.into(),
            "unsent" => c.unsent.into(),
            "readable" => c.readable as i64,
            "srtt_us" | "tcpi_rtt" => c.srtt.map_or(0, micros),
            "rto_us" | "tcpi_rto" => micros(c.rto),
            "retransmits" | "tcpi_total_retrans" => c.retransmits.into(),
            "timeouts_of_connection" => c.timeouts.into(),
            "peer_fin" => c.peer_fin.into(),
            "tcpi_snd_cwnd" => i64::from(c.cwnd) / mss,
            "tcpi_snd_ssthresh" => i64::from(c.ssthresh) / mss,
            "tcpi_unacked" => (i64::from(c.in_flight) + mss - 1) / mss,
            _ => return None,
        })
    }
}

fn timestamp(o: &[TcpOption]) -> Option<u32> {
    o.iter().find_map(|o| match o {
        TcpOption::Timestamps { val, .. } => Some(*val),
        _ => None,
    })
}

/// A segment in the script's numbers.
fn scripted(s: &Segment, f: &Flow) -> TcpSpec {
    let mut p = notation::said(s);
    p.seq = p.seq.wrapping_sub(f.seq.unwrap_or(0));
    for o in p.options.iter_mut().flatten() {
        if let TcpOption::Timestamps { val, .. } = o {
            *val = val.wrapping_sub(f.ts.unwrap_or(0));
        }
    }
    p
}

/// What differs first.
fn compare(p: &TcpSpec, s: &Segment, f: &Flow, tolerance: u64) -> Result<(), String> {
    let a = scripted(s, f);
    let differ = |what: &str, e: &dyn std::fmt::Display, a: &dyn std::fmt::Display| {
        Err(format!("wrong {what}: {a}, not {e}"))
    };
    if p.flags != a.flags {
        return differ(
            "flags",
            &notation::flags(p.flags),
            &notation::flags(a.flags),
        );
    }
    if p.seq != a.seq {
        return differ("sequence number", &p.seq, &a.seq);
    }
    if p.len != a.len {
        return differ("payload length", &p.len, &a.len);
    }
    if let (Some(e), Some(a)) = (p.ack, a.ack)
        && e != a
    {
        return differ("acknowledgment", &e, &a);
    }
    if let Some(w) = p.window
        && w != s.window
    {
        return differ("window", &w, &s.window);
    }
    if let Some(u) = p.urgent
        && u != s.urgent
    {
        return differ("urgent pointer", &u, &s.urgent);
    }
    let ecn_right = match p.ecn {
        None => true,
        Some(Ecn::Is(bits)) => bits == s.ecn,
        Some(Ecn::Capable) => s.ecn == 1 || s.ecn == 2,
    };
    if !ecn_right {
        return differ(
            "ECN bits",
            &p.ecn.map_or("", notation::ecn),
            &notation::ecn(Ecn::Is(s.ecn)),
        );
    }
    if let (Some(e), Some(a)) = (&p.options, &a.options) {
        let near = |e: &TcpOption, a: &TcpOption| match (e, a) {
            (TcpOption::Timestamps { val, ecr }, TcpOption::Timestamps { val: v, ecr: r }) => {
                // A tick is 2^20 ns, about a millisecond.
                let slack = (tolerance >> 20) as i32 + 1 + (*val >> 4) as i32;
                ecr == r && (v.wrapping_sub(*val) as i32).abs() <= slack
            }
            (e, a) => e == a,
        };
        if e.len() != a.len() || !e.iter().zip(a).all(|(e, a)| near(e, a)) {
            return Err("wrong TCP options".into());
        }
    }
    if s.flags & SYN == 0 && f.seq.is_some() {
        let first = s.seq.wrapping_sub(f.isn).wrapping_sub(1);
        let bad = s
            .payload
            .iter()
            .zip(0u32..)
            .find(|(b, i)| **b != byte(first.wrapping_add(*i).into()));
        if let Some((_, i)) = bad {
            return Err(format!(
                "wrong payload: byte {i} is not what was written there"
            ));
        }
    }
    Ok(())
}

fn matches(c: &Call, a: &Answer) -> bool {
    match (c.result, a) {
        (None, _) => true,
        (Some(-1), Answer::Error(e)) => c.errno.as_deref().is_none_or(|n| n == e.name()),
        (Some(v), Answer::Value(a)) => v == *a,
        _ => false,
    }
}

fn wrong(c: &Call, a: &Answer) -> String {
    let expected = match (c.result, &c.errno) {
        (Some(v), Some(e)) => format!("{v} {e}"),
        (Some(v), None) => v.to_string(),
        (None, _) => "anything".into(),
    };
    let got = match a {
        Answer::Value(v) => v.to_string(),
        Answer::Error(e) => format!("-1 {e}"),
    };
    format!("{} returned {got}, not {expected}", c.name)
}
