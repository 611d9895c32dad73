//! Memory windows and fast registrations with arguments of all kinds. `cargo +nightly fuzz run keys`
//! in shm-api/, or `deploy/sanitize fuzz`.
#![no_main]

#[path = "../../memory/tests/common/hostile.rs"]
mod hostile;

libfuzzer_sys::fuzz_target!(|data: &[u8]| hostile::change_keys(data));
