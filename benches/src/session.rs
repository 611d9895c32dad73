//! Connects the two ends, in one process or in two. Each connection's private data carries the
//! parameters for the other side as JSON: the plan, and the location of its queue pair's memory.

use crate::end::{PeerMemory, Role, TransferEnd, failed_call, find_device, take_event};
use crate::plan::MeasurementPlan;
use anyhow::{anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use siw::{
    CmChannel, CmEvent, CmListener, ConnectOptions, ConnectionInfo, ConnectionRequest, Context,
    DeviceInfo, ListenOptions, Markers,
};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Format version of the private data; both ends must use the same.
const VERSION: u32 = 2;
/// Time limit of one connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum connections to one address and port: each needs a port of its own at the initiator.
const CONNECTIONS_PER_LISTENER: u32 = 10_000;
/// Maximum connections waiting to be accepted.
const BACKLOG: u32 = 64;

/// Private data of the connecting end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct ConnectParameters {
    siw_perf: u32,
    plan: MeasurementPlan,
    qp: u32,
    peer: PeerMemory,
}

/// Private data of the accepting end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct AcceptParameters {
    siw_perf: u32,
    peer: PeerMemory,
}

fn decode_parameters<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> anyhow::Result<T> {
    // MPA may pad the private data with zeros.
    let end = bytes
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |last| last + 1);
    serde_json::from_slice(&bytes[..end])
        .map_err(|error| anyhow!("the peer is not a siw-perf of this version ({error})"))
}

fn encode_parameters<T: Serialize>(what: &T) -> Vec<u8> {
    serde_json::to_vec(what).unwrap_or_default()
}

fn encode_connect_parameters(end: &TransferEnd, qp: u32) -> Vec<u8> {
    encode_parameters(&ConnectParameters {
        siw_perf: VERSION,
        plan: end.plan,
        qp,
        peer: end.local_memory(qp),
    })
}

fn encode_accept_parameters(end: &TransferEnd, qp: u32) -> Vec<u8> {
    encode_parameters(&AcceptParameters {
        siw_perf: VERSION,
        peer: end.local_memory(qp),
    })
}

fn connect_options<'a>(
    end: &TransferEnd,
    device: Option<u32>,
    private_data: &'a [u8],
) -> ConnectOptions<'a> {
    let limits = end.ctx.limits();
    let reads = end.plan.depth.clamp(16, 128);
    ConnectOptions {
        device,
        private_data,
        ord: reads.min(limits.max_ord),
        ird: reads.min(limits.max_ird),
        crc: end.plan.crc,
        timeout: Some(CONNECT_TIMEOUT),
        ..ConnectOptions::default()
    }
}

/// Options of a listener; `None` selects the devices' configuration.
pub fn listen_options(crc: Option<bool>, markers: Option<bool>) -> ListenOptions {
    ListenOptions {
        backlog: BACKLOG,
        crc,
        markers: markers.map(|asked| match asked {
            true => Markers::Request,
            false => Markers::Accept,
        }),
        ..ListenOptions::default()
    }
}

