//! Address vectors (`struct ibv_ah_attr`): the peer's GID or LID, as ibv_modify_qp(3) and ibv_create_ah(3) get
//! it, and address handles, the destinations of datagrams (ibv_create_ah(3), ibv_init_ah_from_wc(3)).

use super::context::{ContextObject, is_inherited};
use super::gid::{DeviceGid, device_gids, ip_of_gid};
use super::pd::PdObject;
use super::port::PORT;
use super::qp::QpObject;
use crate::abi::*;
use crate::status::{explain, fail_errno, fail_with, null_with, pointer_of, set_errno};
use siw::{Ah, AhAttr, Error, GRH_LEN, Persona};
use siw_faults::Object;
use siw_shm::device_identity::gid_of_ip;
use siw_shm::persona::{first_ipv4, ip_of_lid};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

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
            let known = gids.iter().enumerate().filter_map(|(index, gid)| {
                let ip = gid.as_ref()?.ip;
                let of = ip.map_or_else(|| "its Ethernet address".to_owned(), |ip| ip.to_string());
                Some(format!("{index} ({of})"))
            });
            explain(&format_args!(
                "the device has no GID index {} (sgid_index): it has {}",
                path.grh.sgid_index,
                known.collect::<Vec<_>>().join(", ")
            ));
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

/// An address handle as programs see it.
#[repr(C)]
pub struct AhObject {
    abi: ibv_ah,
    /// None if the daemon is older than datagrams.
    ah: Option<Ah>,
}

impl AhObject {
    /// Number of a handle for a request of a queue pair. Fails for NULL, and for a handle of another
    /// protection domain.
    ///
    /// # Safety
    /// NULL or an address handle of this library.
    #[inline]
    pub unsafe fn number_for(ah: *mut ibv_ah, queue_pair: &QpObject) -> Result<u32, Error> {
        // SAFETY: by the caller's contract; the struct of the header is the first field.
        let handle = unsafe { ah.cast::<AhObject>().as_ref() };
        let handle = handle.filter(|handle| handle.abi.pd == queue_pair.abi().pd);
        match handle {
            Some(AhObject { ah: Some(ah), .. }) => Ok(ah.number()),
            _ => Err(Error::Invalid(
                "a datagram needs an address handle of the queue pair's protection domain",
            )),
        }
    }
}

/// # Safety
/// A protection domain of this library.
unsafe fn create(pd: *mut ibv_pd, path: &ibv_ah_attr) -> Result<Box<AhObject>, Error> {
    // SAFETY: by the caller's contract; a context is open as long as its objects exist.
    let (domain, context) = unsafe {
        let domain = PdObject::from_abi(pd);
        (domain, ContextObject::from_abi(domain.context()))
    };
    if let Some(errno) = domain.creation_fault(Object::Ah) {
        return Err(std::io::Error::from_raw_os_error(errno).into());
    }
    let pair = AddressPair::of_vector(context, path)?;
    if pair.local.is_ipv4() != pair.peer.is_ipv4() {
        return Err(Error::Invalid(
            "the GID at sgid_index and the peer's GID are of different address families",
        ));
    }
    let ah = match context.client().has_datagrams() {
        true => Some(context.client().create_ah(&to_attr(context, path, &pair))?),
        false => {
            check_route(context, pair.peer)?;
            None
        }
    };
    domain.users.add();
    Ok(Box::new(AhObject {
        abi: ibv_ah {
            context: domain.context(),
            pd,
            handle: ah.as_ref().map_or(0, Ah::number),
        },
        ah,
    }))
}

/// The attributes for the daemon.
fn to_attr(context: &ContextObject, path: &ibv_ah_attr, pair: &AddressPair) -> AhAttr {
    let mut attr = AhAttr::new(context.device().info().index, pair.peer);
    attr.local = Some(pair.local);
    if path.is_global != 0 {
        attr.hop_limit = path.grh.hop_limit;
        attr.traffic_class = path.grh.traffic_class;
        attr.flow_label = path.grh.flow_label & FLOW_LABEL_MASK;
    }
    attr
}

/// Bits of an IPv6 flow label.
const FLOW_LABEL_MASK: u32 = 0xf_ffff;

