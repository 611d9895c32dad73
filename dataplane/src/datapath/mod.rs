//! What a worker of the daemon and the endpoint of `siw-stream` have in common: the clock, received
//! frames as TCP holds them, and when timers wait for frames that may lie in a receive ring.

pub(crate) mod clock;
pub mod rx_frame;
pub(crate) mod timer_hold;
