//! Address vectors (`struct ibv_ah_attr`): the peer's GID or LID, as ibv_modify_qp(3) and ibv_create_ah(3) get
//! it. An address handle keeps nothing but the vector's validity: only datagrams would use it, which siwd does
//! not have, but programs test addresses by creating one.

use super::context::{ContextObject, is_inherited};
use super::gid::{device_gids, ip_of_gid};
use super::pd::PdObject;
use super::port::PORT;
use crate::abi::*;
use crate::status::{fail_errno, null_with, pointer_of, set_errno};
use siw::{Error, Persona};
use siw_shm::persona::{first_ipv4, ip_of_lid};
use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};

/// IP addresses of both ends.
pub struct AddressPair {
    pub local: IpAddr,
    pub peer: IpAddr,
}

impl AddressPair {
    /// The addresses that a vector names.
    ///
    /// # Errors
    /// Another port, no GID on a device without LIDs, or a GID or LID without an address.
    pub fn of_vector(context: &ContextObject, path: &ibv_ah_attr) -> Result<AddressPair, Error> {
        if u32::from(path.port_num) != PORT {
            return Err(Error::Invalid(
                "port_num of the address vector is not a port of the device",
            ));
        }
        match path.is_global {
            0 => AddressPair::of_lid(context, path.dlid),
            _ => AddressPair::of_gid(context, path),
        }
    }

    fn of_lid(context: &ContextObject, lid: u16) -> Result<AddressPair, Error> {
        if context.device().persona() != Persona::Ib {
            return Err(Error::Invalid(
                "the peer has no GID (is_global is 0): let the program use a GID index, often by -g 0 or -x 0",
            ));
        }
        let info = context
            .client()
            .query_device(context.device().info().index)?;
        let Some(local) = first_ipv4(info.ips) else {
            return Err(Error::Invalid(
                "the device has no IPv4 address, and so no LID: let the program use a GID index",
            ));
        };
        let Some(peer) = ip_of_lid(local, lid) else {
            return Err(Error::Invalid(
                "the peer's LID is none of siwd's: run the peer with the persona ib, too, or let both use a GID index",
            ));
        };
        Ok(AddressPair {
            local: local.into(),
            peer: peer.into(),
        })
    }

    fn of_gid(context: &ContextObject, path: &ibv_ah_attr) -> Result<AddressPair, Error> {
        // SAFETY: both fields of the union are numbers of the same size.
        let raw = unsafe { path.grh.dgid.raw };
        let peer = ip_of_gid(raw).or_else(|| {
            // The Ethernet address of a device of the same daemon is accepted too.
            let devices = context.client().query_devices().ok()?;
            let found = devices.iter().find(|device| device.mac == raw[..6])?;
            found.ips.first().copied()
        });
        let Some(peer) = peer else {
            return Err(Error::Invalid(
                "the peer's GID is an Ethernet address: use a GID that is an IP address",
            ));
        };
        let gids = device_gids(context)?;
        let source = gids.get(usize::from(path.grh.sgid_index));
        let Some(source) = source.copied().flatten() else {
            return Err(Error::Invalid("unknown GID index (sgid_index)"));
        };
        let mut ips = gids.iter().flatten().filter_map(|gid| gid.ip);
        let of_family = ips.find(|ip| ip.is_ipv4() == peer.is_ipv4());
        let Some(local) = source.ip.or(of_family) else {
            return Err(Error::Invalid(
                "the device has no address of the peer's family",
            ));
        };
        Ok(AddressPair { local, peer })
    }
}

/// # Safety
/// A protection domain of this library.
unsafe fn create(pd: *mut ibv_pd, path: &ibv_ah_attr) -> Result<Box<ibv_ah>, Error> {
    // SAFETY: by the caller's contract; a context is open as long as its objects exist.
    let (domain, context) = unsafe {
        let domain = PdObject::from_abi(pd);
        (domain, ContextObject::from_abi(domain.context()))
    };
    let pair = AddressPair::of_vector(context, path)?;
    // As connecting does: fails with EHOSTUNREACH without a route. A link-local address needs a device.
    let is_link_local = matches!(pair.peer, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let device = is_link_local.then(|| context.device().info().index);
    context
        .client()
        .resolve_address(SocketAddr::new(pair.peer, 0), None, device)?;
    domain.users.add();
    Ok(Box::new(ibv_ah {
        context: domain.context(),
        pd,
        handle: 0,
    }))
}

/// ibv_create_ah(3): fails with EOPNOTSUPP on an iWARP device, which has no datagrams, and with EHOSTUNREACH
/// if there is no route to the address.
pub unsafe fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: a protection domain of this library.
    let context = unsafe { ContextObject::from_abi(PdObject::from_abi(pd).context()) };
    if !context.device().persona().has_address_handles() {
        return null_with(libc::EOPNOTSUPP);
    }
    // SAFETY: as above, and a struct to read.
    pointer_of("ibv_create_ah", unsafe { create(pd, &*attr) })
}

/// ibv_destroy_ah(3): EINVAL for the NULL of an `ibv_create_ah` that failed.
pub unsafe fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    if ah.is_null() {
        return fail_errno(libc::EINVAL);
    }
    // SAFETY: an address handle of this library, whose context is open.
    if unsafe { is_inherited((*ah).context) } {
        return 0;
    }
    // SAFETY: `create` boxed it; the manual page forbids any later use. Its domain cannot be freed before it.
    unsafe {
        let handle = Box::from_raw(ah);
        PdObject::from_abi(handle.pd).users.remove();
    }
    set_errno(0);
    0
}
