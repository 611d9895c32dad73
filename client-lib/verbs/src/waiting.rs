//! Calls that wait: for events of completion channels and of rdma_cm, for asynchronous events, and
//! those of rsockets.
//!
//! A call is attempted. If it has to wait, the attempt returns and leaves a [`Wait`]; the function that
//! the program has called waits, and attempts the call again. While a thread waits, its stack has only
//! frames of this library that have nothing to drop, so that pthread_cancel(3) can unwind it; what the
//! wait needs is in [`Call`], and is dropped by the next attempt or by a clean-up handler.
//!
//! Signals and cancellation are as the kernel has them (signal(7), pthreads(7)):
//!
//! | handler of a signal | the wait |
//! |---|---|
//! | with SA_RESTART | continues |
//! | without | ends with EINTR, or with the number of bytes moved before |
//! | any, with SO_RCVTIMEO or SO_SNDTIMEO | ends like that |
//! | any, in rpoll(3), rselect(3), repoll_wait(3) | ends with EINTR |
//!
//! Each such call is a cancellation point. All other calls of this library are none, whichever functions
//! of the C library they use ([`siw::CancelGuard`]).

use crate::ibverbs::SharedChannel;
use crate::rsockets::SocketWait;
use libc::{c_int, c_long, c_void, pollfd, sigset_t};
use siw::KeptDescriptor;
use std::any::Any;
use std::cell::RefCell;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// Most descriptors of a [`Wait::Descriptors`], without the one of signals.
const MOST: usize = 3;

/// Way of waiting.
#[derive(Clone, Copy)]
enum Wait {
    /// For data in a stream socket.
    Data(RawFd),
    /// For one of several descriptors.
    Descriptors(Descriptors),
    /// Until a number has changed.
    Change {
        number: *const AtomicU32,
        known: u32,
        deadline: Option<Instant>,
    },
    /// As ppoll(2).
    List {
        list: *mut pollfd,
        count: usize,
        timeout: Option<Duration>,
        mask: *const sigset_t,
    },
    /// As epoll_pwait(2).
    Epoll {
        instance: RawFd,
        events: *mut libc::epoll_event,
        most: usize,
        timeout_ms: c_int,
        mask: *const sigset_t,
    },
}

#[derive(Clone, Copy)]
struct Descriptors {
    list: [pollfd; MOST + 1],
    count: usize,
    deadline: Option<Instant>,
    /// Each signal ends it.
    is_timed: bool,
}

/// Objects that a wait uses.
pub enum Held {
    Socket(#[expect(dead_code, reason = "it ends its wait when dropped")] SocketWait),
    Channel(Arc<SharedChannel>),
    Other(Box<dyn Any>),
}

/// A call of the program that may have to wait, from its first attempt to its result.
pub struct Call {
    /// Bytes that earlier attempts have moved.
    pub moved: usize,
    /// An earlier attempt has begun what the call waits for.
    pub has_begun: bool,
    start: Option<Instant>,
    wait: Option<Wait>,
    outcome: Option<Result<usize, c_int>>,
    held: Option<Held>,
    signals: Option<HeldSignals>,
}

impl Call {
    /// A call before its first attempt.
    pub fn new() -> ManuallyDrop<Call> {
        ManuallyDrop::new(Call {
            moved: 0,
            has_begun: false,
            start: None,
            wait: None,
            outcome: None,
            held: None,
            signals: None,
        })
    }

    /// Time of the first attempt that had to wait.
    pub fn start(&mut self) -> Instant {
        *self.start.get_or_insert_with(Instant::now)
    }

    /// Takes the objects of the last wait.
    pub fn take_held(&mut self) -> Option<Held> {
        self.held.take()
    }

    /// Takes the objects of the last wait, which are of this type.
    pub fn take_other<T: 'static>(&mut self) -> Option<T> {
        match self.held.take() {
            Some(Held::Other(held)) => held.downcast::<T>().ok().map(|held| *held),
            _ => None,
        }
    }

    /// Takes the outcome of the last wait: the number of ready descriptors, 0 after the time, or an
    /// errno.
    pub fn take_outcome(&mut self) -> Option<Result<usize, c_int>> {
        self.outcome.take()
    }

    /// Takes the errno of the last wait, if it has failed.
    pub fn check_interrupted(&mut self) -> Result<(), c_int> {
        self.outcome.take().transpose().map(|_| ())
    }

    /// The last wait has ended by its time limit.
    pub fn has_timed_out(&self) -> bool {
        self.outcome == Some(Ok(0))
    }

    /// The attempt has returned because it has to wait.
    pub fn must_wait(&self) -> bool {
        self.wait.is_some()
    }

