//! Addresses before there is a connection: which device leads to a destination, and ports that are
//! reserved (rdma_resolve_addr(3), rdma_bind_addr(3)).

use crate::context::ClientInner;
use crate::{Context, Error};
use siw_shm::control::{
    ANY_DEVICE, Addr, BIND_REUSE, BIND_V6_ONLY, Bind, FEATURE_ADDRESSES, Resolve, Unlisten,
};
use std::net::SocketAddr;
use std::sync::Arc;

/// How a destination is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResolvedAddress {
    /// Device index.
    pub device: u32,
    /// The source address, with the port that was asked for.
    pub local: SocketAddr,
}

/// How an address is bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BindOptions {
    /// Device index; None for all that the address fits.
    pub device: Option<u32>,
    /// Others that say so may bind the same port, until one of them listens.
    pub reuse: bool,
    /// `::` stands for IPv6 alone, not for IPv4 as well.
    pub v6_only: bool,
}

impl Context {
    /// The daemon knows [`Self::resolve_address`], [`CmBinding`] and the `migrate` calls.
    pub fn has_addresses(&self) -> bool {
        self.0.has_feature(FEATURE_ADDRESSES)
    }

    /// The device that leads to `dst`, and the address that connections to it come from: `src` if
    /// it names one. Refused with EHOSTUNREACH without a route, with EADDRNOTAVAIL when no
    /// device has `src`.
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
            local: local.ok_or(Error::Invalid("siwd named no source address"))?,
        })
    }
}

/// An address and port that nobody else gets; given up when dropped.
pub struct CmBinding {
    ctx: Arc<ClientInner>,
    id: u32,
    addr: SocketAddr,
}

impl CmBinding {
    /// Binds `addr`; the daemon chooses port 0.
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

    /// With the port in use.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// It is a listener now, which ends it.
    pub(crate) fn forget(mut self) {
        self.id = 0;
    }
}

impl Drop for CmBinding {
    fn drop(&mut self) {
        if self.id != 0 {
            self.ctx.call_ignoring_errors(&Unlisten {
                listener: self.id,
                flags: 0,
            });
        }
    }
}
