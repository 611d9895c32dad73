//! The code of scripts: assertions over the state of the newest connection and the stack's
//! counters.
//!
//! ```text
//! code       = assertion { (";" | newline) assertion }
//! assertion  = "assert" or { "," or }          all must hold
//! or         = and { "or" and } ;  and = not { "and" not } ;  not = ["not"] comparison
//! comparison = sum [ ("==" | "!=" | "<" | "<=" | ">" | ">=") sum ]
//! sum        = product { ("+" | "-") product } ;  product = unary { ("*" | "/" | "%") unary }
//! unary      = ["-"] ( number | name | "(" or ")" )
//! ```

use crate::lexer::{Token, tokens};
use crate::script::At;

struct Eval<'a> {
    tokens: Vec<Token>,
    at: usize,
    line: usize,
    value: &'a dyn Fn(&str) -> Option<i64>,
    /// Names met, with their values.
    seen: Vec<(String, i64)>,
}

/// Runs `code`, which begins on `line`. `value` knows the names.
pub(crate) fn check(
    code: &str,
    line: usize,
    value: &dyn Fn(&str) -> Option<i64>,
) -> Result<(), At> {
    // Inside parentheses a line does not end an assertion.
    let mut depth = 0i32;
    let mut statements = vec![(line, String::new())];
    let mut at = line;
    for c in code.chars() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        at += usize::from(c == '\n');
        if depth == 0 && (c == '\n' || c == ';') {
            statements.push((at, String::new()));
        } else if let Some((_, s)) = statements.last_mut() {
            s.push(c);
        }
    }
    for (line, s) in statements {
        let tokens = tokens(&s).map_err(|e| At::new(line, e.message))?;
        if tokens.is_empty() {
            continue;
        }
        let mut e = Eval {
            tokens: tokens.into_iter().map(|(_, t)| t).collect(),
            at: 0,
            line,
            value,
            seen: vec![],
        };
        e.assertion(s.trim())?;
    }
    Ok(())
}

impl Eval<'_> {
    fn error<T>(&self, m: impl Into<String>) -> Result<T, At> {
        Err(At::new(self.line, m))
    }

    fn word(&mut self, w: &str) -> bool {
        let yes = matches!(self.tokens.get(self.at), Some(Token::Word(x)) if x == w);
        self.at += usize::from(yes);
        yes
    }

    fn punct(&mut self, p: &str) -> bool {
        let yes = p
            .chars()
            .enumerate()
            .all(|(i, c)| self.tokens.get(self.at + i) == Some(&Token::Punct(c)));
        self.at += if yes { p.len() } else { 0 };
        yes
    }

    fn assertion(&mut self, text: &str) -> Result<(), At> {
        if !self.word("assert") {
            return self.error(format!("{text:?}: code is made of `assert expression`"));
        }
        loop {
            if self.or()? == 0 {
                let seen: Vec<_> = self
                    .seen
                    .iter()
                    .map(|(n, v)| format!("{n} = {v}"))
                    .collect();
                return self.error(format!("{text:?} does not hold: {}", seen.join(", ")));
            }
            if !self.punct(",") {
                break;
            }
        }
        match self.tokens.get(self.at) {
            None => Ok(()),
            Some(t) => self.error(format!("{text:?}: `{t}` is not expected there")),
        }
    }

    fn or(&mut self) -> Result<i64, At> {
        let mut v = self.and()?;
        while self.word("or") {
            let right = self.and()?;
            v = i64::from(v != 0 || right != 0);
        }
        Ok(v)
    }

    fn and(&mut self) -> Result<i64, At> {
        let mut v = self.not()?;
        while self.word("and") {
            let right = self.not()?;
            v = i64::from(v != 0 && right != 0);
        }
        Ok(v)
    }

    fn not(&mut self) -> Result<i64, At> {
        if self.word("not") {
            return Ok(i64::from(self.not()? == 0));
        }
        let left = self.sum()?;
        for (op, holds) in [
            ("==", i64::eq as fn(&i64, &i64) -> bool),
            ("!=", i64::ne),
            ("<=", i64::le),
            (">=", i64::ge),
            ("<", i64::lt),
            (">", i64::gt),
        ] {
            if self.punct(op) {
                let right = self.sum()?;
                return Ok(i64::from(holds(&left, &right)));
            }
        }
        Ok(left)
    }

    fn checked(&self, v: Option<i64>) -> Result<i64, At> {
        v.map_or_else(
            || self.error("the expression overflows or divides by 0"),
            Ok,
        )
    }

    fn sum(&mut self) -> Result<i64, At> {
        let mut v = self.product()?;
        loop {
            if self.punct("+") {
                let r = self.product()?;
                v = self.checked(v.checked_add(r))?;
            } else if self.punct("-") {
                let r = self.product()?;
                v = self.checked(v.checked_sub(r))?;
            } else {
                return Ok(v);
            }
        }
    }

    fn product(&mut self) -> Result<i64, At> {
        let mut v = self.unary()?;
        loop {
            let op = ["*", "/", "%"].into_iter().find(|o| self.punct(o));
            let Some(op) = op else { return Ok(v) };
            let r = self.unary()?;
            v = self.checked(match op {
                "*" => v.checked_mul(r),
                "/" => v.checked_div(r),
                _ => v.checked_rem(r),
            })?;
        }
    }

    fn unary(&mut self) -> Result<i64, At> {
        if self.punct("-") {
            let v = self.unary()?;
            return self.checked(v.checked_neg());
        }
        if self.punct("(") {
            let v = self.or()?;
            if !self.punct(")") {
                return self.error("`)` is missing");
            }
            return Ok(v);
        }
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        match token {
            Some(Token::Int(v)) => Ok(v),
            Some(Token::Word(w)) => {
                let Some(v) = (self.value)(&w) else {
                    return self.error(format!("{w:?} is no name known here"));
                };
                self.seen.push((w, v));
                Ok(v)
            }
            Some(t) => self.error(format!("`{t}` is no value")),
            None => self.error("the expression ends too early"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(code: &str) -> Result<(), At> {
        check(code, 10, &|n| match n {
            "cwnd" => Some(10),
            "mss" => Some(2),
            _ => None,
        })
    }

    #[test]
    fn assertions_compute_and_compare() {
        run("assert cwnd == 5 * mss").unwrap();
        run("\nassert cwnd + 1 > 10, mss != 3; assert not (cwnd < mss or mss > 2)\n").unwrap();
        run("assert -cwnd + 12 == mss and 7 % 4 == 3").unwrap();
        run("assert (cwnd ==\n 10)").unwrap();
    }

    #[test]
    fn what_does_not_hold_names_its_line_and_values() {
        let e = run("\n\nassert cwnd == 9 * mss").unwrap_err();
        assert_eq!(e.line, 12);
        assert!(e.message.contains("cwnd = 10, mss = 2"), "{}", e.message);
        for (bad, says) in [
            ("assert wine == 1", "wine"),
            ("print 1", "assert"),
            ("assert 1 / 0", "divides"),
            ("assert (1", ")"),
            ("assert 1 2", "not expected"),
            ("assert", "too early"),
        ] {
            let e = run(bad).unwrap_err();
            assert!(e.message.contains(says), "{bad}: {}", e.message);
        }
    }
}