    /// Drops what the last wait has used, unless the attempt waits again.
    pub fn end_attempt(&mut self) {
        if self.wait.is_none() {
            self.held = None;
            self.signals = None;
        }
    }

    /// Waits for data in a stream socket of a blocking open file. Several threads may wait.
    pub fn wait_for_data(&mut self, descriptor: RawFd, held: Held) {
        self.begin_wait(Wait::Data(descriptor), held);
    }

    /// Waits until one of at most three descriptors is readable or has an error, or for the time. With
    /// `is_timed`, the program has set a time limit, and each signal ends the wait.
    pub fn wait_for_descriptors(
        &mut self,
        descriptors: &[RawFd],
        deadline: Option<Instant>,
        is_timed: bool,
        held: Held,
    ) {
        let nothing = pollfd {
            fd: -1,
            events: libc::POLLIN,
            revents: 0,
        };
        let mut list = [nothing; MOST + 1];
        for (place, descriptor) in list.iter_mut().zip(descriptors) {
            place.fd = *descriptor;
        }
        let wait = Descriptors {
            list,
            count: descriptors.len().min(MOST),
            deadline,
            is_timed,
        };
        self.begin_wait(Wait::Descriptors(wait), held);
    }

    /// Waits until a number, which `held` keeps, is no longer the known one ([`wake_all`]).
    pub fn wait_for_change(
        &mut self,
        number: *const AtomicU32,
        known: u32,
        deadline: Option<Instant>,
        held: Held,
    ) {
        let wait = Wait::Change {
            number,
            known,
            deadline,
        };
        self.begin_wait(wait, held);
    }

    /// Waits as ppoll(2), with a list that `held` keeps.
    pub fn wait_for_list(
        &mut self,
        list: *mut [pollfd],
        timeout: Option<Duration>,
        mask: *const sigset_t,
        held: Held,
    ) {
        let wait = Wait::List {
            list: list.cast(),
            count: list.len(),
            timeout,
            mask,
        };
        self.begin_wait(wait, held);
    }

    /// Waits as epoll_pwait(2), with a list of the program.
    pub fn wait_for_epoll(
        &mut self,
        instance: RawFd,
        events: *mut [libc::epoll_event],
        timeout_ms: c_int,
        mask: *const sigset_t,
        held: Held,
    ) {
        let wait = Wait::Epoll {
            instance,
            events: events.cast(),
            most: events.len(),
            timeout_ms,
            mask,
        };
        self.begin_wait(wait, held);
    }

    fn begin_wait(&mut self, wait: Wait, held: Held) {
        self.wait = Some(wait);
        self.held = Some(held);
    }

    /// Prepares for signals.
    fn prepare(&mut self) {
        if let Some(Wait::Descriptors(wait)) = &mut self.wait {
            if !wait.is_timed {
                self.signals = HeldSignals::hold(self.signals.take());
            }
            let descriptor = self.signals.as_ref().and_then(HeldSignals::descriptor);
            wait.list[wait.count].fd = descriptor.unwrap_or(-1);
        }
    }

    /// Returns the outcome of a wait, or None if it continues.
    fn judge(
        &mut self,
        wait: &Wait,
        outcome: Result<usize, c_int>,
    ) -> Option<Result<usize, c_int>> {
        match (wait, outcome) {
            (Wait::Descriptors(wait), Ok(1)) if wait.list[wait.count].revents != 0 => {
                self.signals.as_ref()?.run_restarting();
                None
            }
            // It has changed already, or the time is over.
            (Wait::Change { .. }, outcome) if outcome != Err(libc::EINTR) => Some(Ok(0)),
            _ => Some(outcome),
        }
    }

    /// Attempts a call until it does not have to wait, in one whose cancellation stays pending.
    pub fn run_here<T>(mut attempt: impl FnMut(&mut Call) -> T) -> T {
        let mut call = ManuallyDrop::into_inner(Call::new());
        loop {
            let result = attempt(&mut call);
            if !call.must_wait() {
                return result;
            }
            call.wait_here();
        }
    }

    /// As [`Self::wait`], in a call whose cancellation stays pending.
    fn wait_here(&mut self) {
        let _guard = siw::CancelGuard::new();
        // SAFETY: nothing is unwound.
        unsafe { self.wait() };
    }

    /// Waits, and notes the outcome. The next attempt follows.
    ///
    /// # Safety
    /// No frame between here and the program has anything to drop.
    pub unsafe fn wait(&mut self) {
        loop {
            crate::export::contain_quietly(|| self.prepare());
            let Some(mut wait) = self.wait else {
                return;
            };
            let call = std::ptr::from_mut(self);
            // SAFETY: as the caller promised.
            let outcome = unsafe { wait_in_kernel(call, &mut wait) };
            let outcome = self.judge(&wait, outcome);
            if outcome.is_some() {
                self.wait = None;
                self.outcome = outcome;
                return;
            }
        }
    }
}

