//! Counts the kernel's free hugepages, so that a missing reservation is reported before DPDK
//! starts. Called by `Eal::init` and by the daemon's `--check`.

use crate::{Error, Result};
use std::fs;
use std::path::Path;

const SYSFS: &str = "/sys/kernel/mm/hugepages";

/// Counters of one hugepage size of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HugepageSize {
    /// Size of a page in KiB.
    pub page_kb: u64,
    /// Pages that the kernel has reserved.
    pub total: u64,
    /// Reserved pages that are unused.
    pub free: u64,
}

/// Every hugepage size of this machine, smallest first; empty if the kernel supports none.
pub fn hugepage_sizes() -> Vec<HugepageSize> {
    from_sysfs(Path::new(SYSFS))
}

fn from_sysfs(dir: &Path) -> Vec<HugepageSize> {
    let count = |path: &Path| -> u64 {
        fs::read_to_string(path)
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0)
    };
    let mut sizes: Vec<HugepageSize> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let kb = name
                .to_str()?
                .strip_prefix("hugepages-")?
                .strip_suffix("kB")?;
            Some(HugepageSize {
                page_kb: kb.parse().ok()?,
                total: count(&entry.path().join("nr_hugepages")),
                free: count(&entry.path().join("free_hugepages")),
            })
        })
        .collect();
    sizes.sort_by_key(|size| size.page_kb);
    sizes
}

/// Checks that `memory_mb` MiB of hugepages are free, over all sizes together.
///
/// # Errors
/// [`Error::Hugepages`], which names the counter to raise and its value.
pub fn check_free_hugepages(memory_mb: u32) -> Result<()> {
    check_sizes(&hugepage_sizes(), memory_mb)
}

fn check_sizes(sizes: &[HugepageSize], memory_mb: u32) -> Result<()> {
    let needed_kb = u64::from(memory_mb) * 1024;
    let free_kb: u64 = sizes.iter().map(|size| size.free * size.page_kb).sum();
    if free_kb >= needed_kb {
        return Ok(());
    }
    let smallest = sizes.first().cloned().unwrap_or(HugepageSize {
        page_kb: 2048,
        total: 0,
        free: 0,
    });
    let missing = (needed_kb - free_kb).div_ceil(smallest.page_kb);
    Err(Error::Hugepages {
        needed_pages: needed_kb.div_ceil(smallest.page_kb),
        free_pages: smallest.free,
        page_kb: smallest.page_kb,
        suggested: smallest.total + missing,
        path: format!("{SYSFS}/hugepages-{}kB/nr_hugepages", smallest.page_kb),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_mb(total: u64, free: u64) -> HugepageSize {
        HugepageSize {
            page_kb: 2048,
            total,
            free,
        }
    }

    #[test]
    fn missing_pages_are_counted_on_top_of_those_others_use() {
        let err = check_sizes(&[two_mb(10, 3)], 64).unwrap_err().to_string();
        assert!(
            err.contains("32 of 2048 KiB are needed, 3 are free"),
            "{err}"
        );
        assert!(
            err.contains("echo 39 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
            "{err}"
        );
    }

    #[test]
    fn pages_of_all_sizes_count() {
        let gig = HugepageSize {
            page_kb: 1 << 20,
            total: 1,
            free: 1,
        };
        assert!(check_sizes(&[two_mb(0, 0), gig], 1024).is_ok());
        assert!(check_sizes(&[two_mb(32, 32)], 64).is_ok());
        assert!(check_sizes(&[two_mb(32, 31)], 64).is_err());
    }

    #[test]
    fn a_machine_without_hugepages_is_told_the_default_size() {
        let err = check_sizes(&[], 2).unwrap_err().to_string();
        assert!(err.contains("echo 1 >"), "{err}");
    }
}
