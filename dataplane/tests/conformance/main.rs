//! The numbered tests of iWARP, byte by byte against a running siwd over a DPDK port: a
//! hand-written peer sends the octets from the RFCs and checks the answers. A test named `c27_...`
//! covers number 27; `iwarp/TESTS.md` has the list.

#[path = "../common/mod.rs"]
mod common;

mod bench;
mod closed_window;
mod extensions;
mod fpdus;
mod markers;
mod port_mapper;
mod presets;
mod rdmap;
mod replies;
mod requests;
mod security;
mod streaming;
mod tagged;
mod untagged;
mod windows;
mod wrap;
