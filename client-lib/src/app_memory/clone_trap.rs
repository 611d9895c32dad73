//! Runs a function around the system call of fork(2), in the thread that forks.
//!
//! fork() of glibc takes the locks of malloc(3) after the pthread_atfork(3) handlers that run before
//! it, and releases them before the handlers that run after it. They are held only during the system
//! call itself. Therefore the first handler arms Syscall User Dispatch (Linux 5.11; no privilege):
//! each further system call of the thread raises SIGSYS, and the signal handler makes the call. At
//! the call that makes a process, dispatch ends, and the function given to [`CloneTrap::arm`] runs.
//!
//! The signal handler has a stack of its own, because the stack of the thread may be registered
//! memory, which the child shares with its parent until it has its copy. Until then the child writes
//! to that stack only, and the kernel stores no thread id.
//!
//! The kernel ends a process that makes a dispatched system call with SIGSYS blocked, and handlers of
//! the program may block all signals. Therefore signals wait until dispatch ends, and the signal mask
//! that the thread sets meanwhile is kept aside.
//!
//! Dispatch exists on x86-64 only. Elsewhere, or where a seccomp filter denies it, [`CloneTrap::arm`]
//! fails.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use siw_shm::shared_memory::PAGE;

/// Runs in place of the system call, which its second argument makes; returns its result.
pub(super) type Around<T> = fn(&T, &mut dyn FnMut() -> isize) -> isize;

/// Values of the selector of Syscall User Dispatch.
const ALLOW: u8 = 0;
const BLOCK: u8 = 1;
/// `si_code` of a dispatched system call.
const SYS_USER_DISPATCH: c_int = 2;
const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
const PR_SYS_DISPATCH_OFF: usize = 0;
const PR_SYS_DISPATCH_ON: usize = 1;
const SA_RESTORER: u64 = 0x0400_0000;
/// Size of the kernel's signal sets.
const MASK_LEN: usize = 8;

/// Signals that are never blocked: those of faults, and those that the C library uses itself, among
/// which setuid(2) waits for the handler of every thread.
const NEVER_BLOCKED: [c_int; 9] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    32,
    33,
    34,
];

/// All signals but [`NEVER_BLOCKED`].
const BLOCKED: u64 = {
    let (mut mask, mut i) = (!0, 0);
    while i < NEVER_BLOCKED.len() {
        mask &= !(1 << (NEVER_BLOCKED[i] - 1));
        i += 1;
    }
    mask
};

/// `struct kernel_sigaction`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// State of an armed trap, in the last page of a mapping that begins with the stack of the handler.
struct Armed {
    mapping: *mut c_void,
    selector: AtomicU8,
    /// The signal mask that the thread sees.
    mask: u64,
    action_before: Action,
    /// None if the thread runs on its alternate stack.
    stack_before: Option<libc::stack_t>,
    /// Calls the function given to [`CloneTrap::arm`].
    around: unsafe fn(&Armed, &mut dyn FnMut() -> isize) -> isize,
    function: *const c_void,
    argument: *const c_void,
}

/// Length of the mapping: an inaccessible page, the stack, and a page with [`Armed`].
const MAPPING_LEN: usize = (64 << 10) + 2 * PAGE;
const _: () = assert!(size_of::<Armed>() <= PAGE);

/// The trap that is armed. At most one is, because of `ONE_AT_A_TIME`.
static ARMED: AtomicPtr<Armed> = AtomicPtr::new(null_mut());
/// Thread pointer of the thread that has armed it.
static ARMED_THREAD: AtomicUsize = AtomicUsize::new(0);
/// The program's handler of SIGSYS, and its flags.
static PROGRAM_HANDLER: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static PROGRAM_FLAGS: AtomicU64 = AtomicU64::new(0);

/// Makes a system call; returns its result or the negative error.
///
/// # Safety
/// As for the call.
unsafe fn call(number: usize, arguments: [usize; 6]) -> isize {
    let result;
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the caller's promise. The kernel changes these registers only.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Length of [`return_from_handler`], including the place behind its system call, where the kernel
/// sees the thread.
const RETURN_LEN: usize = 11;

/// Returns from the signal handler: the only code whose system calls are never dispatched.
#[unsafe(naked)]
extern "C" fn return_from_handler() {
    std::arch::naked_asm!("mov rax, 15", "syscall", "ud2")
}

fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: reads the first word of the thread control block, which is its own address.
    unsafe {
        std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly, preserves_flags));
    }
    pointer
}

