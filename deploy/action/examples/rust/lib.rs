//! See `tests/loopback.rs`.
