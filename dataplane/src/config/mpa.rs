//! `[device.mpa]`: how a device sets up connections (RFC 5044, RFC 6581), and presets for known
//! peers.

use std::ops::Range;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::CrcSetting;

/// A ready-to-run frame announced to the peer (RFC 6581, section 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RtrName {
    /// Zero-length Send.
    Send,
    /// Zero-length RDMA Write.
    Write,
    /// Zero-length RDMA Read.
    Read,
}

/// MPA markers (RFC 5044, section 4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MarkersName {
    /// A peer that requests them is refused.
    Never,
    /// Sent to a peer that requests them.
    Accept,
    /// Also requested of the peer; Linux siw and most hardware refuse that.
    Request,
}

/// Out-of-order placement (RFC 5041, section 5.2), of FPDUs with a valid CRC only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OutOfOrderName {
    /// Everything is placed in order.
    Off,
    /// In streams with markers.
    Markers,
    /// Also in streams in which every FPDU received so far was aligned with a TCP segment. If a
    /// middlebox starts to resegment the stream later, payload that looks like an FPDU could be
    /// placed as one: only for networks without resegmenting middleboxes.
    Aligned,
}

/// Layout of the first octet of a Terminate (RFC 5040, section 4.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TerminateName {
    /// Layer in the high half of the first octet, as the RFC specifies.
    Rfc,
    /// Layer in the low half, as Linux siw sends and expects it.
    Siw,
}

/// Defaults for known peers with special needs. Explicit settings override the preset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MpaPreset {
    /// Linux siw: no markers, Terminates in siw's layout, and a wake-up for a silent peer.
    Siw,
    /// Chelsio T4 to T6: Read as the only ready-to-receive frame, no markers, 32 reads, 256 bytes
    /// of private data.
    Chelsio,
    /// Intel X722 and E810: Read preferred to Write, no markers, 63 reads, a retry only after a
    /// reset.
    Intel,
    /// Windows, with SMB Direct over iWARP: revision 1 with depths in the private data, Read as the only
    /// ready-to-receive frame, no markers.
    Windows,
}

/// `[device.mpa]`, with presets and defaults applied. The defaults suit all known peers except
/// servers on Linux siw: see [`wake_silent_peer_ms`](Self::wake_silent_peer_ms).
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(from = "MpaTable")]
#[schemars(!from, default, deny_unknown_fields, transform = add_preset)]
pub struct MpaSettings {
    /// Highest MPA revision offered and accepted: 1 or 2.
    #[schemars(with = "u8")]
    pub revision: Spanned<u8>,
    /// CRC policy.
    pub crc: CrcSetting,
    /// Markers.
    pub markers: MarkersName,
    /// RTR frames offered in revision 2; empty means no peer-to-peer set-up.
    pub rtr: Vec<RtrName>,
    /// Streams in which payload beyond a sequence gap is placed at once (delivery stays in order).
    pub out_of_order: OutOfOrderName,
    /// Negotiate immediate data with SEND with peers that support it.
    pub immediate_with_send: bool,
    /// Layout of Terminates.
    pub terminate: TerminateName,
    /// Maximum number of inbound RDMA Reads granted (IRD).
    #[schemars(with = "u16")]
    pub ird: Spanned<u16>,
    /// Maximum number of outbound RDMA Reads requested (ORD).
    #[schemars(with = "u16")]
    pub ord: Spanned<u16>,
    /// Maximum length of a peer's private data, in bytes; RFC 5044 allows 512.
    #[schemars(with = "u16")]
    pub private_data: Spanned<u16>,
    /// MSN of the first message of each queue, in both directions: 1 in RFC 5041, section 4.3.
    /// Other values test the wrap-around of MSNs, with a peer that starts at the same value.
    pub first_msn: u32,
    /// Milliseconds that a SEND may wait for a receive work request, during which the stream is
    /// stopped. 0: a Terminate at once, as in RFC 5041, section 7.1.
    pub receive_wait_ms: u32,
    /// Milliseconds after which the silence of a peer is broken that has sent nothing since the MPA
    /// reply; 0: never. A peer that accepted gets a zero-length RDMA Write, repeated at growing
    /// intervals: Linux siw can miss data that arrives right after its reply until more data arrives.
    /// A peer that connected without a ready-to-receive message gets what the program here sends: siw
    /// agrees on none, and its programs may wait for the accepting side to send first, which RFC 5044
    /// section 7.1.2 forbids that side.
    pub wake_silent_peer_ms: u32,
    /// In revision 1, exchange IRD and ORD in the first eight octets of the private data, and start with
    /// a zero-length Read ([MS-SMBD] section 6.1). The rest of the private data is the application's.
    pub depths_in_private_data: bool,
    /// Retry with revision 1 when a peer resets a request of revision 2 (RFC 6581, section 10).
    pub fallback: bool,
    /// Milliseconds to wait for an MPA request after the TCP connection is established.
    pub request_timeout_ms: u32,
    /// Milliseconds to wait for an MPA reply.
    pub reply_timeout_ms: u32,
    /// Milliseconds an application may take to accept or reject.
    pub accept_timeout_ms: u32,
}

