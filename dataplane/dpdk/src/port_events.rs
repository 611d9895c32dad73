//! What a device says of itself while it is in use: that it goes away, or that it wants a reset. DPDK's
//! interrupt thread notes it; the control thread asks from time to time.

use crate::pci::{PciDevice, full_address, is_pci_address};
use crate::port::PortInner;
use crate::{Error, Port, Result, error, log};
use dpdk_sys as sys;
use std::ffi::CString;

/// What became of a device since it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortEvent {
    /// It is being removed from the machine, or is gone already. With vfio, the kernel waits with
    /// the removal until [`Port::detach`].
    Removed,
    /// It does nothing any more until it is reset, as a virtual function whose physical function was
    /// reset.
    NeedsReset,
}

impl PortInner {
    /// The name that a bus reports the removal of the device by.
    fn bus_name(&self) -> Option<CString> {
        is_pci_address(&self.name).then(|| CString::new(full_address(&self.name)).ok())?
    }

    pub(crate) fn unwatch(&self) {
        let name = self.bus_name();
        let name = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        // SAFETY: a port number of ours; the name lives through the call, which compares it.
        unsafe { sys::siw_port_unwatch(self.id, name) };
    }
}

impl Port {
    /// Notes from now on what [`Self::take_event`] reports.
    pub(crate) fn watch(&self) -> Result<()> {
        let name = self.inner().bus_name();
        let name = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        log::forget_lines();
        // SAFETY: a port number of ours; the name lives through the call, which copies it.
        let rc = unsafe { sys::siw_port_watch(self.id(), name) };
        if rc == 0 {
            return Ok(());
        }
        Err(Error::Port {
            port: self.name().to_owned(),
            what: "watching for its removal",
            errno: error::errno_of(rc),
            reason: error::failure_reason(rc),
            log: log::kept_lines(),
        })
    }

    /// What became of the device since the last call. Not every driver for user space reports a
    /// removal, so the kernel's list of devices is looked at too.
    pub fn take_event(&self) -> Option<PortEvent> {
        self.check_attached().ok()?;
        if let Some(xdp) = self.xdp() {
            return xdp.is_gone().then_some(PortEvent::Removed);
        }
        // SAFETY: reads and clears a counter of the shim.
        let events = unsafe { sys::siw_port_take_events(self.id()) };
        let is_gone = || is_pci_address(self.name()) && !PciDevice::is_present(self.name());
        if events & sys::SIW_PORT_REMOVED != 0 || is_gone() {
            Some(PortEvent::Removed)
        } else if events & sys::SIW_PORT_RESET != 0 {
            Some(PortEvent::NeedsReset)
        } else {
            None
        }
    }
}