/// Wakes all threads that wait for a change of the number.
pub fn wake_all(number: &AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: a number of this process.
    unsafe {
        call_kernel(
            libc::SYS_futex,
            std::ptr::from_ref(number),
            operation,
            c_int::MAX,
        )
    };
}

/// Acts on a pending cancellation of the calling thread.
///
/// # Safety
/// No frame between here and the program has anything to drop.
pub unsafe fn test_cancel() {
    // SAFETY: as the caller promised.
    unsafe { pthread_testcancel() }
}

/// Buffer of `_pthread_cleanup_push` (struct _pthread_cleanup_buffer): four words.
type CleanupBuffer = [MaybeUninit<*mut c_void>; 4];

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    // As glibc before 2.34 has them in libpthread: for code that is not compiled as C.
    fn _pthread_cleanup_push(
        buffer: *mut CleanupBuffer,
        routine: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut CleanupBuffer, execute: c_int);
    // By number: a preloaded library may define a function of the name of the call.
    #[link_name = "syscall"]
    fn call_kernel(number: c_long, ...) -> c_long;
}

const PTHREAD_CANCEL_ASYNCHRONOUS: c_int = 1;

/// Drops what a cancelled wait holds.
unsafe extern "C" fn release(call: *mut c_void) {
    // SAFETY: a call in the frame of the function that the program called, which is still there.
    let (held, signals) = unsafe {
        let call = &mut *call.cast::<Call>();
        (call.held.take(), call.signals.take())
    };
    crate::export::contain_quietly(move || drop((held, signals)));
}

/// Makes the system call that waits. If the thread is cancelled meanwhile, this and all frames up to the
/// program's are unwound, after `release`.
///
/// # Safety
/// No frame between here and the program has anything to drop.
#[inline(never)]
unsafe fn wait_in_kernel(call: *mut Call, wait: &mut Wait) -> Result<usize, c_int> {
    let mut buffer: CleanupBuffer = [MaybeUninit::uninit(); 4];
    let mut kind = 0;
    // SAFETY: the buffer outlives the handler. No system call here takes anything, so that it does not
    // matter whether the cancellation comes before or after its result.
    unsafe {
        _pthread_cleanup_push(&raw mut buffer, release, call.cast());
        pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &raw mut kind);
        let done = call_to_wait(call, wait);
        let errno = *libc::__errno_location();
        pthread_setcanceltype(kind, null_mut());
        _pthread_cleanup_pop(&raw mut buffer, 0);
        match done {
            0.. => Ok(done as usize),
            _ => Err(errno),
        }
    }
}

/// # Safety
/// As [`wait_in_kernel`]; lists are valid for their lengths.
unsafe fn call_to_wait(call: *const Call, wait: &mut Wait) -> c_long {
    let mask_size = size_of::<u64>();
    // SAFETY: as the caller promised; times and masks are NULL or valid, with the kernel's mask size.
    unsafe {
        match wait {
            Wait::Data(descriptor) => {
                let mut byte = 0u8;
                let (byte, none) = (&raw mut byte, null_mut::<c_void>());
                let number = libc::SYS_recvfrom;
                call_kernel(
                    number,
                    *descriptor,
                    byte,
                    1usize,
                    libc::MSG_PEEK,
                    none,
                    none,
                )
            }
            // The kernel restarts it if there is no time limit.
            Wait::Change {
                number,
                known,
                deadline,
            } => {
                let mut left = time_left(*deadline);
                let left = left.as_mut().map_or(null_mut(), std::ptr::from_mut);
                let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
                call_kernel(libc::SYS_futex, *number, operation, *known, left)
            }
            Wait::Descriptors(wait) => {
                let mut left = time_left(wait.deadline);
                let left = left.as_mut().map_or(null_mut(), std::ptr::from_mut);
                let mask = (*call).signals.as_ref();
                let mask = mask.map_or(null(), |signals| &raw const signals.during_wait);
                let list = wait.list.as_mut_ptr();
                call_kernel(libc::SYS_ppoll, list, MOST + 1, left, mask, mask_size)
            }
            Wait::List {
                list,
                count,
                timeout,
                mask,
            } => {
                let mut timeout = timeout.map(to_timespec);
                let timeout = timeout.as_mut().map_or(null_mut(), std::ptr::from_mut);
                call_kernel(libc::SYS_ppoll, *list, *count, timeout, *mask, mask_size)
            }
            Wait::Epoll {
                instance,
                events,
                most,
                timeout_ms,
                mask,
            } => {
                let number = libc::SYS_epoll_pwait;
                call_kernel(
                    number,
                    *instance,
                    *events,
                    *most,
                    *timeout_ms,
                    *mask,
                    mask_size,
                )
            }
        }
    }
}

