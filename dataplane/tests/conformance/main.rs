//! The numbered conformance list of iWARP, byte by byte against a running siwd over a DPDK port: a
//! peer spells out what the RFCs say and checks what comes back. A test whose name begins with
//! `c27_` is of number 27; `iwarp/CONFORMANCE.md` lists them.

#[path = "../common/mod.rs"]
mod common;

mod bench;
mod closed_window;
mod extensions;
mod fpdus;
mod markers;
mod presets;
mod rdmap;
mod replies;
mod requests;
mod security;
mod tagged;
mod untagged;
mod windows;
mod wrap;
