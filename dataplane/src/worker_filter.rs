//! The system calls of worker threads. A worker reads frames of peers and shared memory of clients; if
//! one of them takes it over, it can use the descriptors that siwd has open, and nothing else: it opens
//! no file, makes no socket, starts no thread or program, and maps no executable memory.
//!
//! A refused call fails with EPERM and is no end: a driver that tries something optional goes on.

use std::collections::BTreeMap;

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::start_error::StartError;

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
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_getsockopt,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
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
    // The handler of faults, panics, and the end of the thread.
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

/// Command of bpf(2).
const BPF_MAP_DELETE_ELEM: u64 = 3;

/// Calls with the protection of memory as their third argument.
const PROTECTING: [libc::c_long; 2] = [libc::SYS_mmap, libc::SYS_mprotect];

fn filter_error(error: impl std::fmt::Display) -> StartError {
    StartError::Device(format!(
        "the system calls of a worker cannot be restricted: {error}; confine = false in [workers] leaves \
         them as they are"
    ))
}

fn build() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let is_executable = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    for call in PROTECTING {
        let condition =
            SeccompCondition::new(2, SeccompCmpArgLen::Dword, is_executable.clone(), 0)?;
        rules.insert(call, vec![SeccompRule::new(vec![condition])?]);
    }
    // abort(3) sends a signal to its own thread; kill(2) and other processes are out of reach.
    let own = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        u64::from(std::process::id()),
    )?;
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![own])?]);
    // A worker may hold the last reference to a TCP port that an XDP program steers here.
    let removes = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::Eq,
        BPF_MAP_DELETE_ELEM,
    )?;
    rules.insert(libc::SYS_bpf, vec![SeccompRule::new(vec![removes])?]);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::EPERM as u32),
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?;
    filter.try_into()
}

/// Restricts the system calls of the calling thread, for good.
pub fn confine_thread() -> Result<(), StartError> {
    let program = build().map_err(filter_error)?;
    seccompiler::apply_filter(&program).map_err(filter_error)
}
