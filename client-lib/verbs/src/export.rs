//! How a function of this crate becomes a versioned symbol of libibverbs or librdmacm.
//!
//! A table names the symbol, its version node and the function that it calls:
//!
//! ```text
//! export_symbols! { "IBVERBS_1.1":
//!     fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = pd::alloc_pd;
//! }
//! ```
//!
//! The symbol and its `.symver` directive have to be in one object file: the macro puts them into
//! one module, which rustc never divides.

/// See the module.
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
                // SAFETY: the manual page of the symbol obliges its caller to what the function
                // asks for.
                unsafe { $function($($argument),*) }
            }
        )*
    };
}

pub(crate) use export_symbols;
