//! The drop-in library as programs use it: functions looked up by name, objects that destroy
//! themselves.

use super::abi::*;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::{Error as IoError, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

/// Time limit of every operation.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Declares the functions of the library and their look-up.
macro_rules! library_functions {
    ($(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions, by their names in C.
        pub struct Verbs {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Verbs {
            fn look_up(library: *mut c_void) -> Result<Verbs, String> {
                $(
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: an open library, and a text that ends with a zero.
                    let $name = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                    if $name.is_null() {
                        return Err(format!("the library has no {}", stringify!($name)));
                    }
                )*
                // SAFETY: the symbols have these types by the library's header.
                Ok(unsafe { Verbs { $($name: std::mem::transmute::<
                    *mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?,
                >($name),)* } })
            }
        }
    };
}

library_functions! {
    fn ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    fn ibv_free_device_list(*mut *mut ibv_device);
    fn ibv_get_device_name(*mut ibv_device) -> *const c_char;
    fn ibv_get_device_guid(*mut ibv_device) -> u64;
    fn ibv_get_sysfs_path() -> *const c_char;
    fn ibv_read_sysfs_file(*const c_char, *const c_char, *mut c_char, usize) -> c_int;
    fn ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    fn ibv_close_device(*mut ibv_context) -> c_int;
    fn ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    fn ibv_query_gid(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    fn ibv_query_pkey(*mut ibv_context, u8, c_int, *mut u16) -> c_int;
    fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    fn ibv_reg_mr_iova2(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr;
    fn ibv_rereg_mr(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int;
    fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
    fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    fn ibv_create_cq(
        *mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int
    ) -> *mut ibv_cq;
    fn ibv_resize_cq(*mut ibv_cq, c_int) -> c_int;
    fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
    fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    fn ibv_ack_cq_events(*mut ibv_cq, u32);
    fn ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
    fn ibv_ack_async_event(*mut ibv_async_event);
    fn ibv_create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    fn ibv_modify_srq(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
    fn ibv_query_srq(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
    fn ibv_destroy_srq(*mut ibv_srq) -> c_int;
    fn ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    fn ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    fn ibv_query_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    fn ibv_destroy_qp(*mut ibv_qp) -> c_int;
    fn ibv_qp_to_qp_ex(*mut ibv_qp) -> *mut ibv_qp_ex;
    fn ibv_create_ah(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    fn ibv_create_ah_from_wc(*mut ibv_pd, *mut ibv_wc, *mut ibv_grh, u8) -> *mut ibv_ah;
    fn ibv_destroy_ah(*mut ibv_ah) -> c_int;
    fn ibv_wc_status_str(ibv_wc_status) -> *const c_char;
}

static LOADED: OnceLock<Verbs> = OnceLock::new();

/// Opens the library, once.
pub fn load_library(library: &Path) -> Result<(), String> {
    let path = CString::new(library.as_os_str().as_bytes())
        .map_err(|_| "the library's path contains a zero byte".to_owned())?;
    // SAFETY: a C string.
    let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if opened.is_null() {
        return Err(format!("cannot load {}", library.display()));
    }
    let verbs = Verbs::look_up(opened)?;
    LOADED.get_or_init(|| verbs);
    Ok(())
}

/// The functions of the library.
///
/// # Panics
/// [`load_library`] was not called.
pub fn verbs() -> &'static Verbs {
    LOADED
        .get()
        .expect("the library is loaded before any check")
}

thread_local! {
    /// Objects that could not be destroyed.
    static LEFT: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Takes the list of objects that could not be destroyed.
pub fn take_left_objects() -> Vec<String> {
    LEFT.with(|left| std::mem::take(&mut *left.borrow_mut()))
}

/// Records an object that could not be destroyed.
pub fn note_destroyed(what: &str, status: c_int) {
    if status != 0 {
        let why = format!("{what}: {}", IoError::from_raw_os_error(status));
        LEFT.with(|left| left.borrow_mut().push(why));
    }
}

/// Text of the errno that a call has set.
pub fn last_error(call: &str) -> String {
    format!("{call}: {}", IoError::last_os_error())
}

/// Converts the result of a call that returns an errno.
pub fn check_status(call: &str, status: c_int) -> Result<(), String> {
    match status {
        0 => Ok(()),
        -1 => Err(last_error(call)),
        errno => Err(format!("{call}: {}", IoError::from_raw_os_error(errno))),
    }
}

/// Converts the pointer that a call returned.
pub fn check_pointer<T>(call: &str, object: *mut T) -> Result<*mut T, String> {
    (!object.is_null())
        .then_some(object)
        .ok_or_else(|| last_error(call))
}

/// Returns an all-zero value.
///
/// # Safety
/// `T` must be a C struct of numbers, pointers and optional functions.
pub unsafe fn zeroed<T>() -> T {
    // SAFETY: by the caller's contract.
    unsafe { std::mem::zeroed() }
}

/// Unwraps a function of a context's table.
pub fn table_slot<T>(found: Option<T>) -> Result<T, String> {
    found.ok_or_else(|| "the context's table lacks this function".to_owned())
}

/// An open device.
pub struct LibraryContext {
    pub raw: *mut ibv_context,
    pub guid: u64,
}

impl LibraryContext {
    /// Opens the device of that name.
    pub fn open_device(name: &str) -> Result<Rc<LibraryContext>, String> {
        // SAFETY: the list is freed after its devices were opened, and ends with NULL.
        unsafe {
            let list = (verbs().ibv_get_device_list)(null_mut());
            let list = check_pointer("ibv_get_device_list", list)?;
            let mut at = list;
            while !(*at).is_null() && device_name(*at) != name {
                at = at.add(1);
            }
            let device = *at;
            let opened = if device.is_null() {
                Err(format!("siwd has no device {name}"))
            } else {
                let raw = (verbs().ibv_open_device)(device);
                check_pointer("ibv_open_device", raw).map(|raw| {
                    Rc::new(LibraryContext {
                        raw,
                        guid: (verbs().ibv_get_device_guid)(device),
                    })
                })
            };
            (verbs().ibv_free_device_list)(list);
            let context = opened?;
            // Non-blocking: the descriptor is also readable for undelivered events of destroyed objects.
            let fd = (*context.raw).async_fd;
            let flags = libc::fcntl(fd, libc::F_GETFL);
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
            Ok(context)
        }
    }

    /// ibv_query_device(3)
    pub fn query_device(&self) -> Result<ibv_device_attr, String> {
        // SAFETY: an open context, and a struct to write.
        unsafe {
            let mut attr = zeroed();
            let status = (verbs().ibv_query_device)(self.raw, &raw mut attr);
            check_status("ibv_query_device", status).map(|()| attr)
        }
    }

    /// The larger struct that contains the context, with additional functions.
    pub fn extended_context(&self) -> &verbs_context {
        // SAFETY: a context of this library lies in such a struct (`verbs_get_ctx_op` of verbs.h).
        unsafe {
            &*self
                .raw
                .byte_sub(std::mem::offset_of!(verbs_context, context))
                .cast()
        }
    }

    /// ibv_query_device_ex(3)
    pub fn extended_attributes(&self) -> Result<ibv_device_attr_ex, String> {
        let query = table_slot(self.extended_context().query_device_ex)?;
        // SAFETY: an open context, and a struct to write.
        unsafe {
            let mut attr = zeroed();
            let size = size_of::<ibv_device_attr_ex>();
            let status = query(self.raw, std::ptr::null(), &raw mut attr, size);
            check_status("ibv_query_device_ex", status).map(|()| attr)
        }
    }

    /// ibv_query_port(3)
    pub fn query_port(&self) -> Result<ibv_port_attr, String> {
        let query = table_slot(self.extended_context().query_port)?;
        // SAFETY: an open context, and a struct to write.
        unsafe {
            let mut attr = zeroed();
            let status = query(self.raw, 1, &raw mut attr, size_of::<ibv_port_attr>());
            check_status("ibv_query_port", status).map(|()| attr)
        }
    }

    /// ibv_query_gid(3)
    pub fn query_gid(&self, index: c_int) -> Result<ibv_gid, String> {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: an open context, and a GID to write.
        let status = unsafe { (verbs().ibv_query_gid)(self.raw, 1, index, &raw mut gid) };
        check_status("ibv_query_gid", status).map(|()| gid)
    }

    /// Waits for the next asynchronous event, acknowledges it, and returns its type.
    pub fn next_event(&self) -> Result<ibv_event_type, String> {
        // SAFETY: an open context; an event to write, which is acknowledged once.
        unsafe {
            let mut event = zeroed();
            loop {
                await_readable((*self.raw).async_fd, "asynchronous event")?;
                if (verbs().ibv_get_async_event)(self.raw, &raw mut event) == 0 {
                    break;
                }
                if IoError::last_os_error().kind() != ErrorKind::WouldBlock {
                    return Err(last_error("ibv_get_async_event"));
                }
            }
            (verbs().ibv_ack_async_event)(&raw mut event);
            Ok(event.event_type)
        }
    }

    /// Waits for an event of that type, skipping others.
    pub fn await_event(&self, wanted: ibv_event_type) -> Result<(), String> {
        while self.next_event()? != wanted {}
        Ok(())
    }
}

/// Names of all devices.
pub fn device_names() -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    // SAFETY: the list ends with NULL, and is freed after its last use.
    unsafe {
        let list = (verbs().ibv_get_device_list)(null_mut());
        let list = check_pointer("ibv_get_device_list", list)?;
        let mut at = list;
        while !(*at).is_null() {
            names.push(device_name(*at));
            at = at.add(1);
        }
        (verbs().ibv_free_device_list)(list);
    }
    Ok(names)
}

/// # Safety
/// A device of the library.
unsafe fn device_name(device: *mut ibv_device) -> String {
    // SAFETY: by the caller's contract.
    unsafe { CStr::from_ptr((verbs().ibv_get_device_name)(device)) }
        .to_string_lossy()
        .into_owned()
}

/// Waits until the descriptor is readable.
pub fn await_readable(fd: c_int, what: &str) -> Result<(), String> {
    let mut fds = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor.
    match unsafe { libc::poll(&raw mut fds, 1, PATIENCE.as_millis() as c_int) } {
        1 => Ok(()),
        _ => Err(format!("no {what} in {PATIENCE:?}")),
    }
}

impl Drop for LibraryContext {
    fn drop(&mut self) {
        // SAFETY: opened by `open_device`; its objects are destroyed.
        note_destroyed("context", unsafe { (verbs().ibv_close_device)(self.raw) });
    }
}
