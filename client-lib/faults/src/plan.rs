//! Plans: reading, checks, and text.

use crate::built_in::find_built_in;
use crate::kind::{Direction, Kind, Place, Scope, Side, Site, Word, find_word};
use crate::numbers::{errno_of, status_of};
use std::ffi::c_int;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Seed of a plan that names none.
const DEFAULT_SEED: u64 = 1;
/// Most faults of a plan.
const MAX_FAULTS: usize = 1000;
/// Greatest number of a queue pair: they have 24 bits.
const MAX_QP_NUMBER: u64 = (1 << 24) - 1;
/// Longest time in a plan: a day.
const MAX_TIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Length of a device's name, without a final zero (IBV_SYSFS_NAME_MAX).
const MAX_DEVICE_NAME: usize = 63;
/// Private data of a reject, which `struct rdma_conn_param` can describe.
const MAX_PRIVATE_DATA: usize = 255;
/// Largest file.
const MAX_FILE: u64 = 1 << 20;

/// Error in a plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The plan is neither built in nor a file that can be read.
    #[error(
        "{name}: this is neither a file that can be read ({source}) nor a built-in plan ({})",
        crate::built_in_plans(*place).map(|plan| plan.name).collect::<Vec<_>>().join(", ")
    )]
    Read {
        /// Path or name.
        name: String,
        /// Reader.
        place: Place,
        /// Reason.
        source: std::io::Error,
    },
    /// The plan has a mistake.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Invalid {
        /// The file, or the name of the built-in plan.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// The mistake, and the values that are allowed.
        message: String,
    },
}

/// Objects that a fault is aimed at; None: all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Aim {
    /// Name of the device.
    pub device: Option<String>,
    /// Number of the queue pair.
    pub qp: Option<u32>,
    /// Ordinal number of the object among those of its kind in the process, from 1.
    pub nth: Option<u64>,
    /// TCP port: of the peer for calls that connect, of either end for frames, else of the listener.
    pub port: Option<u16>,
    /// User (uid) of a connection.
    pub user: Option<u32>,
    /// Number that siwd gives a client, of a connection.
    pub client: Option<u64>,
    /// Address of either end of a frame.
    pub host: Option<IpAddr>,
    /// Both ends of a connection.
    pub connection: Option<(SocketAddr, SocketAddr)>,
    /// Direction of frames.
    pub direction: Direction,
}

/// Calls at which a fault happens.
#[derive(Debug, Clone, PartialEq)]
pub struct Trigger {
    /// Not before this time since the start of the program.
    pub after: Duration,
    /// Calls before the first that counts.
    pub after_calls: u64,
    /// One of this number of calls, at least 1.
    pub every: u64,
    /// Most faults of an object; None: any number.
    pub count: Option<u64>,
    /// Share of the calls that are left, from 0 to 1.
    pub probability: f64,
    /// Time between two faults that happen at a time, or between the beginnings of two times `lasts`.
    pub repeat: Option<Duration>,
    /// Time from `after` on in which the fault can happen; None: no end.
    pub lasts: Option<Duration>,
}

impl Default for Trigger {
    fn default() -> Self {
        Trigger {
            after: Duration::ZERO,
            after_calls: 0,
            every: 1,
            count: None,
            probability: 1.0,
            repeat: None,
            lasts: None,
        }
    }
}

impl Trigger {
    /// Returns true if the fault can happen at a time since the start.
    pub fn has_time(&self, elapsed: Duration) -> bool {
        let Some(since) = elapsed.checked_sub(self.after) else {
            return false;
        };
        let Some(lasts) = self.lasts else {
            return true;
        };
        match self.repeat {
            Some(repeat) => since.as_nanos() % repeat.as_nanos().max(1) < lasts.as_nanos(),
            None => since < lasts,
        }
    }
}

/// One fault of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// Name that the plan gives it.
    pub name: Option<String>,
    /// Effect.
    pub kind: Kind,
    /// Objects.
    pub aim: Aim,
    /// Calls.
    pub trigger: Trigger,
}

impl Fault {
    /// Whether it happens at a time and not at a call.
    pub fn is_timed(&self) -> bool {
        let Trigger {
            after_calls, every, ..
        } = self.trigger;
        self.kind.site() == Site::Clock
            || (matches!(self.kind, Kind::Event(_)) && after_calls == 0 && every == 1)
    }
}

/// A plan that was checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// All decisions follow from it.
    pub seed: u64,
    /// In the order of the file; at least one.
    pub faults: Vec<Fault>,
}

/// A mistake and its place.
type Mistake = (Range<usize>, String);

impl Plan {
    /// Reads the file of that path, or the built-in plan of that name.
    ///
    /// # Errors
    /// The file cannot be read, or has a mistake.
    pub fn find(name: &str, place: Place) -> Result<Plan, PlanError> {
        Plan::parse(Path::new(name), &Plan::find_text(name, place)?, place)
    }

    /// Reads the text of the file of that path, or of the built-in plan of that name.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn find_text(name: &str, place: Place) -> Result<String, PlanError> {
        if let Some(built_in) = find_built_in(name, place) {
            return Ok(built_in.text.to_owned());
        }
        read_file(Path::new(name)).map_err(|source| PlanError::Read {
            name: name.to_owned(),
            place,
            source,
        })
    }

    /// Reads a plan from the text of a file. `place`: the reader that its faults have to be for.
    ///
    /// # Errors
    /// The text has a mistake.
    pub fn parse(path: &Path, text: &str, place: Place) -> Result<Plan, PlanError> {
        parse_plan(text, place).map_err(|mistake| locate(path, text, mistake))
    }

    /// Error for a key of a fault of this plan, which has been read from `text`: at the place of the key, or of
    /// the fault if it lacks the key.
    pub fn error_at(
        path: &Path,
        text: &str,
        (fault, key): (usize, &str),
        message: String,
    ) -> PlanError {
        let span = find_key(text, fault, key).unwrap_or(0..0);
        locate(path, text, (span, message))
    }

    /// Name of a fault in messages: its number from 1, and its name if it has one.
    pub fn name_of(&self, fault: usize) -> String {
        match self.faults.get(fault).and_then(|fault| fault.name.as_ref()) {
            Some(name) => format!("fault {} ({name})", fault + 1),
            None => format!("fault {}", fault + 1),
        }
    }
}

