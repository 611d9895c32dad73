//! A copy of siwd's source with faults. `mutants/patches.toml` has them, each behind `mutant!(NAME)`;
//! `mutants/switch.rs` switches one on while the program runs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

const PATCHES: &str = include_str!("../mutants/patches.toml");
const SWITCH: &str = include_str!("../mutants/switch.rs");
/// Path of the switch in the copy.
const SWITCH_PATH: &str = "iwarp/src/mutant.rs";
/// Marks a folder that the copy may replace.
const MARKER: &str = ".siw-lab-mutate";

/// A replacement of a text that stands exactly once in a file.
#[derive(Deserialize)]
pub struct Patch {
    /// Path below the root of the source.
    pub file: String,
    pub find: String,
    pub replace: String,
}

#[derive(Deserialize)]
struct Patches {
    patch: Vec<Patch>,
}

/// Reads the patches of the lab.
pub fn patches() -> Result<Vec<Patch>> {
    let read: Patches = toml::from_str(PATCHES).context("benches/lab/mutants/patches.toml")?;
    Ok(read.patch)
}

/// Names of the mutants that the patches bring.
pub fn patched_names(patches: &[Patch]) -> BTreeSet<&str> {
    let texts = patches
        .iter()
        .flat_map(|p| p.replace.split("mutant!(").skip(1));
    texts
        .filter_map(|text| Some(text.split_once(')')?.0))
        .collect()
}

/// Applies the patches to the files below `source`: the new text of each file by its path.
pub fn apply(patches: &[Patch], source: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let mut misfits = Vec::new();
    for Patch {
        file,
        find,
        replace,
    } in patches
    {
        if !files.contains_key(file) {
            let path = source.join(file);
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            files.insert(file.clone(), text);
        }
        let text = &files[file];
        match text.matches(find.as_str()).count() {
            1 => {
                let patched = text.replacen(find, replace, 1);
                files.insert(file.clone(), patched);
            }
            count => misfits.push(format!("{count} times in {file}:\n{find}")),
        }
    }
    if !misfits.is_empty() {
        bail!(
            "benches/lab/mutants/patches.toml does not fit the source. A text has to stand there once:\n{}",
            misfits.join("\n")
        );
    }
    Ok(files)
}

/// Writes a copy of the source with the patches into a folder. Files that are right already stay
/// untouched, so that cargo builds only what has changed.
pub fn write_copy(patches: &[Patch], source: &Path, to: &Path) -> Result<()> {
    let mut patched = apply(patches, source)?;
    let names: Vec<_> = patched_names(patches).into_iter().collect();
    patched.insert(
        SWITCH_PATH.into(),
        SWITCH.replace("@NAMES@", &names.join(" ")),
    );
    let is_used = to.read_dir().is_ok_and(|mut files| files.next().is_some());
    if is_used && !to.join(MARKER).exists() {
        bail!(
            "{} is not a copy that siw-lab wrote: name an empty folder",
            to.display()
        );
    }
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    fs::write(to.join(MARKER), "")?;
    let mut wanted = BTreeSet::new();
    list_files(source, Path::new(""), &mut wanted)
        .with_context(|| format!("cannot read {}", source.display()))?;
    wanted.extend(patched.keys().map(PathBuf::from));
    let mut present = BTreeSet::new();
    list_files(to, Path::new(""), &mut present)?;
    for stale in present.difference(&wanted) {
        fs::remove_file(to.join(stale))?;
    }
    for path in &wanted {
        let octets = match path.to_str().and_then(|path| patched.get(path)) {
            Some(text) => text.clone().into_bytes(),
            None if ["Cargo.toml", "Cargo.lock"]
                .map(Path::new)
                .contains(&path.as_path()) =>
            {
                with_own_version(&fs::read_to_string(source.join(path))?).into_bytes()
            }
            None => fs::read(source.join(path))?,
        };
        let copy = to.join(path);
        if fs::read(&copy).is_ok_and(|old| old == octets) {
            continue;
        }
        fs::create_dir_all(copy.parent().unwrap_or(to))?;
        fs::write(&copy, octets).with_context(|| format!("cannot write {}", copy.display()))?;
    }
    Ok(())
}

/// The manifest of the workspace, or its lock file, with build metadata in the version of the workspace's own
/// packages. Cargo names what it builds by package and version, not by place: in a shared target folder the
/// copy would replace the libraries of its source.
fn with_own_version(text: &str) -> String {
    let is_own = |block: &&str| {
        let is_locked = block.starts_with("[[package]]") && !block.contains("\nsource = ");
        is_locked || block.starts_with("[workspace.package]")
    };
    let version = |block: &str| {
        let line = block.lines().find(|line| line.starts_with("version = "))?;
        Some(block.replacen(line, &format!("{}+mutants\"", line.strip_suffix('"')?), 1))
    };
    let blocks = text.split("\n\n").map(|block| {
        let own = Some(block).filter(is_own).and_then(version);
        own.unwrap_or_else(|| block.to_owned())
    });
    blocks.collect::<Vec<_>>().join("\n\n")
}

/// Adds the files below a folder, without hidden ones and those of cargo.
fn list_files(root: &Path, folder: &Path, files: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let (name, kind) = (entry.file_name(), entry.file_type()?);
        let path = folder.join(&name);
        if name.to_string_lossy().starts_with('.') || name == "target" {
            continue;
        } else if kind.is_dir() {
            list_files(root, &path, files)?;
        } else if kind.is_file() {
            files.insert(path);
        }
    }
    Ok(())
}
