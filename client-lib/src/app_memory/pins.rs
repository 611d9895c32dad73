//! Whether pages of this process may be pinned: written by the kernel or a device at their old place
//! after their mapping has changed. No system call tells this of pages of files, nor of any pages
//! before Linux 6.8, so this looks for the means to pin pages: contexts of io_submit(2), io_uring,
//! device files, AF_XDP, and descriptors with O_DIRECT, which other threads may be reading.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;

/// `AF_XDP` of linux/socket.h.
const AF_XDP: u16 = 44;
/// Start of the name of an io_uring in /proc/self/fd.
const IO_URING: [u8; 20] = *b"anon_inode:[io_uring";
/// Major number of /dev/null, /dev/zero and the like, none of which pins memory.
const MEMORY_DEVICES: u32 = 1;
/// Major numbers of terminals.
const TERMINALS: [u32; 3] = [4, 5, 136];

/// Checks whether this process has means to pin pages. Any doubt is a yes. Allocates no memory and
/// uses none but the stack: it is also called while pages are frozen, after which none can be newly
/// pinned.
pub(super) fn may_exist() -> bool {
    let is_clear =
        has_no_long_term_pins() && has_no_aio_context() && all_descriptors_are_harmless();
    !is_clear
}

/// Checks each part of a file of /proc, of `buffer.len()` bytes that overlap by `overlap`.
fn all_parts(
    path: &CStr,
    buffer: &mut [u8],
    overlap: usize,
    mut is_clear: impl FnMut(&[u8]) -> bool,
) -> bool {
    let Ok(file) = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return false;
    };
    let mut kept = 0;
    loop {
        match rustix::io::read(&file, &mut buffer[kept..]) {
            Ok(0) => return true,
            Ok(count) => {
                let filled = kept + count;
                if !is_clear(&buffer[..filled]) {
                    return false;
                }
                kept = overlap.min(filled);
                buffer.copy_within(filled - kept..filled, 0);
            }
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Long-term pins are counted: io_uring, AF_XDP, RDMA, vhost.
fn has_no_long_term_pins() -> bool {
    const FIELD: &[u8] = b"\nVmPin:";
    let mut found = false;
    let is_read = all_parts(c"/proc/self/status", &mut [0; 8192], 64, |text| {
        let field = text
            .windows(FIELD.len())
            .position(|bytes| bytes == FIELD)
            .map(|at| text[at + FIELD.len()..].trim_ascii_start());
        found |= field.is_some_and(|count| count.starts_with(b"0 "));
        true
    });
    is_read && found
}

/// A context of io_submit(2) maps its ring.
fn has_no_aio_context() -> bool {
    const NAME: &[u8] = b"/[aio]";
    let overlap = NAME.len() - 1;
    all_parts(c"/proc/self/maps", &mut [0; 8192], overlap, |text| {
        !text.windows(NAME.len()).any(|bytes| bytes == NAME)
    })
}

fn all_descriptors_are_harmless() -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty()) else {
        return false;
    };
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(&folder, &mut buffer);
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else {
            return false;
        };
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let number = name.to_str().ok().and_then(|name| name.parse().ok());
        if !number.is_some_and(|number| is_harmless(&folder, name, number)) {
            return false;
        }
    }
    true
}

/// Checks that a descriptor cannot be used to pin pages; one that was closed meanwhile cannot.
/// `folder` is /proc/self/fd.
fn is_harmless(folder: &OwnedFd, name: &CStr, number: RawFd) -> bool {
    // SAFETY: the number is only handed to system calls; if another thread closes it or uses it
    // anew, they fail or describe that file.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let (Ok(flags), Ok(status)) = (rustix::fs::fcntl_getfl(fd), rustix::fs::fstat(fd)) else {
        return true;
    };
    // Pipes have another meaning of the flag.
    let kind = FileType::from_raw_mode(status.st_mode);
    if flags.contains(OFlags::DIRECT) && kind != FileType::Fifo {
        return false;
    }
    match kind {
        FileType::Fifo | FileType::Directory => true,
        FileType::Socket => {
            let domain = rustix::net::sockopt::socket_domain(fd);
            domain.is_ok_and(|domain| domain.as_raw() != AF_XDP)
        }
        FileType::CharacterDevice => {
            let major = rustix::fs::major(status.st_rdev);
            major == MEMORY_DEVICES || TERMINALS.contains(&major)
        }
        // io_uring is one of the files without a type, and shows by its name.
        FileType::Unknown => {
            let mut target = [0; IO_URING.len()];
            let read = rustix::fs::readlinkat_raw(folder, name, &mut target[..]);
            read.is_ok_and(|_| target != IO_URING)
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;

    fn is_harmless(fd: &impl AsRawFd) -> bool {
        let number = fd.as_raw_fd();
        let name = std::ffi::CString::new(number.to_string()).expect("digits");
        let folder = std::fs::File::open("/proc/self/fd").expect("/proc");
        super::is_harmless(&folder.into(), &name, number)
    }

    #[test]
    fn descriptors_that_can_pin_pages_are_found() {
        let plain = std::fs::File::open("/dev/zero").expect("/dev/zero");
        let (read, _write) = rustix::pipe::pipe().expect("a pipe");
        assert!(is_harmless(&plain) && is_harmless(&read));
        let mut options = std::fs::File::options();
        options.read(true).custom_flags(libc::O_DIRECT);
        let path = std::env::current_exe().expect("a path");
        match options.open(path) {
            Ok(direct) => assert!(!is_harmless(&direct)),
            Err(error) => println!("skipped: O_DIRECT: {error}"),
        }
        if let Ok(device) = std::fs::File::open("/dev/net/tun") {
            assert!(!is_harmless(&device), "an unknown device");
        }
    }
}
