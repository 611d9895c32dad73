//! Scripts as tokens.

use crate::script::At;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Int(i64),
    /// A decimal fraction, times 10^9.
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
            Token::Int(v) => write!(f, "{v}"),
            Token::Fraction(v) => write!(f, "{}", *v as f64 / 1e9),
            Token::Word(w) => f.write_str(w),
            Token::Str(s) => write!(f, "{s:?}"),
            Token::Flag(n, v) => write!(f, "--{n}={v}"),
            Token::Code(_) => f.write_str("%{ code }%"),
            Token::Shell => f.write_str("`command`"),
            Token::Ellipsis => f.write_str("..."),
            Token::Punct(c) => write!(f, "{c}"),
        }
    }
}

struct Cursor<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Cursor<'a> {
    /// Takes `n` bytes.
    fn take(&mut self, n: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(n);
        self.line += taken.matches('\n').count();
        self.rest = rest;
        taken
    }

    fn while_(&mut self, f: impl Fn(char) -> bool) -> &'a str {
        let n = self.rest.find(|c| !f(c)).unwrap_or(self.rest.len());
        self.take(n)
    }

    /// What stands before `end`, and takes both.
    fn until(&mut self, end: &str, what: &str) -> Result<&'a str, At> {
        let Some(n) = self.rest.find(end) else {
            return Err(At::new(self.line, format!("{what} has no {end:?}")));
        };
        let inside = self.take(n);
        self.take(end.len());
        Ok(inside)
    }
}

/// Each token with its line.
pub(crate) fn tokens(text: &str) -> Result<Vec<(usize, Token)>, At> {
    let mut c = Cursor {
        rest: text,
        line: 1,
    };
    let mut out = vec![];
    while let Some(ch) = c.rest.chars().next() {
        let line = c.line;
        let second = c.rest[ch.len_utf8()..].chars().next();
        let token = if ch.is_whitespace() {
            c.take(ch.len_utf8());
            continue;
        } else if ch == '#' || c.rest.starts_with("//") {
            c.while_(|c| c != '\n');
            continue;
        } else if c.rest.starts_with("/*") {
            c.until("*/", "the comment")?;
            continue;
        } else if c.rest.starts_with("%{") {
            c.take(2);
            Token::Code(c.until("}%", "the code after %{")?.to_owned())
        } else if ch == '`' {
            c.take(1);
            c.until("`", "the command")?;
            Token::Shell
        } else if ch == '"' {
            c.take(1);
            let s = c.until("\"", "the string")?;
            if s.contains('\n') {
                return Err(At::new(line, "the string does not end on its line"));
            }
            Token::Str(s.to_owned())
        } else if c.rest.starts_with("--") {
            c.take(2);
            let name = c
                .while_(|c| c.is_ascii_alphanumeric() || c == '_')
                .to_owned();
            let mut value = String::new();
            if c.rest.starts_with('=') {
                c.take(1);
                if c.rest.starts_with('"') {
                    c.take(1);
                    value = c.until("\"", "the option's value")?.to_owned();
                } else {
                    value = c.while_(|c| !c.is_whitespace()).to_owned();
                }
            }
            Token::Flag(name, value)
        } else if c.rest.starts_with("...") {
            c.take(3);
            Token::Ellipsis
        } else if ch.is_ascii_digit() || (ch == '.' && second.is_some_and(|c| c.is_ascii_digit())) {
            number(&mut c)?
        } else if ch.is_ascii_alphabetic() || ch == '_' {
            let w = c.while_(|c| c.is_ascii_alphanumeric() || c == '_');
            Token::Word(w.to_owned())
        } else if ch.is_ascii_punctuation() {
            c.take(1);
            Token::Punct(ch)
        } else {
            return Err(At::new(line, format!("{ch:?} means nothing here")));
        };
        out.push((line, token));
    }
    Ok(out)
}

fn number(c: &mut Cursor<'_>) -> Result<Token, At> {
    let line = c.line;
    let large = || At::new(line, "the number is too large");
    if c.rest.starts_with("0x") {
        c.take(2);
        let digits = c.while_(|c| c.is_ascii_hexdigit());
        let v = i64::from_str_radix(digits, 16).map_err(|_| large())?;
        return Ok(Token::Int(v));
    }
    let whole = c.while_(|c| c.is_ascii_digit());
    let whole: i64 = if whole.is_empty() {
        0
    } else {
        whole.parse().map_err(|_| large())?
    };
    let fraction = c.rest.strip_prefix('.');
    if !fraction.is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit())) {
        return Ok(Token::Int(whole));
    }
    c.take(1);
    let digits = c.while_(|c| c.is_ascii_digit());
    let mut nanos = 0;
    for i in 0..9 {
        let digit = digits.as_bytes().get(i).map_or(0, |d| i64::from(d - b'0'));
        nanos = nanos * 10 + digit;
    }
    let v = whole
        .checked_mul(1_000_000_000)
        .and_then(|w| w.checked_add(nanos));
    Ok(Token::Fraction(v.ok_or_else(large)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_flags_and_comments_become_tokens_with_their_lines() {
        let t = tokens("--mtu=1500 // no\n+.1 < P. /* x\n */ 0...0.25\n%{ a }%").unwrap();
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
    fn what_does_not_end_is_an_error_on_its_line() {
        assert_eq!(tokens("\n\n%{ assert").unwrap_err().line, 3);
        assert_eq!(tokens("\n/* ").unwrap_err().line, 2);
        assert_eq!(tokens("\"abc\n\"").unwrap_err().line, 1);
        assert_eq!(tokens("99999999999999999999").unwrap_err().line, 1);
        assert_eq!(tokens("0 socket\n é").unwrap_err().line, 2);
    }
}
