//! Completion queues (ibv_create_cq(3), ibv_poll_cq(3), ibv_req_notify_cq(3)). Every queue can also
//! be used as an extended one; those functions are in `cq_ex.rs`.

use super::channel::{ChannelObject, SharedChannel};
use super::context::{ContextObject, is_inherited};
use super::cq_ex::{Current, fill_extended};
use super::faulty::{CqFaults, replace_polling};
use super::users::{EventCount, Users};
use crate::abi::*;
use crate::faults::creation_fault;
use crate::status::{errno_of, fail_errno, fail_with, pointer_of};
use siw::{Cq, Error, Wc, WcFlags};
use siw_faults::Object;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A completion queue as programs see it: `struct ibv_cq_ex` begins like `struct ibv_cq`.
#[repr(C)]
pub struct CqObject {
    abi: ibv_cq_ex,
    _later: LaterFields,
    /// Current completion of `ibv_start_poll`.
    pub current: Current,
    cq: Cq,
    /// Queue pairs that use the queue.
    pub users: Users,
    /// Completion events.
    pub events: EventCount,
    /// Asynchronous events.
    pub async_events: EventCount,
    channel: Option<(Arc<SharedChannel>, u64)>,
    /// Faults of the plan, if there is one.
    faults: Option<Box<CqFaults>>,
}

impl CqObject {
    /// # Safety
    /// A completion queue of this library.
    #[inline]
    pub unsafe fn from_abi<'a>(cq: *mut ibv_cq) -> &'a CqObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*cq.cast() }
    }

    /// Pointer for struct fields that hold a completion queue.
    pub fn as_abi(&self) -> *mut ibv_cq {
        (&raw const *self).cast_mut().cast()
    }

    /// The object of the client library.
    #[inline]
    pub fn cq(&self) -> &Cq {
        &self.cq
    }

    /// Faults of the plan, if there is one.
    pub fn faults(&self) -> Option<&CqFaults> {
        self.faults.as_deref()
    }

    /// Its context.
    pub fn context(&self) -> &ContextObject {
        // SAFETY: it holds its context.
        unsafe { ContextObject::from_abi(self.abi.context) }
    }

    /// Wakes a thread that waits for an event of the queue at that time.
    pub fn wake_at(&self, time: Instant) {
        if let Some((channel, _)) = &self.channel {
            channel.wake_at(time);
        }
    }
}

fn check_size(context: &ContextObject, cqe: i64) -> Result<u32, Error> {
    let most = context.client().limits().max_cqe;
    match u32::try_from(cqe) {
        Ok(cqe) if (1..=most).contains(&cqe) => Ok(cqe),
        _ => Err(Error::Invalid(
            "the number of entries must be between 1 and max_cqe",
        )),
    }
}

/// Creates a queue, for both calls that do so.
pub(super) unsafe fn create(
    context: *mut ibv_context,
    cqe: i64,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: i64,
) -> Result<Box<CqObject>, Error> {
    // SAFETY: a context of this library.
    let object = unsafe { ContextObject::from_abi(context) };
    let cqe = check_size(object, cqe)?;
    let device = &object.device().info().name;
    if let Some(errno) = creation_fault(Object::Cq, device) {
        return Err(std::io::Error::from_raw_os_error(errno).into());
    }
    // SAFETY: a valid context.
    let vectors = i64::from(unsafe { (*context).num_comp_vectors });
    if !(0..vectors).contains(&comp_vector) {
        return Err(Error::Invalid("unknown completion vector"));
    }
    let channel_object = (!channel.is_null())
        // SAFETY: a channel of this library.
        .then(|| unsafe { ChannelObject::from_abi(channel) });
    let with_cookie = channel_object.map(|channel| {
        let shared = channel.shared().clone();
        let cookie = shared.next_cookie();
        (shared, cookie)
    });
    let cq = Cq::new(
        object.client(),
        cqe,
        with_cookie
            .as_ref()
            .map(|(channel, cookie)| (channel.channel(), *cookie)),
    )?;
    // SAFETY: the struct is made of numbers, pointers and optional function pointers; a mutex and a
    // condition variable of zeros are initialised.
    let mut abi: ibv_cq_ex = unsafe { std::mem::zeroed() };
    abi.context = context;
    abi.channel = channel;
    abi.cq_context = cq_context;
    abi.handle = cq.cq_id();
    abi.cqe = to_cqe(&cq);
    fill_extended(&mut abi);
    let faults = object.faults().map(|_| Box::new(CqFaults::new(device)));
    if faults.is_some() {
        replace_polling(&mut abi);
    }
    let queue = Box::new(CqObject {
        abi,
        _later: LATER_FIELDS,
        current: Current::default(),
        cq,
        users: Users::default(),
        events: EventCount::default(),
        async_events: EventCount::default(),
        channel: with_cookie,
        faults,
    });
    if let Some((channel, cookie)) = &queue.channel {
        channel.attach(*cookie, &queue);
    }
    object
        .objects()
        .cqs
        .insert(queue.cq.cq_id(), queue.as_abi());
    object.hold();
    Ok(queue)
}

