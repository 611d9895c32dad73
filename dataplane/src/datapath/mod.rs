//! Data path between DPDK ports and TCP stacks, shared by the workers of the daemon and the endpoint
//! of `siw-stream`, and generic over the records that connections send.
//!
//! ```text
//!  rx_burst -> WorkerPort::receive -> Stack::receive_burst -> events of connections
//!                   |        ^
//!     frames of other workers' connections: FrameForwarder      loopback frames
//!                                                              |
//!  tx_burst <- PortOutput::transmit_batch <- PortSink <- Stack::flush/poll
//!                                        |
//!                                        '- RecordWriter: the bytes of one record
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `batch_loop.rs` | the loop of a pinned thread: a batch, spinning, sleeping |
//! | `batch_times.rs` | the longest batch of a thread, in processor time |
//! | `clock.rs` | the TSC in nanoseconds |
//! | `port.rs` | one port of one worker: queues, stack, received frames |
//! | `rx_frame.rs` | received frames as TCP holds them |
//! | `forward.rs`, `inbox.rs` | frames from worker to worker |
//! | `output.rs` | TCP's segments become mbuf chains; transmit paths: the port's queue, another worker, loopback |
//! | `idle.rs` | how long a thread may sleep, and its wake-up sources |
//! | `wire_faults.rs`, `loss.rs` | faults that plans inject into frames, and the loss of the configuration |
//! | `timer_hold.rs` | holds retransmission timers while frames may lie in a receive ring |

pub mod batch_loop;
pub(crate) mod batch_times;
pub mod clock;
pub mod forward;
pub mod idle;
pub mod inbox;
pub mod loss;
pub mod output;
pub mod port;
pub mod rx_frame;
pub mod timer_hold;
pub mod wire_faults;

/// One environment for all unit tests of the crate, on normal pages: DPDK starts once in a process.
#[cfg(test)]
pub(crate) fn test_environment() -> &'static dpdk::Eal {
    static EAL: std::sync::OnceLock<dpdk::Eal> = std::sync::OnceLock::new();
    EAL.get_or_init(|| {
        dpdk::Eal::init(dpdk::EalConfig {
            file_prefix: format!("siwd-unit-{}", std::process::id()),
            hugepages: false,
            memory_mb: 64,
            log_level: "error".into(),
            ..dpdk::EalConfig::default()
        })
        .unwrap()
    })
}
