//! The packets of scripts.

use crate::lexer::Token;
use crate::notation;
use crate::packet::{ACK, Ecn, IcmpSpec, TcpOption, TcpSpec, URG, options_fit};
use crate::parser::Tokens;
use crate::script::{At, Packet};

/// What follows `<` or `>`.
pub(crate) fn packet(t: &mut Tokens, injected: bool) -> Result<Packet, At> {
    let ecn = ip_bits(t)?;
    if t.eat_word("icmp") {
        return Ok(Packet::Icmp(icmp(t)?));
    }
    if injected && ecn == Some(Ecn::Capable) {
        return Err(At::new(
            t.line(),
            "[ect01] can only be expected, not injected",
        ));
    }
    let ports = match t.peek() {
        Some(Token::Int(_)) => {
            let from = t.number("a source port")?;
            t.expect('>')?;
            Some((from, t.number("a destination port")?))
        }
        _ => None,
    };
    let flags = flags(t)?;
    let (seq, len) = span(t)?;
    let line = t.line();
    let mut s = TcpSpec {
        ports,
        ecn,
        flags,
        seq,
        len,
        ack: None,
        window: None,
        urgent: None,
        options: Some(vec![]),
    };
    if t.eat_word("ack") {
        s.ack = Some(t.number("an acknowledgment number")?);
    }
    if t.eat_word("win") {
        s.window = Some(t.number("a window")?);
    }
    if t.eat_word("urg") {
        s.urgent = Some(t.number("an urgent pointer")?);
    }
    if flags & ACK == 0 && s.ack.is_some() {
        return Err(At::new(line, "`ack` without the flag `.`"));
    }
    if flags & URG == 0 && s.urgent.is_some() {
        return Err(At::new(line, "`urg` without the flag `U`"));
    }
    if flags & ACK != 0 && s.ack.is_none() {
        return Err(At::new(line, "the flag `.` needs `ack` and a number"));
    }
    if injected && s.window.is_none() {
        return Err(At::new(
            line,
            "an injected segment needs `win` and a number",
        ));
    }
    if t.is('<') {
        s.options = options(t)?;
    }
    match &s.options {
        None if injected => Err(At::new(line, "an injected segment cannot have <...>")),
        Some(o) if injected => {
            options_fit(o).map_err(|m| At::new(line, m))?;
            Ok(Packet::Tcp(s))
        }
        _ => Ok(Packet::Tcp(s)),
    }
}

/// `[ce]`, `(ect0)` and so on.
fn ip_bits(t: &mut Tokens) -> Result<Option<Ecn>, At> {
    let close = match t.peek() {
        Some(Token::Punct('[')) => ']',
        Some(Token::Punct('(')) => ')',
        _ => return Ok(None),
    };
    t.next();
    let line = t.line();
    let word = t.word("noecn, ect0, ect1, ect01 or ce")?;
    let e = match word.as_str() {
        "noecn" => Ecn::Is(0),
        "ect1" => Ecn::Is(1),
        "ect0" => Ecn::Is(2),
        "ce" => Ecn::Is(3),
        "ect01" => Ecn::Capable,
        w => {
            return Err(At::new(
                line,
                format!("{w:?} is not known here: noecn, ect0, ect1, ect01 or ce"),
            ));
        }
    };
    t.expect(close)?;
    Ok(Some(e))
}

fn flags(t: &mut Tokens) -> Result<u8, At> {
    if t.eat('-') {
        return Ok(0);
    }
    let line = t.line();
    let mut f = 0;
    let mut some = false;
    if let Some(Token::Word(w)) = t.peek() {
        for c in w.clone().chars() {
            let Some(bit) = notation::flag(c) else {
                return Err(At::new(
                    line,
                    format!("{c:?} is no TCP flag: FSRPUEW and ."),
                ));
            };
            f |= bit;
        }
        t.next();
        some = true;
    }
    if t.eat('.') {
        f |= ACK;
        some = true;
    }
    if !some {
        return t.error("TCP flags (such as S., P., or -)");
    }
    Ok(f)
}

/// `1:1001(1000)`: sequence number and length.
fn span(t: &mut Tokens) -> Result<(u32, u32), At> {
    let line = t.line();
    let from: u32 = t.number("a sequence number")?;
    t.expect(':')?;
    let to: u32 = t.number("a sequence number")?;
    t.expect('(')?;
    let len: u32 = t.number("a payload length")?;
    t.expect(')')?;
    if len > 65_000 {
        return Err(At::new(line, format!("{len} bytes do not fit a segment")));
    }
    if from.wrapping_add(len) != to {
        return Err(At::new(
            line,
            format!(
                "{from} and {len} bytes end at {}, not at {to}",
                from.wrapping_add(len)
            ),
        ));
    }
    Ok((from, len))
}

fn options(t: &mut Tokens) -> Result<Option<Vec<TcpOption>>, At> {
    t.expect('<')?;
    if t.peek() == Some(&Token::Ellipsis) {
        t.next();
        t.expect('>')?;
        return Ok(None);
    }
    let mut all = vec![];
    while !t.is('>') {
        if !all.is_empty() {
            t.expect(',')?;
        }
        let line = t.line();
        let name = t.word("a TCP option")?;
        all.push(match name.as_str() {
            "nop" => TcpOption::Nop,
            "eol" => TcpOption::Eol,
            "mss" => TcpOption::Mss(t.number("the MSS")?),
            "wscale" => TcpOption::WindowScale(t.number("the window scale")?),
            "sackOK" => TcpOption::SackOk,
            "sack" => {
                let mut blocks = vec![];
                while let Some(Token::Int(_)) = t.peek() {
                    let lo = t.number("a SACK edge")?;
                    t.expect(':')?;
                    blocks.push((lo, t.number("a SACK edge")?));
                }
                TcpOption::Sack(blocks)
            }
            "TS" => {
                if !t.eat_word("val") {
                    return t.error("`val`");
                }
                let val = t.number("a timestamp")?;
                if !t.eat_word("ecr") {
                    return t.error("`ecr`");
                }
                TcpOption::Timestamps {
                    val,
                    ecr: t.number("a timestamp")?,
                }
            }
            n => {
                return Err(At::new(
                    line,
                    format!(
                        "{n:?} is no TCP option known here: mss, wscale, sackOK, sack, TS, nop, eol"
                    ),
                ));
            }
        });
    }
    t.expect('>')?;
    Ok(Some(all))
}

/// `unreachable frag_needed mtu 1200 [1:1461(1460)]`
fn icmp(t: &mut Tokens) -> Result<IcmpSpec, At> {
    let kind = t.word("an ICMP type")?;
    let mut code = None;
    if matches!(t.peek(), Some(Token::Word(w)) if w != "mtu") {
        code = Some(t.word("an ICMP code")?);
    }
    let mut mtu = None;
    if t.eat_word("mtu") {
        mtu = Some(t.number("an MTU")?);
    }
    t.expect('[')?;
    let quoted = span(t)?;
    t.expect(']')?;
    Ok(IcmpSpec {
        kind,
        code,
        mtu,
        quoted,
    })
}
