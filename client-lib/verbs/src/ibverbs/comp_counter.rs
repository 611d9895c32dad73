//! Completion counters (ibv_create_comp_cntr(3), of rdma-core 65): sums of the finished work requests
//! of queue pairs, which the client library counts ([`siw::Qp::finished`]). The structs are those of
//! that release; the distribution's header may be older.

use super::context::{ContextObject, is_inherited};
use crate::abi::*;
use crate::status::{fail_errno, pointer_of};
use siw::{Error, Outcomes, ProcessMutex, Qp};
use std::ffi::c_int;
use std::sync::MutexGuard;

/// `struct ibv_comp_cntr`
#[repr(C)]
pub struct CompCounterAbi {
    context: *mut ibv_context,
    handle: u32,
}

/// `struct ibv_comp_cntr_init_attr`
#[repr(C)]
pub struct CounterInit {
    comp_mask: u32,
    kind: u32,
    flags: u32,
}

/// `struct ibv_qp_attach_comp_cntr_attr`
#[repr(C)]
pub struct AttachAttr {
    comp_mask: u32,
    op_mask: u32,
}

/// `struct ibv_comp_cntr_caps`
#[repr(C)]
pub struct CounterCaps {
    max_value: u64,
    max_counters: u32,
    supported_qp_attach_ops: u32,
}

const _: () = assert!(size_of::<CompCounterAbi>() == 16 && size_of::<CounterCaps>() == 16);

/// `IBV_COMP_CNTR_TYPE_WRS`
const COUNT_REQUESTS: u32 = 0;
/// `IBV_COMP_CNTR_TYPE_BYTES`
const COUNT_BYTES: u32 = 1;
/// `enum ibv_qp_attach_comp_cntr_op`
const OP_SEND: u32 = 1 << 0;
const OP_RECV: u32 = 1 << 1;
const OP_READ: u32 = 1 << 2;
const OP_WRITE: u32 = 1 << 4;
/// Counters of a peer's operations would need a store of the daemon for each of them.
const SUPPORTED_OPS: u32 = OP_SEND | OP_RECV | OP_READ | OP_WRITE;

/// A completion counter as programs see it.
#[repr(C)]
pub struct CounterObject {
    abi: CompCounterAbi,
    state: ProcessMutex<CounterState>,
}

/// A counter that is attached to a queue pair, with the operations that it counts.
pub type AttachedCounter = (&'static CounterObject, u32);

/// Values of a counter without those of the attached queue pairs, and these queue pairs.
#[derive(Default)]
struct CounterState {
    completed: u64,
    failed: u64,
    sources: Vec<Source>,
}

/// Operations of a queue pair that a counter counts.
struct Source {
    queue_pair: &'static Qp,
    ops: u32,
}

impl Source {
    /// Requests that have finished so far.
    fn count(&self) -> (u64, u64) {
        let finished = self.queue_pair.finished();
        let of_op = |op: u32, outcomes: Outcomes| {
            if self.ops & op != 0 {
                (outcomes.succeeded, outcomes.failed)
            } else {
                (0, 0)
            }
        };
        add_up([
            of_op(OP_SEND, finished.sends),
            of_op(OP_RECV, finished.receives),
            of_op(OP_READ, finished.reads),
            of_op(OP_WRITE, finished.writes),
        ])
    }
}

/// Sums of completed and of failed requests.
fn add_up(counts: impl IntoIterator<Item = (u64, u64)>) -> (u64, u64) {
    let counts = counts.into_iter();
    counts.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

impl CounterState {
    fn attached(&self) -> (u64, u64) {
        add_up(self.sources.iter().map(Source::count))
    }

    /// Adds to the values; they wrap to zero.
    fn add(&mut self, (completed, failed): (u64, u64)) {
        self.completed = self.completed.wrapping_add(completed);
        self.failed = self.failed.wrapping_add(failed);
    }

    fn subtract(&mut self, (completed, failed): (u64, u64)) {
        self.add((completed.wrapping_neg(), failed.wrapping_neg()));
    }

    fn values(&self) -> (u64, u64) {
        let (completed, failed) = self.attached();
        (
            self.completed.wrapping_add(completed),
            self.failed.wrapping_add(failed),
        )
    }
}

impl CounterObject {
    /// # Safety
    /// A counter of this library.
    pub unsafe fn from_abi<'a>(counter: *mut CompCounterAbi) -> &'a CounterObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*counter.cast() }
    }

    fn lock(&self) -> MutexGuard<'_, CounterState> {
        self.state.lock_or_end_call()
    }

    /// Counts operations of a queue pair from now on. `attached`: its counters; `is_new`: it is in one of the
    /// states in which counters are attached.
    pub fn attach(
        &'static self,
        attr: &AttachAttr,
        context: *mut ibv_context,
        queue_pair: &'static Qp,
        is_new: bool,
        attached: &mut Vec<AttachedCounter>,
    ) -> Result<(), Error> {
        let ops = attr.op_mask;
        if attr.comp_mask != 0 || ops == 0 {
            return Err(Error::Invalid("comp_mask must be 0, and op_mask must not"));
        }
        if ops & !SUPPORTED_OPS != 0 {
            return Err(not_supported(
                "siwd counts SEND, RECV, RDMA_READ and RDMA_WRITE of the queue pair itself only",
            ));
        }
        if self.abi.context != context {
            return Err(Error::Invalid("the counter is of another context"));
        }
        if !is_new {
            return Err(Error::Invalid(
                "a counter is attached in the states RESET and INIT only",
            ));
        }
        if attached.iter().any(|(_, taken)| taken & ops != 0) {
            return Err(Error::Refused {
                errno: libc::EBUSY,
                reason: "another counter already counts one of these operations".into(),
            });
        }
        queue_pair.start_counting()?;
        let source = Source { queue_pair, ops };
        let mut state = self.lock();
        // The counter starts where it is, whatever the queue pair has done before.
        state.subtract(source.count());
        state.sources.push(source);
        attached.push((self, ops));
        Ok(())
    }

    /// Detaches a queue pair that is about to be destroyed; its counts stay.
    pub fn detach(&self, queue_pair: &Qp) {
        let mut state = self.lock();
        while let Some(at) = state
            .sources
            .iter()
            .position(|source| std::ptr::eq(source.queue_pair, queue_pair))
        {
            let counts = state.sources.swap_remove(at).count();
            state.add(counts);
        }
    }
}

