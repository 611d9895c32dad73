//! Counts comments that may have to be read twice: words and openings that mark relative clauses
//! used as nouns. The counts show where to look; they have no limit.

use crate::counts::Place;
use crate::source::SourceFile;

/// Words that are rare in plain technical comments.
const FLAGGED_WORDS: [&str; 6] = ["what", "who", "whom", "nobody", "such", "beside"];
/// First words of documentation without a subject.
const FLAGGED_OPENINGS: [&str; 5] = ["What", "Of", "It", "Whether", "Who"];

/// Comments of one or more files, with the findings among them.
#[derive(Default)]
pub struct LanguageCounts {
    /// Lines that consist of a comment.
    pub comment_lines: usize,
    /// Comment lines with at least one of [`FLAGGED_WORDS`].
    pub flagged_lines: Vec<Place>,
    /// Blocks of documentation.
    pub doc_comments: usize,
    /// Blocks of documentation that open with one of [`FLAGGED_OPENINGS`].
    pub flagged_openings: Vec<Place>,
}

impl LanguageCounts {
    /// Adds the comments of a file, tests included.
    pub fn add_file(&mut self, file: &SourceFile) {
        self.add_text(&file.path, &file.text);
    }

    fn add_text(&mut self, path: &str, text: &str) {
        let mut in_docs = false;
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            let place = || Place {
                path: path.to_owned(),
                line: index + 1,
                name: line.to_owned(),
            };
            let is_doc = line.starts_with("///") || line.starts_with("//!");
            if line.starts_with("//") {
                self.comment_lines += 1;
                if words(line).any(is_flagged) {
                    self.flagged_lines.push(place());
                }
            }
            if is_doc && !in_docs {
                self.doc_comments += 1;
                let opening = line[3..].split_whitespace().next().unwrap_or("");
                let word = opening
                    .split(|letter: char| !letter.is_alphanumeric())
                    .next();
                if word.is_some_and(|word| FLAGGED_OPENINGS.contains(&word)) {
                    self.flagged_openings.push(place());
                }
            }
            in_docs = is_doc;
        }
    }
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .filter(|word| !word.is_empty())
}

fn is_flagged(word: &str) -> bool {
    FLAGGED_WORDS
        .iter()
        .any(|flagged| word.eq_ignore_ascii_case(flagged))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_openings_are_counted() {
        let mut counts = LanguageCounts::default();
        let text = "//! What a link can do.\n//! Such links.\n\n/// Disarms the timer.\n\
            fn disarm() {\n    // Beside the wheel.\n    go(\"what\"); // what\n}\n/// `It` is a name.\n";
        counts.add_text("a.rs", text);
        assert_eq!(counts.comment_lines, 5);
        assert_eq!(counts.doc_comments, 3);
        let lines = |places: &[Place]| places.iter().map(|place| place.line).collect::<Vec<_>>();
        assert_eq!(lines(&counts.flagged_lines), [1, 2, 6]);
        assert_eq!(lines(&counts.flagged_openings), [1]);
    }

    #[test]
    fn parts_of_words_are_not_flagged() {
        let mut counts = LanguageCounts::default();
        counts.add_text(
            "a.rs",
            "// whatever whole suchlike besides is_what\n/// Offset.\n",
        );
        assert_eq!(
            (counts.flagged_lines.len(), counts.flagged_openings.len()),
            (0, 0)
        );
    }
}
