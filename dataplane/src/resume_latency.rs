//! Limits on the time that the kernel takes to bring workers' cores out of idle states, which delays
//! the wake-up of a sleeping worker. The limit is PM QoS of each core,
//! `power/pm_qos_resume_latency_us` (Linux, Documentation/ABI/testing/sysfs-devices-power).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::unistd::AccessFlags;

use crate::host::HostError;

/// Folder in which the kernel shows its cores.
pub const CORES_FOLDER: &str = "/sys/devices/system/cpu";
/// The kernel's notation for no limit.
const UNLIMITED: &str = "0";
/// The kernel's notation for no latency: the core polls instead of halting.
const NONE_ACCEPTED: &str = "n/a";

/// Limits that hold until this is dropped. A killed process leaves them in place.
pub struct ResumeLatencyLimits(Vec<LimitedCore>);

struct LimitedCore {
    file: PathBuf,
    /// Previous content of the file.
    before: String,
}

fn file_of(folder: &Path, core: usize) -> PathBuf {
    folder.join(format!("cpu{core}/power/pm_qos_resume_latency_us"))
}

fn refusal(folder: &Path, core: usize, source: io::Error) -> HostError {
    HostError::ResumeLatency {
        core,
        path: file_of(folder, core).display().to_string(),
        source,
    }
}

/// Checks that the limits of these cores can be set, and changes nothing.
///
/// # Errors
/// [`HostError::ResumeLatency`].
pub fn check_access(folder: &Path, cores: &[usize]) -> Result<(), HostError> {
    for &core in cores {
        nix::unistd::access(&file_of(folder, core), AccessFlags::W_OK)
            .map_err(|error| refusal(folder, core, error.into()))?;
    }
    Ok(())
}

impl ResumeLatencyLimits {
    /// Limits the idle states of `cores` to those with a wake-up within `microseconds`; 0 allows none.
    ///
    /// # Errors
    /// [`HostError::ResumeLatency`]; limits that were set already are restored.
    pub fn set(folder: &Path, cores: &[usize], microseconds: u32) -> Result<Self, HostError> {
        let limit = match microseconds {
            0 => NONE_ACCEPTED.to_owned(),
            _ => microseconds.to_string(),
        };
        let mut limits = ResumeLatencyLimits(Vec::new());
        for &core in cores {
            let file = file_of(folder, core);
            let before = fs::read_to_string(&file)
                .and_then(|before| fs::write(&file, &limit).map(|()| before))
                .map_err(|error| refusal(folder, core, error))?;
            let before = match before.trim() {
                // Left by a daemon that was killed.
                before if before == limit => UNLIMITED,
                before => before,
            };
            let before = before.to_owned();
            limits.0.push(LimitedCore { file, before });
        }
        Ok(limits)
    }
}

impl Drop for ResumeLatencyLimits {
    fn drop(&mut self) {
        for LimitedCore { file, before } in &self.0 {
            if let Err(error) = fs::write(file, before) {
                tracing::warn!(
                    "the limit in {} could not be restored: {error}; write {before} to it",
                    file.display()
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cores as the kernel shows them, in a temporary folder.
    fn folder_with(values: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (core, value) in values.iter().enumerate() {
            let file = file_of(folder.path(), core);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{value}\n")).unwrap();
        }
        folder
    }

    fn values(folder: &Path, count: usize) -> Vec<String> {
        let value = |core| fs::read_to_string(file_of(folder, core)).unwrap();
        (0..count)
            .map(|core| value(core).trim().to_owned())
            .collect()
    }

    #[test]
    fn limits_hold_for_these_cores_until_they_are_dropped() {
        let folder = folder_with(&["0", "300", "n/a", "70"]);
        let path = folder.path();
        let limits = ResumeLatencyLimits::set(path, &[0, 1, 2], 0).unwrap();
        assert_eq!(values(path, 4), ["n/a", "n/a", "n/a", "70"]);
        drop(limits);
        assert_eq!(values(path, 4), ["0", "300", "0", "70"]);
        let limits = ResumeLatencyLimits::set(path, &[3], 20).unwrap();
        assert_eq!(values(path, 4), ["0", "300", "0", "20"]);
        drop(limits);
        assert_eq!(values(path, 4), ["0", "300", "0", "70"]);
    }

    #[test]
    fn a_core_that_cannot_be_limited_is_named_and_the_others_are_as_before() {
        let folder = folder_with(&["0"]);
        let path = folder.path();
        for error in [
            check_access(path, &[0, 7]).err(),
            ResumeLatencyLimits::set(path, &[0, 7], 10).err(),
        ] {
            let text = error.expect("core 7 is not there").to_string();
            assert!(text.contains("core 7") && text.contains("resume_latency_us"));
        }
        check_access(path, &[0]).unwrap();
        assert_eq!(values(path, 1), ["0"]);
    }
}