fn set_action(new: Option<&Action>, old: Option<&mut Action>) -> bool {
    let new = new.map_or(null(), std::ptr::from_ref);
    let old = old.map_or(null_mut(), std::ptr::from_mut);
    let arguments = [
        libc::SIGSYS as usize,
        new as usize,
        old as usize,
        MASK_LEN,
        0,
        0,
    ];
    // SAFETY: structures of the caller; the handler of `new` is that of the program or valid here.
    unsafe { call(libc::SYS_rt_sigaction as usize, arguments) == 0 }
}

fn set_mask(new: u64, old: &mut u64) {
    let (new, old) = (&raw const new as usize, &raw mut *old as usize);
    let arguments = [libc::SIG_SETMASK as usize, new, old, MASK_LEN, 0, 0];
    // SAFETY: two sets of the kernel's length.
    unsafe { call(libc::SYS_rt_sigprocmask as usize, arguments) };
}

/// Ends dispatch, or begins it in all code but [`return_from_handler`].
fn set_dispatch(selector: Option<&AtomicU8>) -> bool {
    let mut arguments = [
        PR_SET_SYSCALL_USER_DISPATCH,
        PR_SYS_DISPATCH_OFF,
        0,
        0,
        0,
        0,
    ];
    if let Some(selector) = selector {
        let code = return_from_handler as *const () as usize;
        arguments[1..5].copy_from_slice(&[
            PR_SYS_DISPATCH_ON,
            code,
            RETURN_LEN,
            selector.as_ptr() as usize,
        ]);
    }
    // SAFETY: the selector stays mapped while dispatch is on.
    unsafe { call(libc::SYS_prctl as usize, arguments) == 0 }
}

/// An armed trap. Dropped in the parent and in the child.
pub(super) struct CloneTrap(*mut Armed);

impl CloneTrap {
    /// Checks that the system call can be trapped, without changing the thread.
    pub fn is_available() -> bool {
        let arguments = [
            PR_SET_SYSCALL_USER_DISPATCH,
            PR_SYS_DISPATCH_ON,
            0,
            0,
            usize::MAX,
            0,
        ];
        // SAFETY: the kernel refuses a selector at an address of its own. One that lacks dispatch
        // refuses the request itself (EINVAL).
        let result = unsafe { call(libc::SYS_prctl as usize, arguments) };
        result == -libc::EFAULT as isize
    }

    /// Arms the trap: `around` runs with `argument` in the next call that makes a process. From now
    /// on the thread may only continue to fork.
    ///
    /// # Safety
    /// `argument` is valid until the trap is dropped. `around` makes system calls directly, not by
    /// the C library, and in a child writes to its stack only until the child has its own memory.
    pub unsafe fn arm<T>(around: Around<T>, argument: *const T) -> Option<CloneTrap> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, whose first page is not used.
        let mapping = unsafe {
            let mapping = rustix::mm::mmap_anonymous(null_mut(), MAPPING_LEN, prot, flags).ok()?;
            let _ = rustix::mm::mprotect(mapping, PAGE, MprotectFlags::empty());
            mapping
        };
        let armed = (mapping as usize + MAPPING_LEN - PAGE) as *mut Armed;
        // SAFETY: the place is writable, aligned and used only here.
        let armed = unsafe {
            armed.write(Armed {
                mapping,
                selector: AtomicU8::new(ALLOW),
                mask: 0,
                action_before: Action {
                    handler: libc::SIG_DFL,
                    flags: 0,
                    restorer: 0,
                    mask: 0,
                },
                stack_before: None,
                around: call_around::<T>,
                function: around as *const c_void,
                argument: argument.cast(),
            });
            &mut *armed
        };
        let stack = libc::stack_t {
            ss_sp: (mapping as usize + PAGE) as *mut c_void,
            ss_flags: 0,
            ss_size: MAPPING_LEN - 2 * PAGE,
        };
        // SAFETY: the stack is used for nothing else; the call fills the second structure.
        armed.stack_before = unsafe {
            let mut before: libc::stack_t = std::mem::zeroed();
            (libc::sigaltstack(&stack, &mut before) == 0).then_some(before)
        };
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_signal;
        let action = Action {
            handler: handler as usize,
            // Filters of the program may raise SIGSYS within the handler.
            flags: (libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER) as u64 | SA_RESTORER,
            restorer: return_from_handler as *const () as usize,
            mask: BLOCKED,
        };
        let trap = CloneTrap(armed);
        set_action(None, Some(&mut armed.action_before));
        PROGRAM_HANDLER.store(armed.action_before.handler, Ordering::Release);
        PROGRAM_FLAGS.store(armed.action_before.flags, Ordering::Release);
        set_mask(BLOCKED, &mut armed.mask);
        ARMED_THREAD.store(thread_pointer(), Ordering::Release);
        ARMED.store(armed, Ordering::Release);
        if !set_action(Some(&action), None) || !set_dispatch(Some(&armed.selector)) {
            return None;
        }
        armed.selector.store(BLOCK, Ordering::Release);
        Some(trap)
    }
}

