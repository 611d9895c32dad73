//! Asynchronous events (ibv_get_async_event(3)): events of the daemon, with the program's object.
//! The descriptor keeps the O_NONBLOCK setting of the program.

use super::context::{AsyncState, ContextObject};
use super::cq::CqObject;
use super::port::PORT;
use super::qp::QpObject;
use super::srq::SrqObject;
use crate::abi::*;
use crate::status::{log_failure, set_errno};
use crate::waiting::{Call, Held};
use rustix::fd::AsRawFd;
use siw::{AsyncEvent, AsyncEventKind, Context, Error};
use siw_shm::control::EVERY_DEVICE;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

type Element = ibv_async_event__bindgen_ty_1;

/// Finds the object of an event; it counts the event as unacknowledged. None if the object was
/// destroyed, or the event is of another device.
fn find_element(context: &ContextObject, event: &AsyncEvent) -> Option<(ibv_event_type, Element)> {
    use AsyncEventKind::*;
    let kind = event.kind?;
    let objects = context.objects();
    let element = match kind {
        CqErr => objects.cqs.find(event.object, |cq| {
            // SAFETY: a completion queue of this library, which is not freed meanwhile.
            let queue = unsafe { CqObject::from_abi(cq) };
            queue.async_events.deliver();
            Element { cq }
        }),
        QpFatal | QpReqErr | QpAccessErr | CommEst | SqDrained | QpLastWqeReached => {
            objects.qps.find(event.object, |qp| {
                // SAFETY: as above, a queue pair.
                let queue_pair = unsafe { QpObject::from_abi(qp) };
                queue_pair.async_events.deliver();
                Element { qp }
            })
        }
        SrqLimitReached => objects.srqs.find(event.object, |srq| {
            // SAFETY: as above, a shared receive queue.
            let queue = unsafe { SrqObject::from_abi(srq) };
            queue.async_events.deliver();
            Element { srq }
        }),
        PortActive | PortErr | GidChange | DeviceFatal if !is_of_device(context, event) => None,
        PortActive | PortErr | GidChange | DeviceFatal => Some(Element {
            port_num: PORT as c_int,
        }),
    }?;
    Some((kind as u32, element))
}

/// Checks whether an event of a device, or of all devices, is one of the context's device.
pub fn is_of_device(context: &ContextObject, event: &AsyncEvent) -> bool {
    [EVERY_DEVICE, context.device().info().index].contains(&event.object)
}

/// Objects of a thread that waits for an asynchronous event. Programs close devices whose events another
/// thread waits for. That thread goes on waiting, like a read of a descriptor that is closed meanwhile, and
/// does not use the context when it wakes. (Those of rdma_get_devices, which share a connection, stay open.)
struct AsyncWait(Context, Arc<AsyncState>);

/// ibv_get_async_event(3)
pub unsafe fn get_async_event(
    call: &mut Call,
    context: *mut ibv_context,
    out: *mut ibv_async_event,
) -> c_int {
    let waited = call.take_other::<AsyncWait>();
    if let Some(AsyncWait(_, state)) = &waited
        && state.is_closed.load(Ordering::Acquire)
    {
        set_errno(libc::EIO);
        return -1;
    }
    // SAFETY: a context of this library.
    let object = unsafe { ContextObject::from_abi(context) };
    let (client, state) = match waited {
        Some(AsyncWait(client, state)) => (client, state),
        None => (object.client().clone(), object.async_state().clone()),
    };
    let interrupted = call.check_interrupted();
    loop {
        let injected = object
            .faults()
            .and_then(|faults| faults.take_raised(object));
        let got = match (injected, object.shared_events()) {
            (Some(event), _) => Ok(event),
            (None, Some(events)) => events.take(&client),
            (None, None) => {
                let got = client.get_async_event(Some(Duration::ZERO));
                got.inspect(|event| log_failure("asynchronous event", &event.reason))
            }
        };
        let found = match got {
            Ok(event) => find_element(object, &event),
            // The end of the daemon is reported once.
            Err(Error::DaemonGone) if !state.fatal_reported.swap(true, Ordering::Relaxed) => {
                let port_num = PORT as c_int;
                Some((IBV_EVENT_DEVICE_FATAL, Element { port_num }))
            }
            Err(Error::Timeout) => {
                let descriptor = object.async_descriptor();
                // Those of other sources than the daemon make only the descriptor readable.
                let has_others = object.shared_events().is_some() || object.faults().is_some();
                let source = match has_others {
                    true => descriptor.check_open().map(|()| descriptor.number()),
                    false => Ok(client.async_fd().as_raw_fd()),
                };
                match (source, interrupted) {
                    _ if descriptor.is_nonblocking() => set_errno(libc::EAGAIN),
                    (_, Err(errno)) => set_errno(errno),
                    (Err(error), _) => set_errno(error.raw_os_error()),
                    (Ok(source), Ok(())) => {
                        let held = Held::Other(Box::new(AsyncWait(client, state)));
                        call.wait_for_descriptors(&[source], None, false, held);
                    }
                }
                return -1;
            }
            Err(Error::DaemonGone) => {
                // Pollers of the descriptor have been told.
                object.silence_async_events();
                set_errno(libc::EIO);
                return -1;
            }
            Err(error) => {
                set_errno(error.errno());
                return -1;
            }
        };
        if let Some((event_type, element)) = found {
            if event_type == IBV_EVENT_DEVICE_FATAL {
                state.fatal_reported.store(true, Ordering::Relaxed);
            }
            let event = ibv_async_event {
                element,
                event_type,
            };
            // SAFETY: a struct to write.
            unsafe { out.write(event) };
            return 0;
        }
    }
}

/// ibv_ack_async_event(3)
pub unsafe fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: an event of `get_async_event`, whose object waits for this call before it is freed.
    unsafe {
        let element = (*event).element;
        match (*event).event_type {
            IBV_EVENT_CQ_ERR => CqObject::from_abi(element.cq).async_events.acknowledge(1),
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                QpObject::from_abi(element.qp).async_events.acknowledge(1)
            }
            IBV_EVENT_SRQ_LIMIT_REACHED | IBV_EVENT_SRQ_ERR => {
                SrqObject::from_abi(element.srq).async_events.acknowledge(1)
            }
            _ => {}
        }
    }
}
