//! Makes the system calls of scripts on the host's sockets.

use std::net::SocketAddr;
use std::time::Duration;

use crate::errno::Errno;
use crate::host::Host;
use crate::run;
use crate::script::{Argument, SystemCall};
use crate::sockets::{Shutdown, SockOpt};

/// The access mode that `F_GETFL` returns.
const O_RDWR: i64 = 2;

/// Result of a system call.
pub(crate) enum CallResult {
    Value(i64),
    Error(Errno),
}

/// Bytes written and read so far on each socket, which determine the content of further bytes: see
/// [`run::stream_byte`].
#[derive(Default)]
pub(crate) struct StreamOffsets {
    written: std::collections::HashMap<i32, u64>,
    read: std::collections::HashMap<i32, u64>,
}

/// Returns the argument at `index` as a number; `...` is 0. `what` names it in error messages.
fn int_argument(call: &SystemCall, index: usize, what: &str) -> Result<i64, String> {
    match call.args.get(index) {
        Some(Argument::Int(value)) => Ok(*value),
        Some(Argument::Any) => Ok(0),
        _ => Err(format!(
            "argument {} of {}, {what}, must be a number",
            index + 1,
            call.name
        )),
    }
}

/// Returns the symbols of the argument at `index`; none if it is of another kind.
fn symbols_argument(call: &SystemCall, index: usize) -> Vec<&str> {
    match call.args.get(index) {
        Some(Argument::Symbols(symbols)) => symbols.iter().map(String::as_str).collect(),
        _ => vec![],
    }
}

/// Returns the elements of the argument at `index`.
fn list_argument(call: &SystemCall, index: usize) -> Result<&[Argument], String> {
    match call.args.get(index) {
        Some(Argument::List(list)) => Ok(list),
        _ => Err(format!(
            "argument {} of {} must be a list in brackets",
            index + 1,
            call.name
        )),
    }
}

/// Makes a call. `Err`: the script needs a feature that siw-drill lacks, or the bytes read differ from
/// those that the peer sent.
pub(crate) fn make_call(
    host: &mut Host,
    streams: &mut StreamOffsets,
    call: &SystemCall,
) -> Result<CallResult, String> {
    let zero = |result: Result<(), Errno>| result.map(|()| 0);
    let result: Result<i64, Errno> = match call.name.as_str() {
        "socket" => open_socket(host, call)?,
        "bind" => {
            let fd = int_argument(call, 0, "the socket")? as i32;
            let to = SocketAddr::new(host.setup.local, host.setup.bind_port);
            zero(host.bind(fd, to))
        }
        "listen" => {
            let fd = int_argument(call, 0, "the socket")? as i32;
            zero(host.listen(fd, int_argument(call, 1, "the backlog")? as i32))
        }
        "accept" => {
            let result = host.accept(int_argument(call, 0, "the socket")? as i32);
            result.map(|(fd, _)| {
                streams.written.remove(&fd);
                streams.read.remove(&fd);
                i64::from(fd)
            })
        }
        "connect" => {
            let to = SocketAddr::new(host.setup.remote, host.setup.connect_port);
            zero(host.connect(int_argument(call, 0, "the socket")? as i32, to))
        }
        "write" | "send" | "sendto" => {
            let fd = int_argument(call, 0, "the socket")? as i32;
            let len = usize::try_from(int_argument(call, 2, "the length")?)
                .map_err(|error| error.to_string())?;
            let from = streams.written.entry(fd).or_default();
            let data: Vec<u8> = (*from..*from + len as u64).map(run::stream_byte).collect();
            host.write(fd, &data).map(|count| {
                *from += count as u64;
                count as i64
            })
        }
        "read" | "recv" | "recvfrom" => {
            let fd = int_argument(call, 0, "the socket")? as i32;
            let len = usize::try_from(int_argument(call, 2, "the length")?)
                .map_err(|error| error.to_string())?;
            // `read` has no fourth argument, so it never peeks.
            let peeks = symbols_argument(call, 3).contains(&"MSG_PEEK");
            let result = if peeks {
                host.peek(fd, len)
            } else {
                host.read(fd, len)
            };
            match result {
                Err(errno) => Err(errno),
                Ok(data) => {
                    let from = streams.read.entry(fd).or_default();
                    check_content(&data, *from)?;
                    *from += if peeks { 0 } else { data.len() as u64 };
                    Ok(data.len() as i64)
                }
            }
        }
        "shutdown" => {
            let how = match symbols_argument(call, 1)[..] {
                ["SHUT_RD"] => Shutdown::Read,
                ["SHUT_WR"] => Shutdown::Write,
                ["SHUT_RDWR"] => Shutdown::Both,
                _ => return Err("shutdown needs SHUT_RD, SHUT_WR or SHUT_RDWR".into()),
            };
            zero(host.shutdown(int_argument(call, 0, "the socket")? as i32, how))
        }
        "close" => {
            let fd = int_argument(call, 0, "the socket")? as i32;
            streams.written.remove(&fd);
            streams.read.remove(&fd);
            zero(host.close(fd))
        }
        "fcntl" => match symbols_argument(call, 1)[..] {
            // All sockets are non-blocking. A call with two times is retried until it returns.
            ["F_GETFL"] => Ok(call.result.unwrap_or(O_RDWR)),
            ["F_SETFL"] => Ok(0),
            _ => return Err("fcntl supports only F_GETFL and F_SETFL".into()),
        },
        "setsockopt" => {
            let fd = int_argument(call, 0, "the socket")? as i32;
            zero(host.set_option(fd, parse_socket_option(call)?))
        }
        "getsockopt" => check_socket_error(host, call)?,
        "poll" => poll_sockets(host, call)?,
        unknown => return Err(format!("{unknown} is not a system call of siw-drill")),
    };
    Ok(result.map_or_else(CallResult::Error, CallResult::Value))
}

