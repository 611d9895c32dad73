//! Compares a segment that the stack sent with the one expected by a script.

use std::fmt::Display;

use crate::notation;
use crate::packet::{EcnSpec, SYN, TcpOption, TcpSpec, WireSegment};
use crate::run::{FlowNumbering, stream_byte};

/// Returns the value of the timestamps option, if there is one.
pub(super) fn timestamp_of(options: &[TcpOption]) -> Option<u32> {
    options.iter().find_map(|option| match option {
        TcpOption::Timestamps { val, .. } => Some(*val),
        _ => None,
    })
}

/// Converts a segment of the stack to the numbers of the script.
pub(super) fn in_script_numbers(segment: &WireSegment, flow: &FlowNumbering) -> TcpSpec {
    let mut spec = notation::spec_of(segment);
    spec.seq = spec.seq.wrapping_sub(flow.seq_offset.unwrap_or(0));
    for option in spec.options.iter_mut().flatten() {
        if let TcpOption::Timestamps { val, .. } = option {
            *val = val.wrapping_sub(flow.timestamp_offset.unwrap_or(0));
        }
    }
    spec
}

/// Returns the first difference between a segment and the expected one. Fields of `expected` that are
/// `None` match anything. `tolerance` is in nanoseconds.
pub(super) fn compare_segment(
    expected: &TcpSpec,
    segment: &WireSegment,
    flow: &FlowNumbering,
    tolerance: u64,
) -> Result<(), String> {
    let actual = in_script_numbers(segment, flow);
    if expected.flags != actual.flags {
        return differ(
            "flags",
            &notation::format_flags(expected.flags),
            &notation::format_flags(actual.flags),
        );
    }
    if expected.seq != actual.seq {
        return differ("sequence number", &expected.seq, &actual.seq);
    }
    if expected.len != actual.len {
        return differ("payload length", &expected.len, &actual.len);
    }
    if let (Some(expected), Some(actual)) = (expected.ack, actual.ack)
        && expected != actual
    {
        return differ("acknowledgment", &expected, &actual);
    }
    if let Some(window) = expected.window
        && window != segment.window
    {
        return differ("window", &window, &segment.window);
    }
    if let Some(urgent) = expected.urgent
        && urgent != segment.urgent
    {
        return differ("urgent pointer", &urgent, &segment.urgent);
    }
    let ecn_matches = match expected.ecn {
        None => true,
        Some(EcnSpec::Exactly(codepoint)) => codepoint == segment.ecn,
        Some(EcnSpec::Capable) => segment.ecn == 1 || segment.ecn == 2,
    };
    if !ecn_matches {
        return differ(
            "ECN bits",
            &expected.ecn.map_or("", notation::format_ecn),
            &notation::format_ecn(EcnSpec::Exactly(segment.ecn)),
        );
    }
    if let (Some(expected), Some(actual)) = (&expected.options, &actual.options)
        && !options_match(expected, actual, tolerance)
    {
        return Err("wrong TCP options".into());
    }
    if segment.flags & SYN == 0 && flow.seq_offset.is_some() {
        check_payload(segment, flow)?;
    }
    Ok(())
}

fn differ(what: &str, expected: &dyn Display, actual: &dyn Display) -> Result<(), String> {
    Err(format!("wrong {what}: {actual}, not {expected}"))
}

/// Returns whether the options are equal and in the same order; timestamps within the tolerance.
fn options_match(expected: &[TcpOption], actual: &[TcpOption], tolerance: u64) -> bool {
    let matches = |expected: &TcpOption, actual: &TcpOption| match (expected, actual) {
        (
            TcpOption::Timestamps { val, ecr },
            TcpOption::Timestamps {
                val: actual_val,
                ecr: actual_ecr,
            },
        ) => {
            // The stack's timestamp clock ticks every 2^20 ns. A script counts milliseconds, which
            // drift from it by less than a sixteenth.
            let slack = (tolerance >> 20) as i32 + 1 + (*val >> 4) as i32;
            ecr == actual_ecr && (actual_val.wrapping_sub(*val) as i32).abs() <= slack
        }
        _ => expected == actual,
    };
    expected.len() == actual.len() && expected.iter().zip(actual).all(|(e, a)| matches(e, a))
}

/// Checks each payload byte against [`stream_byte`] of its stream offset.
fn check_payload(segment: &WireSegment, flow: &FlowNumbering) -> Result<(), String> {
    // The SYN takes one sequence number.
    let first = segment.seq.wrapping_sub(flow.isn).wrapping_sub(1);
    let wrong = segment
        .payload
        .iter()
        .zip(0u32..)
        .find(|(byte, index)| **byte != stream_byte(first.wrapping_add(*index).into()));
    match wrong {
        None => Ok(()),
        Some((_, index)) => Err(format!(
            "wrong payload: byte {index} differs from the byte written at this offset"
        )),
    }
}
