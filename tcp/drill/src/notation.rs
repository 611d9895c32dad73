//! Segments in the notation of scripts, for messages.

use std::fmt::Write;

use crate::packet::{ACK, CWR, ECE, Ecn, FIN, PSH, RST, SYN, Segment, TcpOption, TcpSpec, URG};

const LETTERS: [(u8, char); 8] = [
    (FIN, 'F'),
    (SYN, 'S'),
    (RST, 'R'),
    (PSH, 'P'),
    (URG, 'U'),
    (ECE, 'E'),
    (CWR, 'W'),
    (ACK, '.'),
];

/// `P.`, or `-` for none.
pub(crate) fn flags(f: u8) -> String {
    let s: String = LETTERS
        .iter()
        .filter(|(b, _)| f & b != 0)
        .map(|(_, c)| *c)
        .collect();
    if s.is_empty() { "-".into() } else { s }
}

/// The bit of a letter.
pub(crate) fn flag(c: char) -> Option<u8> {
    LETTERS.iter().find(|(_, l)| *l == c).map(|(b, _)| *b)
}

pub(crate) fn ecn(e: Ecn) -> &'static str {
    match e {
        Ecn::Is(0) => "[noecn] ",
        Ecn::Is(1) => "[ect1] ",
        Ecn::Is(2) => "[ect0] ",
        Ecn::Is(_) => "[ce] ",
        Ecn::Capable => "[ect01] ",
    }
}

fn option(o: &TcpOption) -> String {
    match o {
        TcpOption::Nop => "nop".into(),
        TcpOption::Eol => "eol".into(),
        TcpOption::Mss(v) => format!("mss {v}"),
        TcpOption::WindowScale(v) => format!("wscale {v}"),
        TcpOption::SackOk => "sackOK".into(),
        TcpOption::Sack(blocks) => blocks.iter().fold("sack".into(), |mut s, (lo, hi)| {
            let _ = write!(s, " {lo}:{hi}");
            s
        }),
        TcpOption::Timestamps { val, ecr } => format!("TS val {val} ecr {ecr}"),
        TcpOption::Other(kind, body) => format!("option {kind} of {} bytes", body.len() + 2),
    }
}

/// The line of a script that says this segment.
pub(crate) fn spec(s: &TcpSpec) -> String {
    let mut out = String::new();
    out.push_str(s.ecn.map_or("", ecn));
    if let Some((a, b)) = s.ports {
        let _ = write!(out, "{a} > {b} ");
    }
    let end = s.seq.wrapping_add(s.len);
    let _ = write!(out, "{} {}:{end}({})", flags(s.flags), s.seq, s.len);
    if let Some(a) = s.ack {
        let _ = write!(out, " ack {a}");
    }
    if let Some(w) = s.window {
        let _ = write!(out, " win {w}");
    }
    if let Some(u) = s.urgent {
        let _ = write!(out, " urg {u}");
    }
    match &s.options {
        None => out.push_str(" <...>"),
        Some(o) if o.is_empty() => {}
        Some(o) => {
            let all: Vec<_> = o.iter().map(option).collect();
            let _ = write!(out, " <{}>", all.join(","));
        }
    }
    out
}

/// A segment off the wire as a script would say it.
pub(crate) fn said(s: &Segment) -> TcpSpec {
    TcpSpec {
        ports: None,
        ecn: (s.ecn != 0).then_some(Ecn::Is(s.ecn)),
        flags: s.flags,
        seq: s.seq,
        len: s.payload.len() as u32,
        ack: (s.flags & ACK != 0).then_some(s.ack),
        window: Some(s.window),
        urgent: (s.flags & URG != 0).then_some(s.urgent),
        options: Some(s.options.clone()),
    }
}
