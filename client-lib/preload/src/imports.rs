//! Functions looked up by name on their first call. The crate `siw-mirror` includes this file too.

use std::ffi::CStr;

/// Declares functions, each looked up once in `$scope`.
macro_rules! imported_functions {
    ($scope:expr; $(fn $name:ident = $symbol:literal ($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {
        $(
            /// The function of that name.
            pub unsafe fn $name($($argument: $type),*) -> $result {
                type Function = unsafe extern "C-unwind" fn($($type),*) -> $result;
                static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                let mut found = FOUND.load(Ordering::Relaxed);
                if found.is_null() {
                    // SAFETY: a name with a terminating zero.
                    found = unsafe { libc::dlsym($scope, $symbol.as_ptr()) };
                    if found.is_null() {
                        missing($symbol);
                    }
                    FOUND.store(found, Ordering::Relaxed);
                }
                // SAFETY: the symbol has this type by its manual page.
                let function = unsafe { std::mem::transmute::<*mut c_void, Function>(found) };
                // SAFETY: as the caller promised.
                unsafe { function($($argument),*) }
            }
        )*
    };
}

pub(crate) use imported_functions;

/// Ends the process: it cannot continue without the function.
#[cold]
pub fn missing(symbol: &CStr) -> ! {
    let symbol = symbol.to_string_lossy();
    let text = format!("siwd: the function {symbol} is missing; run the program with siwrun\n");
    // SAFETY: a text with its length. A direct system call, because write(2) would call this
    // library.
    unsafe {
        libc::syscall(
            libc::SYS_write,
            libc::STDERR_FILENO,
            text.as_ptr(),
            text.len(),
        )
    };
    std::process::abort()
}