/// Checks that bytes read from a stream are those at the offset `from`.
fn check_content(data: &[u8], from: u64) -> Result<(), String> {
    for (byte, offset) in data.iter().zip(from..) {
        let sent = run::stream_byte(offset);
        if *byte != sent {
            return Err(format!(
                "byte {offset} of the stream was read as {byte:#04x}; the peer sent {sent:#04x}"
            ));
        }
    }
    Ok(())
}

/// `socket(..., SOCK_STREAM, IPPROTO_TCP)`. The outer error is an error in the script.
fn open_socket(host: &mut Host, call: &SystemCall) -> Result<Result<i64, Errno>, String> {
    let v6 = match call.args.first() {
        Some(Argument::Any) => host.setup.local.is_ipv6(),
        Some(Argument::Symbols(symbols)) if symbols == &["AF_INET"] => false,
        Some(Argument::Symbols(symbols)) if symbols == &["AF_INET6"] => true,
        _ => return Err("socket needs ..., AF_INET or AF_INET6".into()),
    };
    if !symbols_argument(call, 1).contains(&"SOCK_STREAM") {
        return Err("only SOCK_STREAM sockets are supported".into());
    }
    Ok(Ok(i64::from(host.socket(v6))))
}

/// Parses the option of `setsockopt` and its value.
fn parse_socket_option(call: &SystemCall) -> Result<SockOpt, String> {
    let value = match call.args.get(3) {
        Some(Argument::List(list)) => list.first(),
        value => value,
    };
    let name = symbols_argument(call, 2);
    let number = || match value {
        Some(Argument::Int(value)) => Ok(*value),
        _ => Err(format!(
            "the value of {} must be a number, such as [1]",
            name.join("|")
        )),
    };
    let unsigned = || {
        let value = number()?;
        u32::try_from(value).map_err(|_| format!("{value} is out of range for {}", name.join("|")))
    };
    let seconds = || unsigned().map(|value| Duration::from_secs(value.into()));
    let count = || unsigned().map(|value| value.min(255) as u8);
    Ok(match name[..] {
        ["SO_KEEPALIVE"] => SockOpt::KeepAlive(number()? != 0),
        ["SO_RCVBUF"] => SockOpt::ReceiveBuffer(unsigned()?),
        ["SO_SNDBUF"] => SockOpt::SendBuffer(unsigned()?),
        ["SO_LINGER"] => match value {
            Some(Argument::Struct(fields)) => {
                let field = |wanted: &str| {
                    fields
                        .iter()
                        .any(|(name, value)| name == wanted && *value != Argument::Int(0))
                };
                SockOpt::Linger(field("onoff") && !field("linger"))
            }
            _ => return Err("the value of SO_LINGER must be {onoff=1, linger=0}".into()),
        },
        ["TCP_KEEPIDLE"] => SockOpt::KeepIdle(seconds()?),
        ["TCP_KEEPINTVL"] => SockOpt::KeepInterval(seconds()?),
        ["TCP_KEEPCNT"] => SockOpt::KeepCount(count()?),
        ["TCP_SYNCNT"] => SockOpt::SynCount(count()?),
        ["TCP_USER_TIMEOUT"] => SockOpt::UserTimeout(Duration::from_millis(unsigned()?.into())),
        ["TCP_CONGESTION"] => match value {
            Some(Argument::Str(name)) => SockOpt::Congestion(name.clone()),
            _ => return Err("the value of TCP_CONGESTION must be a string".into()),
        },
        ["SO_REUSEADDR" | "SO_REUSEPORT" | "TCP_NODELAY"] => SockOpt::NoEffect,
        _ => {
            return Err(format!(
                "the socket option {} is not supported",
                name.join("|")
            ));
        }
    })
}

