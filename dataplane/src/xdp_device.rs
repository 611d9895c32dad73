//! Devices on interfaces that stay with the kernel (`af_xdp`): the part of the interface's traffic
//! that is siwd's. `device.rs` opens them.
//!
//! Addresses that only siwd has are claimed whole, at the start. With `xdp_share` the kernel has the
//! addresses, too, and TCP ports are claimed one by one: ports for connects at the start, ports of
//! listeners as they come and go ([`siw_host::ports`]).

use std::net::IpAddr;
use std::sync::Arc;

use siw_host::ports::{HostPorts, PortSteering};
use siw_ports::{Claim, ClaimKind, CopyMode, Port, XdpLink};

use crate::config::{DeviceConfig, XdpCopySetting};

/// Parameters of the device's port.
pub(crate) fn xdp_link(config: &DeviceConfig, interface: String) -> XdpLink {
    let addresses: Vec<IpAddr> = own_addresses(config).collect();
    let whole = |address: &IpAddr| Claim {
        address: *address,
        port: 0,
    };
    let (kind, claims, shared_addresses) = match config.xdp_share {
        false => {
            let claims = addresses.iter().map(whole).collect();
            (ClaimKind::Addresses, claims, Vec::new())
        }
        true => (ClaimKind::Ports, Vec::new(), addresses),
    };
    XdpLink {
        interface,
        kind,
        claims,
        shared_addresses,
        vlan: config.vlan.as_ref().map(|vlan| *vlan.get_ref()),
        copy_mode: match config.xdp_copy {
            XdpCopySetting::Auto => CopyMode::Auto,
            XdpCopySetting::Copy => CopyMode::Copy,
            XdpCopySetting::ZeroCopy => CopyMode::ZeroCopy,
        },
    }
}

/// Divides the TCP ports of the device's addresses with the kernel, if it shares them.
///
/// # Errors
/// A text that names the port that cannot be claimed.
pub(crate) fn share_ports(
    config: &DeviceConfig,
    port: &Port,
) -> Result<Option<Arc<HostPorts>>, String> {
    if !config.xdp_share {
        return Ok(None);
    }
    let range = config.host_ports.get_ref().0.clone();
    let steering = Arc::new(XdpPortSteering { port: port.share() });
    let shared = HostPorts::claim_range(own_addresses(config).collect(), range)
        .and_then(|ports| ports.steer_by(steering));
    match shared {
        Ok(ports) => Ok(Some(Arc::new(ports))),
        Err(error) => Err(format!(
            "device {}: host_ports: {error}",
            config.name.get_ref().0
        )),
    }
}

fn own_addresses(config: &DeviceConfig) -> impl Iterator<Item = IpAddr> + '_ {
    config.addresses.get_ref().iter().map(|cidr| cidr.addr)
}

/// Passes siwd's TCP ports to the XDP program of a port.
struct XdpPortSteering {
    port: Port,
}

impl std::fmt::Debug for XdpPortSteering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "XdpPortSteering({})", self.port.name())
    }
}

impl PortSteering for XdpPortSteering {
    fn add_port(&self, address: IpAddr, port: u16) -> Result<(), String> {
        let claim = Claim { address, port };
        self.port
            .add_claim(claim)
            .map_err(|error| error.to_string())
    }

    fn remove_port(&self, address: IpAddr, port: u16) {
        if let Err(error) = self.port.remove_claim(Claim { address, port }) {
            tracing::error!(
                "TCP port {port} at {address} could not be returned to the kernel: {error}"
            );
        }
    }
}
