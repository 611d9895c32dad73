//! Protection domains (ibv_alloc_pd(3)).

use super::context::{ContextObject, is_inherited};
use super::users::Users;
use crate::abi::{ibv_context, ibv_pd};
use crate::faults::creation_fault;
use crate::status::{errno_of, null_with, pointer_of};
use siw::{Pd, Persona};
use siw_faults::Object;
use std::ffi::c_int;

/// A protection domain as programs see it.
#[repr(C)]
pub struct PdObject {
    abi: ibv_pd,
    pd: Pd,
    /// Regions, windows and queues of the domain.
    pub users: Users,
}

impl PdObject {
    /// # Safety
    /// A protection domain of this library.
    pub unsafe fn from_abi<'a>(pd: *mut ibv_pd) -> &'a PdObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*pd.cast() }
    }

    /// Pointer for struct fields that hold a protection domain.
    pub fn as_abi(&self) -> *mut ibv_pd {
        (&raw const *self).cast_mut().cast()
    }

    /// The object of the client library.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// Errno with which the plan has the creation of an object of the domain fail.
    pub fn creation_fault(&self, object: Object) -> Option<c_int> {
        // SAFETY: a context is open as long as its objects exist.
        let context = unsafe { ContextObject::from_abi(self.abi.context) };
        creation_fault(object, &context.device().info().name)
    }

    /// Persona of its device.
    pub fn persona(&self) -> Persona {
        // SAFETY: a context is open as long as its objects exist.
        let context = unsafe { ContextObject::from_abi(self.abi.context) };
        context.device().persona()
    }

    /// Its context, for struct fields that hold one.
    pub fn context(&self) -> *mut ibv_context {
        self.abi.context
    }
}

/// ibv_alloc_pd(3)
pub unsafe fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: a context of this library.
    let object = unsafe { ContextObject::from_abi(context) };
    if let Some(errno) = creation_fault(Object::Pd, &object.device().info().name) {
        return null_with(errno);
    }
    let pd = object.client().alloc_pd().map(|pd| {
        object.hold();
        Box::new(PdObject {
            abi: ibv_pd { context, handle: 0 },
            pd,
            users: Users::default(),
        })
    });
    pointer_of("ibv_alloc_pd", pd).cast()
}

/// ibv_dealloc_pd(3)
pub unsafe fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: an object of this library, which holds its context.
    let context = unsafe { (*pd).context };
    // SAFETY: as above.
    if unsafe { is_inherited(context) } {
        return 0;
    }
    // SAFETY: a protection domain of this library.
    let object = unsafe { PdObject::from_abi(pd) };
    let unused = object.users.check_none("objects");
    if unused.is_ok() {
        // SAFETY: `alloc_pd` boxed it and held the context; the manual page forbids any later use.
        unsafe {
            drop(Box::from_raw(pd.cast::<PdObject>()));
            ContextObject::release(context);
        }
    }
    errno_of("ibv_dealloc_pd", unused)
}
