//! Contexts: each is a connection to the daemon, or a part of a shared one, with the objects that were
//! made on it.

use super::device::DeviceObject;
use super::faulty::ContextFaults;
use super::objects::Objects;
use super::shared_events::SharedEvents;
use crate::abi::{LATER_FIELDS, LaterFields, ibv_context, verbs_context};
use crate::descriptor::EventDescriptor;
use siw::Context;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// A context as programs see it. The struct of the header is at the end of `abi`: newer releases
/// add fields before it.
#[repr(C)]
pub struct ContextObject {
    _later: LaterFields,
    abi: verbs_context,
    device: &'static DeviceObject,
    client: Context,
    async_events: AsyncEvents,
    objects: Objects,
    async_state: Arc<AsyncState>,
    /// Faults of the plan, if there is one.
    faults: Option<Box<ContextFaults>>,
    /// Number of completion counters created so far.
    counters: AtomicU32,
    /// The program's own use until ibv_close_device(3), and those of objects.
    uses: AtomicUsize,
}

/// State that a thread which waits for asynchronous events keeps when another closes the context.
#[derive(Default)]
pub struct AsyncState {
    /// DEVICE_FATAL was delivered.
    pub fatal_reported: AtomicBool,
    pub is_closed: AtomicBool,
}

/// Asynchronous events of a context.
pub enum AsyncEvents {
    /// All those of its connection.
    Own(EventDescriptor),
    /// Those that concern it, of a connection that it shares.
    Shared(SharedEvents),
}

impl AsyncEvents {
    fn descriptor(&self) -> &EventDescriptor {
        match self {
            AsyncEvents::Own(descriptor) => descriptor,
            AsyncEvents::Shared(events) => events.descriptor(),
        }
    }
}

impl ContextObject {
    /// Creates a context of `device` with the functions in `abi`.
    pub fn new(
        mut abi: verbs_context,
        device: &'static DeviceObject,
        client: Context,
        async_events: AsyncEvents,
        faults: Option<Box<ContextFaults>>,
    ) -> Box<ContextObject> {
        abi.sz = size_of::<LaterFields>() + size_of::<verbs_context>();
        let context = &mut abi.context;
        context.device = device.as_abi();
        context.async_fd = async_events.descriptor().number();
        // Programs duplicate it to import the device in another process, which fails with
        // EOPNOTSUPP.
        context.cmd_fd = context.async_fd;
        context.num_comp_vectors = 1;
        // If set, `verbs_get_ctx_op` looks for the larger struct.
        context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
        Box::new(ContextObject {
            _later: LATER_FIELDS,
            abi,
            device,
            client,
            async_events,
            objects: Objects::default(),
            async_state: Arc::default(),
            faults,
            counters: AtomicU32::new(0),
            uses: AtomicUsize::new(1),
        })
    }

    /// # Safety
    /// A context of this library.
    pub unsafe fn from_abi<'a>(context: *mut ibv_context) -> &'a ContextObject {
        let before = offset_of!(ContextObject, abi) + offset_of!(verbs_context, context);
        // SAFETY: `as_abi` pointed into the object at that distance.
        unsafe { &*context.byte_sub(before).cast() }
    }

    /// Keeps the context until [`release`](Self::release) for an object: programs destroy objects after they have
    /// closed the device, for example in the order of a garbage collector. Objects of a protection domain are
    /// covered by it.
    pub fn hold(&self) {
        self.uses.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the program's use, or that of an object. The last one frees the context.
    ///
    /// # Safety
    /// A boxed context of this library, which the caller does not use any more.
    pub unsafe fn release(context: *mut ibv_context) {
        // SAFETY: by the caller's contract.
        let object = unsafe { ContextObject::from_abi(context) };
        if object.uses.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: by the caller's contract; nobody else uses it.
            drop(unsafe { Box::from_raw((&raw const *object).cast_mut()) });
        }
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
        match &self.async_events {
            AsyncEvents::Own(_) => None,
            AsyncEvents::Shared(events) => Some(events),
        }
    }

    /// State that outlives the context.
    pub fn async_state(&self) -> &Arc<AsyncState> {
        &self.async_state
    }

    /// The descriptor of asynchronous events.
    pub fn async_descriptor(&self) -> &EventDescriptor {
        self.async_events.descriptor()
    }

    /// Makes the descriptor of asynchronous events unreadable, after the end of the daemon.
    pub fn silence_async_events(&self) {
        // In a child of fork(2) the descriptor is that of the parent.
        if !self.client.is_of_this_process() {
            return;
        }
        self.async_descriptor().silence(self.client.async_fd());
    }

    /// Objects of the context.
    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Faults of the plan, if there is one.
    #[inline]
    pub fn faults(&self) -> Option<&ContextFaults> {
        self.faults.as_deref()
    }

    /// Handle of a new completion counter.
    pub fn next_counter(&self) -> u32 {
        self.counters.fetch_add(1, Ordering::Relaxed)
    }

    /// Its device.
    pub fn device(&self) -> &'static DeviceObject {
        self.device
    }
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
