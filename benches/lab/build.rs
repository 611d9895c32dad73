//! Embeds the case files, so that the program needs no files beside itself.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

fn main() {
    let root = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap()).join("cases");
    println!("cargo::rerun-if-changed={}", root.display());
    let mut files = Vec::new();
    for group in fs::read_dir(&root).unwrap() {
        let group = group.unwrap().path();
        println!("cargo::rerun-if-changed={}", group.display());
        if !group.is_dir() {
            continue;
        }
        for file in fs::read_dir(&group).unwrap() {
            let file = file.unwrap().path();
            if file.extension().is_some_and(|e| e == "case") {
                files.push(file);
            }
        }
    }
    files.sort();
    let mut out = String::from("pub const FILES: &[(&str, &str)] = &[\n");
    for file in files {
        let name = file.strip_prefix(&root).unwrap().display().to_string();
        writeln!(
            out,
            "    ({name:?}, include_str!({:?})),",
            file.display().to_string()
        )
        .unwrap();
    }
    out.push_str("];\n");
    let to = Path::new(&env::var("OUT_DIR").unwrap()).join("cases.rs");
    fs::write(to, out).unwrap();
}
