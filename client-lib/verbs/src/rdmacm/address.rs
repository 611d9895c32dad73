//! Addresses of identifiers: rdma_bind_addr(3), rdma_resolve_addr(3), rdma_resolve_route(3),
//! rdma_set_option(3), ports.

use super::channel::EventChannel;
use super::devices::Devices;
use super::events::start_and_complete;
use super::faulty::{fails_to_resolve_address, fails_to_resolve_route, on_device};
use super::id::{IdObject, IdState, Resolution, Resolved, fail, result_of};
use super::sockaddr::{read_address, write_address};
use super::streaming::{SIW_OPTION, SIW_OPTION_STREAMING, set_streaming};
use crate::abi::*;
use crate::ibverbs::context::ContextObject;
use crate::persona::persona_of;
use crate::waiting::Call;
use siw::{AddressResolution, BindOptions, CmBinding, ConnectionInfo, Error, ResolvedAddress};
use std::ffi::{c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

fn refusal(errno: i32, reason: &str) -> Error {
    Error::Refused {
        errno,
        reason: reason.into(),
    }
}

/// Checks queue pair type and port space: connections, or datagram services where the persona has them.
fn check_kind(id: *mut rdma_cm_id) -> Result<(), Error> {
    // SAFETY: an identifier of this library.
    let (object, qp_type, space) = unsafe { (IdObject::from_abi(id), (*id).qp_type, (*id).ps) };
    match qp_type {
        IBV_QPT_RC if space != RDMA_PS_UDP => Ok(()),
        IBV_QPT_UD if space == RDMA_PS_UDP => check_services(object.channel().devices),
        // As with RoCE of Linux.
        IBV_QPT_UD => Err(refusal(
            libc::EINVAL,
            "RDMA_PS_IPOIB is for interfaces of IPoIB: use RDMA_PS_UDP for datagrams",
        )),
        _ => Err(refusal(
            libc::ENODEV,
            "siwd has reliable connections (RC) and datagrams (UD) only",
        )),
    }
}

/// Fails if no device has datagrams, or the daemon no datagram services.
fn check_services(devices: &Devices) -> Result<(), Error> {
    let present = devices.client.query_devices()?;
    let mut personas = present.iter().map(persona_of);
    if !personas.any(|persona| persona.has_datagrams()) {
        return Err(refusal(
            libc::ENODEV,
            "iWARP has reliable connections only: siwrun --persona roce shows a device with datagrams (UD)",
        ));
    }
    if !devices.client.has_services() {
        return Err(refusal(
            libc::EOPNOTSUPP,
            "this siwd has no datagram services (RDMA_PS_UDP): update it",
        ));
    }
    Ok(())
}

fn store_local(object: &IdObject, state: &mut IdState, local: SocketAddr) {
    state.local = Some(local);
    // SAFETY: the identifier's own field, with room for any address.
    unsafe { write_address(local, &raw mut (*object.route()).addr.__bindgen_anon_1) };
}

fn store_device(object: &IdObject, state: &mut IdState, device: u32) -> Result<(), Error> {
    let devices = object.channel().devices;
    let verbs = devices.context(device)?;
    let pd = devices.default_pd(verbs)?;
    state.device = Some(device);
    // SAFETY: a context of this library, which is open for good.
    let context = unsafe { ContextObject::from_abi(verbs) };
    on_device(object, &context.device().info().name);
    // SAFETY: the identifier's own fields.
    unsafe {
        (*object.as_abi()).verbs = verbs;
        // Programs register memory with it before they create a queue pair.
        (*object.as_abi()).pd = pd;
        (*object.as_abi()).port_num = 1;
    }
    Ok(())
}

/// Checks for a loopback address of the kernel, which no device has. As in the kernel, it stands
/// for the devices themselves, whatever their addresses.
fn is_loopback(devices: &Devices, addr: SocketAddr) -> bool {
    addr.ip().is_loopback() && !devices.has_address(addr.ip())
}

/// Returns the wildcard address of the same family, with the same port.
fn any_address(like: SocketAddr) -> SocketAddr {
    let any: IpAddr = match like {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    (any, like.port()).into()
}

/// Reserves the address and port for the identifier.
pub fn bind(object: &IdObject, addr: SocketAddr) -> Result<(), Error> {
    let mut state = object.lock_state();
    if state.local.is_some() || state.resolved != Resolved::Nothing {
        return Err(refusal(libc::EINVAL, "the identifier is already bound"));
    }
    let channel = object.channel();
    let is_loopback = is_loopback(channel.devices, addr);
    let options = BindOptions {
        device: None,
        reuse: state.reuse,
        v6_only: state.v6_only || is_loopback,
        datagrams: object.is_datagram(),
    };
    let wanted = if is_loopback { any_address(addr) } else { addr };
    let binding = CmBinding::new(&channel.devices.client, wanted, &options)?;
    let bound = binding.local_addr();
    state.binding = Some(binding);
    state.loopback_only = is_loopback;
    let mut local = addr;
    local.set_port(bound.port());
    store_local(object, &mut state, local);
    if !local.ip().is_unspecified() && !is_loopback {
        let client = &channel.devices.client;
        let found = client.resolve_address(local, Some(local), None)?;
        store_device(object, &mut state, found.device)?;
    }
    Ok(())
}

/// rdma_bind_addr(3)
pub unsafe fn bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: an identifier of this library, and an address.
    let (object, addr) = unsafe { (IdObject::from_abi(id), read_address(addr)) };
    let Some(addr) = addr else {
        return fail(libc::EINVAL);
    };
    result_of(
        "rdma_bind_addr",
        check_kind(id).and_then(|()| bind(object, addr)),
    )
}

/// Starts to resolve an address; the event follows.
fn resolve(
    object: &IdObject,
    src: Option<SocketAddr>,
    destination: SocketAddr,
    timeout: Duration,
) -> Result<(), Error> {
    let is_bound = {
        let state = object.lock_state();
        if state.resolved != Resolved::Nothing || state.listener.is_some() {
            return Err(refusal(
                libc::EINVAL,
                "the identifier has an address already, or listens",
            ));
        }
        state.local.is_some()
    };
    // Only a source with a port is reserved.
    if let Some(src) = src.filter(|src| src.port() != 0 && !is_bound) {
        bind(object, src)?;
    }
    let channel = object.channel();
    // The daemon queues a limited number of events.
    let _ = channel.drain_daemon();
    let mut state = object.lock_state();
    let devices = channel.devices;
    let wanted = state.local.or(src).map(|local| {
        if is_loopback(devices, local) {
            any_address(local)
        } else {
            local
        }
    });
    let mut destination = destination;
    if destination.ip().is_unspecified() || is_loopback(devices, destination) {
        let own = wanted.map(|local| local.ip());
        let own = own.filter(|ip| !ip.is_unspecified());
        let ip = own.or_else(|| devices.first_address(destination.is_ipv4()));
        destination.set_ip(
            ip.ok_or_else(|| refusal(libc::ENODEV, "no device has an address of that family"))?,
        );
    }
    let found = devices.client.resolve_address(destination, wanted, None)?;
    store_device(object, &mut state, found.device)?;
    state.destination = Some(destination);
    state.resolution = match destination.ip().is_multicast() {
        // A group has no neighbour.
        true => None,
        false => start_search(object, &channel, &found, destination, timeout)?,
    };
    if state.resolution.is_some() {
        state.resolved = Resolved::Pending;
    } else {
        store_local(object, &mut state, found.local);
        state.resolved = Resolved::Address;
        object.push_plain(RDMA_CM_EVENT_ADDR_RESOLVED);
    }
    // SAFETY: the identifier's own field, with room for any address.
    unsafe {
        write_address(
            destination,
            &raw mut (*object.route()).addr.__bindgen_anon_2,
        )
    };
    Ok(())
}

/// Starts to search the neighbour of `destination`. None: the daemon searches none.
fn start_search(
    object: &IdObject,
    channel: &EventChannel,
    from: &ResolvedAddress,
    destination: SocketAddr,
    timeout: Duration,
) -> Result<Option<Resolution>, Error> {
    let cookie = object.registered().0;
    let search = AddressResolution::start(&channel.daemon, from, destination, timeout, cookie)?;
    Ok(search.map(|search| Resolution {
        search,
        from: *from,
        end: Instant::now() + timeout,
    }))
}

/// Continues a search on another channel, with the rest of its time.
pub fn restart_search(
    object: &IdObject,
    state: &mut IdState,
    channel: &EventChannel,
    (from, end): (ResolvedAddress, Instant),
) -> Result<(), Error> {
    if let Some(destination) = state.destination {
        let left = end.saturating_duration_since(Instant::now());
        state.resolution = start_search(object, channel, &from, destination, left)?;
    }
    Ok(())
}

/// Processes the outcome of a search. Returns false if the identifier waits for none.
pub fn on_search_ended(state: &mut IdState, info: &mut ConnectionInfo) -> bool {
    if state.resolved != Resolved::Pending {
        return false;
    }
    if let Some(ended) = state.resolution.take() {
        // The daemon draws the port. Only the address found before has its interface.
        if let Some(drawn) = info.local {
            let mut local = ended.from.local;
            local.set_port(drawn.port());
            info.local = Some(local);
        }
        ended.search.forget();
    }
    if info.errno == 0 {
        state.local = info.local;
        state.resolved = Resolved::Address;
    } else {
        // Another address may be resolved.
        state.resolved = Resolved::Nothing;
    }
    true
}

/// rdma_resolve_addr(3)
pub unsafe fn resolve_addr(
    call: &mut Call,
    id: *mut rdma_cm_id,
    src: *mut sockaddr,
    destination: *mut sockaddr,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: an identifier of this library, and addresses.
    let (object, from, to) = unsafe {
        (
            IdObject::from_abi(id),
            read_address(src),
            read_address(destination),
        )
    };
    let Some(to) = to.filter(|_| src.is_null() || from.is_some()) else {
        return fail(libc::EINVAL);
    };
    // Linux waits without limit for a negative time.
    let timeout = Duration::from_millis(u32::try_from(timeout_ms).unwrap_or(u32::MAX).into());
    let start = || {
        if fails_to_resolve_address(object, to) {
            return 0;
        }
        let resolved = check_kind(id).and_then(|()| resolve(object, from, to, timeout));
        result_of("rdma_resolve_addr", resolved)
    };
    // SAFETY: as above.
    unsafe { start_and_complete(call, id, start) }
}

/// rdma_resolve_route(3): the device already has the route; iWARP has no path records.
pub unsafe fn resolve_route(call: &mut Call, id: *mut rdma_cm_id, _timeout_ms: c_int) -> c_int {
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    let start = || {
        let state = object.lock_state();
        if state.resolved != Resolved::Address {
            return fail(libc::EINVAL);
        }
        drop(state);
        if fails_to_resolve_route(object) {
            return 0;
        }
        object.lock_state().resolved = Resolved::Route;
        object.push_plain(RDMA_CM_EVENT_ROUTE_RESOLVED);
        0
    };
    // SAFETY: as above.
    unsafe { start_and_complete(call, id, start) }
}

/// rdma_set_option(3), with the options of siw_rdma.h. The type of service and the acknowledgement timeout are accepted and have no
/// effect: siwd marks no packets, and TCP measures its timeouts.
pub unsafe fn set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: usize,
) -> c_int {
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    let is_number = length == size_of::<c_int>() && !value.is_null();
    // SAFETY: valid for its length.
    let read_flag = || is_number.then(|| unsafe { value.cast::<c_int>().read_unaligned() } != 0);
    if (level, name) == (SIW_OPTION, SIW_OPTION_STREAMING) {
        return set_streaming(object, read_flag());
    }
    if level as u32 != RDMA_OPTION_ID {
        return fail(libc::ENOSYS);
    }
    let mut state = object.lock_state();
    match (name as u32, read_flag()) {
        (RDMA_OPTION_ID_TOS | RDMA_OPTION_ID_ACK_TIMEOUT, _) if length == 1 => 0,
        (RDMA_OPTION_ID_REUSEADDR, Some(on)) => {
            state.reuse = on;
            0
        }
        (RDMA_OPTION_ID_AFONLY, Some(on)) if state.local.is_none() => {
            state.v6_only = on;
            0
        }
        (
            RDMA_OPTION_ID_TOS
            | RDMA_OPTION_ID_ACK_TIMEOUT
            | RDMA_OPTION_ID_REUSEADDR
            | RDMA_OPTION_ID_AFONLY,
            _,
        ) => fail(libc::EINVAL),
        _ => fail(libc::ENOSYS),
    }
}

/// rdma_get_src_port(3), in network order.
pub unsafe fn get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: an identifier of this library.
    let route = unsafe { IdObject::from_abi(id) }.route();
    // SAFETY: its own field.
    let addr = unsafe { read_address(&raw const (*route).addr.__bindgen_anon_1) };
    addr.map_or(0, |addr| addr.port().to_be())
}

/// rdma_get_dst_port(3), in network order.
pub unsafe fn get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: an identifier of this library.
    let route = unsafe { IdObject::from_abi(id) }.route();
    // SAFETY: its own field.
    let addr = unsafe { read_address(&raw const (*route).addr.__bindgen_anon_2) };
    addr.map_or(0, |addr| addr.port().to_be())
}
