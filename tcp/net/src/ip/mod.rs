//! IP fragmentation and reassembly, and ICMP errors.

pub(crate) mod fragmentation;
pub(crate) mod icmp_errors;
pub(crate) mod reassembly;
