//! The judge is judged: a perfect reference peer passes, and each fault of a lying one turns the named
//! case red.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::ValueEnum;
use siw_lab::case::{Case, built_in};
use siw_lab::link::{Station, memory_link};
use siw_lab::reference::{Lie, Reference};
use siw_lab::script::{Outcome, Target, Verdict};
use siw_lab::suite::{Instance, run_all};
use siw_lab::via::{PORT, addresses};

fn judge(lie: Option<Lie>, select: impl Fn(&Case) -> bool) -> Vec<Outcome> {
    judge_changed(lie, |_| {}, select)
}

fn judge_changed(
    lie: Option<Lie>,
    change: impl FnOnce(&mut Target),
    select: impl Fn(&Case) -> bool,
) -> Vec<Outcome> {
    let (ours, theirs) = memory_link();
    let (lab, its) = addresses(false);
    let station = Station::start(ours, lab, 20_000);
    let reference = Reference::start(theirs, its, PORT, lie);
    let mac = station.station.resolve(its, Duration::from_secs(10));
    let clients = reference.clients(lab);
    let mut target = Target::new(station.station.clone(), its, mac.unwrap(), PORT, clients);
    change(&mut target);
    let cases = built_in().unwrap();
    let chosen = cases.iter().filter(|case| select(case));
    let instances: Vec<_> = chosen
        .map(|case| Instance {
            case,
            params: case.instances().swap_remove(0),
        })
        .collect();
    assert!(!instances.is_empty());
    run_all(&target, &instances, 4, &AtomicBool::new(false), &|_| {}).outcomes
}

/// Cases about options of IP and TCP, and VLAN tags, which the reference peer does not know.
const BELOW_MPA: [&str; 3] = ["TCP-18", "TCP-19", "TCP-29"];

/// Every case that needs no agent and no setting, the first instance of each. The reference peer does not ask for a
/// ready-to-receive message.
#[test]
fn a_perfect_peer_passes_every_case() {
    let select = |case: &Case| {
        let is_plain = !case.needs_agent() && case.settings.is_empty();
        is_plain && !BELOW_MPA.contains(&case.id.as_str())
    };
    for outcome in judge(None, select) {
        let asks = ["the target does not ask", "is not offered"];
        let is_unasked = outcome.verdict == Verdict::NotSupported
            && asks.iter().any(|text| outcome.reason.contains(text));
        let good = outcome.verdict <= Verdict::Recorded || is_unasked;
        assert!(
            good,
            "{}: {:?} {} {:?}",
            outcome.name(),
            outcome.verdict,
            outcome.reason,
            outcome.notes
        );
    }
}

#[test]
fn each_lie_turns_its_case_red() {
    use Lie::*;
    let lies = [
        (AnyKey, "MPA-03"),
        (EchoReserved, "MPA-20"),
        (ReplyReserved, "MPA-20"),
        (EchoRejection, "MPA-22"),
        (LongPrivateData, "MPA-29"),
        (RevisionUp, "MPA-12"),
        (WholeRequest, "MPA-09"),
        (NoMarkers, "MPA-42"),
        (NoEnhanced, "ENH-02"),
        (DeepOrd, "ENH-08"),
        (AlwaysA, "ENH-20"),
        (NoCrc, "CRC-09"),
        (BadOwnCrc, "RD-01"),
        (ReservedBits, "RD-01"),
        (DirtyPad, "RD-01"),
        (InvalidateField, "TAG-01"),
        (AnyDdpVersion, "ILL-07"),
        (AnyRdmapVersion, "OPS-02"),
        (AnyOpcode, "OPS-05"),
        (ChecksReserved, "TAG-09"),
        (NoBounds, "TAG-20"),
        (AnyStag, "TAG-10"),
        (ChecksEmptyWrite, "TAG-24"),
        (DamagedWrite, "TAG-01"),
        (LostWrite, "TAG-01"),
        (AnyMsn, "UNT-04"),
        (AnyOffset, "ILL-10"),
        (AnyQueue, "UNT-16"),
        (LongMessage, "UNT-13"),
        (ReadAnyStag, "RD-10"),
        (ReadNoBounds, "RD-15"),
        (ChecksEmptyRead, "RD-05"),
        (ReadWrongSink, "RD-03"),
        (ReadWrongData, "RD-01"),
        (SwappedTerminate, "TRM-01"),
        (WrongCode, "TAG-10"),
        (NoQuotes, "TAG-19"),
        (QuotedLength, "TAG-19"),
        (TerminateNumber, "TRM-02"),
        (TerminateReserved, "TRM-02"),
        (GoesOn, "TRM-14"),
        (AnswersTerminate, "TRM-15"),
        (Silent, "TAG-10"),
        (MapperHandle, "PMP-03"),
        (MapperAcceptsAll, "PMP-02"),
        (MapperTakesCut, "PMP-05"),
    ];
    let all = Lie::value_variants();
    // These are about the life of the target: tests/records.rs, and below.
    let untested: Vec<_> = all
        .iter()
        .filter(|lie| ![Dies, Reboots].contains(lie) && lies.iter().all(|l| l.0 != **lie))
        .collect();
    assert!(untested.is_empty(), "{untested:?}");
    for outcome in judge(None, |case| lies.iter().any(|lie| lie.1 == case.id)) {
        let name = outcome.name();
        assert_eq!(
            outcome.verdict,
            Verdict::Pass,
            "{name} without a lie: {}",
            outcome.reason
        );
    }
    let mut unnoticed = Vec::new();
    for (lie, id) in lies {
        let outcomes = judge(Some(lie), |case| case.id == id);
        if outcomes[0].verdict != Verdict::Fail {
            unnoticed.push(format!(
                "{lie:?}, {id}: {:?} {}",
                outcomes[0].verdict, outcomes[0].reason
            ));
        }
    }
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
}

/// One fault is one failure: the other cases take a Terminate that is known to be swapped.
#[test]
fn a_known_swap_fails_in_one_case() {
    let cases = |case: &Case| ["TRM-01", "TAG-10", "OPS-02"].contains(&case.id.as_str());
    let known = |target: &mut Target| target.swapped_terminates = true;
    let outcomes = judge_changed(Some(Lie::SwappedTerminate), known, cases);
    for outcome in outcomes {
        let expected = if outcome.case == "TRM-01" {
            Verdict::Fail
        } else {
            Verdict::Pass
        };
        assert_eq!(
            outcome.verdict,
            expected,
            "{}: {}",
            outcome.name(),
            outcome.reason
        );
    }
}

/// A loop on the target's side, or a supervisor of services, starts it again.
#[test]
fn a_target_that_dies_and_is_started_again_does_not_pass() {
    let impatient = |target: &mut Target| target.patience = Duration::from_secs(1);
    let outcomes = judge_changed(Some(Lie::Reboots), impatient, |case| case.id == "TAG-20");
    let [outcome] = &outcomes[..] else {
        panic!("{} outcomes", outcomes.len());
    };
    assert_eq!(outcome.verdict, Verdict::Dead, "{}", outcome.reason);
}
