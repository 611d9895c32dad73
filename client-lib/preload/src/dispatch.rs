//! Calls that have a twin with the same arguments among rsockets.

/// Exports each call by its C name: to the twin where the number is an rsocket's, else to the C
/// library.
macro_rules! dispatched_calls {
    ($(fn $name:ident = $call:ident ($fd:ident: $fd_type:ty $(, $argument:ident: $type:ty)* $(,)?) -> $result:ty;)*) => {
        $(
            #[unsafe(export_name = stringify!($call))]
            unsafe extern "C" fn $name($fd: $fd_type $(, $argument: $type)*) -> $result {
                // SAFETY: as the manual page obliges the caller.
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
