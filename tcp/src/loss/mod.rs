//! Loss detection and recovery (RFC 6675, RFC 8985): the scoreboard, what is judged to be lost and
//! when, and what happens to those judgements when they turn out wrong. How the window reacts is
//! decided in [`crate::congestion`].

pub(crate) mod rack;
pub(crate) mod recovery;
pub(crate) mod sacked_ranges;
#[cfg(test)]
mod tests;
