//! Case files: their parser, with errors that name file and line.
//!
//! ```text
//! case TAG-20 "beyond the end"
//! rfc  5041 7.1(4) MUST "The sum of the DDP Segment payload length and the TO falls in the range ..."
//! role responder
//! start region
//! send write stag=$r.stag to=$r.end data=0xaa
//! want terminate 1/1/01 quotes=sent
//! also terminate 0/1/01 note "hardware"
//! then close
//! ```
//!
//! A line that begins with blanks continues the one before. `#` begins a comment.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::impair::Direction;
use crate::stream::Role;

#[derive(Debug)]
pub struct CaseError {
    pub file: String,
    pub line: usize,
    pub text: String,
}

impl fmt::Display for CaseError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.text)
    }
}

impl std::error::Error for CaseError {}

/// Weight of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    Must,
    Should,
    /// Recorded, never a failure.
    May,
    /// The RFC is silent or contradicts itself: any answer of the accepted ones.
    Rob,
    /// Needed by known peers.
    Int,
}

impl Level {
    pub fn parse(word: &str) -> Option<Level> {
        Some(match word {
            "MUST" => Level::Must,
            "SHOULD" => Level::Should,
            "MAY" => Level::May,
            "ROB" => Level::Rob,
            "INT" => Level::Int,
            _ => return None,
        })
    }

    pub fn name(self) -> &'static str {
        match self {
            Level::Must => "MUST",
            Level::Should => "SHOULD",
            Level::May => "MAY",
            Level::Rob => "ROB",
            Level::Int => "INT",
        }
    }
}

#[derive(Debug, Clone, serde::Serialize)]
pub struct Rule {
    pub rfc: String,
    pub section: String,
    pub level: Level,
    pub text: String,
}

/// Sorts cases by group and number.
pub fn sort(cases: &mut [Case]) {
    cases.sort_by_key(|case| {
        let number = case.id.split('-').nth(1);
        let number = number.and_then(|n| n.parse::<u32>().ok());
        (case.group().to_owned(), number)
    });
}

/// How far the standard conversation goes before the steps of the case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The agent has accepted a stream that the lab opened.
    Agent,
    /// The agent knows the lab's Request and has not answered it.
    Asked,
    /// The agent listens, and TCP is connected; it knows no Request yet.
    Listening,
    /// The agent connects to the lab, whose TCP has accepted.
    Calling,
    /// The lab has connected to the agent, in streaming mode.
    Streaming,
    /// The agent has connected to the lab, in streaming mode.
    Opened,
    /// Nothing: the case connects by itself.
    Nothing,
    /// TCP is connected.
    Tcp,
    /// MPA is open, nothing was sent yet.
    Stream,
    /// A region of the target is known.
    Region,
}

/// Number that is known when the case runs: terms that are added up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expr(pub Vec<(bool, Term)>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Term {
    Number(u64),
    Variable(String),
    /// `$NAME*N`: the variable times N.
    Product(String, u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Expr(Expr),
    /// Octets, from hexadecimal digits or a quoted text.
    Octets(Vec<u8>),
    /// `len:N`: N octets of a pattern.
    Pattern(Expr),
    /// `long:N`: N in eight octets, most significant first; `native:N`: in the target's byte order.
    Long {
        value: Expr,
        is_native: bool,
    },
    /// Octets one after the other, separated by commas.
    Parts(Vec<Value>),
    Word(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    Equal,
    NotEqual,
    AtMost,
    AtLeast,
    /// All bits of the value are set.
    Contains,
}

#[derive(Debug, Clone)]
pub struct Comparison {
    pub field: String,
    pub operator: Operator,
    pub value: Value,
}

/// Verdict of an alternative that matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grade {
    Pass,
    Weak,
    NotSupported,
}

#[derive(Debug, Clone)]
pub struct Alternative {
    pub grade: Grade,
    /// `terminate`, `close`, `reply`, ...
    pub name: String,
    /// Layer, type and code of a Terminate.
    pub code: Option<(u8, u8, u8)>,
    pub comparisons: Vec<Comparison>,
    pub within: Option<Duration>,
    /// Segments of this kind may come before: `past=write`.
    pub past: Option<String>,
    pub note: Option<String>,
    pub source: String,
}

#[derive(Debug, Clone)]
pub struct Step {
    pub line: usize,
    pub source: String,
    pub kind: StepKind,
    /// Only with this value of a parameter: `when NAME=VALUE STEP`.
    pub when: Option<(String, u64)>,
}

