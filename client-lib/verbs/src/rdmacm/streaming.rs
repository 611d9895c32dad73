//! Connections in streaming mode: the option and the calls of siw_rdma.h. rdma_connect(3) and
//! rdma_accept(3) end the mode, as the MPA initiator and as the responder.

use super::connect::accept_turned;
use super::id::{IdObject, IdState, Resolved, fail, with_registered};
use super::queue::{QueuedEvent, RegisteredId};
use crate::abi::*;
use crate::status::{fail_with, log_failure};
use crate::waiting::{Call, Held};
use siw::{
    ConnectionRequest, Error, Failed, OpeningStream, Qp, StreamOptions, StreamingConnection,
};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Level of rdma_set_option(3): "siw".
pub const SIW_OPTION: c_int = 0x0073_6977;
/// Name in that level: an int, not 0 for connections that begin in streaming mode.
pub const SIW_OPTION_STREAMING: c_int = 1;

/// Maximum number of bytes of one siw_stream_recv().
const RECEIVED_AT_ONCE: usize = 2048;

/// The connection of an identifier in streaming mode.
pub enum Stream {
    /// The TCP connection is being opened.
    Opening(OpeningStream),
    /// Bytes can be sent and received.
    Open(StreamingConnection),
}

/// Parameters of rdma_accept(3) until the MPA request arrives.
pub struct Acceptance {
    pub qp: Qp,
    pub private_data: Vec<u8>,
    pub ird: Option<u32>,
    pub ord: Option<u32>,
    pub waits_for_receives: bool,
}

fn refusal(errno: c_int, reason: &str) -> Error {
    Error::Refused {
        errno,
        reason: reason.into(),
    }
}

/// Sets SIW_OPTION_STREAMING: before the identifier listens or connects.
pub fn set_streaming(object: &IdObject, wanted: Option<bool>) -> c_int {
    let mut state = object.lock_state();
    let is_fresh = state.listener.is_none() && state.stream.is_none() && state.request.is_none();
    match wanted {
        Some(on) if is_fresh && !object.is_datagram() => {
            state.is_streaming = on;
            0
        }
        _ => fail(libc::EINVAL),
    }
}

/// Takes the connection, to turn it to RDMA.
pub fn take_open(state: &mut IdState) -> Result<StreamingConnection, Error> {
    match state.stream.take() {
        Some(Stream::Open(stream)) => Ok(stream),
        other => {
            state.stream = other;
            Err(Error::Invalid(
                "the identifier is for streaming mode and has no connection: call siw_stream_open first",
            ))
        }
    }
}

/// Gives a connection back that has not turned to RDMA.
pub fn keep_open(object: &IdObject, failed: Failed<StreamingConnection>) -> Error {
    let mut state = object.lock_state();
    state.accepting = None;
    state.stream = Some(Stream::Open(failed.object));
    failed.error
}

/// Resets the connection if it is in streaming mode.
pub fn reset_stream(object: &IdObject) -> Option<Result<(), Error>> {
    let stream = object.lock_state().stream.take()?;
    Some(match stream {
        Stream::Open(stream) => stream.reset(),
        Stream::Opening(_) => Ok(()),
    })
}

/// Closes the connection if it is in streaming mode.
pub fn close_stream(object: &IdObject) -> bool {
    object.lock_state().stream.take().is_some()
}

/// Accepts an MPA request that ends a streaming mode, and returns any other request.
pub fn accept_if_turned(request: ConnectionRequest) -> Option<ConnectionRequest> {
    let number = RegisteredId(request.connection_info().cookie);
    let acceptance = with_registered(number, |id| id.lock_state().accepting.take()).flatten();
    let Some(acceptance) = acceptance else {
        return Some(request);
    };
    with_registered(number, |id| {
        if let Err(error) = accept_turned(id, &acceptance, request) {
            log_failure("accepting the MPA request after the streaming mode", &error);
            let status = -error.errno();
            id.push_event(QueuedEvent::plain(
                number,
                RDMA_CM_EVENT_CONNECT_ERROR,
                status,
            ));
        }
    });
    None
}

/// Ends a call whose last wait has failed or timed out. A negative `timeout_ms` has no limit.
fn check_wait(call: &mut Call, timeout_ms: c_int) -> Result<(), Error> {
    drop(call.take_held());
    if call.has_timed_out() {
        // Nothing was transferred.
        let errno = if timeout_ms == 0 {
            libc::EAGAIN
        } else {
            libc::ETIMEDOUT
        };
        return Err(std::io::Error::from_raw_os_error(errno).into());
    }
    call.check_interrupted()
        .map_err(|errno| std::io::Error::from_raw_os_error(errno).into())
}

/// Waits for a descriptor.
///
/// # Errors
/// EAGAIN: the call is not to wait. Otherwise the call waits; the error has no meaning.
fn begin_wait(call: &mut Call, descriptor: BorrowedFd<'_>, timeout_ms: c_int) -> Result<(), Error> {
    if timeout_ms == 0 {
        return Err(std::io::Error::from_raw_os_error(libc::EAGAIN).into());
    }
    let deadline = u64::try_from(timeout_ms)
        .ok()
        .and_then(|timeout| call.start().checked_add(Duration::from_millis(timeout)));
    // Another thread may close the connection meanwhile.
    let own = descriptor.try_clone_to_owned()?;
    let number = own.as_raw_fd();
    call.wait_for_descriptors(&[number], deadline, false, Held::Other(Box::new(own)));
    Ok(())
}

