//! Formats segments in the notation of scripts, for messages and traces.

use std::fmt::Write;

use crate::packet::{
    ACK, CWR, ECE, ECN_ECT0, ECN_ECT1, ECN_NOT_ECT, EcnSpec, FIN, PSH, RST, SYN, TcpOption,
    TcpSpec, URG, WireSegment,
};

/// The flags in the order used by scripts.
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

/// Formats the set flags as letters, for example `P.`; `-` if none is set.
pub(crate) fn format_flags(flags: u8) -> String {
    let letters: String = LETTERS
        .iter()
        .filter(|(bit, _)| flags & bit != 0)
        .map(|(_, letter)| *letter)
        .collect();
    if letters.is_empty() {
        "-".into()
    } else {
        letters
    }
}

/// Returns the flag of a letter.
pub(crate) fn flag_of_letter(letter: char) -> Option<u8> {
    LETTERS
        .iter()
        .find(|(_, known)| *known == letter)
        .map(|(bit, _)| *bit)
}

/// Formats the ECN codepoint in brackets, with the blank after it.
pub(crate) fn format_ecn(ecn: EcnSpec) -> &'static str {
    match ecn {
        EcnSpec::Exactly(ECN_NOT_ECT) => "[noecn] ",
        EcnSpec::Exactly(ECN_ECT1) => "[ect1] ",
        EcnSpec::Exactly(ECN_ECT0) => "[ect0] ",
        EcnSpec::Exactly(_) => "[ce] ",
        EcnSpec::Capable => "[ect01] ",
    }
}

fn format_option(option: &TcpOption) -> String {
    match option {
        TcpOption::Nop => "nop".into(),
        TcpOption::Eol => "eol".into(),
        TcpOption::Mss(value) => format!("mss {value}"),
        TcpOption::WindowScale(value) => format!("wscale {value}"),
        TcpOption::SackOk => "sackOK".into(),
        TcpOption::Sack(blocks) => blocks
            .iter()
            .fold("sack".into(), |mut text, (left, right)| {
                let _ = write!(text, " {left}:{right}");
                text
            }),
        TcpOption::Timestamps { val, ecr } => format!("TS val {val} ecr {ecr}"),
        TcpOption::Other(kind, body) => format!("option {kind} of {} bytes", body.len() + 2),
    }
}

/// Formats a segment in the notation of scripts.
pub(crate) fn format_spec(spec: &TcpSpec) -> String {
    let mut out = String::new();
    out.push_str(spec.ecn.map_or("", format_ecn));
    if let Some((source, destination)) = spec.ports {
        let _ = write!(out, "{source} > {destination} ");
    }
    let end = spec.seq.wrapping_add(spec.len);
    let _ = write!(
        out,
        "{} {}:{end}({})",
        format_flags(spec.flags),
        spec.seq,
        spec.len
    );
    if let Some(source) = spec.ack {
        let _ = write!(out, " ack {source}");
    }
    if let Some(window) = spec.window {
        let _ = write!(out, " win {window}");
    }
    if let Some(urgent) = spec.urgent {
        let _ = write!(out, " urg {urgent}");
    }
    match &spec.options {
        None => out.push_str(" <...>"),
        Some(options) if options.is_empty() => {}
        Some(options) => {
            let all: Vec<_> = options.iter().map(format_option).collect();
            let _ = write!(out, " <{}>", all.join(","));
        }
    }
    out
}

/// Describes a segment from the wire in script terms, with unchanged sequence numbers.
pub(crate) fn spec_of(segment: &WireSegment) -> TcpSpec {
    TcpSpec {
        ports: None,
        ecn: (segment.ecn != 0).then_some(EcnSpec::Exactly(segment.ecn)),
        flags: segment.flags,
        seq: segment.seq,
        len: segment.payload.len() as u32,
        ack: (segment.flags & ACK != 0).then_some(segment.ack),
        window: Some(segment.window),
        urgent: (segment.flags & URG != 0).then_some(segment.urgent),
        options: Some(segment.options.clone()),
    }
}
