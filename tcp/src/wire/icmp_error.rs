//! The first eight bytes of the ICMP errors that we send.

/// Type, code, and the word behind the checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IcmpError {
    pub kind: u8,
    pub code: u8,
    pub word: u32,
}

impl IcmpError {
    /// Destination unreachable, protocol unreachable (RFC 792).
    pub(crate) const PROTOCOL: IcmpError = IcmpError {
        kind: 3,
        code: 2,
        word: 0,
    };

    /// Time exceeded, of reassembly (RFC 792, RFC 4443 section 3.3).
    pub(crate) const fn reassembly_time_exceeded(v6: bool) -> IcmpError {
        IcmpError {
            kind: if v6 { 3 } else { 11 },
            code: 1,
            word: 0,
        }
    }

    /// Parameter problem (RFC 4443 section 3.4): 0 an erroneous field, 1 an unrecognised next
    /// header, 2 an unrecognised option, 3 headers that do not end in the first fragment (RFC 7112);
    /// and where in the packet.
    pub(crate) const fn parameter_problem(code: u8, pointer: usize) -> IcmpError {
        IcmpError {
            kind: 4,
            code,
            word: pointer as u32,
        }
    }
}
