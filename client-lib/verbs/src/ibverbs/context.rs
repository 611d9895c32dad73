//! Contexts (ibv_open_device(3)): each is a connection to the daemon, with tables of the functions
//! that programs call without a symbol.

use super::async_event::SharedEvents;
use super::device::DeviceObject;
use super::objects::Objects;
use super::slots::{fill_extended_operations, fill_operations};
use crate::abi::{ibv_context, ibv_device, verbs_context};
use crate::status::{errno_of, pointer_of};
use rustix::fd::{AsFd, AsRawFd};
use siw::{Context, Error};
use std::ffi::c_int;
use std::mem::offset_of;
use std::sync::atomic::AtomicBool;

/// A context as programs see it. The struct of the header is at the end of `abi`: newer releases
/// add fields before it.
#[repr(C)]
pub struct ContextObject {
    abi: verbs_context,
    device: &'static DeviceObject,
    client: Context,
    /// Asynchronous events of a context that shares its connection.
    shared_events: Option<SharedEvents>,
    objects: Objects,
    /// DEVICE_FATAL was delivered.
    pub fatal_reported: AtomicBool,
}

impl ContextObject {
    /// Creates a context of `device` on a connection of its own, or on a shared one.
    pub fn new(
        device: &'static DeviceObject,
        client: Context,
        shared_events: Option<SharedEvents>,
    ) -> Box<ContextObject> {
        // SAFETY: the struct is made of numbers, pointers and optional function pointers; a mutex
        // of zeros is PTHREAD_MUTEX_INITIALIZER.
        let mut abi: verbs_context = unsafe { std::mem::zeroed() };
        abi.sz = size_of::<verbs_context>();
        fill_extended_operations(&mut abi);
        let context = &mut abi.context;
        context.device = device.as_abi();
        context.async_fd = match &shared_events {
            Some(events) => events.as_fd().as_raw_fd(),
            None => client.async_fd().as_raw_fd(),
        };
        // Programs duplicate it to import the device in another process, which fails with
        // EOPNOTSUPP.
        context.cmd_fd = context.async_fd;
        context.num_comp_vectors = 1;
        // If set, `verbs_get_ctx_op` looks for the larger struct.
        context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
        fill_operations(context);
        Box::new(ContextObject {
            abi,
            device,
            client,
            shared_events,
            objects: Objects::default(),
            fatal_reported: AtomicBool::new(false),
        })
    }

    /// # Safety
    /// A context of this library.
    pub unsafe fn from_abi<'a>(context: *mut ibv_context) -> &'a ContextObject {
        let before = offset_of!(ContextObject, abi) + offset_of!(verbs_context, context);
        // SAFETY: `as_abi` pointed into the object at that distance.
        unsafe { &*context.byte_sub(before).cast() }
    }

    /// Pointer for struct fields that hold a context.
    pub fn as_abi(&self) -> *mut ibv_context {
        let before = offset_of!(ContextObject, abi) + offset_of!(verbs_context, context);
        (&raw const *self)
            .cast_mut()
            .wrapping_byte_add(before)
            .cast()
    }

    /// The connection to the daemon.
    pub fn client(&self) -> &Context {
        &self.client
    }

    /// Asynchronous events of a context that shares its connection.
    pub fn shared_events(&self) -> Option<&SharedEvents> {
        self.shared_events.as_ref()
    }

    /// Objects of the context.
    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Its device.
    pub fn device(&self) -> &'static DeviceObject {
        self.device
    }
}

/// Connects to the daemon, which must have a device with the name of `device`.
pub fn open_client(device: &DeviceObject) -> Result<Context, Error> {
    let client = Context::open(None)?;
    client.wait_in_destructors();
    client.device_by_name(&device.info().name)?;
    Ok(client)
}

/// ibv_open_device(3)
pub unsafe fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: a device of this library, which is never freed.
    let device: &'static DeviceObject = unsafe { DeviceObject::from_abi(device) };
    let context = open_client(device).map(|client| ContextObject::new(device, client, None));
    let object = pointer_of("ibv_open_device", context);
    if object.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: just made.
    unsafe { &*object }.as_abi()
}

/// Checks whether the calling process is a child of fork(2) of the one that opened the context.
/// Destroying its objects then succeeds without effect: they belong to the parent, and another thread
/// of it may have held their locks.
///
/// # Safety
/// A context of this library.
pub unsafe fn is_inherited(context: *mut ibv_context) -> bool {
    // SAFETY: by the caller's contract.
    let object = unsafe { ContextObject::from_abi(context) };
    !object.client().is_of_this_process()
}

/// ibv_close_device(3)
pub unsafe fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: a context of this library.
    if unsafe { is_inherited(context) } {
        return 0;
    }
    // SAFETY: a context of this library, from `open_device`, which boxed it.
    let object = unsafe { ContextObject::from_abi(context) };
    let object = (&raw const *object).cast_mut();
    // SAFETY: as above; the manual page forbids any later use.
    drop(unsafe { Box::from_raw(object) });
    errno_of("ibv_close_device", Ok(()))
}
