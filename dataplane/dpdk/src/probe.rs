//! Attaching devices at run time: virtual ones by devargs, NICs by PCI address.

use crate::driver_traits::Rehearsal;
use crate::pci::is_pci_address;
use crate::tap_interface::{TapInterface, interface_exists};
use crate::{DriverTraits, Eal, Error, Port, Result, eal, error, log};
use dpdk_sys as sys;
use std::ffi::CString;

impl Port {
    /// Creates a virtual device from DPDK's devargs, such as `net_af_packet0,iface=eth0`, and
    /// adopts its port.
    pub fn attach_vdev(eal: &Eal, devargs: &str) -> Result<Self> {
        attach_device(eal, devargs)
    }

    /// Repeats the part of [`Port::attach_vdev`] that has no effect on the machine, and returns the
    /// port if that part creates one. The calling thread may be in another network
    /// namespace afterwards.
    ///
    /// # Errors
    /// The device could not be attached: its driver is missing, or refuses the devargs.
    pub fn rehearse(eal: &Eal, devargs: &str) -> Result<Option<Port>> {
        let rehearsal = DriverTraits::for_device(devargs).rehearsal;
        if rehearsal == Rehearsal::Parse {
            check_devargs(devargs)?;
            return Ok(None);
        }
        let interface = DriverTraits::interface_of(devargs).unwrap_or_default();
        if rehearsal == Rehearsal::AttachInNamespace && !interface_exists(interface) {
            // SAFETY: changes the namespace of the calling thread alone. A process that may not do
            // that may not create interfaces either, which the next call reports.
            unsafe { libc::unshare(libc::CLONE_NEWNET) };
        }
        attach_device(eal, devargs).map(Some)
    }

    /// Attaches the NIC at a PCI address (`0000:03:00.0`, optionally followed by a comma and
    /// devargs). The environment must have been started with `no_pci: false`.
    pub fn attach_pci(eal: &Eal, address: &str) -> Result<Self> {
        if !is_pci_address(address) {
            return Err(Error::Invalid {
                what: "PCI address",
                value: address.to_owned(),
                why: "it looks like 0000:03:00.0".into(),
            });
        }
        attach_device(eal, address)
    }
}

fn attach_device(eal: &Eal, devargs: &str) -> Result<Port> {
    let name = devargs.split(',').next().unwrap_or_default();
    let fail = |reason: String| Error::Device {
        device: devargs.to_owned(),
        reason,
        hint: DriverTraits::for_device(devargs).attach_hint(devargs),
        log: log::kept_lines(),
    };
    let nul = |_| Error::Invalid {
        what: "device",
        value: devargs.to_owned(),
        why: "it contains a NUL byte".into(),
    };
    let _quote = log::quote_lines();
    let cargs = CString::new(devargs).map_err(nul)?;
    let cname = CString::new(name).map_err(nul)?;
    if name.is_empty() {
        return Err(fail("the name of the device is missing".into()));
    }
    let _devices = eal::device_lock();
    // DPDK may have probed a PCI device at start.
    let mut id = port_by_name(&cname);
    if id.is_none() {
        // SAFETY: the string lives through the call, which copies it.
        let rc = unsafe { sys::rte_dev_probe(cargs.as_ptr()) };
        if rc != 0 {
            return Err(fail(error::failure_reason(rc)));
        }
        id = port_by_name(&cname);
    } else if !is_pci_address(name) {
        return Err(fail("a device of that name exists already".into()));
    }
    let Some(id) = id else {
        return Err(fail("it was probed but has no Ethernet port".into()));
    };
    let tap = DriverTraits::created_interface_of(devargs).and_then(TapInterface::find_by_name);
    Port::from_port_id(eal, id, name, None, tap)
}

/// Checks that a driver accepts the devargs.
fn check_devargs(devargs: &str) -> Result<()> {
    log::forget_lines();
    let text = CString::new(devargs).map_err(|_| Error::Invalid {
        what: "device",
        value: devargs.to_owned(),
        why: "it contains a NUL byte".into(),
    })?;
    // SAFETY: the string lives through the call, which copies it.
    match unsafe { sys::siw_devargs_check(text.as_ptr()) } {
        0 => Ok(()),
        _ => Err(Error::Device {
            device: devargs.to_owned(),
            reason: "no driver of DPDK has this name".into(),
            hint: String::new(),
            log: log::kept_lines(),
        }),
    }
}

fn port_by_name(name: &CString) -> Option<u16> {
    let mut id = 0;
    // SAFETY: the number is written within the call.
    let rc = unsafe { sys::rte_eth_dev_get_port_by_name(name.as_ptr(), &mut id) };
    (rc == 0).then_some(id)
}
