//! Remote direct memory access protocol (RFC 5040, RFC 7306): its opcodes, the headers of its
//! messages, and the Terminate message.

pub mod atomic_header;
mod opcode;
pub mod terminate;

pub use opcode::*;
