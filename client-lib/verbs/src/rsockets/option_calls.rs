//! rsetsockopt(3), rgetsockopt(3).

use super::socket::{Phase, Rsocket, RsocketState};
use super::wire::{from_scale, to_scale};
use crate::abi::{RDMA_INLINE, RDMA_IOMAPSIZE, RDMA_RQSIZE, RDMA_SQSIZE, SOL_RDMA};
use std::ffi::{c_int, c_void};
use std::time::Duration;

const LEAST_BUFFER: u32 = 4096;
const MOST_BUFFER: u32 = 1 << 28;

/// Doubles the requested size of a buffer, as the kernel does (socket(7)).
fn buffer_size(asked: c_int) -> u32 {
    let asked = u32::try_from(asked).unwrap_or(0).saturating_mul(2);
    asked.clamp(LEAST_BUFFER, MOST_BUFFER).next_multiple_of(64)
}

/// Checks for integer options that are stored and have no other effect here.
fn is_remembered(level: c_int, name: c_int) -> bool {
    match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_REUSEADDR
                | libc::SO_REUSEPORT
                | libc::SO_KEEPALIVE
                | libc::SO_OOBINLINE
                | libc::SO_BROADCAST
                | libc::SO_PRIORITY
                | libc::SO_RCVLOWAT
        ),
        libc::IPPROTO_TCP => matches!(
            name,
            libc::TCP_NODELAY
                | libc::TCP_MAXSEG
                | libc::TCP_CORK
                | libc::TCP_KEEPIDLE
                | libc::TCP_KEEPINTVL
                | libc::TCP_KEEPCNT
                | libc::TCP_USER_TIMEOUT
                | libc::TCP_QUICKACK
                | libc::TCP_DEFER_ACCEPT
                | libc::TCP_FASTOPEN
                | libc::TCP_NOTSENT_LOWAT
        ),
        libc::IPPROTO_IP => name == libc::IP_TOS,
        libc::IPPROTO_IPV6 => matches!(name, libc::IPV6_V6ONLY | libc::IPV6_TCLASS),
        _ => false,
    }
}

/// Reads a value; an error if the option is too short.
///
/// # Safety
/// `value` is NULL or valid for `length` bytes.
unsafe fn read_value<T: Copy>(value: *const c_void, length: u32) -> Result<T, c_int> {
    if value.is_null() || (length as usize) < size_of::<T>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: as the caller promised.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

/// Writes as much of a value as fits, and the number of bytes written.
///
/// # Safety
/// The contract of rgetsockopt(3).
unsafe fn write_value<T: Copy>(value: T, to: *mut c_void, length: *mut u32) -> Result<(), c_int> {
    if to.is_null() || length.is_null() {
        return Err(libc::EFAULT);
    }
    // SAFETY: as the caller promised; `value` is as long as its type.
    unsafe {
        let count = (length.read_unaligned() as usize).min(size_of::<T>());
        std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), to.cast(), count);
        length.write_unaligned(count as u32);
    }
    Ok(())
}

fn timeout_of(value: libc::timeval) -> Option<Duration> {
    let seconds = u64::try_from(value.tv_sec).unwrap_or(0);
    let duration = Duration::from_secs(seconds)
        + Duration::from_micros(u64::try_from(value.tv_usec).unwrap_or(0));
    (!duration.is_zero()).then_some(duration)
}

fn timeval_of(timeout: Option<Duration>) -> libc::timeval {
    let timeout = timeout.unwrap_or_default();
    libc::timeval {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_usec: timeout.subsec_micros().into(),
    }
}

