//! Whether pages of this process may be pinned: written by the kernel or a device at their old place
//! after their mapping has changed. No system call tells this of pages of files, nor of any pages
//! before Linux 6.8, so this looks for the means to pin pages: contexts of io_submit(2), io_uring,
//! device files, AF_XDP, and descriptors with O_DIRECT, which other threads may be reading.

use std::os::fd::{BorrowedFd, RawFd};

use rustix::fs::{FileType, OFlags};

/// `AF_XDP` of linux/socket.h.
const AF_XDP: u16 = 44;
/// Start of the name of an io_uring in /proc/self/fd.
const IO_URING: &[u8] = b"anon_inode:[io_uring";
/// Major number of /dev/null, /dev/zero and the like, none of which pins memory.
const MEMORY_DEVICES: u32 = 1;
/// Major numbers of terminals.
const TERMINALS: [u32; 3] = [4, 5, 136];

/// Checks whether this process has means to pin pages. Any doubt is a yes.
pub(super) fn may_exist() -> bool {
    let is_clear =
        has_no_long_term_pins() && has_no_aio_context() && all_descriptors_are_harmless();
    !is_clear
}

/// Long-term pins are counted: io_uring, AF_XDP, RDMA, vhost.
fn has_no_long_term_pins() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        let field = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
        field.is_some_and(|count| count.trim().starts_with("0 "))
    })
}

/// A context of io_submit(2) maps its ring.
fn has_no_aio_context() -> bool {
    std::fs::read("/proc/self/maps")
        .is_ok_and(|maps| !maps.windows(6).any(|bytes| bytes == b"/[aio]"))
}

fn all_descriptors_are_harmless() -> bool {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return false;
    };
    for entry in entries {
        let name = entry.map(|entry| entry.file_name());
        let number = name.ok().and_then(|name| name.to_str()?.parse().ok());
        if !number.is_some_and(is_harmless) {
            return false;
        }
    }
    true
}

/// Checks that a descriptor cannot be used to pin pages; one that was closed meanwhile cannot.
fn is_harmless(number: RawFd) -> bool {
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
            let name = std::fs::read_link(format!("/proc/self/fd/{number}"));
            name.is_ok_and(|name| !name.as_os_str().as_encoded_bytes().starts_with(IO_URING))
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn descriptors_that_can_pin_pages_are_found() {
        let plain = std::fs::File::open("/dev/zero").expect("/dev/zero");
        let (read, _write) = rustix::pipe::pipe().expect("a pipe");
        assert!(is_harmless(plain.as_raw_fd()) && is_harmless(read.as_raw_fd()));
        let mut options = std::fs::File::options();
        options.read(true).custom_flags(libc::O_DIRECT);
        let path = std::env::current_exe().expect("a path");
        match options.open(path) {
            Ok(direct) => assert!(!is_harmless(direct.as_raw_fd())),
            Err(error) => println!("skipped: O_DIRECT: {error}"),
        }
        if let Ok(device) = std::fs::File::open("/dev/net/tun") {
            assert!(!is_harmless(device.as_raw_fd()), "an unknown device");
        }
    }
}