/// Fails with EHOSTUNREACH without a route, as connecting does: programs create handles to test addresses,
/// and an older daemon has none.
fn check_route(context: &ContextObject, peer: IpAddr) -> Result<(), Error> {
    // A link-local address needs a device.
    let is_link_local = matches!(peer, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let device = is_link_local.then(|| context.device().info().index);
    let client = context.client();
    client.resolve_address(SocketAddr::new(peer, 0), None, device)?;
    Ok(())
}

/// ibv_create_ah(3): fails with EOPNOTSUPP on an iWARP device, which has no datagrams, with EHOSTUNREACH if
/// there is no route to the address, and with ETIMEDOUT if the host does not answer.
pub unsafe fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: a protection domain of this library.
    let context = unsafe { ContextObject::from_abi(PdObject::from_abi(pd).context()) };
    if !context.device().persona().has_datagrams() {
        return null_with(libc::EOPNOTSUPP);
    }
    // SAFETY: as above, and a struct to read.
    pointer_of("ibv_create_ah", unsafe { create(pd, &*attr) }).cast()
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
        let handle = Box::from_raw(ah.cast::<AhObject>());
        PdObject::from_abi(handle.abi.pd).users.remove();
    }
    set_errno(0);
    0
}

/// Sender and receiver of a datagram, from the IP header in its GRH area.
struct Route {
    source: IpAddr,
    destination: IpAddr,
    hop_limit: u8,
    traffic_class: u8,
    flow_label: u32,
}

/// Length of an IPv4 header without options, at the end of the GRH area.
const IPV4_LEN: usize = 20;

/// Ones' complement sum of an IPv4 header, which is all ones with the right checksum (RFC 1071).
fn ipv4_sum(header: &[u8; IPV4_LEN]) -> u16 {
    let words = header.chunks_exact(2);
    let sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
}

impl Route {
    /// Reads the GRH area: an IPv6 header, or an IPv4 header behind 20 undefined bytes. Those may look like the
    /// beginning of an IPv6 header, so that a correct IPv4 header decides.
    fn of_grh(grh: &[u8; GRH_LEN]) -> Option<Route> {
        let ipv4: &[u8; IPV4_LEN] = grh.last_chunk()?;
        let has_ipv6 = grh[0] >> 4 == 6;
        let has_ipv4 = ipv4[0] == 0x45;
        if has_ipv4 && (!has_ipv6 || ipv4_sum(ipv4) == 0xffff) {
            return Some(Route::of_ipv4(ipv4));
        }
        has_ipv6.then(|| Route::of_ipv6(grh))
    }

    fn of_ipv4(header: &[u8; IPV4_LEN]) -> Route {
        let ip = |at: usize| Ipv4Addr::from([0, 1, 2, 3].map(|n| header[at + n])).into();
        Route {
            source: ip(12),
            destination: ip(16),
            hop_limit: header[8],
            traffic_class: header[1],
            flow_label: 0,
        }
    }

    fn of_ipv6(header: &[u8; GRH_LEN]) -> Route {
        let ip = |at: usize| {
            let mut octets = [0; 16];
            octets.copy_from_slice(&header[at..at + 16]);
            Ipv6Addr::from(octets).into()
        };
        let first = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
        Route {
            source: ip(8),
            destination: ip(24),
            hop_limit: header[7],
            traffic_class: (first >> 20) as u8,
            flow_label: first & FLOW_LABEL_MASK,
        }
    }

    /// Attributes of a handle for the way back.
    fn reversed(&self, context: &ContextObject) -> Result<ibv_ah_attr, Error> {
        let mut attr = vector_between(context, self.destination, self.source)?;
        attr.grh.hop_limit = self.hop_limit;
        attr.grh.traffic_class = self.traffic_class;
        attr.grh.flow_label = self.flow_label;
        Ok(attr)
    }
}

/// TTL or hop limit of address vectors that this library makes.
const HOP_LIMIT: u8 = 64;

/// The address vector of a peer, from an address of the device.
///
/// # Errors
/// No GID of the device is that address, or the daemon does not answer.
pub fn vector_between(
    context: &ContextObject,
    local: IpAddr,
    peer: IpAddr,
) -> Result<ibv_ah_attr, Error> {
    let gids = device_gids(context)?;
    let is_ours = |gid: &DeviceGid| gid.ip == Some(local);
    let index = gids
        .iter()
        .position(|gid| gid.as_ref().is_some_and(is_ours));
    let Some(sgid_index) = index.and_then(|index| u8::try_from(index).ok()) else {
        return Err(Error::Invalid(
            "no GID of the device is the address of this end",
        ));
    };
    // SAFETY: the struct is made of numbers.
    let mut attr: ibv_ah_attr = unsafe { std::mem::zeroed() };
    attr.is_global = 1;
    attr.port_num = PORT as u8;
    attr.grh.dgid = ibv_gid {
        raw: gid_of_ip(peer),
    };
    attr.grh.sgid_index = sgid_index;
    attr.grh.hop_limit = HOP_LIMIT;
    Ok(attr)
}

