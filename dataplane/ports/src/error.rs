//! Errors of ports.

/// Result of the functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error in words that an operator can act on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// DPDK failed, or the configuration or the state of the port does not allow the call.
    #[error(transparent)]
    Port(#[from] dpdk::Error),

    /// An interface of the kernel, or one of its sockets, cannot be used.
    #[error(transparent)]
    Kernel(#[from] siw_xdp::Error),

    /// Ports of this kind lack the function.
    #[error("port `{port}`: {what} is not possible: {why}")]
    Unsupported {
        /// Name of the port.
        port: String,
        /// The function.
        what: &'static str,
        /// Kind of the port.
        why: &'static str,
    },
}
