//! How connections open, close, probe and recover; one behaviour per test.

mod closing;
#[path = "../common/mod.rs"]
mod common;
mod opening;
mod transfer;

use std::time::Duration;

use common::wire::{ACK, FIN, Lab, RST, SYN, Seg, pattern};
use siw_tcp::{Events, Keepalive, TcpState};
use siw_tcp_sim::host_config;

fn state(lab: &Lab, host: usize, id: siw_net::ConnId) -> TcpState {
    lab.net.hosts[host]
        .tcp_info(id)
        .map_or(TcpState::Closed, |info| info.state)
}
