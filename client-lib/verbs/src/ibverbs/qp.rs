//! Queue pairs (ibv_create_qp(3), ibv_create_qp_ex(3), ibv_destroy_qp(3)). Their states are in
//! `qp_state.rs`, posting in `post.rs` and `qp_ex.rs`.

use super::comp_counter::{AttachAttr, AttachedCounter, CompCounterAbi, CounterObject};
use super::context::{ContextObject, is_inherited};
use super::cq::CqObject;
use super::faulty::{QpFaults, replace_wr_complete};
use super::pd::PdObject;
use super::qp_ex::{Batch, fill_extended};
use super::qp_state::Attributes;
use super::srq::SrqObject;
use super::users::EventCount;
use crate::abi::*;
use crate::faults::creation_fault;
use crate::status::{errno_of, pointer_of, set_errno};
use siw::{Error, ProcessMutex, Qp, QpInit};
use siw_faults::Object;
use std::ffi::c_int;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicU64, Ordering};

/// A queue pair as programs see it: `struct ibv_qp_ex` begins with `struct ibv_qp`.
#[repr(C)]
pub struct QpObject {
    abi: ibv_qp_ex,
    _later: LaterFields,
    qp: Qp,
    /// Requests since `ibv_wr_start`.
    pub batch: Batch,
    /// Attributes set by ibv_modify_qp(3).
    pub attributes: ProcessMutex<Attributes>,
    /// Asynchronous events.
    pub async_events: EventCount,
    /// Attached completion counters, with the operations that each counts.
    counters: ProcessMutex<Vec<AttachedCounter>>,
    is_extended: bool,
    is_datagram: bool,
    /// Number that no other queue pair of the process has or will have.
    pub serial: u64,
    /// Faults of the plan, if there is one.
    faults: Option<Box<QpFaults>>,
}

static LAST_SERIAL: AtomicU64 = AtomicU64::new(0);

impl QpObject {
    /// # Safety
    /// A queue pair of this library.
    #[inline]
    pub unsafe fn from_abi<'a>(qp: *mut ibv_qp) -> &'a QpObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*qp.cast() }
    }

    /// Pointer for struct fields that hold a queue pair.
    pub fn as_abi(&self) -> *mut ibv_qp {
        (&raw const *self).cast_mut().cast()
    }

    /// The object of the client library.
    #[inline]
    pub fn qp(&self) -> &Qp {
        &self.qp
    }

    /// Attached completion counters.
    pub fn lock_counters(&self) -> MutexGuard<'_, Vec<AttachedCounter>> {
        self.counters.lock_or_end_call()
    }

    /// The struct that the program sees.
    pub fn abi(&self) -> &ibv_qp {
        &self.abi.qp_base
    }

    /// Returns whether it sends and receives datagrams (UD), without a connection.
    #[inline]
    pub fn is_datagram(&self) -> bool {
        self.is_datagram
    }

    /// Faults of the plan, if there is one.
    pub fn faults(&self) -> Option<&QpFaults> {
        self.faults.as_deref()
    }

    /// Forgets the faults of a queue pair that is reset or destroyed, and its completions that they hold back.
    pub fn reset_faults(&self) {
        if let Some(faults) = &self.faults {
            faults.reset(self.context());
            for cq in [self.abi().send_cq, self.abi().recv_cq] {
                // SAFETY: the completion queues of a queue pair cannot be freed before it.
                let queue = unsafe { CqObject::from_abi(cq) };
                if let Some(faults) = queue.faults() {
                    faults.discard_of(self.abi().qp_num);
                }
            }
        }
    }

    /// Its context.
    pub fn context(&self) -> &ContextObject {
        // SAFETY: a context is open as long as its objects exist.
        unsafe { ContextObject::from_abi(self.abi.qp_base.context) }
    }
}

/// Converts capabilities to those of the client library.
fn to_init(cap: &ibv_qp_cap, sq_sig_all: c_int) -> QpInit {
    QpInit {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline: cap.max_inline_data,
        sq_sig_all: sq_sig_all != 0,
    }
}

/// Converts the granted limits.
pub(super) fn to_cap(granted: &QpInit) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: granted.max_send_wr,
        max_recv_wr: granted.max_recv_wr,
        max_send_sge: granted.max_send_sge,
        max_recv_sge: granted.max_recv_sge,
        max_inline_data: granted.max_inline,
    }
}

fn not_supported(reason: &str) -> Error {
    Error::Refused {
        errno: libc::EOPNOTSUPP,
        reason: reason.into(),
    }
}

