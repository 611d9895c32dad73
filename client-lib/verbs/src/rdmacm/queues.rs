//! Queue pairs and shared receive queues of identifiers (rdma_create_qp(3), rdma_create_srq(3)),
//! and completion queues for them if the program provides none.

use super::id::{IdObject, fail, result_of};
use crate::abi::*;
use crate::ibverbs::address_vector::vector_between;
use crate::ibverbs::context::ContextObject;
use crate::ibverbs::port::active_mtu;
use crate::ibverbs::qp::QpObject;
use crate::ibverbs::qp_state::{CONNECTED_BY_RDMA_CM, modify_qp};
use crate::ibverbs::{channel, cq, qp, srq};
use crate::status::set_errno;
use siw::{Error, Persona, SERVICE_QKEY};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

fn last_error() -> Error {
    std::io::Error::last_os_error().into()
}

/// Chooses the given domain, else that of the identifier, else the default of its device.
///
/// # Safety
/// An identifier of this library, and NULL or a protection domain of it.
unsafe fn choose_pd(id: *mut rdma_cm_id, pd: *mut ibv_pd) -> Result<*mut ibv_pd, Error> {
    // SAFETY: as the caller promised.
    let (object, of_id, verbs) = unsafe { (IdObject::from_abi(id), (*id).pd, (*id).verbs) };
    if verbs.is_null() {
        return Err(Error::Invalid("the identifier has no device yet"));
    }
    let pd = match (pd.is_null(), of_id.is_null()) {
        (false, _) => pd,
        (true, false) => of_id,
        (true, true) => object.channel().devices.default_pd(verbs)?,
    };
    // SAFETY: a protection domain of this library.
    if unsafe { (*pd).context } != verbs {
        return Err(Error::Invalid(
            "the protection domain belongs to another context than the identifier",
        ));
    }
    Ok(pd)
}

/// Creates a completion queue with a channel of its own, whose events carry the identifier.
///
/// # Safety
/// An identifier of this library with a device.
unsafe fn create_cq(
    id: *mut rdma_cm_id,
    size: u32,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), Error> {
    // SAFETY: as the caller promised.
    unsafe {
        let verbs = (*id).verbs;
        let events = channel::create_channel(verbs);
        if events.is_null() {
            return Err(last_error());
        }
        let size = c_int::try_from(size.max(1)).unwrap_or(c_int::MAX);
        let queue = cq::create_cq(verbs, size, id.cast(), events, 0);
        if queue.is_null() {
            let error = last_error();
            channel::destroy_channel(events);
            return Err(error);
        }
        Ok((events, queue))
    }
}

/// Destroys the completion queues that the library created for the identifier.
///
/// # Safety
/// An identifier of this library whose queue pair has been destroyed.
unsafe fn destroy_cqs(id: *mut rdma_cm_id) {
    // SAFETY: as the caller promised: the fields are NULL or from `create_cq`.
    unsafe {
        for (queue, events) in [
            (&raw mut (*id).send_cq, &raw mut (*id).send_cq_channel),
            (&raw mut (*id).recv_cq, &raw mut (*id).recv_cq_channel),
        ] {
            if !(*queue).is_null() {
                cq::destroy_cq(queue.replace(null_mut()));
                channel::destroy_channel(events.replace(null_mut()));
            }
        }
    }
}

/// Moves a queue pair of datagrams to RTS, with the Q_Key of its identifier.
///
/// # Safety
/// An identifier and a queue pair of this library.
unsafe fn start_datagrams(id: *mut rdma_cm_id, qp: *mut ibv_qp) -> Result<(), Error> {
    // SAFETY: the struct is made of numbers.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = IBV_QPS_INIT;
    let mut mask = 0;
    // SAFETY: as the caller promised, and structs to write.
    if unsafe { init_qp_attr(id, &mut attr, &mut mask) } != 0 {
        return Err(last_error());
    }
    let moves = [
        (IBV_QPS_INIT, mask),
        (IBV_QPS_RTR, IBV_QP_STATE as c_int),
        (IBV_QPS_RTS, (IBV_QP_STATE | IBV_QP_SQ_PSN) as c_int),
    ];
    for (state, mask) in moves {
        attr.qp_state = state;
        // SAFETY: as the caller promised.
        let errno = unsafe { modify_qp(qp, &mut attr, mask) };
        if errno != 0 {
            return Err(std::io::Error::from_raw_os_error(errno).into());
        }
    }
    Ok(())
}

