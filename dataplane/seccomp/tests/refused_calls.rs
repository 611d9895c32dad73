//! Restrictions of worker threads: each is tried, and recorded.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::OnceLock;
use std::thread;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::unistd::Pid;
use siw_seccomp::{Confinement, take_refused_calls};

fn wake() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).unwrap()
}

/// Runs `attempt` in a thread that is confined like a worker.
fn confined<T: Send + 'static>(attempt: impl FnOnce() -> T + Send + 'static) -> T {
    static INSTALLED: OnceLock<Confinement> = OnceLock::new();
    let confinement = *INSTALLED.get_or_init(|| Confinement::install(wake().into()).unwrap());
    let thread = thread::spawn(move || {
        confinement.confine_thread().unwrap();
        attempt()
    });
    thread.join().unwrap()
}

/// Runs an ignored test in a process of its own.
fn run_helper(name: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored"])
        .output()
        .unwrap()
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
    // setuid(3) of the C library changes all threads, and ends a process that has only some changed.
    // SAFETY: takes a number.
    let set_user = || Errno::result(unsafe { libc::syscall(libc::SYS_setuid, 0) }).map(drop);
    assert_eq!(confined(set_user), refused);
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
        read.map(|_| byte[0])
    });
    assert_eq!(copied, Ok(b'x'));
}

#[test]
fn each_refused_call_is_recorded_once() {
    let output = run_helper("helper_whose_calls_are_refused");
    assert!(output.status.success(), "{output:?}");
}

#[test]
#[ignore = "the process of the test above, without the refused calls of the others"]
fn helper_whose_calls_are_refused() {
    let event = wake();
    let descriptor = event.as_fd().try_clone_to_owned().unwrap();
    let confinement = Confinement::install(descriptor).unwrap();
    assert!(Confinement::install(wake().into()).is_err(), "twice");
    let refuse = || {
        let attempts = move || {
            confinement.confine_thread().unwrap();
            for _ in 0..3 {
                assert!(fs::File::open("/etc/passwd").is_err());
                assert_eq!(kill(Pid::this(), None), Err(Errno::EPERM));
            }
        };
        thread::spawn(attempts).join().unwrap();
    };
    assert!(take_refused_calls().is_empty());
    assert!(event.read().is_err());
    refuse();
    let names: BTreeSet<String> = take_refused_calls().into_iter().collect();
    assert_eq!(names, ["kill", "openat"].map(String::from).into());
    assert_eq!(event.read(), Ok(2));
    refuse();
    assert!(take_refused_calls().is_empty());
    assert!(event.read().is_err());
}

#[test]
fn a_signal_of_another_process_ends_this_one() {
    let status = run_helper("helper_that_is_signalled").status;
    assert_eq!(status.signal(), Some(Signal::SIGSYS as i32), "{status}");
}

#[test]
#[ignore = "the process of the test above"]
fn helper_that_is_signalled() {
    confined(|| ());
    kill(Pid::this(), Signal::SIGSYS).unwrap();
    loop {
        thread::park();
    }
}
