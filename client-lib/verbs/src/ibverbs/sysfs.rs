//! Files that describe devices (ibv_read_sysfs_file, ibv_get_sysfs_path). siwd writes them to a
//! folder next to its socket. If there is none, the folder is /sys, which does not have siwd's
//! devices. `SIW_SYSFS` selects another folder.

use crate::abi::ibv_device;
use crate::export::export_symbols;
use crate::persona::wanted_persona;
use siw_shm::control::socket_path;
use siw_shm::device_identity::{persona_tree_of, sysfs_tree_of};
use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Once, OnceLock};

/// Finds siwd's tree if it has the same owner as the socket: anyone may create folders in /tmp.
fn find_tree() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("SIW_SYSFS").filter(|name| !name.is_empty()) {
        return Some(named.into());
    }
    let socket = std::path::absolute(socket_path(None).ok()?).ok()?;
    let tree = sysfs_tree_of(&socket);
    let (socket, found) = (
        socket.symlink_metadata().ok()?,
        tree.symlink_metadata().ok()?,
    );
    (found.is_dir() && found.uid() == socket.uid()).then_some(tree)
}

/// The part of the tree for the persona that the program wants. Without one, and with an older daemon, it is
/// the whole tree.
fn tree_of_persona(tree: PathBuf) -> PathBuf {
    let of_persona = wanted_persona().map(|persona| persona_tree_of(&tree, persona));
    of_persona.filter(|part| part.is_dir()).unwrap_or(tree)
}

/// The tree, remembered once found because programs keep its name.
fn known_tree() -> Option<&'static CStr> {
    static FOUND: OnceLock<CString> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Some(found);
    }
    let tree = CString::new(tree_of_persona(find_tree()?).as_os_str().as_bytes()).ok()?;
    Some(FOUND.get_or_init(|| tree))
}

fn root() -> &'static CStr {
    known_tree().unwrap_or(c"/sys")
}

/// Path of the tree.
pub fn root_text() -> String {
    root().to_string_lossy().into_owned()
}

/// ibv_get_sysfs_path
pub unsafe fn get_sysfs_path() -> *const c_char {
    root().as_ptr()
}

/// Path of siwd's tree, for the library by which `siwrun` redirects paths of /sys; NULL if there is
/// none.
pub unsafe fn get_tree() -> *const c_char {
    match known_tree() {
        Some(tree) => tree.as_ptr(),
        None => {
            log_missing_tree();
            std::ptr::null()
        }
    }
}

/// Logs once that a program looks for files of devices in vain.
fn log_missing_tree() {
    static LOGGED: Once = Once::new();
    LOGGED.call_once(|| {
        if let Ok(socket) = socket_path(None) {
            let tree = sysfs_tree_of(&socket);
            let reason = format!(
                "siwd's files are not in {}: mount the folder of the socket into a container, not \
                 the socket alone",
                tree.display()
            );
            crate::status::log_failure("/sys/class/infiniband", &reason);
        }
    });
}

export_symbols! { "SIWD_PRIVATE":
    fn siw_sysfs_tree() -> *const c_char = get_tree;
}

/// Reads the beginning of a file; returns the number of bytes, without a newline at the end.
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
    // SAFETY: at most `size` bytes were read; a terminator is written if there is room.
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

/// ibv_read_ibdev_sysfs_file: always fails; no program uses its format of the name.
pub unsafe fn read_ibdev_sysfs_file(
    _buffer: *mut c_char,
    _size: usize,
    _device: *mut ibv_device,
    _format: *const c_char,
) -> c_int {
    crate::status::set_errno(libc::ENOENT);
    -1
}
