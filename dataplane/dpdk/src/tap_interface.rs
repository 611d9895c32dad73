//! The interface of a tap device. DPDK's driver makes it, and does not report that it was deleted.

use std::ffi::CString;
use std::fs;
use std::os::fd::RawFd;

/// An interface that the driver has by a descriptor of /dev/net/tun.
pub(crate) struct TapInterface {
    /// The driver's, which has it until the device is closed.
    descriptor: RawFd,
}

impl TapInterface {
    /// Finds the interface of this name among the descriptors of the process; `None` without /proc.
    pub(crate) fn find_by_name(name: &str) -> Option<TapInterface> {
        let descriptors = fs::read_dir("/proc/self/fdinfo").ok()?;
        let mut numbers = descriptors
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let descriptor =
            { numbers }.find(|number| interface_of(*number).as_deref() == Some(name))?;
        Some(TapInterface { descriptor })
    }

    /// Returns true if the interface was deleted. One that was renamed, or moved to another network
    /// namespace, still carries frames.
    pub(crate) fn is_deleted(&self) -> bool {
        interface_of(self.descriptor).is_none_or(|name| name.is_empty())
    }
}

/// Returns true if the network namespace of the calling thread has an interface of this name.
pub(crate) fn interface_exists(name: &str) -> bool {
    // SAFETY: a C string that lives through the call.
    CString::new(name).is_ok_and(|name| unsafe { libc::if_nametoindex(name.as_ptr()) } != 0)
}

/// Name of the interface that a descriptor of /dev/net/tun is attached to, as the kernel shows it in
/// proc_pid_fdinfo(5); empty after its deletion. `None` for other descriptors.
fn interface_of(descriptor: RawFd) -> Option<String> {
    let shown = fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).ok()?;
    let mut names = shown.lines().filter_map(|line| line.strip_prefix("iff:"));
    names.next().map(|name| name.trim().to_owned())
}
