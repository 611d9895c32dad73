//! Functions of the table that transfer packets and return the time.

use std::ffi::{c_int, c_longlong, c_void};
use std::time::Duration;

use libc::{size_t, timeval, useconds_t};

use super::user_data::{UserData, adapter_of};

pub(super) unsafe extern "C" fn sys_netdev_send(
    userdata: UserData,
    buf: *const c_void,
    len: size_t,
) -> c_int {
    // SAFETY: our userdata; `len` readable bytes.
    let (adapter, packet) = unsafe {
        (
            adapter_of(userdata),
            std::slice::from_raw_parts(buf.cast::<u8>(), len),
        )
    };
    adapter.lock().host.receive_packet(packet);
    0
}

pub(super) unsafe extern "C" fn sys_netdev_receive(
    userdata: UserData,
    buf: *mut c_void,
    len: *mut size_t,
    micros: *mut c_longlong,
) -> c_int {
    // SAFETY: our userdata.
    let received = unsafe { adapter_of(userdata) }.take_packet();
    // SAFETY: `*len` writable bytes at `buf`, and places for the length and the time.
    unsafe {
        let Some((sent_at, packet)) = received else {
            *len = 0;
            return 0;
        };
        let copied = packet.len().min(*len);
        std::ptr::copy_nonoverlapping(packet.as_ptr(), buf.cast(), copied);
        *len = copied;
        *micros = sent_at;
    }
    0
}

pub(super) unsafe extern "C" fn sys_usleep(_userdata: UserData, micros: useconds_t) -> c_int {
    std::thread::sleep(Duration::from_micros(micros.into()));
    0
}

pub(super) unsafe extern "C" fn sys_gettimeofday(
    userdata: UserData,
    tv: *mut timeval,
    _zone: *mut c_void,
) -> c_int {
    // SAFETY: our userdata; room for the time.
    unsafe {
        let now = adapter_of(userdata).elapsed_micros();
        (*tv).tv_sec = now / 1_000_000;
        (*tv).tv_usec = now % 1_000_000;
    }
    0
}
