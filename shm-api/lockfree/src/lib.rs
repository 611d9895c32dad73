//! All lock-free code of the project: the synchronisation steps of the shared-memory rings
//! ([`rings`]) and of the table of memory keys ([`epoch`], [`key_cell`]).
//!
//! It is written against the [`sync`] facade, so that the code which loom explores is the code
//! that ships: `RUSTFLAGS="--cfg loom" cargo test -p siw-lockfree --release`.

pub mod epoch;
pub mod key_cell;
pub mod rings;
pub mod sync;
