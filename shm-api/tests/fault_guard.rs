//! Memory whose pages are freed under its mapping: the guard survives the fault and records it, and
//! only for guarded memory.

use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use siw_shm::saved::{Restoring, Saving};
use siw_shm::{SharedMemory, fault_guard};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

const LEN: usize = 16_384;

/// A mapping whose file can be truncated, and the file.
fn mapping() -> (SharedMemory, OwnedFd) {
    let file = rustix::fs::memfd_create("cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, LEN as u64).unwrap();
    let memory = SharedMemory::map_fd(file.try_clone().unwrap(), LEN).unwrap();
    (memory, file)
}

fn cut(file: &OwnedFd) {
    rustix::fs::ftruncate(file.as_fd(), 0).unwrap();
}

fn event_descriptor() -> OwnedFd {
    use rustix::event::{EventfdFlags, eventfd};
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// The only test that installs the guard, since a process has only one.
#[test]
fn a_fault_on_guarded_memory_is_noted_and_survived() {
    let wake = event_descriptor();
    fault_guard::install(wake.try_clone().unwrap()).unwrap();
    assert!(fault_guard::install(event_descriptor()).is_err());
    let neighbours: Vec<_> = (1..=3)
        .map(|owner| {
            let (memory, file) = mapping();
            (memory.guard_for(owner).unwrap(), file)
        })
        .collect();
    for (memory, _) in &neighbours {
        memory.write(5000, b"kept").unwrap();
    }
    assert!(fault_guard::take_faulty_owners().is_empty());
    cut(&neighbours[1].1);
    let mut bytes = [1; 4];
    neighbours[1].0.read(5000, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4]);
    let mut value = [0; 8];
    assert_eq!(rustix::io::read(&wake, &mut value), Ok(8));
    assert_eq!(fault_guard::take_faulty_owners(), [2]);
    // The mapping still works, now with private memory: every word of it, without another fault.
    for offset in (0..LEN).step_by(8) {
        neighbours[1].0.write(offset, &[7; 8]).unwrap();
    }
    assert!(fault_guard::take_faulty_owners().is_empty());
    assert!(rustix::io::read(&wake, &mut value).is_err(), "no fault");
    for (memory, _) in [&neighbours[0], &neighbours[2]] {
        memory.read(5000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"kept");
    }
    // Writes fault like reads, and several threads may fault at once.
    cut(&neighbours[0].1);
    cut(&neighbours[2].1);
    std::thread::scope(|scope| {
        for part in 0..4 {
            for which in [0, 2] {
                let memory = &neighbours[which].0;
                scope.spawn(move || memory.write(part * 4096, &[9; 64]).unwrap());
            }
        }
    });
    assert_eq!(fault_guard::take_faulty_owners(), [1, 3]);
    // Entries of the table are reused: far more mappings than it has room for, one after another.
    drop(neighbours);
    let (memory, file) = mapping();
    let memory = memory.guard_for(4).unwrap();
    cut(&file);
    memory.write(0, &[1]).unwrap();
    assert_eq!(fault_guard::take_faulty_owners(), [4]);
}

/// In a process of its own, since a descriptor's number must stay free for a moment.
#[test]
fn memory_that_a_successor_adopts_is_guarded_for_the_same_owner() {
    assert!(run_helper("helper_that_adopts_guarded_memory").success());
}

#[test]
#[ignore = "the process of the test above"]
fn helper_that_adopts_guarded_memory() {
    fault_guard::install(event_descriptor()).unwrap();
    let (memory, file) = mapping();
    let memory = memory.guard_for(5).unwrap();
    let (address, number) = (memory.start_address(), memory.memfd().unwrap().as_raw_fd());
    let mut saving = Saving::default();
    let state = saving
        .run(|| postcard::to_stdvec(&Adopted { memory }))
        .unwrap();
    // Its entry, its mapping and its descriptor are gone. The latter two are there again, as in a successor.
    let flags = MapFlags::SHARED | MapFlags::FIXED_NOREPLACE;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let start = address as *mut core::ffi::c_void;
    // SAFETY: nothing else is mapped there.
    let mapped = unsafe { rustix::mm::mmap(start, LEN, access, flags, &file, 0) };
    assert_eq!(mapped, Ok(start));
    // SAFETY: the number of a closed descriptor.
    let mut copy = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::dup2(&file, &mut copy).unwrap();
    std::mem::forget(copy);
    // SAFETY: the mapping and the descriptor have no owner.
    let mut restoring = unsafe { Restoring::adopt(&saving.into_kept()) }.unwrap();
    let Adopted { memory } = restoring.run(|| postcard::from_bytes(&state)).unwrap();
    memory.write(5000, b"there").unwrap();
    assert!(fault_guard::take_faulty_owners().is_empty());
    cut(&file);
    memory.write(5000, b"again").unwrap();
    assert_eq!(fault_guard::take_faulty_owners(), [5]);
}

#[derive(Serialize, Deserialize)]
struct Adopted {
    #[serde(with = "siw_shm::saved")]
    memory: SharedMemory,
}

fn run_helper(name: &str) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap()
}

#[test]
fn a_fault_elsewhere_ends_the_process() {
    let status = run_helper("helper_that_faults_without_a_guard");
    assert_eq!(status.signal(), Some(7), "SIGBUS: {status}");
}

#[test]
#[ignore = "the process of the test above"]
fn helper_that_faults_without_a_guard() {
    fault_guard::install(event_descriptor()).unwrap();
    let (guarded, _file) = mapping();
    let _guarded = guarded.guard_for(1).unwrap();
    let (memory, file) = mapping();
    cut(&file);
    memory.write(0, &[1]).unwrap();
}
