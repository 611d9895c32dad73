//! Checks the Markdown files of the repository.
//!
//! Names between backticks exist, except in [`UNCHECKED_NAMES`]:
//!
//! - `` `tcp/src/lib.rs` ``: a file or folder, relative to the root or to the document
//! - `` `process_ack()` ``: a declared function
//! - `` `Stack::receive` ``, `` `Stack` ``: a type, module or crate, and a name that occurs in the
//!   code
//!
//! Code blocks, absolute paths, and anything with spaces or placeholders are ignored. In code blocks
//! of documents at the top of the repository, words that begin with a folder at the top are paths.
//!
//! Relative links lead to a file or folder, and their anchors to a heading.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};

/// A finding: its file, its line (from 1), and what is wrong.
pub struct Place {
    pub path: String,
    pub line: usize,
    pub name: String,
}

/// Documents whose names are not checked: the history names code that no longer exists, and a test
/// of `iwarp` compares the list of numbered tests with the code.
const UNCHECKED_NAMES: [&str; 2] = ["CHANGELOG.md", "iwarp/TESTS.md"];

/// Types of the standard library and of C that documents may name.
const FOREIGN_NAMES: [&str; 6] = ["Vec", "Option", "Result", "String", "Send", "Sync"];

/// The names that a repository's Rust code declares.
#[derive(Default)]
struct DeclaredNames {
    functions: BTreeSet<String>,
    /// Types, modules, macros, and packages with `_` for `-`.
    scopes: BTreeSet<String>,
    /// All identifiers.
    identifiers: BTreeSet<String>,
}

/// All findings in the documents below `root`; `files` lists all files of the repository.
pub fn check_documents(root: &Path, files: &[String]) -> Vec<Place> {
    let documents: BTreeMap<&str, String> = files
        .iter()
        .filter(|path| path.ends_with(".md"))
        .filter_map(|path| {
            Some((
                path.as_str(),
                std::fs::read_to_string(root.join(path)).ok()?,
            ))
        })
        .collect();
    if documents.is_empty() {
        return Vec::new();
    }
    let mut names = DeclaredNames::default();
    for path in files {
        let Ok(text) = std::fs::read_to_string(root.join(path)) else {
            continue;
        };
        if path.ends_with(".rs") {
            names.add_module(path);
            if let Ok(tokens) = text.parse::<TokenStream>() {
                names.add_tokens(tokens);
            }
        } else if path.ends_with("Cargo.toml") {
            names.add_packages(&text);
        }
    }
    let mut found = Vec::new();
    for (path, text) in &documents {
        if !UNCHECKED_NAMES.contains(path) {
            find_stale_names(path, text, files, &names, &mut found);
        }
        find_broken_links(path, &documents, files, &mut found);
    }
    found
}

/// Text of each line outside code blocks, with its number (from 1).
fn prose_lines(text: &str) -> Vec<(usize, &str)> {
    let mut in_block = false;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            lines.push((index + 1, line));
        }
    }
    lines
}

/// Adds links of the document `path` that lead to no file or heading.
fn find_broken_links(
    path: &str,
    documents: &BTreeMap<&str, String>,
    files: &[String],
    found: &mut Vec<Place>,
) {
    for (line, text) in prose_lines(&documents[path]) {
        for target in link_targets(text) {
            if !is_valid_link(path, target, documents, files) {
                found.push(Place {
                    path: path.to_owned(),
                    line,
                    name: format!("link to {target}"),
                });
            }
        }
    }
}

/// Targets of the inline links in a line; text between backticks has none.
fn link_targets(line: &str) -> Vec<&str> {
    line.split('`')
        .step_by(2)
        .flat_map(|text| text.split("](").skip(1))
        .filter_map(|rest| rest.split([')', ' ']).next())
        .collect()
}

fn is_valid_link(
    path: &str,
    target: &str,
    documents: &BTreeMap<&str, String>,
    files: &[String],
) -> bool {
    if target.contains("://") || target.starts_with("mailto:") {
        return true;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let Some(file) = (match file {
        "" => Some(path.to_owned()),
        _ => resolve_path(folder_of(path), file),
    }) else {
        return false;
    };
    let exists = file.is_empty() || is_file_or_folder(&file, files);
    let heading_exists = documents
        .get(file.as_str())
        .is_some_and(|text| anchors(text).contains(anchor));
    exists && (anchor.is_empty() || heading_exists)
}

/// The anchors of a document's headings, as GitHub forms them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, line) in prose_lines(text) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let anchor: String = heading
            .trim()
            .to_lowercase()
            .chars()
            .filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter))
            .map(|letter| if letter == ' ' { '-' } else { letter })
            .collect();
        let mut unique = anchor.clone();
        let mut count = 0;
        while !found.insert(unique) {
            count += 1;
            unique = format!("{anchor}-{count}");
        }
    }
    found
}

