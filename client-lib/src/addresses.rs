//! Address resolution and binding before a connection exists: the device that leads to a
//! destination, and reserved ports (rdma_resolve_addr(3), rdma_bind_addr(3)).

use crate::context::ClientInner;
use crate::service::check_feature;
use crate::{CmChannel, Context, Error};
use siw_shm::control::{
    ANY_DEVICE, Addr, BIND_DATAGRAMS, BIND_REUSE, BIND_V6_ONLY, Bind, EndResolution,
    FEATURE_RESOLUTION, Resolve, StartResolution, Unlisten,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

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
    /// The port is one of datagram services (RDMA_PS_UDP), for a listener that gets
    /// [`ServiceRequest`](crate::ServiceRequest)s.
    pub datagrams: bool,
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

/// A search for the neighbour by which an address is reached (rdma_resolve_addr(3)), ended when dropped.
/// Its outcome is an event of [`CmChannel::get_rdma_cm_event`](crate::CmChannel::get_rdma_cm_event).
pub struct AddressResolution {
    ctx: Arc<ClientInner>,
    id: u32,
}

impl AddressResolution {
    /// Starts to resolve `dst` from an address of a device, as [`Context::resolve_address`] found them.
    /// For port 0 of the source the daemon draws one for a later connect to `dst`. `cookie` is returned
    /// in the event. None: the daemon is of a release that resolves no neighbours.
    pub fn start(
        channel: &CmChannel,
        from: &ResolvedAddress,
        dst: SocketAddr,
        timeout: Duration,
        cookie: u64,
    ) -> Result<Option<AddressResolution>, Error> {
        let ctx = channel.context();
        if !ctx.has_feature(FEATURE_RESOLUTION) {
            return Ok(None);
        }
        let (reply, _) = ctx.call_daemon(&StartResolution {
            device: from.device,
            cm_channel: channel.id(),
            timeout_ms: u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX),
            reserved: 0,
            cookie,
            dst: dst.into(),
            src: from.local.into(),
        })?;
        Ok(Some(AddressResolution {
            ctx: ctx.clone(),
            id: reply.id,
        }))
    }

    /// Ends it and waits for the daemon: no event follows.
    pub fn close(self) -> Result<(), Error> {
        let context = self.ctx.clone();
        drop(self);
        context.confirm_posted()
    }

    /// Gives up ownership after its event.
    pub fn forget(mut self) {
        self.id = 0;
    }
}

impl Drop for AddressResolution {
    fn drop(&mut self) {
        if self.id != 0 {
            self.ctx.free_object(&EndResolution {
                resolution: self.id,
                reserved: 0,
            });
        }
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
        if options.datagrams {
            check_feature(&context.0)?;
        }
        let (reply, _) = context.0.call_daemon(&Bind {
            device: options.device.unwrap_or(ANY_DEVICE),
            flags: flag(options.reuse, BIND_REUSE)
                | flag(options.v6_only, BIND_V6_ONLY)
                | flag(options.datagrams, BIND_DATAGRAMS),
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