/// Waits until one of the channels has an event.
fn wait_for_event(channels: &[&CmChannel], deadline: Instant) -> anyhow::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let ts = Timespec {
        tv_sec: left.as_secs() as i64,
        tv_nsec: left.subsec_nanos().into(),
    };
    let mut fds: Vec<_> = channels
        .iter()
        .map(|channel| PollFd::new(*channel, PollFlags::IN))
        .collect();
    match poll(&mut fds, Some(&ts)) {
        Ok(0) => Err(anyhow!(
            "no connection within 10 s; is the peer running, and on the same link?"
        )),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn expect_established(event: CmEvent) -> anyhow::Result<ConnectionInfo> {
    let (what, info) = match event {
        CmEvent::Established(info) => return Ok(info),
        CmEvent::Rejected(info) => ("the peer rejected the connection", info),
        CmEvent::Unreachable(info) => ("the peer cannot be reached", info),
        CmEvent::ConnectError(info) => ("the connection failed", info),
        CmEvent::Disconnected(info) => ("the connection broke", info),
        event => bail!("unexpected event {event:?}"),
    };
    let reply = String::from_utf8_lossy(&info.private_data);
    let refusal = reply.trim_end_matches('\0');
    let parts: Vec<_> = [what, &info.reason, refusal]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect();
    Err(anyhow!(parts.join(": ")))
}

/// Connects all QPs of two ends in this process. Returns true if they use CRCs.
pub fn connect_locally(
    initiator: &mut TransferEnd,
    from: &DeviceInfo,
    target: &mut TransferEnd,
    to: &DeviceInfo,
) -> anyhow::Result<bool> {
    let ip = *to
        .ips
        .iter()
        .find(|ip| {
            from.ips
                .iter()
                .any(|own_ip| own_ip.is_ipv4() == ip.is_ipv4())
        })
        .ok_or_else(|| anyhow!("device {} has no address; give it one", to.name))?;
    let listen = || {
        let any_port = SocketAddr::new(ip, 0);
        let options = ListenOptions {
            device: Some(to.index),
            ..listen_options(target.plan.crc, target.plan.markers)
        };
        CmListener::new_with_options(&target.channel, any_port, &options)
            .map_err(failed_call("listen"))
    };
    let mut listener = listen()?;
    let mut crc = false;
    for qp in 0..initiator.plan.qps {
        if qp > 0 && qp.is_multiple_of(CONNECTIONS_PER_LISTENER) {
            listener = listen()?;
        }
        let addr = listener.local_addr();
        let parameters = encode_connect_parameters(initiator, qp);
        initiator.qps[qp as usize]
            .connect(
                &initiator.channel,
                addr,
                &connect_options(initiator, Some(from.index), &parameters),
            )
            .map_err(|error| anyhow!("connect {} to {}: {error}", from.name, to.name))?;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let (mut ours, mut theirs) = (None, None);
        while ours.is_none() || theirs.is_none() {
            wait_for_event(&[&initiator.channel, &target.channel], deadline)?;
            match take_event(&target.channel)? {
                Some(CmEvent::ConnectRequest(request)) => {
                    let parameters = encode_accept_parameters(target, qp);
                    request
                        .accept(
                            &target.qps[qp as usize],
                            None,
                            &connect_options(target, None, &parameters),
                        )
                        .map_err(failed_call("accept"))?;
                }
                Some(event) => theirs = Some(expect_established(event)?),
                None => {}
            }
            if let Some(event) = take_event(&initiator.channel)? {
                ours = Some(expect_established(event)?);
            }
        }
        crc = ours.is_some_and(|info| info.crc);
        initiator.peers.push(target.local_memory(qp));
        target.peers.push(initiator.local_memory(qp));
    }
    Ok(crc)
}

/// Connects all QPs of an end to a listening process. Returns whether the last connection uses
/// CRCs, and its local address.
pub fn connect_to_peer(
    end: &mut TransferEnd,
    from: Option<&DeviceInfo>,
    to: SocketAddr,
) -> anyhow::Result<ConnectionInfo> {
    let mut last = None;
    for qp in 0..end.plan.qps {
        let parameters = encode_connect_parameters(end, qp);
        end.qps[qp as usize]
            .connect(
                &end.channel,
                to,
                &connect_options(end, from.map(|device| device.index), &parameters),
            )
            .map_err(|error| anyhow!("connect to {to}: {error}"))?;
        let deadline = Instant::now() + CONNECT_TIMEOUT + Duration::from_secs(2);
        let event = loop {
            wait_for_event(&[&end.channel], deadline)?;
            if let Some(event) = take_event(&end.channel)? {
                break event;
            }
        };
        let info = expect_established(event).map_err(|error| anyhow!("{to}: {error}"))?;
        let accepted: AcceptParameters = decode_parameters(&info.private_data)?;
        end.peers.push(accepted.peer);
        last = Some(info);
    }
    last.ok_or_else(|| anyhow!("no queue pair"))
}

/// Waits for a connecting process, and accepts all its QPs.
pub fn accept_all(
    ctx: &Context,
    addr: SocketAddr,
    options: &ListenOptions,
) -> anyhow::Result<TransferEnd> {
    let channel = CmChannel::new(ctx).map_err(failed_call("connection channel"))?;
    let listener =
        CmListener::new_with_options(&channel, addr, options).map_err(failed_call("listen"))?;
    eprintln!("siw-perf: waiting at {}", listener.local_addr());
    let mut end: Option<TransferEnd> = None;
    let mut deadline = None;
    loop {
        let event = match deadline {
            None => channel.get_event(None)?,
            Some(at) => {
                wait_for_event(&[&channel], at)?;
                match take_event(&channel)? {
                    Some(event) => event,
                    None => continue,
                }
            }
        };
        match event {
            CmEvent::ConnectRequest(request) => {
                // A refused peer receives the reason; waiting continues for others.
                if let Some(reason) = accept_or_reject(ctx, request, &mut end)? {
                    eprintln!("siw-perf: refused a connection: {reason}");
                    continue;
                }
                deadline = Some(Instant::now() + CONNECT_TIMEOUT);
            }
            CmEvent::RequestCancelled { .. } => {}
            event => {
                expect_established(event)?;
                // Connections are accepted in order, so the last one established completes the set.
                if let Some(end) = end.as_mut() {
                    end.ready += 1;
                    if end.ready == end.plan.qps {
                        break;
                    }
                }
            }
        }
    }
    let mut end = end.ok_or_else(|| anyhow!("no connection"))?;
    end.channel = channel;
    Ok(end)
}

/// Accepts or rejects one request. Returns the reason if it was rejected.
fn accept_or_reject(
    ctx: &Context,
    request: ConnectionRequest,
    end: &mut Option<TransferEnd>,
) -> anyhow::Result<Option<String>> {
    let refuse = |request: ConnectionRequest, reason: String| {
        let text = reason.as_bytes();
        request
            .reject(&text[..text.len().min(256)])
            .map_err(failed_call("reject"))?;
        Ok(Some(reason))
    };
    let parameters: ConnectParameters =
        match decode_parameters(&request.connection_info().private_data) {
            Ok(parameters) => parameters,
            Err(error) => return refuse(request, error.to_string()),
        };
    if parameters.siw_perf != VERSION {
        return refuse(request, "the peer is another version of siw-perf".into());
    }
    let end = match end {
        Some(end) => end,
        None => {
            let made = parameters
                .plan
                .check_limits()
                .and_then(|()| TransferEnd::new(ctx, &parameters.plan, Role::Target));
            match made {
                Ok(new) => end.insert(new),
                Err(error) => return refuse(request, error.to_string()),
            }
        }
    };
    if parameters.plan != end.plan || parameters.qp as usize != end.peers.len() {
        return refuse(request, "another measurement is running".into());
    }
    end.peers.push(parameters.peer);
    let reply = encode_accept_parameters(end, parameters.qp);
    request
        .accept(
            &end.qps[parameters.qp as usize],
            None,
            &connect_options(end, None, &reply),
        )
        .map_err(failed_call("accept"))?;
    Ok(None)
}

/// The device that a connection uses: the named one, or the one with the local address.
pub fn local_device(
    ctx: &Context,
    name: Option<&str>,
    info: &ConnectionInfo,
) -> anyhow::Result<Option<DeviceInfo>> {
    if let Some(name) = name {
        return find_device(ctx, name).map(Some);
    }
    let devices = ctx.query_devices()?;
    Ok(info.local.and_then(|local| {
        devices
            .into_iter()
            .find(|device| device.ips.contains(&local.ip()))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::example;

    fn example_parameters() -> ConnectParameters {
        ConnectParameters {
            siw_perf: VERSION,
            plan: example(),
            qp: 3,
            peer: PeerMemory {
                addr: u64::MAX,
                rkey: u32::MAX,
                control: u64::MAX,
                control_rkey: u32::MAX,
            },
        }
    }

    #[test]
    fn parameters_survive_the_private_data_and_its_padding() {
        let mut bytes = encode_parameters(&example_parameters());
        assert!(bytes.len() <= 512, "{} bytes", bytes.len());
        bytes.extend([0; 3]);
        assert_eq!(
            decode_parameters::<ConnectParameters>(&bytes).unwrap(),
            example_parameters()
        );
    }

    #[test]
    fn garbage_in_the_private_data_is_refused() {
        for garbage in [&b""[..], b"\0\0", b"{}", b"{\"siw_perf\":1}", &[255; 512]] {
            let e = decode_parameters::<ConnectParameters>(garbage)
                .unwrap_err()
                .to_string();
            assert!(e.contains("not a siw-perf"), "{e}");
        }
    }
}
