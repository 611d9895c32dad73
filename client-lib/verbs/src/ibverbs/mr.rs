//! Memory regions (ibv_reg_mr(3), ibv_rereg_mr(3), ibv_advise_mr(3)) of any memory of the program;
//! see `Pd::reg_memory` of the client library.

use super::buffer::{BufferObject, holds_range};
use super::context::is_inherited;
use super::pd::PdObject;
use crate::abi::*;
use crate::memory_calls;
use crate::status::{errno_of, fail_errno, fail_with, null_with, pointer_of};
use siw::{Access, AppMr, Error, Persona, ProcessMutex};
use siw_faults::Object;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;

/// A memory region as programs see it.
#[repr(C)]
pub struct MrObject {
    abi: ibv_mr,
    /// Address of the region for peers and work requests.
    iova: u64,
    /// None only if a change of the region failed after it was deregistered.
    region: ProcessMutex<Option<AppMr>>,
}

/// Checks the access flags, and removes optional ones that have no meaning here.
fn check_access(pd: &PdObject, access: u32) -> Result<Access, Error> {
    let mut access = Access(access & !Access::OPTIONAL.0 & !IBV_ACCESS_HUGETLB);
    if access.0 & IBV_ACCESS_ON_DEMAND != 0 {
        return Err(Error::Refused {
            errno: libc::EOPNOTSUPP,
            reason: "on-demand paging is not supported, nor needed: any memory can be registered"
                .into(),
        });
    }
    if access.without(Access::ALL).0 != 0 {
        return Err(Error::Invalid("unknown access bits"));
    }
    if access.allows_remote_changes() && !access.contains(Access::LOCAL_WRITE) {
        return Err(Error::Invalid(
            "REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE (ibv_reg_mr(3))",
        ));
    }
    // The device says IBV_ATOMIC_HCA.
    if pd.persona() != Persona::Iwarp && access.contains(Access::REMOTE_ATOMIC) {
        access |= Access::DEVICE_ATOMIC;
    }
    Ok(access)
}

/// Parameters of a registration.
struct RegionChange {
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: Access,
}

fn register(pd: &PdObject, registration: &RegionChange) -> Result<AppMr, Error> {
    memory_calls::declare_overridden();
    // SAFETY: a C program that registers memory promises to keep it until ibv_dereg_mr(3) returns.
    unsafe {
        pd.pd().reg_memory_iova(
            registration.address.cast(),
            registration.length,
            registration.iova,
            registration.access,
        )
    }
}

unsafe fn create(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    // SAFETY: a protection domain of this library.
    let pd_object = unsafe { PdObject::from_abi(pd) };
    if let Some(errno) = pd_object.creation_fault(Object::Mr) {
        return null_with(errno);
    }
    let created = check_access(pd_object, access).and_then(|access| {
        let registration = RegionChange {
            address,
            length,
            iova,
            access,
        };
        let region = register(pd_object, &registration)?;
        pd_object.users.add();
        Ok(Box::new(MrObject {
            abi: ibv_mr {
                context: pd_object.context(),
                pd,
                addr: address,
                length,
                handle: region.lkey(),
                lkey: region.lkey(),
                rkey: region.rkey(),
            },
            iova,
            region: ProcessMutex::new(Some(region)),
        }))
    });
    pointer_of("ibv_reg_mr", created).cast()
}

/// The exported function ibv_reg_mr(3).
pub unsafe fn reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: as the caller promised.
    unsafe { create(pd, address, length, address as u64, access as u32) }
}

/// ibv_reg_mr_iova(3)
pub unsafe fn reg_mr_iova(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: as the caller promised.
    unsafe { create(pd, address, length, iova, access as u32) }
}

/// ibv_reg_mr_iova2, which the macro ibv_reg_mr calls.
pub unsafe fn reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    // SAFETY: as the caller promised.
    unsafe { create(pd, address, length, iova, access) }
}

/// `struct ibv_mr_init_attr` of rdma-core 65; the distribution's header may be older.
#[repr(C)]
pub struct MrInit {
    length: usize,
    access: c_int,
    comp_mask: u64,
    iova: u64,
    addr: *mut c_void,
    fd: c_int,
    fd_offset: u64,
    dmah: *mut c_void,
    buf: *mut BufferObject,
}

const _: () = assert!(size_of::<MrInit>() == 72 && offset_of!(MrInit, addr) == 32);

/// `IBV_REG_MR_MASK_IOVA`
const MASK_IOVA: u64 = 1 << 0;
/// `IBV_REG_MR_MASK_ADDR`
const MASK_ADDR: u64 = 1 << 1;
/// `IBV_REG_MR_MASK_BUF`
const MASK_BUF: u64 = 1 << 5;

/// ibv_reg_mr_ex(3), of memory with an address: a dmabuf and a DMA handle are refused with EOPNOTSUPP.
pub unsafe fn reg_mr_ex(pd: *mut ibv_pd, attr: *mut MrInit) -> *mut ibv_mr {
    // SAFETY: a struct to read, of which only the fields in its mask are set.
    let attr = unsafe { &*attr };
    if attr.comp_mask & !(MASK_IOVA | MASK_ADDR | MASK_BUF) != 0 {
        return null_with(libc::EOPNOTSUPP);
    }
    if attr.comp_mask & MASK_ADDR == 0 {
        return null_with(libc::EINVAL);
    }
    let is_buffer = attr.comp_mask & MASK_BUF != 0;
    // SAFETY: a buffer of this library.
    if is_buffer && !unsafe { holds_range(attr.buf, pd, attr.addr, attr.length) } {
        return null_with(libc::EINVAL);
    }
    let iova = if attr.comp_mask & MASK_IOVA != 0 {
        attr.iova
    } else {
        attr.addr as u64
    };
    // SAFETY: as the caller promised.
    unsafe { create(pd, attr.addr, attr.length, iova, attr.access as u32) }
}

