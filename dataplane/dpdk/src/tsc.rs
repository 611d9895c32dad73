//! The clock of the data path, read once per batch.

/// The current value of the time-stamp counter.
#[inline]
pub fn tsc_now() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction exists on every x86-64 CPU and only reads.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: reads the virtual counter, which Linux makes readable in user space.
        unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks) };
        ticks
    }
}

/// Ticks per second, as calibrated by the EAL at start; 0 before that.
pub fn tsc_hz() -> u64 {
    // SAFETY: returns a number that the EAL sets once.
    unsafe { dpdk_sys::rte_get_tsc_hz() }
}
