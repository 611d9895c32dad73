//! Runs the steps of a case against a target and comes to a verdict.

mod traffic;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use parking_lot::{Mutex, MutexGuard};

use crate::agent::{Agent, STREAM_PORT, Unsupported};
use crate::case::{
    Alternative, Case, Comparison, Expr, Grade, Level, Operator, PathFields, Start, StepKind, Term,
    Value,
};
use crate::impair::{Direction, Profile};
use crate::link::{Dress, Mac, Received, Station, mix};
use crate::mapper::{MapperMessage, MapperPort, PORT, kind};
use crate::stream::{Broken, Event, Opening, PING_SIZE, Phase, Region, Role, Stream};
use crate::tcp::{Ending, Line, NoAnswer, SegmentOptions, SynOptions, Tcp};
use crate::wire::{
    AtomicRequest, AtomicResponse, CrcField, FpduOptions, MpaFrame, REPLY_KEY, REQUEST_KEY,
    ReadRequest, Segment, Terminate, opcode,
};

mod calls;
mod flow;

/// Payload of a segment of the lab.
const LARGEST_PIECE: usize = 1460;
/// A verdict only worsens.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Pass,
    /// A rule of level MAY: what was seen is recorded.
    Recorded,
    /// Below a SHOULD.
    Weak,
    NotSupported,
    /// The conversation before the case failed already.
    Inconclusive,
    Fail,
    /// The target does not talk any more after the case.
    Dead,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Recorded => "recorded",
            Verdict::Weak => "weak",
            Verdict::NotSupported => "not-supported",
            Verdict::Inconclusive => "inconclusive",
            Verdict::Fail => "fail",
            Verdict::Dead => "dead",
        }
    }
}

/// Result of one instance of a case.
#[derive(Debug)]
pub struct Outcome {
    pub case: String,
    pub params: Vec<(String, String)>,
    pub verdict: Verdict,
    pub reason: String,
    pub expected: Vec<String>,
    pub actual: String,
    /// Line of the case file that decided.
    pub line: usize,
    pub notes: Vec<String>,
    pub ladder: Vec<Line>,
    pub duration: Duration,
}

impl Outcome {
    pub fn of(case: &Case, params: &[(String, String)]) -> Outcome {
        Outcome {
            case: case.id.clone(),
            params: params.to_vec(),
            verdict: Verdict::Pass,
            reason: String::new(),
            expected: Vec::new(),
            actual: String::new(),
            line: 0,
            notes: Vec::new(),
            ladder: Vec::new(),
            duration: Duration::ZERO,
        }
    }

    pub fn worsen(&mut self, verdict: Verdict, reason: String) {
        if verdict > self.verdict {
            self.verdict = verdict;
            self.reason = reason;
        } else if !reason.is_empty() {
            self.notes.push(reason);
        }
    }

    /// Id with the parameters.
    pub fn name(&self) -> String {
        let params: Vec<_> = self
            .params
            .iter()
            .map(|(n, v)| format!("{n}={v}"))
            .collect();
        if params.is_empty() {
            self.case.clone()
        } else {
            format!("{}/{}", self.case, params.join(","))
        }
    }
}

/// Keeps a program of the target running while a case needs it.
pub type Running = Box<dyn std::any::Any + Send>;

/// Source of connections from the target.
pub enum Clients {
    /// The operator keeps `rping -c` running against this port.
    Operator {
        port: u16,
        syns: Mutex<Receiver<Received>>,
    },
    /// The lab starts a client that connects to the given port.
    Started(Box<dyn Fn(u16) -> Result<Running> + Send + Sync>),
}

pub struct Target {
    pub station: Arc<Station>,
    pub ip: IpAddr,
    pub mac: Mac,
    pub port: u16,
    pub clients: Clients,
    /// Longest wait for an answer.
    pub patience: Duration,
    /// Silence that counts as quiet.
    pub quiet: Duration,
    pub seed: u64,
    /// Layer and type of its Terminates are exchanged, as its peer file says: a failure of TRM-01 alone.
    pub swapped_terminates: bool,
    /// The agent on it: one case at a time.
    pub agent: Option<Mutex<Agent>>,
    /// Shell command that starts it again after it died.
    pub restart: Option<String>,
}

impl Target {
    /// A target that is judged with 10 s of patience, with seed 1 and without an agent.
    pub fn new(station: Arc<Station>, ip: IpAddr, mac: Mac, port: u16, clients: Clients) -> Target {
        Target {
            station,
            ip,
            mac,
            port,
            clients,
            patience: Duration::from_secs(10),
            quiet: Duration::from_millis(250),
            seed: 1,
            swapped_terminates: false,
            agent: None,
            restart: None,
        }
    }

    /// A TCP connection with the target, made by the side that the role says.
    pub fn tcp(
        &self,
        role: Role,
        port: u16,
        seed: u64,
        syn: &SynOptions,
    ) -> Result<(Tcp, Option<Running>)> {
        let isn = seed as u32;
        match (role, &self.clients) {
            (Role::Responder, _) => {
                let to = SocketAddr::new(self.ip, port);
                Ok((
                    Tcp::connect(&self.station, to, self.mac, isn, syn, self.patience)?,
                    None,
                ))
            }
            (Role::Initiator, Clients::Operator { port, syns }) => {
                let syns = syns.lock();
                let received = syns.recv_timeout(self.patience * 4).map_err(|_| {
                    anyhow!("no connection from the target: keep `rping -c -a {} -p {port}` running there", self.station.ip)
                })?;
                Ok((
                    Tcp::accept(&self.station, &received, isn, syn, self.patience)?,
                    None,
                ))
            }
            (Role::Initiator, Clients::Started(start)) => {
                let port = self.station.port();
                let syns = self.station.listen(port);
                let running = start(port)?;
                let received = syns.recv_timeout(self.patience * 4);
                self.station.unlisten(port);
                let received = received.context("the client that was started does not connect")?;
                Ok((
                    Tcp::accept(&self.station, &received, isn, syn, self.patience)?,
                    Some(running),
                ))
            }
        }
    }

    /// The conversation that must work before and after each case.
    pub fn sane(&self, seed: u64) -> Result<(), FailedConversation> {
        let (tcp, _running) = self
            .tcp(Role::Responder, self.port, seed, &SynOptions::default())
            .map_err(|error| FailedConversation {
                reason: error.to_string(),
                is_silent: error.is::<NoAnswer>(),
            })?;
        // A hung conversation is repeated by the caller.
        let patience = (self.patience / 3).max(Duration::from_secs(1));
        let mut stream = Stream::new(tcp, Role::Responder, seed, patience);
        let result = stream
            .open(&Opening::default())
            .and_then(|()| stream.lives())
            .and_then(|()| stream.close());
        result.map_err(|broken| FailedConversation {
            reason: broken.text,
            is_silent: false,
        })
    }
}

/// Failure of the conversation that must work before and after each case.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct FailedConversation {
    pub reason: String,
    /// Nothing answered. A program that ended leaves a target whose TCP answers with a RST; a target that
    /// died does not.
    pub is_silent: bool,
}

/// Octets on their way of a message that is sent in many segments.
const IN_FLIGHT: u32 = 16_384;

/// Most octets that the agent shows at a time.
const PEEK: u64 = 1024;

/// Letters of the pattern `len:N`.
const LETTERS: u64 = 26;

/// The agent's answers that are kept in the notes.
const NOTES: usize = 200;

struct Script<'a> {
    target: &'a Target,
    case: &'a Case,
    params: &'a [(String, String)],
    seed: u64,
    stream: Option<Stream>,
    running: Option<Running>,
    connect_error: Option<String>,
    held: Vec<u8>,
    mapper: Option<MapperPort>,
    agent: Option<MutexGuard<'a, Agent>>,
    /// Places of the agent's regions: `NAME.stag` and the like.
    places: BTreeMap<String, u64>,
    /// Number of the stream that the steps are about.
    on: u64,
    /// The stream that the steps are not about.
    other: Option<Stream>,
    /// Round of the steps that are repeated.
    round: u64,
    /// The agent's last answer to a step.
    answer: serde_json::Value,
    /// The target's last event.
    last: Option<Event>,
    /// Segments of the last message.
    segments: u64,
    /// Payload of the segments that the last `past=` passed over.
    passed: Vec<u8>,
    /// The agent's region `r`.
    region: Option<Region>,
    /// Request that the agent knows, until the case asks for it.
    told: Option<serde_json::Value>,
    /// Connections beside the one of the case.
    crowd: Vec<Tcp>,
    /// Begin of the time of `want elapsed`.
    clock: Instant,
    /// Random numbers drawn so far.
    drawn: u64,
    outcome: Outcome,
}

/// Verdict of a case that ended with an error: what the target does not have, it need not do.
fn verdict_of(error: &anyhow::Error) -> Verdict {
    match error.is::<Unsupported>() {
        true => Verdict::NotSupported,
        false => Verdict::Inconclusive,
    }
}

