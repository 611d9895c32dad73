//! Cases of the catalogue that have no file yet.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde::Serialize;

/// A line for each case: its id, what it needs, its title.
const TABLE: &str = include_str!("../catalogue");

/// Part of the lab that a missing case needs first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Needs {
    /// Steps or a run that case files cannot describe yet.
    Steps,
    /// The agent on the target.
    Agent,
    /// The agent, and a setting of the target.
    Knobs,
    /// Something that programs or links do not offer; the title ends with the reason.
    Impossible,
}

impl Needs {
    pub fn name(self) -> &'static str {
        match self {
            Needs::Steps => "steps",
            Needs::Agent => "agent",
            Needs::Knobs => "knobs",
            Needs::Impossible => "impossible",
        }
    }
}

#[derive(Debug, Serialize)]
pub struct Missing {
    pub case: &'static str,
    pub needs: Needs,
    pub title: &'static str,
}

/// Reads the table of missing cases.
pub fn missing() -> Result<Vec<Missing>> {
    let mut all = Vec::new();
    for (index, line) in TABLE.lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let context = || format!("catalogue:{}: {line}", index + 1);
        let (case, rest) = line.split_once(' ').with_context(context)?;
        let (needs, title) = rest.trim_start().split_once(' ').with_context(context)?;
        let needs = match needs {
            "steps" => Needs::Steps,
            "agent" => Needs::Agent,
            "knobs" => Needs::Knobs,
            "impossible" => Needs::Impossible,
            _ => bail!(
                "{}: {needs} is not steps, agent, knobs or impossible",
                context()
            ),
        };
        all.push(Missing {
            case,
            needs,
            title: title.trim_start(),
        });
    }
    Ok(all)
}

/// Counts by need, for people.
pub fn summary(missing: &[Missing]) -> String {
    let mut counts: BTreeMap<Needs, usize> = BTreeMap::new();
    for case in missing {
        *counts.entry(case.needs).or_default() += 1;
    }
    let words: Vec<_> = counts
        .iter()
        .map(|(needs, count)| format!("{count} ({})", needs.name()))
        .collect();
    words.join(", ")
}