#[derive(Debug, Clone)]
pub enum StepKind {
    Send {
        what: String,
        fields: BTreeMap<String, Value>,
        words: Vec<String>,
    },
    Want(Vec<Alternative>),
    Connect(BTreeMap<String, Value>),
    Wait(Duration),
    /// Impairs the path from here on.
    Impair(PathFields),
    /// Begins the time of `want elapsed`.
    Clock,
    /// Sets the window of the segments from here on.
    Window(Expr),
    /// Loses segments with data on their way to the lab: these of the next ones.
    Lose(Vec<u32>),
    /// Loses all frames above this size on their way to the lab.
    LoseAbove(Expr),
    /// Receives until this many octets of TCP data have come since the last look at the flow.
    Await(Expr),
    /// Accepts a further connection of the target.
    Reaccept,
    /// Opens this many further connections, each with a Request.
    Crowd(Expr),
    /// A command for the agent; with `may_fail` an error is only noted.
    Agent {
        what: String,
        fields: BTreeMap<String, Value>,
        may_fail: bool,
    },
    /// Sends held segments as one.
    Flush(BTreeMap<String, Value>, Vec<String>),
    /// Repeats the steps up to `Done`; `$i` counts from 0.
    Repeat(Expr),
    Done,
    /// The steps from here on are about this stream, 1 or 2.
    Stream(u64),
    /// Whether the lab acknowledges what it receives.
    Acks(bool),
}

/// Fields of an impaired path, and its directions: `out` to the target, `back` from it; none is both.
pub type PathFields = (BTreeMap<String, Value>, Vec<String>);

#[derive(Debug, Clone)]
pub struct Case {
    pub id: String,
    pub title: String,
    pub file: String,
    pub rules: Vec<Rule>,
    pub role: Role,
    pub params: Vec<(String, Vec<String>)>,
    pub start: Start,
    pub opening: BTreeMap<String, Value>,
    /// Options of the lab's SYN.
    pub syn: BTreeMap<String, Value>,
    /// Fields of the agent's connect, with `start calling`.
    pub call: BTreeMap<String, Value>,
    /// Settings of the target without which the case makes no sense, as `mpa.crc=off`, sorted.
    pub settings: Vec<String>,
    /// Impairments from the SYN on.
    pub path: Option<PathFields>,
    /// Regions that the agent registers before it accepts: their names, and the fields of the command.
    pub regions: Vec<(String, BTreeMap<String, Value>)>,
    /// Receives that the agent posts before it accepts, and their size.
    pub receives: (u64, u64),
    /// Fields of the agent's command to accept.
    pub accepting: BTreeMap<String, Value>,
    /// Fields of the agent's command to make the queues.
    pub preparing: BTreeMap<String, Value>,
    /// The second stream is of another protection domain.
    pub is_apart: bool,
    /// Streams that the agent accepts: 1 or 2.
    pub streams: u64,
    pub smoke: bool,
    pub hazard: bool,
    /// Reason for differences to the catalogue, and other remarks.
    pub remarks: Vec<String>,
    pub steps: Vec<Step>,
}

impl Case {
    pub fn group(&self) -> &str {
        self.id.split('-').next().unwrap_or(&self.id)
    }

    /// Returns true if the path loses, delays or reorders frames in the case.
    pub fn impairs_path(&self) -> bool {
        let mut kinds = self.steps.iter().map(|step| &step.kind);
        self.path.is_some() || kinds.any(|kind| matches!(kind, StepKind::Impair(_)))
    }

    /// Returns true if the case runs only with the agent.
    pub fn needs_agent(&self) -> bool {
        matches!(
            self.start,
            Start::Agent
                | Start::Asked
                | Start::Listening
                | Start::Calling
                | Start::Streaming
                | Start::Opened
        )
    }

    pub fn level(&self) -> Level {
        self.rules[0].level
    }

    /// All combinations of the parameters' values.
    pub fn instances(&self) -> Vec<Vec<(String, String)>> {
        let mut all = vec![Vec::new()];
        for (name, values) in &self.params {
            let with = |one: &Vec<(String, String)>| {
                let one = one.clone();
                values.iter().map(move |value| {
                    let mut one = one.clone();
                    one.push((name.clone(), value.clone()));
                    one
                })
            };
            all = all.iter().flat_map(with).collect();
        }
        all
    }
}

const SEGMENTS: &[&str] = &[
    "write",
    "read",
    "response",
    "send",
    "send-inv",
    "send-se",
    "send-se-inv",
    "terminate",
    "ddp",
    "immediate",
    "immediate-se",
    "atomic",
    "atomic-response",
];

/// Fields that change how the octets of a message are put into TCP segments.
const TCP_FIELDS: &[&str] = &["cut", "offset", "gap", "ackoffset"];