/// Runs one instance of a case.
pub fn run(target: &Target, case: &Case, params: &[(String, String)]) -> Outcome {
    let started = Instant::now();
    let outcome = Outcome::of(case, params);
    let seed = mix(target.seed, &outcome.name());
    let mut script = Script {
        target,
        case,
        params,
        seed,
        stream: None,
        running: None,
        connect_error: None,
        held: Vec::new(),
        mapper: None,
        agent: None,
        places: BTreeMap::new(),
        on: 1,
        other: None,
        round: 0,
        answer: serde_json::Value::Null,
        last: None,
        segments: 0,
        passed: Vec::new(),
        region: None,
        told: None,
        crowd: Vec::new(),
        clock: Instant::now(),
        drawn: 0,
        outcome,
    };
    let begun = script.begin().or_else(|error| {
        // The target's program may have been starting again.
        let note = format!("the conversation before the case failed once: {error:#}");
        script.outcome.notes.push(note);
        script.stream = None;
        script.begin()
    });
    match begun {
        Ok(()) => {
            script.clock = Instant::now();
            if let Err(error) = script.steps() {
                let reason = format!("{error:#}");
                script.outcome.worsen(verdict_of(&error), reason);
            }
        }
        Err(error) => {
            let reason = format!("the conversation before the case failed: {error:#}");
            script.outcome.worsen(verdict_of(&error), reason);
        }
    }
    let mut outcome = script.outcome;
    for mut stream in script.stream.into_iter().chain(script.other) {
        for text in std::mem::take(&mut stream.violations) {
            outcome.worsen(
                Verdict::Fail,
                format!("the target breaks a rule for senders: {text}"),
            );
        }
        outcome.ladder.append(&mut stream.tcp.ladder);
    }
    outcome.duration = started.elapsed();
    outcome
}

enum Found {
    Number(u64),
    Octets(Vec<u8>),
}

