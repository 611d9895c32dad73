//! The system calls of worker threads. A worker reads frames of peers and shared memory of clients; if
//! one of them takes it over, it can use the descriptors that siwd has open, and nothing else: it opens
//! no file, makes no socket, starts no thread or program, and maps no executable memory.
//!
//! A refused call fails with EPERM, so that a driver that tries something optional continues, and is
//! recorded for the log. The filter raises SIGSYS in the thread, and the handler does both. Calls that
//! start a thread or a program only fail: the C library makes them with all signals blocked, when SIGSYS
//! would end the process.

#![deny(missing_docs)]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use syscall_numbers::native::sys_call_name;

/// Calls that workers make with any arguments.
const ALLOWED: &[libc::c_long] = &[
    // Descriptors that are open: ports, doorbells, mailboxes, memory of clients, the log.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_ioctl,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_getsockopt,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    // Tells whether the descriptor of an interrupt is an eventfd, which has to be drained.
    libc::SYS_readlink,
    // Waits, time and the processor.
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_restart_syscall,
    libc::SYS_membarrier,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    // Memory; mappings that can be executed are refused below.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // The handlers of faults, panics, and the end of the thread.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Calls that start a thread or a process.
const STARTING: [libc::c_long; 4] = [
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_fork,
    libc::SYS_vfork,
];

/// Calls with the protection of memory as their third argument.
const PROTECTING: [libc::c_long; 2] = [libc::SYS_mmap, libc::SYS_mprotect];

/// Command of bpf(2).
const BPF_MAP_DELETE_ELEM: u64 = 3;
/// `si_code` of a call that a filter refused.
const SYS_SECCOMP: c_int = 1;
/// Numbers that are recorded; larger ones, which Linux does not use, are recorded as the last of these.
const NUMBERS: usize = 512;

type Bits = [AtomicU64; NUMBERS / 64];

/// Numbers of the calls that were refused.
static REFUSED: Bits = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// Those of them that [`take_refused_calls`] has returned.
static TAKEN: Bits = [const { AtomicU64::new(0) }; NUMBERS / 64];
/// The event descriptor that is written after the first refusal of a call; never closed.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// The system calls of a thread cannot be restricted.
#[derive(Debug, thiserror::Error)]
#[error("the system calls of a worker cannot be restricted: {0}")]
pub struct Error(#[from] seccompiler::Error);

impl From<seccompiler::BackendError> for Error {
    fn from(error: seccompiler::BackendError) -> Self {
        Error(error.into())
    }
}

/// The handler of refused calls is installed: threads can be confined.
#[derive(Clone, Copy, Debug)]
pub struct Confinement(());

impl Confinement {
    /// Installs the handler of SIGSYS, once per process. `wake`: an event descriptor (eventfd(2),
    /// non-blocking) that is written when a call is refused for the first time.
    ///
    /// # Errors
    /// The operating system refuses, or a handler is already installed.
    pub fn install(wake: OwnedFd) -> io::Result<Confinement> {
        let wake = wake.into_raw_fd();
        let (release, relaxed) = (Ordering::Release, Ordering::Relaxed);
        if WAKE.compare_exchange(-1, wake, release, relaxed).is_err() {
            // SAFETY: the descriptor was this function's, and is not used any more.
            unsafe { libc::close(wake) };
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        // SAFETY: all zeroes are a sigaction: the default action with an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_refused_call;
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler only does what is async-signal-safe: atomics and system calls.
        if unsafe { libc::sigaction(libc::SIGSYS, &action, null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Confinement(()))
    }

    /// Restricts the system calls of the calling thread for the rest of its life.
    ///
    /// # Errors
    /// The operating system refuses, as where an outer filter denies seccomp(2).
    pub fn confine_thread(self) -> Result<(), Error> {
        // In this order: the second one refuses to add others.
        seccompiler::apply_filter(&refuse_starts()?)?;
        seccompiler::apply_filter(&allow_needed()?)?;
        Ok(())
    }
}

/// Names of the calls that were refused since the last call of this function. Each is returned once in the
/// life of the process.
pub fn take_refused_calls() -> Vec<String> {
    let mut names = Vec::new();
    for (index, (refused, taken)) in REFUSED.iter().zip(&TAKEN).enumerate() {
        let refused = refused.load(Ordering::Acquire);
        let mut new = refused & !taken.fetch_or(refused, Ordering::Relaxed);
        while new != 0 {
            let number = index * 64 + new.trailing_zeros() as usize;
            let name = sys_call_name(number as libc::c_long);
            names.push(name.map_or_else(|| format!("number {number}"), str::to_owned));
            new &= new - 1;
        }
    }
    names
}

/// The SIGSYS handler: takes no lock, allocates nothing, and preserves errno. The call was not made; the
/// thread continues behind it with EPERM as its result.
extern "C" fn on_refused_call(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands in a whole siginfo_t.
    if unsafe { (*info).si_code } != SYS_SECCOMP {
        // Another process sent it: it ends this one, as it would without the handler.
        // SAFETY: both are async-signal-safe.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        return;
    }
    // SAFETY: the kernel hands in the context of the interrupted thread, which nothing else uses.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let result = &mut registers[libc::REG_RAX as usize];
    // The kernel has restored the register that had the number.
    let number = usize::try_from(*result).map_or(NUMBERS - 1, |number| number.min(NUMBERS - 1));
    *result = -i64::from(libc::EPERM);
    let bit = 1 << (number % 64);
    if REFUSED[number / 64].fetch_or(bit, Ordering::Release) & bit == 0 {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the errno of this thread, and eight bytes of a local array; the descriptor is never
        // closed.
        unsafe {
            let errno = *libc::__errno_location();
            libc::write(WAKE.load(Ordering::Acquire), one.as_ptr().cast(), one.len());
            *libc::__errno_location() = errno;
        }
    }
}

/// A rule for the lower half of an argument.
fn argument(
    index: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, seccompiler::BackendError> {
    let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)?;
    SeccompRule::new(vec![condition])
}

/// Rules for calls with any arguments.
fn any_arguments<'a>(
    calls: impl IntoIterator<Item = &'a libc::c_long>,
) -> BTreeMap<i64, Vec<SeccompRule>> {
    calls.into_iter().map(|call| (*call, Vec::new())).collect()
}

/// Lets calls that start a thread or a process fail without a signal.
fn refuse_starts() -> Result<BpfProgram, seccompiler::BackendError> {
    SeccompFilter::new(
        any_arguments(&STARTING),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.cast_unsigned()),
        TargetArch::x86_64,
    )?
    .try_into()
}

/// Raises SIGSYS for all calls but those that workers need. Calls of [`refuse_starts`] are left to it:
/// of two filters the signal would win.
fn allow_needed() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules = any_arguments(ALLOWED.iter().chain(&STARTING));
    let executable = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    for call in PROTECTING {
        rules.insert(call, vec![argument(2, executable.clone(), 0)?]);
    }
    let mut allow = |call, index, value| {
        let rule = argument(index, SeccompCmpOp::Eq, value)?;
        rules.insert(call, vec![rule]);
        Ok::<(), seccompiler::BackendError>(())
    };
    // abort(3) and raise(3) signal their own thread; kill(2) and other processes are out of reach.
    allow(libc::SYS_tgkill, 0, std::process::id().into())?;
    // A worker may hold the last reference to a TCP port that an XDP program steers here.
    allow(libc::SYS_bpf, 0, BPF_MAP_DELETE_ELEM)?;
    // The allocator names its mappings.
    allow(libc::SYS_prctl, 0, libc::PR_SET_VMA as u64)?;
    SeccompFilter::new(
        rules,
        SeccompAction::Trap,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?
    .try_into()
}
