//! Congestion control: how much may be on the wire, and how fast it leaves.

pub(crate) mod controller;
pub(crate) mod hystart;
pub(crate) mod pacing;
pub(crate) mod window_validation;