impl Drop for CloneTrap {
    fn drop(&mut self) {
        // SAFETY: the state is valid until it is unmapped here; only this thread uses it.
        unsafe {
            let armed = &mut *self.0;
            if ARMED.load(Ordering::Acquire) == self.0 {
                armed.selector.store(ALLOW, Ordering::Release);
                let mask = armed.end();
                set_mask(mask, &mut armed.mask);
            }
            if let Some(before) = armed.stack_before {
                libc::sigaltstack(&before, null_mut());
            }
            let _ = rustix::mm::munmap(armed.mapping, MAPPING_LEN);
        }
    }
}

impl Armed {
    /// Ends dispatch; returns the mask that the thread is to have.
    fn end(&mut self) -> u64 {
        set_dispatch(None);
        set_action(Some(&self.action_before), None);
        ARMED.store(null_mut(), Ordering::Release);
        ARMED_THREAD.store(0, Ordering::Release);
        self.mask
    }

    /// rt_sigprocmask(2) on the mask that the thread sees.
    ///
    /// # Safety
    /// The arguments are those of the system call.
    unsafe fn change_mask(&mut self, [how, new, old, ..]: [usize; 6]) -> isize {
        let before = self.mask;
        if new != 0 {
            // SAFETY: the caller's promise.
            let new = unsafe { (new as *const u64).read_unaligned() };
            self.mask = match how as c_int {
                libc::SIG_BLOCK => before | new,
                libc::SIG_UNBLOCK => before & !new,
                libc::SIG_SETMASK => new,
                _ => return -libc::EINVAL as isize,
            };
        }
        if old != 0 {
            // SAFETY: the caller's promise.
            unsafe { (old as *mut u64).write_unaligned(before) };
        }
        0
    }
}

/// # Safety
/// The pointers in `armed` are those of a `T` and its function.
unsafe fn call_around<T>(armed: &Armed, make_call: &mut dyn FnMut() -> isize) -> isize {
    // SAFETY: the caller's promise.
    unsafe {
        let around = std::mem::transmute::<*const c_void, Around<T>>(armed.function);
        around(&*armed.argument.cast(), make_call)
    }
}

/// `struct clone_args`, as long as this kernel's.
#[repr(C)]
#[derive(Clone, Copy)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    others: [u64; 10],
}

/// A system call that makes a process with a copy of the memory, on the same stack.
struct ForkCall {
    number: usize,
    arguments: [usize; 6],
    /// Arguments of clone3(2).
    given: CloneArgs,
    /// Place of the child's thread id.
    child_tid: *mut i32,
    flags: c_int,
}

impl ForkCall {
    /// # Safety
    /// The arguments are those of the system call.
    unsafe fn parse(number: usize, mut arguments: [usize; 6]) -> Option<ForkCall> {
        const OTHERS: c_int = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_SETTLS;
        const TID: c_int = libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID;
        // SAFETY: a structure of numbers.
        let mut given: CloneArgs = unsafe { std::mem::zeroed() };
        let (flags, stack, child_tid) = match number as i64 {
            libc::SYS_fork => (0, 0, 0),
            libc::SYS_clone => {
                let flags = arguments[0];
                arguments[0] &= !(TID as usize);
                (flags, arguments[1], arguments[3])
            }
            libc::SYS_clone3 if arguments[1] <= size_of::<CloneArgs>() => {
                let len = arguments[1];
                // SAFETY: the caller's promise.
                unsafe {
                    let to = (&raw mut given).cast::<u8>();
                    to.copy_from_nonoverlapping(arguments[0] as *const u8, len);
                }
                let flags = given.flags as usize;
                given.flags &= !(TID as u64);
                (flags, given.stack as usize, given.child_tid as usize)
            }
            _ => return None,
        };
        let flags = flags as c_int;
        (flags & OTHERS == 0 && stack == 0).then_some(ForkCall {
            number,
            arguments,
            given,
            child_tid: child_tid as *mut i32,
            flags,
        })
    }

    /// Makes the call without storing the child's thread id.
    fn make(&mut self) -> isize {
        if self.number as i64 == libc::SYS_clone3 {
            self.arguments[0] = &raw const self.given as usize;
        }
        // SAFETY: the program's own call; the child continues on a copy of this stack.
        unsafe { call(self.number, self.arguments) }
    }

