//! Offloads that a device requests from its port, and the log of the outcome.

use dpdk::{DriverTraits, Offloads, PortCaps};
use siw_ports::XdpLink;

use crate::config::{ChecksumPolicy, DeviceConfig, LinkSource, TsoPolicy};
use crate::device::VLAN_TAG;

/// Offloads that a device requests from its port.
///
/// # Errors
/// The configuration requires TSO, and the driver cannot segment the device's frames.
pub fn asked_offloads(config: &DeviceConfig, traits: &DriverTraits) -> Result<Offloads, String> {
    let has_port_checksums = config.checksum != ChecksumPolicy::Software;
    Ok(Offloads {
        tx_checksum: has_port_checksums,
        rx_checksum: has_port_checksums,
        tso: wants_tso(config, traits)?,
        lro: traits.peer_sends_uncut && *config.tso.get_ref() != TsoPolicy::Off,
        rx_interrupt: !traits.in_process,
        vlan_filter: config.vlan.is_some() && !traits.in_process,
        ..Offloads::USUAL
    })
}

/// Names of the offloads that a device requests, for `siwd --check`. Only a start shows which of them
/// the port has.
///
/// # Errors
/// As [`asked_offloads`].
pub fn name_asked_offloads(config: &DeviceConfig) -> Result<Vec<&'static str>, String> {
    let traits = match config.link_source() {
        LinkSource::Pair(_) => return Ok(Vec::new()),
        LinkSource::Vdev(devargs) | LinkSource::Pci(devargs) => DriverTraits::for_device(&devargs),
        LinkSource::Xdp(_) => XdpLink::driver_traits(),
    };
    Ok(asked_offloads(config, traits)?.names())
}

/// Logs the offloads that the port enabled, refused, or has unused.
pub(crate) fn log_offloads(name: &str, driver: &str, offloads: &[dpdk::OffloadState]) {
    let names = |keep: &dyn Fn(&dpdk::OffloadState) -> bool| {
        let kept: Vec<_> = offloads
            .iter()
            .filter(|row| keep(row))
            .map(|row| row.name)
            .collect();
        if kept.is_empty() {
            "none".into()
        } else {
            kept.join(" ")
        }
    };
    tracing::info!(
        device = %name,
        %driver,
        enabled = names(&|row| row.enabled),
        refused = names(&|row| row.asked && !row.enabled),
        unused = names(&|row| !row.asked && row.offered == Some(true)),
        "offloads"
    );
}

/// Logs how frames reach the worker that owns their connection.
pub(crate) fn log_steering(name: &str, queues: u16, wanted: u16, caps: &PortCaps) {
    if wanted < 2 {
        return;
    }
    let why = if queues < wanted {
        format!("the port has {queues} queues for {wanted} workers")
    } else if !caps.offloads.rss {
        "the port does not spread flows by their hash".into()
    } else if !caps.rss_key_set {
        "the port did not accept the RSS key".into()
    } else if caps.reta_size == 0 {
        "the port has no RSS table".into()
    } else {
        tracing::info!(device = %name, "the port steers frames to their workers");
        return;
    };
    tracing::info!(device = %name, "workers forward frames to each other: {why}");
}

/// Returns whether TSO is requested from the port.
///
/// # Errors
/// The configuration requires it, and the driver cannot segment the device's frames.
fn wants_tso(config: &DeviceConfig, traits: &DriverTraits) -> Result<bool, String> {
    let policy = *config.tso.get_ref();
    let software_checksum = config.checksum == ChecksumPolicy::Software;
    if software_checksum || traits.in_process || policy == TsoPolicy::Off {
        return Ok(false);
    }
    let Some(limits) = traits.software_tso else {
        return Ok(true);
    };
    let vlan_tag = if config.vlan.is_some() { VLAN_TAG } else { 0 };
    let max_mtu = limits.max_mtu - limits.header_room - vlan_tag;
    let has_ipv6 = config
        .addresses
        .get_ref()
        .iter()
        .any(|cidr| cidr.addr.is_ipv6());
    let wrong_family = limits.ipv4_only && has_ipv6;
    match policy {
        TsoPolicy::On if wrong_family => Err(
            "tso = \"on\": this link cuts IPv4 segments only; leave the IPv6 addresses out, or use \"auto\""
                .into(),
        ),
        TsoPolicy::On if *config.mtu.get_ref() > max_mtu => Err(format!(
            "tso = \"on\": this link cuts segments at an mtu of at most {max_mtu}; use that, or \"auto\""
        )),
        _ => Ok(!wrong_family && *config.mtu.get_ref() <= max_mtu),
    }
}
