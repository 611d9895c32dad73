//! Splits the text of a script into tokens.

use crate::script::LineError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Int(i64),
    /// A number with a decimal point, times 10^9: seconds as nanoseconds.
    Fraction(i64),
    Word(String),
    Str(String),
    /// `--name=value`
    Flag(String, String),
    /// Between `%{` and `}%`.
    Code(String),
    /// Between backticks.
    Shell,
    Ellipsis,
    Punct(char),
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Token::Int(value) => write!(f, "{value}"),
            Token::Fraction(value) => write!(f, "{}", *value as f64 / 1e9),
            Token::Word(word) => f.write_str(word),
            Token::Str(text) => write!(f, "{text:?}"),
            Token::Flag(name, value) => write!(f, "--{name}={value}"),
            Token::Code(_) => f.write_str("%{ code }%"),
            Token::Shell => f.write_str("`command`"),
            Token::Ellipsis => f.write_str("..."),
            Token::Punct(symbol) => write!(f, "{symbol}"),
        }
    }
}

/// The unread text.
struct Cursor<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Cursor<'a> {
    /// Takes the next `count` bytes.
    fn take(&mut self, count: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(count);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }

    /// Takes characters while `belongs` returns `true`.
    fn take_while(&mut self, belongs: impl Fn(char) -> bool) -> &'a str {
        let count = self
            .rest
            .find(|character| !belongs(character))
            .unwrap_or(self.rest.len());
        self.take(count)
    }

    /// Takes the text before `end`, and `end` itself. `what` names the text in error messages.
    fn take_until(&mut self, end: &str, what: &str) -> Result<&'a str, LineError> {
        let Some(n) = self.rest.find(end) else {
            return Err(LineError::new(self.line, format!("{what} has no {end:?}")));
        };
        let inside = self.take(n);
        self.take(end.len());
        Ok(inside)
    }
}

/// Splits text into tokens, each with its line number from 1.
pub(crate) fn tokenize(text: &str) -> Result<Vec<(usize, Token)>, LineError> {
    let mut cursor = Cursor {
        rest: text,
        line: 1,
    };
    let mut out = vec![];
    while let Some(first) = cursor.rest.chars().next() {
        let line = cursor.line;
        let second = cursor.rest[first.len_utf8()..].chars().next();
        let token = if first.is_whitespace() {
            cursor.take(first.len_utf8());
            continue;
        } else if first == '#' || cursor.rest.starts_with("//") {
            cursor.take_while(|cursor| cursor != '\n');
            continue;
        } else if cursor.rest.starts_with("/*") {
            cursor.take_until("*/", "the comment")?;
            continue;
        } else if cursor.rest.starts_with("%{") {
            cursor.take(2);
            Token::Code(cursor.take_until("}%", "the code after %{")?.to_owned())
        } else if first == '`' {
            cursor.take(1);
            cursor.take_until("`", "the command")?;
            Token::Shell
        } else if first == '"' {
            cursor.take(1);
            let string = cursor.take_until("\"", "the string")?;
            if string.contains('\n') {
                return Err(LineError::new(line, "the string does not end on its line"));
            }
            Token::Str(string.to_owned())
        } else if cursor.rest.starts_with("--") {
            cursor.take(2);
            let name = cursor
                .take_while(|cursor| cursor.is_ascii_alphanumeric() || cursor == '_')
                .to_owned();
            let mut value = String::new();
            if cursor.rest.starts_with('=') {
                cursor.take(1);
                if cursor.rest.starts_with('"') {
                    cursor.take(1);
                    value = cursor.take_until("\"", "the option's value")?.to_owned();
                } else {
                    value = cursor
                        .take_while(|cursor| !cursor.is_whitespace())
                        .to_owned();
                }
            }
            Token::Flag(name, value)
        } else if cursor.rest.starts_with("...") {
            cursor.take(3);
            Token::Ellipsis
        } else if first.is_ascii_digit()
            || (first == '.' && second.is_some_and(|cursor| cursor.is_ascii_digit()))
        {
            lex_number(&mut cursor)?
        } else if first.is_ascii_alphabetic() || first == '_' {
            let word = cursor.take_while(|cursor| cursor.is_ascii_alphanumeric() || cursor == '_');
            Token::Word(word.to_owned())
        } else if first.is_ascii_punctuation() {
            cursor.take(1);
            Token::Punct(first)
        } else {
            return Err(LineError::new(
                line,
                format!("{first:?} is not part of the language of scripts"),
            ));
        };
        out.push((line, token));
    }
    Ok(out)
}

/// Reads a hexadecimal or decimal integer, or a decimal fraction.
fn lex_number(cursor: &mut Cursor<'_>) -> Result<Token, LineError> {
    let line = cursor.line;
    let large = || LineError::new(line, "the number is too large");
    if cursor.rest.starts_with("0x") {
        cursor.take(2);
        let digits = cursor.take_while(|cursor| cursor.is_ascii_hexdigit());
        let value = i64::from_str_radix(digits, 16).map_err(|_| large())?;
        return Ok(Token::Int(value));
    }
    let whole = cursor.take_while(|cursor| cursor.is_ascii_digit());
    let whole: i64 = if whole.is_empty() {
        0
    } else {
        whole.parse().map_err(|_| large())?
    };
    let fraction = cursor.rest.strip_prefix('.');
    if !fraction.is_some_and(|r| r.starts_with(|cursor: char| cursor.is_ascii_digit())) {
        return Ok(Token::Int(whole));
    }
    cursor.take(1);
    let digits = cursor.take_while(|cursor| cursor.is_ascii_digit());
    let mut nanos = 0;
    for i in 0..9 {
        let digit = digits.as_bytes().get(i).map_or(0, |d| i64::from(d - b'0'));
        nanos = nanos * 10 + digit;
    }
    let value = whole
        .checked_mul(1_000_000_000)
        .and_then(|w| w.checked_add(nanos));
    Ok(Token::Fraction(value.ok_or_else(large)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_the_lines_they_stand_on() {
        let t = tokenize("--mtu=1500 // no\n+.1 < P. /* x\n */ 0...0.25\n%{ a }%").unwrap();
        let kinds: Vec<_> = t.iter().map(|(l, t)| (*l, t.to_string())).collect();
        let want = [
            (1, "--mtu=1500"),
            (2, "+"),
            (2, "0.1"),
            (2, "<"),
            (2, "P"),
            (2, "."),
            (3, "0"),
            (3, "..."),
            (3, "0.25"),
            (4, "%{ code }%"),
        ];
        let want: Vec<_> = want.iter().map(|(l, s)| (*l, (*s).to_owned())).collect();
        assert_eq!(kinds, want);
    }

    #[test]
    fn an_unterminated_token_is_an_error_on_its_line() {
        assert_eq!(tokenize("\n\n%{ assert").unwrap_err().line, 3);
        assert_eq!(tokenize("\n/* ").unwrap_err().line, 2);
        assert_eq!(tokenize("\"abc\n\"").unwrap_err().line, 1);
        assert_eq!(tokenize("99999999999999999999").unwrap_err().line, 1);
        assert_eq!(tokenize("0 socket\n é").unwrap_err().line, 2);
    }
}
