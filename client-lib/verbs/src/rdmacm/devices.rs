//! State shared by all identifiers of the process: one connection to the daemon, and on it a
//! context for each device, with the default protection domain for queue pairs.

use crate::abi::{ibv_context, ibv_pd};
use crate::ibverbs::context::{AsyncEvents, ContextObject};
use crate::ibverbs::device::DeviceObject;
use crate::ibverbs::faulty::ContextFaults;
use crate::ibverbs::open::{alarm_of, new_context};
use crate::ibverbs::pd::alloc_pd;
use crate::ibverbs::shared_events::{EventGroup, SharedEvents};
use crate::per_process::PerProcess;
use crate::status::{fail_with, set_errno};
use siw::{CmChannel, Context, DeviceInfo, Error, Pd, ProcessMutex, Qp};
use std::ffi::c_int;
use std::net::IpAddr;
use std::sync::{MutexGuard, OnceLock};
use std::time::Duration;

/// A connection to the daemon and its contexts. They are never freed, because identifiers, and the
/// objects that programs create with them, refer to them.
pub struct Devices {
    pub client: Context,
    /// All devices that were seen, also those that the daemon does not have any more.
    seen: ProcessMutex<Vec<&'static Device>>,
    /// The contexts.
    group: &'static EventGroup,
    socket_pd: OnceLock<Pd>,
    /// Channel for events that no program gets.
    parking: OnceLock<CmChannel>,
}

struct Device {
    /// The daemon's index, which no later device gets.
    index: u32,
    context: &'static ContextObject,
    default_pd: ProcessMutex<Option<PdPointer>>,
}

#[derive(Clone, Copy)]
struct PdPointer(*mut ibv_pd);

// SAFETY: a protection domain may be used from any thread.
unsafe impl Send for PdPointer {}
// SAFETY: a device is immutable except for the contents of its mutex; a context may be used from
// any thread.
unsafe impl Sync for Device {}
// SAFETY: as above.
unsafe impl Send for Device {}

static OPEN: PerProcess<ProcessMutex<Option<&'static Devices>>> = PerProcess::new();

