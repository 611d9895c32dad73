//! Plans: reading, checks, and text.

use crate::built_in::find_built_in;
use crate::kind::{Kind, Scope, Side, Word, find_word};
use crate::numbers::{errno_of, status_of};
use std::ffi::c_int;
use std::fmt::Write;
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
        crate::built_in_plans().map(|plan| plan.name).collect::<Vec<_>>().join(", ")
    )]
    Read {
        /// Path or name.
        name: String,
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
    /// TCP port: of the peer for calls that connect, else of the listener.
    pub port: Option<u16>,
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
    /// Time between two faults that happen at a time.
    pub repeat: Option<Duration>,
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
        matches!(self.kind, Kind::Event(_)) && after_calls == 0 && every == 1
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
    pub fn find(name: &str) -> Result<Plan, PlanError> {
        if let Some(built_in) = find_built_in(name) {
            return Plan::parse(Path::new(name), built_in.text);
        }
        let path = Path::new(name);
        let text = read_file(path).map_err(|source| PlanError::Read {
            name: name.to_owned(),
            source,
        })?;
        Plan::parse(path, &text)
    }

    /// Reads a plan from the text of a file.
    ///
    /// # Errors
    /// The text has a mistake.
    pub fn parse(path: &Path, text: &str) -> Result<Plan, PlanError> {
        parse_plan(text).map_err(|(span, message)| {
            let before = &text[..span.start.min(text.len())];
            let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
            PlanError::Invalid {
                path: path.to_owned(),
                line: before.matches('\n').count() + 1,
                column: before[line_start..].chars().count() + 1,
                message,
            }
        })
    }

    /// Name of a fault in messages: its number from 1, and its name if it has one.
    pub fn name_of(&self, fault: usize) -> String {
        match self.faults.get(fault).and_then(|fault| fault.name.as_ref()) {
            Some(name) => format!("fault {} ({name})", fault + 1),
            None => format!("fault {}", fault + 1),
        }
    }
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

fn parse_plan(text: &str) -> Result<Plan, Mistake> {
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
                    plan.faults.push(parse_fault(table, fault.span())?);
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

fn parse_fault(table: &DeTable<'_>, span: Range<usize>) -> Result<Fault, Mistake> {
    let keys = Keys { table, span };
    let (kind_name, kind_span) = match keys.find("kind") {
        Some(value) => (to_text(value)?, value.span()),
        None => {
            return Err((
                keys.span,
                format!(
                    "the fault lacks the key kind: it can be {}",
                    Kind::NAMES.join(", ")
                ),
            ));
        }
    };
    let Some(own_keys) = keys_of(kind_name) else {
        return Err((
            kind_span,
            format!(
                "unknown fault {kind_name:?}: the kinds are {}",
                Kind::NAMES.join(", ")
            ),
        ));
    };
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
    if let Some(repeat) = keys.find("repeat")
        && !fault.is_timed()
    {
        return Err((
            repeat.span(),
            "an event repeats at times or at calls: repeat excludes after_calls and every".into(),
        ));
    }
    Ok(fault)
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
            let (delay, jitter) = (delay()?, keys.milliseconds("jitter_ms")?);
            if delay.is_none() && jitter.is_none() {
                return Err((
                    keys.span.clone(),
                    "a fault of kind delay needs delay_ms, jitter_ms or both".into(),
                ));
            }
            Kind::Delay {
                delay: delay.unwrap_or_default(),
                jitter: jitter.unwrap_or_default(),
            }
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
        other => unreachable!("keys_of() does not know {other}"),
    })
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
    if let (Some(value), Some(Duration::ZERO)) = (keys.find("repeat"), trigger.repeat) {
        return Err((value.span(), "repeat must be longer than 0".into()));
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
            Kind::Delay { delay, jitter } => {
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
            Kind::CqOverrun | Kind::Disconnect => {}
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
            } = &fault.aim;
            if let Some(device) = device {
                write_string(&mut out, "device", device);
            }
            let numbers = [
                ("qp", qp.map(u64::from)),
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
        Plan::parse(Path::new("plan.toml"), text).map_err(|error| error.to_string())
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
        let error = Plan::find("/nowhere/plan.toml").unwrap_err().to_string();
        assert!(
            error.starts_with("/nowhere/plan.toml: ") && error.contains("slow-completions"),
            "{error}"
        );
        assert!(
            Plan::find("/tmp")
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
}
