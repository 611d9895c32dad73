//! The system calls that a child makes before it is another program.

use std::ops::Range;

use crate::image::Image;
use crate::stack::{AT_RSEQ_FEATURE_SIZE, Frame};

/// One system call, as `enter.rs` reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    number: i64,
    arguments: [usize; 6],
    /// Not 0: its errors do not matter.
    may_fail: usize,
}

/// Argument of prctl(PR_SET_MM, PR_SET_MM_MAP): the places that /proc/PID shows.
#[repr(C)]
#[derive(Debug)]
struct MmMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: u64,
    auxv_size: u32,
    exe_fd: u32,
}

/// The calls, and what they point to.
#[derive(Default)]
pub(crate) struct Steps {
    list: Vec<Step>,
    map: Option<Box<MmMap>>,
    zeroes: Option<Box<[usize; 4]>>,
    no_stack: Option<Box<libc::stack_t>>,
}

/// Size of the kernel's signal sets.
const MASK_LEN: usize = 8;
const LAST_SIGNAL: usize = 64;
const RSEQ_FLAG_UNREGISTER: usize = 1;
/// Signature that glibc registers with (`RSEQ_SIG`).
const RSEQ_SIGNATURE: usize = 0x5305_3053;
/// Lengths of the area, which has to be the registered one: the first, and the next ones that are possible.
const RSEQ_LENGTHS: [usize; 3] = [32, 64, 128];

impl Steps {
    fn add(&mut self, number: i64, arguments: [usize; 6], may_fail: bool) {
        self.list.push(Step {
            number,
            arguments,
            may_fail: may_fail.into(),
        });
    }

    /// The calls.
    pub fn list(&self) -> &[Step] {
        &self.list
    }

    /// A number of zeroes that stays where it is.
    fn zeroes(&mut self) -> usize {
        self.zeroes.get_or_insert_default().as_ptr() as usize
    }

    /// Gives each signal its default action, blocks none, and leaves the thread's stack for handlers.
    pub fn reset_signals(&mut self) {
        // The default action, and an empty mask.
        let action = self.zeroes();
        for signal in 1..=LAST_SIGNAL {
            // SIGKILL and SIGSTOP cannot be changed.
            let arguments = [signal, action, 0, MASK_LEN, 0, 0];
            self.add(libc::SYS_rt_sigaction, arguments, true);
        }
        let arguments = [libc::SIG_SETMASK as usize, action, 0, MASK_LEN, 0, 0];
        self.add(libc::SYS_rt_sigprocmask, arguments, false);
        let none = self.no_stack.insert(Box::new(libc::stack_t {
            ss_sp: std::ptr::null_mut(),
            ss_flags: libc::SS_DISABLE,
            ss_size: 0,
        }));
        let none = &raw const **none as usize;
        self.add(libc::SYS_sigaltstack, [none, 0, 0, 0, 0, 0], false);
    }

    /// Ends the registration of the restartable sequences of the thread (rseq(2)), to whose memory the kernel
    /// would write.
    pub fn leave_rseq(&mut self) {
        // SAFETY: looks for a variable of the C library by its name.
        let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) };
        if offset.is_null() {
            return;
        }
        // SAFETY: the variable is a ptrdiff_t (sys/rseq.h).
        let offset = unsafe { *offset.cast::<isize>() };
        let area = thread_pointer().wrapping_add_signed(offset);
        // SAFETY: reads the auxiliary vector of this process.
        let features = unsafe { libc::getauxval(AT_RSEQ_FEATURE_SIZE) } as usize;
        let lengths = RSEQ_LENGTHS.into_iter().chain([features]);
        for len in lengths {
            let arguments = [area, len, RSEQ_FLAG_UNREGISTER, RSEQ_SIGNATURE, 0, 0];
            self.add(libc::SYS_rseq, arguments, true);
        }
    }

    /// Has /proc/PID show the arguments, the environment and the auxiliary vector of the new program.
    pub fn describe_process(&mut self, frame: &Frame, image: &Image, base: usize) {
        let [code, data] = image.code_and_data(base);
        // SAFETY: asks for the end of the heap.
        let heap_end = unsafe { libc::sbrk(0) } as u64;
        let map = self.map.insert(Box::new(MmMap {
            start_code: code.start as u64,
            end_code: code.end as u64,
            start_data: data.start as u64,
            end_data: data.end as u64,
            start_brk: heap_end,
            brk: heap_end,
            start_stack: frame.stack_pointer as u64,
            arg_start: frame.arguments.start as u64,
            arg_end: frame.arguments.end as u64,
            env_start: frame.environment.start as u64,
            env_end: frame.environment.end as u64,
            auxv: frame.auxiliary.start as u64,
            auxv_size: frame.auxiliary.len() as u32,
            exe_fd: u32::MAX,
        }));
        let (at, len) = (&raw const **map as usize, size_of::<MmMap>());
        let [option, what] = [libc::PR_SET_MM, libc::PR_SET_MM_MAP].map(|number| number as usize);
        self.add(libc::SYS_prctl, [option, what, at, len, 0, 0], true);
    }

    /// Unmaps a range of whole pages.
    pub fn unmap(&mut self, range: &Range<usize>) {
        let arguments = [range.start, range.len(), 0, 0, 0, 0];
        self.add(libc::SYS_munmap, arguments, false);
    }

    /// Closes all descriptors but the standard ones and those with these numbers.
    pub fn close_all_but(&mut self, numbers: &[i32]) {
        let mut kept: Vec<usize> = numbers.iter().map(|number| *number as usize).collect();
        kept.extend(0..=2);
        kept.sort_unstable();
        kept.dedup();
        let mut first = 0;
        for number in kept {
            if number > first {
                let arguments = [first, number - 1, 0, 0, 0, 0];
                self.add(libc::SYS_close_range, arguments, false);
            }
            first = number + 1;
        }
        let arguments = [first, u32::MAX as usize, 0, 0, 0, 0];
        self.add(libc::SYS_close_range, arguments, false);
    }
}

/// The address of the thread's control block, at which the block has its own address.
fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads the word at offset 0 of the segment, which every x86-64 Linux ABI defines.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly)) };
    pointer
}