const SEGMENT_FIELDS: &[&str] = &[
    "stag", "to", "qn", "msn", "mo", "dv", "rv", "op", "t", "l", "rsvd", "rrsvd", "data", "ulpdu",
    "keep", "pad", "sink", "sinkto", "size", "src", "srcto", "layer", "type", "code", "headers",
    "adv", "flip", "aop", "rid", "add", "swap", "mask", "compare", "cmask", "value", "segment",
    "by", "times", "mptr", "mres", "mutate",
];
const SEGMENT_WORDS: &[&str] = &[
    "badcrc",
    "zerocrc",
    "padunsummed",
    "each",
    "hold",
    "nopush",
    "badsum",
    "later",
    "fin",
    "urgent",
    "fragments",
    "once",
    "old",
    "scatter",
    "vlan",
    "ce",
    "extended",
    "marked",
    "unmarked",
];

/// Fields of the lab's SYN; `sack` and `ts` are 1 if the option is there.
const SYN_FIELDS: &[&str] = &["mss", "isn", "window", "scale", "sack", "ts", "same"];

/// Fields of a message to the target's port mapper.
const MAPPER_FIELDS: &[&str] = &[
    "kind", "ver", "ipv", "time", "port", "cport", "handle", "addr", "keep", "extra",
];

const FRAME_FIELDS: &[&str] = &[
    "m", "c", "r", "s", "res", "rev", "ird", "ord", "abcd", "pd", "pdlen", "flip", "keep", "extra",
];

const STREAM_PATTERNS: &[&str] = &[
    "terminate",
    "close",
    "fin",
    "reset",
    "reply",
    "request",
    "send",
    "write",
    "readreq",
    "response",
    "atomic",
    "atomic-response",
    "fpdu",
    "message",
    "nothing",
];
const STATE_PATTERNS: &[&str] = &[
    "lives",
    "quiet",
    "acked",
    "ack",
    "connected",
    "refused",
    "tcp",
    "mapped",
    "memory",
    "completion",
    "answer",
    "passed",
    "flow",
    "event",
    "ended",
    "traffic",
    "keys",
    "elapsed",
    "octets",
];

/// Fields of commands for the agent.
const AGENT_FIELDS: &[&str] = &[
    "name",
    "size",
    "access",
    "domain",
    "octet",
    "op",
    "at",
    "stag",
    "to",
    "id",
    "private",
    "ird",
    "ord",
    "ms",
    "data",
    "region",
    "fence",
    "inline",
    "elements",
    "step",
    "lkey",
    "add",
    "swap",
    "compare",
    "imm",
    "solicited",
    "count",
    "stride",
    "pattern",
    "address",
    "kind",
    "lead",
    "depth",
    "try",
    "fixed",
    "shared",
    "port",
];

/// Variables of a region or window of the agent: `$NAME.stag` and the like; `was` is the STag before the last bind.
const PLACE: [&str; 6] = ["stag", "base", "end", "len", "local", "was"];

/// Whether a text has the form `TABLE.KEY=VALUE`, of a table of siwd's device.
pub fn is_setting(text: &str) -> bool {
    let parts = text.split_once('=').zip(text.split_once('.'));
    parts.is_some_and(|((name, value), (table, _))| {
        !value.is_empty() && !table.is_empty() && name.len() > table.len() + 1
    })
}

struct Parser {
    params: Vec<String>,
    /// Between `repeat` and `done`.
    is_repeating: bool,
}

/// Splits a line at blanks, with quoted parts kept whole.
fn words(line: &str) -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    let mut word = String::new();
    let mut quoted = false;
    for letter in line.chars() {
        match letter {
            '"' => {
                quoted = !quoted;
                word.push(letter);
            }
            '#' if !quoted && word.is_empty() => break,
            letter if letter.is_whitespace() && !quoted => {
                if !word.is_empty() {
                    all.push(std::mem::take(&mut word));
                }
            }
            letter => word.push(letter),
        }
    }
    if quoted {
        return Err("a quotation mark is missing".into());
    }
    if !word.is_empty() {
        all.push(word);
    }
    Ok(all)
}

fn unquoted(word: &str) -> Option<&str> {
    word.strip_prefix('"')?.strip_suffix('"')
}

