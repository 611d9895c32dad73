//! Defects found in other TCP stacks, each with a test that this stack does not have it: smoltcp and its
//! successor xarxa (with the number in xarxa's audit), TAS, libxlio, Demikernel, F-Stack, mTCP. The comment
//! on a test names the stack.

mod addresses;
mod closing;
#[path = "../common/mod.rs"]
mod common;
mod cost;
#[path = "../common/cpu_time.rs"]
mod cpu_time;
mod loss;
mod windows;

use std::time::Duration;

use common::wire::{ACK, FIN, Lab, PSH, RST, SYN, Seg, icmp_error, pattern};
use common::{Transfer, configs, micros};
use siw_net::{ConnId, FrameInfo, IpCidr, NeighbourConfig, RxChecksum, VecBuf};
use siw_tcp::{Events, Stack, StackConfig, TcpState, TsoLimits};
use siw_tcp_sim::{Impairment, host_config};

const MSS: usize = 1448;
const INFO: FrameInfo = FrameInfo {
    checksum: RxChecksum::Unknown,
    rss_hash: 0,
};

fn with(apply: impl Fn(&mut StackConfig)) -> Lab {
    let mut configs = [host_config(0), host_config(1)];
    configs.iter_mut().for_each(apply);
    Lab::with(configs)
}

/// Delivers a segment of the other host to `host` now.
fn give(lab: &mut Lab, host: usize, segment: &Seg) {
    let now = lab.net.now;
    lab.net.hosts[host].receive_burst(now, std::iter::once((segment.frame().into(), INFO)));
}

fn push(lab: &mut Lab, host: usize, id: ConnId, segments: usize) -> Vec<u8> {
    let data = pattern(segments * MSS);
    for chunk in data.chunks(MSS) {
        lab.net.hosts[host]
            .push_record(id, chunk.len() as u32, chunk.to_vec(), false)
            .unwrap();
    }
    lab.net.flush(host, id);
    data
}

fn state(lab: &Lab, host: usize, id: ConnId) -> TcpState {
    lab.net.hosts[host].tcp_info(id).unwrap().state
}

/// Returns the segments that `host` sent after the first `from` frames.
fn since(lab: &Lab, host: usize, from: usize) -> Vec<Seg> {
    let seen = lab.seen.borrow();
    seen[from..]
        .iter()
        .filter(|segment| segment.from == host)
        .cloned()
        .collect()
}

fn seen(lab: &Lab) -> usize {
    lab.seen.borrow().len()
}
