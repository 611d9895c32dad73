//! What a script says, parsed.

use crate::packet::{IcmpSpec, TcpSpec};

/// Why a script failed, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {message}")]
pub struct Failure {
    pub file: String,
    /// From 1.
    pub line: usize,
    pub message: String,
}

/// A failure inside one script, whose name the caller knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct At {
    pub line: usize,
    pub message: String,
}

impl At {
    pub(crate) fn new(line: usize, message: impl Into<String>) -> At {
        At {
            line,
            message: message.into(),
        }
    }
}

/// When an event happens; nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// Since the start of the script.
    Absolute(u64),
    /// Since the event before.
    Relative(u64),
    AbsoluteRange(u64, u64),
    RelativeRange(u64, u64),
    Any,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Arg {
    /// `...`
    Any,
    Int(i64),
    /// Symbols joined by `|`.
    Words(Vec<String>),
    Str(String),
    List(Vec<Arg>),
    Struct(Vec<(String, Arg)>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub name: String,
    pub args: Vec<Arg>,
    /// `None`: any result will do.
    pub result: Option<i64>,
    /// Name of the error that a result of -1 must come with.
    pub errno: Option<String>,
    /// The second time of `a...b`: the call blocks until then.
    pub until: Option<When>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    Tcp(TcpSpec),
    Icmp(IcmpSpec),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Call(Call),
    Inject(Packet),
    Expect(TcpSpec),
    Code(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub line: usize,
    pub when: When,
    pub what: What,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Script {
    /// `--name=value`, in order.
    pub options: Vec<(usize, String, String)>,
    pub events: Vec<Event>,
}