fn folder_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// The path from the root of `path`, which is relative to `folder`; `None` outside of the root.
fn resolve_path(folder: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

fn is_file_or_folder(path: &str, files: &[String]) -> bool {
    let folder = format!("{path}/");
    files
        .iter()
        .any(|file| file == path || file.starts_with(&folder))
}

impl DeclaredNames {
    fn add_module(&mut self, path: &str) {
        let stem = path.trim_end_matches(".rs").trim_end_matches("/mod");
        self.scopes
            .extend(stem.rsplit('/').next().map(str::to_owned));
    }

    fn add_packages(&mut self, manifest: &str) {
        for line in manifest.lines() {
            if let Some(name) = line.strip_prefix("name = \"") {
                self.scopes
                    .insert(name.trim_end_matches('"').replace('-', "_"));
            }
        }
    }

    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut keyword = String::new();
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    let name = ident.to_string();
                    match keyword.as_str() {
                        "fn" => drop(self.functions.insert(name.clone())),
                        "struct" | "enum" | "trait" | "type" | "mod" | "union" => {
                            self.scopes.insert(name.clone());
                        }
                        _ => {}
                    }
                    self.identifiers.insert(name.clone());
                    keyword = name;
                }
                TokenTree::Group(group) => {
                    keyword.clear();
                    self.add_tokens(group.stream());
                }
                _ => keyword.clear(),
            }
        }
    }

    /// Returns true if `code`, the text between two backticks of a document in `folder`, names
    /// something that does not exist.
    fn is_stale(&self, code: &str, folder: &str, files: &[String]) -> bool {
        if is_path(code) {
            return !["", folder].iter().any(|from| {
                resolve_path(from, code).is_some_and(|path| is_file_or_folder(&path, files))
            });
        }
        if let Some(function) = code.strip_suffix("()") {
            let name = function.rsplit("::").next().unwrap_or(function);
            return is_identifier(name) && !self.functions.contains(name);
        }
        let parts: Vec<&str> = code.split("::").collect();
        if !parts.iter().all(|part| is_identifier(part)) || FOREIGN_NAMES.contains(&parts[0]) {
            return false;
        }
        match parts.as_slice() {
            [name] => is_type_name(name) && !self.identifiers.contains(*name),
            [scopes @ .., last] => {
                let known = |scope: &&str| self.scopes.contains(*scope);
                !scopes.iter().all(known) || !self.identifiers.contains(*last)
            }
            [] => false,
        }
    }
}

/// Returns true for a relative path with a folder, or a file name with one of our extensions.
fn is_path(code: &str) -> bool {
    let allowed = |character: char| character.is_ascii_alphanumeric() || "._-/".contains(character);
    let has_extension = [".rs", ".md", ".toml", ".sh", ".txt", ".yml"]
        .iter()
        .any(|extension| code.ends_with(extension));
    let is_relative = !code.starts_with('/') && code.chars().all(allowed);
    let looks_like_path = code.contains('/') && code.chars().any(|letter| letter.is_lowercase());
    is_relative && (looks_like_path || has_extension)
}

fn is_identifier(name: &str) -> bool {
    let mut characters = name.chars();
    characters
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && characters.all(|other| other.is_ascii_alphanumeric() || other == '_')
}

/// Returns true for a name of several capitalised words, like `TransferEnd`; a single word may be
/// ordinary text.
fn is_type_name(name: &str) -> bool {
    let capitals = name
        .chars()
        .filter(|character| character.is_uppercase())
        .count();
    let starts_capital = name.chars().next().is_some_and(char::is_uppercase);
    starts_capital
        && capitals > 1
        && capitals < name.len()
        && !name.contains('_')
        && name.chars().nth(1).is_some_and(char::is_lowercase)
}

/// Adds names of the document `path` that do not exist.
fn find_stale_names(
    path: &str,
    text: &str,
    files: &[String],
    names: &DeclaredNames,
    stale: &mut Vec<Place>,
) {
    let folder = folder_of(path);
    let mut add = |line: usize, name: &str| {
        stale.push(Place {
            path: path.to_owned(),
            line,
            name: name.to_owned(),
        });
    };
    for (line, text) in prose_lines(text) {
        for code in text.split('`').skip(1).step_by(2) {
            if names.is_stale(code, folder, files) {
                add(line, code);
            }
        }
    }
    if folder.is_empty() {
        for (line, path) in paths_in_blocks(text, files) {
            if resolve_path("", path).is_none_or(|path| !is_file_or_folder(&path, files)) {
                add(line, path);
            }
        }
    }
}

