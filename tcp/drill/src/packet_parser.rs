//! Parses the packets of scripts: the text after `<` or `>`.

use crate::lexer::Token;
use crate::notation;
use crate::packet::{
    ACK, ECN_CE, ECN_ECT0, ECN_ECT1, ECN_NOT_ECT, EcnSpec, IcmpSpec, TcpOption, TcpSpec, URG,
    check_options_fit,
};
use crate::parser::TokenStream;
use crate::script::{LineError, ScriptPacket};

/// Parses a packet that the peer sends (`injected`), or one that the stack must send. The latter may
/// omit fields, which then match anything.
pub(crate) fn parse_packet(
    tokens: &mut TokenStream,
    injected: bool,
) -> Result<ScriptPacket, LineError> {
    let ecn = parse_ecn(tokens)?;
    if tokens.eat_word("icmp") {
        return Ok(ScriptPacket::Icmp(parse_icmp(tokens)?));
    }
    if injected && ecn == Some(EcnSpec::Capable) {
        return Err(LineError::new(
            tokens.line(),
            "[ect01] can only be expected, not injected",
        ));
    }
    let ports = match tokens.peek() {
        Some(Token::Int(_)) => {
            let from = tokens.expect_number("a source port")?;
            tokens.expect_punct('>')?;
            Some((from, tokens.expect_number("a destination port")?))
        }
        _ => None,
    };
    let flags = parse_flags(tokens)?;
    let (seq, len) = parse_sequence_range(tokens)?;
    let line = tokens.line();
    let mut spec = TcpSpec {
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
    if tokens.eat_word("ack") {
        spec.ack = Some(tokens.expect_number("an acknowledgment number")?);
    }
    if tokens.eat_word("win") {
        spec.window = Some(tokens.expect_number("a window")?);
    }
    if tokens.eat_word("urg") {
        spec.urgent = Some(tokens.expect_number("an urgent pointer")?);
    }
    // A peer may set the field without the flag.
    if flags & ACK == 0 && spec.ack.is_some() && !injected {
        return Err(LineError::new(line, "`ack` without the flag `.`"));
    }
    if flags & URG == 0 && spec.urgent.is_some() {
        return Err(LineError::new(line, "`urg` without the flag `U`"));
    }
    if flags & ACK != 0 && spec.ack.is_none() {
        return Err(LineError::new(
            line,
            "the flag `.` needs `ack` and a number",
        ));
    }
    if injected && spec.window.is_none() {
        return Err(LineError::new(
            line,
            "an injected segment needs `win` and a number",
        ));
    }
    if tokens.is_next('<') {
        spec.options = parse_options(tokens)?;
    }
    match &spec.options {
        None if injected => Err(LineError::new(
            line,
            "an injected segment cannot have <...>",
        )),
        Some(options) if injected => {
            check_options_fit(options).map_err(|message| LineError::new(line, message))?;
            Ok(ScriptPacket::Tcp(spec))
        }
        _ => Ok(ScriptPacket::Tcp(spec)),
    }
}

/// Parses the ECN codepoint (RFC 3168 section 5) in brackets: `[ce]`, `(ect0)` and so on.
fn parse_ecn(tokens: &mut TokenStream) -> Result<Option<EcnSpec>, LineError> {
    let close = match tokens.peek() {
        Some(Token::Punct('[')) => ']',
        Some(Token::Punct('(')) => ')',
        _ => return Ok(None),
    };
    tokens.next();
    let line = tokens.line();
    let word = tokens.expect_word("noecn, ect0, ect1, ect01 or ce")?;
    let ecn = match word.as_str() {
        "noecn" => EcnSpec::Exactly(ECN_NOT_ECT),
        "ect1" => EcnSpec::Exactly(ECN_ECT1),
        "ect0" => EcnSpec::Exactly(ECN_ECT0),
        "ce" => EcnSpec::Exactly(ECN_CE),
        "ect01" => EcnSpec::Capable,
        unknown => {
            return Err(LineError::new(
                line,
                format!("{unknown:?} is not known here: noecn, ect0, ect1, ect01 or ce"),
            ));
        }
    };
    tokens.expect_punct(close)?;
    Ok(Some(ecn))
}

/// Parses the letters of the TCP flags, or `-` for none.
fn parse_flags(tokens: &mut TokenStream) -> Result<u8, LineError> {
    if tokens.eat_punct('-') {
        return Ok(0);
    }
    let line = tokens.line();
    let mut flags = 0;
    let mut any = false;
    if let Some(Token::Word(word)) = tokens.peek() {
        for letter in word.clone().chars() {
            let Some(bit) = notation::flag_of_letter(letter) else {
                return Err(LineError::new(
                    line,
                    format!("{letter:?} is no TCP flag: FSRPUEW and ."),
                ));
            };
            flags |= bit;
        }
        tokens.next();
        any = true;
    }
    if tokens.eat_punct('.') {
        flags |= ACK;
        any = true;
    }
    if !any {
        return tokens.syntax_error("TCP flags (such as S., P., or -)");
    }
    Ok(flags)
}

/// `1:1001(1000)`: the sequence number and the payload length in bytes.
fn parse_sequence_range(tokens: &mut TokenStream) -> Result<(u32, u32), LineError> {
    let line = tokens.line();
    let from: u32 = tokens.expect_number("a sequence number")?;
    tokens.expect_punct(':')?;
    let to: u32 = tokens.expect_number("a sequence number")?;
    tokens.expect_punct('(')?;
    let len: u32 = tokens.expect_number("a payload length")?;
    tokens.expect_punct(')')?;
    if len > 65_000 {
        return Err(LineError::new(
            line,
            format!("{len} bytes do not fit a segment"),
        ));
    }
    if from.wrapping_add(len) != to {
        return Err(LineError::new(
            line,
            format!(
                "{from} and {len} bytes end at {}, not at {to}",
                from.wrapping_add(len)
            ),
        ));
    }
    Ok((from, len))
}

/// `<mss 1460,nop,wscale 7>`; `None` for `<...>`, which matches any options.
fn parse_options(tokens: &mut TokenStream) -> Result<Option<Vec<TcpOption>>, LineError> {
    tokens.expect_punct('<')?;
    if tokens.peek() == Some(&Token::Ellipsis) {
        tokens.next();
        tokens.expect_punct('>')?;
        return Ok(None);
    }
    let mut all = vec![];
    while !tokens.is_next('>') {
        if !all.is_empty() {
            tokens.expect_punct(',')?;
        }
        let line = tokens.line();
        let name = tokens.expect_word("a TCP option")?;
        all.push(match name.as_str() {
            "nop" => TcpOption::Nop,
            "eol" => TcpOption::Eol,
            "mss" => TcpOption::Mss(tokens.expect_number("the MSS")?),
            "wscale" => TcpOption::WindowScale(tokens.expect_number("the window scale")?),
            "sackOK" => TcpOption::SackOk,
            "sack" => {
                let mut blocks = vec![];
                while let Some(Token::Int(_)) = tokens.peek() {
                    let left = tokens.expect_number("a SACK edge")?;
                    tokens.expect_punct(':')?;
                    blocks.push((left, tokens.expect_number("a SACK edge")?));
                }
                TcpOption::Sack(blocks)
            }
            "TS" => {
                if !tokens.eat_word("val") {
                    return tokens.syntax_error("`val`");
                }
                let val = tokens.expect_number("a timestamp")?;
                if !tokens.eat_word("ecr") {
                    return tokens.syntax_error("`ecr`");
                }
                TcpOption::Timestamps {
                    val,
                    ecr: tokens.expect_number("a timestamp")?,
                }
            }
            unknown => {
                return Err(LineError::new(
                    line,
                    format!(
                        "{unknown:?} is no TCP option known here: mss, wscale, sackOK, sack, TS, nop, eol"
                    ),
                ));
            }
        });
    }
    tokens.expect_punct('>')?;
    Ok(Some(all))
}

/// `unreachable frag_needed mtu 1200 [1:1461(1460)]`: type, code, MTU, and the sequence numbers of the
/// quoted segment.
fn parse_icmp(tokens: &mut TokenStream) -> Result<IcmpSpec, LineError> {
    let kind = tokens.expect_word("an ICMP type")?;
    let mut code = None;
    if matches!(tokens.peek(), Some(Token::Word(word)) if word != "mtu") {
        code = Some(tokens.expect_word("an ICMP code")?);
    }
    let mut mtu = None;
    if tokens.eat_word("mtu") {
        mtu = Some(tokens.expect_number("an MTU")?);
    }
    tokens.expect_punct('[')?;
    let quoted = parse_sequence_range(tokens)?;
    tokens.expect_punct(']')?;
    Ok(IcmpSpec {
        kind,
        code,
        mtu,
        quoted,
    })
}
