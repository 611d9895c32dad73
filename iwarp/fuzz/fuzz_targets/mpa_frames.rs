//! MPA requests and replies, in any fragments. `cargo +nightly fuzz run mpa_frames` in iwarp/.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| common::fuzz::mpa_frames(data));
