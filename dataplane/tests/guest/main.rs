//! Linux siw and the TCP of Linux in a QEMU guest as peers; QEMU itself as a program.

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod linux_matrix;
mod linux_programs;
mod linux_rxe;
mod linux_siw;
mod qemu_migration;
mod siw_lab;
mod stream_netem;