impl Script<'_> {
    fn begin(&mut self) -> Result<()> {
        if self.case.start == Start::Nothing {
            return Ok(());
        }
        match self.case.start {
            Start::Calling => return self.begin_calling(),
            Start::Streaming => return self.begin_streaming(),
            Start::Opened => return self.begin_opened(),
            _ => {}
        }
        if self.case.needs_agent() {
            return self.begin_with_agent();
        }
        let syn = self.syn()?;
        self.connect(&syn)?;
        if self.case.start == Start::Tcp {
            return Ok(());
        }
        let opening = self.opening()?;
        let stream = self.stream()?;
        let result = stream.open(&opening);
        let result = if self.case.start == Start::Region {
            result.and_then(|()| self.stream.as_mut().map_or(Ok(()), Stream::reach_region))
        } else {
            result
        };
        result.map_err(|broken| anyhow!(broken.text))
    }

    /// Takes the agent and lets it forget the case before.
    fn take_agent(&mut self) -> Result<()> {
        // The agent has one stream at a time. The guard of an attempt before is gone first.
        self.agent = None;
        let target = self.target;
        let agent = target.agent.as_ref().context("the case needs --agent")?;
        self.agent = Some(agent.lock());
        self.command("forget", &BTreeMap::new())
    }

    /// Opens a stream that the agent accepts; with `start asked` the agent has only the Request.
    fn begin_with_agent(&mut self) -> Result<()> {
        self.take_agent()?;
        self.on = 1;
        self.other = None;
        self.ask(&serde_json::json!({ "do": "listen", "port": STREAM_PORT }))?;
        self.open_with_agent()?;
        if self.case.streams == 2 {
            self.use_stream(2);
            self.open_with_agent()?;
            self.use_stream(1);
        }
        Ok(())
    }

    /// Lets the steps be about the first or the second stream.
    fn use_stream(&mut self, number: u64) {
        if self.on != number {
            self.on = number;
            std::mem::swap(&mut self.stream, &mut self.other);
        }
    }

    fn open_with_agent(&mut self) -> Result<()> {
        let case = self.case;
        let syn = self.syn()?;
        self.connect(&syn)?;
        if case.start == Start::Listening {
            return Ok(());
        }
        let opening = self.opening()?;
        self.stream()?.send_frame(&opening.frame(REQUEST_KEY));
        self.await_request()?;
        if case.start == Start::Asked {
            return Ok(());
        }
        let mut prepare = self.words("prepare", &case.preparing)?;
        if case.is_apart && self.on == 2 {
            prepare["domain"] = "other".into();
        }
        self.ask(&prepare)?;
        self.register()?;
        let region = self.region;
        self.stream()?.region = region;
        self.command("accept", &case.accepting)?;
        let patience = self.target.patience;
        match self.stream()?.event(patience) {
            Event::Mpa(frame) if !frame.rejected() => Ok(()),
            event => bail!("not opened; the target's next step: {}", event.describe()),
        }
    }

    /// Lets the agent register the regions of the case, for the first stream, and post receives.
    fn register(&mut self) -> Result<()> {
        let case = self.case;
        if self.on == 1 {
            for (name, fields) in &case.regions {
                let mut command = self.words("reg", fields)?;
                command["name"] = name.as_str().into();
                let answer = self.ask(&command)?;
                self.remember(name, &answer);
            }
        }
        if let Some(stag) = self.places.get("r.stag") {
            let place = |part: &str| self.places.get(part).copied().unwrap_or(0);
            self.region = Some(Region {
                stag: *stag as u32,
                base: place("r.base"),
                len: place("r.len") as u32,
            });
        }
        let (count, size) = case.receives;
        let name = if self.on == 1 {
            "receives"
        } else {
            "receives2"
        };
        if count > 0 {
            self.ask(&serde_json::json!({
                "do": "reg", "name": name, "size": (count * size).max(1), "access": "",
            }))?;
            self.ask(&serde_json::json!({
                "do": "post", "op": "recv", "name": name, "size": size, "id": 1,
                "count": count, "stride": size,
            }))?;
        }
        Ok(())
    }

    /// Keeps the place of a region or window that the agent made.
    fn remember(&mut self, name: &str, answer: &serde_json::Value) {
        let number = |field: &str| answer[field].as_u64().unwrap_or(0);
        let (stag, base, size) = (number("stag"), number("base"), number("size"));
        let was = self.places.get(&format!("{name}.stag")).copied();
        for (part, value) in [
            ("stag", stag),
            ("base", base),
            ("end", base.wrapping_add(size)),
            ("len", size),
            ("local", number("local")),
            ("was", was.unwrap_or(stag)),
        ] {
            self.places.insert(format!("{name}.{part}"), value);
        }
    }

    fn ask(&mut self, command: &serde_json::Value) -> Result<serde_json::Value> {
        let agent = self.agent.as_mut().context("the case lacks start agent")?;
        let mut command = command.clone();
        command["on"] = self.on.into();
        let answer = agent.ask(&command)?;
        if self.outcome.notes.len() < NOTES {
            let note = format!("agent: {command} -> {answer}");
            self.outcome.notes.push(note);
        }
        Ok(answer)
    }

    /// A command for the agent with the fields of a step.
    fn words(&mut self, what: &str, fields: &BTreeMap<String, Value>) -> Result<serde_json::Value> {
        let mut command = serde_json::json!({ "do": what });
        for (name, value) in fields {
            // The same octets as of the lab's len:N.
            if name == "octet" && *value == Value::Word("letters".into()) {
                command["letters"] = (self.seed % LETTERS).into();
                continue;
            }
            command[name.as_str()] = match value {
                Value::Word(word) => word.as_str().into(),
                Value::Expr(expr) => self.number(expr)?.into(),
                Value::Octets(_) | Value::Pattern(_) | Value::Long { .. } | Value::Parts(_) => {
                    let octets = self.octets(fields, name)?.unwrap_or_default();
                    let digits: Vec<_> = octets.iter().map(|o| format!("{o:02x}")).collect();
                    digits.concat().into()
                }
            };
        }
        Ok(command)
    }

    fn command(&mut self, what: &str, fields: &BTreeMap<String, Value>) -> Result<()> {
        let command = self.words(what, fields)?;
        if what == "kill" {
            let agent = self.agent.as_mut();
            return agent.context("the case lacks start agent")?.kill();
        }
        self.answer = self.ask(&command)?;
        if let (Some(name), Some(_)) = (command["name"].as_str(), self.answer.get("stag")) {
            self.remember(name, &self.answer.clone());
        }
        Ok(())
    }

    /// Compares octets of a region: `name=`, `at=`, and `data=`, or `octet=` for all of them.
    fn want_memory(&mut self, wanted: &Alternative) -> Result<bool> {
        let fields: BTreeMap<String, Value> = wanted
            .comparisons
            .iter()
            .map(|c| (c.field.clone(), c.value.clone()))
            .collect();
        let Some(Value::Word(name)) = fields.get("name") else {
            bail!("want memory without name=");
        };
        let data = self.octets(&fields, "data")?;
        let octet = self.get(&fields, "octet")?;
        let at = self.get(&fields, "at")?.unwrap_or(0);
        let size = match (&data, self.get(&fields, "size")?) {
            (Some(data), _) => data.len() as u64,
            (None, Some(size)) => size,
            (None, None) => match self.places.get(&format!("{name}.len")) {
                Some(length) => length - at,
                None => bail!("want memory without data= or size="),
            },
        };
        let mut got = Vec::new();
        while (got.len() as u64) < size {
            let done = got.len() as u64;
            let answer = self.ask(&serde_json::json!({
                "do": "peek", "name": name, "at": at + done, "size": (size - done).min(PEEK),
            }))?;
            let digits = answer["data"].as_str().unwrap_or_default();
            got.extend(
                (0..digits.len() / 2)
                    .filter_map(|at| u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()),
            );
            if got.len() as u64 == done {
                bail!("the agent shows no octets of {name}");
            }
        }
        let differs = match (&data, octet) {
            (Some(data), _) => (0..data.len()).find(|at| got.get(*at) != data.get(*at)),
            (None, Some(octet)) => got.iter().position(|o| u64::from(*o) != octet),
            (None, None) => bail!("want memory without data= or octet="),
        };
        let actual = match differs {
            None => "memory as wanted".to_owned(),
            Some(at) => format!(
                "octet {at} of {name} is {:#04x}",
                got.get(at).copied().unwrap_or(0)
            ),
        };
        self.decide(wanted, differs.is_none(), &actual)
    }

    /// The next completion of the agent: `status=` success, error, flushed or none; `id=`, `size=`.
    fn want_completion(&mut self, alternatives: &[Alternative]) -> Result<bool> {
        let first = &alternatives[0];
        let patience = first.within.unwrap_or(self.target.patience);
        // Acknowledges what arrives meanwhile.
        let until = Instant::now() + patience;
        let answer = loop {
            let notes = self.outcome.notes.len();
            let answer = self.ask(&serde_json::json!({ "do": "poll", "ms": 20 }))?;
            if answer["status"] != "none" || Instant::now() >= until {
                break answer;
            }
            self.outcome.notes.truncate(notes);
            let soon = Instant::now() + Duration::from_millis(5);
            if let Some(stream) = &mut self.stream {
                while stream.tcp.pump(soon) {}
            }
        };
        let actual = format!(
            "completion {} of {} octets: {}",
            answer["id"], answer["size"], answer["status"]
        );
        self.compare_answer(alternatives, &answer, &actual)
    }

    /// The agent's answer to the step before: fields as `event=`, `notified=`.
    fn want_answer(&mut self, alternatives: &[Alternative]) -> Result<bool> {
        let answer = self.answer.clone();
        self.compare_answer(alternatives, &answer, &answer.to_string())
    }

    fn compare_answer(
        &mut self,
        alternatives: &[Alternative],
        answer: &serde_json::Value,
        actual: &str,
    ) -> Result<bool> {
        for alternative in alternatives {
            let mut good = true;
            for comparison in &alternative.comparisons {
                let found = &answer[comparison.field.as_str()];
                let equal = match &comparison.value {
                    Value::Word(word) => found == word.as_str(),
                    Value::Expr(expr) => found.as_u64() == Some(self.number(expr)?),
                    _ => bail!("{} is a word or a number", comparison.field),
                };
                good &= match comparison.operator {
                    Operator::Equal => equal,
                    Operator::NotEqual => !equal,
                    _ => bail!("{} compares with = and !=", comparison.field),
                };
            }
            if good {
                return self.decide(alternative, true, actual);
            }
        }
        self.decide(&alternatives[0], false, actual)
    }

    /// Payload of the segments that `past=` passed over: `octet=` for all of them.
    fn want_passed(&mut self, wanted: &Alternative) -> Result<bool> {
        let mut good = true;
        let mut actual = format!("{} octets", self.passed.len());
        for comparison in &wanted.comparisons {
            let Value::Expr(expr) = &comparison.value else {
                bail!("want passed compares octet and len");
            };
            let value = self.number(expr)?;
            match comparison.field.as_str() {
                "octet" => {
                    let other = self.passed.iter().position(|o| u64::from(*o) != value);
                    if let Some(at) = other {
                        actual = format!("octet {at} is {:#04x}", self.passed[at]);
                        good = false;
                    }
                }
                "len" => {
                    good &= self.holds(comparison, &Found::Number(self.passed.len() as u64))?
                }
                _ => bail!("want passed compares octet and len"),
            }
        }
        self.decide(wanted, good, &actual)
    }

    fn connect(&mut self, syn: &SynOptions) -> Result<()> {
        let port = if self.case.needs_agent() {
            STREAM_PORT
        } else {
            self.target.port
        };
        let mut syn = syn.clone();
        let case = self.case;
        if let Some(fields) = &case.path {
            syn.path = Some((self.profile(fields)?, self.seed));
        }
        let (tcp, running) = self.target.tcp(self.case.role, port, self.seed, &syn)?;
        self.running = running;
        self.stream = Some(Stream::new(
            tcp,
            self.case.role,
            self.seed,
            self.target.patience,
        ));
        Ok(())
    }

    /// Impairments by their fields.
    fn profile(&mut self, (fields, words): &PathFields) -> Result<Profile> {
        let mut plan = Direction::default();
        for name in fields.keys().filter(|name| *name != "shift") {
            let value = self.get(fields, name)?.unwrap_or(0);
            plan.set(name, value);
        }
        let is_for = |way: &str| words.is_empty() || words.iter().any(|word| word == way);
        let of = |way| {
            if is_for(way) {
                plan.clone()
            } else {
                Direction::default()
            }
        };
        let mut profile = Profile {
            left: of("out"),
            right: of("back"),
        };
        // A box that rewrites sequence numbers rewrites their acknowledgments, too.
        let shift = self.get(fields, "shift")?.unwrap_or(0) as u32;
        for direction in [&mut profile.left, &mut profile.right] {
            direction.shift_seq = shift;
            direction.shift_ack = shift.wrapping_neg();
        }
        Ok(profile)
    }

    fn stream(&mut self) -> Result<&mut Stream> {
        self.stream
            .as_mut()
            .context("no connection yet: the case lacks a line with connect")
    }

    fn variable(&mut self, name: &str) -> Result<u64> {
        if let Some((_, value)) = self.params.iter().find(|(n, _)| n == name) {
            let digits = value.strip_prefix("0x");
            return Ok(digits.map_or_else(|| value.parse(), |d| u64::from_str_radix(d, 16))?);
        }
        if let Some(value) = self.places.get(name) {
            return Ok(*value);
        }
        if name == "target.port" {
            return Ok(self.target.port.into());
        }
        if name == "i" {
            return Ok(self.round);
        }
        if let Some(end) = name.strip_prefix("random.") {
            return Ok(self.random() % end.parse::<u64>()?.max(1));
        }
        if let Some(part) = name.strip_prefix("last.") {
            let last = self.last.as_ref();
            return match last.and_then(|event| field(event, part)) {
                Some(Found::Number(value)) => Ok(value),
                _ => bail!("the target's last event has no number {part}"),
            };
        }
        let announced = self.syn()?.mss;
        let stream = self.stream()?;
        let region = stream.region;
        let region = || region.context("no region is known yet (start region)");
        let depths = stream
            .theirs
            .as_ref()
            .and_then(MpaFrame::depths)
            .unwrap_or_default();
        Ok(match name {
            "r.stag" => region()?.stag.into(),
            "r.base" => region()?.base,
            "r.len" => region()?.len.into(),
            "r.end" => region()?.base.wrapping_add(region()?.len.into()),
            "lab.stag" => stream.lab_stag.into(),
            "lab.base" => stream.lab_base,
            "msn.0" => stream.msn[0].into(),
            "msn.1" => stream.msn[1].into(),
            "msn.2" => stream.msn[2].into(),
            "read.sink" | "read.to" | "read.size" => {
                let read = stream.reads.front().context("the target reads nothing")?;
                match name {
                    "read.sink" => read.sink_stag.into(),
                    "read.to" => read.sink_to,
                    _ => read.size.into(),
                }
            }
            "mulpdu" => {
                let is_marked = stream.ours.as_ref().is_some_and(MpaFrame::markers);
                let emss = stream.tcp.largest_of_peer(announced);
                // RFC 5044 section 4.5.
                let markers = if is_marked { 4 * emss.div_ceil(512) } else { 0 };
                emss.saturating_sub(6 + markers + emss % 4)
            }
            "crc" => stream.crc().into(),
            "mpa.ird" => depths.0.into(),
            "mpa.ord" => depths.1.into(),
            "mss" => stream.tcp.peer_mss.unwrap_or(0).into(),
            _ => bail!("variable ${name} is unknown"),
        })
    }

    /// The next random number of this instance's seed.
    fn random(&mut self) -> u64 {
        self.drawn += 1;
        mix(self.seed.wrapping_add(self.drawn), "random")
    }

    fn number(&mut self, expr: &Expr) -> Result<u64> {
        let mut sum = 0u64;
        for (add, term) in &expr.0 {
            let value = match term {
                Term::Number(value) => *value,
                Term::Variable(name) => self.variable(name)?,
                Term::Product(name, times) => self.variable(name)?.wrapping_mul(*times),
            };
            sum = if *add {
                sum.wrapping_add(value)
            } else {
                sum.wrapping_sub(value)
            };
        }
        Ok(sum)
    }

    fn get(&mut self, fields: &BTreeMap<String, Value>, name: &str) -> Result<Option<u64>> {
        match fields.get(name) {
            Some(Value::Expr(expr)) => Ok(Some(self.number(expr)?)),
            Some(_) => bail!("field {name} has to be a number"),
            None => Ok(None),
        }
    }

    fn octets(&mut self, fields: &BTreeMap<String, Value>, name: &str) -> Result<Option<Vec<u8>>> {
        fields
            .get(name)
            .map(|value| self.value_octets(name, value))
            .transpose()
    }

    fn value_octets(&mut self, name: &str, value: &Value) -> Result<Vec<u8>> {
        Ok(match value {
            Value::Octets(octets) => octets.clone(),
            Value::Long { value, is_native } => {
                let value = self.number(value)?;
                let agent = self.agent.as_ref();
                if *is_native && agent.is_some_and(|agent| agent.is_little_endian) {
                    value.to_le_bytes().to_vec()
                } else {
                    value.to_be_bytes().to_vec()
                }
            }
            Value::Parts(parts) => {
                let mut all = Vec::new();
                for part in parts {
                    all.extend(self.value_octets(name, part)?);
                }
                all
            }
            Value::Pattern(length) => {
                let length = self.number(length)?;
                (0..length)
                    .map(|at| b'a' + ((self.seed % LETTERS + at) % LETTERS) as u8)
                    .collect()
            }
            _ => bail!("field {name} has to be octets: 0x00ff, \"text\", len:N or long:N"),
        })
    }

    fn opening(&mut self) -> Result<Opening> {
        let fields = self.case.opening.clone();
        self.opening_with(&fields)
    }

    fn opening_with(&mut self, fields: &BTreeMap<String, Value>) -> Result<Opening> {
        let mut opening = Opening::default();
        for (name, bit) in [("m", 0x80u8), ("c", 0x40), ("r", 0x20), ("s", 0x10)] {
            if let Some(value) = self.get(fields, name)? {
                opening.flags = opening.flags & !bit | if value != 0 { bit } else { 0 };
            }
        }
        if let Some(value) = self.get(fields, "res")? {
            opening.flags |= value as u8 & 0xF;
        }
        opening.revision = self
            .get(fields, "rev")?
            .map_or(opening.revision, |v| v as u8);
        opening.ird = self.get(fields, "ird")?.map_or(opening.ird, |v| v as u16);
        opening.ord = self.get(fields, "ord")?.map_or(opening.ord, |v| v as u16);
        opening.control = self.get(fields, "abcd")?.unwrap_or(0) as u8;
        opening.private_data = self.octets(fields, "pd")?.unwrap_or_default();
        Ok(opening)
    }

    fn steps(&mut self) -> Result<()> {
        let case = self.case;
        let mut at = 0;
        // First step of those that are repeated, and their number of rounds.
        let mut repeated = (0, 0);
        while let Some(step) = case.steps.get(at) {
            at += 1;
            if let Some((name, value)) = &step.when
                && self.variable(name)? != *value
            {
                continue;
            }
            let decided = match &step.kind {
                StepKind::Wait(time) => {
                    // Acknowledges what arrives meanwhile.
                    let until = Instant::now() + *time;
                    match &mut self.stream {
                        Some(stream) => while stream.tcp.pump(until) {},
                        None => sleep(*time),
                    }
                    true
                }
                StepKind::Repeat(count) => {
                    repeated = (at, self.number(count)?);
                    self.round = 0;
                    if repeated.1 == 0 {
                        let rest = case.steps[at..].iter();
                        at += rest
                            .take_while(|step| !matches!(step.kind, StepKind::Done))
                            .count()
                            + 1;
                    }
                    true
                }
                StepKind::Done => {
                    self.round += 1;
                    if self.round < repeated.1 {
                        at = repeated.0;
                    }
                    true
                }
                StepKind::Stream(number) => {
                    self.use_stream(*number);
                    true
                }
                StepKind::Acks(on) => {
                    self.stream()?.tcp.acknowledge(*on);
                    true
                }
                StepKind::Impair(fields) => {
                    let profile = self.profile(fields)?;
                    let seed = self.seed;
                    self.stream()?.tcp.impair(&profile, seed);
                    true
                }
                StepKind::Clock => {
                    self.clock = Instant::now();
                    true
                }
                StepKind::Window(octets) => {
                    let octets = self.number(octets)?;
                    self.stream()?.tcp.window = octets.min(u16::MAX.into()) as u16;
                    true
                }
                StepKind::Lose(which) => {
                    self.stream()?.tcp.lose(which);
                    true
                }
                StepKind::LoseAbove(octets) => {
                    let octets = self.number(octets)?;
                    self.stream()?.tcp.lose_above(octets as usize);
                    true
                }
                StepKind::Await(octets) => {
                    let octets = self.number(octets)?;
                    self.await_octets(octets)?;
                    true
                }
                StepKind::Reaccept => {
                    self.reaccept()?;
                    true
                }
                StepKind::Crowd(count) => {
                    let count = self.number(count)?;
                    self.crowd(count)?;
                    true
                }
                StepKind::Agent {
                    what,
                    fields,
                    may_fail,
                } => {
                    let context = || format!("{}:{}: {}", case.file, step.line, step.source);
                    match self.command(what, fields).with_context(context) {
                        Err(error) if *may_fail => self.outcome.notes.push(format!("{error:#}")),
                        other => other?,
                    }
                    true
                }
                StepKind::Connect(fields) => {
                    let with_ack = std::mem::take(&mut self.held);
                    let is_same = self.get(fields, "same")?.is_some_and(|same| same != 0);
                    let before = self.stream.as_ref().filter(|_| is_same);
                    let port = before.map(|s| s.tcp.port);
                    // Beyond the numbers of the connection before (RFC 9293 section 3.4.1).
                    let beyond = before.map(|s| s.tcp.snd_nxt.wrapping_add(100_000));
                    let wanted = self.syn_with(fields)?;
                    let syn = SynOptions {
                        isn: wanted.isn.or(beyond),
                        with_ack,
                        port,
                        ..wanted
                    };
                    // The connection before must not take the segments of this one.
                    self.stream = None;
                    self.connect_error = self.connect(&syn).err().map(|e| format!("{e:#}"));
                    true
                }
                StepKind::Send {
                    what,
                    fields,
                    words,
                } => {
                    let context = || format!("{}:{}: {}", case.file, step.line, step.source);
                    self.send(what, fields, words).with_context(context)?;
                    true
                }
                StepKind::Flush(fields, words) => {
                    let mut octets = std::mem::take(&mut self.held);
                    let keep = self.get(fields, "keep")?;
                    let rest = keep.map(|keep| octets.split_off(octets.len().min(keep as usize)));
                    self.emit(octets, fields, words)?;
                    self.held = rest.unwrap_or_default();
                    true
                }
                StepKind::Want(alternatives) => {
                    self.outcome.line = step.line;
                    self.want(alternatives)?
                }
            };
            if !decided {
                break;
            }
        }
        Ok(())
    }

    fn emit(
        &mut self,
        octets: Vec<u8>,
        fields: &BTreeMap<String, Value>,
        words: &[String],
    ) -> Result<()> {
        let has = |word: &str| words.iter().any(|w| w == word);
        let mut all = std::mem::take(&mut self.held);
        all.extend(octets);
        if has("hold") {
            self.held = all;
            return Ok(());
        }
        let cut = self.get(fields, "cut")?;
        let offset = self.get(fields, "offset")?.unwrap_or(0) as i64;
        let gap = match fields.get("gap") {
            Some(Value::Word(text)) => text.trim_end_matches("ms").parse().ok(),
            _ => None,
        };
        let options = SegmentOptions {
            no_push: has("nopush"),
            fin: has("fin"),
            bad_checksum: has("badsum"),
            urgent: has("urgent"),
            fragments: has("fragments"),
            offset,
            is_once: has("once"),
            is_old: has("old"),
            dress: Dress {
                is_tagged: has("vlan"),
                is_congested: has("ce"),
                is_extended: has("extended"),
            },
            ack_offset: self.get(fields, "ackoffset")?.unwrap_or(0) as i64,
        };
        let (mut random, patience) = (self.seed, self.target.patience);
        let tcp = &mut self.stream()?.tcp;
        if has("later") {
            tcp.add_unacked(&all);
            return Ok(());
        }
        let pieces: Vec<&[u8]> = match cut {
            _ if has("each") => all.chunks(1).collect(),
            _ if has("scatter") => {
                let (mut rest, mut pieces) = (all.as_slice(), Vec::new());
                while !rest.is_empty() {
                    random = mix(random, "cut");
                    let at = rest.len().min(1 + random as usize % LARGEST_PIECE);
                    let (piece, behind) = rest.split_at(at);
                    pieces.push(piece);
                    rest = behind;
                }
                pieces
            }
            Some(at) if at > 0 && (at as usize) < all.len() => {
                vec![&all[..at as usize], &all[at as usize..]]
            }
            _ => all.chunks(LARGEST_PIECE).collect(),
        };
        for (index, piece) in pieces.iter().enumerate() {
            if index > 0
                && let Some(ms) = gap
            {
                let until = Instant::now() + Duration::from_millis(ms);
                while tcp.pump(until) {}
            }
            tcp.send(piece, options);
            let until = Instant::now() + patience;
            while tcp.in_flight() > IN_FLIGHT && tcp.ending.is_none() && tcp.pump(until) {}
        }
        Ok(())
    }

    fn send(
        &mut self,
        what: &str,
        fields: &BTreeMap<String, Value>,
        words: &[String],
    ) -> Result<()> {
        let offset = self.get(fields, "offset")?.unwrap_or(0) as i64;
        match what {
            "fin" => self.stream()?.tcp.send_fin(),
            "rst" => self.stream()?.tcp.send_reset(offset),
            "syn" => self.stream()?.tcp.send_stray_syn(offset),
            "ack" => {
                let tcp = &mut self.stream()?.tcp;
                tcp.pure_acks = 0;
                tcp.send_ack_beyond(offset);
            }
            "keepalive" => {
                let length = self.get(fields, "length")?.unwrap_or(0);
                let tcp = &mut self.stream()?.tcp;
                tcp.pure_acks = 0;
                tcp.send_keepalive(length as usize);
            }
            "icmp" => {
                let mtu = self.get(fields, "mtu")?.context("icmp without mtu=")?;
                self.stream()?.tcp.send_too_big(mtu as u32, offset)?;
            }
            "again" => self.stream()?.tcp.resend(),
            "octets" => {
                let octets = self
                    .octets(fields, "data")?
                    .context("octets without data=")?;
                self.stream()?
                    .tcp
                    .note(true, format!("{} octets that are no frame", octets.len()));
                self.emit(octets, fields, words)?;
            }
            "mapper" => self.send_mapper(fields)?,
            "request" | "reply" => self.send_mpa(what, fields, words)?,
            _ => self.send_segment(what, fields, words)?,
        }
        if matches!(what, "rst" | "syn") {
            self.stream()?.tcp.pure_acks = 0;
        }
        Ok(())
    }

    /// Sends a message to the target's port mapper, by default a request for the port of rping.
    fn send_mapper(&mut self, fields: &BTreeMap<String, Value>) -> Result<()> {
        let target = self.target;
        if self.mapper.is_none() {
            self.mapper = Some(MapperPort::open(&target.station));
        }
        let own_port = self.mapper.as_ref().map_or(0, |mapper| mapper.port);
        let handle = self.seed;
        let mut take = |name: &str, default: u64| -> Result<u64> {
            Ok(self.get(fields, name)?.unwrap_or(default))
        };
        let accepting = match (take("addr", 0)?, target.ip) {
            (0, ip) => ip,
            (address, IpAddr::V4(_)) => Ipv4Addr::from(address as u32).into(),
            (address, IpAddr::V6(_)) => Ipv6Addr::from(u128::from(address)).into(),
        };
        let connecting_port = take("cport", own_port.into())? as u16;
        let message = MapperMessage {
            version: take("ver", 0)? as u8,
            kind: take("kind", kind::REQUEST.into())? as u8,
            ip_version: take("ipv", if target.ip.is_ipv4() { 4 } else { 6 })? as u8,
            time: take("time", 0)? as u8,
            own_port: connecting_port,
            accepting_port: take("port", target.port.into())? as u16,
            connecting_port,
            handle: take("handle", handle)?,
            connecting: target.station.ip,
            accepting,
            length: 0,
        };
        let mut octets = message.encode();
        if let Some(keep) = self.get(fields, "keep")? {
            octets.truncate(keep as usize);
        }
        octets.extend(self.octets(fields, "extra")?.unwrap_or_default());
        let to = SocketAddr::new(target.ip, PORT);
        let frame = target
            .station
            .send_datagram(own_port, target.mac, to, &octets);
        let text = format!("{} ({} octets)", message.describe(), octets.len());
        self.note_datagram(Instant::now(), true, text, frame);
        Ok(())
    }

    fn note_datagram(&mut self, at: Instant, from_lab: bool, text: String, frame: Vec<u8>) {
        self.outcome.ladder.push(Line {
            at,
            from_lab,
            text,
            frame: Some(frame),
        });
    }

    /// The next message of the target's port mapper.
    fn mapper_event(&mut self, patience: Duration) -> Result<Event> {
        let mapper = self
            .mapper
            .as_ref()
            .context("nothing was asked yet: the case lacks a line with send mapper")?;
        let Ok(datagram) = mapper.inbox.recv_timeout(patience) else {
            return Ok(Event::Quiet);
        };
        let event = Event::Mapper(MapperMessage::decode(&datagram.payload));
        self.note_datagram(datagram.at, false, event.describe(), datagram.frame);
        Ok(event)
    }

    fn send_mpa(
        &mut self,
        what: &str,
        fields: &BTreeMap<String, Value>,
        words: &[String],
    ) -> Result<()> {
        let key = if what == "request" {
            REQUEST_KEY
        } else {
            REPLY_KEY
        };
        let mut frame = self.opening_with(fields)?.frame(key);
        if let Some(length) = self.get(fields, "pdlen")? {
            frame.pd_length = length as u16;
        }
        let mut octets = frame.encode();
        if let Some(at) = self.get(fields, "flip")? {
            *octets
                .get_mut(at as usize)
                .context("flip= lies beyond the frame")? ^= 0x20;
        }
        if let Some(keep) = self.get(fields, "keep")? {
            octets.truncate(keep as usize);
        }
        octets.extend(self.octets(fields, "extra")?.unwrap_or_default());
        if let Some(stream) = &mut self.stream {
            stream.begin_start_up();
            stream.tcp.note(
                true,
                format!("{} ({} octets)", frame.describe(), octets.len()),
            );
            stream.ours = Some(frame);
        }
        self.emit(octets, fields, words)
    }

    fn send_segment(
        &mut self,
        what: &str,
        fields: &BTreeMap<String, Value>,
        words: &[String],
    ) -> Result<()> {
        let code = match what {
            "write" => opcode::WRITE,
            "read" => opcode::READ_REQUEST,
            "response" => opcode::READ_RESPONSE,
            "send" | "ddp" => opcode::SEND,
            "send-inv" => opcode::SEND_INVALIDATE,
            "send-se" => opcode::SEND_SE,
            "send-se-inv" => opcode::SEND_SE_INVALIDATE,
            "immediate" => opcode::IMMEDIATE,
            "immediate-se" => opcode::IMMEDIATE_SE,
            "atomic" => opcode::ATOMIC_REQUEST,
            "atomic-response" => opcode::ATOMIC_RESPONSE,
            _ => opcode::TERMINATE,
        };
        let data = self.octets(fields, "data")?;
        let region = self.stream()?.region;
        let mut advertises = false;
        let payload = match (data, code) {
            (Some(data), _) => data,
            (None, opcode::WRITE) => vec![b'w'; 8],
            (None, opcode::READ_REQUEST) => {
                let stream = self.stream()?;
                let mut read = ReadRequest {
                    sink_stag: stream.lab_stag,
                    sink_to: stream.lab_base,
                    size: region.map_or(8, |r| r.len),
                    source_stag: region.map_or(0, |r| r.stag),
                    source_to: region.map_or(0, |r| r.base),
                };
                read.sink_stag = self
                    .get(fields, "sink")?
                    .map_or(read.sink_stag, |v| v as u32);
                read.sink_to = self.get(fields, "sinkto")?.unwrap_or(read.sink_to);
                read.size = self.get(fields, "size")?.map_or(read.size, |v| v as u32);
                read.source_stag = self
                    .get(fields, "src")?
                    .map_or(read.source_stag, |v| v as u32);
                read.source_to = self.get(fields, "srcto")?.unwrap_or(read.source_to);
                read.encode()
            }
            (None, opcode::ATOMIC_REQUEST) => {
                let mut take = |name: &str| self.get(fields, name);
                let request = AtomicRequest {
                    operation: take("aop")?.unwrap_or(0) as u32,
                    identifier: take("rid")?.unwrap_or(0) as u32,
                    stag: take("src")?.map_or(region.map_or(0, |r| r.stag), |v| v as u32),
                    to: take("srcto")?.unwrap_or(region.map_or(0, |r| r.base)),
                    add_or_swap: take("add")?.or(take("swap")?).unwrap_or(0),
                    add_or_swap_mask: take("mask")?.unwrap_or(0),
                    compare: take("compare")?.unwrap_or(0),
                    compare_mask: take("cmask")?.unwrap_or(u64::MAX),
                };
                let mut octets = request.encode();
                if let Some(size) = take("size")? {
                    octets.resize(size as usize, 0);
                }
                octets
            }
            (None, opcode::ATOMIC_RESPONSE) => AtomicResponse {
                identifier: self.get(fields, "rid")?.unwrap_or(0) as u32,
                value: self.get(fields, "value")?.unwrap_or(0),
            }
            .encode(),
            (None, opcode::IMMEDIATE | opcode::IMMEDIATE_SE) => self
                .get(fields, "value")?
                .unwrap_or(0)
                .to_be_bytes()
                .to_vec(),
            (None, opcode::READ_RESPONSE) => {
                let stream = self.stream()?;
                if let Phase::AnswerRead(_) = stream.phase {
                    stream.phase = Phase::AwaitGo;
                }
                stream.image.clone()
            }
            (None, opcode::TERMINATE) => {
                let terminate = Terminate {
                    layer: self.get(fields, "layer")?.unwrap_or(0) as u8,
                    etype: self.get(fields, "type")?.unwrap_or(0) as u8,
                    code: self.get(fields, "code")?.unwrap_or(0) as u8,
                    headers: self.get(fields, "headers")?.unwrap_or(0) as u8,
                    reserved: 0,
                    quoted: Vec::new(),
                };
                terminate.encode()
            }
            (None, _) => {
                let size = self.get(fields, "adv")?.map_or(PING_SIZE, |v| v as u32);
                advertises = true;
                self.stream()?.advertisement(size)
            }
        };
        let mut segment = self.stream()?.untagged(code, &payload);
        if code == opcode::WRITE || code == opcode::READ_RESPONSE {
            segment.tagged = true;
            segment.stag = region.map_or(0, |r| r.stag);
            segment.to = region.map_or(0, |r| r.base);
        }
        let own_msn = fields.contains_key("msn");
        self.override_fields(&mut segment, fields)?;
        let Some(size) = self
            .get(fields, "segment")?
            .map(|size| size.max(1) as usize)
        else {
            return self.emit_segment(segment, own_msn, advertises, fields, words);
        };
        let payload = std::mem::take(&mut segment.payload);
        for (index, piece) in payload.chunks(size).enumerate() {
            let at = index * size;
            let mut one = segment.clone();
            one.payload = piece.to_vec();
            one.last &= at + piece.len() == payload.len();
            one.to = one.to.wrapping_add(at as u64);
            one.mo = one.mo.wrapping_add(at as u32);
            self.emit_segment(one, own_msn, advertises, fields, words)?;
            self.drain()?;
        }
        Ok(())
    }

    /// Waits while more octets than the target may have room for are on their way.
    fn drain(&mut self) -> Result<()> {
        let until = Instant::now() + self.target.patience;
        let tcp = &mut self.stream()?.tcp;
        while tcp.snd_nxt.wrapping_sub(tcp.snd_una) > IN_FLIGHT {
            if tcp.ending.is_some() || !tcp.pump(until) {
                bail!("the target does not take the segments of the message");
            }
        }
        Ok(())
    }

    fn emit_segment(
        &mut self,
        mut segment: Segment,
        own_msn: bool,
        advertises: bool,
        fields: &BTreeMap<String, Value>,
        words: &[String],
    ) -> Result<()> {
        let has = |word: &str| words.iter().any(|w| w == word);
        let keep = self.get(fields, "keep")?;
        let by = self
            .get(fields, "by")?
            .map_or(usize::MAX, |v| v.max(1) as usize);
        let times = self.get(fields, "times")?.unwrap_or(1);
        let mut changes = Vec::new();
        for _ in 0..self.get(fields, "mutate")?.unwrap_or(0) {
            changes.push((self.random(), self.random()));
        }
        let options = FpduOptions {
            length: self.get(fields, "ulpdu")?.map(|v| v as u16),
            pad: self.get(fields, "pad")?.unwrap_or(0) as u8,
            crc_over_zero_pad: has("padunsummed"),
            crc: match () {
                () if has("badcrc") => CrcField::Bad,
                () if has("zerocrc") => CrcField::Zero,
                () => CrcField::Good,
            },
            marker_pointer: self.get(fields, "mptr")?.unwrap_or(0) as u16,
            marker_reserved: self.get(fields, "mres")?.unwrap_or(0) as u16,
            without_marker: has("unmarked"),
        };
        let stream = self.stream()?;
        let text = format!(
            "{}{}{}",
            segment.describe(),
            if has("badcrc") { ", BAD CRC" } else { "" },
            if times > 1 {
                format!(", {times} times")
            } else {
                String::new()
            },
        );
        stream.tcp.note(true, text);
        let mut octets = Vec::new();
        for _ in 0..times {
            for part in segment.parts(by) {
                let mut ulpdu = part.encode();
                if let Some(keep) = keep {
                    ulpdu.truncate(keep as usize);
                }
                for (place, change) in &changes {
                    let length = ulpdu.len().max(1) as u64;
                    if let Some(octet) = ulpdu.get_mut((place % length) as usize) {
                        *octet ^= (1 + change % 255) as u8;
                    }
                }
                octets.extend(stream.fpdu(&ulpdu, &options, has("marked")));
                stream.sent = ulpdu;
            }
            if !segment.tagged && !own_msn && segment.qn < 4 && segment.last {
                let msn = &mut stream.msn[segment.qn as usize];
                *msn = msn.wrapping_add(1);
                segment.msn = *msn;
            }
        }
        if has("once") || fields.contains_key("offset") || fields.contains_key("ackoffset") {
            stream.forget_fpdus(octets.len());
        }
        if segment.opcode == opcode::READ_RESPONSE && segment.last {
            stream.reads.pop_front();
        }
        if let Some(at) = self.get(fields, "flip")? {
            *octets
                .get_mut(at as usize)
                .context("flip= lies beyond the FPDU")? ^= 0x01;
        }
        let stream = self.stream()?;
        if advertises {
            stream.on_advertisement_sent();
        }
        let good =
            options.crc == CrcField::Good && segment.opcode == opcode::WRITE && segment.tagged;
        // With an offset, TCP decides which of the octets are new.
        let is_placed =
            good && !fields.contains_key("flip") && !fields.contains_key("offset") && !has("once");
        if let (Some(region), true) = (stream.region, is_placed)
            && segment.stag == region.stag
        {
            let at = segment.to.wrapping_sub(region.base) as usize;
            if let Some(place) = at
                .checked_add(segment.payload.len())
                .and_then(|end| stream.image.get_mut(at..end))
            {
                place.copy_from_slice(&segment.payload);
            }
        }
        self.emit(octets, fields, words)
    }

    fn override_fields(
        &mut self,
        segment: &mut Segment,
        fields: &BTreeMap<String, Value>,
    ) -> Result<()> {
        let mut take = |name: &str| self.get(fields, name);
        if let Some(v) = take("t")? {
            segment.tagged = v != 0;
        }
        if let Some(v) = take("l")? {
            segment.last = v != 0;
        }
        segment.stag = take("stag")?.map_or(segment.stag, |v| v as u32);
        segment.to = take("to")?.unwrap_or(segment.to);
        segment.qn = take("qn")?.map_or(segment.qn, |v| v as u32);
        segment.msn = take("msn")?.map_or(segment.msn, |v| v as u32);
        segment.mo = take("mo")?.map_or(segment.mo, |v| v as u32);
        segment.ddp_version = take("dv")?.map_or(segment.ddp_version, |v| v as u8);
        segment.rdmap_version = take("rv")?.map_or(segment.rdmap_version, |v| v as u8);
        segment.opcode = take("op")?.map_or(segment.opcode, |v| v as u8);
        segment.ddp_reserved = take("rsvd")?.map_or(0, |v| v as u8);
        segment.rdmap_reserved = take("rrsvd")?.map_or(0, |v| v as u8);
        Ok(())
    }

    /// Waits for one of the alternatives; false ends the case.
    fn want(&mut self, alternatives: &[Alternative]) -> Result<bool> {
        let level = self.case.level();
        let first = &alternatives[0];
        let event = match first.name.as_str() {
            "connected" | "refused" => return self.want_connection(alternatives),
            "tcp" => return self.want_tcp(first),
            "acked" | "ack" => return self.want_ack(first),
            "memory" => return self.want_memory(first),
            "answer" => return self.want_answer(alternatives),
            "passed" => return self.want_passed(first),
            "completion" => return self.want_completion(alternatives),
            "event" => return self.want_event(alternatives),
            "flow" => return self.want_flow(first),
            "ended" => return self.want_ended(first),
            "octets" => return self.want_octets(first),
            "keys" => return self.want_keys(first),
            "elapsed" => return self.want_elapsed(first),
            "traffic" => match self.traffic(first)? {
                Ok(figures) => {
                    self.grade(first, &figures);
                    return Ok(true);
                }
                Err(Broken { text, event }) => {
                    self.outcome.notes.push(text);
                    *event
                }
            },
            _ if alternatives.iter().any(|a| a.name == "lives") => match self.stream()?.lives() {
                Ok(()) => {
                    let lives = alternatives.iter().find(|a| a.name == "lives");
                    self.grade(lives.unwrap_or(first), "the conversation goes on");
                    return Ok(true);
                }
                Err(Broken { text, event }) => {
                    self.outcome.notes.push(text);
                    *event
                }
            },
            _ => {
                let quiet = alternatives
                    .iter()
                    .find(|a| a.name == "quiet" || a.name == "nothing");
                let within = alternatives.iter().filter_map(|a| a.within).max();
                let patience = match quiet {
                    Some(quiet) if quiet.source == first.source => {
                        quiet.within.unwrap_or(self.target.quiet)
                    }
                    // Silence is one of several answers: the others get their time.
                    Some(quiet) => quiet.within.unwrap_or(self.target.quiet * 8),
                    None => within.unwrap_or(self.target.patience),
                };
                if self.mapper.is_some() && self.stream.is_none() {
                    self.mapper_event(patience)?
                } else {
                    self.next_event(alternatives, patience)?
                }
            }
        };
        self.last = Some(event.clone());
        let mut differences = Vec::new();
        for alternative in alternatives {
            match self.matches(alternative, &event)? {
                None => {
                    self.grade(alternative, &event.describe());
                    // A missing feature is not asked for again.
                    return Ok(alternative.grade != Grade::NotSupported);
                }
                Some(difference) => differences.push(difference),
            }
        }
        self.outcome.expected = alternatives.iter().map(|a| a.source.clone()).collect();
        self.outcome.actual = event.describe();
        let verdict = match level {
            Level::May => Verdict::Recorded,
            Level::Should => Verdict::Weak,
            Level::Must | Level::Rob | Level::Int => Verdict::Fail,
        };
        self.outcome.worsen(
            verdict,
            format!("expected: {}; {}", first.source, differences[0]),
        );
        Ok(false)
    }

    /// The target's next event: beyond the segments that `past=` passes over, and of `message` all of them.
    fn next_event(&mut self, alternatives: &[Alternative], patience: Duration) -> Result<Event> {
        let until = Instant::now() + patience;
        let past = alternatives.iter().find_map(|a| a.past.as_deref());
        self.passed.clear();
        let mut event = self.stream()?.event(patience);
        while let (Some(past), Event::Fpdu(_, Some(segment))) = (past, &event)
            && Instant::now() < until
            && is_kind(past, &event)
        {
            self.passed.extend(&segment.payload);
            event = self
                .stream()?
                .event(until.saturating_duration_since(Instant::now()));
        }
        self.segments = 1;
        if !alternatives.iter().any(|a| a.name == "message") {
            return Ok(event);
        }
        let Event::Fpdu(fpdu, Some(mut message)) = event else {
            return Ok(event);
        };
        while !message.last {
            let next = self.stream()?.event(patience);
            let Event::Fpdu(_, Some(segment)) = &next else {
                return Ok(next);
            };
            let length = message.payload.len();
            let follows = segment.tagged == message.tagged
                && segment.opcode == message.opcode
                && segment.stag == message.stag
                && segment.to
                    == message
                        .to
                        .wrapping_add(if message.tagged { length as u64 } else { 0 })
                && (segment.qn, segment.msn) == (message.qn, message.msn)
                && segment.mo == message.mo + if message.tagged { 0 } else { length as u32 };
            if !follows {
                let text = format!("a message goes on with {}", next.describe());
                self.outcome.worsen(Verdict::Fail, text);
                return Ok(next);
            }
            message.payload.extend(&segment.payload);
            message.last = segment.last;
            self.segments += 1;
        }
        Ok(Event::Fpdu(fpdu, Some(message)))
    }

    fn grade(&mut self, alternative: &Alternative, actual: &str) {
        let verdict = match alternative.grade {
            Grade::Pass if self.case.level() == Level::May => Verdict::Recorded,
            Grade::Pass => Verdict::Pass,
            Grade::Weak => Verdict::Weak,
            Grade::NotSupported => Verdict::NotSupported,
        };
        let reason = match (&alternative.note, verdict) {
            (Some(note), _) => format!("{note}: {actual}"),
            (None, Verdict::Pass) => String::new(),
            (None, _) => actual.to_owned(),
        };
        if verdict > Verdict::Recorded {
            self.outcome.actual = actual.to_owned();
            self.outcome.expected = vec![alternative.source.clone()];
        }
        self.outcome.worsen(verdict, reason);
    }

    fn decide(&mut self, alternative: &Alternative, good: bool, actual: &str) -> Result<bool> {
        if good {
            self.grade(alternative, actual);
            // A missing feature is not asked for again.
            return Ok(alternative.grade != Grade::NotSupported);
        }
        self.outcome.expected = vec![alternative.source.clone()];
        self.outcome.actual = actual.to_owned();
        let verdict = match self.case.level() {
            Level::May => Verdict::Recorded,
            Level::Should => Verdict::Weak,
            _ => Verdict::Fail,
        };
        self.outcome.worsen(
            verdict,
            format!("expected: {}; found: {actual}", alternative.source),
        );
        Ok(false)
    }

    fn want_connection(&mut self, alternatives: &[Alternative]) -> Result<bool> {
        let (name, actual) = match &self.connect_error {
            None => ("connected", "connected".to_owned()),
            Some(error) => ("refused", error.clone()),
        };
        let found = alternatives.iter().find(|a| a.name == name);
        let good = found.is_some();
        let first = &alternatives[0];
        let goes_on = self.decide(found.unwrap_or(first), good, &actual)?;
        // The steps behind a wanted connection need it.
        Ok(goes_on && name == first.name)
    }

    /// Properties of the target's TCP and IP.
    fn want_tcp(&mut self, alternative: &Alternative) -> Result<bool> {
        let tcp = &self.stream()?.tcp;
        let ip = tcp.last_ip();
        let mss = tcp.peer_mss.map_or(536, u64::from);
        // Octets of the first block, if the last segment is in it.
        let block = tcp.sack.filter(|(_, end)| *end == tcp.snd_nxt);
        let sacked = block.map_or(0, |(begin, end)| end.wrapping_sub(begin).into());
        let pieces = u64::from(tcp.data_segments);
        let mut actual = Vec::new();
        let mut good = true;
        for comparison in &alternative.comparisons {
            let found = match comparison.field.as_str() {
                "mss" => mss,
                "df" => ip.map_or(0, |(fragment, _)| fragment.into()),
                "pieces" => pieces,
                "ttl" => ip.map_or(0, |(_, hops)| hops.into()),
                "sack" => sacked,
                other => bail!("{other} is no property of TCP here: mss, df, ttl, sack, pieces"),
            };
            actual.push(format!("{} {found}", comparison.field));
            good &= self.holds(comparison, &Found::Number(found))?;
        }
        self.decide(alternative, good, &actual.join(", "))
    }

    fn want_ack(&mut self, alternative: &Alternative) -> Result<bool> {
        let within = alternative.within.unwrap_or(self.target.patience);
        let until = Instant::now() + within;
        let all = alternative.name == "acked";
        let tcp = &mut self.stream()?.tcp;
        let done = |tcp: &Tcp| {
            if all {
                tcp.all_acked()
            } else {
                tcp.pure_acks > 0
            }
        };
        while !done(tcp) && tcp.ending != Some(Ending::Reset) && tcp.pump(until) {}
        let good = done(tcp);
        let actual = if good { "an ACK" } else { "no ACK" };
        self.decide(alternative, good, actual)
    }

    /// `None` if the event is the wanted one; else the difference.
    fn matches(&mut self, alternative: &Alternative, event: &Event) -> Result<Option<String>> {
        let found = event.describe();
        let other = Ok(Some(format!("found: {found}")));
        let right = is_kind(&alternative.name, event);
        if !right {
            return other;
        }
        if let (Some(code), Event::Fpdu(_, Some(segment))) = (alternative.code, event) {
            match Terminate::decode(&segment.payload) {
                Some(t) if (t.layer, t.etype, t.code) == code => {}
                Some(t)
                    if self.target.swapped_terminates
                        && self.case.id != "TRM-01"
                        && (t.etype, t.layer, t.code) == code =>
                {
                    self.outcome.notes.push("explained by TRM-01".into());
                }
                _ => return other,
            }
        }
        for comparison in &alternative.comparisons {
            if comparison.field == "quotes" {
                if let Some(difference) = self.quotes(comparison, event)? {
                    return Ok(Some(difference));
                }
                continue;
            }
            let value = match comparison.field.as_str() {
                "segments" => Some(Found::Number(self.segments)),
                name => field(event, name),
            };
            let Some(value) = value else {
                return Ok(Some(format!("{found} has no field {}", comparison.field)));
            };
            if !self.holds(comparison, &value)? {
                let text = match (&value, &comparison.value) {
                    (Found::Number(n), Value::Expr(expr)) => {
                        let expected = self.number(expr)?;
                        format!(
                            "{} is {n} ({n:#x}), compared with {expected} ({expected:#x})",
                            comparison.field
                        )
                    }
                    (Found::Octets(got), expected) => {
                        let expected = self.expected_octets(expected, got.len())?;
                        let at = (0..got.len().max(expected.len()))
                            .find(|at| got.get(*at) != expected.get(*at));
                        format!(
                            "{} differs first at octet {}",
                            comparison.field,
                            at.unwrap_or(0)
                        )
                    }
                    _ => format!("{} differs", comparison.field),
                };
                return Ok(Some(format!("{text}; found: {found}")));
            }
        }
        Ok(None)
    }

    /// Octets of `value`; of `region`, the target's buffer, the first `length`.
    fn expected_octets(&mut self, value: &Value, length: usize) -> Result<Vec<u8>> {
        if *value == Value::Word("region".into()) {
            let image = &self.stream()?.image;
            return Ok(image.iter().copied().take(length).collect());
        }
        let fields = BTreeMap::from([("data".to_owned(), value.clone())]);
        Ok(self.octets(&fields, "data")?.unwrap_or_default())
    }

    fn holds(&mut self, comparison: &Comparison, found: &Found) -> Result<bool> {
        match found {
            Found::Number(found) => {
                let Value::Expr(expr) = &comparison.value else {
                    bail!("{} is a number", comparison.field);
                };
                let value = self.number(expr)?;
                Ok(match comparison.operator {
                    Operator::Equal => *found == value,
                    Operator::NotEqual => *found != value,
                    Operator::AtMost => *found <= value,
                    Operator::AtLeast => *found >= value,
                    Operator::Contains => found & value == value,
                })
            }
            Found::Octets(found) => {
                // The content of the target's buffer, as far as it is known.
                if comparison.value == Value::Expr(Expr(vec![(true, Term::Number(0))])) {
                    return Ok(found.is_empty());
                }
                let expected = self.expected_octets(&comparison.value, found.len())?;
                Ok((found == &expected) == (comparison.operator == Operator::Equal))
            }
        }
    }

    /// Headers that a Terminate quotes (RFC 5040 section 4.8).
    fn quotes(&mut self, comparison: &Comparison, event: &Event) -> Result<Option<String>> {
        let Event::Fpdu(_, Some(segment)) = event else {
            return Ok(Some("no Terminate".into()));
        };
        let Some(terminate) = Terminate::decode(&segment.payload) else {
            return Ok(Some(
                "the Terminate is shorter than its control word".into(),
            ));
        };
        let Value::Word(kind) = &comparison.value else {
            bail!("quotes= takes none, sent or read")
        };
        let sent = self.stream()?.sent.clone();
        let header = if sent.first().is_some_and(|o| o & 0x80 != 0) {
            14
        } else {
            18
        };
        let mut expected = (sent.len() as u16).to_be_bytes().to_vec();
        expected.extend(sent.iter().take(header));
        let mut bits = 6;
        match kind.as_str() {
            "none" => {
                expected.clear();
                bits = 0;
            }
            "sent" => {}
            "read" => {
                expected.extend(sent.iter().skip(header).take(28));
                bits = 7;
            }
            _ => bail!("quotes= takes none, sent or read"),
        }
        if terminate.headers != bits {
            return Ok(Some(format!(
                "bits M, D, R are {:03b}, expected {bits:03b}",
                terminate.headers
            )));
        }
        let got = &terminate.quoted;
        let differs =
            (0..got.len().max(expected.len())).find(|at| got.get(*at) != expected.get(*at));
        Ok(differs.map(|at| {
            let show = |o: Option<&u8>| o.map_or("nothing".into(), |o| format!("{o:#04x}"));
            format!(
                "the quoted headers differ first at octet {at}: expected {}, found {} (0 and 1: DDP Segment Length)",
                show(expected.get(at)), show(got.get(at))
            )
        }))
    }
}

