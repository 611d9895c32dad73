//! Scripts: options, times, system calls. Packets are read by `packet_parser`.

use crate::lexer::{Token, tokens};
use crate::packet_parser;
use crate::script::{Arg, At, Call, Event, Packet, Script, What, When};

/// A place in the tokens of a script.
pub(crate) struct Tokens {
    all: Vec<(usize, Token)>,
    at: usize,
    last_line: usize,
}

impl Tokens {
    pub(crate) fn peek(&self) -> Option<&Token> {
        self.all.get(self.at).map(|(_, t)| t)
    }

    fn peek_at(&self, ahead: usize) -> Option<&Token> {
        self.all.get(self.at + ahead).map(|(_, t)| t)
    }

    pub(crate) fn next(&mut self) -> Option<Token> {
        let (_, t) = self.all.get(self.at)?;
        self.at += 1;
        Some(t.clone())
    }

    /// Line of the next token, or of the end.
    pub(crate) fn line(&self) -> usize {
        self.all.get(self.at).map_or(self.last_line, |(l, _)| *l)
    }

    pub(crate) fn is(&self, c: char) -> bool {
        self.peek() == Some(&Token::Punct(c))
    }

    /// Takes `c` if it comes next.
    pub(crate) fn eat(&mut self, c: char) -> bool {
        let yes = self.is(c);
        self.at += usize::from(yes);
        yes
    }

    /// Takes the word `w` if it comes next.
    pub(crate) fn eat_word(&mut self, w: &str) -> bool {
        let yes = matches!(self.peek(), Some(Token::Word(x)) if x == w);
        self.at += usize::from(yes);
        yes
    }

    pub(crate) fn error<T>(&self, wanted: &str) -> Result<T, At> {
        let got = self
            .peek()
            .map_or("the end of the script".into(), |t| format!("`{t}`"));
        Err(At::new(
            self.line(),
            format!("syntax error: expected {wanted}, found {got}"),
        ))
    }

    pub(crate) fn expect(&mut self, c: char) -> Result<(), At> {
        if self.eat(c) {
            return Ok(());
        }
        self.error(&format!("`{c}`"))
    }

    pub(crate) fn int(&mut self, what: &str) -> Result<i64, At> {
        let negative = self.is('-');
        match self.peek_at(usize::from(negative)) {
            Some(&Token::Int(v)) => {
                self.at += 1 + usize::from(negative);
                Ok(if negative { -v } else { v })
            }
            _ => self.error(what),
        }
    }

    /// A number that fits.
    pub(crate) fn number<T: TryFrom<i64>>(&mut self, what: &str) -> Result<T, At> {
        let line = self.line();
        let v = self.int(what)?;
        T::try_from(v).map_err(|_| At::new(line, format!("{v} is out of range for {what}")))
    }

    pub(crate) fn word(&mut self, what: &str) -> Result<String, At> {
        match self.peek() {
            Some(Token::Word(w)) => {
                let w = w.clone();
                self.at += 1;
                Ok(w)
            }
            _ => self.error(what),
        }
    }
}

/// Reads a whole script. `v6` of a packet depends on options that come first, so it is checked
/// when the packet is made.
pub(crate) fn parse(text: &str) -> Result<Script, At> {
    let all = tokens(text)?;
    let last_line = text.lines().count().max(1);
    let mut t = Tokens {
        all,
        at: 0,
        last_line,
    };
    let mut script = Script::default();
    while let Some(token) = t.peek() {
        let line = t.line();
        match token {
            Token::Flag(name, value) => {
                if !script.events.is_empty() {
                    return Err(At::new(line, "options come before the first event"));
                }
                script.options.push((line, name.clone(), value.clone()));
                t.next();
            }
            // Commands set kernels up; the engine has no sysctls.
            Token::Shell => {
                t.next();
            }
            _ => {
                if let Some(e) = event(&mut t)? {
                    script.events.push(e);
                }
            }
        }
    }
    if script.events.is_empty() {
        return Err(At::new(last_line, "the script has no events"));
    }
    Ok(script)
}

fn event(t: &mut Tokens) -> Result<Option<Event>, At> {
    let line = t.line();
    let when = time(t)?;
    let what = match t.peek() {
        Some(Token::Punct('<')) => {
            t.next();
            What::Inject(packet_parser::packet(t, true)?)
        }
        Some(Token::Punct('>')) => {
            t.next();
            match packet_parser::packet(t, false)? {
                Packet::Tcp(p) => What::Expect(p),
                Packet::Icmp(_) => return Err(At::new(line, "ICMP can only be injected (`<`)")),
            }
        }
        Some(Token::Code(c)) => {
            let c = c.clone();
            t.next();
            What::Code(c)
        }
        Some(Token::Shell) => {
            t.next();
            return Ok(None);
        }
        Some(Token::Word(_)) => What::Call(call(t, None)?),
        Some(Token::Ellipsis) => {
            t.next();
            let until = time(t)?;
            What::Call(call(t, Some(until))?)
        }
        _ => return t.error("`<`, `>`, a system call, or %{ code }% after the time"),
    };
    let ranged = matches!(
        when,
        When::Any | When::AbsoluteRange(..) | When::RelativeRange(..)
    );
    if ranged && !matches!(what, What::Expect(_)) {
        return Err(At::new(
            line,
            "only packets that the stack sends can have a range of times or `*`",
        ));
    }
    Ok(Some(Event { line, when, what }))
}

