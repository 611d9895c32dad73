//! Names of errno values and of completion statuses, as the headers have them.

use std::ffi::c_int;

const ERRNOS: [(&str, c_int); 24] = [
    ("EPERM", libc::EPERM),
    ("ENOENT", libc::ENOENT),
    ("EINTR", libc::EINTR),
    ("EIO", libc::EIO),
    ("EAGAIN", libc::EAGAIN),
    ("ENOMEM", libc::ENOMEM),
    ("EACCES", libc::EACCES),
    ("EFAULT", libc::EFAULT),
    ("EBUSY", libc::EBUSY),
    ("ENODEV", libc::ENODEV),
    ("EINVAL", libc::EINVAL),
    ("EMFILE", libc::EMFILE),
    ("ENOSPC", libc::ENOSPC),
    ("ENOSYS", libc::ENOSYS),
    ("EOPNOTSUPP", libc::EOPNOTSUPP),
    ("EADDRNOTAVAIL", libc::EADDRNOTAVAIL),
    ("ENETDOWN", libc::ENETDOWN),
    ("ENETUNREACH", libc::ENETUNREACH),
    ("ECONNABORTED", libc::ECONNABORTED),
    ("ECONNRESET", libc::ECONNRESET),
    ("ENOBUFS", libc::ENOBUFS),
    ("ETIMEDOUT", libc::ETIMEDOUT),
    ("ECONNREFUSED", libc::ECONNREFUSED),
    ("EHOSTUNREACH", libc::EHOSTUNREACH),
];

/// `enum ibv_wc_status` without its prefix IBV_WC_, by number.
const STATUSES: [&str; 24] = [
    "SUCCESS",
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
    "TM_ERR",
    "TM_RNDV_INCOMPLETE",
];

/// Finds an errno by its name.
///
/// # Errors
/// A message with the known names.
pub fn errno_of(name: &str) -> Result<c_int, String> {
    let found = ERRNOS.iter().find(|(known, _)| *known == name);
    found.map(|(_, number)| *number).ok_or_else(|| {
        let names: Vec<_> = ERRNOS.iter().map(|(known, _)| *known).collect();
        format!("unknown errno {name:?}: the names are {}", names.join(", "))
    })
}

/// Name of an errno.
pub fn errno_name(errno: c_int) -> &'static str {
    let found = ERRNOS.iter().find(|(_, number)| *number == errno);
    found.map_or("an errno", |(name, _)| name)
}

/// Finds the number of a failed completion's status by its name, with or without IBV_WC_.
///
/// # Errors
/// A message with the known names.
pub fn status_of(name: &str) -> Result<u8, String> {
    let short = name.strip_prefix("IBV_WC_").unwrap_or(name);
    match STATUSES.iter().position(|known| *known == short) {
        Some(0) => Err("SUCCESS is no failure".to_owned()),
        Some(number) => Ok(number as u8),
        None => Err(format!(
            "unknown completion status {name:?}: the names are {}",
            STATUSES[1..].join(", ")
        )),
    }
}

/// Name of a completion's status.
pub fn status_name(status: u8) -> &'static str {
    STATUSES.get(usize::from(status)).unwrap_or(&"a status")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_those_of_the_headers() {
        assert_eq!(errno_of("ENOMEM"), Ok(12));
        assert_eq!(errno_name(12), "ENOMEM");
        assert_eq!(status_of("IBV_WC_RETRY_EXC_ERR"), Ok(12));
        assert_eq!(status_of("GENERAL_ERR"), Ok(21));
        assert_eq!(status_name(5), "WR_FLUSH_ERR");
        assert!(status_of("SUCCESS").is_err());
        assert!(errno_of("ENOMEMORY").unwrap_err().contains("ENOMEM,"));
    }
}
