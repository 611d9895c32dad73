//! Parses scripts: options, times, system calls. Packets are parsed by `packet_parser`.

use crate::lexer::{Token, tokenize};
use crate::packet_parser;
use crate::script::{
    Action, Argument, EventTime, LineError, Script, ScriptEvent, ScriptPacket, SystemCall,
};

/// The unparsed tokens of a script.
pub(crate) struct TokenStream {
    all: Vec<(usize, Token)>,
    at: usize,
    last_line: usize,
}

impl TokenStream {
    /// Returns the next token.
    pub(crate) fn peek(&self) -> Option<&Token> {
        self.all.get(self.at).map(|(_, token)| token)
    }

    /// Returns the token `ahead` places after the next.
    fn peek_at(&self, ahead: usize) -> Option<&Token> {
        self.all.get(self.at + ahead).map(|(_, token)| token)
    }

    /// Takes the next token.
    pub(crate) fn next(&mut self) -> Option<Token> {
        let (_, token) = self.all.get(self.at)?;
        self.at += 1;
        Some(token.clone())
    }

    /// Returns the line of the next token, or of the end.
    pub(crate) fn line(&self) -> usize {
        self.all
            .get(self.at)
            .map_or(self.last_line, |(line, _)| *line)
    }

    /// Returns whether the next token is this punctuation character.
    pub(crate) fn is_next(&self, symbol: char) -> bool {
        self.peek() == Some(&Token::Punct(symbol))
    }

    /// Takes this punctuation character if it comes next, and returns whether it did.
    pub(crate) fn eat_punct(&mut self, symbol: char) -> bool {
        let matched = self.is_next(symbol);
        self.at += usize::from(matched);
        matched
    }

    /// Takes this word if it comes next, and returns whether it did.
    pub(crate) fn eat_word(&mut self, word: &str) -> bool {
        let matched = matches!(self.peek(), Some(Token::Word(found)) if found == word);
        self.at += usize::from(matched);
        matched
    }

    /// Returns an error at the next token.
    pub(crate) fn syntax_error<T>(&self, wanted: &str) -> Result<T, LineError> {
        let found = self
            .peek()
            .map_or("the end of the script".into(), |token| format!("`{token}`"));
        Err(LineError::new(
            self.line(),
            format!("syntax error: expected {wanted}, found {found}"),
        ))
    }

    /// Takes this punctuation character, which must come next.
    pub(crate) fn expect_punct(&mut self, symbol: char) -> Result<(), LineError> {
        if self.eat_punct(symbol) {
            return Ok(());
        }
        self.syntax_error(&format!("`{symbol}`"))
    }

    /// Takes an integer, which must come next. `what` names it in error messages.
    pub(crate) fn expect_int(&mut self, what: &str) -> Result<i64, LineError> {
        let negative = self.is_next('-');
        match self.peek_at(usize::from(negative)) {
            Some(&Token::Int(value)) => {
                self.at += 1 + usize::from(negative);
                Ok(if negative { -value } else { value })
            }
            _ => self.syntax_error(what),
        }
    }

    /// Takes an integer that fits the type. `what` names it in error messages.
    pub(crate) fn expect_number<T: TryFrom<i64>>(&mut self, what: &str) -> Result<T, LineError> {
        let line = self.line();
        let value = self.expect_int(what)?;
        T::try_from(value)
            .map_err(|_| LineError::new(line, format!("{value} is out of range for {what}")))
    }

    /// Takes a word, which must come next. `what` names it in error messages.
    pub(crate) fn expect_word(&mut self, what: &str) -> Result<String, LineError> {
        match self.peek() {
            Some(Token::Word(word)) => {
                let word = word.clone();
                self.at += 1;
                Ok(word)
            }
            _ => self.syntax_error(what),
        }
    }
}

/// Parses a whole script. The validity of an ICMP type depends on the IP version and is checked when the
/// packet is sent.
pub(crate) fn parse_script(text: &str) -> Result<Script, LineError> {
    let all = tokenize(text)?;
    let last_line = text.lines().count().max(1);
    let mut tokens = TokenStream {
        all,
        at: 0,
        last_line,
    };
    let mut script = Script::default();
    while let Some(token) = tokens.peek() {
        let line = tokens.line();
        match token {
            Token::Flag(name, value) => {
                if !script.events.is_empty() {
                    return Err(LineError::new(line, "options come before the first event"));
                }
                script.options.push((line, name.clone(), value.clone()));
                tokens.next();
            }
            // Shell commands configure a kernel and are skipped; `--so_flags` configures the stack.
            Token::Shell => {
                tokens.next();
            }
            _ => {
                if let Some(event) = parse_event(&mut tokens)? {
                    script.events.push(event);
                }
            }
        }
    }
    if script.events.is_empty() {
        return Err(LineError::new(last_line, "the script has no events"));
    }
    Ok(script)
}