fn to_cqe(cq: &Cq) -> c_int {
    c_int::try_from(cq.capacity()).unwrap_or(c_int::MAX)
}

/// ibv_create_cq(3)
pub unsafe fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: as the caller promised.
    let queue = unsafe { create(context, cqe.into(), cq_context, channel, comp_vector.into()) };
    pointer_of("ibv_create_cq", queue).cast()
}

/// ibv_destroy_cq(3)
pub unsafe fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: an object of this library, which holds its context.
    if unsafe { is_inherited((*cq).context) } {
        return 0;
    }
    // SAFETY: a completion queue of this library.
    let queue = unsafe { CqObject::from_abi(cq) };
    let unused = queue.users.check_none("queue pairs");
    if unused.is_ok() {
        let context = queue.abi.context;
        // SAFETY: it holds its context.
        let object = unsafe { ContextObject::from_abi(context) };
        object.objects().cqs.remove(queue.cq.cq_id());
        if let Some((channel, cookie)) = &queue.channel {
            channel.detach(*cookie);
        }
        queue.events.wait_acknowledged();
        queue.async_events.wait_acknowledged();
        let channel = queue.channel.clone();
        // SAFETY: `create` boxed it and held the context; the manual page forbids any later use.
        unsafe {
            drop(Box::from_raw(cq.cast::<CqObject>()));
            ContextObject::release(context);
        }
        // No more events follow.
        if let Some((channel, _)) = channel {
            channel.drop_stale_events();
        }
    }
    errno_of("ibv_destroy_cq", unused)
}

/// ibv_resize_cq(3)
pub unsafe fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: a completion queue of this library.
    let queue = unsafe { CqObject::from_abi(cq) };
    // SAFETY: its context is open.
    let context = unsafe { ContextObject::from_abi(queue.abi.context) };
    let resized = check_size(context, cqe.into()).and_then(|cqe| queue.cq.resize(cqe));
    if resized.is_ok() {
        // SAFETY: the field is the library's to write, in calls that change the queue.
        unsafe { (*cq).cqe = to_cqe(&queue.cq) };
    }
    errno_of("ibv_resize_cq", resized)
}

/// ibv_modify_cq(3), which programs call through the context.
pub unsafe fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: as the caller promised.
    let (queue, attr) = unsafe { (CqObject::from_abi(cq), &*attr) };
    if attr.attr_mask & !IBV_CQ_ATTR_MODERATE != 0 {
        return fail_errno(libc::EINVAL);
    }
    if attr.attr_mask & IBV_CQ_ATTR_MODERATE == 0 {
        return 0;
    }
    let period = Duration::from_micros(attr.moderate.cq_period.into());
    errno_of(
        "ibv_modify_cq",
        queue.cq.moderate(attr.moderate.cq_count, period),
    )
}

