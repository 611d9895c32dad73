//! Raw frames: the link, IP, ARP, NDP, ICMP and segment parsers. `cargo +nightly fuzz run frames` in tcp/.
#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| common::fuzz::frames(data));
