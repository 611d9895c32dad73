//! System calls of scripts, made on the host's sockets.

use std::net::SocketAddr;
use std::time::Duration;

use crate::errno::Errno;
use crate::script::{Arg, Call};
use crate::sockets::{Shutdown, SockOpt};
use crate::{Host, run};

/// What a call came to.
pub(crate) enum Answer {
    Value(i64),
    Error(Errno),
}

/// Bytes moved so far on each socket, for their expected content.
#[derive(Default)]
pub(crate) struct Streams {
    written: std::collections::HashMap<i32, u64>,
    read: std::collections::HashMap<i32, u64>,
}

fn int(c: &Call, at: usize, what: &str) -> Result<i64, String> {
    match c.args.get(at) {
        Some(Arg::Int(v)) => Ok(*v),
        Some(Arg::Any) => Ok(0),
        _ => Err(format!(
            "argument {} of {} is {what}: a number",
            at + 1,
            c.name
        )),
    }
}

fn words(c: &Call, at: usize) -> Vec<&str> {
    match c.args.get(at) {
        Some(Arg::Words(w)) => w.iter().map(String::as_str).collect(),
        _ => vec![],
    }
}

fn list(c: &Call, at: usize) -> Result<&[Arg], String> {
    match c.args.get(at) {
        Some(Arg::List(l)) => Ok(l),
        _ => Err(format!(
            "argument {} of {} is a list in brackets",
            at + 1,
            c.name
        )),
    }
}

/// Makes the call. `Err`: the script asks for something that is not known here.
pub(crate) fn make(host: &mut Host, streams: &mut Streams, c: &Call) -> Result<Answer, String> {
    let unit = |r: Result<(), Errno>| r.map(|()| 0);
    let result: Result<i64, Errno> = match c.name.as_str() {
        "socket" => socket(host, c)?,
        "bind" => {
            let fd = int(c, 0, "the socket")? as i32;
            let to = SocketAddr::new(host.setup.local, host.setup.bind_port);
            unit(host.bind(fd, to))
        }
        "listen" => {
            let fd = int(c, 0, "the socket")? as i32;
            unit(host.listen(fd, int(c, 1, "the backlog")? as i32))
        }
        "accept" => {
            let r = host.accept(int(c, 0, "the socket")? as i32);
            r.map(|(fd, _)| {
                streams.written.remove(&fd);
                streams.read.remove(&fd);
                i64::from(fd)
            })
        }
        "connect" => {
            let to = SocketAddr::new(host.setup.remote, host.setup.connect_port);
            unit(host.connect(int(c, 0, "the socket")? as i32, to))
        }
        "write" | "send" | "sendto" => {
            let fd = int(c, 0, "the socket")? as i32;
            let len = usize::try_from(int(c, 2, "the length")?).map_err(|e| e.to_string())?;
            let from = streams.written.entry(fd).or_default();
            let data: Vec<u8> = (*from..*from + len as u64).map(run::byte).collect();
            host.write(fd, &data).map(|n| {
                *from += n as u64;
                n as i64
            })
        }
        "read" | "recv" | "recvfrom" => {
            let fd = int(c, 0, "the socket")? as i32;
            let len = usize::try_from(int(c, 2, "the length")?).map_err(|e| e.to_string())?;
            match host.read(fd, len) {
                Err(e) => Err(e),
                Ok(data) => {
                    let from = streams.read.entry(fd).or_default();
                    if let Some(i) =
                        (0..data.len()).find(|i| data[*i] != run::byte(*from + *i as u64))
                    {
                        return Err(format!(
                            "byte {} of the stream was read as {:#04x}; the peer sent {:#04x}",
                            *from + i as u64,
                            data[i],
                            run::byte(*from + i as u64)
                        ));
                    }
                    *from += data.len() as u64;
                    Ok(data.len() as i64)
                }
            }
        }
        "shutdown" => {
            let how = match words(c, 1)[..] {
                ["SHUT_RD"] => Shutdown::Read,
                ["SHUT_WR"] => Shutdown::Write,
                ["SHUT_RDWR"] => Shutdown::Both,
                _ => return Err("shutdown needs SHUT_RD, SHUT_WR or SHUT_RDWR".into()),
            };
            unit(host.shutdown(int(c, 0, "the socket")? as i32, how))
        }
        "close" => {
            let fd = int(c, 0, "the socket")? as i32;
            streams.written.remove(&fd);
            streams.read.remove(&fd);
            unit(host.close(fd))
        }
        "fcntl" => match words(c, 1)[..] {
            // All sockets are non-blocking; a call with two times waits.
            ["F_GETFL"] => Ok(c.result.unwrap_or(2)),
            ["F_SETFL"] => Ok(0),
            _ => return Err("fcntl knows F_GETFL and F_SETFL".into()),
        },
        "setsockopt" => {
            let fd = int(c, 0, "the socket")? as i32;
            unit(host.set_option(fd, option(c)?))
        }
        "getsockopt" => getsockopt(host, c)?,
        "poll" => poll(host, c)?,
        n => return Err(format!("{n} is no system call known here")),
    };
    Ok(result.map_or_else(Answer::Error, Answer::Value))
}

