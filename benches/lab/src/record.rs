//! Reports of earlier runs: their reader, the comparison of two, and the matrix of many.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::expect::{Evidence, Expected, Peer};
use crate::report::{Settings, VERSION};
use crate::script::Verdict;
use crate::stream::Role;

/// A report as [`crate::report::Report`] wrote it, without its frames.
#[derive(Debug, Deserialize)]
pub struct Record {
    pub settings: Settings,
    pub peer: Option<String>,
    pub results: Vec<Row>,
}

#[derive(Debug, Deserialize)]
pub struct Row {
    pub name: String,
    pub case: String,
    pub group: String,
    pub role: Role,
    pub verdict: Verdict,
    pub reason: String,
    /// Reason that the run's peer file gave for this verdict.
    #[serde(default)]
    pub known: Option<String>,
    pub seconds: f64,
}

impl Record {
    /// Reads the report in the folder of a run.
    pub fn read(folder: &Path) -> Result<Record> {
        let file = folder.join("run.json");
        let text = std::fs::read_to_string(&file).with_context(|| {
            format!("cannot read {}: is it the folder of a run?", file.display())
        })?;
        let json: serde_json::Value = serde_json::from_str(&text)
            .with_context(|| format!("{} is no report", file.display()))?;
        let version = json["version"].as_u64();
        if version != Some(VERSION.into()) {
            let found = version.map_or("none".to_owned(), |v| v.to_string());
            bail!(
                "{} has version {found}, this program reads {VERSION}",
                file.display()
            );
        }
        serde_json::from_value(json).with_context(|| format!("{} is no report", file.display()))
    }

    /// Verdict on an instance, and the reason of a verdict other than pass.
    pub fn verdict(&self, name: &str) -> Result<(Verdict, String)> {
        let row = self.results.iter().find(|row| row.name == name);
        let row = row.with_context(|| {
            format!(
                "the run lacks {name}: it has to be one of all cases, with --hazard and --agent"
            )
        })?;
        let reason = row.known.as_ref().unwrap_or(&row.reason);
        Ok((row.verdict, reason.clone()))
    }

    /// Peer file with the verdicts of this run other than pass; for an instance that `again` has too, how often they
    /// were seen. The reasons are those of the run's peer file, else those of the lab; `peer` gives the rest.
    pub fn peer_file(&self, mut peer: Peer, again: &[Record]) -> Result<String> {
        peer.expect.clear();
        for rows in self.results.chunk_by(|a, b| a.case == b.case) {
            let mut found: Vec<_> = rows.iter().map(|row| expected_of(row, again)).collect();
            let told = |e: &Option<Expected>| e.as_ref().map(|e| (e.verdict, e.seen.clone()));
            if found.iter().all(|e| told(e) == told(&found[0])) {
                found.truncate(1);
                if let Some(Some(first)) = found.first_mut() {
                    first.case.clone_from(&rows[0].case);
                }
            }
            peer.expect.extend(found.into_iter().flatten());
        }
        Ok(toml::to_string(&peer)?)
    }

    /// Name of the target: that of its peer file, else its address.
    fn target(&self) -> &str {
        let settings = &self.settings;
        self.peer
            .as_deref()
            .or(settings.target.as_deref())
            .or(settings.via.as_deref())
            .unwrap_or("target")
    }
}

/// What a peer file says of an instance: the most frequent verdict of all runs other than pass. `None`: it passed in
/// each of them.
fn expected_of(row: &Row, again: &[Record]) -> Option<Expected> {
    let others = again.iter().flat_map(|record| &record.results);
    let others = others.filter(|other| other.name == row.name);
    let all: Vec<&Row> = std::iter::once(row).chain(others).collect();
    let bad: Vec<&Row> = all
        .iter()
        .copied()
        .filter(|row| row.verdict > Verdict::Recorded)
        .collect();
    let count = |verdict| bad.iter().filter(|row| row.verdict == verdict).count();
    // Of verdicts that are as frequent, the one of the first run.
    let row = bad.iter().rev().max_by_key(|row| count(row.verdict))?;
    Some(Expected {
        case: row.name.clone(),
        verdict: row.verdict,
        seen: (bad.len() < all.len()).then(|| format!("{} of {}", bad.len(), all.len())),
        reason: row.known.as_ref().unwrap_or(&row.reason).clone(),
        evidence: Evidence::Seen,
    })
}

/// Differences between two runs.
#[derive(Debug)]
pub struct Comparison {
    pub text: String,
    /// An instance has a worse verdict than before, or is missing.
    pub worse: bool,
}

/// A change of duration counts from this factor on, in seconds and as a ratio.
const SLOWER_BY: f64 = 1.0;
const SLOWER_TIMES: f64 = 2.0;

