//! Waiting for several descriptors: the drop-in library's calls also handle those of the kernel.

use crate::convert::{is_rsocket, note_epoll};
use crate::next::{libc_calls, rsockets};
use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use std::ffi::c_int;
use std::ptr::{from_ref, null};

fn timespec_of_ms(timeout_ms: c_int) -> Option<timespec> {
    (timeout_ms >= 0).then(|| timespec {
        tv_sec: (timeout_ms / 1000).into(),
        tv_nsec: (timeout_ms % 1000 * 1_000_000).into(),
    })
}

#[unsafe(export_name = "poll")]
unsafe extern "C-unwind" fn poll_list(fds: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
    let timeout = timespec_of_ms(timeout_ms);
    // SAFETY: by the contract of the manual page.
    unsafe {
        poll_with_mask(
            fds,
            count,
            timeout.as_ref().map_or(null(), from_ref),
            null(),
        )
    }
}

#[unsafe(export_name = "ppoll")]
unsafe extern "C-unwind" fn poll_with_mask(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let mut list =
            (0..count as usize).map(|index| (&raw const (*fds.add(index)).fd).read_unaligned());
        if list.any(|fd| is_rsocket(fd) || rsockets::is_epoll(fd) != 0) {
            rsockets::ppoll(fds, count, timeout, mask)
        } else {
            libc_calls::ppoll(fds, count, timeout, mask)
        }
    }
}

/// Variant of poll(2) with a check of the list length, called by code compiled with
/// _FORTIFY_SOURCE.
#[unsafe(export_name = "__poll_chk")]
unsafe extern "C-unwind" fn poll_checked(
    fds: *mut pollfd,
    count: nfds_t,
    timeout_ms: c_int,
    _room: usize,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { poll_list(fds, count, timeout_ms) }
}

#[unsafe(export_name = "select")]
unsafe extern "C-unwind" fn select_sets(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let timeout = (!timeout.is_null()).then(|| {
            let timeout = timeout.read_unaligned();
            timespec {
                tv_sec: timeout.tv_sec,
                tv_nsec: timeout.tv_usec * 1000,
            }
        });
        let timeout = timeout.as_ref().map_or(null(), from_ref);
        rsockets::pselect(count, read, write, except, timeout, null())
    }
}

#[unsafe(export_name = "pselect")]
unsafe extern "C-unwind" fn select_with_mask(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { rsockets::pselect(count, read, write, except, timeout, mask) }
}

#[unsafe(export_name = "epoll_ctl")]
unsafe extern "C-unwind" fn control_epoll(
    number: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let is_rsocket = is_rsocket(fd);
        let done = rsockets::epoll_ctl(number, operation, fd, event);
        if done == 0 && !is_rsocket {
            let event = (!event.is_null()).then(|| event.read_unaligned());
            note_epoll(number, operation, fd, event);
        }
        done
    }
}

#[unsafe(export_name = "epoll_wait")]
unsafe extern "C-unwind" fn wait_for_epoll(
    number: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { rsockets::epoll_pwait(number, events, most, timeout_ms, null()) }
}

#[unsafe(export_name = "epoll_pwait")]
unsafe extern "C-unwind" fn wait_with_mask(
    number: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout_ms: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { rsockets::epoll_pwait(number, events, most, timeout_ms, mask) }
}