/// Words in code blocks that begin with a folder at the top of the repository, with their lines.
fn paths_in_blocks<'a>(text: &'a str, files: &[String]) -> Vec<(usize, &'a str)> {
    let outside: BTreeSet<usize> = prose_lines(text)
        .into_iter()
        .map(|(line, _)| line)
        .collect();
    let mut paths = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if outside.contains(&(index + 1)) || line.trim_start().starts_with("```") {
            continue;
        }
        for word in line.split([' ', '"', '\'', '(', ')', ',', ';']) {
            let path = word.trim_start_matches("./").trim_end_matches(['.', ':']);
            let Some((top, _)) = path.split_once('/') else {
                continue;
            };
            if is_path(path) && is_file_or_folder(top, files) {
                paths.push((index + 1, path));
            }
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stale_names(document: &str) -> Vec<String> {
        let mut names = DeclaredNames::default();
        names.add_module("tcp/src/loss/rack.rs");
        names.add_packages("name = \"siw-tcp\"\n");
        let code = "pub struct SendQueue; impl SendQueue { pub fn push_record(&self) {} }";
        names.add_tokens(code.parse().unwrap());
        let files = ["tcp/src/loss/rack.rs".to_owned(), "deploy/test".to_owned()];
        let mut stale = Vec::new();
        find_stale_names("A.md", document, &files, &names, &mut stale);
        stale.into_iter().map(|place| place.name).collect()
    }

    fn broken_links(documents: &[(&'static str, &str)]) -> Vec<String> {
        let files: Vec<String> = documents.iter().map(|(path, _)| path.to_string()).collect();
        let documents: BTreeMap<&str, String> = documents
            .iter()
            .map(|(path, text)| (*path, text.to_string()))
            .collect();
        let mut found = Vec::new();
        for path in documents.keys() {
            find_broken_links(path, &documents, &files, &mut found);
        }
        found.into_iter().map(|place| place.name).collect()
    }

    #[test]
    fn what_exists_is_no_finding() {
        let document = "`tcp/src/loss/rack.rs`, `tcp/src/`, `./deploy/test`, `push_record()`, \
            `SendQueue::push_record`, `siw_tcp::SendQueue`, `rack::SendQueue`, `Vec::new`, \
            `/run/siwd/siwd.sock`, `cargo test -p siw-tcp`, `SIWD_SOCKET`, `RACK`";
        assert!(
            stale_names(document).is_empty(),
            "{:?}",
            stale_names(document)
        );
    }

    #[test]
    fn what_is_gone_is_found() {
        let document = "`tcp/src/rack.rs` `pop_record()` `SendQueue::pop_record` `Queue::push_record` \
            `ReceiveQueue` `gone.md`";
        let expected = [
            "tcp/src/rack.rs",
            "pop_record()",
            "SendQueue::pop_record",
            "Queue::push_record",
            "ReceiveQueue",
            "gone.md",
        ];
        assert_eq!(stale_names(document), expected);
    }

    #[test]
    fn code_blocks_are_left_alone() {
        assert!(stale_names("```\n`gone.md`\n```\n").is_empty());
    }

    #[test]
    fn paths_in_code_blocks_of_the_top_are_checked() {
        let document = "```\n./deploy/test tcp/src/gone.rs target/release/siwd other/file\n```\n";
        assert_eq!(stale_names(document), ["tcp/src/gone.rs"]);
    }

    #[test]
    fn paths_may_be_relative_to_the_document() {
        let files = ["tcp/README.md".to_owned(), "tcp/src/lib.rs".to_owned()];
        let names = DeclaredNames::default();
        assert!(!names.is_stale("src/lib.rs", "tcp", &files));
        assert!(!names.is_stale("../tcp/src/lib.rs", "tcp", &files));
        assert!(names.is_stale("src/gone.rs", "tcp", &files));
        assert!(names.is_stale("../../tcp", "tcp", &files));
    }

    #[test]
    fn links_lead_to_files_folders_and_headings() {
        let top = "# One & two `x`\n[a](tcp/README.md), [b](tcp/), [c](#one--two-x), \
            [d](tcp/README.md#limits-1), [e](https://example.org/#x), `[f](gone.md)`";
        let below = "## Limits\n## Limits\n[up](../README.md#one--two-x)";
        let documents = [("README.md", top), ("tcp/README.md", below)];
        assert_eq!(broken_links(&documents), [] as [&str; 0]);
    }

    #[test]
    fn links_to_nothing_are_found() {
        let top = "# One\n[a](gone.md) [b](#two) [c](tcp/README.md#x)\n```\n[d](gone.md)\n```";
        let below = "[up](../../README.md)";
        let documents = [("README.md", top), ("tcp/README.md", below)];
        let expected = [
            "link to gone.md",
            "link to #two",
            "link to tcp/README.md#x",
            "link to ../../README.md",
        ];
        assert_eq!(broken_links(&documents), expected);
    }
}