/// Whether an event is what a step names.
fn is_kind(name: &str, event: &Event) -> bool {
    let operation = match event {
        Event::Fpdu(_, Some(segment)) => Some(segment.opcode),
        _ => None,
    };
    match name {
        "quiet" | "nothing" => *event == Event::Quiet,
        "close" => matches!(event, Event::Fin | Event::Reset),
        "fin" => *event == Event::Fin,
        "reset" => *event == Event::Reset,
        "reply" => matches!(event, Event::Mpa(frame) if &frame.key == REPLY_KEY),
        "request" => matches!(event, Event::Mpa(frame) if &frame.key == REQUEST_KEY),
        "send" => matches!(operation, Some(3..=6)),
        "write" => operation == Some(opcode::WRITE),
        "readreq" => operation == Some(opcode::READ_REQUEST),
        "response" => operation == Some(opcode::READ_RESPONSE),
        "terminate" => operation == Some(opcode::TERMINATE),
        "atomic" => operation == Some(opcode::ATOMIC_REQUEST),
        "atomic-response" => operation == Some(opcode::ATOMIC_RESPONSE),
        "fpdu" => operation.is_some(),
        "message" => operation.is_some_and(|opcode| opcode != opcode::TERMINATE),
        "mapped" => matches!(event, Event::Mapper(Some(_))),
        _ => false,
    }
}

