//! The loop that makes a list of system calls in a child and then jumps to a program.

use std::io;
use std::ops::Range;

use crate::steps::{Step, Steps};
use crate::{PAGE, maps, stack};

// Registers: rdi the calls, rsi their number, rdx the stack pointer, rcx the first instruction. The stack
// is not used, as it is among what the calls unmap.
std::arch::global_asm!(
    ".pushsection .text.siw_successor, \"ax\", @progbits",
    ".p2align 6",
    ".globl siw_successor_enter",
    ".hidden siw_successor_enter",
    "siw_successor_enter:",
    "    mov rbx, rdi",
    "    mov rbp, rsi",
    "    mov r12, rdx",
    "    mov r13, rcx",
    "2:  test rbp, rbp",
    "    jz 4f",
    "    mov rax, [rbx]",
    "    mov rdi, [rbx + 8]",
    "    mov rsi, [rbx + 16]",
    "    mov rdx, [rbx + 24]",
    "    mov r10, [rbx + 32]",
    "    mov r8, [rbx + 40]",
    "    mov r9, [rbx + 48]",
    "    syscall",
    "    cmp rax, -4095",
    "    jb 3f",
    "    cmp qword ptr [rbx + 56], 0",
    "    jne 3f",
    "    mov edi, {status}",
    "    mov eax, {exit_group}",
    "    syscall",
    "    ud2",
    "3:  add rbx, {step}",
    "    dec rbp",
    "    jmp 2b",
    "4:  mov rsp, r12",
    "    mov rax, r13",
    "    xor ebx, ebx",
    "    xor ebp, ebp",
    "    xor edx, edx",
    "    xor edi, edi",
    "    xor esi, esi",
    "    cld",
    "    jmp rax",
    ".globl siw_successor_end",
    ".hidden siw_successor_end",
    "siw_successor_end:",
    ".popsection",
    status = const FAILED,
    exit_group = const libc::SYS_exit_group,
    step = const size_of::<Step>(),
);

/// Status of a child that could not become the program.
const FAILED: i32 = 125;

unsafe extern "C" {
    fn siw_successor_enter(
        calls: *const Step,
        count: usize,
        stack_pointer: usize,
        entry: usize,
    ) -> !;
    static siw_successor_end: u8;
}

/// The pages of the loop.
pub(crate) fn code_pages() -> Range<usize> {
    let start = siw_successor_enter as *const () as usize;
    let end = &raw const siw_successor_end as usize;
    start / PAGE * PAGE..end.next_multiple_of(PAGE)
}

/// Starts a child that makes the calls and enters the program. The calls have to be in memory that stays
/// mapped in it, so they are copied to the end of the program's stack, which is free below its first frame.
pub(crate) fn start_child(steps: &Steps, stack_pointer: usize, entry: usize) -> io::Result<i32> {
    let list = steps.list();
    // SAFETY: a step is plain data without padding.
    let bytes =
        unsafe { std::slice::from_raw_parts(list.as_ptr().cast::<u8>(), size_of_val(list)) };
    if bytes.len() > stack::LEN / 2 {
        return Err(io::Error::from_raw_os_error(libc::E2BIG));
    }
    let at = (stack_pointer - bytes.len()) / PAGE * PAGE;
    maps::write(at, bytes);
    let blocked = BlockedSignals::block_all()?;
    // SAFETY: as fork(2), without handlers of pthread_atfork(3): the child has a copy of this thread's
    // stack and makes no call of any library.
    let child = unsafe {
        libc::syscall(
            libc::SYS_clone,
            libc::SIGCHLD as usize,
            0usize,
            0usize,
            0usize,
            0usize,
        )
    };
    if child == 0 {
        // SAFETY: the list and the stack are in a mapping that the child has and keeps. All else of
        // this process may be unmapped, and this function does not return.
        unsafe { siw_successor_enter(at as *const Step, list.len(), stack_pointer, entry) }
    }
    let error = io::Error::last_os_error();
    drop(blocked);
    if child < 0 {
        Err(error)
    } else {
        Ok(child as i32)
    }
}

/// All signals of this thread, blocked until the object is dropped: a handler must not run in the child.
struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    fn block_all() -> io::Result<BlockedSignals> {
        // SAFETY: sigset_t is plain data, which both calls write.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            match libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) {
                0 => Ok(BlockedSignals { before }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the one of before.
        unsafe {
            libc::pthread_sigmask(
                libc::SIG_SETMASK,
                &raw const self.before,
                std::ptr::null_mut(),
            )
        };
    }
}
