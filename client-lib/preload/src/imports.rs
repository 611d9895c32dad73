//! Functions that are looked up by name when they are first called. The crate `siw-mirror` has this
//! file as well.

use std::ffi::CStr;

/// Declares a module's functions, each looked up once where `$where` says.
macro_rules! imported_functions {
    ($scope:expr; $(fn $name:ident = $symbol:literal ($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {
        $(
            /// The function of that name.
            pub unsafe fn $name($($argument: $type),*) -> $result {
                type Function = unsafe extern "C" fn($($type),*) -> $result;
                static FOUND: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
                let mut found = FOUND.load(Ordering::Relaxed);
                if found.is_null() {
                    // SAFETY: a name that ends with a zero.
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

/// There is no way on without it.
#[cold]
pub fn missing(symbol: &CStr) -> ! {
    let symbol = symbol.to_string_lossy();
    let text = format!("siwd: there is no {symbol}; run the program with siwrun\n");
    // SAFETY: a text with its length. Not by write(2), which would come back here.
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