impl Rsocket {
    /// # Safety
    /// The contract of rsetsockopt(3).
    pub unsafe fn set_option(
        &self,
        level: c_int,
        name: c_int,
        value: *const c_void,
        length: u32,
    ) -> Result<(), c_int> {
        let mut state = self.lock();
        // SAFETY: as the caller promised, here and below.
        unsafe {
            match (level, name) {
                (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => {
                    state.options.receive_timeout = timeout_of(read_value(value, length)?);
                }
                (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => {
                    state.options.send_timeout = timeout_of(read_value(value, length)?);
                }
                (libc::SOL_SOCKET, libc::SO_LINGER) => {
                    let linger: libc::linger = read_value(value, length)?;
                    state.options.linger = (linger.l_onoff != 0).then_some(linger.l_linger);
                }
                (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {}
                _ if level == SOL_RDMA as c_int => {
                    return state.set_size(name, read_value(value, length)?);
                }
                _ => return state.set_number(level, name, read_value(value, length)?),
            }
        }
        Ok(())
    }

    /// # Safety
    /// The contract of rgetsockopt(3).
    pub unsafe fn get_option(
        &self,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        length: *mut u32,
    ) -> Result<(), c_int> {
        let mut state = self.lock();
        // SAFETY: as the caller promised, here and below.
        unsafe {
            match (level, name) {
                (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => {
                    write_value(timeval_of(state.options.receive_timeout), value, length)
                }
                (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => {
                    write_value(timeval_of(state.options.send_timeout), value, length)
                }
                (libc::SOL_SOCKET, libc::SO_LINGER) => {
                    let linger = libc::linger {
                        l_onoff: state.options.linger.is_some().into(),
                        l_linger: state.options.linger.unwrap_or(0),
                    };
                    write_value(linger, value, length)
                }
                (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => write_value(*b"siwd\0", value, length),
                (libc::IPPROTO_TCP, libc::TCP_INFO) => {
                    let mut info: libc::tcp_info = std::mem::zeroed();
                    info.tcpi_state = state.tcp_state();
                    info.tcpi_snd_mss = state.number(level, libc::TCP_MAXSEG)? as u32;
                    write_value(info, value, length)
                }
                _ => {
                    let number = state.number(level, name)?;
                    write_value(number, value, length)
                }
            }
        }
    }
}

impl RsocketState {
    /// Sets a SOL_RDMA size, before there is a stream.
    fn set_size(&mut self, name: c_int, value: c_int) -> Result<(), c_int> {
        if matches!(self.phase, Phase::Connecting(_) | Phase::Stream(_)) {
            return Err(libc::EINVAL);
        }
        let sizes = &mut self.options.sizes;
        let size = u16::try_from(value).unwrap_or(u16::MAX - 1);
        match name as u32 {
            RDMA_SQSIZE => sizes.send_queue = size,
            RDMA_RQSIZE => sizes.receive_queue = size,
            RDMA_INLINE => sizes.inline = size,
            RDMA_IOMAPSIZE => sizes.mappings = from_scale(to_scale(size)),
            _ => return Err(libc::ENOPROTOOPT),
        }
        Ok(())
    }

    fn set_number(&mut self, level: c_int, name: c_int, value: c_int) -> Result<(), c_int> {
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_RCVBUFFORCE) => {
                let sizes = &mut self.options.sizes;
                sizes.receive_buffer = buffer_size(value);
                sizes.most_receive_buffer = sizes.receive_buffer;
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE) => {
                let sizes = &mut self.options.sizes;
                sizes.send_buffer = buffer_size(value);
                sizes.most_send_buffer = sizes.send_buffer;
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) if value <= 0 => return Err(libc::EINVAL),
            _ if is_remembered(level, name) => {
                self.options.numbers.insert((level, name), value);
            }
            _ => return Err(libc::ENOPROTOOPT),
        }
        Ok(())
    }

    fn number(&mut self, level: c_int, name: c_int) -> Result<c_int, c_int> {
        let sizes = match &self.phase {
            Phase::Stream(stream) => stream.sizes,
            _ => self.options.sizes,
        };
        let set = self.options.numbers.get(&(level, name)).copied();
        let number = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) => self.take_error(),
            (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => libc::IPPROTO_TCP,
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => self.family,
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                matches!(self.phase, Phase::Listening(_)).into()
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => sizes.receive_buffer as c_int,
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => sizes.send_buffer as c_int,
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => set.unwrap_or(1448),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => set.unwrap_or(7200),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => set.unwrap_or(75),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => set.unwrap_or(9),
            _ if level == SOL_RDMA as c_int => match name as u32 {
                RDMA_SQSIZE => sizes.send_queue.into(),
                RDMA_RQSIZE => sizes.receive_queue.into(),
                RDMA_INLINE => sizes.inline.into(),
                RDMA_IOMAPSIZE => sizes.mappings.into(),
                _ => return Err(libc::ENOPROTOOPT),
            },
            _ if is_remembered(level, name) => set.unwrap_or(0),
            _ => return Err(libc::ENOPROTOOPT),
        };
        Ok(number)
    }

    /// TCP state for TCP_INFO.
    fn tcp_state(&self) -> u8 {
        const ESTABLISHED: u8 = 1;
        const SYN_SENT: u8 = 2;
        const CLOSE: u8 = 7;
        const LISTEN: u8 = 10;
        match &self.phase {
            Phase::Stream(stream) if stream.connected => ESTABLISHED,
            Phase::Connecting(_) => SYN_SENT,
            Phase::Listening(_) => LISTEN,
            _ => CLOSE,
        }
    }
}