/// Fails if the device has no datagrams.
fn check_datagrams(context: &ContextObject) -> Result<(), Error> {
    if !context.device().persona().has_datagrams() {
        return Err(not_supported(
            "iWARP has reliable connections only (RC): siwrun --persona roce shows a device with datagrams (UD)",
        ));
    }
    if !context.client().has_datagrams() {
        return Err(not_supported("this siwd has no datagrams (UD): update it"));
    }
    Ok(())
}

/// # Safety
/// The objects in `init` are NULL or of this library.
unsafe fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    is_extended: bool,
) -> Result<Box<QpObject>, Error> {
    let is_datagram = init.qp_type == IBV_QPT_UD;
    if init.qp_type != IBV_QPT_RC && !is_datagram {
        return Err(not_supported(
            "siwd has reliable connections (RC) and datagrams (UD) only",
        ));
    }
    if pd.is_null() || init.send_cq.is_null() || init.recv_cq.is_null() {
        return Err(Error::Invalid(
            "a queue pair needs a protection domain and two completion queues",
        ));
    }
    // SAFETY: by the caller's contract.
    let (pd_object, send_cq, recv_cq) = unsafe {
        (
            PdObject::from_abi(pd),
            CqObject::from_abi(init.send_cq),
            CqObject::from_abi(init.recv_cq),
        )
    };
    // SAFETY: a context is open as long as its objects exist.
    let context = unsafe { ContextObject::from_abi(pd_object.context()) };
    if is_datagram {
        check_datagrams(context)?;
    }
    let device = &context.device().info().name;
    if let Some(errno) = creation_fault(Object::Qp, device) {
        return Err(std::io::Error::from_raw_os_error(errno).into());
    }
    let wanted = to_init(&init.cap, init.sq_sig_all);
    let srq = (!init.srq.is_null())
        // SAFETY: by the caller's contract.
        .then(|| unsafe { SrqObject::from_abi(init.srq) });
    let pd_of = pd_object.pd();
    let qp = match srq {
        None => pd_of.create_qp(send_cq.cq(), recv_cq.cq(), &wanted)?,
        Some(srq) => pd_of.create_qp_with_srq(send_cq.cq(), recv_cq.cq(), srq.srq(), &wanted)?,
    };
    init.cap = to_cap(&qp.granted_limits());
    // SAFETY: the struct is made of numbers, pointers and optional function pointers; a mutex and a
    // condition variable of zeros are initialised.
    let mut abi: ibv_qp_ex = unsafe { std::mem::zeroed() };
    let base = &mut abi.qp_base;
    base.context = pd_object.context();
    base.qp_context = init.qp_context;
    base.pd = pd;
    base.send_cq = init.send_cq;
    base.recv_cq = init.recv_cq;
    base.srq = init.srq;
    base.handle = qp.qp_num();
    base.qp_num = qp.qp_num();
    base.state = IBV_QPS_RESET;
    base.qp_type = init.qp_type;
    fill_extended(&mut abi, is_datagram);
    let serial = LAST_SERIAL.fetch_add(1, Ordering::Relaxed) + 1;
    let faults = context.faults().map(|_| {
        replace_wr_complete(&mut abi);
        Box::new(QpFaults::new(device, qp.qp_num(), serial))
    });
    pd_object.users.add();
    send_cq.users.add();
    recv_cq.users.add();
    if let Some(srq) = srq {
        srq.users.add();
    }
    let queue_pair = Box::new(QpObject {
        abi,
        _later: LATER_FIELDS,
        batch: Batch::default(),
        attributes: ProcessMutex::new(Attributes::new(init, context.device().persona())),
        async_events: EventCount::default(),
        counters: ProcessMutex::default(),
        is_extended,
        is_datagram,
        serial,
        faults,
        qp,
    });
    let number = queue_pair.qp.qp_num();
    context.objects().qps.insert(number, queue_pair.as_abi());
    if let Some(faults) = context.faults() {
        faults.on_new_object(context);
    }
    Ok(queue_pair)
}

/// ibv_create_qp(3)
pub unsafe fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: as the caller promised.
    let queue_pair = unsafe { create(pd, &mut *init, false) };
    pointer_of("ibv_create_qp", queue_pair).cast()
}

/// Operations that a queue pair can be created with for `ibv_wr_*`.
const SEND_OPS: u64 = (IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW
    | IBV_QP_EX_WITH_SEND_WITH_INV) as u64;

