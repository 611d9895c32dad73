//! What a check says.

/// How a check ended that did not fail.
pub enum Proof {
    /// What was done.
    Done(String),
    /// The device does not claim to be able to.
    NotAdvertised,
}

/// It was done.
pub fn proof_of(what: impl Into<String>) -> Result<Proof, String> {
    Ok(Proof::Done(what.into()))
}

/// An error unless it holds.
pub fn ensure_that(holds: bool, otherwise: &str) -> Result<(), String> {
    holds.then_some(()).ok_or_else(|| otherwise.to_owned())
}

/// An error unless the call is refused.
pub fn ensure_refused<T>(result: Result<T, String>, what: &str) -> Result<(), String> {
    match result {
        Err(_) => Ok(()),
        Ok(_) => Err(format!("{what} is accepted")),
    }
}
