//! Functions that C programs call: versioned symbols of libibverbs or librdmacm, and functions in
//! structs of their headers. All are made by the macros of this file, which keep panics from
//! crossing into the program: a test refuses any other `extern "C" fn` in this crate.
//!
//! A table gives the symbol, its version node and the function that it calls:
//!
//! ```text
//! export_symbols! { "IBVERBS_1.1":
//!     fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = pd::alloc_pd;
//! }
//! ```
//!
//! The symbol and its `.symver` directive must be in the same object file: the macro puts them into
//! one module, which rustc never splits.
//!
//! The interface between libibverbs and its provider libraries has a node of its own in each release
//! that changed it. A function whose node is `private` is in all of them; those of the newer releases
//! only add functions.

use crate::faults::load_plan;
use crate::memory_calls::note_functions;
use crate::status::{begin_call, end_call, read_environment, set_errno};

/// See the module documentation.
macro_rules! export_symbols {
    ($nodes:tt: $(
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $function:path;
    )*) => {
        $(
            $crate::export::assign_nodes!($name: $nodes);

            $crate::export::c_functions! {
                #[unsafe(export_name = concat!("siw_abi_", stringify!($name)))]
                fn $name($($argument: $type),*) $(-> $result)? = $function;
            }
        )*
    };
}

/// Version nodes of the symbol of a name; the first is the default. `private` are those of every release
/// since rdma-core 34.
macro_rules! assign_nodes {
    ($name:ident: private) => {
        $crate::export::assign_nodes!($name: [
            "IBVERBS_PRIVATE_65", "IBVERBS_PRIVATE_64", "IBVERBS_PRIVATE_59",
            "IBVERBS_PRIVATE_57", "IBVERBS_PRIVATE_34"
        ]);
    };
    ($name:ident: $node:literal) => {
        $crate::export::assign_nodes!($name: [$node]);
    };
    ($name:ident: [$default:literal $(, $other:literal)*]) => {
        core::arch::global_asm!(
            concat!(".symver siw_abi_", stringify!($name), ", ", stringify!($name), "@@", $default),
            $(concat!(".symver siw_abi_", stringify!($name), ", ", stringify!($name), "@", $other)),*
        );
    };
}

/// As [`export_symbols`], for functions that may have to wait, with a [`Call`](crate::waiting::Call) as
/// their first argument. They are cancellation points.
macro_rules! export_waiting_symbols {
    ($nodes:tt: $(
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty = $function:path;
    )*) => {
        $(
            $crate::export::assign_nodes!($name: $nodes);

            #[unsafe(export_name = concat!("siw_abi_", stringify!($name)))]
            unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $result {
                let mut call = $crate::waiting::Call::new();
                // SAFETY: nothing here is dropped.
                unsafe { $crate::waiting::test_cancel() };
                loop {
                    let result = $crate::export::contain(stringify!($name), || {
                        // SAFETY: the manual page of the function gives its caller the obligations.
                        let result = unsafe { $function(&mut call, $($argument),*) };
                        call.end_attempt();
                        result
                    });
                    if !call.must_wait() {
                        return result;
                    }
                    // SAFETY: as above.
                    unsafe { call.wait() };
                }
            }
        )*
    };
}

/// Functions with C's calling convention for a table of others. A panic ends the call with the value
/// of [`Failure`].
macro_rules! c_functions {
    ($($functions:tt)*) => {
        $crate::export::contained_functions! { contain: $($functions)* }
    };
}

/// As [`c_functions`], for posting and polling, which make no call that is a cancellation point.
macro_rules! fast_functions {
    ($($functions:tt)*) => {
        $crate::export::contained_functions! { contain_fast: $($functions)* }
    };
}

/// Functions whose bodies `$contain` runs.
macro_rules! contained_functions {
    ($contain:ident: $(
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?
            = $function:path;
    )*) => {
        $(
            $(#[$attribute])*
            $visibility unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
                $crate::export::$contain(stringify!($name), move || {
                    // SAFETY: the manual page of the function gives its caller the obligations.
                    unsafe { $function($($argument),*) }
                })
            }
        )*
    };
}

/// As [`c_functions`], for functions that cannot panic and use no thread-local variables, of which the
/// dynamic linker may be making one.
macro_rules! bare_functions {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $function:path;
    )*) => {
        $(
            $(#[$attribute])*
            unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
                // SAFETY: the manual page of the function gives its caller the obligations.
                unsafe { $function($($argument),*) }
            }
        )*
    };
}

pub(crate) use {
    assign_nodes, bare_functions, c_functions, contained_functions, export_symbols,
    export_waiting_symbols, fast_functions,
};

/// The value by which a function of the C interface reports failure.
pub trait Failure {
    /// The value.
    const FAILURE: Self;
}

macro_rules! failures {
    ($($type:ty = $value:expr;)*) => {
        $(impl Failure for $type {
            const FAILURE: $type = $value;
        })*
    };
}

failures! {
    () = ();
    i32 = -1;
    i64 = -1;
    isize = -1;
    // riowrite(3) returns -1 in this type.
    usize = usize::MAX;
    u8 = 0;
    u16 = 0;
    u32 = 0;
    u64 = 0;
}

impl<T> Failure for *mut T {
    const FAILURE: *mut T = std::ptr::null_mut();
}

impl<T> Failure for *const T {
    const FAILURE: *const T = std::ptr::null();
}

/// Runs the body of a function of the C interface. After a panic, which the panic hook has reported,
/// it fails with EIO. A cancellation of the thread stays pending meanwhile.
#[inline]
pub fn contain<R: Failure>(call: &'static str, body: impl FnOnce() -> R) -> R {
    let _guard = siw::CancelGuard::new();
    contain_fast(call, body)
}

/// Runs a part of the waiting in a function of the C interface.
pub fn contain_quietly(body: impl FnOnce()) {
    contain("waiting", body);
}

/// As [`contain`], for a body that calls no cancellation points.
#[inline]
pub fn contain_fast<R: Failure>(call: &'static str, body: impl FnOnce() -> R) -> R {
    let interrupted = begin_call(call);
    let result = siw::contain_panic(call, body).unwrap_or_else(|| {
        set_errno(libc::EIO);
        R::FAILURE
    });
    end_call(interrupted);
    result
}

/// Called when the library is loaded: what the first call of a process makes is there before the program
/// has threads. A child of fork(2) would wait for ever for what another thread was making.
extern "C" fn on_load() {
    contain_quietly(|| {
        note_functions();
        siw::watch_forks();
        read_environment();
        load_plan();
    });
}

#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;
