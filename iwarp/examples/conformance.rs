//! Runs the numbered tests, of this crate and against a running siwd (as root), and writes CONFORMANCE.md: `cargo run -p siw-iwarp --example
//! conformance`.
#[path = "../tests/common/conformance.rs"]
mod conformance;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

fn main() -> std::io::Result<()> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut results = BTreeMap::new();
    let mut errors = String::new();
    for args in [
        &["-p", "siw-iwarp"][..],
        &["-p", "siwd", "--test", "conformance"],
    ] {
        let out = Command::new(&cargo)
            .args(["test", "--no-fail-fast"])
            .args(args)
            .output()?;
        errors += &String::from_utf8_lossy(&out.stderr);
        for line in String::from_utf8_lossy(&out.stdout).lines() {
            if let Some((name, result)) = line
                .strip_prefix("test ")
                .and_then(|l| l.split_once(" ... "))
            {
                let name = name.rsplit("::").next().unwrap_or(name);
                let ok = result == "ok";
                results
                    .entry(name.to_string())
                    .and_modify(|r| *r &= ok)
                    .or_insert(ok);
            }
        }
    }
    if results.is_empty() {
        eprint!("{errors}");
        return Err(std::io::Error::other("the tests did not run"));
    }
    let text = conformance::render(|t| results.get(t).copied());
    std::fs::write(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("CONFORMANCE.md"),
        &text,
    )?;
    println!("{}", text.lines().last().unwrap_or_default());
    Ok(())
}