/// Attributes of a handle to the sender of a received datagram.
///
/// # Safety
/// Structs to read: the completion, and the GRH area if the completion says that there is one.
unsafe fn attr_of_sender(
    context: &ContextObject,
    port_num: u8,
    wc: *const ibv_wc,
    grh: *const ibv_grh,
) -> Result<ibv_ah_attr, Error> {
    if u32::from(port_num) != PORT {
        return Err(Error::Invalid("port_num is not a port of the device"));
    }
    // SAFETY: by the caller's contract.
    if unsafe { (*wc).wc_flags } & IBV_WC_GRH == 0 || grh.is_null() {
        return Err(Error::Invalid(
            "the completion is not that of a received datagram (IBV_WC_GRH)",
        ));
    }
    // SAFETY: by the caller's contract; the area may have any alignment.
    let area: [u8; GRH_LEN] = unsafe { grh.cast::<[u8; GRH_LEN]>().read_unaligned() };
    let route = Route::of_grh(&area).ok_or(Error::Invalid(
        "the first 40 bytes of the receive buffer hold no IP header",
    ))?;
    route.reversed(context)
}

/// ibv_init_ah_from_wc(3)
pub unsafe fn init_ah_from_wc(
    context: *mut ibv_context,
    port_num: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    ah_attr: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: a context of this library.
    let object = unsafe { ContextObject::from_abi(context) };
    if !object.device().persona().has_datagrams() {
        fail_errno(libc::EOPNOTSUPP);
        return -1;
    }
    // SAFETY: as the caller promised.
    match unsafe { attr_of_sender(object, port_num, wc, grh) } {
        Ok(attr) => {
            // SAFETY: a struct to write.
            unsafe { ah_attr.write(attr) };
            0
        }
        Err(error) => {
            fail_with("ibv_init_ah_from_wc", &error);
            -1
        }
    }
}

/// ibv_create_ah_from_wc(3)
pub unsafe fn create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port_num: u8,
) -> *mut ibv_ah {
    // SAFETY: a protection domain of this library.
    let context = unsafe { ContextObject::from_abi(PdObject::from_abi(pd).context()) };
    if !context.device().persona().has_datagrams() {
        return null_with(libc::EOPNOTSUPP);
    }
    // SAFETY: as the caller promised.
    let created =
        unsafe { attr_of_sender(context, port_num, wc, grh).and_then(|attr| create(pd, &attr)) };
    pointer_of("ibv_create_ah_from_wc", created).cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Header of a datagram from 10.77.0.2 to 10.77.0.1, with DSCP, a TTL of 7 and a right checksum.
    const IPV4: [u8; IPV4_LEN] = [
        0x45, 0x68, 0, 100, 0, 0, 0x40, 0, 7, 17, 0x5e, 0x85, 10, 77, 0, 2, 10, 77, 0, 1,
    ];

    fn area(first: [u8; IPV4_LEN], last: [u8; IPV4_LEN]) -> [u8; GRH_LEN] {
        let mut area = [0; GRH_LEN];
        area[..IPV4_LEN].copy_from_slice(&first);
        area[IPV4_LEN..].copy_from_slice(&last);
        area
    }

    #[test]
    fn the_sender_of_an_ipv4_datagram_is_read_from_the_last_20_bytes() {
        assert_eq!(ipv4_sum(&IPV4), 0xffff);
        // The bytes before it may be anything, also the beginning of an IPv6 header.
        for first in [0, 0x60, 0xff] {
            let route = Route::of_grh(&area([first; IPV4_LEN], IPV4)).unwrap();
            assert_eq!(route.source, IpAddr::from([10, 77, 0, 2]));
            assert_eq!(route.destination, IpAddr::from([10, 77, 0, 1]));
            assert_eq!((route.hop_limit, route.traffic_class), (7, 0x68));
        }
    }

    #[test]
    fn the_sender_of_an_ipv6_datagram_is_read_from_the_whole_area() {
        let (source, destination) = ("fd77::2", "fd77::1");
        let [source, destination] = [source, destination].map(|ip| ip.parse::<Ipv6Addr>().unwrap());
        let mut area = [0; GRH_LEN];
        area[..8].copy_from_slice(&[0x66, 0x81, 0x23, 0x45, 0, 60, 17, 9]);
        area[8..24].copy_from_slice(&source.octets());
        area[24..].copy_from_slice(&destination.octets());
        let route = Route::of_grh(&area).unwrap();
        assert_eq!(
            (route.source, route.destination),
            (source.into(), destination.into())
        );
        assert_eq!((route.hop_limit, route.traffic_class), (9, 0x68));
        assert_eq!(route.flow_label, 0x1_2345);
    }

    #[test]
    fn an_area_without_an_ip_header_has_no_sender() {
        assert!(Route::of_grh(&[0; GRH_LEN]).is_none());
        let short = area([0; IPV4_LEN], [0x44; IPV4_LEN]);
        assert!(Route::of_grh(&short).is_none());
    }
}