/// Error with the line and column of a mistake.
fn locate(path: &Path, text: &str, (span, message): Mistake) -> PlanError {
    let before = text.get(..span.start).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    PlanError::Invalid {
        path: path.to_owned(),
        line: before.matches('\n').count() + 1,
        column: before[line_start..].chars().count() + 1,
        message,
    }
}

/// Place of a key's value in a plan that could be read, or of the fault if it lacks the key.
fn find_key(text: &str, fault: usize, key: &str) -> Option<Range<usize>> {
    let table = DeTable::parse(text).ok()?;
    let mut all = table.get_ref().iter();
    let list = all.find(|(key, _)| key.get_ref().as_ref() == "fault");
    let fault = list?.1.get_ref().as_array()?.get(fault)?;
    let keys = Keys {
        table: fault.get_ref().as_table()?,
        span: fault.span(),
    };
    let value = keys.find(key).map(Spanned::span);
    Some(value.unwrap_or(keys.span))
}

fn read_file(path: &Path) -> std::io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    let refuse = |reason: &str| Err(std::io::Error::other(reason.to_owned()));
    if !metadata.is_file() {
        return refuse("it is no regular file");
    }
    if metadata.len() > MAX_FILE {
        return refuse("it is larger than 1 MiB");
    }
    std::fs::read_to_string(path)
}

fn parse_plan(text: &str, place: Place) -> Result<Plan, Mistake> {
    let table = DeTable::parse(text).map_err(|error| {
        (
            error.span().unwrap_or(0..0),
            error.message().trim_end().to_owned(),
        )
    })?;
    let mut plan = Plan {
        seed: DEFAULT_SEED,
        faults: Vec::new(),
    };
    for (key, value) in table.get_ref().iter() {
        match key.get_ref().as_ref() {
            "seed" => plan.seed = to_number(value, 0..=i64::MAX as u64)?,
            "description" => drop(to_text(value)?),
            "fault" => {
                let list = value.get_ref().as_array().ok_or_else(|| {
                    (
                        value.span(),
                        "faults are tables of their own: [[fault]]".into(),
                    )
                })?;
                for fault in list.iter() {
                    let table = fault
                        .get_ref()
                        .as_table()
                        .ok_or_else(|| (fault.span(), "a fault is a table: [[fault]]".into()))?;
                    plan.faults.push(parse_fault(table, fault.span(), place)?);
                }
            }
            other => {
                return Err((
                    key.span(),
                    format!("unknown key {other:?}: a plan has seed, description and [[fault]]"),
                ));
            }
        }
    }
    match plan.faults.len() {
        0 => Err((0..0, "the plan has no [[fault]]".into())),
        1..=MAX_FAULTS => Ok(plan),
        count => Err((
            0..0,
            format!("the plan has {count} faults: at most {MAX_FAULTS} are possible"),
        )),
    }
}

/// Keys of every fault.
const COMMON: [&str; 7] = [
    "kind",
    "name",
    "after",
    "after_calls",
    "every",
    "count",
    "probability",
];

/// Parameters of a fault of the wire, with the keys that all of them have.
macro_rules! wire_keys {
    ($($key:literal),*) => {
        &[
            $($key,)*
            "device",
            "user",
            "client",
            "qp",
            "host",
            "port",
            "connection",
            "direction",
            "lasts",
            "repeat",
        ]
    };
}

/// Keys of a kind beside [`COMMON`]: parameters and aims.
fn keys_of(kind: &str) -> Option<&'static [&'static str]> {
    Some(match kind {
        "post_send" | "post_receive" => &["errno", "device", "qp", "nth"],
        "completion" => &["status", "operation", "device", "qp", "nth"],
        "delay" => &["delay_ms", "jitter_ms", "device", "qp", "nth"],
        "reorder" | "withhold" => &["delay_ms", "device", "qp", "nth"],
        "cq_overrun" => &["device", "nth"],
        "disconnect" => &["device", "qp", "nth"],
        "create" => &["object", "errno", "device"],
        "event" => &["event", "repeat", "device", "nth"],
        "addr_error" | "route_error" | "connect_error" => &["errno", "port"],
        "reject" => &["side", "private_data", "port"],
        "unreachable" => &["errno", "delay_ms", "port"],
        "connect_timeout" => &["delay_ms", "port"],
        "cm_storm" => &["event", "burst", "port"],
        "device_removal" => &["delay_ms", "device"],
        "wire_drop" => wire_keys!("burst"),
        "wire_delay" => wire_keys!("delay_ms", "jitter_ms"),
        "wire_duplicate" => wire_keys!("late_ms", "altered"),
        "wire_reorder" => wire_keys!("late_ms"),
        "wire_corrupt" | "wire_black_hole" => wire_keys!(),
        "wire_partition" => wire_keys!("between"),
        "wire_rate" => wire_keys!("rate_kbit", "queue"),
        "worker_stall" => &["stall_ms", "worker", "repeat"],
        "control_stall" => &["stall_ms", "repeat"],
        "daemon_end" => &["how"],
        _ => return None,
    })
}

/// The table of one fault.
struct Keys<'a, 'i> {
    table: &'a DeTable<'i>,
    /// Place of the whole table.
    span: Range<usize>,
}

impl<'a, 'i> Keys<'a, 'i> {
    fn find(&self, name: &str) -> Option<&'a Spanned<DeValue<'i>>> {
        let mut all = self.table.iter();
        all.find(|(key, _)| key.get_ref().as_ref() == name)
            .map(|(_, value)| value)
    }

    fn number(&self, name: &str, least: u64, most: u64) -> Result<Option<u64>, Mistake> {
        let value = self.find(name);
        value
            .map(|value| to_number(value, least..=most))
            .transpose()
    }

