//! The TAP interface, the kernel's end of the exception path. It is created with the NIC's Ethernet
//! address and MTU and the configured IP addresses, and brought up; the kernel removes it when it
//! is dropped or the process ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::HostSettings;
use crate::netlink::RouteSocket;

/// The device node of tun(4).
const TUN_NODE: &str = "/dev/net/tun";

/// Failure to create the interface.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The kernel has no TAP support, or this container has no access to it.
    #[error(
        "host_interface needs {TUN_NODE}, which is missing: load the module (modprobe tun), or give it to the container (--device {TUN_NODE})"
    )]
    NoTun,
    /// The process may not create interfaces.
    #[error(
        "interface {0:?} cannot be created without CAP_NET_ADMIN: run siwd as root, or add the capability to its unit (AmbientCapabilities=) or container (--cap-add NET_ADMIN)"
    )]
    NotPermitted(String),
    /// An interface of this name exists.
    #[error(
        "interface {0:?} exists already: host_interface names one that siwd creates and removes; choose another name, or remove it (ip link delete {0})"
    )]
    NameTaken(String),
    /// Another system call failed.
    #[error("interface {name:?}: {what}: {source}")]
    Os {
        /// The interface.
        name: String,
        /// Attempted operation.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
}

/// Checks that an interface of this name could be created, without creating one.
///
/// # Errors
/// The obstacle.
pub fn check_tap(name: &str) -> Result<(), TapError> {
    if !Path::new(TUN_NODE).exists() {
        return Err(TapError::NoTun);
    }
    if if_nametoindex(name).is_ok() {
        return Err(TapError::NameTaken(name.to_owned()));
    }
    if dpdk::Capability::NetAdmin.is_effective() == Some(false) {
        return Err(TapError::NotPermitted(name.to_owned()));
    }
    Ok(())
}

/// A TAP interface of this process.
pub struct TapInterface {
    device: SyncDevice,
    name: String,
    /// Interface index, for netlink.
    index: u32,
}

impl TapInterface {
    /// Creates the interface and brings it up.
    ///
    /// # Errors
    /// The obstacle.
    pub fn create(
        settings: &HostSettings,
        mac: [u8; 6],
        mtu: u16,
    ) -> Result<TapInterface, TapError> {
        let name = &settings.interface;
        check_tap(name)?;
        let failed = |what| {
            move |source: io::Error| TapError::Os {
                name: name.clone(),
                what,
                source,
            }
        };
        let device = DeviceBuilder::new()
            .name(name.as_str())
            .layer(Layer::L2)
            .enable(false)
            .build_sync()
            .map_err(|error| match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EPERM | Errno::EACCES) => TapError::NotPermitted(name.clone()),
                // An interface of another kind (EINVAL), or of another process (EBUSY).
                Some(Errno::EBUSY | Errno::EINVAL) => TapError::NameTaken(name.clone()),
                _ => failed("it cannot be created")(error),
            })?;
        device
            .set_nonblocking(true)
            .map_err(failed("its descriptor cannot be made non-blocking"))?;
        let index = if_nametoindex(name.as_str())
            .map_err(io::Error::from)
            .map_err(failed("it cannot be found"))?;
        let mut netlink = RouteSocket::open().map_err(failed("no netlink socket"))?;
        netlink
            .set_mac_and_mtu(index, mac, mtu)
            .map_err(failed("its Ethernet address and MTU cannot be set"))?;
        for cidr in &settings.addresses {
            netlink
                .add_address(index, *cidr)
                .map_err(failed("an address of host_addresses cannot be added"))?;
        }
        netlink
            .set_up(index)
            .map_err(failed("it cannot be set up"))?;
        Ok(TapInterface {
            device,
            name: name.clone(),
            index,
        })
    }

    /// Name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Kernel index of the interface.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Reads a frame sent by the kernel; `None` if there is none. `buffer` must have room for the
    /// longest frame.
    ///
    /// # Errors
    /// The interface was deleted.
    pub(super) fn read_frame(&self, buffer: &mut [u8]) -> Result<Option<usize>, Errno> {
        match nix::unistd::read(&self.device, buffer) {
            Ok(len) => Ok(Some(len)),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Passes a frame to the kernel. Returns false if the kernel refuses it, as while the interface
    /// is down.
    pub(super) fn write_frame(&self, frame: &[u8]) -> bool {
        nix::unistd::write(&self.device, frame).is_ok()
    }
}

impl AsFd for TapInterface {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}
