//! Expected verdicts of a known target: `peers/*.toml`.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::script::{Outcome, Verdict};

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    pub peer: String,
    /// Terminates have layer and type exchanged, which only TRM-01 judges.
    #[serde(default)]
    pub swapped_terminates: bool,
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    #[serde(default)]
    pub expect: Vec<Expected>,
}

/// A verdict other than pass that is no news.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Expected {
    /// Id of a case, with `/NAME=VALUE` if it is about one instance.
    pub case: String,
    pub verdict: Verdict,
    /// How often it was seen, such as `2 of 3`, where the other runs passed: the verdict depends on chance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<String>,
    pub reason: String,
    pub evidence: Evidence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Evidence {
    Seen,
    Source,
    Guess,
}

impl Peer {
    pub fn read(file: &Path, cases: &[Case]) -> Result<Peer> {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let peer: Peer =
            toml::from_str(&text).with_context(|| format!("{} has an error", file.display()))?;
        for expected in &peer.expect {
            let id = expected.case.split('/').next().unwrap_or_default();
            if !cases.iter().any(|case| case.id == id) {
                bail!("{}: case {} does not exist", file.display(), expected.case);
            }
        }
        Ok(peer)
    }

    /// Entry about an instance: that of its name, else that of its case.
    pub fn entry(&self, name: &str) -> Option<&Expected> {
        let id = name.split('/').next().unwrap_or(name);
        let exact = self.expect.iter().find(|e| e.case == name);
        exact.or_else(|| self.expect.iter().find(|e| e.case == id))
    }

    /// Difference to the expectation: `None` if the outcome is no news.
    pub fn news(&self, outcome: &Outcome) -> Option<String> {
        let entry = self.entry(&outcome.name());
        let expected = entry.map_or(Verdict::Pass, |e| e.verdict);
        let may_pass = entry.is_none_or(|e| e.verdict == Verdict::Pass || e.seen.is_some());
        let passed = matches!(outcome.verdict, Verdict::Pass | Verdict::Recorded);
        let same = expected == outcome.verdict || may_pass && passed;
        (!same).then(|| {
            format!(
                "expected {}, is {}",
                expected.name(),
                outcome.verdict.name()
            )
        })
    }

    /// Reason that the peer file gives for an expected verdict.
    pub fn reason(&self, outcome: &Outcome) -> Option<&str> {
        self.entry(&outcome.name())
            .filter(|e| e.verdict == outcome.verdict)
            .map(|e| e.reason.as_str())
    }
}

/// Without a peer file only failures are news.
pub fn news_without_peer(outcome: &Outcome) -> Option<String> {
    let bad = matches!(
        outcome.verdict,
        Verdict::Fail | Verdict::Dead | Verdict::Inconclusive
    );
    bad.then(|| outcome.verdict.name().to_owned())
}