fn time_left(deadline: Option<Instant>) -> Option<libc::timespec> {
    let left = deadline?.saturating_duration_since(Instant::now());
    Some(to_timespec(left))
}

/// Converts a timeout of poll(2).
fn to_timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Signals of faults, whose handlers programs use to provide memory. A blocked one would end the process.
const FAULTS: [c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
];

/// Signals with handlers, except those of faults. They are blocked from the first wait for descriptors to
/// the end of the call.
///
/// ppoll(2) ends with EINTR after each handler. So the signals whose handlers have SA_RESTART stay blocked
/// in it, and a descriptor shows that one is pending. The others can only come in it: a handler that ran
/// after an event which is none for this call would end nothing.
struct HeldSignals {
    /// Signals that the program has blocked.
    own: sigset_t,
    /// These, and those whose handlers have SA_RESTART.
    during_wait: sigset_t,
    restarting: sigset_t,
    any_restarts: bool,
}

fn empty_set() -> sigset_t {
    // SAFETY: the struct is made of numbers.
    unsafe { std::mem::zeroed() }
}

/// Changes the mask of this thread; returns the mask from before.
fn change_mask(how: c_int, signals: &sigset_t) -> sigset_t {
    let mut before = empty_set();
    // SAFETY: two sets.
    unsafe { libc::pthread_sigmask(how, signals, &raw mut before) };
    before
}

impl HeldSignals {
    /// Holds the signals that have handlers now, in addition to those that are held. None if there are none.
    fn hold(before: Option<HeldSignals>) -> Option<HeldSignals> {
        let is_first = before.is_none();
        let own = match before.map(ManuallyDrop::new) {
            Some(before) => before.own,
            None => change_mask(libc::SIG_BLOCK, &empty_set()),
        };
        let mut held = HeldSignals {
            own,
            during_wait: own,
            restarting: empty_set(),
            any_restarts: false,
        };
        let mut handled = empty_set();
        let mut any = false;
        for signal in 1..=libc::SIGRTMAX() {
            if FAULTS.contains(&signal) {
                continue;
            }
            // SAFETY: structs to read and to write; a signal that does not exist is an error.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                if libc::sigismember(&raw const own, signal) == 1
                    || libc::sigaction(signal, null(), &raw mut action) != 0
                    || matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
                {
                    continue;
                }
                any = true;
                libc::sigaddset(&raw mut handled, signal);
                if action.sa_flags & libc::SA_RESTART != 0 {
                    held.any_restarts = true;
                    libc::sigaddset(&raw mut held.restarting, signal);
                    libc::sigaddset(&raw mut held.during_wait, signal);
                }
            }
        }
        (any || !is_first).then(|| {
            change_mask(libc::SIG_BLOCK, &handled);
            held
        })
    }

    /// A descriptor that is readable while a signal is pending whose handler has SA_RESTART.
    fn descriptor(&self) -> Option<RawFd> {
        self.any_restarts
            .then(|| signal_descriptor(&self.restarting))?
    }

    /// Runs the pending handlers with SA_RESTART.
    fn run_restarting(&self) {
        change_mask(libc::SIG_UNBLOCK, &self.restarting);
        change_mask(libc::SIG_BLOCK, &self.restarting);
    }
}

impl Drop for HeldSignals {
    /// Pending handlers run.
    fn drop(&mut self) {
        change_mask(libc::SIG_SETMASK, &self.own);
    }
}

/// A descriptor of this thread that is readable while one of the signals is pending.
fn signal_descriptor(signals: &sigset_t) -> Option<RawFd> {
    thread_local! {
        static OWN: RefCell<Option<KeptDescriptor>> = const { RefCell::new(None) };
    }
    let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
    let find = |own: &RefCell<Option<KeptDescriptor>>| {
        let mut own = own.borrow_mut();
        let known = own.as_ref().filter(|own| own.is_open());
        let number = known.map_or(-1, |known| known.as_raw_fd());
        // SAFETY: a set of signals.
        let made = unsafe { libc::signalfd(number, signals, flags) };
        if made >= 0 && number < 0 {
            // SAFETY: a new descriptor.
            let made = unsafe { OwnedFd::from_raw_fd(made) };
            *own = KeptDescriptor::at_high_number(made).ok();
            return own.as_ref().map(|own| own.as_raw_fd());
        }
        (made >= 0).then_some(made)
    };
    // There is none any more in a thread that ends.
    OWN.try_with(find).ok().flatten()
}