/// The table as written in the file, before presets and defaults.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct MpaTable {
    preset: Option<MpaPreset>,
    revision: Option<Spanned<u8>>,
    crc: Option<CrcSetting>,
    markers: Option<MarkersName>,
    rtr: Option<Vec<RtrName>>,
    out_of_order: Option<OutOfOrderName>,
    immediate_with_send: Option<bool>,
    terminate: Option<TerminateName>,
    ird: Option<Spanned<u16>>,
    ord: Option<Spanned<u16>>,
    private_data: Option<Spanned<u16>>,
    first_msn: Option<u32>,
    receive_wait_ms: Option<u32>,
    wake_silent_peer_ms: Option<u32>,
    depths_in_private_data: Option<bool>,
    fallback: Option<bool>,
    request_timeout_ms: Option<u32>,
    reply_timeout_ms: Option<u32>,
    accept_timeout_ms: Option<u32>,
}

/// Adds the key `preset`, which is applied when the table is read, to the table's schema.
fn add_preset(table: &mut Schema) {
    let keys = table.get_mut("properties");
    if let Some(keys) = keys.and_then(|keys| keys.as_object_mut()) {
        let preset = MpaPreset::json_schema(&mut SchemaGenerator::default());
        keys.insert("preset".to_owned(), preset.to_value());
    }
}

impl Default for MpaSettings {
    fn default() -> Self {
        MpaTable::default().into()
    }
}

impl MpaSettings {
    fn preset_settings(preset: Option<MpaPreset>) -> MpaSettings {
        let at = |value| Spanned::new(0..0, value);
        let plain = MpaSettings {
            revision: Spanned::new(0..0, 2),
            crc: CrcSetting::On,
            markers: MarkersName::Accept,
            rtr: vec![RtrName::Write, RtrName::Read],
            out_of_order: OutOfOrderName::Off,
            immediate_with_send: true,
            terminate: TerminateName::Rfc,
            ird: at(128),
            ord: at(128),
            private_data: at(512),
            first_msn: 1,
            receive_wait_ms: 0,
            wake_silent_peer_ms: 0,
            depths_in_private_data: false,
            fallback: true,
            request_timeout_ms: 5_000,
            reply_timeout_ms: 10_000,
            accept_timeout_ms: 30_000,
        };
        match preset {
            None => plain,
            Some(MpaPreset::Siw) => MpaSettings {
                markers: MarkersName::Never,
                immediate_with_send: false,
                terminate: TerminateName::Siw,
                wake_silent_peer_ms: 50,
                ..plain
            },
            Some(MpaPreset::Chelsio) => MpaSettings {
                markers: MarkersName::Never,
                immediate_with_send: false,
                rtr: vec![RtrName::Read],
                ird: at(32),
                ord: at(32),
                private_data: at(256),
                ..plain
            },
            Some(MpaPreset::Intel) => MpaSettings {
                markers: MarkersName::Never,
                immediate_with_send: false,
                rtr: vec![RtrName::Read, RtrName::Write],
                ird: at(64),
                ord: at(63),
                ..plain
            },
            Some(MpaPreset::Windows) => MpaSettings {
                revision: Spanned::new(0..0, 1),
                markers: MarkersName::Never,
                immediate_with_send: false,
                rtr: vec![RtrName::Read],
                depths_in_private_data: true,
                ..plain
            },
        }
    }

