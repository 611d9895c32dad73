//! Lines of `//` comments.

use proc_macro2::{LineColumn, TokenStream, TokenTree};

/// Line numbers (from 1) of `//` comments, without documentation comments.
pub fn comment_lines(text: &str) -> Vec<usize> {
    let mut literals = Vec::new();
    if let Ok(tokens) = text.parse::<TokenStream>() {
        collect_literals(tokens, &mut literals);
    }
    let mut next_literal = 0;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        for (byte, _) in line.match_indices("//") {
            let column = line[..byte].chars().count();
            let at = LineColumn {
                line: line_number,
                column,
            };
            while literals
                .get(next_literal)
                .is_some_and(|&(_, end)| end <= at)
            {
                next_literal += 1;
            }
            // To the tokenizer, documentation is a literal.
            let in_literal = literals
                .get(next_literal)
                .is_some_and(|&(start, _)| start <= at);
            if !in_literal {
                found.push(line_number);
                break;
            }
        }
    }
    found
}

fn collect_literals(tokens: TokenStream, found: &mut Vec<(LineColumn, LineColumn)>) {
    for token in tokens {
        match token {
            TokenTree::Literal(literal) => {
                found.push((literal.span().start(), literal.span().end()));
            }
            TokenTree::Group(group) => collect_literals(group.stream(), found),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_and_documentation_are_no_comments() {
        let text = "//! A crate.\n/// A function.\n// Why.\nfn main() {\n    let url = \"http://a\"; // Why.\n    let other = \"//\";\n}\n";
        assert_eq!(comment_lines(text), [3, 5]);
    }

    #[test]
    fn four_slashes_are_a_comment() {
        assert_eq!(comment_lines("//// text\nfn main() {}\n"), [1]);
    }
}
