//! Arbitrary segments of a peer, checked against invariants. `cargo +nightly fuzz run engine` in tcp/.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| common::fuzz::engine(data));