/// ibv_req_notify_cq(3), which programs call through the context.
pub unsafe fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a completion queue of this library.
    let queue = unsafe { CqObject::from_abi(cq) };
    match queue.cq.req_notify(solicited_only != 0) {
        // Programs arm before they poll: the next poll shows the flushed requests. The channel
        // ends.
        Ok(()) | Err(Error::DaemonGone) => 0,
        Err(error) => fail_with("ibv_req_notify_cq", &error),
    }
}

/// Converts [`WcFlags`] to the bits of `wc_flags`.
pub(super) fn to_wc_flags(flags: WcFlags) -> u32 {
    u32::from(flags.0) & (IBV_WC_GRH | IBV_WC_WITH_IMM | IBV_WC_WITH_INV)
}

/// Kind of a datagram's packet, with RoCEv2 over IPv4 or IPv6: mlx5's adapters have it in the place of the
/// service level, which RoCE does not use. UCX drops datagrams over IPv4 without it.
const SL_ROCE_IPV4: u8 = 0b1010;
/// See [`SL_ROCE_IPV4`].
const SL_ROCE_IPV6: u8 = 0b1001;

/// Converts to `sl`.
pub(super) fn to_sl(flags: WcFlags) -> u8 {
    match (flags.contains(WcFlags::GRH), flags.contains(WcFlags::IPV4)) {
        (false, _) => 0,
        (true, true) => SL_ROCE_IPV4,
        (true, false) => SL_ROCE_IPV6,
    }
}

/// Converts to `imm_data`: immediate data in network order, an invalidated key in host order.
pub(super) fn to_imm_data(completion: &Wc) -> u32 {
    if completion.flags.contains(WcFlags::WITH_IMM) {
        completion.imm.to_be()
    } else {
        completion.imm
    }
}

/// Completions per batch: more than most programs request.
const BATCH: usize = 8;

/// Converts a completion.
#[inline(always)]
fn write_completion(out: &mut ibv_wc, completion: &Wc) {
    out.wr_id = completion.wr_id;
    // The numbers are those of verbs.
    out.status = completion.status.0.into();
    out.opcode = completion.opcode.0.into();
    out.vendor_err = completion.vendor_err;
    out.byte_len = completion.byte_len;
    out.__bindgen_anon_1.imm_data = to_imm_data(completion);
    out.qp_num = completion.qp_num;
    out.src_qp = completion.src_qp;
    out.wc_flags = to_wc_flags(completion.flags);
    out.pkey_index = 0;
    out.slid = 0;
    out.sl = to_sl(completion.flags);
    out.dlid_path_bits = 0;
}

/// ibv_poll_cq(3), which programs call through the context.
pub unsafe fn poll_cq(cq: *mut ibv_cq, count: c_int, out: *mut ibv_wc) -> c_int {
    // SAFETY: a completion queue of this library.
    let queue = unsafe { CqObject::from_abi(cq) };
    // SAFETY: as the caller promised.
    unsafe { poll_into(queue, count, out, |batch| queue.cq.poll(batch)) }
}

/// Polls a queue by `poll` into an array of the program.
///
/// # Safety
/// The array has room for `count` completions.
#[inline(always)]
pub(super) unsafe fn poll_into(
    queue: &CqObject,
    count: c_int,
    out: *mut ibv_wc,
    poll: impl Fn(&mut [Wc]) -> Result<usize, Error>,
) -> c_int {
    let wanted = usize::try_from(count).unwrap_or(0);
    let mut taken = 0;
    let mut batch = [Wc::default(); BATCH];
    while taken < wanted {
        let room = (wanted - taken).min(BATCH);
        let found = match poll(&mut batch[..room]) {
            Ok(found) => found,
            Err(_) if taken > 0 => break,
            Err(Error::DaemonGone) if queue.cq.flush_lost_requests() => continue,
            Err(error) => {
                fail_with("ibv_poll_cq", &error);
                return -1;
            }
        };
        for completion in &batch[..found] {
            // SAFETY: there is room for `count` completions.
            write_completion(unsafe { &mut *out.add(taken) }, completion);
            taken += 1;
        }
        if found < room {
            break;
        }
    }
    taken as c_int
}