/// # Safety
/// The contract of the manual page.
unsafe fn create(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
    make: impl FnOnce(*mut ibv_pd, &mut ibv_qp_init_attr) -> *mut ibv_qp,
) -> Result<(), Error> {
    // SAFETY: as the caller promised.
    let is_datagram = unsafe { IdObject::from_abi(id) }.is_datagram();
    if (attr.qp_type == IBV_QPT_UD) != is_datagram {
        return Err(Error::Invalid(
            "qp_type does not fit the port space of the identifier: UD is for RDMA_PS_UDP",
        ));
    }
    // SAFETY: as the caller promised; the identifier's own fields.
    unsafe {
        if !(*id).qp.is_null() {
            return Err(Error::Invalid("the identifier already has a queue pair"));
        }
        let pd = choose_pd(id, pd)?;
        if attr.send_cq.is_null() {
            ((*id).send_cq_channel, (*id).send_cq) = create_cq(id, attr.cap.max_send_wr)?;
            attr.send_cq = (*id).send_cq;
        }
        if attr.recv_cq.is_null() {
            match create_cq(id, attr.cap.max_recv_wr) {
                Ok(made) => ((*id).recv_cq_channel, (*id).recv_cq) = made,
                Err(error) => {
                    destroy_cqs(id);
                    return Err(error);
                }
            }
            attr.recv_cq = (*id).recv_cq;
        }
        if attr.srq.is_null() {
            attr.srq = (*id).srq;
        }
        let made = make(pd, attr);
        if made.is_null() {
            let error = last_error();
            destroy_cqs(id);
            return Err(error);
        }
        // As after rdma_create_qp(3) with kernel devices: receive requests may be posted.
        let queue_pair = QpObject::from_abi(made);
        if is_datagram {
            if let Err(error) = start_datagrams(id, made) {
                qp::destroy_qp(made);
                destroy_cqs(id);
                return Err(error);
            }
        } else {
            queue_pair.set_unconnected_state(IBV_QPS_INIT);
            (*made).state = IBV_QPS_INIT;
        }
        IdObject::from_abi(id).lock_state().own_queue_pair =
            Some((queue_pair.qp().qp_num(), queue_pair.serial));
        (*id).qp = made;
        (*id).pd = pd;
    }
    Ok(())
}

/// rdma_create_qp(3)
pub unsafe fn create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    if id.is_null() || attr.is_null() {
        return fail(libc::EINVAL);
    }
    // SAFETY: by the contract of the manual page.
    let created = unsafe { create(id, pd, &mut *attr, |pd, attr| qp::create_qp(pd, attr)) };
    result_of("rdma_create_qp", created)
}

/// rdma_create_qp_ex(3)
pub unsafe fn create_qp_ex(id: *mut rdma_cm_id, attr: *mut ibv_qp_init_attr_ex) -> c_int {
    if id.is_null() || attr.is_null() {
        return fail(libc::EINVAL);
    }
    // SAFETY: by the contract of the manual page; the struct begins with that of
    // ibv_create_qp(3).
    let created = unsafe {
        let has_pd = (*attr).comp_mask & IBV_QP_INIT_ATTR_PD != 0;
        let pd = if has_pd { (*attr).pd } else { null_mut() };
        let basic = &mut *attr.cast::<ibv_qp_init_attr>();
        create(id, pd, basic, |pd, _| {
            (*attr).comp_mask |= IBV_QP_INIT_ATTR_PD;
            (*attr).pd = pd;
            qp::create_qp_ex((*id).verbs, attr)
        })
    };
    result_of("rdma_create_qp_ex", created)
}

/// rdma_destroy_qp(3)
pub unsafe fn destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: an identifier of this library.
    unsafe {
        let made = (*id).qp;
        if made.is_null() {
            return;
        }
        let object = IdObject::from_abi(id);
        qp::destroy_qp(made);
        (*id).qp = null_mut();
        object.lock_state().own_queue_pair = None;
        destroy_cqs(id);
        // The daemon does not report events of a destroyed queue pair, but the connection has
        // ended.
        if object.connected.load(Ordering::Acquire) {
            let _ = object.channel().drain_daemon();
            if object.connected.swap(false, Ordering::AcqRel) {
                object.push_plain(RDMA_CM_EVENT_DISCONNECTED);
            }
        }
    }
}

/// rdma_create_srq(3)
pub unsafe fn create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    let created = unsafe {
        choose_pd(id, pd).and_then(|pd| {
            if !(*id).srq.is_null() {
                return Err(Error::Invalid(
                    "the identifier already has a shared receive queue",
                ));
            }
            let made = srq::create_srq(pd, attr);
            if made.is_null() {
                return Err(last_error());
            }
            (*id).srq = made;
            (*id).pd = pd;
            Ok(())
        })
    };
    result_of("rdma_create_srq", created)
}