/// Parses a time and the event at it; `None` for a shell command.
fn parse_event(tokens: &mut TokenStream) -> Result<Option<ScriptEvent>, LineError> {
    let line = tokens.line();
    let when = parse_time(tokens)?;
    let action = match tokens.peek() {
        Some(Token::Punct('<')) => {
            tokens.next();
            Action::Inject(packet_parser::parse_packet(tokens, true)?)
        }
        Some(Token::Punct('>')) => {
            tokens.next();
            match packet_parser::parse_packet(tokens, false)? {
                ScriptPacket::Tcp(packet) => Action::Expect(packet),
                ScriptPacket::Icmp(_) => {
                    return Err(LineError::new(line, "ICMP can only be injected (`<`)"));
                }
            }
        }
        Some(Token::Code(code)) => {
            let code = code.clone();
            tokens.next();
            Action::Code(code)
        }
        Some(Token::Shell) => {
            tokens.next();
            return Ok(None);
        }
        Some(Token::Word(_)) => Action::Call(parse_call(tokens, None)?),
        Some(Token::Ellipsis) => {
            tokens.next();
            let until = parse_time(tokens)?;
            Action::Call(parse_call(tokens, Some(until))?)
        }
        _ => return tokens.syntax_error("`<`, `>`, a system call, or %{ code }% after the time"),
    };
    let ranged = matches!(
        when,
        EventTime::Any | EventTime::AbsoluteRange(..) | EventTime::RelativeRange(..)
    );
    if ranged && !matches!(action, Action::Expect(_)) {
        return Err(LineError::new(
            line,
            "only packets that the stack sends can have a range of times or `*`",
        ));
    }
    Ok(Some(ScriptEvent { line, when, action }))
}

/// Parses seconds, whole or a decimal fraction, into nanoseconds.
fn parse_nanos(tokens: &mut TokenStream) -> Result<u64, LineError> {
    let nanos = match tokens.peek() {
        Some(Token::Int(nanos)) => nanos.checked_mul(1_000_000_000),
        Some(Token::Fraction(nanos)) => Some(*nanos),
        _ => return tokens.syntax_error("a time (such as 0.5, +.1, or *)"),
    };
    let Some(nanos) = nanos.and_then(|nanos| u64::try_from(nanos).ok()) else {
        return Err(LineError::new(tokens.line(), "the time is too large"));
    };
    tokens.next();
    Ok(nanos)
}

/// `0.5`, `+.1`, `0.5~1`, `+0.5~+1` or `*`.
fn parse_time(tokens: &mut TokenStream) -> Result<EventTime, LineError> {
    if tokens.eat_punct('*') {
        return Ok(EventTime::Any);
    }
    let line = tokens.line();
    let relative = tokens.eat_punct('+');
    let from = parse_nanos(tokens)?;
    if tokens.eat_punct('~') {
        if tokens.eat_punct('+') != relative {
            return Err(LineError::new(
                line,
                "both times of a range have a `+`, or neither",
            ));
        }
        let to = parse_nanos(tokens)?;
        if to < from {
            return Err(LineError::new(
                line,
                "the range of times ends before it begins",
            ));
        }
        return Ok(if relative {
            EventTime::RelativeRange(from, to)
        } else {
            EventTime::AbsoluteRange(from, to)
        });
    }
    Ok(if relative {
        EventTime::Relative(from)
    } else {
        EventTime::Absolute(from)
    })
}

/// `name(args) = result [ERRNO] [(remark)]`
fn parse_call(tokens: &mut TokenStream, until: Option<EventTime>) -> Result<SystemCall, LineError> {
    let name = tokens.expect_word("the name of a system call")?;
    tokens.expect_punct('(')?;
    let mut args = vec![];
    while !tokens.is_next(')') {
        if !args.is_empty() {
            tokens.expect_punct(',')?;
        }
        args.push(parse_argument(tokens)?);
    }
    tokens.expect_punct(')')?;
    tokens.expect_punct('=')?;
    let result = if tokens.eat_punct('*') || tokens.peek() == Some(&Token::Ellipsis) {
        if tokens.peek() == Some(&Token::Ellipsis) {
            tokens.next();
        }
        None
    } else {
        Some(tokens.expect_int("the result of the call")?)
    };
    let mut errno = None;
    if matches!(tokens.peek(), Some(Token::Word(word)) if word.starts_with('E')) {
        errno = Some(tokens.expect_word("an error name")?);
    }
    if tokens.is_next('(') {
        // The explanation of the result, as printed by strace.
        while !tokens.eat_punct(')') {
            if tokens.next().is_none() {
                return tokens.syntax_error("`)`");
            }
        }
    }
    Ok(SystemCall {
        name,
        args,
        result,
        errno,
        until,
    })
}

