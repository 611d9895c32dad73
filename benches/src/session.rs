//! Connects the two ends, in one process or in two. Each connection's private data
//! carries what the other side has to know, as JSON: the plan, and where the memory
//! of its queue pair is.

use crate::end::{End, Peer, Role, device, failed, take};
use crate::plan::Plan;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use siw::{
    CmChannel, CmEvent, CmListener, ConnectOptions, ConnectionInfo, ConnectionRequest, Context,
    DeviceInfo,
};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Of the private data; another number is another siw-perf.
const VERSION: u32 = 1;
/// For one connection.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 64;

/// What a connecting end sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    siw_perf: u32,
    plan: Plan,
    qp: u32,
    peer: Peer,
}

/// What an accepting end answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Answer {
    siw_perf: u32,
    peer: Peer,
}

fn decode<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<T, String> {
    // MPA may pad what it carries.
    let end = bytes.iter().rposition(|b| *b != 0).map_or(0, |i| i + 1);
    serde_json::from_slice(&bytes[..end])
        .map_err(|e| format!("the peer is no siw-perf of this version ({e})"))
}

fn encode<T: Serialize>(what: &T) -> Vec<u8> {
    serde_json::to_vec(what).unwrap_or_default()
}

fn hello(end: &End, qp: u32) -> Vec<u8> {
    encode(&Hello {
        siw_perf: VERSION,
        plan: end.plan,
        qp,
        peer: end.about(qp),
    })
}

fn answer(end: &End, qp: u32) -> Vec<u8> {
    encode(&Answer {
        siw_perf: VERSION,
        peer: end.about(qp),
    })
}

fn options<'a>(end: &End, device: Option<u32>, private_data: &'a [u8]) -> ConnectOptions<'a> {
    let limits = end.ctx.limits();
    let reads = end.plan.depth.clamp(16, 128);
    ConnectOptions {
        device,
        private_data,
        ord: reads.min(limits.max_ord),
        ird: reads.min(limits.max_ird),
        timeout: Some(TIMEOUT),
        ..ConnectOptions::default()
    }
}

/// Waits until one of the channels has an event.
fn wait(channels: &[&CmChannel], deadline: Instant) -> Result<(), String> {
    let left = deadline.saturating_duration_since(Instant::now());
    let ts = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    let mut fds: Vec<_> = channels
        .iter()
        .map(|c| PollFd::new(*c, PollFlags::IN))
        .collect();
    match poll(&mut fds, Some(&ts)) {
        Ok(0) => Err("no connection within 10 s; is the peer there, and the same link?".into()),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.to_string()),
    }
}

fn established(event: CmEvent) -> Result<ConnectionInfo, String> {
    let (what, info) = match event {
        CmEvent::Established(info) => return Ok(info),
        CmEvent::Rejected(i) => ("the peer rejected the connection", i),
        CmEvent::Unreachable(i) => ("the peer cannot be reached", i),
        CmEvent::ConnectError(i) => ("the connection failed", i),
        CmEvent::Disconnected(i) => ("the connection broke", i),
        e => return Err(format!("unexpected event {e:?}")),
    };
    let why = String::from_utf8_lossy(&info.private_data);
    let said = why.trim_end_matches('\0');
    Err([what, &info.reason, said]
        .iter()
        .filter(|s| !s.is_empty())
        .copied()
        .collect::<Vec<_>>()
        .join(": "))
}

/// Connects all QPs of two ends in this process; whether they use CRCs.
pub fn both(a: &mut End, from: &DeviceInfo, b: &mut End, to: &DeviceInfo) -> Result<bool, String> {
    let ip = *to
        .ips
        .iter()
        .find(|ip| from.ips.iter().any(|f| f.is_ipv4() == ip.is_ipv4()))
        .ok_or_else(|| format!("device {} has no address; give it one", to.name))?;
    let listener = CmListener::new(
        &b.channel,
        Some(to.index),
        SocketAddr::new(ip, 0),
        BACKLOG,
        0,
    )
    .map_err(failed("listen"))?;
    let addr = listener.local_addr();
    let mut crc = false;
    for qp in 0..a.plan.qps {
        let say = hello(a, qp);
        a.qps[qp as usize]
            .connect(&a.channel, addr, &options(a, Some(from.index), &say))
            .map_err(|e| format!("connect {} to {}: {e}", from.name, to.name))?;
        let deadline = Instant::now() + TIMEOUT;
        let (mut ours, mut theirs) = (None, None);
        while ours.is_none() || theirs.is_none() {
            wait(&[&a.channel, &b.channel], deadline)?;
            match take(&b.channel)? {
                Some(CmEvent::ConnectRequest(r)) => {
                    let said = answer(b, qp);
                    r.accept(&b.qps[qp as usize], None, &options(b, None, &said))
                        .map_err(failed("accept"))?;
                }
                Some(e) => theirs = Some(established(e)?),
                None => {}
            }
            if let Some(e) = take(&a.channel)? {
                ours = Some(established(e)?);
            }
        }
        crc = ours.is_some_and(|i| i.crc);
        let (pa, pb) = (a.about(qp), b.about(qp));
        a.peers.push(pb);
        b.peers.push(pa);
    }
    Ok(crc)
}