/// ibv_dereg_mr(3)
pub unsafe fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: an object of this library, whose context is open.
    if unsafe { is_inherited((*mr).context) } {
        return 0;
    }
    let object: *mut MrObject = mr.cast();
    // SAFETY: a region of this library.
    let (pd, region) = unsafe { ((*mr).pd, &(*object).region) };
    let mut region = region.lock_or_end_call();
    if let Some(Err(failed)) = region.take().map(AppMr::dereg) {
        *region = Some(failed.object);
        return fail_with("ibv_dereg_mr", &failed.error);
    }
    drop(region);
    // SAFETY: the protection domain cannot be freed before its regions.
    unsafe { PdObject::from_abi(pd) }.users.remove();
    // SAFETY: `create` boxed it; the manual page forbids any later use.
    drop(unsafe { Box::from_raw(object) });
    0
}

/// The negative numbers of ibv_rereg_mr(3).
const REREG_ERR_INPUT: c_int = -1;
const REREG_ERR_CMD: c_int = -4;
const REREG_ERR_CMD_AND_REG_NEW: c_int = -5;

/// ibv_rereg_mr(3): registers the region anew, then deregisters the old registration. If only
/// access rights change, the keys are kept where that is possible (`AppMr::change_access`).
pub unsafe fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let changes = |flag: u32| flags as u32 & flag != 0;
    let known =
        IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    if flags == 0
        || flags as u32 & !known != 0
        || (changes(IBV_REREG_MR_CHANGE_PD) && pd.is_null())
        || (changes(IBV_REREG_MR_CHANGE_TRANSLATION) && (address.is_null() || length == 0))
    {
        fail_errno(libc::EINVAL);
        return REREG_ERR_INPUT;
    }
    let object: *mut MrObject = mr.cast();
    // SAFETY: a region of this library.
    let (abi, iova_of_region, region) =
        unsafe { (&mut *mr, &mut (*object).iova, &(*object).region) };
    let mut region = region.lock_or_end_call();
    // SAFETY: protection domains of this library.
    let (old_pd, new_pd) = unsafe {
        let old = PdObject::from_abi(abi.pd);
        let new = if changes(IBV_REREG_MR_CHANGE_PD) {
            PdObject::from_abi(pd)
        } else {
            old
        };
        (old, new)
    };
    // As in libibverbs, a new translation begins at its own address.
    let (address, length, iova) = if changes(IBV_REREG_MR_CHANGE_TRANSLATION) {
        (address, length, address as u64)
    } else {
        (abi.addr, abi.length, *iova_of_region)
    };
    let access = if changes(IBV_REREG_MR_CHANGE_ACCESS) {
        check_access(new_pd, access as u32)
    } else {
        Ok(region.as_ref().map_or(Access::LOCAL_WRITE, AppMr::access))
    };
    let access = match access {
        Ok(access) => access,
        Err(error) => {
            fail_with("ibv_rereg_mr", &error);
            return REREG_ERR_INPUT;
        }
    };
    // Access rights alone are changed in place if possible: the peers' keys stay valid.
    if flags as u32 == IBV_REREG_MR_CHANGE_ACCESS
        && let Some(current) = region.as_mut()
    {
        match current.change_access(access) {
            Ok(()) => return 0,
            Err(error) if error.errno() == libc::EINVAL => {}
            Err(error) => {
                fail_with("ibv_rereg_mr", &error);
                return REREG_ERR_INPUT;
            }
        }
    }
    let registration = RegionChange {
        address,
        length,
        iova,
        access,
    };
    let new = match register(new_pd, &registration) {
        Ok(new) => new,
        Err(error) => {
            fail_with("ibv_rereg_mr", &error);
            return REREG_ERR_CMD;
        }
    };
    if let Some(Err(failed)) = region.take().map(AppMr::dereg) {
        // Windows are bound to it: it stays unchanged, and the new registration is dropped.
        *region = Some(failed.object);
        fail_with("ibv_rereg_mr", &failed.error);
        return REREG_ERR_CMD_AND_REG_NEW;
    }
    new_pd.users.add();
    old_pd.users.remove();
    abi.pd = new_pd.as_abi();
    abi.context = new_pd.context();
    (abi.addr, abi.length) = (address, length);
    *iova_of_region = iova;
    (abi.lkey, abi.rkey) = (new.lkey(), new.rkey());
    *region = Some(new);
    0
}

/// IBV_ADVISE_MR_FLAG_FLUSH
const ADVISE_FLUSH: u32 = 1;

/// ibv_advise_mr(3), which programs call through the context: all memory is always present.
pub unsafe fn advise_mr(
    _pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    flags: u32,
    _list: *mut ibv_sge,
    _count: u32,
) -> c_int {
    let known = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
    if advice > known || flags & !ADVISE_FLUSH != 0 {
        return fail_errno(libc::EINVAL);
    }
    errno_of("ibv_advise_mr", Ok(()))
}