    /// A value that is a word of a list.
    fn word<T>(
        &self,
        name: &str,
        find: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, Mistake> {
        let Some(value) = self.find(name) else {
            return Ok(None);
        };
        let word = to_text(value)?;
        find(word)
            .map(Some)
            .map_err(|reason| (value.span(), format!("{name}: {reason}")))
    }

    /// A word that must be there.
    fn required<W: Word>(&self, name: &str) -> Result<W, Mistake> {
        self.word(name, find_word)?.ok_or_else(|| {
            let names: Vec<_> = W::WORDS.iter().map(|(_, known)| *known).collect();
            let names = names.join(", ");
            (
                self.span.clone(),
                format!("the fault lacks the key {name}: it can be {names}"),
            )
        })
    }

    fn errno(&self, default: c_int) -> Result<c_int, Mistake> {
        Ok(self.word("errno", errno_of)?.unwrap_or(default))
    }

    /// A time in milliseconds.
    fn milliseconds(&self, name: &str) -> Result<Option<Duration>, Mistake> {
        let Some(value) = self.find(name) else {
            return Ok(None);
        };
        let most = MAX_TIME.as_millis() as f64;
        match to_float(value)? {
            time if (0.0..=most).contains(&time) => {
                Ok(Some(Duration::from_secs_f64(time / 1000.0)))
            }
            time => Err((
                value.span(),
                format!("{name} = {time}: it must be between 0 and {most} milliseconds"),
            )),
        }
    }

    /// Refuses a time that is longer than `most`.
    fn limit(&self, name: &str, time: Duration, most: Duration) -> Result<(), Mistake> {
        if time <= most {
            return Ok(());
        }
        let span = self.find(name).map(Spanned::span);
        let why = format!("{name}: at most {} ms are possible", most.as_millis());
        Err((span.unwrap_or(self.span.clone()), why))
    }

    /// A truth value; false by default.
    fn switch(&self, name: &str) -> Result<bool, Mistake> {
        let Some(value) = self.find(name) else {
            return Ok(false);
        };
        let wrong = || {
            let found = value.get_ref().type_str();
            (
                value.span(),
                format!("{name}: true or false is expected, not {found}"),
            )
        };
        value.get_ref().as_bool().ok_or_else(wrong)
    }

    /// A list of two different values. `what`: their name in messages.
    fn pair<T: std::str::FromStr + PartialEq>(
        &self,
        name: &str,
        what: &str,
    ) -> Result<Option<(T, T)>, Mistake> {
        let Some(value) = self.find(name) else {
            return Ok(None);
        };
        let wrong = || {
            let why = format!("{name}: a list of two different {what} is expected");
            (value.span(), why)
        };
        let list = value.get_ref().as_array().ok_or_else(wrong)?;
        let read = |place: usize| list.get(place)?.get_ref().as_str()?.parse().ok();
        match (read(0), read(1), list.len()) {
            (Some(first), Some(second), 2) if first != second => Ok(Some((first, second))),
            _ => Err(wrong()),
        }
    }

    /// A time with its unit.
    fn time(&self, name: &str) -> Result<Option<Duration>, Mistake> {
        self.word(name, to_time)
    }
}

fn to_text<'a>(value: &'a Spanned<DeValue<'_>>) -> Result<&'a str, Mistake> {
    let wrong = || {
        (
            value.span(),
            format!("a string is expected, not {}", value.get_ref().type_str()),
        )
    };
    value.get_ref().as_str().ok_or_else(wrong)
}

fn to_number(
    value: &Spanned<DeValue<'_>>,
    range: std::ops::RangeInclusive<u64>,
) -> Result<u64, Mistake> {
    let wrong = |what: &str| {
        let (least, most) = (range.start(), range.end());
        (
            value.span(),
            format!("an integer between {least} and {most} is expected, not {what}"),
        )
    };
    let integer = value
        .get_ref()
        .as_integer()
        .ok_or_else(|| wrong(value.get_ref().type_str()))?;
    let number = u64::from_str_radix(integer.as_str(), integer.radix());
    match number {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(wrong(integer.as_str())),
    }
}

fn to_float(value: &Spanned<DeValue<'_>>) -> Result<f64, Mistake> {
    let text = match value.get_ref() {
        DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
        DeValue::Float(float) => float.as_str(),
        other => {
            return Err((
                value.span(),
                format!("a number is expected, not {}", other.type_str()),
            ));
        }
    };
    let number: Result<f64, _> = text.parse();
    number.map_err(|_| (value.span(), format!("{text} is no number")))
}

/// Reads a time like `2s`, `1.5s`, `300ms`, `50us` or `1m`.
fn to_time(text: &str) -> Result<Duration, String> {
    let split = text
        .find(|character: char| !character.is_ascii_digit() && character != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        _ => f64::NAN,
    };
    let time = number.parse::<f64>().unwrap_or(f64::NAN) * seconds;
    if time.is_nan() {
        return Err(format!(
            "{text:?} is no time: write a number and us, ms, s or m, like \"2s\""
        ));
    }
    match Duration::try_from_secs_f64(time) {
        Ok(time) if time <= MAX_TIME => Ok(time),
        _ => Err(format!("{text:?} is longer than a day")),
    }
}

fn parse_fault(table: &DeTable<'_>, span: Range<usize>, place: Place) -> Result<Fault, Mistake> {
    let keys = Keys { table, span };
    let (kind_name, kind_span) = match keys.find("kind") {
        Some(value) => (to_text(value)?, value.span()),
        None => {
            return Err((
                keys.span,
                format!(
                    "the fault lacks the key kind: it can be {}",
                    Kind::names_of(place).join(", ")
                ),
            ));
        }
    };
    let Some(own_keys) = keys_of(kind_name) else {
        return Err((
            kind_span,
            format!(
                "unknown fault {kind_name:?}: the kinds are {}",
                Kind::names_of(place).join(", ")
            ),
        ));
    };
    if !Kind::names_of(place).contains(&kind_name) {
        let other = match place {
            Place::Program => "happens in siwd: load the plan with siwctl fault load",
            Place::Daemon => "happens in a program: start it with siwrun --faults",
        };
        return Err((kind_span, format!("a fault of kind {kind_name} {other}")));
    }
    for (key, _) in table.iter() {
        let name = key.get_ref().as_ref();
        if !COMMON.contains(&name) && !own_keys.contains(&name) {
            return Err((
                key.span(),
                format!(
                    "a fault of kind {kind_name} has no key {name:?}: it has {}, {}",
                    COMMON.join(", "),
                    own_keys.join(", ")
                ),
            ));
        }
    }
    let fault = Fault {
        name: parse_name(&keys)?,
        kind: parse_kind(&keys, kind_name)?,
        aim: parse_aim(&keys)?,
        trigger: parse_trigger(&keys)?,
    };
    check_times(&keys, &fault)?;
    Ok(fault)
}

/// Checks keys that exclude or need each other.
fn check_times(keys: &Keys<'_, '_>, fault: &Fault) -> Result<(), Mistake> {
    let Trigger { lasts, repeat, .. } = fault.trigger;
    let repeated = keys.find("repeat");
    match fault.kind.site() {
        Site::Clock => {
            let counted = ["after_calls", "every"].into_iter();
            if let Some(value) = counted.filter_map(|key| keys.find(key)).next() {
                let why = "the fault happens at a time, without calls: it has after, count and probability";
                return Err((value.span(), why.into()));
            }
        }
        Site::Frame => {
            if let Some(value) = repeated
                && lasts.is_none_or(|lasts| repeat.is_some_and(|repeat| repeat < lasts))
            {
                let why = "repeat needs lasts, and is at least as long";
                return Err((value.span(), why.into()));
            }
        }
        _ => {
            if let Some(value) = repeated
                && !fault.is_timed()
            {
                let why =
                    "an event repeats at times or at calls: repeat excludes after_calls and every";
                return Err((value.span(), why.into()));
            }
        }
    }
    Ok(())
}

fn parse_name(keys: &Keys<'_, '_>) -> Result<Option<String>, Mistake> {
    keys.word("name", |name| {
        let is_line = !name.is_empty() && !name.chars().any(char::is_control);
        match is_line {
            true => Ok(name.to_owned()),
            false => Err("a name is a line of text".to_owned()),
        }
    })
}

/// Longest time for which a completion waits for one of another queue pair.
const REORDER_TIME: Duration = Duration::from_millis(10);
/// Longest delay of a frame.
const MAX_LATE_TIME: Duration = Duration::from_secs(60);
/// Lateness of frames that come late or twice.
const LATE_TIME: Duration = Duration::from_millis(2);
/// Frames that wait at a bottleneck.
const QUEUE: u64 = 100;
/// Highest rate of a bottleneck, in kbit/s, and longest row of lost frames or queue.
const MAX_RATE: u64 = 1_000_000_000;
const MAX_FRAMES: u64 = 100_000;
/// Longest stall: the watchdog of a service manager ends siwd before.
const MAX_STALL: Duration = Duration::from_secs(600);
/// Time of a connect that gets no answer, as that of siwd's first attempts.
const CONNECT_TIME: Duration = Duration::from_secs(2);

fn parse_kind(keys: &Keys<'_, '_>, name: &str) -> Result<Kind, Mistake> {
    let delay = || keys.milliseconds("delay_ms");
    Ok(match name {
        "post_send" => Kind::PostSend {
            errno: keys.errno(libc::ENOMEM)?,
        },
        "post_receive" => Kind::PostReceive {
            errno: keys.errno(libc::ENOMEM)?,
        },
        "completion" => Kind::Completion {
            status: keys.word("status", status_of)?.unwrap_or(RETRY_EXC_ERR),
            operation: keys.word("operation", find_word)?,
        },
        "delay" => {
            let (delay, jitter) = parse_delay(keys)?;
            Kind::Delay { delay, jitter }
        }
        "reorder" => Kind::Reorder {
            delay: delay()?.unwrap_or(REORDER_TIME),
        },
        "withhold" => Kind::Withhold { delay: delay()? },
        "cq_overrun" => Kind::CqOverrun,
        "disconnect" => Kind::Disconnect,
        "create" => Kind::Create {
            object: keys.required("object")?,
            errno: keys.errno(libc::ENOMEM)?,
        },
        "event" => Kind::Event(keys.required("event")?),
        "addr_error" => Kind::AddrError {
            errno: keys.errno(libc::EHOSTUNREACH)?,
        },
        "route_error" => Kind::RouteError {
            errno: keys.errno(libc::ENETUNREACH)?,
        },
        "connect_error" => Kind::ConnectError {
            errno: keys.errno(libc::ECONNRESET)?,
        },
        "reject" => Kind::Reject {
            side: keys.word("side", find_word)?.unwrap_or(Side::Active),
            private_data: parse_private_data(keys)?,
        },
        "unreachable" => Kind::Unreachable {
            errno: keys.errno(libc::EHOSTUNREACH)?,
            delay: delay()?.unwrap_or_default(),
        },
        "connect_timeout" => Kind::ConnectTimeout {
            delay: delay()?.unwrap_or(CONNECT_TIME),
        },
        "cm_storm" => Kind::Storm {
            event: keys.required("event")?,
            burst: keys.number("burst", 1, MAX_BURST)?.unwrap_or(100) as u32,
        },
        "device_removal" => Kind::DeviceRemoval {
            delay: delay()?.unwrap_or_default(),
        },
        "wire_drop" => Kind::WireDrop {
            burst: keys.number("burst", 1, MAX_FRAMES)?.unwrap_or(1) as u32,
        },
        "wire_delay" => {
            let (delay, jitter) = parse_delay(keys)?;
            keys.limit("delay_ms", delay, MAX_LATE_TIME)?;
            keys.limit("jitter_ms", jitter, MAX_LATE_TIME)?;
            Kind::WireDelay { delay, jitter }
        }
        "wire_duplicate" => Kind::WireDuplicate {
            late: parse_late(keys)?,
            altered: keys.switch("altered")?,
        },
        "wire_reorder" => Kind::WireReorder {
            late: parse_late(keys)?,
        },
        "wire_corrupt" => Kind::WireCorrupt,
        "wire_black_hole" => Kind::WireBlackHole,
        "wire_partition" => Kind::WirePartition {
            between: match keys.pair("between", "IP addresses")? {
                Some(between) => between,
                None => {
                    let why = "the fault lacks the key between: two IP addresses in a list";
                    return Err((keys.span.clone(), why.into()));
                }
            },
        },
        "wire_rate" => Kind::WireRate {
            rate_kbit: match keys.number("rate_kbit", 1, MAX_RATE)? {
                Some(rate) => rate,
                None => {
                    let why = "the fault lacks the key rate_kbit: a rate in kbit/s";
                    return Err((keys.span.clone(), why.into()));
                }
            },
            queue: keys.number("queue", 1, MAX_FRAMES)?.unwrap_or(QUEUE) as u32,
        },
        "worker_stall" => Kind::WorkerStall {
            stall: parse_stall(keys)?,
            worker: keys.number("worker", 0, 1023)?.map(|worker| worker as u32),
        },
        "control_stall" => Kind::ControlStall {
            stall: parse_stall(keys)?,
        },
        "daemon_end" => Kind::DaemonEnd(keys.required("how")?),
        other => unreachable!("keys_of() does not know {other}"),
    })
}

/// The keys `delay_ms` and `jitter_ms`, of which there has to be one.
fn parse_delay(keys: &Keys<'_, '_>) -> Result<(Duration, Duration), Mistake> {
    let (delay, jitter) = (
        keys.milliseconds("delay_ms")?,
        keys.milliseconds("jitter_ms")?,
    );
    if delay.is_none() && jitter.is_none() {
        return Err((
            keys.span.clone(),
            "a fault of this kind needs delay_ms, jitter_ms or both".into(),
        ));
    }
    Ok((delay.unwrap_or_default(), jitter.unwrap_or_default()))
}

/// The key `late_ms`.
fn parse_late(keys: &Keys<'_, '_>) -> Result<Duration, Mistake> {
    let late = keys.milliseconds("late_ms")?.unwrap_or(LATE_TIME);
    keys.limit("late_ms", late, MAX_LATE_TIME)?;
    Ok(late)
}

/// The key `stall_ms`, which has to be there.
fn parse_stall(keys: &Keys<'_, '_>) -> Result<Duration, Mistake> {
    let Some(stall) = keys.milliseconds("stall_ms")? else {
        let why = "the fault lacks the key stall_ms: a time in milliseconds";
        return Err((keys.span.clone(), why.into()));
    };
    keys.limit("stall_ms", stall, MAX_STALL)?;
    Ok(stall)
}

/// IBV_WC_RETRY_EXC_ERR, with which requests to a dead peer end.
const RETRY_EXC_ERR: u8 = 12;
/// Most events of a storm.
const MAX_BURST: u64 = 100_000;

fn parse_private_data(keys: &Keys<'_, '_>) -> Result<Vec<u8>, Mistake> {
    let data = keys.word("private_data", |data| match data.len() {
        ..=MAX_PRIVATE_DATA => Ok(data.as_bytes().to_vec()),
        _ => Err(format!("it is longer than {MAX_PRIVATE_DATA} bytes")),
    })?;
    Ok(data.unwrap_or_default())
}

fn parse_aim(keys: &Keys<'_, '_>) -> Result<Aim, Mistake> {
    let device = keys.word("device", |name| {
        let is_possible = (1..=MAX_DEVICE_NAME).contains(&name.len())
            && name
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && byte != b'/');
        match is_possible {
            true => Ok(name.to_owned()),
            false => Err(format!("{name:?} can be no name of a device")),
        }
    })?;
    let qp = keys.number("qp", 1, MAX_QP_NUMBER)?;
    let port = keys.number("port", 1, u16::MAX.into())?;
    Ok(Aim {
        device,
        qp: qp.map(|number| number as u32),
        nth: keys.number("nth", 1, u64::MAX)?,
        port: port.map(|number| number as u16),
        user: keys
            .number("user", 0, u32::MAX.into())?
            .map(|number| number as u32),
        client: keys.number("client", 1, u64::MAX)?,
        host: keys.word("host", |text| {
            let address = text.parse::<IpAddr>();
            address.map_err(|_| format!("{text:?} is no IP address"))
        })?,
        connection: keys.pair(
            "connection",
            "addresses with TCP ports, like \"10.0.0.1:7174\",",
        )?,
        direction: keys.word("direction", find_word)?.unwrap_or_default(),
    })
}

