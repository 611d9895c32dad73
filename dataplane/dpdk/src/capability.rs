//! Capabilities of this process (capabilities(7)).

/// A capability, with its number in linux/capability.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// Interfaces may be configured and created.
    NetAdmin = 12,
    /// Packet sockets may be opened.
    NetRaw = 13,
    /// Any amount of memory may be locked.
    IpcLock = 14,
}

impl Capability {
    /// Returns true if the capability is in effect (proc_pid_status(5)); `None` if /proc cannot be
    /// read.
    pub fn is_effective(self) -> Option<bool> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))?;
        let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
        Some(mask & 1 << self as u32 != 0)
    }
}
