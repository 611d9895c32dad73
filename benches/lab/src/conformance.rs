//! siwd's conformance, case by case: `iwarp/CONFORMANCE.md`.

use std::fmt::Write as _;

use anyhow::Result;

use crate::case::{Case, sort};
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
    let (mut instances, mut passed) = (0, 0);
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
        for params in &all {
            let name = Outcome::of(case, params).name();
            let (verdict, reason) = verdict(&name)?;
            instances += 1;
            if verdict <= Verdict::Recorded {
                passed += 1;
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
        let result = if others.is_empty() {
            "pass".to_owned()
        } else {
            others.join("; ")
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
        "\n{} cases; {passed} of {instances} instances pass.",
        cases.len()
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