fn parse_trigger(keys: &Keys<'_, '_>) -> Result<Trigger, Mistake> {
    let most = i64::MAX as u64;
    let mut trigger = Trigger {
        after: keys.time("after")?.unwrap_or_default(),
        after_calls: keys.number("after_calls", 0, most)?.unwrap_or(0),
        every: keys.number("every", 1, most)?.unwrap_or(1),
        count: keys.number("count", 1, most)?,
        probability: 1.0,
        repeat: keys.time("repeat")?,
        lasts: keys.time("lasts")?,
    };
    if let Some(value) = keys.find("probability") {
        trigger.probability = to_float(value)?;
        if !(0.0..=1.0).contains(&trigger.probability) {
            return Err((
                value.span(),
                format!(
                    "probability = {}: it must be between 0 and 1",
                    trigger.probability
                ),
            ));
        }
    }
    for (name, time) in [("repeat", trigger.repeat), ("lasts", trigger.lasts)] {
        if let (Some(value), Some(Duration::ZERO)) = (keys.find(name), time) {
            return Err((value.span(), format!("{name} must be longer than 0")));
        }
    }
    Ok(trigger)
}

/// A time as [`to_time`] reads it.
fn time_text(time: Duration) -> String {
    format!("\"{}us\"", time.as_micros())
}

