//! `siwd --schema`: the JSON schema of the configuration, for editors.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

const REFERENCE: &str = include_str!("../../../config/reference.toml");

/// The schema that siwd prints.
fn schema() -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_siwd"))
        .arg("--schema")
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Adds the keys of a table and of its sub-tables.
fn add_keys(keys: &mut BTreeSet<String>, table: &str, schema: &Value) {
    for (key, schema) in schema["properties"].as_object().into_iter().flatten() {
        let name = format!("{table}{key}");
        // A list of tables, or a table that may be absent.
        let parts = schema["anyOf"].as_array().into_iter().flatten();
        let devices = Some(&schema["items"]).filter(|_| key == "device");
        let mut tables = parts.chain(devices).chain([schema]);
        match tables.find(|part| part["properties"].is_object()) {
            Some(part) => add_keys(keys, &format!("{name}."), part),
            None => {
                assert!(schema["description"].is_string(), "{name}: {schema}");
                keys.insert(name);
            }
        }
    }
}

#[test]
fn the_schema_has_the_keys_of_the_reference() {
    let mut table = String::new();
    let mut named = BTreeSet::new();
    for line in REFERENCE.lines() {
        let line = line.strip_prefix("# ").unwrap_or(line);
        if let Some(rest) = line.strip_prefix('[') {
            let (name, _) = rest.trim_start_matches('[').split_once(']').unwrap();
            table = name.to_owned();
        } else if let Some((key, _)) = line.split_once(" = ")
            && key
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
        {
            named.insert(format!("{table}.{key}"));
        }
    }
    let mut keys = BTreeSet::new();
    add_keys(&mut keys, "", &schema());
    assert!(keys.len() > 90, "{keys:?}");
    let differences: Vec<_> = keys.symmetric_difference(&named).collect();
    assert!(differences.is_empty(), "{differences:?}");
}

#[test]
fn the_schema_accepts_the_configurations_and_refuses_mistakes() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    let check = |text: &str| {
        let value: Value = toml::from_str(text).unwrap();
        let checked = validator.validate(&value);
        checked.map_err(|error| format!("{}: {error}", error.instance_path()))
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(check(&text), Ok(()), "{}", path.display());
            files += 1;
        }
    }
    assert!(files >= 8);
    for (from, to) in [
        ("spin_us = 50", "spin_us = \"50\""),
        ("spin_us = 50", "spin_us = -1"),
        ("spin_us = 50", "spim_us = 50"),
        ("idle = \"adaptive\"", "idle = \"sleep\""),
        (
            "memory_per_client = \"8 GiB\"",
            "memory_per_client = \"8 GB\"",
        ),
        ("# preset = \"siw\"", "preset = \"siv\""),
        ("crc = \"on\"", "crc = true"),
        ("\"10.77.0.1/24\"", "\"10.77.0.1\""),
        ("# vlan = 100", "vlan = \"a\""),
        ("[dpdk]", "[dkdp]"),
    ] {
        assert!(REFERENCE.contains(from), "{from}");
        let text = REFERENCE.replacen(from, to, 1);
        assert!(check(&text).is_err(), "{to}");
    }
}