/// Parses one argument of a system call.
fn parse_argument(tokens: &mut TokenStream) -> Result<Argument, LineError> {
    match tokens.peek() {
        Some(Token::Ellipsis) => {
            tokens.next();
            Ok(Argument::Any)
        }
        Some(Token::Int(_) | Token::Punct('-')) => {
            Ok(Argument::Int(tokens.expect_int("a number")?))
        }
        Some(Token::Str(text)) => {
            let text = text.clone();
            tokens.next();
            Ok(Argument::Str(text))
        }
        Some(Token::Word(_)) => {
            let mut words = vec![tokens.expect_word("a symbol")?];
            while tokens.eat_punct('|') {
                words.push(tokens.expect_word("a symbol after `|`")?);
            }
            Ok(Argument::Symbols(words))
        }
        Some(Token::Punct('[')) => {
            tokens.next();
            let mut all = vec![];
            while !tokens.is_next(']') {
                if !all.is_empty() {
                    tokens.expect_punct(',')?;
                }
                all.push(parse_argument(tokens)?);
            }
            tokens.expect_punct(']')?;
            Ok(Argument::List(all))
        }
        Some(Token::Punct('{')) => {
            tokens.next();
            let mut all = vec![];
            while !tokens.is_next('}') {
                if !all.is_empty() {
                    tokens.expect_punct(',')?;
                }
                let name = tokens.expect_word("the name of a field")?;
                tokens.expect_punct('=')?;
                all.push((name, parse_argument(tokens)?));
            }
            tokens.expect_punct('}')?;
            Ok(Argument::Struct(all))
        }
        _ => tokens.syntax_error("an argument"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_single(text: &str) -> ScriptEvent {
        let mut script = parse_script(text).unwrap();
        assert_eq!(script.events.len(), 1);
        script.events.remove(0)
    }

    fn wrong(text: &str) -> (usize, String) {
        let e = parse_script(text).unwrap_err();
        (e.line, e.message)
    }

    #[test]
    fn times_are_absolute_relative_ranged_or_any() {
        let when = |t: &str| parse_single(&format!("{t} > . 1:1(0) ack 1")).when;
        assert_eq!(when("0.25"), EventTime::Absolute(250_000_000));
        assert_eq!(when("+.1"), EventTime::Relative(100_000_000));
        assert_eq!(
            when("+1~+2"),
            EventTime::RelativeRange(1_000_000_000, 2_000_000_000)
        );
        assert_eq!(
            when("1~1.5"),
            EventTime::AbsoluteRange(1_000_000_000, 1_500_000_000)
        );
        assert_eq!(when("*"), EventTime::Any);
    }

    #[test]
    fn calls_have_arguments_a_result_an_error_an_end() {
        let event =
            parse_single("1...1.5 read(4, ..., 10) = -1 ECONNRESET (Connection reset by peer)");
        let Action::Call(call) = event.action else {
            panic!()
        };
        assert_eq!(
            call.args,
            [Argument::Int(4), Argument::Any, Argument::Int(10)]
        );
        assert_eq!(
            (call.result, call.errno.as_deref()),
            (Some(-1), Some("ECONNRESET"))
        );
        assert_eq!(call.until, Some(EventTime::Absolute(1_500_000_000)));
        let event =
            parse_single("+0 poll([{fd=4, events=POLLIN|POLLOUT, revents=POLLIN}], 1, 0) = 1");
        let Action::Call(call) = event.action else {
            panic!()
        };
        let Argument::List(l) = &call.args[0] else {
            panic!()
        };
        let Argument::Struct(s) = &l[0] else { panic!() };
        assert_eq!(
            s[1].1,
            Argument::Symbols(vec!["POLLIN".into(), "POLLOUT".into()])
        );
    }

    #[test]
    fn errors_name_the_line_and_what_was_expected() {
        let first = "0 socket(..., SOCK_STREAM, IPPROTO_TCP) = 3\n";
        let cases = [
            ("+0 bind(3, ...\n", "`,`"),
            ("+0 < S 0:0 win 100\n", "`(`"),
            ("+0 < Q 0:0(0) win 100\n", "flag"),
            ("+0 < S 0:0(0)\n", "win"),
            ("+0 < S 0:10(0) win 9\n", "10"),
            ("bind(3) = 0\n", "time"),
            ("+0~+1 < . 1:1(0) ack 1 win 1\n", "range"),
            ("+2~+1 > . 1:1(0) ack 1\n", "before"),
            ("--mtu=1500\n", "first event"),
            ("+0 > . 1:1(0) ack 1 <mss>\n", "MSS"),
            ("+0 < . 1:1(0) ack 1 win 1 <nop>\n", "multiple of 4"),
            ("+0 < . 1:1(0) ack 1 win 1 <...>\n", "injected"),
            ("+0 < . 1:1(0) ack 1 win 65536\n", "range"),
        ];
        for (bad, says) in cases {
            let (line, message) = wrong(&format!("{first}{bad}"));
            assert_eq!(line, 2, "{bad}: {message}");
            assert!(message.contains(says), "{bad}: {message}");
        }
        assert_eq!(
            wrong("// nothing\n\n"),
            (2, "the script has no events".into())
        );
    }
}
