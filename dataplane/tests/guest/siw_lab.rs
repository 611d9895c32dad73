//! Linux siw as a target of siw-lab that runs rping only: the smoke profile, in both roles.

use std::process::Command;

use crate::common::guest::{Evidence, Guest, lacks_guest};
use crate::common::net::Netns;
use crate::common::siw_lab;

#[test]
fn siw_lab_finds_what_its_peer_file_says_of_linux_siw() {
    skip_if!(lacks_guest());
    let ns = Netns::new();
    let guest = Guest::boot(&ns, &["--ip", "10.77.0.2/24"]);
    let _server = guest.start("while :; do rping -s -P -p 7174; done");
    guest.run("wait-listen 7174");
    let client = guest.shell_command("rping -c -a {address} -p {port} -C 1000");
    let output = tempfile::tempdir().unwrap();
    let run = ns.run(|| {
        Command::new(siw_lab())
            .args(["run", "--target", "10.77.0.2", "--interface", "lab0"])
            .args([
                "--address",
                "10.77.0.8",
                "--profile",
                "smoke",
                "--seed",
                "1",
            ])
            .args([
                "--expect",
                concat!(
                    env!("CARGO_MANIFEST_DIR"),
                    "/../benches/lab/peers/siw-6.1.toml"
                ),
            ])
            // A guest may pause for a while on a machine with other load.
            .args(["--patience", "60", "--jobs", "1", "--client", &client])
            .args(["--report", "json", "--output"])
            .arg(output.path())
            .output()
            .unwrap()
    });
    let evidence = Evidence(output);
    let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    // 1 says that a verdict is not the expected one.
    assert!(matches!(run.status.code(), Some(0 | 1)), "{said}");
    let report = std::fs::read(evidence.0.path().join("run.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    let results = report["results"].as_array().unwrap();
    let count = |is_meant: &dyn Fn(&serde_json::Value) -> bool| {
        results.iter().filter(|result| is_meant(result)).count()
    };
    let is = |result: &serde_json::Value, verdict: &str| result["verdict"] == verdict;
    let unexpected = count(&|result| result["news"] == true && !is(result, "inconclusive"));
    assert_eq!(unexpected, 0, "{said}");
    assert!(count(&|result| is(result, "pass")) >= 15, "{said}");
    // A case without a verdict says nothing about the target.
    assert!(count(&|result| is(result, "inconclusive")) <= 3, "{said}");
}
