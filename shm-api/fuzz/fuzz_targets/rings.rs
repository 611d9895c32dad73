//! Rings, doorbells and completion queues that a client overwrites. `cargo +nightly fuzz run rings`
//! in shm-api/, or `deploy/sanitize fuzz`.
#![no_main]

#[path = "../../tests/common/hostile_rings.rs"]
mod hostile;

libfuzzer_sys::fuzz_target!(|data: &[u8]| hostile::write_over_rings(data));
