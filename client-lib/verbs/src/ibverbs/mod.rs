//! libibverbs: the objects of verbs(3) around those of the crate `siw`.
//!
//! | file | manual pages |
//! |---|---|
//! | `exports.rs` | the table of symbols |
//! | `device.rs`, `context.rs`, `attributes.rs`, `port.rs`, `gid.rs` | devices, their contexts, what they can do |
//! | `names.rs`, `rates.rs`, `sysfs.rs`, `fork.rs` | text of numbers, files, fork |
//! | `unsupported.rs` | what iWARP does not have, and the kernel's own interfaces |

pub mod attributes;
pub mod context;
pub mod device;
mod exports;
mod fork;
pub mod gid;
mod names;
mod port;
mod rates;
mod sysfs;
mod unsupported;
