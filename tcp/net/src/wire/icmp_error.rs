//! ICMP errors: the first eight bytes of errors to send, without the checksum, and the classification
//! of received types and codes.

/// Types of errors (RFC 792, RFC 4443).
pub const ICMPV4_UNREACHABLE: u8 = 3;
pub const ICMPV4_TIME_EXCEEDED: u8 = 11;
pub const ICMPV4_PARAMETER_PROBLEM: u8 = 12;
pub const ICMPV6_UNREACHABLE: u8 = 1;
pub const ICMPV6_TIME_EXCEEDED: u8 = 3;
pub const ICMPV6_PARAMETER_PROBLEM: u8 = 4;

/// Returns whether an ICMPv4 error of this type and code is soft, that is, possibly transient (RFC 9293
/// section 3.9.2.2): network or host unreachable, also for a type of service (RFC 1122
/// section 3.2.2.1), source route failed, time exceeded, parameter problem.
pub const fn is_soft_error_v4(kind: u8, code: u8) -> bool {
    match kind {
        ICMPV4_UNREACHABLE => matches!(code, 0 | 1 | 5 | 11 | 12),
        _ => true,
    }
}

/// Returns whether an ICMPv6 error of this type and code is soft: no route, beyond the scope of the source,
/// address unreachable, time exceeded, parameter problem.
pub const fn is_soft_error_v6(kind: u8, code: u8) -> bool {
    match kind {
        ICMPV6_UNREACHABLE => matches!(code, 0 | 2 | 3),
        _ => true,
    }
}

/// Type, code, and the 32-bit word after the checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpError {
    /// Type.
    pub kind: u8,
    /// Code.
    pub code: u8,
    /// The word after the checksum, host order.
    pub word: u32,
}

impl IcmpError {
    /// Destination unreachable, protocol unreachable (RFC 792).
    pub const PROTOCOL: IcmpError = IcmpError {
        kind: ICMPV4_UNREACHABLE,
        code: 2,
        word: 0,
    };

    /// Time exceeded: fragment reassembly time exceeded (RFC 792, RFC 4443 section 3.3).
    pub const fn reassembly_time_exceeded(v6: bool) -> IcmpError {
        IcmpError {
            kind: if v6 {
                ICMPV6_TIME_EXCEEDED
            } else {
                ICMPV4_TIME_EXCEEDED
            },
            code: 1,
            word: 0,
        }
    }

    /// Parameter problem (RFC 4443 section 3.4): code 0 for an erroneous field, 1 for an
    /// unrecognised next header, 2 for an unrecognised option, 3 for headers that do not end in the first
    /// fragment (RFC 7112). `pointer` is the offset in the packet.
    pub const fn parameter_problem(code: u8, pointer: usize) -> IcmpError {
        IcmpError {
            kind: ICMPV6_PARAMETER_PROBLEM,
            code,
            word: pointer as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_and_hard_errors_are_told_apart_rfc_9293_3_9_2_2() {
        let soft_v4 = |code| is_soft_error_v4(ICMPV4_UNREACHABLE, code);
        let codes: Vec<u8> = (0..16).filter(|&code| soft_v4(code)).collect();
        assert_eq!(codes, [0, 1, 5, 11, 12]);
        let soft_v6 = |code| is_soft_error_v6(ICMPV6_UNREACHABLE, code);
        let codes: Vec<u8> = (0..8).filter(|&code| soft_v6(code)).collect();
        assert_eq!(codes, [0, 2, 3]);
        for (v4, v6) in [
            (ICMPV4_TIME_EXCEEDED, ICMPV6_TIME_EXCEEDED),
            (ICMPV4_PARAMETER_PROBLEM, ICMPV6_PARAMETER_PROBLEM),
        ] {
            assert!((0..3).all(|code| is_soft_error_v4(v4, code) && is_soft_error_v6(v6, code)));
        }
    }
}
