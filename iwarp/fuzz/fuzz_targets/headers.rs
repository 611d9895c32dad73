//! DDP and RDMAP headers in valid FPDUs. `cargo +nightly fuzz run headers` in iwarp/.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| common::fuzz::headers(data));
