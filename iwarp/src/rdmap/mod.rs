//! The remote direct memory access protocol (RFC 5040, RFC 7306): its opcodes, the headers of its
//! messages, and the Terminate message. PROTOCOL.md section 2.5 shows the formats.

pub mod atomic_header;
mod opcode;
mod read_request;
pub mod terminate;
mod terminate_code;

pub use opcode::{IMMEDIATE_FOR_NEXT_SEND, IMMEDIATE_LEN, RDMAP_VERSION, RdmapOpcode};
pub use read_request::{READ_REQUEST_LEN, ReadRequestHeader};