/// rdma_create_srq_ex(3)
pub unsafe fn create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let mask = (*attr).comp_mask;
        let is_basic = mask & IBV_SRQ_INIT_ATTR_TYPE == 0 || (*attr).srq_type == IBV_SRQT_BASIC;
        if !is_basic {
            return fail(libc::EOPNOTSUPP);
        }
        let has_pd = mask & IBV_SRQ_INIT_ATTR_PD != 0;
        let pd = if has_pd { (*attr).pd } else { null_mut() };
        create_srq(id, pd, attr.cast())
    }
}

/// rdma_destroy_srq(3)
pub unsafe fn destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: an identifier of this library.
    unsafe {
        let made = std::mem::replace(&mut (*id).srq, null_mut());
        if !made.is_null() {
            srq::destroy_srq(made);
        }
    }
}

/// Timer, retry counts and minimum RNR timer that programs get: they have no effect.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;
const RNR_TIMER: u8 = 0;

/// Attributes of a connection as devices of InfiniBand and RoCE have them, for a device that shows itself as
/// one; returns their mask.
///
/// # Safety
/// An identifier of this library with a device, and attributes to write.
unsafe fn infiniband_attributes(
    id: *mut rdma_cm_id,
    attr: &mut ibv_qp_attr,
) -> Result<ibv_qp_attr_mask, Error> {
    // SAFETY: as the caller promised; a context is open for good.
    let (object, context) =
        unsafe { (IdObject::from_abi(id), ContextObject::from_abi((*id).verbs)) };
    let limits = context.client().limits();
    let depth = |most: u32| u8::try_from(most).unwrap_or(u8::MAX);
    match attr.qp_state {
        IBV_QPS_INIT => {
            attr.pkey_index = 0;
            // SAFETY: the identifier's own field.
            attr.port_num = unsafe { (*id).port_num };
            attr.qp_access_flags =
                IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
            Ok(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
        }
        IBV_QPS_RTR => {
            let state = object.lock_state();
            let ends = state.local.zip(state.destination);
            drop(state);
            let Some((local, peer)) = ends else {
                return Err(Error::Invalid(
                    "the identifier has no addresses of a connection",
                ));
            };
            let device = context.device();
            attr.ah_attr = vector_between(context, local.ip(), peer.ip())?;
            attr.path_mtu = active_mtu(device.persona(), device.info().mtu);
            attr.dest_qp_num = CONNECTED_BY_RDMA_CM;
            attr.rq_psn = 0;
            attr.max_dest_rd_atomic = depth(limits.max_ird);
            attr.min_rnr_timer = RNR_TIMER;
            Ok(IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER)
        }
        IBV_QPS_RTS => {
            (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (TIMEOUT, RETRIES, RETRIES);
            attr.sq_psn = 0;
            attr.max_rd_atomic = depth(limits.max_ord);
            Ok(IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC)
        }
        _ => Err(Error::Invalid("qp_state is none of INIT, RTR and RTS")),
    }
}

/// Returns whether the device of an identifier shows itself as one of InfiniBand or RoCE.
///
/// # Safety
/// An identifier of this library.
unsafe fn is_like_infiniband(id: *mut rdma_cm_id) -> bool {
    // SAFETY: as the caller promised; NULL or a context that is open for good.
    unsafe {
        let verbs = (*id).verbs;
        !verbs.is_null() && ContextObject::from_abi(verbs).device().persona() != Persona::Iwarp
    }
}

/// rdma_init_qp_attr(3): attributes for ibv_modify_qp(3), for a program that moves its queue pair
/// itself. Connecting does the rest, and as a device of iWARP needs no others, it gets none.
pub unsafe fn init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut c_int) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let object = IdObject::from_abi(id);
        let used = match (*attr).qp_state {
            IBV_QPS_INIT if object.is_datagram() => {
                (*attr).pkey_index = 0;
                (*attr).port_num = (*id).port_num;
                (*attr).qkey = object.lock_state().fix_qkey(None).unwrap_or(SERVICE_QKEY);
                IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY
            }
            IBV_QPS_RTR | IBV_QPS_RTS if object.is_datagram() => IBV_QP_STATE,
            _ if is_like_infiniband(id) => match infiniband_attributes(id, &mut *attr) {
                Ok(mask) => mask,
                Err(error) => return result_of("rdma_init_qp_attr", Err(error)),
            },
            IBV_QPS_INIT | IBV_QPS_RTR => {
                (*attr).qp_access_flags =
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
                (*attr).port_num = (*id).port_num;
                IBV_QP_STATE | IBV_QP_ACCESS_FLAGS
            }
            IBV_QPS_RTS => 0,
            _ => {
                set_errno(libc::EINVAL);
                return -1;
            }
        };
        mask.write(used as c_int);
    }
    0
}
