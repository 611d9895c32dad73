//! Address resolution and binding before a connection exists: the device that leads to a
//! destination, and reserved ports (rdma_resolve_addr(3), rdma_bind_addr(3)).

use crate::context::ClientInner;
use crate::{Context, Error};
use siw_shm::control::{ANY_DEVICE, Addr, BIND_REUSE, BIND_V6_ONLY, Bind, Resolve, Unlisten};
use std::net::SocketAddr;
use std::sync::Arc;

/// Result of resolving a destination address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResolvedAddress {
    /// Device index.
    pub device: u32,
    /// The source address, with the requested port.
    pub local: SocketAddr,
}

/// Options for binding an address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BindOptions {
    /// Device index; None for all devices that the address fits.
    pub device: Option<u32>,
    /// Other bindings with this flag may share the port, until one of them listens.
    pub reuse: bool,
    /// `::` stands for IPv6 alone, not for IPv4 as well.
    pub v6_only: bool,
}

impl Context {
    /// Finds the device that leads to `dst`, and the source address of connections to it (`src`, if
    /// that names an address). The scope of a link-local address is the number of a device's
    /// interface. Fails with EHOSTUNREACH without a route, with EADDRNOTAVAIL when no device has
    /// `src`, with EINVAL for a link-local address without a scope if several devices have such
    /// addresses, and with ENODEV for the scope of no device.
    pub fn resolve_address(
        &self,
        dst: SocketAddr,
        src: Option<SocketAddr>,
        device: Option<u32>,
    ) -> Result<ResolvedAddress, Error> {
        let (reply, _) = self.0.call_daemon(&Resolve {
            device: device.unwrap_or(ANY_DEVICE),
            reserved: 0,
            dst: dst.into(),
            src: src.map_or(Addr::NONE, Addr::from),
        })?;
        let local = reply.local.to_socket_addr();
        Ok(ResolvedAddress {
            device: reply.device,
            local: local.ok_or(Error::Invalid("siwd returned no source address"))?,
        })
    }
}

/// A reserved address and port, released when dropped.
pub struct CmBinding {
    ctx: Arc<ClientInner>,
    id: u32,
    addr: SocketAddr,
}

impl CmBinding {
    /// Binds `addr`; for port 0 the daemon chooses a port.
    pub fn new(
        context: &Context,
        addr: SocketAddr,
        options: &BindOptions,
    ) -> Result<CmBinding, Error> {
        let flag = |on, bit| if on { bit } else { 0 };
        let (reply, _) = context.0.call_daemon(&Bind {
            device: options.device.unwrap_or(ANY_DEVICE),
            flags: flag(options.reuse, BIND_REUSE) | flag(options.v6_only, BIND_V6_ONLY),
            addr: addr.into(),
        })?;
        Ok(CmBinding {
            ctx: context.0.clone(),
            id: reply.listener,
            addr: reply.addr.to_socket_addr().unwrap_or(addr),
        })
    }

    /// Bound address, with the port in use.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Releases the address, and waits until others can bind it.
    pub fn close(self) -> Result<(), Error> {
        let context = self.ctx.clone();
        drop(self);
        context.confirm_posted()
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    pub(crate) fn ctx(&self) -> &ClientInner {
        &self.ctx
    }

    /// Gives up ownership: a listener has taken over the binding.
    pub(crate) fn forget(mut self) {
        self.id = 0;
    }
}

impl Drop for CmBinding {
    fn drop(&mut self) {
        if self.id != 0 {
            self.ctx.free_object(&Unlisten {
                listener: self.id,
                flags: 0,
            });
        }
    }
}
