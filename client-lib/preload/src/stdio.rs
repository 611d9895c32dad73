//! Streams of the C library (stdio(3)), and its ways to close descriptors. The C library does not
//! call the functions of this library for its own reads, writes and closes.

use crate::convert::{is_candidate, is_open_rsocket, is_rsocket};
use crate::next::{libc_calls, rsockets};
use crate::sockets::close_descriptor;
use crate::transfer::{read_bytes, write_bytes};
use libc::FILE;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::without_provenance_mut;

/// The beginning of the C library's `FILE`, which is part of its binary interface.
#[repr(C)]
struct StreamHead {
    flags: c_int,
    buffers: [*mut c_void; 13],
    descriptor: c_int,
}

/// The functions of fopencookie(3).
#[repr(C)]
struct StreamCalls {
    read: unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, usize) -> isize,
    write: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, usize) -> isize,
    seek: unsafe extern "C-unwind" fn(*mut c_void, *mut i64, c_int) -> c_int,
    close: unsafe extern "C-unwind" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, calls: StreamCalls) -> *mut FILE;
}

/// The descriptor of a stream, which is its cookie.
fn descriptor_of(cookie: *mut c_void) -> c_int {
    cookie.addr() as c_int
}

unsafe extern "C-unwind" fn read_stream(
    cookie: *mut c_void,
    to: *mut c_char,
    length: usize,
) -> isize {
    // SAFETY: a buffer of the C library.
    unsafe { read_bytes(descriptor_of(cookie), to.cast(), length) }
}

/// Returns less than `length` after an error.
unsafe extern "C-unwind" fn write_stream(
    cookie: *mut c_void,
    from: *const c_char,
    length: usize,
) -> isize {
    let mut done = 0;
    while done < length {
        // SAFETY: within a buffer of the C library.
        let written = unsafe {
            let rest = from.add(done).cast();
            write_bytes(descriptor_of(cookie), rest, length - done)
        };
        match usize::try_from(written) {
            Ok(written) if written > 0 => done += written,
            _ => break,
        }
    }
    done as isize
}

/// Streams of sockets cannot seek; the C library expects this error of them.
unsafe extern "C-unwind" fn seek_stream(
    _cookie: *mut c_void,
    _to: *mut i64,
    _whence: c_int,
) -> c_int {
    // SAFETY: the C library gives a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() = libc::ESPIPE };
    -1
}

unsafe extern "C-unwind" fn close_stream(cookie: *mut c_void) -> c_int {
    // SAFETY: a number.
    unsafe { close_descriptor(descriptor_of(cookie)) }
}

/// The stream of a socket that is or may become an rsocket uses the functions of this library.
#[unsafe(export_name = "fdopen")]
unsafe extern "C-unwind" fn open_stream(fd: c_int, mode: *const c_char) -> *mut FILE {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if !is_rsocket(fd) && !is_candidate(fd) {
            return libc_calls::fdopen(fd, mode);
        }
        let calls = StreamCalls {
            read: read_stream,
            write: write_stream,
            seek: seek_stream,
            close: close_stream,
        };
        let stream = fopencookie(without_provenance_mut(fd as usize), mode, calls);
        if !stream.is_null() {
            // For fileno(3). The functions of a stream with a cookie do not use the field.
            (*stream.cast::<StreamHead>()).descriptor = fd;
        }
        stream
    }
}

/// The number of a stream, which may become invalid.
///
/// # Safety
/// NULL or a stream.
unsafe fn number_of(stream: *mut FILE) -> c_int {
    if stream.is_null() {
        return -1;
    }
    // SAFETY: as the caller promised.
    unsafe { libc::fileno(stream) }
}

#[unsafe(export_name = "fclose")]
unsafe extern "C-unwind" fn close_file(stream: *mut FILE) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let number = number_of(stream);
        let closed = libc_calls::fclose(stream);
        // The look-up drops an rsocket whose number was closed.
        is_open_rsocket(number);
        closed
    }
}

#[unsafe(export_name = "freopen")]
unsafe extern "C-unwind" fn reopen_file(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
) -> *mut FILE {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let number = number_of(stream);
        let reopened = libc_calls::freopen(path, mode, stream);
        // As in `close_file`.
        is_open_rsocket(number);
        reopened
    }
}

#[unsafe(export_name = "freopen64")]
unsafe extern "C-unwind" fn reopen_file_64(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
) -> *mut FILE {
    // SAFETY: by the contract of the manual page.
    unsafe { reopen_file(path, mode, stream) }
}

#[unsafe(export_name = "close_range")]
unsafe extern "C-unwind" fn close_numbers(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: numbers.
    unsafe {
        let closed = libc_calls::close_range(first, last, flags);
        rsockets::close_stale();
        closed
    }
}

#[unsafe(export_name = "closefrom")]
unsafe extern "C-unwind" fn close_from(first: c_int) {
    // SAFETY: numbers.
    unsafe {
        libc_calls::closefrom(first);
        rsockets::close_stale();
    }
}
