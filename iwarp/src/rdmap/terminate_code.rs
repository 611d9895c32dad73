//! Error codes of the Terminate message.

use serde::{Deserialize, Serialize};

/// Layer, error type and code of a Terminate (RFC 5040 section 4.8, RFC 6580 section 3.2; the
/// table is in PROTOCOL.md section 6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TerminateCode {
    /// 0 RDMAP, 1 DDP, 2 MPA.
    pub layer: u8,
    /// Error type within the layer.
    pub error_type: u8,
    /// Error code within the type.
    pub code: u8,
}

impl std::fmt::Display for TerminateCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{:02x}", self.layer, self.error_type, self.code)
    }
}

macro_rules! terminate_codes {
    ($(#[doc = $meaning:literal] $name:ident = $layer:literal / $error_type:literal / $code:literal;)*) => {
        impl TerminateCode {
            $(#[doc = $meaning] pub const $name: TerminateCode = TerminateCode { layer: $layer, error_type: $error_type, code: $code };)*

            /// Meaning of the code; `None` if it is not registered.
            fn meaning(self) -> Option<&'static str> {
                match self {
                    $(TerminateCode::$name => Some($meaning),)*
                    _ => None,
                }
            }
        }
    };
}

terminate_codes! {
    /// Local catastrophic error.
    LOCAL_CATASTROPHIC = 0/0/0x00;
    /// Remote protection: invalid STag.
    RDMAP_STAG = 0/1/0x00;
    /// Remote protection: base or bounds.
    RDMAP_BOUNDS = 0/1/0x01;
    /// Remote protection: access rights.
    RDMAP_ACCESS = 0/1/0x02;
    /// Remote protection: STag not associated with the stream.
    RDMAP_NOT_ASSOCIATED = 0/1/0x03;
    /// Remote protection: TO wrap.
    RDMAP_WRAP = 0/1/0x04;
    /// Remote protection: STag cannot be invalidated.
    RDMAP_CANNOT_INVALIDATE_PROT = 0/1/0x09;
    /// Remote operation: invalid RDMAP version.
    RDMAP_VERSION = 0/2/0x05;
    /// Remote operation: unexpected opcode.
    RDMAP_OPCODE = 0/2/0x06;
    /// Remote operation: catastrophic, localised to the stream.
    RDMAP_CATASTROPHIC_STREAM = 0/2/0x07;
    /// Remote operation: STag cannot be invalidated.
    RDMAP_CANNOT_INVALIDATE = 0/2/0x09;
    /// Remote operation: unspecified.
    RDMAP_UNSPECIFIED = 0/2/0xff;
    /// DDP local catastrophic.
    DDP_CATASTROPHIC = 1/0/0x00;
    /// Tagged buffer: invalid STag.
    DDP_STAG = 1/1/0x00;
    /// Tagged buffer: base or bounds.
    DDP_BOUNDS = 1/1/0x01;
    /// Tagged buffer: STag not associated with the stream.
    DDP_NOT_ASSOCIATED = 1/1/0x02;
    /// Tagged buffer: TO wrap.
    DDP_WRAP = 1/1/0x03;
    /// Tagged buffer: invalid DDP version.
    DDP_TAGGED_VERSION = 1/1/0x04;
    /// Untagged buffer: invalid QN.
    DDP_QN = 1/2/0x01;
    /// Untagged buffer: no buffer available.
    DDP_NO_BUFFER = 1/2/0x02;
    /// Untagged buffer: MSN range.
    DDP_MSN = 1/2/0x03;
    /// Untagged buffer: invalid MO.
    DDP_MO = 1/2/0x04;
    /// Untagged buffer: message too long.
    DDP_TOO_LONG = 1/2/0x05;
    /// Untagged buffer: invalid DDP version.
    DDP_UNTAGGED_VERSION = 1/2/0x06;
    /// MPA: TCP connection closed or lost (local only, never sent).
    MPA_TCP_LOST = 2/0/0x01;
    /// MPA: CRC mismatch.
    MPA_CRC = 2/0/0x02;
    /// MPA: marker and ULPDU_Length disagree.
    MPA_LENGTH = 2/0/0x03;
    /// MPA: invalid MPA frame.
    MPA_BAD_FRAME = 2/0/0x04;
    /// MPA: local catastrophic.
    MPA_CATASTROPHIC = 2/0/0x05;
    /// MPA: insufficient IRD.
    MPA_INSUFFICIENT_IRD = 2/0/0x06;
    /// MPA: no matching RTR option.
    MPA_NO_RTR = 2/0/0x07;
}

impl TerminateCode {
    /// Meaning of the code with its layer, followed by the numbers, such as `DDP, tagged buffer: base
    /// or bounds (1/1/01)`.
    pub fn describe(self) -> String {
        let layer = match self.layer {
            0 => "RDMAP",
            1 => "DDP",
            2 => "MPA",
            _ => "unknown layer",
        };
        let meaning = self.meaning().unwrap_or("unregistered code").trim();
        let meaning = meaning.trim_end_matches('.');
        let meaning = meaning.strip_prefix(layer).unwrap_or(meaning);
        let meaning = meaning.trim_start_matches([':', ' ']);
        let mut letters = meaning.chars();
        let first = letters.next().map(|letter| letter.to_ascii_lowercase());
        let rest = letters.as_str();
        let first = first.filter(|_| rest.starts_with(|next: char| next.is_lowercase()));
        match first {
            Some(first) => format!("{layer}, {first}{rest} ({self})"),
            None => format!("{layer}, {meaning} ({self})"),
        }
    }

    /// Returns whether the message quotes the DDP header of the offending segment (RFC 5040 figure
    /// 10).
    pub(super) fn quotes_ddp_header(self) -> bool {
        matches!((self.layer, self.error_type), (0, 1 | 2) | (1, 1 | 2))
    }

    /// Returns whether the message quotes the Read Request Header, if the offending segment has one.
    pub(super) fn quotes_read_header(self) -> bool {
        matches!((self.layer, self.error_type), (0, 1 | 2))
    }

    pub(super) fn is_registered(self) -> bool {
        match (self.layer, self.error_type) {
            (0, 0) => self.code == 0,
            (0, 1) => matches!(self.code, 0..=4 | 9 | 0xff),
            (0, 2) => matches!(self.code, 5..=9 | 0xff),
            (1, 0) => self.code == 0,
            (1, 1) => self.code <= 4,
            (1, 2) => (1..=6).contains(&self.code),
            (2, 0) => (1..=7).contains(&self.code),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_name_the_layer_and_the_error() {
        let unknown = TerminateCode {
            layer: 3,
            error_type: 1,
            code: 2,
        };
        for (code, text) in [
            (
                TerminateCode::RDMAP_BOUNDS,
                "RDMAP, remote protection: base or bounds (0/1/01)",
            ),
            (
                TerminateCode::DDP_CATASTROPHIC,
                "DDP, local catastrophic (1/0/00)",
            ),
            (
                TerminateCode::DDP_QN,
                "DDP, untagged buffer: invalid QN (1/2/01)",
            ),
            (TerminateCode::MPA_CRC, "MPA, CRC mismatch (2/0/02)"),
            (unknown, "unknown layer, unregistered code (3/1/02)"),
        ] {
            assert_eq!(code.describe(), text);
        }
    }
}
