//! `siw-perf one-side` with the siwd beside it.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

#[test]
fn each_end_has_its_own_cost() {
    let siw_perf = Path::new(env!("CARGO_BIN_EXE_siw-perf"));
    if !siw_perf.with_file_name("siwd").exists() {
        println!("skipped: no siwd beside siw-perf; build the workspace");
        return;
    }
    let [initiator_core, target_core, ..] = dpdk::allowed_cores()[..] else {
        println!("skipped: two cores are needed");
        return;
    };
    let out = Command::new(siw_perf)
        .args("one-side --rounds 1 --duration 0.3 --verify --json".split(' '))
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["one_side"], "vhost-user");
    let results = report["results"].as_object().unwrap();
    assert_eq!(results.len(), 6, "{report:#}");
    for (name, result) in results {
        for (end, core) in [("initiator", initiator_core), ("target", target_core)] {
            let cost = &result[end];
            let number = |key: &str| cost[key].as_f64().unwrap();
            assert_eq!(cost["core"], core, "{name} {end}");
            let busy = number("busy_percent");
            assert!(busy > 0.0 && busy <= 100.0, "{name} {end}: {cost}");
            assert!(number("verified") > 0.0, "{name} {end}: {cost}");
            let rate = number("mmsgs_per_core");
            assert!(number("ns_per_message") > 0.0 && rate > 0.0, "{cost}");
            // The run's rate is the core's, at the share of the time that the worker ran. The run's
            // has no warm-up.
            let share = number("run_mmsgs") / (rate * busy / 100.0);
            assert!((0.5..2.0).contains(&share), "{name} {end}: {cost}");
        }
    }
}