/// Value of a field of an event.
fn field(event: &Event, name: &str) -> Option<Found> {
    let number = |value: u64| Some(Found::Number(value));
    match event {
        Event::Mpa(frame) => {
            let depths = frame.depths();
            match name {
                "m" => number(frame.markers().into()),
                "c" => number(frame.crc().into()),
                "r" => number(frame.rejected().into()),
                "s" => number(frame.enhanced().into()),
                "res" => number((frame.flags & 0xF).into()),
                "rev" => number(frame.revision.into()),
                "pdlen" => number(frame.pd_length.into()),
                "ird" => number(depths?.0.into()),
                "ord" => number(depths?.1.into()),
                "abcd" => number(depths?.2.into()),
                "pd" => Some(Found::Octets(
                    frame.private_data[depths.map_or(0, |_| 4)..].to_vec(),
                )),
                _ => None,
            }
        }
        Event::Mapper(Some(message)) => match name {
            "kind" => number(message.kind.into()),
            "ver" => number(message.version.into()),
            "ipv" => number(message.ip_version.into()),
            "port" => number(message.accepting_port.into()),
            "cport" => number(message.connecting_port.into()),
            "handle" => number(message.handle),
            "len" => number(message.length as u64),
            _ => None,
        },
        Event::Fpdu(fpdu, Some(segment)) => {
            let read = ReadRequest::decode(&segment.payload);
            let terminate = Terminate::decode(&segment.payload);
            if segment.opcode == opcode::ATOMIC_REQUEST {
                let request = AtomicRequest::decode(&segment.payload);
                let found = request.and_then(|request| {
                    Some(match name {
                        "aop" => request.operation.into(),
                        "rid" => request.identifier.into(),
                        "src" => request.stag.into(),
                        "srcto" => request.to,
                        "add" | "swap" => request.add_or_swap,
                        "mask" => request.add_or_swap_mask,
                        "compare" => request.compare,
                        "cmask" => request.compare_mask,
                        _ => return None,
                    })
                });
                if let Some(found) = found {
                    return number(found);
                }
            }
            if segment.opcode == opcode::ATOMIC_RESPONSE
                && let Some(response) = AtomicResponse::decode(&segment.payload)
            {
                match name {
                    "rid" => return number(response.identifier.into()),
                    "value" => return number(response.value),
                    _ => {}
                }
            }
            match name {
                "op" => number(segment.opcode.into()),
                "t" => number(segment.tagged.into()),
                "l" => number(segment.last.into()),
                "stag" => number(segment.stag.into()),
                "to" => number(segment.to),
                "qn" => number(segment.qn.into()),
                "msn" => number(segment.msn.into()),
                "mo" => number(segment.mo.into()),
                "dv" => number(segment.ddp_version.into()),
                "rv" => number(segment.rdmap_version.into()),
                "rsvd" => number(segment.ddp_reserved.into()),
                "rrsvd" => number(segment.rdmap_reserved.into()),
                "len" => number(segment.payload.len() as u64),
                "markers" => number(fpdu.markers.into()),
                "data" => Some(Found::Octets(segment.payload.clone())),
                "sink" => number(read?.sink_stag.into()),
                "sinkto" => number(read?.sink_to),
                "size" => number(read?.size.into()),
                "src" => number(read?.source_stag.into()),
                "srcto" => number(read?.source_to),
                "headers" => number(terminate?.headers.into()),
                "reserved" => number(terminate?.reserved.into()),
                "layer" => number(terminate?.layer.into()),
                "type" => number(terminate?.etype.into()),
                "code" => number(terminate?.code.into()),
                _ => None,
            }
        }
        _ => None,
    }
}
