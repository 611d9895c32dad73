//! The table of the public suites in README.md is the one of `suites.counts`.

use std::path::Path;
use std::process::Command;

#[test]
fn the_document_has_the_table_of_the_counts() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = Command::new(folder.join("run-suite"))
        .arg("--table")
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let table = String::from_utf8(out.stdout).unwrap();
    let suites = table.lines().skip(2).count();
    assert_eq!(suites, 4, "{table}");
    let document = std::fs::read_to_string(folder.join("README.md")).unwrap();
    assert!(
        document.contains(&format!("-->\n{table}<!-- end -->")),
        "README.md has another table than suites.counts (tcp/drill/run-suite --write makes it):\n{table}"
    );
}
