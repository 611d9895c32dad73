//! Records the commit that the benchmark programs are built from.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Git appends a line to this file with each commit and checkout.
    if let Some(dir) = git(&["rev-parse", "--absolute-git-dir"]) {
        let log = Path::new(&dir).join("logs/HEAD");
        if log.exists() {
            println!("cargo:rerun-if-changed={}", log.display());
        }
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_default();
    println!("cargo:rustc-env=SIWD_COMMIT={commit}");
}

/// Output of a git command; `None` without git or outside a checkout.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
