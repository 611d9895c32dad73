//! libibverbs: the objects of verbs(3) around those of the crate `siw`.
//!
//! | file | manual pages |
//! |---|---|
//! | `exports.rs`, `slots.rs` | the tables of symbols, and of functions in structs |
//! | `device.rs`, `open.rs`, `context.rs`, `attributes.rs`, `port.rs`, `gid.rs` | devices, their contexts, attributes |
//! | `pd.rs`, `mr.rs`, `mw.rs`, `buffer.rs` | protection domains, memory |
//! | `cq.rs`, `cq_ex.rs`, `channel.rs`, `async_event.rs`, `shared_events.rs` | completions and events |
//! | `qp.rs`, `qp_state.rs`, `post.rs`, `qp_ex.rs`, `send_flags.rs`, `srq.rs` | queue pairs and work requests |
//! | `faulty/` | faults of the plan, in place of the fast functions |
//! | `comp_counter.rs` | completion counters |
//! | `address_vector.rs` | address vectors and handles |
//! | `objects.rs`, `users.rs` | objects by number, and their use counts |
//! | `names.rs`, `rates.rs`, `sysfs.rs`, `fork.rs` | text of numbers, files, fork |
//! | `unsupported.rs` | features that siwd does not have, and the kernel's own interfaces |

pub mod address_vector;
pub mod async_event;
pub mod attributes;
mod buffer;
pub mod channel;
mod comp_counter;
pub mod context;
pub mod cq;
mod cq_ex;
pub mod device;
mod exports;
pub mod faulty;
mod fork;
pub mod gid;
pub mod mr;
mod multicast;
pub mod mw;
mod names;
mod objects;
pub mod open;
pub mod pd;
pub mod port;
mod post;
pub mod qp;
mod qp_ex;
pub mod qp_state;
mod rates;
mod send_flags;
pub mod shared_events;
mod slots;
pub mod srq;
mod sysfs;
mod unsupported;
pub mod users;

pub use channel::SharedChannel;