fn number(word: &str) -> Option<u64> {
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

fn duration(word: &str) -> Option<Duration> {
    if let Some(ms) = word.strip_suffix("ms") {
        return Some(Duration::from_millis(ms.parse().ok()?));
    }
    Some(Duration::from_secs(word.strip_suffix('s')?.parse().ok()?))
}

impl Parser {
    fn known_variable(&self, name: &str) -> bool {
        const FIXED: &[&str] = &[
            "r.stag",
            "r.base",
            "r.end",
            "r.len",
            "lab.stag",
            "lab.base",
            "msn.0",
            "msn.1",
            "msn.2",
            "crc",
            "mpa.ird",
            "mpa.ord",
            "mss",
            "target.port",
            "mulpdu",
            "read.sink",
            "read.to",
            "read.size",
        ];
        FIXED.contains(&name)
            || name.starts_with("last.")
            || name
                .strip_prefix("random.")
                .is_some_and(|end| number(end).is_some())
            || self.is_repeating && name == "i"
            || self.params.iter().any(|p| p == name)
    }

    fn expr(&self, text: &str) -> Result<Expr, String> {
        let mut terms = Vec::new();
        let mut add = true;
        let mut term = String::new();
        for letter in text.chars().chain(['+']) {
            if letter != '+' && letter != '-'
                || term.is_empty() && letter == '-' && terms.is_empty()
            {
                if letter == '-' {
                    add = false;
                } else {
                    term.push(letter);
                }
                continue;
            }
            let parsed = match term
                .strip_prefix('$')
                .map(|name| (name, name.split_once('*')))
            {
                Some((_, Some((name, times)))) if self.known_variable(name) => Term::Product(
                    name.into(),
                    number(times).ok_or(format!("{times} is not a number"))?,
                ),
                Some((name, _)) if self.known_variable(name) => Term::Variable(name.into()),
                Some((name, _)) => return Err(format!("variable ${name} is unknown")),
                None => Term::Number(number(&term).ok_or(format!("{text} is not a number"))?),
            };
            terms.push((add, parsed));
            term.clear();
            add = letter == '+';
        }
        Ok(Expr(terms))
    }

    fn value(&self, field: &str, text: &str) -> Result<Value, String> {
        if let Some(text) = unquoted(text) {
            return Ok(Value::Octets(text.replace("\\r\\n", "\r\n").into_bytes()));
        }
        let is_octets = ["data", "pd", "extra", "private"].contains(&field);
        if is_octets && text.contains(',') {
            let parts = text.split(',').map(|part| self.value(field, part));
            return Ok(Value::Parts(parts.collect::<Result<_, _>>()?));
        }
        if let Some(length) = text.strip_prefix("len:") {
            return Ok(Value::Pattern(self.expr(length)?));
        }
        for (prefix, is_native) in [("long:", false), ("native:", true)] {
            if let Some(value) = text.strip_prefix(prefix) {
                let value = self.expr(value)?;
                return Ok(Value::Long { value, is_native });
            }
        }
        if is_octets && let Some(digits) = text.strip_prefix("0x") {
            let octets = (0..digits.len())
                .step_by(2)
                .map(|at| digits.get(at..at + 2));
            let octets = octets.map(|pair| u8::from_str_radix(pair.unwrap_or("?"), 16));
            let octets: Result<Vec<u8>, _> = octets.collect();
            return Ok(Value::Octets(octets.map_err(|_| {
                format!("{text}: pairs of hexadecimal digits expected")
            })?));
        }
        const WORDS: &[&str] = &[
            "quotes", "layout", "name", "access", "domain", "op", "status", "region", "kind",
            "event", "octet", "address",
        ];
        let is_word = text.starts_with(|first: char| first.is_ascii_alphabetic());
        if WORDS.contains(&field) && is_word || field == "data" && text == "region" {
            return Ok(Value::Word(text.into()));
        }
        if field == "gap" {
            duration(text).ok_or(format!("{text} is no time like 5ms"))?;
            return Ok(Value::Word(text.into()));
        }
        Ok(Value::Expr(self.expr(text)?))
    }

    fn fields(
        &self,
        parts: &[String],
        known: &[&[&str]],
        known_words: &[&str],
    ) -> Result<(BTreeMap<String, Value>, Vec<String>), String> {
        let mut fields = BTreeMap::new();
        let mut found = Vec::new();
        for part in parts {
            let Some((field, text)) = part.split_once('=').filter(|_| !part.starts_with('"'))
            else {
                if !known_words.contains(&part.as_str()) {
                    return Err(format!(
                        "{part} is unknown here; known words: {}",
                        known_words.join(" ")
                    ));
                }
                found.push(part.clone());
                continue;
            };
            if !known.iter().any(|list| list.contains(&field)) {
                return Err(format!(
                    "field {field} is unknown here; known fields: {}",
                    known.concat().join(" ")
                ));
            }
            if fields
                .insert(field.to_owned(), self.value(field, text)?)
                .is_some()
            {
                return Err(format!("field {field} is given twice"));
            }
        }
        Ok((fields, found))
    }

    fn path(&self, parts: &[String]) -> Result<PathFields, String> {
        self.fields(parts, &[Direction::FIELDS, &["shift"]], &["out", "back"])
    }

    fn send(&self, parts: &[String]) -> Result<StepKind, String> {
        let (what, rest) = parts.split_first().ok_or("send what?")?;
        let what = what.as_str();
        let (fields, words) = match what {
            _ if SEGMENTS.contains(&what) => {
                self.fields(rest, &[SEGMENT_FIELDS, TCP_FIELDS], SEGMENT_WORDS)?
            }
            "request" | "reply" => {
                self.fields(rest, &[FRAME_FIELDS, TCP_FIELDS], &["each", "hold"])?
            }
            "octets" => self.fields(rest, &[&["data"], TCP_FIELDS], SEGMENT_WORDS)?,
            "mapper" => self.fields(rest, &[MAPPER_FIELDS], &[])?,
            "fin" | "ack" => self.fields(rest, &[&["offset"]], &[])?,
            "rst" | "syn" => self.fields(rest, &[&["offset"]], &[])?,
            "keepalive" => self.fields(rest, &[&["length"]], &[])?,
            "icmp" => self.fields(rest, &[&["mtu", "offset"]], &[])?,
            "again" => self.fields(rest, &[], &[])?,
            _ => return Err(format!("send {what} is unknown")),
        };
        Ok(StepKind::Send {
            what: what.into(),
            fields,
            words,
        })
    }

    fn alternative(
        &self,
        grade: Grade,
        parts: &[String],
        source: &str,
    ) -> Result<Alternative, String> {
        let (name, rest) = parts.split_first().ok_or("what is wanted?")?;
        if !STREAM_PATTERNS.contains(&name.as_str()) && !STATE_PATTERNS.contains(&name.as_str()) {
            return Err(format!(
                "{name} is unknown; known: {} {}",
                STREAM_PATTERNS.join(" "),
                STATE_PATTERNS.join(" ")
            ));
        }
        let mut result = Alternative {
            grade,
            name: name.clone(),
            code: None,
            comparisons: Vec::new(),
            within: None,
            past: None,
            note: None,
            source: source.into(),
        };
        let mut rest = rest.iter();
        while let Some(part) = rest.next() {
            if part == "note" {
                let note = rest
                    .next()
                    .and_then(|n| unquoted(n))
                    .ok_or("a quoted text belongs behind note")?;
                result.note = Some(note.into());
            } else if let Some(time) = part.strip_prefix("within=") {
                result.within =
                    Some(duration(time).ok_or(format!("{time} is no time like 5s or 200ms"))?);
            } else if let Some(kind) = part.strip_prefix("past=") {
                if !STREAM_PATTERNS.contains(&kind) {
                    return Err(format!("past={kind} is unknown"));
                }
                result.past = Some(kind.into());
            } else if name == "terminate" && part.contains('/') {
                let numbers: Option<Vec<u8>> = part
                    .split('/')
                    .map(|p| u8::from_str_radix(p, 16).ok())
                    .collect();
                let Some(&[layer, etype, code]) = numbers.as_deref() else {
                    return Err(format!("{part} is no code like 1/1/00"));
                };
                result.code = Some((layer, etype, code));
            } else {
                result.comparisons.push(self.comparison(part)?);
            }
        }
        Ok(result)
    }

    fn comparison(&self, part: &str) -> Result<Comparison, String> {
        const FIELDS: &[&str] = &[
            "m",
            "c",
            "r",
            "s",
            "res",
            "rev",
            "ird",
            "ord",
            "abcd",
            "pd",
            "pdlen",
            "op",
            "t",
            "l",
            "stag",
            "to",
            "qn",
            "msn",
            "mo",
            "dv",
            "rv",
            "rsvd",
            "rrsvd",
            "len",
            "data",
            "sink",
            "sinkto",
            "size",
            "src",
            "srcto",
            "headers",
            "quotes",
            "reserved",
            "markers",
            "layer",
            "type",
            "code",
            "mss",
            "df",
            "ttl",
            "layout",
            "sum",
            "kind",
            "ver",
            "ipv",
            "port",
            "cport",
            "handle",
            "name",
            "at",
            "octet",
            "id",
            "status",
            "segments",
            "aop",
            "rid",
            "add",
            "swap",
            "mask",
            "compare",
            "cmask",
            "value",
            "invalidated",
            "imm",
            "notified",
            "event",
            "sack",
            "private",
            "octets",
            "fpdus",
            "wrong",
            "ulpdu",
            "least",
            "aligned",
            "split",
            "whole",
            "resent",
            "skewed",
            "segment",
            "most",
            "between",
            "beforecrc",
            "reads",
            "beyond",
            "pattern",
            "count",
            "done",
            "pieces",
            "rounds",
            "depth",
            "chunk",
            "payload",
            "writes",
            "sends",
            "answers",
            "games",
            "held",
            "guessed",
            "reuse",
            "tops",
            "rate",
            "ms",
            "same",
        ];
        let operators = [
            ("!=", Operator::NotEqual),
            ("<=", Operator::AtMost),
            (">=", Operator::AtLeast),
            ("&=", Operator::Contains),
            ("=", Operator::Equal),
        ];
        for (text, operator) in operators {
            if let Some((field, value)) = part.split_once(text) {
                if !FIELDS.contains(&field) {
                    return Err(format!(
                        "field {field} is unknown; known: {}",
                        FIELDS.join(" ")
                    ));
                }
                return Ok(Comparison {
                    field: field.into(),
                    operator,
                    value: self.value(field, value)?,
                });
            }
        }
        Err(format!(
            "{part} is no comparison like c=1, ird<=4 or abcd&=8"
        ))
    }

    fn param(&self, parts: &[String]) -> Result<(String, Vec<String>), String> {
        let [name, keyword, values @ ..] = parts else {
            return Err("expected: param NAME in VALUE ...".into());
        };
        if keyword != "in" || values.is_empty() {
            return Err("expected: param NAME in VALUE ...".into());
        }
        let mut all = Vec::new();
        for value in values {
            match value.split_once("..") {
                Some((from, to)) => match (number(from), number(to)) {
                    (Some(from), Some(to)) if from <= to && to - from < 4096 => {
                        all.extend((from..=to).map(|n| n.to_string()));
                    }
                    _ => return Err(format!("{value} is no range like 0..15")),
                },
                None if number(value).is_some() => all.push(value.clone()),
                None => return Err(format!("{value} is not a number")),
            }
        }
        Ok((name.clone(), all))
    }
}

fn rule(parts: &[String]) -> Result<Rule, String> {
    let [rfc, section, level, text] = parts else {
        return Err("expected: rfc NUMBER SECTION LEVEL \"sentence\"".into());
    };
    if rfc != "-" && rfc.parse::<u32>().is_err() {
        return Err(format!("{rfc} is no number of an RFC, and not -"));
    }
    Ok(Rule {
        rfc: rfc.clone(),
        section: section.clone(),
        level: Level::parse(level)
            .ok_or(format!("level {level} is unknown: MUST SHOULD MAY ROB INT"))?,
        text: unquoted(text)
            .ok_or("the sentence belongs in quotation marks")?
            .into(),
    })
}

/// Parses a case file.
pub fn parse(file: &str, text: &str) -> Result<Case, CaseError> {
    let fail = |line: usize, text: String| CaseError {
        file: file.to_owned(),
        line,
        text,
    };
    // Continued lines are joined.
    let mut lines: Vec<(usize, String)> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.trim_start().starts_with('#') {
            continue;
        }
        match lines.last_mut() {
            Some((_, before)) if line.starts_with([' ', '\t']) => {
                before.push(' ');
                before.push_str(line.trim());
            }
            _ => lines.push((index + 1, line.to_owned())),
        }
    }
    let mut parser = Parser {
        params: Vec::new(),
        is_repeating: false,
    };
    let mut case: Option<Case> = None;
    for (at, line) in lines {
        let parts = words(&line).map_err(|text| fail(at, text))?;
        let Some((verb, rest)) = parts.split_first() else {
            continue;
        };
        if verb == "case" {
            let [id, title] = rest else {
                return Err(fail(at, "expected: case ID \"title\"".into()));
            };
            let title = unquoted(title)
                .ok_or_else(|| fail(at, "the title belongs in quotation marks".into()))?;
            if case.is_some() {
                return Err(fail(at, "one case a file".into()));
            }
            case = Some(Case {
                id: id.clone(),
                title: title.into(),
                file: file.into(),
                rules: Vec::new(),
                role: Role::Responder,
                params: Vec::new(),
                start: Start::Stream,
                opening: BTreeMap::new(),
                syn: BTreeMap::new(),
                call: BTreeMap::new(),
                settings: Vec::new(),
                path: None,
                regions: Vec::new(),
                receives: (0, 0),
                accepting: BTreeMap::new(),
                preparing: BTreeMap::new(),
                is_apart: false,
                streams: 1,
                smoke: false,
                hazard: false,
                remarks: Vec::new(),
                steps: Vec::new(),
            });
            continue;
        }
        let Some(case) = &mut case else {
            return Err(fail(
                at,
                "the first line has to be: case ID \"title\"".into(),
            ));
        };
        parser
            .statement(case, at, &line, verb, rest)
            .map_err(|text| fail(at, text))?;
    }
    let case = case.ok_or_else(|| fail(1, "no case in this file".into()))?;
    if parser.is_repeating {
        return Err(fail(1, "repeat without done".into()));
    }
    let missing = if case.rules.is_empty() {
        Some("a line beginning with rfc")
    } else if case.steps.is_empty() {
        Some("steps")
    } else if !case
        .steps
        .iter()
        .any(|s| matches!(s.kind, StepKind::Want(_)))
    {
        Some("a line beginning with want")
    } else {
        None
    };
    match missing {
        Some(what) => Err(fail(1, format!("case {} lacks {what}", case.id))),
        None => Ok(case),
    }
}

