//! Accounts of clients: quotas, and the heap that each object is charged with.

pub mod heap;
pub mod quotas;