impl Devices {
    /// Returns the devices of the daemon. The first call connects; later ones reconnect if the
    /// daemon has ended.
    pub fn open() -> Result<&'static Devices, Error> {
        let mut open = OPEN.get().lock()?;
        if let Some(devices) = open.filter(|devices| devices.client.is_alive()) {
            return Ok(devices);
        }
        let mut client = Context::open(None)?;
        client.hide_descriptors();
        client.wait_in_destructors();
        let devices: &'static Devices = Box::leak(Box::new(Devices {
            client,
            seen: ProcessMutex::default(),
            // Never freed, like the contexts.
            group: Box::leak(Box::default()),
            socket_pd: OnceLock::new(),
            parking: OnceLock::new(),
        }));
        devices.query_present()?;
        *open = Some(devices);
        Ok(devices)
    }

    /// Returns the devices that the daemon has now, with a context for each.
    fn query_present(&self) -> Result<Vec<&'static Device>, Error> {
        let present = self.client.query_devices()?;
        let mut seen = self.lock_seen();
        let find_or_add = |info: &DeviceInfo| {
            if let Some(device) = seen.iter().find(|device| device.index == info.index) {
                return Ok(*device);
            }
            let device = self.open_device(info)?;
            seen.push(device);
            Ok(device)
        };
        present.iter().map(find_or_add).collect()
    }

    fn open_device(&self, info: &DeviceInfo) -> Result<&'static Device, Error> {
        let faults = ContextFaults::new(&info.name)?;
        let events = SharedEvents::new(&self.client, self.group, alarm_of(&faults))?;
        let context: &'static ContextObject = Box::leak(new_context(
            DeviceObject::find_or_add(info),
            self.client.clone(),
            AsyncEvents::Shared(events),
            faults,
        ));
        self.group.add_member(context);
        Ok(Box::leak(Box::new(Device {
            index: info.index,
            context,
            default_pd: ProcessMutex::default(),
        })))
    }

    fn lock_seen(&self) -> MutexGuard<'_, Vec<&'static Device>> {
        self.seen.lock_or_end_call()
    }

    /// The context of a device, by the daemon's index.
    pub fn context(&self, index: u32) -> Result<*mut ibv_context, Error> {
        let find = || {
            let seen = self.lock_seen();
            let found = seen.iter().find(|device| device.index == index);
            found.map(|device| device.context.as_abi())
        };
        if let Some(context) = find() {
            return Ok(context);
        }
        self.query_present()?;
        find().ok_or(Error::Invalid("siwd returned an unknown device"))
    }

    /// Addresses of the devices as they are now; none if the daemon does not answer.
    fn query_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let present = self.client.query_devices().unwrap_or_default();
        present.into_iter().flat_map(|info| info.ips)
    }

    /// Checks whether a device has the address.
    pub fn has_address(&self, ip: IpAddr) -> bool {
        self.query_addresses().any(|own| own == ip)
    }

    /// Returns the first address of that family of any device.
    pub fn first_address(&self, is_v4: bool) -> Option<IpAddr> {
        self.query_addresses().find(|ip| ip.is_ipv4() == is_v4)
    }

    /// Moves the events of a queue pair away from the channel of an identifier that is destroyed: later
    /// ones would make its descriptor readable.
    pub fn park_events(&self, qp: &Qp) -> Result<(), Error> {
        let parking = match self.parking.get() {
            Some(parking) => parking,
            None => {
                let made = CmChannel::new(&self.client)?;
                self.parking.get_or_init(|| made)
            }
        };
        // Earlier ones, so that they do not accumulate.
        while parking.get_event(Some(Duration::ZERO)).is_ok() {}
        qp.migrate_events(parking)
    }

    /// The protection domain of all rsockets.
    pub fn socket_pd(&self) -> Result<&Pd, Error> {
        if let Some(pd) = self.socket_pd.get() {
            return Ok(pd);
        }
        let pd = self.client.alloc_pd()?;
        Ok(self.socket_pd.get_or_init(|| pd))
    }

    /// Returns the default protection domain for queue pairs of the device with this context.
    pub fn default_pd(&self, context: *mut ibv_context) -> Result<*mut ibv_pd, Error> {
        let seen = self.seen.lock()?;
        let mut all = seen.iter().copied();
        let device = all
            .find(|device| std::ptr::eq(device.context.as_abi(), context))
            .ok_or(Error::Invalid("the identifier has no device yet"))?;
        let mut default = device.default_pd.lock()?;
        if let Some(pd) = *default {
            return Ok(pd.0);
        }
        // SAFETY: a context of this library.
        let pd = unsafe { alloc_pd(context) };
        if pd.is_null() {
            return Err(std::io::Error::last_os_error().into());
        }
        *default = Some(PdPointer(pd));
        Ok(pd)
    }
}

/// rdma_get_devices(3)
pub unsafe fn get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let present = match Devices::open().and_then(Devices::query_present) {
        Ok(present) => present,
        Err(error) => {
            fail_with("rdma_get_devices", &error);
            return std::ptr::null_mut();
        }
    };
    let length = present.len();
    // SAFETY: malloc may be called with any size; `free_devices` frees it.
    let list: *mut *mut ibv_context =
        unsafe { libc::calloc(length + 1, size_of::<*mut ibv_context>()) }.cast();
    if list.is_null() {
        set_errno(libc::ENOMEM);
        return list;
    }
    for (index, device) in present.iter().enumerate() {
        // SAFETY: the list has one entry more than there are devices.
        unsafe { list.add(index).write(device.context.as_abi()) };
    }
    if !count.is_null() {
        // SAFETY: a number to write.
        unsafe { count.write(length as c_int) };
    }
    list
}

/// rdma_free_devices(3)
pub unsafe fn free_devices(list: *mut *mut ibv_context) {
    // SAFETY: `get_devices` allocated it.
    unsafe { libc::free(list.cast()) };
}