/// Compares the verdicts of `after` with those of `before`.
pub fn compare(before: &Record, after: &Record) -> Comparison {
    let rows = |record: &'_ Record| -> BTreeMap<String, usize> {
        let names = record.results.iter().enumerate();
        names.map(|(at, row)| (row.name.clone(), at)).collect()
    };
    let (old, new) = (rows(before), rows(after));
    let mut sections: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut add = |section, text| sections.entry(section).or_default().push(text);
    let mut same = 0;
    for (name, at) in &old {
        let was = &before.results[*at];
        let Some(is) = new.get(name).map(|at| &after.results[*at]) else {
            add("missing", format!("{name}: was {}", was.verdict.name()));
            continue;
        };
        let change = format!("{name}: {} -> {}", was.verdict.name(), is.verdict.name());
        if is.verdict > was.verdict {
            add("broken", format!("{change}; {}", is.reason));
        } else if is.verdict < was.verdict {
            add("fixed", change);
        } else if is.verdict > Verdict::Recorded && is.reason != was.reason {
            let text = format!("{name}: {}\n    was: {}", is.reason, was.reason);
            add("other reason", text);
        } else {
            same += 1;
        }
        let (slow, fast) = (is.seconds.max(was.seconds), is.seconds.min(was.seconds));
        if slow - fast > SLOWER_BY && slow > fast * SLOWER_TIMES {
            let text = format!("{name}: {:.1} s -> {:.1} s", was.seconds, is.seconds);
            add("other duration", text);
        }
    }
    for (name, at) in new.iter().filter(|(name, _)| !old.contains_key(*name)) {
        let verdict = after.results[*at].verdict.name();
        add("new", format!("{name}: {verdict}"));
    }
    let mut text = String::new();
    for section in [
        "broken",
        "missing",
        "fixed",
        "other reason",
        "other duration",
        "new",
    ] {
        let Some(lines) = sections.get(section) else {
            continue;
        };
        let _ = writeln!(text, "{section}: {}", lines.len());
        for line in lines {
            let _ = writeln!(text, "  {line}");
        }
    }
    let _ = writeln!(text, "{same} of {} instances as before", old.len());
    Comparison {
        text,
        worse: sections.contains_key("broken") || sections.contains_key("missing"),
    }
}

/// Folders with a report: `folder` itself, and those directly below it.
fn runs_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut found: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .chain([folder.to_owned()])
        .filter(|path| path.join("run.json").is_file())
        .collect();
    found.sort();
    Ok(found)
}

/// Matrix of the runs below a folder in Markdown: groups by targets, each in both roles.
pub fn matrix(folder: &Path) -> Result<String> {
    let mut columns = Vec::new();
    for run in runs_below(folder)? {
        columns.push((run.clone(), Record::read(&run)?));
    }
    if columns.is_empty() {
        bail!("no folder with a run.json below {}", folder.display());
    }
    let groups: BTreeSet<&str> = columns
        .iter()
        .flat_map(|(_, record)| record.results.iter().map(|row| row.group.as_str()))
        .collect();
    let mut text = String::from("| group |");
    for (run, record) in &columns {
        let folder = run.file_name().unwrap_or_default().to_string_lossy();
        let _ = write!(
            text,
            " {} ({folder}) as responder | as initiator |",
            record.target()
        );
    }
    text.push_str("\n|---|");
    text.push_str(&"---|---|".repeat(columns.len()));
    text.push('\n');
    for group in groups.iter().copied().map(Some).chain([None]) {
        let _ = write!(text, "| {} |", group.unwrap_or("all"));
        for (_, record) in &columns {
            for role in [Role::Responder, Role::Initiator] {
                let rows = record
                    .results
                    .iter()
                    .filter(|row| row.role == role && group.is_none_or(|group| row.group == group));
                let _ = write!(text, " {} |", cell(rows));
            }
        }
        text.push('\n');
    }
    text.push_str(
        "\nInstances that passed, of all; then those with another verdict. Recorded: of level MAY, not judged.\n",
    );
    Ok(text)
}

fn cell<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let mut counts: BTreeMap<Verdict, usize> = BTreeMap::new();
    for row in rows {
        *counts.entry(row.verdict).or_default() += 1;
    }
    let total: usize = counts.values().sum();
    if total == 0 {
        return "-".into();
    }
    let passed = counts.get(&Verdict::Pass).copied().unwrap_or(0);
    let mut text = format!("{passed}/{total}");
    for (verdict, count) in counts.range(Verdict::Recorded..) {
        let _ = write!(text, ", {count} {}", verdict.name());
    }
    text
}
