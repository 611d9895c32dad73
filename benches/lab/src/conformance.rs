//! siwd's conformance, case by case: `iwarp/CONFORMANCE.md`.

use std::fmt::Write as _;

use anyhow::Result;

use crate::case::{Case, Level, sort};
use crate::expect::Peer;
use crate::script::{Outcome, Verdict};
use crate::stream::Role;

const HEAD: &str = "\
# Conformance of siwd

Written by `siw-lab conformance FOLDER` from the report of a run of every case against siwd with its default
settings (`deploy/lab/full --publish`). A test checks it against the cases and the expected verdicts,
`benches/lab/peers/siwd.toml`. `siw-lab explain CASE` prints rule and steps of a case; `benches/lab/README.md`
explains levels and verdicts. `TESTS.md` lists the numbered tests of the protocol code, and `PROTOCOL.md` the open
points of the RFCs and siwd's choices.
";

/// Renders the document. `verdict` gives the verdict on an instance, and the reason if it is not pass.
pub fn render(
    cases: &[Case],
    verdict: &dyn Fn(&str) -> Result<(Verdict, String)>,
) -> Result<String> {
    let mut text = String::from(HEAD);
    let mut group = "";
    let (mut instances, mut passed, mut recorded) = (0, 0, 0);
    for case in cases {
        if case.group() != group {
            group = case.group();
            let _ = write!(
                text,
                "\n## {group}\n\n| case | RFC | level | siwd is | instances | result |\n|---|---|---|---|---|---|\n"
            );
        }
        let mut others = Vec::new();
        let all = case.instances();
        // Whatever the target does is allowed: nothing is judged.
        let is_recorded = case.level() == Level::May;
        for params in &all {
            let name = Outcome::of(case, params).name();
            let (verdict, reason) = verdict(&name)?;
            instances += 1;
            match verdict {
                Verdict::Pass | Verdict::Recorded if is_recorded => recorded += 1,
                Verdict::Pass => passed += 1,
                _ => {}
            }
            if verdict == Verdict::Pass || verdict == Verdict::Recorded && is_recorded {
                continue;
            }
            let which = name
                .split_once('/')
                .map_or(String::new(), |(_, params)| format!(" {params}"));
            others.push(format!("{}{which}: {reason}", verdict.name()));
        }
        let rules: Vec<_> = case
            .rules
            .iter()
            .map(|rule| format!("{} {}", rule.rfc, rule.section))
            .collect();
        let role = match case.role {
            Role::Responder => "responder",
            Role::Initiator => "initiator",
        };
        let result = match others.is_empty() {
            true if is_recorded => "recorded".to_owned(),
            true => "pass".to_owned(),
            false => others.join("; "),
        };
        let _ = writeln!(
            text,
            "| {} {} | {} | {} | {role} | {} | {} |",
            case.id,
            case.title.replace('|', "\\|"),
            rules.join(", "),
            case.level().name(),
            all.len(),
            result.replace('|', "\\|")
        );
    }
    let _ = writeln!(
        text,
        "\n{} cases, {instances} instances: {passed} pass, {recorded} are of level MAY and recorded, {} have another verdict.",
        cases.len(),
        instances - passed - recorded
    );
    Ok(text)
}

/// Renders the document from the expected verdicts of a peer file: the text of a run without news.
pub fn expected(mut cases: Vec<Case>, peer: &Peer) -> Result<String> {
    sort(&mut cases);
    render(&cases, &|name| {
        Ok(peer.entry(name).map_or_else(
            || (Verdict::Pass, String::new()),
            |entry| (entry.verdict, entry.reason.clone()),
        ))
    })
}
