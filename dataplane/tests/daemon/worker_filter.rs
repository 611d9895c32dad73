//! Restrictions of worker threads: each is tried, and the threads of a running siwd have them.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::unistd::{Pid, Uid};

use crate::common::*;

/// Threads of a process by name.
fn threads(process: u32) -> Vec<(String, String)> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks
        .map(|task| {
            let folder = task.unwrap().path();
            let name = fs::read_to_string(folder.join("comm")).unwrap();
            let status = fs::read_to_string(folder.join("status")).unwrap();
            (name.trim().to_owned(), status)
        })
        .collect()
}

fn is_confined(status: &str) -> bool {
    status.contains("Seccomp:\t2") && status.contains("NoNewPrivs:\t1")
}

#[test]
fn workers_are_confined_unless_the_configuration_says_otherwise() {
    let daemon = Daemon::loopback();
    let workers = |daemon: &Daemon| -> Vec<String> {
        let all = threads(daemon.child.id());
        let workers = all
            .into_iter()
            .filter(|(name, _)| name.starts_with("siwd-worker-"));
        workers.map(|(_, status)| status).collect()
    };
    let confined = workers(&daemon);
    assert!(!confined.is_empty());
    assert!(
        confined.iter().all(|status| is_confined(status)),
        "{confined:?}"
    );
    // The other threads open files and make threads.
    let others = threads(daemon.child.id());
    assert!(others.iter().any(|(_, status)| !is_confined(status)));

    let open = Daemon::start(
        &LOOPBACK.replace("[workers]", "[workers]\nconfine = false"),
        &[],
    );
    assert!(workers(&open).iter().all(|status| !is_confined(status)));
}

/// Runs `attempt` in a thread that is confined like a worker.
fn confined<T: Send + 'static>(attempt: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = thread::spawn(|| {
        siwd::worker_filter::confine_thread().unwrap();
        attempt()
    });
    thread.join().unwrap()
}

#[test]
fn files_and_programs_are_out_of_reach() {
    let denied = |result: std::io::Result<()>| result.unwrap_err().kind();
    let opened = confined(|| fs::File::open("/etc/passwd").map(drop));
    assert_eq!(denied(opened), ErrorKind::PermissionDenied);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "kept").unwrap();
    let (to_write, to_remove, to_rename) = (path.clone(), path.clone(), path.clone());
    let written = confined(move || fs::write(to_write, "lost"));
    assert_eq!(denied(written), ErrorKind::PermissionDenied);
    let removed = confined(move || fs::remove_file(to_remove));
    assert_eq!(denied(removed), ErrorKind::PermissionDenied);
    let renamed = confined(move || fs::rename(&to_rename, to_rename.with_extension("new")));
    assert_eq!(denied(renamed), ErrorKind::PermissionDenied);
    assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
    let started = confined(|| Command::new("/bin/true").status().map(drop));
    assert_eq!(denied(started), ErrorKind::PermissionDenied);
    let thread = confined(|| thread::Builder::new().spawn(|| ()).map(drop));
    assert_eq!(denied(thread), ErrorKind::PermissionDenied);
}

#[test]
fn sockets_processes_and_privileges_are_out_of_reach() {
    let refused = Err(Errno::EPERM);
    for family in [
        AddressFamily::Inet,
        AddressFamily::Unix,
        AddressFamily::Netlink,
    ] {
        let made =
            confined(move || socket(family, SockType::Datagram, SockFlag::empty(), None).map(drop));
        assert_eq!(made, refused, "{family:?}");
    }
    // The signal 0 tests whether a process may be signalled, which this one may.
    assert_eq!(kill(Pid::this(), None), Ok(()));
    assert_eq!(confined(|| kill(Pid::this(), None)), refused);
    assert_eq!(confined(|| kill(Pid::parent(), Signal::SIGCONT)), refused);
    assert_eq!(confined(nix::sys::ptrace::traceme), refused);
    assert_eq!(confined(|| nix::unistd::setuid(Uid::current())), refused);
    assert_eq!(confined(|| unshare(CloneFlags::CLONE_FILES)), refused);
    assert_eq!(confined(|| unshare(CloneFlags::CLONE_NEWUSER)), refused);
    let made = confined(|| nix::unistd::dup(std::io::stdin()).map(drop));
    assert_eq!(made, refused);
}

#[test]
fn no_memory_becomes_executable() {
    let map = |protection: i32| {
        // SAFETY: a new mapping, which nothing uses.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                protection,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        Ok(mapped as usize)
    };
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    let protect = move |protection: i32| {
        let page = map(writable).unwrap();
        // SAFETY: the mapping of this function.
        let result = unsafe { libc::mprotect(page as *mut libc::c_void, 4096, protection) };
        Errno::result(result).map(drop)
    };
    let executable = writable | libc::PROT_EXEC;
    assert!(map(executable).is_ok(), "this process may");
    assert_eq!(confined(move || map(executable)), Err(Errno::EPERM));
    assert_eq!(confined(move || protect(executable)), Err(Errno::EPERM));
    assert!(confined(move || map(writable)).is_ok());
    assert_eq!(confined(move || protect(libc::PROT_READ)), Ok(()));
}

#[test]
fn open_descriptors_and_time_work() {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    let copied = confined(move || {
        nix::unistd::write(&writer, b"x").unwrap();
        thread::sleep(std::time::Duration::from_micros(1));
        let mut byte = [0];
        let read = nix::unistd::read(&reader, &mut byte);
        assert!(reader.as_raw_fd() >= 0);
        read.map(|_| byte[0])
    });
    assert_eq!(copied, Ok(b'x'));
}
