//! Loss detection and recovery (RFC 6675, RFC 8985): the scoreboard, which segments are declared
//! lost and when, and the withdrawal of wrong loss marks. The reaction of the window is decided in
//! [`crate::congestion`].

pub(crate) mod rack;
pub(crate) mod recovery;
pub(crate) mod sacked_ranges;
#[cfg(test)]
mod tests;
