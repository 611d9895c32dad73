//! Worker threads: std threads that pin themselves and then register with DPDK, which gives them
//! mempool caches of their own.

use crate::{Eal, Error, Result, error};
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem;

thread_local! {
    static REGISTERED: Cell<bool> = const { Cell::new(false) };
}

/// Registration of the current thread with DPDK, until dropped. It cannot move to another thread.
pub struct RegisteredThread {
    _eal: Eal,
    _on_this_thread: PhantomData<*const ()>,
}

impl RegisteredThread {
    pub(crate) fn new(eal: Eal) -> Result<Self> {
        if REGISTERED.get() {
            return Err(Error::ThreadRegister {
                reason: "it is registered already".into(),
            });
        }
        // SAFETY: the EAL is initialised, which `eal` proves.
        let rc = unsafe { dpdk_sys::rte_thread_register() };
        if rc != 0 {
            return Err(Error::ThreadRegister {
                reason: error::errno_text(error::rte_errno()),
            });
        }
        REGISTERED.set(true);
        Ok(Self {
            _eal: eal,
            _on_this_thread: PhantomData,
        })
    }

    /// DPDK's number of this thread.
    pub fn lcore_id(&self) -> u32 {
        // SAFETY: reads a thread-local of DPDK.
        unsafe { dpdk_sys::siw_lcore_id() }
    }
}

impl Drop for RegisteredThread {
    fn drop(&mut self) {
        // SAFETY: this thread registered itself in `new`, and it is the one that unregisters, since
        // the value is not Send.
        unsafe { dpdk_sys::rte_thread_unregister() }
        REGISTERED.set(false);
    }
}

/// Binds the calling thread to one CPU.
pub fn pin_current_thread(core: usize) -> Result<()> {
    if !allowed_cores().contains(&core) {
        return Err(core_error(core));
    }
    // SAFETY: cpu_set_t is plain data; an all-zero one is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: `core` came from a cpu_set_t, so it is within the set's bounds.
    unsafe { libc::CPU_SET(core, &mut set) };
    set_affinity(&set).map_err(|_| core_error(core))
}

/// The CPUs the calling thread may run on, in ascending order.
pub fn allowed_cores() -> Vec<usize> {
    let set = current_affinity();
    (0..libc::CPU_SETSIZE as usize)
        // SAFETY: the index is below CPU_SETSIZE.
        .filter(|&core| unsafe { libc::CPU_ISSET(core, &set) })
        .collect()
}

pub(crate) fn core_error(core: usize) -> Error {
    let allowed: Vec<String> = allowed_cores().iter().map(usize::to_string).collect();
    Error::Core {
        core,
        allowed: allowed.join(","),
    }
}

/// Checks the file by which DPDK finds a core.
pub(crate) fn check_sysfs(core: usize) -> Result<()> {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/core_id");
    if std::path::Path::new(&path).exists() {
        Ok(())
    } else {
        Err(Error::Sysfs { core, path })
    }
}

pub(crate) fn current_affinity() -> libc::cpu_set_t {
    // SAFETY: cpu_set_t is plain data and the kernel writes at most its size.
    unsafe {
        let mut set = mem::zeroed();
        libc::sched_getaffinity(0, mem::size_of::<libc::cpu_set_t>(), &mut set);
        set
    }
}

pub(crate) fn set_affinity(set: &libc::cpu_set_t) -> std::io::Result<()> {
    // SAFETY: the kernel reads exactly the size given.
    match unsafe { libc::sched_setaffinity(0, mem::size_of::<libc::cpu_set_t>(), set) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