fn not_supported(reason: &str) -> Error {
    Error::Refused {
        errno: libc::EOPNOTSUPP,
        reason: reason.into(),
    }
}

/// ibv_query_comp_cntr_caps(3); `length` is the size of the struct in the program's release.
pub unsafe fn query_caps(
    _context: *mut ibv_context,
    caps: *mut CounterCaps,
    length: usize,
) -> c_int {
    let known = CounterCaps {
        max_value: u64::MAX,
        max_counters: u32::MAX,
        supported_qp_attach_ops: SUPPORTED_OPS,
    };
    // SAFETY: the caller's struct has `length` bytes; fields unknown to this release are zeroed.
    unsafe {
        let bytes: *mut u8 = caps.cast();
        bytes.write_bytes(0, length);
        bytes.copy_from_nonoverlapping((&raw const known).cast(), length.min(size_of_val(&known)));
    }
    0
}

/// ibv_create_comp_cntr(3)
pub unsafe fn create(context: *mut ibv_context, init: *mut CounterInit) -> *mut CompCounterAbi {
    // SAFETY: a struct to read.
    let init = unsafe { &*init };
    let checked = match init.kind {
        _ if init.comp_mask != 0 || init.flags != 0 => Err(Error::Invalid(
            "comp_mask and flags of ibv_create_comp_cntr(3) must be 0",
        )),
        COUNT_REQUESTS => Ok(()),
        COUNT_BYTES => Err(not_supported("siwd counts work requests only, not bytes")),
        _ => Err(Error::Invalid("unknown type of completion counter")),
    };
    let created = checked.map(|()| {
        // SAFETY: a context of this library.
        let object = unsafe { ContextObject::from_abi(context) };
        object.hold();
        let handle = object.next_counter();
        Box::new(CounterObject {
            abi: CompCounterAbi { context, handle },
            state: ProcessMutex::default(),
        })
    });
    pointer_of("ibv_create_comp_cntr", created).cast()
}

/// ibv_destroy_comp_cntr(3)
pub unsafe fn destroy(counter: *mut CompCounterAbi) -> c_int {
    // SAFETY: an object of this library, which holds its context.
    let context = unsafe { (*counter).context };
    // SAFETY: as above.
    if unsafe { is_inherited(context) } {
        return 0;
    }
    // SAFETY: a counter of this library.
    let object = unsafe { CounterObject::from_abi(counter) };
    if !object.lock().sources.is_empty() {
        return fail_errno(libc::EBUSY);
    }
    // SAFETY: `create` boxed it and held the context; the manual page forbids any later use.
    unsafe {
        drop(Box::from_raw(counter.cast::<CounterObject>()));
        ContextObject::release(context);
    }
    0
}

/// ibv_set_comp_cntr(3)
pub unsafe fn set_completed(counter: *mut CompCounterAbi, value: u64) -> c_int {
    // SAFETY: a counter of this library, as in all functions below.
    let mut state = unsafe { CounterObject::from_abi(counter) }.lock();
    state.completed = value.wrapping_sub(state.attached().0);
    0
}

/// ibv_set_err_comp_cntr(3)
pub unsafe fn set_failed(counter: *mut CompCounterAbi, value: u64) -> c_int {
    // SAFETY: as above.
    let mut state = unsafe { CounterObject::from_abi(counter) }.lock();
    state.failed = value.wrapping_sub(state.attached().1);
    0
}

/// ibv_inc_comp_cntr(3)
pub unsafe fn increment_completed(counter: *mut CompCounterAbi, amount: u64) -> c_int {
    // SAFETY: as above.
    unsafe { CounterObject::from_abi(counter) }
        .lock()
        .add((amount, 0));
    0
}

/// ibv_inc_err_comp_cntr(3)
pub unsafe fn increment_failed(counter: *mut CompCounterAbi, amount: u64) -> c_int {
    // SAFETY: as above.
    unsafe { CounterObject::from_abi(counter) }
        .lock()
        .add((0, amount));
    0
}

/// ibv_read_comp_cntr(3)
pub unsafe fn read_completed(counter: *mut CompCounterAbi, value: *mut u64) -> c_int {
    // SAFETY: as above, with a number to write.
    unsafe { value.write(CounterObject::from_abi(counter).lock().values().0) };
    0
}

/// ibv_read_err_comp_cntr(3)
pub unsafe fn read_failed(counter: *mut CompCounterAbi, value: *mut u64) -> c_int {
    // SAFETY: as above, with a number to write.
    unsafe { value.write(CounterObject::from_abi(counter).lock().values().1) };
    0
}