/// Connects all QPs of an end to a listening process. Whether they use CRCs, and
/// the local address.
pub fn connect(
    end: &mut End,
    from: Option<&DeviceInfo>,
    to: SocketAddr,
) -> Result<ConnectionInfo, String> {
    let mut last = None;
    for qp in 0..end.plan.qps {
        let say = hello(end, qp);
        end.qps[qp as usize]
            .connect(&end.channel, to, &options(end, from.map(|d| d.index), &say))
            .map_err(|e| format!("connect to {to}: {e}"))?;
        let deadline = Instant::now() + TIMEOUT + Duration::from_secs(2);
        let event = loop {
            wait(&[&end.channel], deadline)?;
            if let Some(e) = take(&end.channel)? {
                break e;
            }
        };
        let info = established(event).map_err(|e| format!("{to}: {e}"))?;
        let answer: Answer = decode(&info.private_data)?;
        end.peers.push(answer.peer);
        last = Some(info);
    }
    last.ok_or_else(|| "no queue pair".into())
}

/// Waits for a process that connects, and accepts all its QPs.
pub fn listen(ctx: &Context, addr: SocketAddr) -> Result<End, String> {
    let channel = CmChannel::new(ctx).map_err(failed("connection channel"))?;
    let listener = CmListener::new(&channel, None, addr, BACKLOG, 0).map_err(failed("listen"))?;
    eprintln!("siw-perf: waiting at {}", listener.local_addr());
    let mut end: Option<End> = None;
    let mut deadline = None;
    loop {
        let event = match deadline {
            None => channel.get_event(None).map_err(|e| e.to_string())?,
            Some(at) => {
                wait(&[&channel], at)?;
                match take(&channel)? {
                    Some(e) => e,
                    None => continue,
                }
            }
        };
        match event {
            CmEvent::ConnectRequest(request) => {
                // A stranger is told, and does not end the waiting.
                if let Some(e) = take_request(ctx, request, &mut end)? {
                    eprintln!("siw-perf: refused a connection: {e}");
                    continue;
                }
                deadline = Some(Instant::now() + TIMEOUT);
            }
            CmEvent::RequestCancelled { .. } => {}
            e => {
                established(e)?;
                // Accepted in order; ESTABLISHED of the last one ends it.
                if let Some(e) = end.as_mut() {
                    e.ready += 1;
                    if e.ready == e.plan.qps {
                        break;
                    }
                }
            }
        }
    }
    let mut end = end.ok_or("no connection")?;
    end.channel = channel;
    Ok(end)
}

/// Accepts one request. The reason when it was refused instead.
fn take_request(
    ctx: &Context,
    request: ConnectionRequest,
    end: &mut Option<End>,
) -> Result<Option<String>, String> {
    let refuse = |request: ConnectionRequest, why: String| {
        let said = why.as_bytes();
        request
            .reject(&said[..said.len().min(256)])
            .map_err(failed("reject"))?;
        Ok(Some(why))
    };
    let hello: Hello = match decode(&request.connection_info().private_data) {
        Ok(h) => h,
        Err(e) => return refuse(request, e),
    };
    if hello.siw_perf != VERSION {
        return refuse(request, "the peer is another version of siw-perf".into());
    }
    let end = match end {
        Some(end) => end,
        None => {
            let made = hello
                .plan
                .check()
                .and_then(|()| End::new(ctx, &hello.plan, Role::Target));
            match made {
                Ok(e) => end.insert(e),
                Err(e) => return refuse(request, e),
            }
        }
    };
    if hello.plan != end.plan || hello.qp as usize != end.peers.len() {
        return refuse(request, "another measurement is running".into());
    }
    end.peers.push(hello.peer);
    let said = answer(end, hello.qp);
    request
        .accept(
            &end.qps[hello.qp as usize],
            None,
            &options(end, None, &said),
        )
        .map_err(failed("accept"))?;
    Ok(None)
}

/// The device that a connection uses: the named one, or the one with its address.
pub fn local_device(
    ctx: &Context,
    name: Option<&str>,
    info: &ConnectionInfo,
) -> Result<Option<DeviceInfo>, String> {
    if let Some(name) = name {
        return device(ctx, name).map(Some);
    }
    let devices = ctx.query_devices().map_err(|e| e.to_string())?;
    Ok(info
        .local
        .and_then(|l| devices.into_iter().find(|d| d.ips.contains(&l.ip()))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::example;

    fn example_hello() -> Hello {
        Hello {
            siw_perf: VERSION,
            plan: example(),
            qp: 3,
            peer: Peer {
                addr: u64::MAX,
                rkey: u32::MAX,
                control: u64::MAX,
                control_rkey: u32::MAX,
            },
        }
    }

    #[test]
    fn parameters_survive_the_private_data_and_its_padding() {
        let mut bytes = encode(&example_hello());
        assert!(bytes.len() <= 512, "{} bytes", bytes.len());
        bytes.extend([0; 3]);
        assert_eq!(decode::<Hello>(&bytes), Ok(example_hello()));
    }

    #[test]
    fn garbage_in_the_private_data_is_refused() {
        for garbage in [&b""[..], b"\0\0", b"{}", b"{\"siw_perf\":1}", &[255; 512]] {
            let e = decode::<Hello>(garbage).unwrap_err();
            assert!(e.contains("no siw-perf"), "{e}");
        }
    }
}