/// Result of an attempt: the value, or -1 with errno set. Without either, the call waits.
fn result_of_attempt(name: &str, call: &Call, result: Result<Option<isize>, Error>) -> isize {
    match result {
        Ok(Some(value)) => value,
        Ok(None) => {
            debug_assert!(call.must_wait());
            -1
        }
        Err(error) => {
            fail_with(name, &error);
            -1
        }
    }
}

/// Begins to open the connection of an identifier with a route.
fn start_opening(object: &IdObject, state: &IdState) -> Result<OpeningStream, Error> {
    let has_route = state.resolved == Resolved::Route;
    let destination = state.destination.filter(|_| has_route);
    let destination = destination.ok_or(Error::Invalid(
        "the identifier has no route: resolve its address and its route first",
    ))?;
    let options = StreamOptions {
        device: state.device,
        src: state.local.map(|local| local.ip()),
        ..StreamOptions::default()
    };
    OpeningStream::start(&object.channel().devices.client, destination, &options)
}

/// Attempts to open the connection of an identifier. The daemon's attempt goes on after a call that does not
/// wait for its end.
fn try_open(call: &mut Call, object: &IdObject, timeout_ms: c_int) -> Result<Option<isize>, Error> {
    check_wait(call, timeout_ms)?;
    let mut state = object.lock_state();
    if !call.has_begun {
        if !state.is_streaming {
            let why = "set SIW_OPTION_STREAMING by rdma_set_option before siw_stream_open";
            return Err(refusal(libc::EINVAL, why));
        }
        match &state.stream {
            None => {
                let opening = start_opening(object, &state)?;
                state.stream = Some(Stream::Opening(opening));
            }
            // An earlier call has not waited for the end of its attempt.
            Some(Stream::Opening(_)) => {}
            Some(Stream::Open(_)) => {
                return Err(refusal(libc::EISCONN, "the identifier has a connection"));
            }
        }
        call.has_begun = true;
    }
    let Some(Stream::Opening(opening)) = &mut state.stream else {
        return Err(refusal(
            libc::ECONNABORTED,
            "another call has closed the connection",
        ));
    };
    match opening.try_finish() {
        Ok(None) => {
            begin_wait(call, opening.descriptor()?, timeout_ms)?;
            Ok(None)
        }
        Ok(Some(stream)) => {
            let info = stream.connection_info().clone();
            state.local = info.local.or(state.local);
            state.stream = Some(Stream::Open(stream));
            drop(state);
            object.store_addresses(&info);
            Ok(Some(0))
        }
        Err(error) => {
            state.stream = None;
            Err(error)
        }
    }
}

/// siw_stream_open() of siw_rdma.h.
pub unsafe fn open(call: &mut Call, id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int {
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    let opened = try_open(call, object, timeout_ms);
    result_of_attempt("siw_stream_open", call, opened) as c_int
}

/// Attempts a call on the connection of an identifier; `transfer` returns None if it has to wait.
fn try_transfer(
    call: &mut Call,
    object: &IdObject,
    timeout_ms: c_int,
    mut transfer: impl FnMut(&mut StreamingConnection, &mut Call) -> Result<Option<usize>, Error>,
) -> Result<Option<isize>, Error> {
    check_wait(call, timeout_ms)?;
    let mut state = object.lock_state();
    let Some(Stream::Open(stream)) = &mut state.stream else {
        let why = "the identifier has no connection in streaming mode";
        return Err(refusal(libc::ENOTCONN, why));
    };
    if call.has_begun {
        stream.take_events()?;
    }
    match transfer(stream, call)? {
        Some(moved) => Ok(Some(moved as isize)),
        None => {
            call.has_begun = true;
            begin_wait(call, stream.descriptor()?, timeout_ms)?;
            Ok(None)
        }
    }
}

/// siw_stream_send() of siw_rdma.h: sends all bytes, or as many as it can until it fails.
pub unsafe fn send(
    call: &mut Call,
    id: *mut rdma_cm_id,
    data: *const c_void,
    length: usize,
    timeout_ms: c_int,
) -> isize {
    if length > 0 && data.is_null() {
        return fail(libc::EINVAL) as isize;
    }
    let bytes = match length {
        0 => &[][..],
        // SAFETY: valid for its length, by siw_rdma.h.
        _ => unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) },
    };
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    let sent = try_transfer(call, object, timeout_ms, |stream, call| {
        while call.moved < bytes.len() {
            match stream.try_send(&bytes[call.moved..])? {
                Some(taken) => call.moved += taken,
                None => return Ok(None),
            }
        }
        Ok(Some(call.moved))
    });
    match sent {
        Err(_) if call.moved > 0 => call.moved as isize,
        sent => result_of_attempt("siw_stream_send", call, sent),
    }
}

/// siw_stream_recv() of siw_rdma.h: waits for at least one byte.
pub unsafe fn recv(
    call: &mut Call,
    id: *mut rdma_cm_id,
    data: *mut c_void,
    length: usize,
    timeout_ms: c_int,
) -> isize {
    if length == 0 || data.is_null() {
        return fail(libc::EINVAL) as isize;
    }
    // The program's buffer need not be initialised.
    let mut buffer = [0; RECEIVED_AT_ONCE];
    let most = length.min(buffer.len());
    // SAFETY: an identifier of this library.
    let object = unsafe { IdObject::from_abi(id) };
    let received = try_transfer(call, object, timeout_ms, |stream, _| {
        stream.try_receive(&mut buffer[..most])
    });
    if let Ok(Some(count)) = received {
        // SAFETY: valid for its length, by siw_rdma.h; no more than `most` bytes were received.
        unsafe { std::ptr::copy_nonoverlapping(buffer.as_ptr(), data.cast(), count as usize) };
    }
    result_of_attempt("siw_stream_recv", call, received)
}