fn socket(host: &mut Host, c: &Call) -> Result<Result<i64, Errno>, String> {
    let v6 = match c.args.first() {
        Some(Arg::Any) => host.setup.local.is_ipv6(),
        Some(Arg::Words(w)) if w == &["AF_INET"] => false,
        Some(Arg::Words(w)) if w == &["AF_INET6"] => true,
        _ => return Err("socket needs ..., AF_INET or AF_INET6".into()),
    };
    if !words(c, 1).contains(&"SOCK_STREAM") {
        return Err("only SOCK_STREAM sockets are known here".into());
    }
    Ok(Ok(i64::from(host.socket(v6))))
}

fn option(c: &Call) -> Result<SockOpt, String> {
    let value = match c.args.get(3) {
        Some(Arg::List(l)) => l.first(),
        a => a,
    };
    let name = words(c, 2);
    let number = || match value {
        Some(Arg::Int(v)) => Ok(*v),
        _ => Err(format!("the value of {} is a number: [1]", name.join("|"))),
    };
    let unsigned = || {
        let v = number()?;
        u32::try_from(v).map_err(|_| format!("{v} is out of range for {}", name.join("|")))
    };
    let seconds = || unsigned().map(|v| Duration::from_secs(v.into()));
    let count = || unsigned().map(|v| v.min(255) as u8);
    Ok(match name[..] {
        ["SO_KEEPALIVE"] => SockOpt::KeepAlive(number()? != 0),
        ["SO_RCVBUF"] => SockOpt::ReceiveBuffer(unsigned()?),
        ["SO_SNDBUF"] => SockOpt::SendBuffer(unsigned()?),
        ["SO_LINGER"] => match value {
            Some(Arg::Struct(f)) => {
                let field = |n: &str| f.iter().any(|(name, v)| name == n && *v != Arg::Int(0));
                SockOpt::Linger(field("onoff") && !field("linger"))
            }
            _ => return Err("the value of SO_LINGER is {onoff=1, linger=0}".into()),
        },
        ["TCP_KEEPIDLE"] => SockOpt::KeepIdle(seconds()?),
        ["TCP_KEEPINTVL"] => SockOpt::KeepInterval(seconds()?),
        ["TCP_KEEPCNT"] => SockOpt::KeepCount(count()?),
        ["TCP_SYNCNT"] => SockOpt::SynCount(count()?),
        ["TCP_USER_TIMEOUT"] => SockOpt::UserTimeout(Duration::from_millis(unsigned()?.into())),
        ["TCP_CONGESTION"] => match value {
            Some(Arg::Str(s)) => SockOpt::Congestion(s.clone()),
            _ => return Err("the value of TCP_CONGESTION is a string".into()),
        },
        ["SO_REUSEADDR" | "SO_REUSEPORT" | "TCP_NODELAY"] => SockOpt::Harmless,
        _ => {
            return Err(format!(
                "the socket option {} is not known here",
                name.join("|")
            ));
        }
    })
}

fn getsockopt(host: &mut Host, c: &Call) -> Result<Result<i64, Errno>, String> {
    if words(c, 2)[..] != ["SO_ERROR"] {
        return Err("getsockopt knows SO_ERROR".into());
    }
    let got = match host.take_error(int(c, 0, "the socket")? as i32) {
        Ok(e) => e,
        Err(e) => return Ok(Err(e)),
    };
    let name = got.map_or("0", Errno::name);
    let same = match list(c, 3)?.first() {
        Some(Arg::Int(v)) => got.map_or(0, |e| i64::from(e.0)) == *v,
        Some(Arg::Words(w)) => w == &[name],
        Some(Arg::Any) => true,
        _ => return Err("the expected value of SO_ERROR is [0] or [ECONNREFUSED]".into()),
    };
    if !same {
        return Err(format!("SO_ERROR is {name}"));
    }
    Ok(Ok(0))
}

/// `poll([{fd=4, events=POLLIN, revents=POLLIN}], 1, 0) = 1`
fn poll(host: &mut Host, c: &Call) -> Result<Result<i64, Errno>, String> {
    let mut count = 0;
    for entry in list(c, 0)? {
        let Arg::Struct(fields) = entry else {
            return Err("poll's list is of {fd=.., events=.., revents=..}".into());
        };
        let field = |n: &str| fields.iter().find(|(name, _)| name == n).map(|(_, v)| v);
        let Some(Arg::Int(fd)) = field("fd") else {
            return Err("poll needs fd=N".into());
        };
        let names = |n: &str| match field(n) {
            Some(Arg::Words(w)) => w.clone(),
            _ => vec![],
        };
        let wanted = names("events");
        let r = match host.ready(*fd as i32) {
            Ok(r) => r,
            Err(e) => return Ok(Err(e)),
        };
        let all = [
            ("POLLIN", r.readable, false),
            ("POLLOUT", r.writable, false),
            ("POLLRDHUP", r.peer_closed, false),
            ("POLLERR", r.error, true),
            ("POLLHUP", r.hung_up, true),
        ];
        let mut got: Vec<_> = all
            .into_iter()
            .filter(|(n, is, always)| *is && (*always || wanted.iter().any(|w| w == n)))
            .map(|(n, _, _)| n.to_owned())
            .collect();
        count += i64::from(!got.is_empty());
        let mut expected = names("revents");
        got.sort();
        expected.sort();
        // A poll that waits is asked again until it has what it waits for.
        if got != expected && c.until.is_none() {
            return Err(format!("revents of {fd} are {}", got.join("|")));
        }
    }
    if count == 0 && c.until.is_some() {
        return Ok(Err(Errno::EAGAIN));
    }
    Ok(Ok(count))
}
