//! The mutants of siwd as patches of its source. `deploy/lab/full mutants` builds and judges them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use siw_lab::mutate::{Patch, apply, patched_names, patches, write_copy};
use siw_lab::{case, mutants};

fn source() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn patch(find: &str) -> Vec<Patch> {
    vec![Patch {
        file: "file.rs".into(),
        find: find.into(),
        replace: "mutant!(Absent)".into(),
    }]
}

#[test]
fn each_patch_fits_the_source_of_siwd() {
    apply(&patches().unwrap(), source()).unwrap();
}

#[test]
fn the_patches_bring_the_mutants_of_the_table() {
    let (cases, patches) = (case::built_in().unwrap(), patches().unwrap());
    let table = mutants::table(&cases).unwrap();
    let named: BTreeSet<_> = table.iter().map(|mutant| mutant.name.as_str()).collect();
    assert_eq!(patched_names(&patches), named);
}

#[test]
fn a_patch_whose_text_is_missing_or_ambiguous_is_refused() {
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("file.rs"), "one two two").unwrap();
    assert!(apply(&patch("one"), source.path()).is_ok());
    for (find, count) in [
        ("two", "2 times in file.rs"),
        ("three", "0 times in file.rs"),
    ] {
        let error = apply(&patch(find), source.path()).unwrap_err().to_string();
        assert!(error.contains(count) && error.contains(find), "{error}");
    }
}

#[test]
fn a_copy_follows_its_source_and_replaces_nothing_else() {
    let (source, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (source, copy) = (source.path(), to.path().join("copy"));
    fs::write(source.join("file.rs"), "one").unwrap();
    fs::write(source.join("other.rs"), "two").unwrap();
    let manifest =
        "[workspace]\n\n[workspace.package]\nversion = \"1.2.3\"\n\n[dependencies]\na = \"1\"\n";
    fs::write(source.join("Cargo.toml"), manifest).unwrap();
    let locked = |version| {
        let other = "[[package]]\nname = \"a\"\nversion = \"1.2.3\"\nsource = \"registry\"";
        format!("version = 4\n\n[[package]]\nname = \"own\"\nversion = \"{version}\"\n\n{other}\n")
    };
    fs::write(source.join("Cargo.lock"), locked("1.2.3")).unwrap();
    write_copy(&patch("one"), source, &copy).unwrap();
    assert_eq!(
        fs::read_to_string(copy.join("file.rs")).unwrap(),
        "mutant!(Absent)"
    );
    assert_eq!(
        fs::read_to_string(copy.join("Cargo.toml")).unwrap(),
        manifest.replace("1.2.3", "1.2.3+mutants")
    );
    assert_eq!(
        fs::read_to_string(copy.join("Cargo.lock")).unwrap(),
        locked("1.2.3+mutants")
    );
    let before = fs::metadata(copy.join("file.rs"))
        .unwrap()
        .modified()
        .unwrap();
    fs::remove_file(source.join("other.rs")).unwrap();
    write_copy(&patch("one"), source, &copy).unwrap();
    assert!(!copy.join("other.rs").exists());
    let after = fs::metadata(copy.join("file.rs"))
        .unwrap()
        .modified()
        .unwrap();
    assert_eq!(before, after, "an unchanged file was written again");
    let error = write_copy(&patch("one"), source, source)
        .unwrap_err()
        .to_string();
    assert!(error.contains("name an empty folder"), "{error}");
    assert_eq!(fs::read_to_string(source.join("file.rs")).unwrap(), "one");
}
