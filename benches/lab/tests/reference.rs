//! The judge is judged: a perfect reference peer passes, and each fault of a lying one turns the named
//! case red.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use siw_lab::case::{Case, built_in};
use siw_lab::link::{Station, memory_link};
use siw_lab::reference::{Lie, Reference};
use siw_lab::script::{Outcome, Target, Verdict};
use siw_lab::suite::{Instance, run_all};
use siw_lab::via::{LAB_ADDRESS, PORT, SIWD_ADDRESS};

fn judge(lie: Option<Lie>, select: impl Fn(&Case) -> bool) -> Vec<Outcome> {
    let (ours, theirs) = memory_link();
    let station = Station::start(ours, LAB_ADDRESS, 20_000);
    let reference = Reference::start(theirs, SIWD_ADDRESS, PORT, lie);
    let target = Target {
        station: station.station.clone(),
        ip: SIWD_ADDRESS,
        mac: station
            .station
            .resolve(SIWD_ADDRESS, Duration::from_secs(10))
            .unwrap(),
        port: PORT,
        clients: reference.clients(LAB_ADDRESS),
        patience: Duration::from_secs(10),
        quiet: Duration::from_millis(250),
        seed: 1,
    };
    let cases = built_in().unwrap();
    let chosen = cases.iter().filter(|case| select(case));
    let instances: Vec<_> = chosen
        .map(|case| Instance {
            case,
            params: case.instances().swap_remove(0),
        })
        .collect();
    assert!(!instances.is_empty());
    run_all(&target, &instances, 4, &AtomicBool::new(false), &|_| {})
}

#[test]
fn a_perfect_peer_passes_the_smoke_profile() {
    for outcome in judge(None, |case| case.smoke) {
        let good = outcome.verdict <= Verdict::Recorded;
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
    let lies = [
        (Lie::AnyKey, "MPA-03"),
        (Lie::EchoReserved, "MPA-20"),
        (Lie::SwappedTerminate, "TRM-01"),
        (Lie::NoCrc, "CRC-09"),
        (Lie::NoBounds, "TAG-20"),
        (Lie::AnyStag, "TAG-10"),
        (Lie::AnyMsn, "UNT-04"),
        (Lie::AnyOpcode, "OPS-05"),
        (Lie::NoQuotes, "TAG-19"),
    ];
    for (lie, id) in lies {
        let outcomes = judge(Some(lie), |case| case.id == id);
        assert_eq!(
            outcomes[0].verdict,
            Verdict::Fail,
            "{lie:?}, {id}: {}",
            outcomes[0].reason
        );
        assert!(
            judge(None, |case| case.id == id)[0].verdict == Verdict::Pass,
            "{id} without a lie"
        );
    }
}

/// Pads of rping's messages are empty: an odd Read shows them.
#[test]
fn a_dirty_pad_is_noticed_in_any_case() {
    let outcomes = judge(Some(Lie::DirtyPad), |case| case.id == "RD-01");
    assert_eq!(outcomes[0].verdict, Verdict::Fail);
    assert!(
        outcomes[0].reason.contains("pad not zero"),
        "{}",
        outcomes[0].reason
    );
}
