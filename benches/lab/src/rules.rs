//! Rules for senders that every FPDU keeps, whatever the case.

use crate::wire::{Fpdu, Segment, Terminate, opcode};

/// Rules that an FPDU breaks, each with the section of its RFC.
pub fn broken_by(fpdu: &Fpdu, segment: Option<&Segment>) -> Vec<&'static str> {
    let mut broken = Vec::new();
    let mut rule = |kept: bool, text| {
        if !kept {
            broken.push(text);
        }
    };
    rule(fpdu.crc_good, "CRC wrong (RFC 5044 section 4.4)");
    rule(fpdu.pad_zero, "pad not zero (RFC 5044 section 4.1)");
    rule(fpdu.markers_right, "marker wrong (RFC 5044 section 4.3)");
    let Some(segment) = segment else {
        broken.push("ULPDU shorter than its header");
        return broken;
    };
    rule(
        (segment.ddp_version, segment.rdmap_version) == (1, 1),
        "DV or RV is not 1 (RFC 5041 4.1, RFC 5040 4.1)",
    );
    rule(
        segment.ddp_reserved == 0 && segment.rdmap_reserved == 0,
        "reserved bits set (RFC 5041 4.1, RFC 5040 4.1)",
    );
    let invalidates = [opcode::SEND_INVALIDATE, opcode::SEND_SE_INVALIDATE];
    rule(
        segment.tagged || invalidates.contains(&segment.opcode) || segment.stag == 0,
        "Invalidate STag field not zero (RFC 5040 section 4.1)",
    );
    if segment.opcode == opcode::TERMINATE && !segment.tagged {
        let terminate = Terminate::decode(&segment.payload);
        rule(
            terminate.is_none_or(|t| t.reserved == 0),
            "reserved bits of the Terminate set (RFC 5040 section 4.8)",
        );
    }
    broken
}