    /// Stores the thread id in the child, as the kernel would have done.
    fn store_thread_id(&self) {
        // SAFETY: the place is the program's, for this purpose.
        unsafe {
            if self.flags & libc::CLONE_CHILD_SETTID != 0 {
                let id = call(libc::SYS_gettid as usize, [0; 6]);
                self.child_tid.write_unaligned(id as i32);
            }
            if self.flags & libc::CLONE_CHILD_CLEARTID != 0 {
                let arguments = [self.child_tid as usize, 0, 0, 0, 0, 0];
                call(libc::SYS_set_tid_address as usize, arguments);
            }
        }
    }
}

/// The handler of SIGSYS.
extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives valid structures. The state is valid while this thread has a trap.
    unsafe {
        let is_ours = (*info).si_code == SYS_USER_DISPATCH
            && ARMED_THREAD.load(Ordering::Acquire) == thread_pointer();
        if is_ours {
            let armed = ARMED.load(Ordering::Acquire);
            dispatch(&mut *armed, &mut *context.cast());
        } else {
            handle_otherwise(signal, info, context);
        }
    }
}

/// Makes the system call that the thread was about to make.
///
/// # Safety
/// `context` is that of a dispatched system call.
unsafe fn dispatch(armed: &mut Armed, context: &mut libc::ucontext_t) {
    armed.selector.store(ALLOW, Ordering::Release);
    let mask = (&raw mut context.uc_sigmask).cast::<u64>();
    let registers = &mut context.uc_mcontext.gregs;
    let argument = |register: c_int| registers[register as usize] as usize;
    let number = argument(libc::REG_RAX);
    let arguments = [
        argument(libc::REG_RDI),
        argument(libc::REG_RSI),
        argument(libc::REG_RDX),
        argument(libc::REG_R10),
        argument(libc::REG_R8),
        argument(libc::REG_R9),
    ];
    let result = match number as i64 {
        // SAFETY: arguments of that call.
        libc::SYS_rt_sigprocmask if arguments[3] == MASK_LEN => unsafe {
            armed.change_mask(arguments)
        },
        // From a handler of a signal that is never blocked.
        libc::SYS_rt_sigreturn => {
            registers[libc::REG_RIP as usize] = return_from_handler as *const () as i64;
            libc::SYS_rt_sigreturn as isize
        }
        libc::SYS_clone | libc::SYS_clone3 | libc::SYS_fork | libc::SYS_vfork => {
            // SAFETY: arguments of that call.
            let Some(mut fork) = (unsafe { ForkCall::parse(number, arguments) }) else {
                // The thread makes the call itself, after all.
                const SYSCALL_LEN: i64 = 2;
                registers[libc::REG_RIP as usize] -= SYSCALL_LEN;
                let seen = armed.end();
                // SAFETY: the kernel's set has this length.
                unsafe { mask.write_unaligned(seen) };
                return;
            };
            // SAFETY: the pointers belong together.
            let result = unsafe { (armed.around)(armed, &mut || fork.make()) };
            if result == 0 {
                fork.store_thread_id();
            }
            registers[libc::REG_RAX as usize] = result as i64;
            let seen = armed.end();
            // SAFETY: the kernel's set has this length.
            unsafe { mask.write_unaligned(seen) };
            return;
        }
        // SAFETY: the call that the thread is making.
        _ => unsafe { call(number, arguments) },
    };
    registers[libc::REG_RAX as usize] = result as i64;
    armed.selector.store(BLOCK, Ordering::Release);
}

/// Does with a signal what the program has chosen.
///
/// # Safety
/// The arguments of a signal handler.
unsafe fn handle_otherwise(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let handler = PROGRAM_HANDLER.load(Ordering::Acquire);
    // SAFETY: the structure is given by the kernel.
    let is_forced = unsafe { (*info).si_code > 0 };
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN && is_forced {
        let default = Action {
            handler: libc::SIG_DFL,
            flags: 0,
            restorer: 0,
            mask: 0,
        };
        set_action(Some(&default), None);
        // SAFETY: ends the process.
        unsafe { libc::raise(signal) };
    } else if handler != libc::SIG_IGN {
        // SAFETY: the program's handler, of the type that its flags say.
        unsafe {
            if PROGRAM_FLAGS.load(Ordering::Acquire) & libc::SA_SIGINFO as u64 != 0 {
                type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
                std::mem::transmute::<usize, Handler>(handler)(signal, info, context);
            } else {
                std::mem::transmute::<usize, extern "C" fn(c_int)>(handler)(signal);
            }
        }
    }
}
