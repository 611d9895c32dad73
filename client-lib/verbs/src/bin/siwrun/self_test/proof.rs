//! Outcomes of checks.

/// Outcome of a check that did not fail.
pub enum Proof {
    /// The feature works; the text says how it was tested.
    Done(String),
    /// The device does not advertise the feature.
    NotAdvertised,
}

/// Outcome of a successful check.
pub fn proof_of(what: impl Into<String>) -> Result<Proof, String> {
    Ok(Proof::Done(what.into()))
}

/// Fails unless `holds`.
pub fn ensure_that(holds: bool, otherwise: &str) -> Result<(), String> {
    holds.then_some(()).ok_or_else(|| otherwise.to_owned())
}

/// Fails unless the call was refused.
pub fn ensure_refused<T>(result: Result<T, String>, what: &str) -> Result<(), String> {
    match result {
        Err(_) => Ok(()),
        Ok(_) => Err(format!("{what} is accepted")),
    }
}
