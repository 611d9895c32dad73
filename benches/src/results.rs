//! Result files of `siw-perf --json`: one line each for `bw`, `lat`, `rate`, `peers`, `one-side`,
//! `raw` and `limits`, in any order.

use crate::limits::MachineLimits;
use crate::one_side::OneSideReport;
use crate::peers::PeersReport;
use crate::raw::RawReport;
use crate::report::PerfReport;
use anyhow::{anyhow, bail};
use serde_json::Value;
use std::path::Path;

/// All results of some files.
#[derive(Debug, Default)]
pub struct Results {
    /// Results of `bw`, `lat` and `rate`.
    pub transfers: Vec<PerfReport>,
    /// Results of `peers`.
    pub peers: Vec<PeersReport>,
    /// Results of `one-side`.
    pub one_side: Vec<OneSideReport>,
    /// Results of `raw`.
    pub raw: Vec<RawReport>,
    /// Results of `limits`.
    pub limits: Vec<MachineLimits>,
}

impl Results {
    /// Reads a file; an error names the invalid line.
    pub fn read(path: &Path) -> anyhow::Result<Results> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| anyhow!("{}: {error}", path.display()))?;
        let mut results = Results::default();
        for (index, line) in text.lines().enumerate() {
            if !line.trim().is_empty() {
                results.add_line(line).map_err(|error| {
                    anyhow!(
                        "{}:{}: no result of siw-perf --json: {error}",
                        path.display(),
                        index + 1
                    )
                })?;
            }
        }
        if results.is_empty() {
            bail!("{}: the file has no results", path.display());
        }
        Ok(results)
    }

    /// Adds the results of another file.
    pub fn append(&mut self, other: Results) {
        self.transfers.extend(other.transfers);
        self.peers.extend(other.peers);
        self.one_side.extend(other.one_side);
        self.raw.extend(other.raw);
        self.limits.extend(other.limits);
    }

    fn is_empty(&self) -> bool {
        self.transfers.is_empty()
            && self.peers.is_empty()
            && self.one_side.is_empty()
            && self.raw.is_empty()
            && self.limits.is_empty()
    }

    fn add_line(&mut self, line: &str) -> Result<(), serde_json::Error> {
        let value: Value = serde_json::from_str(line)?;
        if value.get("mode").is_some() {
            self.transfers.push(serde_json::from_value(value)?);
        } else if value.get("ratios").is_some() {
            self.peers.push(serde_json::from_value(value)?);
        } else if value.get("one_side").is_some() {
            self.one_side.push(serde_json::from_value(value)?);
        } else if value.get("raw").is_some() {
            self.raw.push(serde_json::from_value(value)?);
        } else {
            self.limits.push(serde_json::from_value(value)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Mode;
    use crate::report::example_report;

    fn read(text: &str) -> anyhow::Result<Results> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.json");
        std::fs::write(&path, text).unwrap();
        Results::read(&path)
    }

    #[test]
    fn what_siw_perf_prints_is_read_again() {
        let report = example_report(Mode::Bw);
        let results = read(&format!("{}\n\n", report.to_json())).unwrap();
        assert_eq!(results.transfers.len(), 1);
        assert_eq!(results.transfers[0].to_json(), report.to_json());
    }

    #[test]
    fn results_of_raw_frames_are_told_from_others() {
        let line = r#"{"raw":"macswap","size":64,"burst":32,"payload":"copy","secs":1.0,"ports":[],
            "series":[],"conditions":{"steal_percent":0,"interrupts":0,"cache_line_ns_before":null,
            "cache_line_ns_after":null,"disturbed":null},"machine":{"cpu":"","processors":1,
            "virtual_machine":true,"kernel":"","dpdk":"","commit":""}}"#;
        let results = read(&line.replace('\n', "")).unwrap();
        assert_eq!(results.raw.len(), 1);
        assert_eq!(results.raw[0].title(), "macswap 64 B by copy, ");
    }

    #[test]
    fn a_line_that_is_no_result_is_named() {
        let error = read("{}\n").unwrap_err().to_string();
        assert!(error.contains("results.json:1: no result"), "{error}");
        assert!(read("").unwrap_err().to_string().contains("no results"));
        assert!(Results::read(Path::new("/nonexistent")).is_err());
    }
}