fn nanos(t: &mut Tokens) -> Result<u64, At> {
    let v = match t.peek() {
        Some(Token::Int(v)) => v.checked_mul(1_000_000_000),
        Some(Token::Fraction(v)) => Some(*v),
        _ => return t.error("a time (such as 0.5, +.1, or *)"),
    };
    let Some(v) = v.and_then(|v| u64::try_from(v).ok()) else {
        return Err(At::new(t.line(), "the time is too large"));
    };
    t.next();
    Ok(v)
}

fn time(t: &mut Tokens) -> Result<When, At> {
    if t.eat('*') {
        return Ok(When::Any);
    }
    let line = t.line();
    let relative = t.eat('+');
    let from = nanos(t)?;
    if t.eat('~') {
        if t.eat('+') != relative {
            return Err(At::new(
                line,
                "both times of a range have a `+`, or neither",
            ));
        }
        let to = nanos(t)?;
        if to < from {
            return Err(At::new(line, "the range of times ends before it begins"));
        }
        return Ok(if relative {
            When::RelativeRange(from, to)
        } else {
            When::AbsoluteRange(from, to)
        });
    }
    Ok(if relative {
        When::Relative(from)
    } else {
        When::Absolute(from)
    })
}

/// `name(args) = result [ERRNO] [(remark)]`
fn call(t: &mut Tokens, until: Option<When>) -> Result<Call, At> {
    let name = t.word("the name of a system call")?;
    t.expect('(')?;
    let mut args = vec![];
    while !t.is(')') {
        if !args.is_empty() {
            t.expect(',')?;
        }
        args.push(arg(t)?);
    }
    t.expect(')')?;
    t.expect('=')?;
    let result = if t.eat('*') || t.peek() == Some(&Token::Ellipsis) {
        if t.peek() == Some(&Token::Ellipsis) {
            t.next();
        }
        None
    } else {
        Some(t.int("the result of the call")?)
    };
    let mut errno = None;
    if matches!(t.peek(), Some(Token::Word(w)) if w.starts_with('E')) {
        errno = Some(t.word("an error name")?);
    }
    if t.is('(') {
        // strace's explanation of the result.
        while !t.eat(')') {
            if t.next().is_none() {
                return t.error("`)`");
            }
        }
    }
    Ok(Call {
        name,
        args,
        result,
        errno,
        until,
    })
}

fn arg(t: &mut Tokens) -> Result<Arg, At> {
    match t.peek() {
        Some(Token::Ellipsis) => {
            t.next();
            Ok(Arg::Any)
        }
        Some(Token::Int(_) | Token::Punct('-')) => Ok(Arg::Int(t.int("a number")?)),
        Some(Token::Str(s)) => {
            let s = s.clone();
            t.next();
            Ok(Arg::Str(s))
        }
        Some(Token::Word(_)) => {
            let mut words = vec![t.word("a symbol")?];
            while t.eat('|') {
                words.push(t.word("a symbol after `|`")?);
            }
            Ok(Arg::Words(words))
        }
        Some(Token::Punct('[')) => {
            t.next();
            let mut all = vec![];
            while !t.is(']') {
                if !all.is_empty() {
                    t.expect(',')?;
                }
                all.push(arg(t)?);
            }
            t.expect(']')?;
            Ok(Arg::List(all))
        }
        Some(Token::Punct('{')) => {
            t.next();
            let mut all = vec![];
            while !t.is('}') {
                if !all.is_empty() {
                    t.expect(',')?;
                }
                let name = t.word("the name of a field")?;
                t.expect('=')?;
                all.push((name, arg(t)?));
            }
            t.expect('}')?;
            Ok(Arg::Struct(all))
        }
        _ => t.error("an argument"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Event {
        let mut s = parse(text).unwrap();
        assert_eq!(s.events.len(), 1);
        s.events.remove(0)
    }

    fn wrong(text: &str) -> (usize, String) {
        let e = parse(text).unwrap_err();
        (e.line, e.message)
    }

    #[test]
    fn times_are_absolute_relative_ranged_or_any() {
        let when = |t: &str| one(&format!("{t} > . 1:1(0) ack 1")).when;
        assert_eq!(when("0.25"), When::Absolute(250_000_000));
        assert_eq!(when("+.1"), When::Relative(100_000_000));
        assert_eq!(
            when("+1~+2"),
            When::RelativeRange(1_000_000_000, 2_000_000_000)
        );
        assert_eq!(
            when("1~1.5"),
            When::AbsoluteRange(1_000_000_000, 1_500_000_000)
        );
        assert_eq!(when("*"), When::Any);
    }

    #[test]
    fn a_call_has_arguments_a_result_an_error_and_an_end() {
        let e = one("1...1.5 read(4, ..., 10) = -1 ECONNRESET (Connection reset by peer)");
        let What::Call(c) = e.what else { panic!() };
        assert_eq!(c.args, [Arg::Int(4), Arg::Any, Arg::Int(10)]);
        assert_eq!(
            (c.result, c.errno.as_deref()),
            (Some(-1), Some("ECONNRESET"))
        );
        assert_eq!(c.until, Some(When::Absolute(1_500_000_000)));
        let e = one("+0 poll([{fd=4, events=POLLIN|POLLOUT, revents=POLLIN}], 1, 0) = 1");
        let What::Call(c) = e.what else { panic!() };
        let Arg::List(l) = &c.args[0] else { panic!() };
        let Arg::Struct(s) = &l[0] else { panic!() };
        assert_eq!(s[1].1, Arg::Words(vec!["POLLIN".into(), "POLLOUT".into()]));
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
