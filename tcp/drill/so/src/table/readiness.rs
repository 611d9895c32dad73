//! poll and epoll.

use std::ffi::c_int;

use libc::{epoll_event, nfds_t, pollfd};
use siw_drill::Errno;

use super::user_data::{UserData, adapter_of, fail_with};

pub(super) unsafe extern "C" fn sys_poll(
    userdata: UserData,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
) -> c_int {
    // SAFETY: our userdata; entries as for poll(2), not accessed elsewhere during the call.
    let (adapter, fds) = unsafe {
        (
            adapter_of(userdata),
            std::slice::from_raw_parts_mut(fds, count as usize),
        )
    };
    let always = libc::POLLERR | libc::POLLHUP;
    let found = adapter.wait_until(timeout, |state| {
        let mut ready = 0;
        for entry in fds.iter_mut() {
            entry.revents = match state.poll_events(entry.fd) {
                Ok(events) => events as i16 & (entry.events | always),
                Err(_) => libc::POLLNVAL,
            };
            ready += c_int::from(entry.revents != 0);
        }
        Ok((ready > 0).then_some(ready))
    });
    found.map_or_else(fail_with, |ready| ready.unwrap_or(0))
}

pub(super) unsafe extern "C" fn sys_epoll_create(userdata: UserData, _size: c_int) -> c_int {
    // SAFETY: our userdata.
    unsafe { adapter_of(userdata) }.epoll_create()
}

pub(super) unsafe extern "C" fn sys_epoll_ctl(
    userdata: UserData,
    epoll: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: our userdata.
    let mut state = unsafe { adapter_of(userdata) }.lock();
    let Some(interest) = state.epolls.get_mut(&epoll) else {
        return fail_with(Errno::EBADF);
    };
    if op == libc::EPOLL_CTL_DEL {
        interest.remove(&fd);
    } else {
        // SAFETY: an event as for epoll_ctl(2).
        let event = unsafe { event.read_unaligned() };
        interest.insert(fd, (event.events, event.u64));
    }
    0
}

pub(super) unsafe extern "C" fn sys_epoll_wait(
    userdata: UserData,
    epoll: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: our userdata.
    let found = unsafe { adapter_of(userdata) }.wait_until(timeout, |state| {
        let interest = state.epolls.get(&epoll).cloned().ok_or(Errno::EBADF)?;
        let always = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
        let mut all = vec![];
        for (fd, (wanted, data)) in interest {
            // The event bits of poll and epoll are the same.
            let ready = state.poll_events(fd)? as u32 & (wanted | always);
            if ready != 0 {
                all.push(epoll_event {
                    events: ready,
                    u64: data,
                });
            }
        }
        Ok((!all.is_empty()).then_some(all))
    });
    match found {
        Ok(all) => {
            let all = all.unwrap_or_default();
            let count = all.len().min(max.max(0) as usize);
            for (index, event) in all.into_iter().take(count).enumerate() {
                // SAFETY: room for `max` events, of which `count` are written.
                unsafe { events.add(index).write_unaligned(event) };
            }
            count as c_int
        }
        Err(errno) => fail_with(errno),
    }
}
