//! State shared by all identifiers of the process: one connection to the daemon, and on it a
//! context for each device, with the default protection domain for queue pairs.

use crate::abi::{ibv_context, ibv_pd};
use crate::ibverbs::context::{AsyncEvents, ContextObject};
use crate::ibverbs::device::DeviceObject;
use crate::ibverbs::open::new_context;
use crate::ibverbs::pd::alloc_pd;
use crate::ibverbs::shared_events::{EventGroup, SharedEvents};
use crate::per_process::PerProcess;
use crate::status::{fail_with, set_errno};
use siw::{CmChannel, Context, DeviceInfo, Error, Pd, ProcessMutex, Qp};
use std::ffi::c_int;
use std::net::IpAddr;
use std::sync::OnceLock;
use std::time::Duration;

/// A connection to the daemon and its contexts. They are never freed, because identifiers, and the
/// objects that programs create with them, refer to them.
pub struct Devices {
    pub client: Context,
    all: Vec<Device>,
    socket_pd: OnceLock<Pd>,
    /// Channel for events that no program gets.
    parking: OnceLock<CmChannel>,
}

struct Device {
    info: DeviceInfo,
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
        // Never freed, like the contexts.
        let group: &EventGroup = Box::leak(Box::default());
        let mut all = Vec::new();
        for info in client.query_devices()? {
            let events = SharedEvents::new(&client, group)?;
            all.push(Device {
                context: Box::leak(new_context(
                    DeviceObject::find_or_add(&info),
                    client.clone(),
                    AsyncEvents::Shared(events),
                )),
                info,
                default_pd: ProcessMutex::default(),
            });
        }
        group.set_members(all.iter().map(|device| device.context).collect());
        let devices: &'static Devices = Box::leak(Box::new(Devices {
            client,
            all,
            socket_pd: OnceLock::new(),
            parking: OnceLock::new(),
        }));
        *open = Some(devices);
        Ok(devices)
    }

    /// The context of a device, by the daemon's index.
    pub fn context(&self, index: u32) -> Result<*mut ibv_context, Error> {
        let mut all = self.all.iter();
        all.find(|device| device.info.index == index)
            .map(|device| device.context.as_abi())
            .ok_or(Error::Invalid("siwd returned an unknown device"))
    }

    /// Checks whether a device has the address.
    pub fn has_address(&self, ip: IpAddr) -> bool {
        self.all.iter().any(|device| device.info.ips.contains(&ip))
    }

    /// Returns the first address of that family of any device.
    pub fn first_address(&self, is_v4: bool) -> Option<IpAddr> {
        let mut all = self.all.iter().flat_map(|device| &device.info.ips);
        all.find(|ip| ip.is_ipv4() == is_v4).copied()
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
        let mut all = self.all.iter();
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
    let devices = match Devices::open() {
        Ok(devices) => devices,
        Err(error) => {
            fail_with("rdma_get_devices", &error);
            return std::ptr::null_mut();
        }
    };
    let length = devices.all.len();
    // SAFETY: malloc may be called with any size; `free_devices` frees it.
    let list: *mut *mut ibv_context =
        unsafe { libc::calloc(length + 1, size_of::<*mut ibv_context>()) }.cast();
    if list.is_null() {
        set_errno(libc::ENOMEM);
        return list;
    }
    for (index, device) in devices.all.iter().enumerate() {
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