/// Those of datagrams.
const DATAGRAM_OPS: u64 = (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;

fn check_extended(attr: &ibv_qp_init_attr_ex) -> Result<bool, Error> {
    let known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let flags_are_zero =
        attr.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS == 0 || attr.create_flags == 0;
    if attr.comp_mask & !(known | IBV_QP_INIT_ATTR_CREATE_FLAGS) != 0 || !flags_are_zero {
        return Err(not_supported(
            "ibv_create_qp_ex supports only the attributes PD and SEND_OPS_FLAGS",
        ));
    }
    if attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
        return Err(Error::Invalid("a queue pair needs a protection domain"));
    }
    let with_ops = attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
    let (known, reason) = match attr.qp_type {
        IBV_QPT_UD => (
            DATAGRAM_OPS,
            "datagrams (UD) have SEND and SEND with immediate data only",
        ),
        _ => (SEND_OPS, "iWARP does not have this send operation"),
    };
    if with_ops && attr.send_ops_flags & !known != 0 {
        return Err(not_supported(reason));
    }
    Ok(with_ops)
}

/// ibv_create_qp_ex(3), which programs call through the context.
pub unsafe fn create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: a struct to read and write.
    let attr = unsafe { &mut *attr };
    let created = check_extended(attr).and_then(|is_extended| {
        let mut init = ibv_qp_init_attr {
            qp_context: attr.qp_context,
            send_cq: attr.send_cq,
            recv_cq: attr.recv_cq,
            srq: attr.srq,
            cap: attr.cap,
            qp_type: attr.qp_type,
            sq_sig_all: attr.sq_sig_all,
        };
        // SAFETY: as the caller promised.
        let queue_pair = unsafe { create(attr.pd, &mut init, is_extended) }?;
        attr.cap = init.cap;
        Ok(queue_pair)
    });
    pointer_of("ibv_create_qp_ex", created).cast()
}

/// ibv_qp_to_qp_ex(3): NULL unless the queue pair was created with SEND_OPS_FLAGS.
pub unsafe fn to_extended(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: a queue pair of this library.
    if unsafe { QpObject::from_abi(qp) }.is_extended {
        qp.cast()
    } else {
        std::ptr::null_mut()
    }
}

/// ibv_qp_attach_comp_cntr(3)
pub unsafe fn attach_counter(
    qp: *mut ibv_qp,
    counter: *mut CompCounterAbi,
    attr: *mut AttachAttr,
) -> c_int {
    // SAFETY: objects of this library, and a struct to read.
    let (queue_pair, counter, attr): (&'static QpObject, &'static CounterObject, _) = unsafe {
        (
            QpObject::from_abi(qp),
            CounterObject::from_abi(counter),
            &*attr,
        )
    };
    let is_new = matches!(queue_pair.verbs_state(), IBV_QPS_RESET | IBV_QPS_INIT);
    let context = queue_pair.abi().context;
    let mut attached = queue_pair.lock_counters();
    let done = counter.attach(attr, context, queue_pair.qp(), is_new, &mut attached);
    errno_of("ibv_qp_attach_comp_cntr", done)
}

/// ibv_destroy_qp(3)
pub unsafe fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: an object of this library, whose context is open.
    if unsafe { is_inherited((*qp).context) } {
        return 0;
    }
    // SAFETY: a queue pair of this library.
    let queue_pair = unsafe { QpObject::from_abi(qp) };
    let objects = queue_pair.context().objects();
    objects.qps.remove(queue_pair.qp.qp_num());
    queue_pair.reset_faults();
    queue_pair.async_events.wait_acknowledged();
    for (counter, _) in queue_pair.lock_counters().drain(..) {
        counter.detach(&queue_pair.qp);
    }
    // SAFETY: the objects used by a queue pair cannot be freed before it.
    let (pd, send_cq, recv_cq, srq) = unsafe {
        let base = queue_pair.abi();
        (
            PdObject::from_abi(base.pd),
            CqObject::from_abi(base.send_cq),
            CqObject::from_abi(base.recv_cq),
            (!base.srq.is_null()).then(|| SrqObject::from_abi(base.srq)),
        )
    };
    // SAFETY: `create` boxed it; the manual page forbids any later use.
    drop(unsafe { Box::from_raw(qp.cast::<QpObject>()) });
    pd.users.remove();
    send_cq.users.remove();
    recv_cq.users.remove();
    if let Some(srq) = srq {
        srq.users.remove();
    }
    set_errno(0);
    0
}
