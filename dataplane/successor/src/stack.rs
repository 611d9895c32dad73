//! The first stack frame of a program: its arguments, its environment and the auxiliary vector
//! (System V ABI for x86-64, section 3.4.1; getauxval(3)).

use std::ffi::CStr;
use std::io;
use std::ops::Range;

use crate::Program;
use crate::image::Image;
use crate::maps;

/// Size of the stack. It does not grow by itself; 8 MiB is the usual limit of one that does.
pub(crate) const LEN: usize = 8 << 20;

/// Pieces of the frame, as the kernel shows them in /proc/PID.
#[derive(Debug)]
pub(crate) struct Frame {
    /// Value of the stack pointer at the first instruction.
    pub stack_pointer: usize,
    pub arguments: Range<usize>,
    pub environment: Range<usize>,
    pub auxiliary: Range<usize>,
}

/// Entries of the auxiliary vector that this process passes on: they describe the machine and the user.
const PASSED_ON: [u64; 14] = [
    libc::AT_SYSINFO_EHDR,
    libc::AT_HWCAP,
    libc::AT_HWCAP2,
    libc::AT_PAGESZ,
    libc::AT_CLKTCK,
    libc::AT_UID,
    libc::AT_EUID,
    libc::AT_GID,
    libc::AT_EGID,
    libc::AT_SECURE,
    libc::AT_MINSIGSTKSZ,
    AT_RSEQ_FEATURE_SIZE,
    AT_RSEQ_ALIGN,
    libc::AT_FLAGS,
];
pub(crate) const AT_RSEQ_FEATURE_SIZE: u64 = 27;
const AT_RSEQ_ALIGN: u64 = 28;

/// Writes upwards into a stack.
struct Writer {
    at: usize,
}

impl Writer {
    fn write_bytes(&mut self, bytes: &[u8]) -> usize {
        let start = self.at;
        maps::write(start, bytes);
        self.at += bytes.len();
        start
    }

    fn write_text(&mut self, text: &CStr) -> usize {
        self.write_bytes(text.to_bytes_with_nul())
    }

    fn write_word(&mut self, word: usize) {
        self.write_bytes(&word.to_ne_bytes());
    }
}

/// Writes the frame to the end of a stack, which is mapped.
///
/// # Errors
/// The arguments do not fit, or no random bytes are to be had.
pub(crate) fn write_frame(
    stack: &Range<usize>,
    program: &Program<'_>,
    image: &Image,
    base: usize,
    linker_base: usize,
) -> io::Result<Frame> {
    let texts = program.arguments.iter().chain(program.environment);
    let text_len: usize = texts.map(|text| text.as_bytes_with_nul().len()).sum();
    let text_len = text_len + program.path.to_bytes_with_nul().len();
    let words = 1 + program.arguments.len() + 1 + program.environment.len() + 1;
    let auxiliary_len = 2 * (PASSED_ON.len() + 9);
    let frame_len = (words + auxiliary_len) * size_of::<usize>();
    let (random_len, platform) = (16, c"x86_64");
    let strings_len =
        (text_len + random_len + platform.to_bytes_with_nul().len()).next_multiple_of(16);
    if frame_len + strings_len > stack.len() / 4 {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    }
    let mut strings = Writer {
        at: stack.end - strings_len,
    };
    // The stack pointer is a multiple of 16.
    let stack_pointer = (strings.at - frame_len) / 16 * 16;
    let mut frame = Writer { at: stack_pointer };

    let mut random = [0u8; 16];
    // SAFETY: the buffer has this length.
    let read = unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) };
    if read != random.len() as isize {
        return Err(io::Error::last_os_error());
    }
    let random_at = strings.write_bytes(&random);
    let platform_at = strings.write_text(platform);
    let path_at = strings.write_text(program.path);
    let mut pointers = |texts: &[std::ffi::CString], frame: &mut Writer| {
        let start = strings.at;
        for text in texts {
            frame.write_word(strings.write_text(text));
        }
        frame.write_word(0);
        start..strings.at
    };
    frame.write_word(program.arguments.len());
    let arguments = pointers(program.arguments, &mut frame);
    let environment = pointers(program.environment, &mut frame);
    let own = [
        (libc::AT_PHDR, base + image.headers),
        (libc::AT_PHENT, 56),
        (libc::AT_PHNUM, image.header_count),
        (libc::AT_BASE, linker_base),
        (libc::AT_ENTRY, image.entry_at(base)),
        (libc::AT_RANDOM, random_at),
        (libc::AT_PLATFORM, platform_at),
        (libc::AT_EXECFN, path_at),
        (libc::AT_NULL, 0),
    ];
    let passed_on = PASSED_ON.iter().filter_map(|key| {
        // SAFETY: reads the vector of this process.
        let value = unsafe { libc::getauxval(*key) };
        (value != 0).then_some((*key, value as usize))
    });
    let auxiliary = frame.at;
    for (key, value) in passed_on.chain(own) {
        frame.write_word(key as usize);
        frame.write_word(value);
    }
    Ok(Frame {
        stack_pointer,
        arguments,
        environment,
        auxiliary: auxiliary..frame.at,
    })
}
