//! Files that describe devices (ibv_read_sysfs_file, ibv_get_sysfs_path). siwrun may put a tree of
//! its own in the place of /sys, and says so by SIW_SYSFS.

use crate::abi::ibv_device;
use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

fn root() -> &'static CString {
    static ROOT: OnceLock<CString> = OnceLock::new();
    ROOT.get_or_init(|| {
        let path = std::env::var_os("SIW_SYSFS").unwrap_or_else(|| "/sys".into());
        CString::new(path.as_bytes()).unwrap_or_else(|_| c"/sys".into())
    })
}

/// Where the tree is.
pub fn root_text() -> String {
    root().to_string_lossy().into_owned()
}

/// ibv_get_sysfs_path
pub unsafe fn get_sysfs_path() -> *const c_char {
    root().as_ptr()
}

/// Reads the beginning of a file; the number of bytes, without a newline at the end.
///
/// # Safety
/// `buffer` is writable for `size` bytes.
unsafe fn read_beginning(path: &Path, buffer: *mut c_char, size: usize) -> c_int {
    let mut text = Vec::new();
    let read =
        std::fs::File::open(path).and_then(|file| file.take(size as u64).read_to_end(&mut text));
    if let Err(error) = read {
        crate::status::set_errno(error.raw_os_error().unwrap_or(libc::EIO));
        return -1;
    }
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    // SAFETY: at most `size` bytes were read; the end is marked where there is room.
    unsafe {
        buffer.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        if text.len() < size {
            buffer.add(text.len()).write(0);
        }
    }
    text.len() as c_int
}

/// ibv_read_sysfs_file
pub unsafe fn read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: C strings.
    let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
    let path =
        Path::new(OsStr::from_bytes(dir.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
    // SAFETY: by the caller's contract.
    unsafe { read_beginning(&path, buffer, size) }
}

/// ibv_read_ibdev_sysfs_file, whose format of the name is not used by any program: fails.
pub unsafe fn read_ibdev_sysfs_file(
    _buffer: *mut c_char,
    _size: usize,
    _device: *mut ibv_device,
    _format: *const c_char,
) -> c_int {
    crate::status::set_errno(libc::ENOENT);
    -1
}