fn write_string(out: &mut String, key: &str, value: &str) {
    let _ = writeln!(out, "{key} = {}", toml::Value::String(value.to_owned()));
}

fn write_ms(out: &mut String, key: &str, time: Duration) {
    let _ = writeln!(
        out,
        "{key} = {}",
        toml::Value::Float(time.as_secs_f64() * 1e3)
    );
}

impl Kind {
    /// Writes the keys of the kind.
    fn write_toml(&self, out: &mut String) {
        write_string(out, "kind", self.name());
        match self {
            Kind::PostSend { errno }
            | Kind::PostReceive { errno }
            | Kind::AddrError { errno }
            | Kind::RouteError { errno }
            | Kind::ConnectError { errno } => {
                write_string(out, "errno", crate::errno_name(*errno));
            }
            Kind::Completion { status, operation } => {
                write_string(out, "status", crate::status_name(*status));
                if let Some(operation) = operation {
                    write_string(out, "operation", operation.name());
                }
            }
            Kind::Delay { delay, jitter } | Kind::WireDelay { delay, jitter } => {
                write_ms(out, "delay_ms", *delay);
                write_ms(out, "jitter_ms", *jitter);
            }
            Kind::Reorder { delay }
            | Kind::ConnectTimeout { delay }
            | Kind::DeviceRemoval { delay } => write_ms(out, "delay_ms", *delay),
            Kind::Withhold { delay } => {
                if let Some(delay) = delay {
                    write_ms(out, "delay_ms", *delay);
                }
            }
            Kind::CqOverrun | Kind::Disconnect | Kind::WireCorrupt | Kind::WireBlackHole => {}
            Kind::Create { object, errno } => {
                write_string(out, "object", object.name());
                write_string(out, "errno", crate::errno_name(*errno));
            }
            Kind::Event(event) => write_string(out, "event", event.name()),
            Kind::Reject { side, private_data } => {
                write_string(out, "side", side.name());
                write_string(out, "private_data", &String::from_utf8_lossy(private_data));
            }
            Kind::Unreachable { errno, delay } => {
                write_string(out, "errno", crate::errno_name(*errno));
                write_ms(out, "delay_ms", *delay);
            }
            Kind::Storm { event, burst } => {
                write_string(out, "event", event.name());
                let _ = writeln!(out, "burst = {burst}");
            }
            Kind::WireDrop { burst } => {
                let _ = writeln!(out, "burst = {burst}");
            }
            Kind::WireDuplicate { late, altered } => {
                write_ms(out, "late_ms", *late);
                let _ = writeln!(out, "altered = {altered}");
            }
            Kind::WireReorder { late } => write_ms(out, "late_ms", *late),
            Kind::WirePartition { between: (a, b) } => {
                let _ = writeln!(out, "between = [\"{a}\", \"{b}\"]");
            }
            Kind::WireRate { rate_kbit, queue } => {
                let _ = writeln!(out, "rate_kbit = {rate_kbit}\nqueue = {queue}");
            }
            Kind::WorkerStall { stall, worker } => {
                write_ms(out, "stall_ms", *stall);
                if let Some(worker) = worker {
                    let _ = writeln!(out, "worker = {worker}");
                }
            }
            Kind::ControlStall { stall } => write_ms(out, "stall_ms", *stall),
            Kind::DaemonEnd(how) => write_string(out, "how", how.name()),
        }
    }
}

