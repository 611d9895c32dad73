//! Creating, destroying and migrating identifiers (rdma_create_id(3), rdma_destroy_id(3),
//! rdma_migrate_id(3)).

use super::address::restart_search;
use super::channel::EventChannelObject;
use super::events::release_event;
use super::id::{
    ChannelOf, IdObject, Resolution, Resolved, fail, find_queue_pair, lock_registered, result_of,
};
use super::queue::PeerRequest;
use crate::abi::*;
use siw::Error;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

/// rdma_create_id(3)
pub unsafe fn create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    let qp_type = if ps == RDMA_PS_IPOIB || ps == RDMA_PS_UDP {
        IBV_QPT_UD
    } else {
        IBV_QPT_RC
    };
    match IdObject::create(channel, context, ps, qp_type) {
        Ok(created) => {
            // SAFETY: a pointer to write.
            unsafe { id.write(created) };
            0
        }
        Err(error) => result_of("rdma_create_id", Err(error)),
    }
}

/// rdma_destroy_id(3)
pub unsafe fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    if id.is_null() {
        return fail(libc::EINVAL);
    }
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    if object.is_inherited() {
        // The identifier of the parent, which other threads of it may have been using.
        return 0;
    }
    // SAFETY: as above.
    unsafe { release_event(id) };
    object.closing.store(true, Ordering::Release);
    let channel = object.channel();
    // SAFETY: as above.
    if let Some(qp) = unsafe { find_queue_pair(id) } {
        let groups = std::mem::take(&mut object.lock_state().groups);
        for group in groups {
            let _ = qp.detach_group(group);
        }
        if object.connected.load(Ordering::Acquire) {
            // The connection ends with its identifier.
            let _ = qp.disconnect();
        }
        let _ = channel.devices.park_events(&qp);
    }
    let state = std::mem::take(&mut *object.lock_state());
    // An unanswered request is rejected.
    drop(state.request);
    // Both fail only if the daemon has gone, and with it the port.
    if let Some(listener) = state.listener {
        let _ = listener.close_keeping_requests();
    }
    if let Some(binding) = state.binding {
        let _ = binding.close();
    }
    if let Some(resolution) = state.resolution {
        let _ = resolution.search.close();
    }
    if let Some(search) = state.search {
        let _ = search.close();
    }
    let number = object.registered();
    // Requests that the program has not taken are rejected.
    let _ = channel.drain_daemon();
    drop(channel.take_matching(|event| event.owner() == number));
    drop(channel.take_late_events(Some(number)));
    object.events.wait_acknowledged();
    lock_registered().remove(&number);
    // SAFETY: `IdObject::create` boxed it; the manual page forbids any later use.
    drop(unsafe { Box::from_raw(id.cast::<IdObject>()) });
    0
}

/// rdma_migrate_id(3)
pub unsafe fn migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    if channel.is_null() && object.is_sync() {
        return fail(libc::EINVAL);
    }
    // SAFETY: as above.
    unsafe { release_event(id) };
    // SAFETY: as above, and NULL or a channel of this library.
    let migrated = unsafe { migrate(id, object, channel) };
    if migrated.is_ok() {
        // Events that were taken from the old channel must be acknowledged (rdma_migrate_id(3)).
        object.events.wait_acknowledged();
    }
    result_of("rdma_migrate_id", migrated)
}

unsafe fn migrate(
    id: *mut rdma_cm_id,
    object: &IdObject,
    channel: *mut rdma_event_channel,
) -> Result<(), Error> {
    let (to, own) = if channel.is_null() {
        let own = EventChannelObject::create()?;
        (own.channel().clone(), Some(own))
    } else {
        // SAFETY: a channel of this library.
        let to = unsafe { EventChannelObject::from_abi(channel) }
            .channel()
            .clone();
        (to, None)
    };
    let from = object.channel();
    let mut state = object.lock_state();
    if let Some(listener) = &state.listener {
        listener.migrate(&to.daemon)?;
    }
    if let Some(request) = state.request.as_ref().and_then(PeerRequest::connection) {
        request.migrate(&to.daemon)?;
    }
    if let Some(search) = &state.search {
        search.migrate(&to.daemon)?;
    }
    let resolution = match state.resolution.take() {
        Some(Resolution { search, from, end }) => {
            search.close()?;
            Some((from, end))
        }
        None => None,
    };
    drop(state);
    // SAFETY: an identifier of this library.
    if let Some(qp) = unsafe { find_queue_pair(id) } {
        qp.migrate_events(&to.daemon)?;
    }
    // The old channel gets no more events; deliver those that have already arrived.
    from.drain_daemon()?;
    let own_pointer = own.as_ref().map(|own| (&raw const **own).cast_mut().cast());
    let old = {
        let mut current = object.lock_channel();
        let number = object.registered();
        for event in from.take_matching(|event| event.owner() == number) {
            to.push(event);
        }
        to.adopt_late_events(&from, number);
        let channel = to.clone();
        std::mem::replace(&mut *current, ChannelOf { channel, own })
    };
    if let Some(resolution) = resolution {
        let mut state = object.lock_state();
        // Its event may have been among those that had arrived.
        if state.resolved == Resolved::Pending {
            restart_search(object, &mut state, &to, resolution)?;
        }
    }
    // SAFETY: the identifier's own field.
    unsafe { (*id).channel = own_pointer.unwrap_or(channel) };
    drop(old);
    Ok(())
}
