//! Events that a device reports while it is in use: its removal, or a required reset. DPDK's
//! interrupt thread records them; the control thread polls for them.

use crate::pci::{PciDevice, full_address, is_pci_address};
use crate::port_inner::PortInner;
use crate::tap_interface::TapInterface;
use crate::{Error, Port, Result, error, log};
use dpdk_sys as sys;
use std::ffi::CString;

/// An event of a device since the last query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortEvent {
    /// The device was removed from the machine, or is about to be. With vfio, the kernel delays the
    /// removal until [`Port::detach`].
    Removed,
    /// The device does not work until it is reset, for example a virtual function after a reset of
    /// its physical function.
    NeedsReset,
}

impl PortInner {
    /// The name by which the bus reports the removal of the device.
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
    /// Starts recording the events that [`Self::take_event`] reports.
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

    /// Event of the device since the last call. Not every user-space driver reports a removal, so
    /// the kernel's list of devices and the interface of a tap are checked too.
    pub fn take_event(&self) -> Option<PortEvent> {
        self.check_attached().ok()?;
        // SAFETY: reads and clears a counter of the shim.
        let events = unsafe { sys::siw_port_take_events(self.id()) };
        let is_gone = || is_pci_address(self.name()) && !PciDevice::is_present(self.name());
        let tap = self.inner().tap.as_ref();
        let has_lost_interface = || tap.is_some_and(TapInterface::is_deleted);
        if events & sys::SIW_PORT_REMOVED != 0 || is_gone() || has_lost_interface() {
            Some(PortEvent::Removed)
        } else if events & sys::SIW_PORT_RESET != 0 {
            Some(PortEvent::NeedsReset)
        } else {
            None
        }
    }
}
