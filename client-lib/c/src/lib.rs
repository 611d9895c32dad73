//! The functions of `siw.h`, which the crate `siw` defines, as a shared and as a static library.
#![forbid(unsafe_code)]

pub use client_lib::capi;
