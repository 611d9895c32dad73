//! Words that the project no longer uses: `deploy/style/retired.txt`.

use proc_macro2::{TokenStream, TokenTree};

use crate::counts::Place;

/// Path of the list, from the root of the repository.
pub const LIST: &str = "deploy/style/retired.txt";

/// Pattern of a retired word.
#[derive(Debug, PartialEq)]
pub enum RetiredPattern {
    /// An identifier in Rust code, or a word between backticks elsewhere.
    Identifier(String),
    /// A function declaration with this name.
    Function(String),
    /// Words in any text, regardless of case and line breaks.
    Phrase(String),
}

/// One line of the list.
#[derive(Debug, PartialEq)]
pub struct RetiredEntry {
    pub pattern: RetiredPattern,
    /// Path prefix of the files to search; empty for all.
    pub below: String,
}

/// Parses the list: `identifier NAME`, `function NAME`, `phrase WORDS`, each optionally followed by
/// ` in: FOLDER`; `#` starts a comment.
pub fn parse_list(text: &str) -> Result<Vec<RetiredEntry>, String> {
    let mut entries = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        let (line, below) = line.split_once(" in: ").unwrap_or((line, ""));
        let (kind, what) = line.split_once(' ').unwrap_or((line, ""));
        let what = what.trim().to_owned();
        let pattern = match kind {
            "identifier" if !what.is_empty() => RetiredPattern::Identifier(what),
            "function" if !what.is_empty() => RetiredPattern::Function(what),
            "phrase" if !what.is_empty() => RetiredPattern::Phrase(what.to_lowercase()),
            _ => return Err(format!("{LIST}:{}: not an entry: {line}", index + 1)),
        };
        entries.push(RetiredEntry {
            pattern,
            below: below.trim().to_owned(),
        });
    }
    Ok(entries)
}

/// Returns true if a file is searched: text files, except those that document former names.
pub fn is_searched(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    !path.starts_with("deploy/style/")
        && !matches!(name, "CHANGELOG.md" | "Cargo.lock")
        && !name.starts_with("LICENSE")
}

/// All retired words in one file.
pub fn find_retired(path: &str, text: &str, entries: &[RetiredEntry]) -> Vec<Place> {
    let entries: Vec<&RetiredEntry> = entries
        .iter()
        .filter(|entry| path.starts_with(entry.below.as_str()))
        .collect();
    let mut found = Vec::new();
    let mut words = code_words_in_prose(text);
    if path.ends_with(".rs")
        && let Ok(tokens) = text.parse::<TokenStream>()
    {
        collect_words(tokens, &mut words);
    }
    for word in &words {
        let matches = entries.iter().any(|entry| match &entry.pattern {
            RetiredPattern::Identifier(name) => *name == word.name,
            RetiredPattern::Function(name) => word.declares_function && *name == word.name,
            RetiredPattern::Phrase(_) => false,
        });
        if matches {
            found.push(Place {
                path: path.to_owned(),
                line: word.line,
                name: word.name.clone(),
            });
        }
    }
    let flowing = FlowingText::new(text);
    for entry in entries {
        if let RetiredPattern::Phrase(phrase) = &entry.pattern {
            for line in flowing.find_phrase(phrase) {
                found.push(Place {
                    path: path.to_owned(),
                    line,
                    name: format!("\"{phrase}\""),
                });
            }
        }
    }
    found.sort_by_key(|place| place.line);
    found
}

struct Word {
    name: String,
    line: usize,
    declares_function: bool,
}

fn collect_words(tokens: TokenStream, words: &mut Vec<Word>) {
    let mut after_fn = false;
    for token in tokens {
        let mut is_fn = false;
        match token {
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                is_fn = name == "fn";
                let line = ident.span().start().line;
                words.push(Word {
                    name,
                    line,
                    declares_function: after_fn,
                });
            }
            TokenTree::Group(group) => collect_words(group.stream(), words),
            _ => {}
        }
        after_fn = is_fn;
    }
}

/// Identifiers between backticks or in `[links]` of comments and documents.
fn code_words_in_prose(text: &str) -> Vec<Word> {
    let mut words = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for code in line.split('`').skip(1).step_by(2) {
            let is_part = |character: char| character.is_alphanumeric() || character == '_';
            for name in code.split(|character| !is_part(character)) {
                words.push(Word {
                    name: name.to_owned(),
                    line: index + 1,
                    declares_function: false,
                });
            }
        }
    }
    words
}

/// A text with joined lines and without comment markers, in lower case.
struct FlowingText {
    text: String,
    /// Byte offset in `text` at which each line starts.
    line_starts: Vec<usize>,
}

impl FlowingText {
    fn new(original: &str) -> FlowingText {
        let mut text = String::with_capacity(original.len());
        let mut line_starts = Vec::new();
        for line in original.lines() {
            line_starts.push(text.len());
            let marks = |character: char| "/!#*>|".contains(character) || character.is_whitespace();
            let line = line.trim_start_matches(marks).trim_end_matches(['\\', ' ']);
            for word in line.split_whitespace() {
                text.push_str(&word.to_lowercase());
                text.push(' ');
            }
        }
        FlowingText { text, line_starts }
    }

    fn find_phrase(&self, phrase: &str) -> Vec<usize> {
        let is_word = |character: Option<char>| character.is_some_and(char::is_alphanumeric);
        let mut lines = Vec::new();
        for (at, _) in self.text.match_indices(phrase) {
            let before = self.text[..at].chars().next_back();
            let after = self.text[at + phrase.len()..].chars().next();
            let starts_inside = is_word(before) && is_word(phrase.chars().next());
            let ends_inside = is_word(after) && is_word(phrase.chars().next_back());
            if !starts_inside && !ends_inside {
                lines.push(self.line_starts.partition_point(|&start| start <= at));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(list: &str, path: &str, text: &str) -> Vec<(usize, String)> {
        let entries = parse_list(list).unwrap();
        let places = find_retired(path, text, &entries);
        places
            .into_iter()
            .map(|place| (place.line, place.name))
            .collect()
    }

    #[test]
    fn identifiers_match_exactly() {
        let text = "// The train of thought, `Train::push`.\nstruct Trainer;\nstruct Train;";
        let found = find("identifier Train", "a.rs", text);
        assert_eq!(found, [(1, "Train".into()), (3, "Train".into())]);
    }

    #[test]
    fn functions_match_where_declared() {
        let text = "fn write() {}\nfn other() { write() }";
        assert_eq!(
            find("function write in: iwarp/", "iwarp/a.rs", text),
            [(1, "write".into())]
        );
        assert!(find("function write in: iwarp/", "tcp/a.rs", text).is_empty());
    }

    #[test]
    fn phrases_match_across_comment_lines() {
        let text = "fn a() {}\n/// The Way\n/// of a byte, and bytes.";
        assert_eq!(
            find("phrase way of a byte", "a.rs", text),
            [(2, "\"way of a byte\"".into())]
        );
        assert!(find("phrase of a by", "a.rs", text).is_empty());
    }

    #[test]
    fn a_line_that_is_no_entry_is_refused() {
        assert!(parse_list("# words\n\nphrase").is_err());
        assert!(parse_list("word train").is_err());
    }
}
