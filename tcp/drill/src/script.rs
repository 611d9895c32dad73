//! A parsed script: its options and its events.

use crate::packet::{IcmpSpec, TcpSpec};

/// Reason and place of a script failure. Displayed as `file:line: message`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {message}")]
pub struct ScriptFailure {
    /// The name passed to [`crate::run_script`].
    pub file: String,
    /// Line number, from 1.
    pub line: usize,
    /// The expected and the actual event, or the error in the line itself.
    pub message: String,
}

/// A failure at a line of a script; the caller adds the file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LineError {
    pub line: usize,
    pub message: String,
}

impl LineError {
    pub(crate) fn new(line: usize, message: impl Into<String>) -> LineError {
        LineError {
            line,
            message: message.into(),
        }
    }
}

/// Time of a script event, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventTime {
    /// `0.5`: since the start of the script.
    Absolute(u64),
    /// `+.1`: since the last event.
    Relative(u64),
    /// `0.5~1`: a packet may be sent between these two times.
    AbsoluteRange(u64, u64),
    /// `+0.5~+1`
    RelativeRange(u64, u64),
    /// `*`
    Any,
}

/// An argument of a system call, or part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Argument {
    /// `...`
    Any,
    Int(i64),
    /// Symbols joined by `|`.
    Symbols(Vec<String>),
    Str(String),
    List(Vec<Argument>),
    Struct(Vec<(String, Argument)>),
}

/// `name(args) = result errno`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SystemCall {
    pub name: String,
    pub args: Vec<Argument>,
    /// `None`: any result matches.
    pub result: Option<i64>,
    /// Name of the errno value that a result of -1 must have.
    pub errno: Option<String>,
    /// The second time of `a...b`: the call blocks until then.
    pub until: Option<EventTime>,
}

/// A packet that the peer sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ScriptPacket {
    Tcp(TcpSpec),
    Icmp(IcmpSpec),
}

/// The action of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Call(SystemCall),
    /// `<`: the peer sends a packet.
    Inject(ScriptPacket),
    /// `>`: the stack must send a segment.
    Expect(TcpSpec),
    /// `%{ }%`: assertions.
    Code(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScriptEvent {
    pub line: usize,
    pub when: EventTime,
    pub action: Action,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Script {
    /// Line, name and value of each `--name=value`, in order.
    pub options: Vec<(usize, String, String)>,
    pub events: Vec<ScriptEvent>,
}
