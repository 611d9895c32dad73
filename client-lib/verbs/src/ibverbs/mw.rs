//! Memory windows (ibv_alloc_mw(3), ibv_bind_mw(3)), which programs call through the context.

use super::context::is_inherited;
use super::pd::PdObject;
use crate::abi::*;
use crate::status::{null_with, pointer_of};
use siw::{Access, Mw, MwBind, WindowType};
use siw_faults::Object;
use std::ffi::c_int;

/// A window as programs see it.
#[repr(C)]
pub struct MwObject {
    abi: ibv_mw,
    mw: Mw,
}

impl MwObject {
    /// # Safety
    /// A window of this library.
    pub unsafe fn from_abi<'a>(mw: *mut ibv_mw) -> &'a MwObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*mw.cast() }
    }

    /// The object of the client library.
    pub fn mw(&self) -> &Mw {
        &self.mw
    }
}

/// ibv_alloc_mw(3)
pub unsafe fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    let window_type = match kind {
        IBV_MW_TYPE_1 => WindowType::One,
        IBV_MW_TYPE_2 => WindowType::Two,
        _ => return null_with(libc::EINVAL),
    };
    // SAFETY: a protection domain of this library.
    let pd_object = unsafe { PdObject::from_abi(pd) };
    if let Some(errno) = pd_object.creation_fault(Object::Mw) {
        return null_with(errno);
    }
    let window = pd_object.pd().alloc_mw(window_type).map(|mw| {
        pd_object.users.add();
        Box::new(MwObject {
            abi: ibv_mw {
                context: pd_object.context(),
                pd,
                rkey: mw.rkey(),
                handle: mw.rkey(),
                type_: kind,
            },
            mw,
        })
    });
    pointer_of("ibv_alloc_mw", window).cast()
}

/// ibv_dealloc_mw(3)
pub unsafe fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: an object of this library, whose context is open.
    if unsafe { is_inherited((*mw).context) } {
        return 0;
    }
    // SAFETY: a window of this library, whose protection domain cannot be freed before.
    unsafe { PdObject::from_abi((*mw).pd) }.users.remove();
    // SAFETY: `alloc_mw` boxed it; the manual page forbids any later use.
    drop(unsafe { Box::from_raw(mw.cast::<MwObject>()) });
    0
}

/// Converts the binding of a window.
///
/// # Safety
/// The region of `info` is NULL or one of this library.
pub(super) unsafe fn to_binding(info: &ibv_mw_bind_info) -> MwBind {
    // SAFETY: by the caller's contract.
    let lkey = unsafe { info.mr.as_ref() }.map_or(0, |region| region.lkey);
    MwBind {
        lkey,
        addr: info.addr,
        length: info.length,
        // Programs copy the access flags of the region, but a window is only for peers.
        access: Access(info.mw_access_flags).without(Access::LOCAL_WRITE),
    }
}
