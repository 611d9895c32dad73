//! Starts programs in copies of this process. This test program is its own successor, too.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use siw_successor::{Program, start};

const LEN: usize = 1 << 20;

/// A sealed file in memory, mapped for writing.
struct Sealed {
    file: File,
    start: usize,
}

impl Sealed {
    fn new() -> Sealed {
        // SAFETY: system calls with arguments that live long enough; the mapping is a new one.
        unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
            let file = libc::memfd_create(c"sealed".as_ptr(), flags);
            assert!(file >= 0);
            let file = File::from_raw_fd(file);
            file.set_len(LEN as u64).unwrap();
            let start = map(&file, LEN).unwrap();
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE;
            assert_eq!(libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals), 0);
            Sealed { file, start }
        }
    }

    fn range(&self) -> Range<usize> {
        self.start..self.start + LEN
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        word_at(self.start, index)
    }
}

fn word_at(start: usize, index: usize) -> &'static AtomicU64 {
    // SAFETY: the mappings of this program stay, and hold only such words.
    unsafe { &*((start as *const AtomicU64).add(index)) }
}

fn map(file: &File, len: usize) -> Option<usize> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping.
    let start = unsafe {
        let at = std::ptr::null_mut();
        libc::mmap(at, len, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    (start != libc::MAP_FAILED).then_some(start as usize)
}

fn pipe() -> (File, File) {
    let mut ends = [0; 2];
    // SAFETY: the array has room for both; they are new descriptors.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    }
}

/// Waits for the child; returns its exit status, or the number of the signal that ended it, negated.
fn wait(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    match libc::WIFEXITED(status) {
        true => libc::WEXITSTATUS(status),
        false => -libc::WTERMSIG(status),
    }
}

fn texts(list: &[&str]) -> Vec<CString> {
    list.iter()
        .map(|text| CString::new(*text).unwrap())
        .collect()
}

fn run(
    path: &str,
    arguments: &[&str],
    environment: &[&str],
    mappings: &[Range<usize>],
    descriptors: &[BorrowedFd<'_>],
) -> Result<i32, siw_successor::StartError> {
    let file = File::open(path).unwrap();
    let program = Program {
        file: &file,
        path: &CString::new(path).unwrap(),
        arguments: &texts(arguments),
        environment: &texts(environment),
    };
    start(&program, mappings, descriptors)
}

/// The role of a successor: checks what it has, changes the shared memory and answers.
fn succeed(arguments: &[String]) {
    let number = |index: usize| -> usize { arguments[index].parse().unwrap() };
    let (start, memory, answers) = (number(2), number(3) as i32, number(4) as i32);
    // SAFETY: the descriptors were kept for this process.
    let (memory, mut answers) = unsafe { (File::from_raw_fd(memory), File::from_raw_fd(answers)) };
    assert_eq!(word_at(start, 0).load(Ordering::Acquire), 0x5157);
    assert!(map(&memory, LEN).is_none(), "the file is sealed");
    // Threads and the heap are those of a fresh program.
    let workers: Vec<_> = (1..=4)
        .map(|index| {
            std::thread::spawn(move || {
                let text = vec![index as u64; 1 << 16];
                word_at(start, index).store(text.iter().sum(), Ordering::Release);
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
    let command = std::fs::read("/proc/self/cmdline").unwrap();
    let open: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let expected = [0, 1, 2, memory.as_raw_fd(), answers.as_raw_fd()];
    let more: Vec<_> = open
        .iter()
        .filter(|open| !expected.contains(open))
        .collect();
    // The listing itself has one open.
    assert!(more.len() <= 1, "{more:?}");
    let variable = std::env::var("SUCCESSOR").unwrap();
    assert!(
        std::env::var("HOME").is_err(),
        "the environment is the given one"
    );
    write!(
        answers,
        "{variable} {}",
        String::from_utf8_lossy(&command).replace('\0', "|")
    )
    .unwrap();
}

fn a_successor_writes_to_sealed_memory() {
    let memory = Sealed::new();
    memory.word(0).store(0x5157, Ordering::Release);
    let own = std::env::current_exe().unwrap();
    let own = own.to_str().unwrap();
    // Threads that use memory and locks of every kind while the copy is made.
    let stop = Arc::new(AtomicBool::new(false));
    let busy: Vec<_> = (0..3)
        .map(|_| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    let text = vec![format!("{:?}", std::thread::current().id()); 100];
                    assert_eq!(text.len(), 100);
                }
            })
        })
        .collect();
    for round in 0..20 {
        for index in 1..=4 {
            memory.word(index).store(0, Ordering::Release);
        }
        let (mut answers, answering) = pipe();
        let arguments = [
            own,
            "succeed",
            &memory.start.to_string(),
            &memory.file.as_raw_fd().to_string(),
            &answering.as_raw_fd().to_string(),
        ];
        let kept = [memory.file.as_fd(), answering.as_fd()];
        let child = run(
            own,
            &arguments,
            &["SUCCESSOR=yes"],
            &[memory.range()],
            &kept,
        )
        .unwrap();
        drop(answering);
        let mut said = String::new();
        answers.read_to_string(&mut said).unwrap();
        assert_eq!(wait(child), 0, "round {round}: {said}");
        assert!(said.starts_with("yes "), "{said}");
        for index in 1..=4 {
            let sum = memory.word(index).load(Ordering::Acquire);
            assert_eq!(sum, (index as u64) << 16, "round {round}");
        }
    }
    stop.store(true, Ordering::Release);
    for thread in busy {
        thread.join().unwrap();
    }
}

fn programs_of_the_system_run() {
    for (arguments, status) in [(["true"].as_slice(), 0), (&["sh", "-c", "exit 7"], 7)] {
        let path = format!("/bin/{}", arguments[0]);
        assert_eq!(wait(run(&path, arguments, &[], &[], &[]).unwrap()), status);
    }
}

fn files_that_are_no_programs_are_refused() {
    let refusal = |path: &str| match run(path, &["x"], &[], &[], &[]) {
        Ok(child) => panic!("{path} has started as {child}"),
        Err(error) => error.to_string(),
    };
    let text = refusal("/proc/self/maps");
    assert!(text.contains("no program for 64-bit x86"), "{text}");
    let text = refusal("/dev/null");
    assert!(text.contains("no program for 64-bit x86"), "{text}");
}

fn descriptors_and_mappings_of_this_process_stay() {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let lines = || {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .lines()
            .count()
    };
    assert_eq!(wait(run("/bin/true", &["true"], &[], &[], &[]).unwrap()), 0);
    let before = (count("/proc/self/fd"), lines());
    for _ in 0..10 {
        assert_eq!(wait(run("/bin/true", &["true"], &[], &[], &[]).unwrap()), 0);
    }
    assert_eq!((count("/proc/self/fd"), lines()), before);
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|role| role == "succeed") {
        return succeed(&arguments);
    }
    let tests: [(&str, fn()); 4] = [
        (
            "a_successor_writes_to_sealed_memory",
            a_successor_writes_to_sealed_memory,
        ),
        ("programs_of_the_system_run", programs_of_the_system_run),
        (
            "files_that_are_no_programs_are_refused",
            files_that_are_no_programs_are_refused,
        ),
        (
            "descriptors_and_mappings_of_this_process_stay",
            descriptors_and_mappings_of_this_process_stay,
        ),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    println!(
        "test result: ok. {} passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        tests.len()
    );
}
