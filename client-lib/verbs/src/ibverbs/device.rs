//! The device list (ibv_get_device_list(3)): the daemon's devices, under their own names.

use crate::abi::ibv_device;
use crate::per_process::PerProcess;
use crate::persona::persona_of;
use crate::status::{fail_with, null_with};
use siw::{Context, DeviceInfo, Error, Persona, ProcessMutex};
use siw_shm::device_identity::node_guid;
use std::ffi::{c_char, c_int};

/// A device as programs see it. It is never freed, because a program may use it as long as one of
/// its contexts is open; there is one object per device of the daemon.
#[repr(C)]
pub struct DeviceObject {
    abi: ibv_device,
    info: DeviceInfo,
    persona: Persona,
}

// SAFETY: it is immutable after its creation.
unsafe impl Sync for DeviceObject {}
// SAFETY: as above; the pointers in the struct of the header are not used.
unsafe impl Send for DeviceObject {}

/// All devices ever listed.
static SEEN: PerProcess<ProcessMutex<Vec<&'static DeviceObject>>> = PerProcess::new();

/// Copies text into a C field, truncated if too long.
pub fn copy_text(field: &mut [c_char], text: &str) {
    let Some((end, room)) = field.split_last_mut() else {
        return;
    };
    *end = 0;
    room.fill(0);
    for (to, from) in room.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

impl DeviceObject {
    /// Returns the device with that description, the same object each time.
    pub fn find_or_add(info: &DeviceInfo) -> &'static DeviceObject {
        let mut seen = SEEN.get().lock_or_end_call();
        if let Some(device) = seen.iter().find(|device| device.info.is_same_device(info)) {
            return device;
        }
        // SAFETY: the struct is made of numbers, arrays of them and optional function pointers.
        let mut abi: ibv_device = unsafe { std::mem::zeroed() };
        let persona = persona_of(info);
        abi.node_type = persona.node_type();
        abi.transport_type = persona.transport_type();
        copy_text(&mut abi.name, &info.name);
        copy_text(&mut abi.dev_name, &format!("uverbs{}", info.index));
        let class = super::sysfs::root_text();
        let dev_path = format!("{class}/class/infiniband_verbs/uverbs{}", info.index);
        copy_text(&mut abi.dev_path, &dev_path);
        copy_text(
            &mut abi.ibdev_path,
            &format!("{class}/class/infiniband/{}", info.name),
        );
        let device = Box::leak(Box::new(DeviceObject {
            abi,
            info: info.clone(),
            persona,
        }));
        seen.push(device);
        device
    }

    /// # Safety
    /// A device of this library.
    pub unsafe fn from_abi<'a>(device: *mut ibv_device) -> &'a DeviceObject {
        // SAFETY: the struct of the header is the first field.
        unsafe { &*device.cast() }
    }

    /// Pointer for struct fields that hold a device.
    pub fn as_abi(&self) -> *mut ibv_device {
        (&raw const self.abi).cast_mut()
    }

    /// Description by the daemon.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Kind of device that the program sees.
    pub fn persona(&self) -> Persona {
        self.persona
    }

    /// EUI-64 of the Ethernet address, in network order.
    pub fn guid(&self) -> u64 {
        u64::from_ne_bytes(node_guid(self.info.mac))
    }
}

trait SameDevice {
    fn is_same_device(&self, other: &Self) -> bool;
}

impl SameDevice for DeviceInfo {
    /// Compares the fields that cannot change; state, speed and addresses may.
    fn is_same_device(&self, other: &DeviceInfo) -> bool {
        let identity = |info: &DeviceInfo| (info.index, info.name.clone(), info.mac, info.persona);
        identity(self) == identity(other)
    }
}

/// ibv_get_device_list(3)
pub unsafe fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices = match Context::open(None).and_then(|client| client.query_devices()) {
        Ok(devices) => devices,
        Err(error) => {
            fail_with("ibv_get_device_list", &error);
            if matches!(error, Error::Open { .. }) {
                siw::print_line(format_args!("siw-verbs: {error}"));
            }
            return std::ptr::null_mut();
        }
    };
    // SAFETY: calloc may be called with any sizes.
    let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()) };
    let list: *mut *mut ibv_device = list.cast();
    if list.is_null() {
        return null_with(libc::ENOMEM);
    }
    for (i, info) in devices.iter().enumerate() {
        // SAFETY: the list has one entry more than there are devices; the last stays NULL.
        unsafe { *list.add(i) = DeviceObject::find_or_add(info).as_abi() };
    }
    if !count.is_null() {
        // SAFETY: a valid pointer by the manual page.
        unsafe { *count = devices.len() as c_int };
    }
    list
}

/// ibv_free_device_list(3)
pub unsafe fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: from `get_device_list`; the devices themselves are not freed.
    unsafe { libc::free(list.cast()) };
}

/// ibv_get_device_name(3)
pub unsafe fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a device of this library.
    unsafe { DeviceObject::from_abi(device) }.abi.name.as_ptr()
}

/// ibv_get_device_guid(3)
pub unsafe fn get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: a device of this library.
    unsafe { DeviceObject::from_abi(device) }.guid()
}

/// ibv_get_device_index(3)
pub unsafe fn get_device_index(device: *mut ibv_device) -> c_int {
    // SAFETY: a device of this library.
    unsafe { DeviceObject::from_abi(device) }.info.index as c_int
}