impl Plan {
    /// The plan as a file.
    pub fn to_toml(&self) -> String {
        let mut out = format!("seed = {}\n", self.seed);
        for fault in &self.faults {
            out.push_str("\n[[fault]]\n");
            fault.kind.write_toml(&mut out);
            if let Some(name) = &fault.name {
                write_string(&mut out, "name", name);
            }
            let Aim {
                device,
                qp,
                nth,
                port,
                user,
                client,
                host,
                connection,
                direction,
            } = &fault.aim;
            if let Some(device) = device {
                write_string(&mut out, "device", device);
            }
            if let Some(host) = host {
                write_string(&mut out, "host", &host.to_string());
            }
            if let Some((a, b)) = connection {
                let _ = writeln!(out, "connection = [\"{a}\", \"{b}\"]");
            }
            if *direction != Direction::Both {
                write_string(&mut out, "direction", direction.name());
            }
            let numbers = [
                ("qp", qp.map(u64::from)),
                ("user", user.map(u64::from)),
                ("client", *client),
                ("nth", *nth),
                ("port", port.map(u64::from)),
                ("count", fault.trigger.count),
            ];
            for (key, number) in numbers {
                if let Some(number) = number {
                    let _ = writeln!(out, "{key} = {number}");
                }
            }
            let trigger = &fault.trigger;
            if !trigger.after.is_zero() {
                let _ = writeln!(out, "after = {}", time_text(trigger.after));
            }
            if let Some(repeat) = trigger.repeat {
                let _ = writeln!(out, "repeat = {}", time_text(repeat));
            }
            if let Some(lasts) = trigger.lasts {
                let _ = writeln!(out, "lasts = {}", time_text(lasts));
            }
            if trigger.after_calls > 0 {
                let _ = writeln!(out, "after_calls = {}", trigger.after_calls);
            }
            if trigger.every > 1 {
                let _ = writeln!(out, "every = {}", trigger.every);
            }
            if trigger.probability < 1.0 {
                let _ = writeln!(
                    out,
                    "probability = {}",
                    toml::Value::Float(trigger.probability)
                );
            }
        }
        out
    }

