//! Exports functions of this crate as versioned symbols of libibverbs or librdmacm.
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

/// See the module documentation.
macro_rules! export_symbols {
    ($node:literal: $(
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $function:path;
    )*) => {
        $(
            core::arch::global_asm!(concat!(
                ".symver siw_abi_", stringify!($name), ", ", stringify!($name), "@@", $node
            ));

            #[unsafe(export_name = concat!("siw_abi_", stringify!($name)))]
            unsafe extern "C" fn $name($($argument: $type),*) $(-> $result)? {
                // SAFETY: the manual page of the symbol gives its caller the obligations of the
                // function.
                unsafe { $function($($argument),*) }
            }
        )*
    };
}

pub(crate) use export_symbols;
