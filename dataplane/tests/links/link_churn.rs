//! A short run of `benches/link-churn`, the measurement of the figures `links`.

use std::path::Path;
use std::process::Command;

use crate::common::net::{lacks_network, missing_program};
use crate::common::{client_program, siw_perf, siw_ping};

#[test]
fn a_transfer_loses_nothing_while_other_links_and_devices_change() {
    skip_if!(
        lacks_network()
            .or_else(|| missing_program("ethtool"))
            .or_else(|| missing_program("python3"))
    );
    // Builds the programs that the script runs, in the folder of siwd.
    let programs = [siw_ping().to_owned(), client_program("siwctl"), siw_perf()];
    let folder = Path::new(env!("CARGO_BIN_EXE_siwd")).parent().unwrap();
    assert!(programs.iter().all(|path| path.starts_with(folder)));
    let path = std::env::var("PATH").unwrap_or_default();
    let out = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/link-churn"))
        .arg("12")
        .env("PATH", format!("{}:{path}", folder.display()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    println!("{said}");
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}{errors}");
    for change in [
        "moved_neighbour",
        "link_up",
        "interface_anew",
        "address_added",
        "devices",
    ] {
        assert!(said.contains(change), "{change}: {said}");
    }
}
