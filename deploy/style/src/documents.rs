//! Checks that names in documents exist: each path, function and type between backticks in the
//! Markdown files at the top of the repository.
//!
//! - `` `tcp/src/lib.rs` ``: a file or folder, relative to the root
//! - `` `process_ack()` ``: a declared function
//! - `` `Stack::receive` ``, `` `Stack` ``: a type, module or crate, and a name that occurs in the
//!   code
//!
//! Code blocks, absolute paths, and anything with spaces or placeholders are ignored.

use std::collections::BTreeSet;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};

use crate::counts::Place;

/// Documents to check; missing ones are no error.
const DOCUMENTS: [&str; 4] = [
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
];

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

/// All names in the documents below `root` that do not exist; `files` lists all files of the
/// repository.
pub fn find_stale_names(root: &Path, files: &[String]) -> Vec<Place> {
    let documents: Vec<(&str, String)> = DOCUMENTS
        .iter()
        .filter_map(|path| Some((*path, std::fs::read_to_string(root.join(path)).ok()?)))
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
    let mut stale = Vec::new();
    for (path, text) in &documents {
        check_document(path, text, files, &names, &mut stale);
    }
    stale
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

    /// Returns true if `code`, the text between two backticks, names something that does not exist.
    fn is_stale(&self, code: &str, files: &[String]) -> bool {
        if is_path(code) {
            let path = code.trim_start_matches("./").trim_end_matches('/');
            let folder = format!("{path}/");
            return !files
                .iter()
                .any(|file| file == path || file.starts_with(&folder));
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

fn check_document(
    path: &str,
    text: &str,
    files: &[String],
    names: &DeclaredNames,
    stale: &mut Vec<Place>,
) {
    let mut in_block = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        }
        if in_block {
            continue;
        }
        for code in line.split('`').skip(1).step_by(2) {
            if names.is_stale(code, files) {
                let name = code.to_owned();
                stale.push(Place {
                    path: path.to_owned(),
                    line: index + 1,
                    name,
                });
            }
        }
    }
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
        check_document("A.md", document, &files, &names, &mut stale);
        stale.into_iter().map(|place| place.name).collect()
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
}
