//! Shared receive queues (ibv_create_srq(3), ibv_modify_srq(3), ibv_query_srq(3)).

use super::context::{ContextObject, is_inherited};
use super::faulty::SrqFaults;
use super::pd::PdObject;
use super::users::{EventCount, Users};
use crate::abi::*;
use crate::faults::creation_fault;
use crate::status::{errno_of, fail_errno, null_with, pointer_of};
use siw::{Error, Srq, SrqInit};
use siw_faults::Object;
use std::ffi::c_int;

/// A shared receive queue as programs see it.
#[repr(C)]
pub struct SrqObject {
    abi: ibv_srq,
    srq: Srq,
    /// Queue pairs that use the queue.
    pub users: Users,
    /// Asynchronous events.
    pub async_events: EventCount,
    /// Faults of the plan, if there is one.
    faults: Option<Box<SrqFaults>>,
}

impl SrqObject {
    /// # Safety
    /// A shared receive queue of this library.
    #[inline]
    pub unsafe fn from_abi<'a>(srq: *mut ibv_srq) -> &'a SrqObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*srq.cast() }
    }

    /// Pointer for struct fields that hold a shared receive queue.
    pub fn as_abi(&self) -> *mut ibv_srq {
        (&raw const *self).cast_mut().cast()
    }

    /// The object of the client library.
    #[inline]
    pub fn srq(&self) -> &Srq {
        &self.srq
    }

    /// Faults of the plan, if there is one.
    pub fn faults(&self) -> Option<&SrqFaults> {
        self.faults.as_deref()
    }
}

/// ibv_create_srq(3)
pub unsafe fn create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: as the caller promised.
    let (pd_object, init) = unsafe { (PdObject::from_abi(pd), &mut *init) };
    // SAFETY: its context is open.
    let context = unsafe { ContextObject::from_abi(pd_object.context()) };
    let device = &context.device().info().name;
    if let Some(errno) = creation_fault(Object::Srq, device) {
        return null_with(errno);
    }
    let wanted = SrqInit {
        max_wr: init.attr.max_wr,
        max_sge: init.attr.max_sge,
        ..SrqInit::default()
    };
    let created = pd_object.pd().create_srq(&wanted).and_then(|srq| {
        let granted = srq.query()?;
        init.attr.max_wr = granted.max_wr;
        init.attr.max_sge = granted.max_sge;
        // SAFETY: the struct is made of numbers and pointers; a mutex and a condition variable of
        // zeros are initialised.
        let mut abi: ibv_srq = unsafe { std::mem::zeroed() };
        abi.context = pd_object.context();
        abi.srq_context = init.srq_context;
        abi.pd = pd;
        abi.handle = srq.srq_id();
        pd_object.users.add();
        let queue = Box::new(SrqObject {
            abi,
            srq,
            users: Users::default(),
            async_events: EventCount::default(),
            faults: context.faults().map(|_| Box::new(SrqFaults::new(device))),
        });
        context
            .objects()
            .srqs
            .insert(queue.srq.srq_id(), queue.as_abi());
        if let Some(faults) = context.faults() {
            faults.on_new_object(context);
        }
        Ok(queue)
    });
    pointer_of("ibv_create_srq", created).cast()
}

/// ibv_create_srq_ex(3): only basic queues; XRC and tag matching fail.
pub unsafe fn create_srq_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: a struct to read.
    let attr = unsafe { &mut *attr };
    let is_basic = attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 || attr.srq_type == IBV_SRQT_BASIC;
    if !is_basic || attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 {
        return null_with(libc::EOPNOTSUPP);
    }
    let mut init = ibv_srq_init_attr {
        srq_context: attr.srq_context,
        attr: attr.attr,
    };
    // SAFETY: as the caller promised.
    let queue = unsafe { create_srq(attr.pd, &mut init) };
    attr.attr = init.attr;
    queue
}

/// ibv_get_srq_num(3): only XRC numbers shared receive queues.
pub unsafe fn get_srq_num(_srq: *mut ibv_srq, _number: *mut u32) -> c_int {
    fail_errno(libc::EOPNOTSUPP)
}

/// ibv_modify_srq(3)
pub unsafe fn modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: as the caller promised.
    let (queue, attr) = unsafe { (SrqObject::from_abi(srq), &*attr) };
    let mask = mask as u32;
    if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
        return fail_errno(libc::EINVAL);
    }
    let change = || -> Result<(), Error> {
        if mask & IBV_SRQ_MAX_WR != 0 {
            queue.srq.resize(attr.max_wr)?;
        }
        if mask & IBV_SRQ_LIMIT != 0 {
            queue.srq.arm_limit(attr.srq_limit)?;
        }
        Ok(())
    };
    errno_of("ibv_modify_srq", change())
}

/// ibv_query_srq(3)
pub unsafe fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: a shared receive queue of this library.
    let queried = unsafe { SrqObject::from_abi(srq) }.srq.query();
    let written = queried.map(|state| {
        // SAFETY: a struct to write.
        unsafe {
            attr.write(ibv_srq_attr {
                max_wr: state.max_wr,
                max_sge: state.max_sge,
                srq_limit: state.limit,
            });
        }
    });
    errno_of("ibv_query_srq", written)
}

/// ibv_destroy_srq(3)
pub unsafe fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: an object of this library, whose context is open.
    if unsafe { is_inherited((*srq).context) } {
        return 0;
    }
    // SAFETY: a shared receive queue of this library.
    let queue = unsafe { SrqObject::from_abi(srq) };
    let unused = queue.users.check_none("queue pairs");
    if unused.is_ok() {
        // SAFETY: its context is open, and its protection domain cannot be freed before.
        unsafe {
            let context = ContextObject::from_abi(queue.abi.context);
            context.objects().srqs.remove(queue.srq.srq_id());
            if let Some(faults) = queue.faults() {
                faults.reset(context);
            }
            queue.async_events.wait_acknowledged();
            PdObject::from_abi(queue.abi.pd).users.remove();
        }
        // SAFETY: `create_srq` boxed it; the manual page forbids any later use.
        drop(unsafe { Box::from_raw(srq.cast::<SrqObject>()) });
    }
    errno_of("ibv_destroy_srq", unused)
}
