//! The judge shares no protocol code with siwd.

use std::collections::BTreeSet;
use std::path::Path;

#[test]
fn no_dependency_on_code_that_is_judged() {
    let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock");
    let lock: toml::Table = toml::from_str(&std::fs::read_to_string(lock).unwrap()).unwrap();
    let packages = lock["package"].as_array().unwrap();
    let mut reached = BTreeSet::new();
    let mut waiting = vec!["siw-lab".to_owned()];
    while let Some(name) = waiting.pop() {
        if !reached.insert(name.clone()) {
            continue;
        }
        let all = packages
            .iter()
            .filter(|p| p["name"].as_str() == Some(&name));
        for dependency in all
            .filter_map(|p| p.get("dependencies"))
            .flat_map(|d| d.as_array().unwrap())
        {
            // A version follows the name where there are several.
            let name = dependency.as_str().unwrap().split(' ').next().unwrap();
            waiting.push(name.to_owned());
        }
    }
    assert!(
        reached.contains("etherparse"),
        "the lock file was not understood: {reached:?}"
    );
    for judged in [
        "siw-tcp",
        "siw-iwarp",
        "siw-memory",
        "siwd",
        "crc32c",
        "crc-fast",
    ] {
        assert!(!reached.contains(judged), "siw-lab depends on {judged}");
    }
}