impl Parser {
    fn statement(
        &mut self,
        case: &mut Case,
        at: usize,
        line: &str,
        verb: &str,
        rest: &[String],
    ) -> Result<(), String> {
        let source = line.trim();
        if verb == "when" {
            const EXPECTED: &str = "expected: when NAME=VALUE STEP";
            let [condition, verb, rest @ ..] = rest else {
                return Err(EXPECTED.into());
            };
            let (name, value) = condition.split_once('=').ok_or(EXPECTED)?;
            if !case.params.iter().any(|(param, _)| param == name) {
                return Err(format!("{name} is no parameter"));
            }
            let value = number(value).ok_or(EXPECTED)?;
            let before = case.steps.len();
            self.statement(case, at, line, verb, rest)?;
            return match case.steps.get_mut(before) {
                Some(step) => {
                    step.when = Some((name.into(), value));
                    Ok(())
                }
                // Part of the step before, which has the same condition.
                None if ["also", "weak", "unsupported"].contains(&verb.as_str()) => Ok(()),
                None => Err(format!("{verb} is no step")),
            };
        }
        let mut step = |kind| {
            case.steps.push(Step {
                line: at,
                source: source.to_owned(),
                kind,
                when: None,
            })
        };
        match verb {
            "rfc" => case.rules.push(rule(rest)?),
            "role" => {
                case.role = match rest {
                    [role] if role == "responder" => Role::Responder,
                    [role] if role == "initiator" => Role::Initiator,
                    _ => return Err("expected: role responder, or role initiator".into()),
                }
            }
            "start" => {
                case.start = match rest {
                    [word] if word == "nothing" => Start::Nothing,
                    [word] if word == "tcp" => Start::Tcp,
                    [word] if word == "stream" => Start::Stream,
                    [word] if word == "region" => Start::Region,
                    [word] if word == "agent" => Start::Agent,
                    [word] if word == "asked" => Start::Asked,
                    [word] if word == "listening" => Start::Listening,
                    [word] if word == "calling" => Start::Calling,
                    [word] if word == "streaming" => Start::Streaming,
                    [word] if word == "opened" => Start::Opened,
                    _ => {
                        return Err(
                            "expected: start nothing, tcp, stream, region, agent, asked, listening, calling, streaming or opened".into(),
                        );
                    }
                };
                if case.start == Start::Calling {
                    case.role = Role::Initiator;
                }
            }
            "param" => {
                let param = self.param(rest)?;
                self.params.push(param.0.clone());
                case.params.push(param);
            }
            "opening" => case.opening = self.fields(rest, &[FRAME_FIELDS], &[])?.0,
            "syn" => case.syn = self.fields(rest, &[SYN_FIELDS], &[])?.0,
            "call" => case.call = self.fields(rest, &[AGENT_FIELDS], &[])?.0,
            "settings" => {
                case.settings = rest.to_vec();
                case.settings.sort();
                if let Some(wrong) = rest.iter().find(|setting| !is_setting(setting)) {
                    return Err(format!("{wrong} is no setting like mpa.crc=off"));
                }
            }
            "prepare" => case.preparing = self.fields(rest, &[AGENT_FIELDS], &[])?.0,
            "path" => case.path = Some(self.path(rest)?),
            "impair" => step(StepKind::Impair(self.path(rest)?)),
            "clock" if rest.is_empty() => step(StepKind::Clock),
            "smoke" if rest.is_empty() => case.smoke = true,
            "hazard" if rest.is_empty() => case.hazard = true,
            "remark" => match rest {
                [text] => case.remarks.push(
                    unquoted(text)
                        .ok_or("a remark belongs in quotation marks")?
                        .into(),
                ),
                _ => return Err("expected: remark \"text\"".into()),
            },
            "region" => {
                let (name, rest) = rest.split_first().ok_or("region of which name?")?;
                let (fields, _) = self.fields(rest, &[AGENT_FIELDS], &[])?;
                self.params
                    .extend(PLACE.map(|part| format!("{name}.{part}")));
                case.regions.push((name.clone(), fields));
            }
            "receives" => match rest {
                [count, size] => {
                    let count = number(count).zip(size.strip_prefix("size=").and_then(number));
                    case.receives = count.ok_or("expected: receives COUNT size=OCTETS")?;
                }
                _ => return Err("expected: receives COUNT size=OCTETS".into()),
            },
            "accept" => case.accepting = self.fields(rest, &[AGENT_FIELDS], &[])?.0,
            "streams" => match rest {
                [count, apart @ ..] if count == "2" && (apart.is_empty() || apart == ["apart"]) => {
                    case.streams = 2;
                    case.is_apart = !apart.is_empty();
                }
                _ => return Err("expected: streams 2, or streams 2 apart".into()),
            },
            "stream" => match rest {
                [one] if one == "1" => step(StepKind::Stream(1)),
                [two] if two == "2" => step(StepKind::Stream(2)),
                _ => return Err("expected: stream 1, or stream 2".into()),
            },
            "acks" => match rest {
                [on] if on == "on" => step(StepKind::Acks(true)),
                [off] if off == "off" => step(StepKind::Acks(false)),
                _ => return Err("expected: acks on, or acks off".into()),
            },
            "repeat" => match rest {
                [count] if !self.is_repeating => {
                    step(StepKind::Repeat(self.expr(count)?));
                    self.is_repeating = true;
                }
                _ => return Err("expected: repeat COUNT, not within another".into()),
            },
            "done" if rest.is_empty() && self.is_repeating => {
                step(StepKind::Done);
                self.is_repeating = false;
            }
            "agent" => {
                let (what, rest) = rest.split_first().ok_or("agent what?")?;
                let (fields, words) = self.fields(rest, &[AGENT_FIELDS], &["mayfail"])?;
                if let (Some(Value::Word(name)), "reg" | "bind") =
                    (fields.get("name"), what.as_str())
                {
                    self.params
                        .extend(PLACE.map(|part| format!("{name}.{part}")));
                }
                step(StepKind::Agent {
                    what: what.clone(),
                    fields,
                    may_fail: !words.is_empty(),
                });
            }
            "connect" => step(StepKind::Connect(self.fields(rest, &[SYN_FIELDS], &[])?.0)),
            "lose" => match rest {
                [above, octets] if above == "above" => {
                    step(StepKind::LoseAbove(self.expr(octets)?));
                }
                _ => {
                    let which: Option<Vec<u32>> = rest.iter().map(|n| n.parse().ok()).collect();
                    let which = which.filter(|all| !all.is_empty());
                    step(StepKind::Lose(
                        which.ok_or("expected: lose NUMBER ..., or lose above OCTETS")?,
                    ));
                }
            },
            "await" => match rest {
                [octets] => step(StepKind::Await(self.expr(octets)?)),
                _ => return Err("expected: await OCTETS".into()),
            },
            "reaccept" if rest.is_empty() => step(StepKind::Reaccept),
            "crowd" => match rest {
                [count] => step(StepKind::Crowd(self.expr(count)?)),
                _ => return Err("expected: crowd COUNT".into()),
            },
            "wait" => match rest {
                [time] => step(StepKind::Wait(
                    duration(time).ok_or(format!("{time} is no time like 5s or 200ms"))?,
                )),
                _ => return Err("expected: wait TIME".into()),
            },
            "window" => match rest {
                [octets] => step(StepKind::Window(self.expr(octets)?)),
                _ => return Err("expected: window OCTETS".into()),
            },
            "send" => step(self.send(rest)?),
            "flush" => {
                let known = [TCP_FIELDS, &["keep"]];
                let (fields, words) = self.fields(rest, &known, &["each", "nopush"])?;
                step(StepKind::Flush(fields, words));
            }
            "want" | "then" => {
                let alternative = self.alternative(Grade::Pass, rest, source)?;
                step(StepKind::Want(vec![alternative]));
            }
            "also" | "weak" | "unsupported" => {
                let grade = match verb {
                    "also" => Grade::Pass,
                    "weak" => Grade::Weak,
                    _ => Grade::NotSupported,
                };
                let mut alternative = self.alternative(grade, rest, source)?;
                if verb == "also" && alternative.note.is_none() {
                    alternative.note = Some(format!("accepted: {source}"));
                }
                match case.steps.last_mut().map(|s| &mut s.kind) {
                    Some(StepKind::Want(alternatives)) => alternatives.push(alternative),
                    _ => return Err(format!("{verb} belongs below a line with want or then")),
                }
            }
            _ => return Err(format!("{verb} is unknown")),
        }
        Ok(())
    }
}

include!(concat!(env!("OUT_DIR"), "/cases.rs"));

/// The cases that are built in.
pub fn built_in() -> Result<Vec<Case>, CaseError> {
    FILES.iter().map(|(file, text)| parse(file, text)).collect()
}
