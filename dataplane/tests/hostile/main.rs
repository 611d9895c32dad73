//! Hostile clients and hostile frames: each test has an honest client that must not notice.

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod hostile_clients;
mod hostile_flood;
mod hostile_frames;
mod hostile_memory;
mod hostile_rings;
mod roce_datagrams;