    /// Whether a fault counts calls of objects of that scope.
    pub fn has_scope(&self, scope: Scope) -> bool {
        self.faults.iter().any(|fault| fault.kind.has_scope(scope))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::{AsyncEvent, Object, Operation};

    fn parse(text: &str) -> Result<Plan, String> {
        parse_for(Place::Program, text)
    }

    fn parse_for(place: Place, text: &str) -> Result<Plan, String> {
        Plan::parse(Path::new("plan.toml"), text, place).map_err(|error| error.to_string())
    }

    #[test]
    fn a_plan_has_its_faults_with_defaults() {
        let plan = parse(
            "seed = 7\ndescription = \"all\"\n\
             [[fault]]\nkind = \"completion\"\nname = \"lost\"\nstatus = \"IBV_WC_REM_ACCESS_ERR\"\n\
             operation = \"send\"\nqp = 5\ndevice = \"siw0\"\nafter = \"1.5s\"\nafter_calls = 10\n\
             every = 3\ncount = 2\nprobability = 0.25\n\
             [[fault]]\nkind = \"create\"\nobject = \"mr\"\n\
             [[fault]]\nkind = \"event\"\nevent = \"PORT_ERR\"\nafter = \"20ms\"\nrepeat = \"1s\"\n",
        )
        .unwrap();
        assert_eq!(plan.seed, 7);
        let [first, second, third] = &plan.faults[..] else {
            panic!("{plan:?}");
        };
        assert_eq!(
            first.kind,
            Kind::Completion {
                status: 10,
                operation: Some(Operation::Send)
            }
        );
        assert_eq!(first.aim.qp, Some(5));
        assert_eq!(first.trigger.after, Duration::from_millis(1500));
        assert_eq!((first.trigger.every, first.trigger.count), (3, Some(2)));
        assert_eq!(
            second.kind,
            Kind::Create {
                object: Object::Mr,
                errno: libc::ENOMEM
            }
        );
        assert_eq!(second.trigger, Trigger::default());
        assert_eq!(third.kind, Kind::Event(AsyncEvent::PortErr));
        assert!(third.is_timed() && !first.is_timed());
        assert_eq!(plan.name_of(0), "fault 1 (lost)");
        assert_eq!(plan.name_of(1), "fault 2");
    }

    /// A plan with one fault of that text.
    fn fault(text: &str) -> Result<Plan, String> {
        parse(&format!("[[fault]]\n{text}\n"))
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        let cases = [
            ("", "plan.toml:1:1: the plan has no [[fault]]"),
            ("seed = 3\n", "plan.toml:1:1: the plan has no [[fault]]"),
            ("sede = 3\n", "plan.toml:1:1: unknown key \"sede\""),
            ("seed = -3\n", "plan.toml:1:8: an integer between 0"),
            ("fault = 3\n", "plan.toml:1:9: faults are tables"),
            ("seed = \n", "plan.toml:1:"),
            (
                "[[fault]]\nkind = \"meteor\"\n",
                "plan.toml:2:8: unknown fault \"meteor\": the kinds are post_send,",
            ),
            (
                "\n[[fault]]\nname = \"x\"\n",
                "plan.toml:2:1: the fault lacks the key kind",
            ),
        ];
        for (text, message) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(message), "{text:?}: {error}");
        }
        let cases = [
            ("kind = \"delay\"", "1", "needs delay_ms"),
            ("kind = \"post_send\"\nport = 7", "3", "no key \"port\""),
            (
                "kind = \"post_send\"\nerrno = \"ENO\"",
                "3",
                "unknown errno \"ENO\"",
            ),
            (
                "kind = \"post_send\"\nerrno = 12",
                "3",
                "a string is expected",
            ),
            (
                "kind = \"post_send\"\nprobability = 2",
                "3",
                "between 0 and 1",
            ),
            (
                "kind = \"post_send\"\nprobability = nan",
                "3",
                "between 0 and 1",
            ),
            (
                "kind = \"post_send\"\nprobability = \"1\"",
                "3",
                "a number is expected",
            ),
            ("kind = \"post_send\"\nevery = 0", "3", "between 1 and"),
            ("kind = \"post_send\"\ncount = 0", "3", "between 1 and"),
            (
                "kind = \"post_send\"\nqp = 16777216",
                "3",
                "between 1 and 16777215",
            ),
            (
                "kind = \"post_send\"\nqp = 0",
                "3",
                "between 1 and 16777215",
            ),
            ("kind = \"post_send\"\nnth = 0", "3", "between 1 and"),
            (
                "kind = \"post_send\"\ndevice = \"a/b\"",
                "3",
                "no name of a device",
            ),
            (
                "kind = \"post_send\"\ndevice = \"\"",
                "3",
                "no name of a device",
            ),
            (
                "kind = \"post_send\"\nafter = \"2\"",
                "3",
                "write a number and us, ms, s or m",
            ),
            (
                "kind = \"post_send\"\nafter = \"2d\"",
                "3",
                "write a number and us",
            ),
            (
                "kind = \"post_send\"\nafter = \"2000m\"",
                "3",
                "longer than a day",
            ),
            (
                "kind = \"post_send\"\nafter = 2",
                "3",
                "a string is expected",
            ),
            ("kind = \"post_send\"\nname = \"\"", "3", "a name is a line"),
            (
                "kind = \"reject\"\nport = 65536",
                "3",
                "between 1 and 65535",
            ),
            ("kind = \"reject\"\nside = \"left\"", "3", "active, passive"),
            (
                "kind = \"create\"",
                "1",
                "lacks the key object: it can be pd, mr,",
            ),
            ("kind = \"event\"\nevent = \"FIRE\"", "3", "QP_FATAL"),
            (
                "kind = \"cm_storm\"\nevent = \"ADDR_CHANGE\"\nburst = 0",
                "4",
                "between 1",
            ),
            (
                "kind = \"completion\"\nstatus = \"SUCCESS\"",
                "3",
                "no failure",
            ),
            ("kind = \"delay\"\ndelay_ms = -1", "3", "between 0 and"),
            (
                "kind = \"event\"\nevent = \"PORT_ERR\"\nrepeat = \"1s\"\nevery = 3",
                "4",
                "excludes after_calls",
            ),
            (
                "kind = \"event\"\nevent = \"PORT_ERR\"\nrepeat = \"0s\"",
                "4",
                "longer than 0",
            ),
        ];
        for (text, line, message) in cases {
            let error = fault(text).unwrap_err();
            let place = format!("plan.toml:{line}:");
            assert!(
                error.starts_with(&place) && error.contains(message),
                "{text:?}: {error}"
            );
        }
    }

    #[test]
    fn a_missing_file_and_a_folder_are_refused() {
        let error = Plan::find("/nowhere/plan.toml", Place::Program)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("/nowhere/plan.toml: ") && error.contains("slow-completions"),
            "{error}"
        );
        assert!(
            Plan::find("/tmp", Place::Program)
                .unwrap_err()
                .to_string()
                .contains("regular")
        );
    }

    #[test]
    fn every_kind_is_read_again_from_its_text() {
        for name in Kind::NAMES {
            let more = match name {
                "create" => "object = \"qp\"",
                "event" => "event = \"GID_CHANGE\"\nrepeat = \"5ms\"",
                "cm_storm" => "event = \"ADDR_CHANGE\"",
                "delay" => "jitter_ms = 1.5",
                "reject" => "private_data = \"a \\\"b\\\"\"\nport = 9",
                "completion" => "operation = \"receive\"\nprobability = 0.125",
                _ => "after = \"3ms\"",
            };
            let plan = fault(&format!("kind = {name:?}\n{more}")).unwrap();
            assert_eq!(plan.faults[0].kind.name(), name);
            assert_eq!(
                parse(&plan.to_toml()),
                Ok(plan.clone()),
                "{}",
                plan.to_toml()
            );
            let scopes = [
                Scope::Port,
                Scope::Daemon,
                Scope::QueuePair,
                Scope::CompletionQueue,
                Scope::Context,
                Scope::Process,
            ];
            let held = scopes
                .iter()
                .filter(|scope| plan.has_scope(**scope))
                .count();
            assert_eq!(held, 1, "{name}");
        }
    }

    #[test]
    fn every_kind_of_the_daemon_is_read_again_from_its_text() {
        for name in Kind::DAEMON_NAMES {
            let more = match name {
                "wire_drop" => "burst = 3\nlasts = \"1s\"\nrepeat = \"2s\"",
                "wire_delay" => "jitter_ms = 1.5\nuser = 0\nclient = 3",
                "wire_duplicate" => "altered = true\nhost = \"fd00::1\"\ndirection = \"in\"",
                "wire_partition" => "between = [\"10.0.0.1\", \"10.0.0.2\"]",
                "wire_rate" => "rate_kbit = 1000",
                "wire_corrupt" => "connection = [\"10.0.0.1:1\", \"[fd00::1]:2\"]",
                "worker_stall" => "stall_ms = 20\nworker = 1\nrepeat = \"1s\"",
                "control_stall" => "stall_ms = 20",
                "daemon_end" => "how = \"abort\"\nafter = \"3s\"",
                _ => "qp = 5\nport = 9\ndevice = \"siw0\"",
            };
            let text = format!("[[fault]]\nkind = {name:?}\n{more}\n");
            let plan = parse_for(Place::Daemon, &text).unwrap();
            assert_eq!(plan.faults[0].kind.name(), name);
            assert_eq!(
                parse_for(Place::Daemon, &plan.to_toml()),
                Ok(plan.clone()),
                "{}",
                plan.to_toml()
            );
            assert_ne!(plan.has_scope(Scope::Port), plan.has_scope(Scope::Daemon));
            let error = parse(&text).unwrap_err();
            assert!(
                error.contains("plan.toml:2:") && error.contains("siwctl fault load"),
                "{error}"
            );
        }
    }

    #[test]
    fn mistakes_in_plans_of_the_daemon_are_told_with_their_place() {
        let cases = [
            ("kind = \"post_send\"", "2:8", "siwrun --faults"),
            ("kind = \"wire_fire\"", "2:8", "wire_black_hole"),
            (
                "kind = \"wire_drop\"\nprobability = 2",
                "3:15",
                "between 0 and 1",
            ),
            ("kind = \"wire_drop\"\nnth = 1", "3:1", "no key \"nth\""),
            (
                "kind = \"wire_drop\"\nrepeat = \"1s\"",
                "3:10",
                "needs lasts",
            ),
            (
                "kind = \"wire_drop\"\nlasts = \"2s\"\nrepeat = \"1s\"",
                "4:10",
                "at least as long",
            ),
            (
                "kind = \"wire_drop\"\nlasts = \"0s\"",
                "3:9",
                "longer than 0",
            ),
            (
                "kind = \"wire_drop\"\nhost = \"siw\"",
                "3:8",
                "no IP address",
            ),
            (
                "kind = \"wire_drop\"\ndirection = \"up\"",
                "3:13",
                "both, out, in",
            ),
            (
                "kind = \"wire_drop\"\nconnection = [\"10.0.0.1:1\"]",
                "3:14",
                "two different",
            ),
            ("kind = \"wire_delay\"", "1:1", "delay_ms"),
            (
                "kind = \"wire_delay\"\njitter_ms = 60001",
                "3:13",
                "at most 60000 ms",
            ),
            (
                "kind = \"wire_reorder\"\nlate_ms = 1e5",
                "3:11",
                "at most 60000 ms",
            ),
            (
                "kind = \"wire_duplicate\"\naltered = 1",
                "3:11",
                "true or false",
            ),
            ("kind = \"wire_partition\"", "1:1", "between"),
            (
                "kind = \"wire_partition\"\nbetween = [\"10.0.0.1\", \"10.0.0.1\"]",
                "3:11",
                "two different",
            ),
            ("kind = \"wire_rate\"", "1:1", "rate_kbit"),
            ("kind = \"wire_rate\"\nrate_kbit = 0", "3:13", "between 1"),
            ("kind = \"worker_stall\"", "1:1", "stall_ms"),
            (
                "kind = \"worker_stall\"\nstall_ms = 1e9",
                "3:12",
                "milliseconds",
            ),
            (
                "kind = \"control_stall\"\nstall_ms = 5\nevery = 2",
                "4:9",
                "without calls",
            ),
            ("kind = \"daemon_end\"", "1:1", "abort, stop"),
        ];
        for (text, place, message) in cases {
            let error = parse_for(Place::Daemon, &format!("[[fault]]\n{text}\n")).unwrap_err();
            let begin = format!("plan.toml:{place}: ");
            assert!(
                error.starts_with(&begin) && error.contains(message),
                "{text:?}: {error}"
            );
        }
    }

    #[test]
    fn an_error_is_told_at_the_key_of_a_plan_that_was_read() {
        let text =
            "[[fault]]\nkind = \"wire_drop\"\n[[fault]]\nkind = \"wire_drop\"\ndevice = \"x\"\n";
        let at = |fault, key| {
            Plan::error_at(Path::new("p"), text, (fault, key), "no".into()).to_string()
        };
        assert_eq!(at(1, "device"), "p:5:10: no");
        assert_eq!(at(0, "device"), "p:1:1: no");
        assert_eq!(at(7, "device"), "p:1:1: no");
    }

    #[test]
    fn a_time_repeats() {
        let trigger = Trigger {
            after: Duration::from_secs(1),
            lasts: Some(Duration::from_secs(2)),
            repeat: Some(Duration::from_secs(5)),
            ..Trigger::default()
        };
        let times = (0..14).filter(|second| trigger.has_time(Duration::from_secs(*second)));
        assert_eq!(times.collect::<Vec<_>>(), [1, 2, 6, 7, 11, 12]);
    }
}
