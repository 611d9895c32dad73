//! A stream of FPDUs with and without markers, as raw octets. `cargo +nightly fuzz run fpdu_stream` in iwarp/.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| common::fuzz::fpdu_stream(data));
