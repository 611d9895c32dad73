//! Opening and closing of contexts (ibv_open_device(3)), with tables of the functions that programs
//! call without a symbol.

use super::context::{AsyncEvents, ContextObject, is_inherited};
use super::device::DeviceObject;
use super::faulty::{ContextFaults, replace_operations};
use super::slots::{fill_extended_operations, fill_operations};
use crate::abi::{ibv_context, ibv_device, verbs_context};
use crate::descriptor::EventDescriptor;
use crate::status::{errno_of, pointer_of};
use rustix::fd::{AsFd, BorrowedFd};
use siw::{Context, Error};
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// Creates a context of `device`, with the faults that happen to it.
pub fn new_context(
    device: &'static DeviceObject,
    client: Context,
    async_events: AsyncEvents,
    faults: Option<Box<ContextFaults>>,
) -> Box<ContextObject> {
    // SAFETY: the struct is made of numbers, pointers and optional function pointers; a mutex of
    // zeros is PTHREAD_MUTEX_INITIALIZER.
    let mut abi: verbs_context = unsafe { std::mem::zeroed() };
    fill_extended_operations(&mut abi);
    fill_operations(&mut abi.context);
    if faults.is_some() {
        replace_operations(&mut abi.context);
    }
    ContextObject::new(abi, device, client, async_events, faults)
}

/// The descriptor that is readable when an event of the plan happens.
pub fn alarm_of(faults: &Option<Box<ContextFaults>>) -> Option<BorrowedFd<'_>> {
    faults.as_deref().map(|faults| faults.alarm().as_fd())
}

/// Creates a context on a connection of its own to the daemon, which must still have `device`. One that was
/// added again has another index if a client that is connected knows the earlier one.
fn open_context(device: &'static DeviceObject) -> Result<Box<ContextObject>, Error> {
    let mut client = Context::open(None)?;
    client.hide_descriptors();
    client.wait_in_destructors();
    let found = client.device_by_name(&device.info().name)?;
    if found.index != device.info().index {
        return Err(Error::Refused {
            errno: libc::ENODEV,
            reason: format!("device {} was removed and added again", found.name),
        });
    }
    // Otherwise events of other devices would make the descriptor readable.
    client.watch_device(found.index)?;
    let faults = ContextFaults::new(&device.info().name)?;
    let sources = [client.async_fd()].into_iter();
    let sources: Vec<_> = sources.chain(alarm_of(&faults)).collect();
    let descriptor = EventDescriptor::new(&sources)?;
    let async_events = AsyncEvents::Own(descriptor);
    Ok(new_context(device, client, async_events, faults))
}

/// ibv_open_device(3)
pub unsafe fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: a device of this library, which is never freed.
    let device: &'static DeviceObject = unsafe { DeviceObject::from_abi(device) };
    let object = pointer_of("ibv_open_device", open_context(device));
    if object.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: just made.
    unsafe { &*object }.as_abi()
}

/// ibv_close_device(3)
pub unsafe fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: a context of this library.
    if unsafe { is_inherited(context) } {
        return 0;
    }
    // SAFETY: a context of this library, from `open_device`, which boxed it.
    let object = unsafe { ContextObject::from_abi(context) };
    object
        .async_state()
        .is_closed
        .store(true, Ordering::Release);
    // SAFETY: as above; the manual page forbids any later use.
    unsafe { ContextObject::release(context) };
    errno_of("ibv_close_device", Ok(()))
}