    /// Checks ranges; the error has the location and the reason.
    pub(super) fn check_ranges(&self) -> Result<(), (Range<usize>, String)> {
        let revision = &self.revision;
        if !(1..=2).contains(revision.get_ref()) {
            let number = revision.get_ref();
            return Err((
                revision.span(),
                format!("MPA revision {number}: 1 or 2 are allowed"),
            ));
        }
        for (what, setting, most) in [
            ("ird", &self.ird, 0x3FFE),
            ("ord", &self.ord, 0x3FFE),
            ("private_data", &self.private_data, 512),
        ] {
            let number = *setting.get_ref();
            if number > most {
                return Err((
                    setting.span(),
                    format!("{what} {number}: 0 to {most} are allowed"),
                ));
            }
        }
        Ok(())
    }
}

impl From<MpaTable> for MpaSettings {
    fn from(file: MpaTable) -> MpaSettings {
        let preset = MpaSettings::preset_settings(file.preset);
        MpaSettings {
            revision: file.revision.unwrap_or(preset.revision),
            crc: file.crc.unwrap_or(preset.crc),
            markers: file.markers.unwrap_or(preset.markers),
            rtr: file.rtr.unwrap_or(preset.rtr),
            out_of_order: file.out_of_order.unwrap_or(preset.out_of_order),
            immediate_with_send: file
                .immediate_with_send
                .unwrap_or(preset.immediate_with_send),
            terminate: file.terminate.unwrap_or(preset.terminate),
            ird: file.ird.unwrap_or(preset.ird),
            ord: file.ord.unwrap_or(preset.ord),
            private_data: file.private_data.unwrap_or(preset.private_data),
            first_msn: file.first_msn.unwrap_or(preset.first_msn),
            receive_wait_ms: file.receive_wait_ms.unwrap_or(preset.receive_wait_ms),
            wake_silent_peer_ms: file
                .wake_silent_peer_ms
                .unwrap_or(preset.wake_silent_peer_ms),
            depths_in_private_data: file
                .depths_in_private_data
                .unwrap_or(preset.depths_in_private_data),
            fallback: file.fallback.unwrap_or(preset.fallback),
            request_timeout_ms: file.request_timeout_ms.unwrap_or(preset.request_timeout_ms),
            reply_timeout_ms: file.reply_timeout_ms.unwrap_or(preset.reply_timeout_ms),
            accept_timeout_ms: file.accept_timeout_ms.unwrap_or(preset.accept_timeout_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<MpaSettings, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn a_preset_gives_defaults_and_what_is_written_counts_more() {
        let s = parse("preset = \"chelsio\"\nird = 16").unwrap();
        assert_eq!(s.rtr, [RtrName::Read]);
        assert_eq!((*s.ird.get_ref(), *s.ord.get_ref()), (16, 32));
        assert_eq!(*s.private_data.get_ref(), 256);
        let s = parse("preset = \"siw\"\nterminate = \"rfc\"").unwrap();
        assert_eq!(
            (s.terminate, s.markers),
            (TerminateName::Rfc, MarkersName::Never)
        );
        let s = parse("preset = \"intel\"").unwrap();
        assert_eq!(s.rtr, [RtrName::Read, RtrName::Write]);
        let s = parse("preset = \"windows\"").unwrap();
        assert!(s.depths_in_private_data && *s.revision.get_ref() == 1);
        assert_eq!(parse("").unwrap().markers, MarkersName::Accept);
    }

    #[test]
    fn an_unknown_preset_or_key_is_refused_with_those_that_there_are() {
        let e = parse("preset = \"acme\"").unwrap_err().to_string();
        assert!(e.contains("chelsio") && e.contains("intel"), "{e}");
        let e = parse("preest = \"siw\"").unwrap_err().to_string();
        assert!(e.contains("preset"), "{e}");
    }

    #[test]
    fn more_private_data_than_the_rfc_allows_is_refused() {
        let (_, why) = parse("private_data = 513")
            .unwrap()
            .check_ranges()
            .unwrap_err();
        assert!(why.contains("512"), "{why}");
    }
}
