//! Starts another program in a copy of this process that keeps chosen mappings and descriptors.
//!
//! execve(2) drops every mapping, and files that clients share with siwd are sealed against further
//! writable ones (F_SEAL_FUTURE_WRITE, memfd_create(2)), so a program that is started in the usual way
//! can never write to them. A child by fork(2) has the mappings. Here such a child loads a program in
//! place of the one that it has, as the kernel does in execve(2):
//!
//! ```text
//! parent  reads the ELF headers (image.rs), reserves addresses, maps the program there, writes the
//!         first stack frame (stack.rs), and lists the system calls for the child (steps.rs)
//! child   makes these calls: default signal handlers, no rseq(2), unmaps and closes all but what is
//!         kept; then jumps to the program, or to its dynamic linker
//! ```
//! The calls are made by a loop in machine code that needs neither stack nor memory of the old program
//! (`enter.rs`). No page is ever writable and executable.
//!
//! x86-64 Linux with glibc, 5.9 or newer for close_range(2).

mod enter;
mod image;
mod maps;
mod stack;
mod steps;

pub use image::ProgramError;

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use image::Image;
use maps::Reserved;
use steps::Steps;

/// Size of a page.
const PAGE: usize = 4096;

/// A program to start.
#[derive(Debug)]
pub struct Program<'a> {
    /// Its file, open for reading.
    pub file: &'a File,
    /// Its path, for AT_EXECFN (getauxval(3)).
    pub path: &'a CStr,
    /// Its arguments, with its name as the first.
    pub arguments: &'a [CString],
    /// Its environment, as `NAME=VALUE`.
    pub environment: &'a [CString],
}

/// Failures of a start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It cannot be loaded.
    #[error("cannot load the program: {0}")]
    Program(#[from] ProgramError),
    /// A system call failed.
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
}

/// Starts a program in a copy of this process. Returns the id of the process, a child that ends with
/// status 125 if it cannot be made the program.
///
/// `mappings`: ranges of whole pages that it has at the same addresses, with the same content; those that are
/// private are copies. Standard input, output and error and the `descriptors` keep their numbers, whether or
/// not they are marked close-on-exec; all others are closed.
///
/// # Errors
/// The program is no ELF file for this machine, or its dynamic linker is missing; no memory, or no process is left.
pub fn start(
    program: &Program<'_>,
    mappings: &[Range<usize>],
    descriptors: &[BorrowedFd<'_>],
) -> Result<libc::pid_t, StartError> {
    let image = Image::read(program.file)?;
    let linker = image.linker.as_ref();
    let linker_image = match linker {
        Some(path) => {
            let file = File::open(path).map_err(|error| ProgramError::Linker {
                path: path.to_string_lossy().into_owned(),
                error,
            })?;
            Some((Image::read(&file)?, file))
        }
        None => None,
    };
    let failed = |what| move |error| StartError::System(what, error);
    let linker_len = linker_image.as_ref().map_or(0, |(image, _)| image.len());
    let reserved = Reserved::new(image.len() + linker_len + stack::LEN)
        .map_err(failed("reserve addresses"))?;
    let base = image.place(reserved.range().start);
    image
        .map(program.file.as_fd(), base)
        .map_err(failed("map the program"))?;
    let mut entry = image.entry_at(base);
    let mut linker_base = 0;
    if let Some((linker, file)) = &linker_image {
        linker_base = linker.place(reserved.range().start + image.len());
        linker
            .map(file.as_fd(), linker_base)
            .map_err(failed("map the dynamic linker"))?;
        entry = linker.entry_at(linker_base);
    }
    let stack_range = reserved.range().end - stack::LEN..reserved.range().end;
    maps::make_writable(&stack_range).map_err(failed("map a stack"))?;
    let frame = stack::write_frame(&stack_range, program, &image, base, linker_base)
        .map_err(failed("write the arguments"))?;

    let mut kept: Vec<Range<usize>> = mappings.to_vec();
    kept.push(reserved.range());
    kept.push(enter::code_pages());
    let numbers: Vec<i32> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
    // After all memory was mapped: what others map from here on stays mapped in the child, where it is of
    // no use and in no one's way.
    let mut steps = Steps::default();
    steps.reset_signals();
    steps.leave_rseq();
    steps.describe_process(&frame, &image, base);
    for range in maps::list_others(&kept).map_err(failed("read /proc/self/maps"))? {
        steps.unmap(&range);
    }
    steps.close_all_but(&numbers);
    enter::start_child(&steps, frame.stack_pointer, entry).map_err(failed("start a process"))
}