/// `getsockopt(4, SOL_SOCKET, SO_ERROR, [ECONNREFUSED], [4]) = 0`: compares the pending error with the
/// expected one, and clears it.
fn check_socket_error(host: &mut Host, call: &SystemCall) -> Result<Result<i64, Errno>, String> {
    if symbols_argument(call, 2)[..] != ["SO_ERROR"] {
        return Err("getsockopt supports only SO_ERROR".into());
    }
    let got = match host.take_error(int_argument(call, 0, "the socket")? as i32) {
        Ok(errno) => errno,
        Err(errno) => return Ok(Err(errno)),
    };
    let name = got.map_or("0", Errno::name);
    let same = match list_argument(call, 3)?.first() {
        Some(Argument::Int(number)) => got.map_or(0, |errno| i64::from(errno.0)) == *number,
        Some(Argument::Symbols(symbols)) => symbols == &[name],
        Some(Argument::Any) => true,
        _ => return Err("the value of SO_ERROR must be [0] or an error: [ECONNREFUSED]".into()),
    };
    if !same {
        return Err(format!("SO_ERROR is {name}"));
    }
    Ok(Ok(0))
}

/// `poll_sockets([{fd=4, events=POLLIN, revents=POLLIN}], 1, 0) = 1`
fn poll_sockets(host: &mut Host, call: &SystemCall) -> Result<Result<i64, Errno>, String> {
    let mut count = 0;
    for entry in list_argument(call, 0)? {
        let Argument::Struct(fields) = entry else {
            return Err("poll needs a list of {fd=.., events=.., revents=..}".into());
        };
        let field = |wanted: &str| {
            fields
                .iter()
                .find(|(name, _)| name == wanted)
                .map(|(_, value)| value)
        };
        let Some(Argument::Int(fd)) = field("fd") else {
            return Err("poll needs fd=N".into());
        };
        let names = |wanted: &str| match field(wanted) {
            Some(Argument::Symbols(symbols)) => symbols.clone(),
            _ => vec![],
        };
        let wanted = names("events");
        let readiness = match host.readiness(*fd as i32) {
            Ok(readiness) => readiness,
            Err(errno) => return Ok(Err(errno)),
        };
        let all = [
            ("POLLIN", readiness.readable, false),
            ("POLLOUT", readiness.writable, false),
            ("POLLRDHUP", readiness.peer_closed, false),
            ("POLLERR", readiness.error, true),
            ("POLLHUP", readiness.hung_up, true),
        ];
        let mut actual: Vec<_> = all
            .into_iter()
            .filter(|(name, present, always)| {
                *present && (*always || wanted.iter().any(|event| event == name))
            })
            .map(|(name, _, _)| name.to_owned())
            .collect();
        count += i64::from(!actual.is_empty());
        let mut expected = names("revents");
        actual.sort();
        expected.sort();
        // A blocking poll is retried until it has an event.
        if actual != expected && call.until.is_none() {
            return Err(format!("revents of {fd} are {}", actual.join("|")));
        }
    }
    if count == 0 && call.until.is_some() {
        return Ok(Err(Errno::EAGAIN));
    }
    Ok(Ok(count))
}
