//! A file on a FUSE file system that answers only its own process: a call of any other process that
//! asks the file system, such as the close of a descriptor, lasts as long as this process lives.

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use rustix::fd::AsRawFd;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

/// Operations of `linux/fuse.h`.
mod operation {
    pub const LOOKUP: u32 = 1;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const RELEASE: u32 = 18;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
}

/// Sizes of `struct fuse_in_header` and of the buffer for a request.
const HEADER: usize = 40;
const REQUEST: usize = (1 << 17) + 4096;
/// The file's node; the root of the file system is node 1.
const FILE_NODE: u64 = 2;
const NAME: &str = "slow";

/// Opens such a file, in a mount namespace of this process that nobody sees. An ordinary user also needs
/// a user namespace.
///
/// # Errors
/// The kernel has no FUSE, or does not let the user mount one.
pub fn open() -> io::Result<File> {
    unshare(CloneFlags::CLONE_NEWNS).or_else(|_| own_user_namespace())?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
    let folder = std::env::temp_dir().join(format!("siw-slow-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let opened = mount_at(&folder).and_then(|()| {
        let path: PathBuf = folder.join(NAME);
        let opened = File::options().read(true).write(true).open(path);
        umount2(&folder, MntFlags::MNT_DETACH)?;
        opened
    });
    std::fs::remove_dir(&folder)?;
    opened
}

/// Moves this process, which has no other thread yet, to a user namespace in which it may mount.
fn own_user_namespace() -> io::Result<()> {
    let (uid, gid) = (nix::unistd::getuid(), nix::unistd::getgid());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
}

fn mount_at(folder: &Path) -> io::Result<()> {
    let device = Arc::new(File::options().read(true).write(true).open("/dev/fuse")?);
    let (uid, gid) = (nix::unistd::getuid(), nix::unistd::getgid());
    let options = format!(
        "fd={},rootmode=40000,user_id={uid},group_id={gid},allow_other",
        device.as_raw_fd()
    );
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(
        Some("slow"),
        folder,
        Some("fuse"),
        flags,
        Some(options.as_str()),
    )?;
    start_answering(device)
}

/// Starts the thread that answers. It alone has the device, in a table of descriptors of its own: a process
/// that is killed while one table has the device and the file would wait for its own answer for ever.
fn start_answering(device: Arc<File>) -> io::Result<()> {
    let (report, started) = mpsc::channel();
    let copied = device.clone();
    std::thread::spawn(move || {
        let own = unshare(CloneFlags::CLONE_FILES)
            .map_err(io::Error::from)
            .and_then(|()| copied.try_clone());
        // The other thread drops the last one, which closes its number in the first table.
        drop(copied);
        match own {
            Ok(own) => {
                let _ = report.send(Ok(()));
                answer(own)
            }
            Err(error) => {
                let _ = report.send(Err(error));
                Ok(())
            }
        }
    });
    let ended = || io::Error::other("the thread has ended");
    started.recv().map_err(|_| ended())?
}

/// Answers requests of the kernel and of this process, and no other ones.
fn answer(mut device: File) -> io::Result<()> {
    let mut request = vec![0; REQUEST];
    loop {
        let len = device.read(&mut request)?;
        let word =
            |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap_or_default());
        if len < HEADER {
            continue;
        }
        // struct fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid.
        let (opcode, process) = (word(4), word(32));
        let is_root = word(16) == 1;
        if process != 0 && process != std::process::id() {
            continue;
        }
        let body = match opcode {
            operation::INIT => Ok(init_reply()),
            operation::LOOKUP => Ok(entry_reply()),
            operation::GETATTR => Ok(attributes_reply(is_root)),
            operation::OPEN => Ok(words(&[1], &[0, 0])),
            operation::FLUSH | operation::RELEASE => Ok(Vec::new()),
            _ => Err(nix::errno::Errno::ENOSYS as i32),
        };
        let (error, body) = match body {
            Ok(body) => (0, body),
            Err(error) => (-error, Vec::new()),
        };
        let mut reply = Vec::with_capacity(16 + body.len());
        reply.extend((16 + body.len() as u32).to_ne_bytes());
        reply.extend(error.to_ne_bytes());
        reply.extend(&request[8..16]);
        reply.extend(body);
        // A request without reply (FORGET) is one that the kernel refuses.
        let _ = device.write(&reply);
    }
}

fn words(long: &[u64], short: &[u32]) -> Vec<u8> {
    let long = long.iter().flat_map(|word| word.to_ne_bytes());
    let short = short.iter().flat_map(|word| word.to_ne_bytes());
    long.chain(short).collect()
}

/// `struct fuse_init_out` of protocol 7.31, without optional features.
fn init_reply() -> Vec<u8> {
    let mut reply = words(&[], &[7, 31, 0, 0, 9 << 16 | 12, 65_536, 1]);
    reply.resize(64, 0);
    reply
}

/// `struct fuse_attr`. The kernel keeps no attributes: it asks for them each time.
fn attributes(is_root: bool) -> Vec<u8> {
    let (node, mode) = if is_root {
        (1, 0o40755)
    } else {
        (FILE_NODE, 0o100_666)
    };
    let (size, blocks, links, block) = (4096, 8, 1, 4096);
    let long = [node, size, blocks, 0, 0, 0];
    // Times are 0; then mode, links, owner, device, block size.
    words(&long, &[0, 0, 0, mode, links, 0, 0, 0, block, 0])
}

/// `struct fuse_entry_out`.
fn entry_reply() -> Vec<u8> {
    let mut reply = words(&[FILE_NODE, 0, 0, 0], &[0, 0]);
    reply.extend(attributes(false));
    reply
}

/// `struct fuse_attr_out`.
fn attributes_reply(is_root: bool) -> Vec<u8> {
    let mut reply = words(&[0], &[0, 0]);
    reply.extend(attributes(is_root));
    reply
}
