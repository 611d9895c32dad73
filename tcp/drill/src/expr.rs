//! Evaluates the code of scripts: assertions about the state of the newest connection and the stack's
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

use crate::lexer::{Token, tokenize};
use crate::script::LineError;

/// One line of assertions being evaluated.
struct Evaluator<'a> {
    tokens: Vec<Token>,
    /// Index of the next token.
    at: usize,
    line: usize,
    value: &'a dyn Fn(&str) -> Option<i64>,
    /// The names used so far with their values, for error messages.
    seen: Vec<(String, i64)>,
}

/// Checks the assertions of `code`, which begins on `line`. `value` returns the value of a name.
pub(crate) fn check_assertions(
    code: &str,
    line: usize,
    value: &dyn Fn(&str) -> Option<i64>,
) -> Result<(), LineError> {
    // A newline inside parentheses does not end an assertion.
    let mut depth = 0i32;
    let mut statements = vec![(line, String::new())];
    let mut current_line = line;
    for character in code.chars() {
        depth += i32::from(character == '(') - i32::from(character == ')');
        current_line += usize::from(character == '\n');
        if depth == 0 && (character == '\n' || character == ';') {
            statements.push((current_line, String::new()));
        } else if let Some((_, statement)) = statements.last_mut() {
            statement.push(character);
        }
    }
    for (line, statement) in statements {
        let tokens = tokenize(&statement).map_err(|error| LineError::new(line, error.message))?;
        if tokens.is_empty() {
            continue;
        }
        let mut evaluator = Evaluator {
            tokens: tokens.into_iter().map(|(_, t)| t).collect(),
            at: 0,
            line,
            value,
            seen: vec![],
        };
        evaluator.check_assertion(statement.trim())?;
    }
    Ok(())
}

impl Evaluator<'_> {
    fn error<T>(&self, message: impl Into<String>) -> Result<T, LineError> {
        Err(LineError::new(self.line, message))
    }

    fn eat_word(&mut self, word: &str) -> bool {
        let matched = matches!(self.tokens.get(self.at), Some(Token::Word(found)) if found == word);
        self.at += usize::from(matched);
        matched
    }

    fn eat_operator(&mut self, operator: &str) -> bool {
        let matched = operator
            .chars()
            .enumerate()
            .all(|(ahead, symbol)| self.tokens.get(self.at + ahead) == Some(&Token::Punct(symbol)));
        self.at += if matched { operator.len() } else { 0 };
        matched
    }

    fn check_assertion(&mut self, text: &str) -> Result<(), LineError> {
        if !self.eat_word("assert") {
            return self.error(format!("{text:?}: code is made of `assert expression`"));
        }
        loop {
            if self.eval_or()? == 0 {
                let seen: Vec<_> = self
                    .seen
                    .iter()
                    .map(|(name, value)| format!("{name} = {value}"))
                    .collect();
                return self.error(format!("{text:?} does not hold: {}", seen.join(", ")));
            }
            if !self.eat_operator(",") {
                break;
            }
        }
        match self.tokens.get(self.at) {
            None => Ok(()),
            Some(token) => self.error(format!("{text:?}: `{token}` is not expected there")),
        }
    }

    fn eval_or(&mut self) -> Result<i64, LineError> {
        let mut value = self.eval_and()?;
        while self.eat_word("or") {
            let right = self.eval_and()?;
            value = i64::from(value != 0 || right != 0);
        }
        Ok(value)
    }

    fn eval_and(&mut self) -> Result<i64, LineError> {
        let mut value = self.eval_not()?;
        while self.eat_word("and") {
            let right = self.eval_not()?;
            value = i64::from(value != 0 && right != 0);
        }
        Ok(value)
    }

    fn eval_not(&mut self) -> Result<i64, LineError> {
        if self.eat_word("not") {
            return Ok(i64::from(self.eval_not()? == 0));
        }
        let left = self.eval_sum()?;
        for (operator, holds) in [
            ("==", i64::eq as fn(&i64, &i64) -> bool),
            ("!=", i64::ne),
            ("<=", i64::le),
            (">=", i64::ge),
            ("<", i64::lt),
            (">", i64::gt),
        ] {
            if self.eat_operator(operator) {
                let right = self.eval_sum()?;
                return Ok(i64::from(holds(&left, &right)));
            }
        }
        Ok(left)
    }

    fn check_overflow(&self, value: Option<i64>) -> Result<i64, LineError> {
        value.map_or_else(
            || self.error("the expression overflows or divides by 0"),
            Ok,
        )
    }

    fn eval_sum(&mut self) -> Result<i64, LineError> {
        let mut value = self.eval_product()?;
        loop {
            if self.eat_operator("+") {
                let right = self.eval_product()?;
                value = self.check_overflow(value.checked_add(right))?;
            } else if self.eat_operator("-") {
                let right = self.eval_product()?;
                value = self.check_overflow(value.checked_sub(right))?;
            } else {
                return Ok(value);
            }
        }
    }

    fn eval_product(&mut self) -> Result<i64, LineError> {
        let mut value = self.eval_unary()?;
        loop {
            let operator = ["*", "/", "%"]
                .into_iter()
                .find(|candidate| self.eat_operator(candidate));
            let Some(operator) = operator else {
                return Ok(value);
            };
            let right = self.eval_unary()?;
            value = self.check_overflow(match operator {
                "*" => value.checked_mul(right),
                "/" => value.checked_div(right),
                _ => value.checked_rem(right),
            })?;
        }
    }

    fn eval_unary(&mut self) -> Result<i64, LineError> {
        if self.eat_operator("-") {
            let value = self.eval_unary()?;
            return self.check_overflow(value.checked_neg());
        }
        if self.eat_operator("(") {
            let value = self.eval_or()?;
            if !self.eat_operator(")") {
                return self.error("`)` is missing");
            }
            return Ok(value);
        }
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        match token {
            Some(Token::Int(value)) => Ok(value),
            Some(Token::Word(name)) => {
                let Some(value) = (self.value)(&name) else {
                    return self.error(format!("{name:?} is not a name that assertions know"));
                };
                self.seen.push((name, value));
                Ok(value)
            }
            Some(token) => self.error(format!("`{token}` is no value")),
            None => self.error("the expression ends too early"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(code: &str) -> Result<(), LineError> {
        check_assertions(code, 10, &|n| match n {
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
    fn a_failed_assertion_names_its_line_and_values() {
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
