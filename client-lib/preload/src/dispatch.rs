//! Calls that rsockets have with the same arguments.

/// Exports each call by its C name: it calls the function of rsockets for an rsocket, else that of
/// the C library.
macro_rules! dispatched_calls {
    ($(fn $name:ident = $call:ident ($fd:ident: $fd_type:ty $(, $argument:ident: $type:ty)* $(,)?) -> $result:ty;)*) => {
        $(
            #[unsafe(export_name = stringify!($call))]
            unsafe extern "C-unwind" fn $name($fd: $fd_type $(, $argument: $type)*) -> $result {
                // SAFETY: by the contract of the manual page.
                unsafe {
                    if is_rsocket($fd) {
                        rsockets::$call($fd $(, $argument)*)
                    } else {
                        libc_calls::$call($fd $(, $argument)*)
                    }
                }
            }
        )*
    };
}

pub(crate) use dispatched_calls;
