//! Codec of MPA frames and FPDUs with their DDP and RDMAP headers (RFC 5044, 5041, 5040, 6581).
//!
//! Builders write every field as it is given, so that a case can send any wrong value.

use crate::crc::crc32c;

pub const REQUEST_KEY: &[u8; 16] = b"MPA ID Req Frame";
pub const REPLY_KEY: &[u8; 16] = b"MPA ID Rep Frame";

/// Period of markers in the octet stream (RFC 5044 section 4.3).
const MARKER_PERIOD: u64 = 512;

pub mod opcode {
    pub const WRITE: u8 = 0;
    pub const READ_REQUEST: u8 = 1;
    pub const READ_RESPONSE: u8 = 2;
    pub const SEND: u8 = 3;
    pub const SEND_INVALIDATE: u8 = 4;
    pub const SEND_SE: u8 = 5;
    pub const SEND_SE_INVALIDATE: u8 = 6;
    pub const TERMINATE: u8 = 7;
    pub const IMMEDIATE: u8 = 8;
    pub const IMMEDIATE_SE: u8 = 9;
    pub const ATOMIC_REQUEST: u8 = 10;
    pub const ATOMIC_RESPONSE: u8 = 11;
}

/// Start frame of MPA: the Request or the Reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpaFrame {
    pub key: [u8; 16],
    /// M, C, R, S and the four reserved bits.
    pub flags: u8,
    pub revision: u8,
    /// As announced; may differ from the octets that follow.
    pub pd_length: u16,
    /// With S in revision 2 it begins with the enhanced data.
    pub private_data: Vec<u8>,
}

impl MpaFrame {
    pub fn encode(&self) -> Vec<u8> {
        let mut octets = self.key.to_vec();
        octets.extend([self.flags, self.revision]);
        octets.extend(self.pd_length.to_be_bytes());
        octets.extend(&self.private_data);
        octets
    }

    /// A whole frame at the beginning of `octets`, and its length.
    pub fn decode(octets: &[u8]) -> Option<(MpaFrame, usize)> {
        let pd_length = u16::from_be_bytes(octets.get(18..20)?.try_into().ok()?);
        let end = 20 + usize::from(pd_length);
        let frame = MpaFrame {
            key: octets[..16].try_into().ok()?,
            flags: octets[16],
            revision: octets[17],
            pd_length,
            private_data: octets.get(20..end)?.to_vec(),
        };
        Some((frame, end))
    }

    pub fn markers(&self) -> bool {
        self.flags & 0x80 != 0
    }

    pub fn crc(&self) -> bool {
        self.flags & 0x40 != 0
    }

    pub fn rejected(&self) -> bool {
        self.flags & 0x20 != 0
    }

    pub fn enhanced(&self) -> bool {
        self.flags & 0x10 != 0
    }

    /// IRD, ORD and the control flags A, B, C, D as bits 3 to 0.
    pub fn depths(&self) -> Option<(u16, u16, u8)> {
        if !self.enhanced() {
            return None;
        }
        let ird = u16::from_be_bytes(self.private_data.get(..2)?.try_into().ok()?);
        let ord = u16::from_be_bytes(self.private_data.get(2..4)?.try_into().ok()?);
        let control = (ird >> 14) as u8 * 4 + (ord >> 14) as u8;
        Some((ird & 0x3FFF, ord & 0x3FFF, control))
    }

    pub fn describe(&self) -> String {
        let name = match &self.key {
            REQUEST_KEY => "MPA Request",
            REPLY_KEY => "MPA Reply",
            _ => "MPA frame with another key",
        };
        let mut text = format!(
            "{name} rev={} M={} C={} R={} S={} res={:x} pd_length={}",
            self.revision,
            u8::from(self.markers()),
            u8::from(self.crc()),
            u8::from(self.rejected()),
            u8::from(self.enhanced()),
            self.flags & 0xF,
            self.pd_length
        );
        if let Some((ird, ord, control)) = self.depths() {
            text += &format!(" IRD={ird} ORD={ord} ABCD={control:04b}");
        }
        text
    }
}

/// DDP segment with its RDMAP control octet.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Segment {
    pub tagged: bool,
    pub last: bool,
    /// Reserved bits of the DDP octet (four).
    pub ddp_reserved: u8,
    pub ddp_version: u8,
    pub rdmap_version: u8,
    /// Reserved bits of the RDMAP octet (two).
    pub rdmap_reserved: u8,
    pub opcode: u8,
    /// STag of a tagged segment; Invalidate STag, or zero, of an untagged one.
    pub stag: u32,
    pub to: u64,
    pub qn: u32,
    pub msn: u32,
    pub mo: u32,
    pub payload: Vec<u8>,
}

impl Segment {
    /// The ULPDU: DDP header and payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut octets = self.header();
        octets.extend(&self.payload);
        octets
    }

    /// The message in segments of at most `by` octets of payload each.
    pub fn parts(&self, by: usize) -> Vec<Segment> {
        if self.payload.len() <= by {
            return vec![self.clone()];
        }
        let count = self.payload.len().div_ceil(by);
        let part = |(index, payload): (usize, &[u8])| Segment {
            last: self.last && index + 1 == count,
            to: self.to.wrapping_add((index * by) as u64),
            mo: self.mo.wrapping_add((index * by) as u32),
            payload: payload.to_vec(),
            ..self.clone()
        };
        self.payload.chunks(by).enumerate().map(part).collect()
    }

    pub fn header(&self) -> Vec<u8> {
        let mut octets = vec![
            u8::from(self.tagged) << 7
                | u8::from(self.last) << 6
                | (self.ddp_reserved & 0xF) << 2
                | self.ddp_version & 3,
            self.rdmap_version << 6 | (self.rdmap_reserved & 3) << 4 | self.opcode & 0xF,
        ];
        octets.extend(self.stag.to_be_bytes());
        if self.tagged {
            octets.extend(self.to.to_be_bytes());
        } else {
            octets.extend(self.qn.to_be_bytes());
            octets.extend(self.msn.to_be_bytes());
            octets.extend(self.mo.to_be_bytes());
        }
        octets
    }

    pub fn decode(ulpdu: &[u8]) -> Option<Segment> {
        let (&ddp, &rdmap) = (ulpdu.first()?, ulpdu.get(1)?);
        let word = |at: usize| Some(u32::from_be_bytes(ulpdu.get(at..at + 4)?.try_into().ok()?));
        let mut segment = Segment {
            tagged: ddp & 0x80 != 0,
            last: ddp & 0x40 != 0,
            ddp_reserved: ddp >> 2 & 0xF,
            ddp_version: ddp & 3,
            rdmap_version: rdmap >> 6,
            rdmap_reserved: rdmap >> 4 & 3,
            opcode: rdmap & 0xF,
            stag: word(2)?,
            ..Segment::default()
        };
        if segment.tagged {
            segment.to = u64::from(word(6)?) << 32 | u64::from(word(10)?);
            segment.payload = ulpdu[14..].to_vec();
        } else {
            (segment.qn, segment.msn, segment.mo) = (word(6)?, word(10)?, word(14)?);
            segment.payload = ulpdu[18..].to_vec();
        }
        Some(segment)
    }

    pub fn describe(&self) -> String {
        let name = match self.opcode {
            opcode::WRITE => "RDMA Write",
            opcode::READ_REQUEST => "RDMA Read Request",
            opcode::READ_RESPONSE => "RDMA Read Response",
            opcode::SEND => "Send",
            opcode::SEND_INVALIDATE => "Send with Invalidate",
            opcode::SEND_SE => "Send with SE",
            opcode::SEND_SE_INVALIDATE => "Send with SE and Invalidate",
            opcode::TERMINATE => "Terminate",
            opcode::IMMEDIATE => "Immediate",
            opcode::IMMEDIATE_SE => "Immediate with SE",
            opcode::ATOMIC_REQUEST => "Atomic Request",
            opcode::ATOMIC_RESPONSE => "Atomic Response",
            _ => "unassigned opcode",
        };
        let mut text = format!("{name} L={}", u8::from(self.last));
        if self.tagged {
            text += &format!(" STag={:#010x} TO={:#x}", self.stag, self.to);
        } else {
            text += &format!(" QN={} MSN={} MO={}", self.qn, self.msn, self.mo);
            if self.stag != 0 {
                text += &format!(" Inv STag={:#010x}", self.stag);
            }
        }
        if (self.ddp_version, self.rdmap_version) != (1, 1) {
            text += &format!(" DV={} RV={}", self.ddp_version, self.rdmap_version);
        }
        if self.opcode > opcode::ATOMIC_RESPONSE {
            text += &format!(" opcode={}", self.opcode);
        }
        text += &format!(", {} octets", self.payload.len());
        match (
            self.opcode,
            Terminate::decode(&self.payload),
            ReadRequest::decode(&self.payload),
        ) {
            (opcode::TERMINATE, Some(terminate), _) if !self.tagged => {
                text += &format!(": {}", terminate.describe());
            }
            (opcode::READ_REQUEST, _, Some(read)) if !self.tagged => {
                text += &format!(
                    ": sink STag={:#010x} TO={:#x}, size {}, source STag={:#010x} TO={:#x}",
                    read.sink_stag, read.sink_to, read.size, read.source_stag, read.source_to
                );
            }
            _ => {}
        }
        text
    }
}

/// Payload of a Read Request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRequest {
    pub sink_stag: u32,
    pub sink_to: u64,
    pub size: u32,
    pub source_stag: u32,
    pub source_to: u64,
}

impl ReadRequest {
    pub fn encode(&self) -> Vec<u8> {
        let mut octets = self.sink_stag.to_be_bytes().to_vec();
        octets.extend(self.sink_to.to_be_bytes());
        octets.extend(self.size.to_be_bytes());
        octets.extend(self.source_stag.to_be_bytes());
        octets.extend(self.source_to.to_be_bytes());
        octets
    }

    pub fn decode(octets: &[u8]) -> Option<ReadRequest> {
        let octets: &[u8; 28] = octets.get(..28)?.try_into().ok()?;
        let word = |at: usize| {
            u32::from_be_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
        Some(ReadRequest {
            sink_stag: word(0),
            sink_to: long(4),
            size: word(12),
            source_stag: word(16),
            source_to: long(20),
        })
    }
}

/// Payload of an Atomic Request (RFC 7306 section 5.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicRequest {
    /// 28 reserved bits and the operation: 0 FetchAdd, 2 CmpSwap.
    pub operation: u32,
    pub identifier: u32,
    pub stag: u32,
    pub to: u64,
    pub add_or_swap: u64,
    pub add_or_swap_mask: u64,
    pub compare: u64,
    pub compare_mask: u64,
}

impl AtomicRequest {
    pub fn encode(&self) -> Vec<u8> {
        let mut octets = self.operation.to_be_bytes().to_vec();
        octets.extend(self.identifier.to_be_bytes());
        octets.extend(self.stag.to_be_bytes());
        for long in [
            self.to,
            self.add_or_swap,
            self.add_or_swap_mask,
            self.compare,
            self.compare_mask,
        ] {
            octets.extend(long.to_be_bytes());
        }
        octets
    }

    pub fn decode(octets: &[u8]) -> Option<AtomicRequest> {
        let octets: &[u8; 52] = octets.try_into().ok()?;
        let word = |at: usize| {
            u32::from_be_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
        Some(AtomicRequest {
            operation: word(0),
            identifier: word(4),
            stag: word(8),
            to: long(12),
            add_or_swap: long(20),
            add_or_swap_mask: long(28),
            compare: long(36),
            compare_mask: long(44),
        })
    }
}

/// Payload of an Atomic Response (RFC 7306 section 5.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtomicResponse {
    pub identifier: u32,
    /// Octets of the operand before the operation.
    pub value: u64,
}

impl AtomicResponse {
    pub fn encode(&self) -> Vec<u8> {
        let mut octets = self.identifier.to_be_bytes().to_vec();
        octets.extend(self.value.to_be_bytes());
        octets
    }

    pub fn decode(octets: &[u8]) -> Option<AtomicResponse> {
        let (identifier, value) = octets.split_first_chunk::<4>()?;
        Some(AtomicResponse {
            identifier: u32::from_be_bytes(*identifier),
            value: u64::from_be_bytes(value.try_into().ok()?),
        })
    }
}

/// Payload of a Terminate message (RFC 5040 section 4.8).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terminate {
    pub layer: u8,
    pub etype: u8,
    pub code: u8,
    /// M, D and R as bits 2 to 0.
    pub headers: u8,
    /// The 13 reserved bits.
    pub reserved: u16,
    /// Everything behind the control word.
    pub quoted: Vec<u8>,
}

impl Terminate {
    pub fn encode(&self) -> Vec<u8> {
        let word = u16::from(self.headers) << 13 | self.reserved & 0x1FFF;
        let mut octets = vec![self.layer << 4 | self.etype & 0xF, self.code];
        octets.extend(word.to_be_bytes());
        octets.extend(&self.quoted);
        octets
    }

    pub fn decode(octets: &[u8]) -> Option<Terminate> {
        let &[first, code, high, low] = octets.first_chunk::<4>()?;
        Some(Terminate {
            layer: first >> 4,
            etype: first & 0xF,
            code,
            headers: high >> 5,
            reserved: u16::from_be_bytes([high & 0x1F, low]),
            quoted: octets[4..].to_vec(),
        })
    }

    pub fn describe(&self) -> String {
        let mut text = format!("{:x}/{:x}/{:02x}", self.layer, self.etype, self.code);
        let names = [(4, 'M'), (2, 'D'), (1, 'R')];
        let set: String = names
            .iter()
            .filter(|n| self.headers & n.0 != 0)
            .map(|n| n.1)
            .collect();
        if !set.is_empty() {
            text += &format!(" {set}, {} octets quoted", self.quoted.len());
        }
        text
    }
}

/// Octets of padding that make the FPDU a multiple of four.
pub fn pad_length(ulpdu_length: usize) -> usize {
    (4 - (2 + ulpdu_length) % 4) % 4
}

/// Overrides of the fields that [`fpdu`] computes.
#[derive(Debug, Clone, Default)]
pub struct FpduOptions {
    /// Announced length, in place of the real one.
    pub length: Option<u16>,
    /// Value of the pad octets.
    pub pad: u8,
    /// The CRC is computed as if the pad were zero.
    pub crc_over_zero_pad: bool,
    pub crc: CrcField,
    /// Added to the pointer of each marker.
    pub marker_pointer: u16,
    /// Reserved octets of each marker.
    pub marker_reserved: u16,
    /// The first marker is missing.
    pub without_marker: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CrcField {
    #[default]
    Good,
    Bad,
    Zero,
}

/// An FPDU without markers.
pub fn fpdu(ulpdu: &[u8], options: &FpduOptions) -> Vec<u8> {
    let length = options.length.unwrap_or(ulpdu.len() as u16);
    let mut octets = length.to_be_bytes().to_vec();
    octets.extend(ulpdu);
    let body = octets.len();
    octets.resize(body + pad_length(ulpdu.len()), 0);
    let over_zero_pad = crc32c(&octets);
    octets[body..].fill(options.pad);
    let mut crc = crc32c(&octets);
    if options.crc_over_zero_pad {
        crc = over_zero_pad;
    }
    octets.extend(match options.crc {
        CrcField::Good => crc.to_le_bytes(),
        CrcField::Bad => (crc ^ 1).to_le_bytes(),
        CrcField::Zero => [0; 4],
    });
    octets
}

/// An FPDU with markers, whose first octet, or the marker before it, stands at `position` in the stream.
pub fn marked_fpdu(ulpdu: &[u8], options: &FpduOptions, position: u64) -> Vec<u8> {
    let length = options.length.unwrap_or(ulpdu.len() as u16);
    let mut body = length.to_be_bytes().to_vec();
    body.extend(ulpdu);
    body.resize(body.len() + pad_length(ulpdu.len()), options.pad);
    let mut octets = Vec::with_capacity(body.len() + body.len() / 64 + 8);
    let mut start = None;
    let mut is_skipped = !options.without_marker;
    let mut mark = |octets: &mut Vec<u8>, start: Option<usize>| {
        if !(position + octets.len() as u64).is_multiple_of(MARKER_PERIOD)
            || !std::mem::replace(&mut is_skipped, true)
        {
            return;
        }
        let pointer = start.map_or(0, |start| octets.len() - start) as u16;
        octets.extend(options.marker_reserved.to_be_bytes());
        octets.extend(pointer.wrapping_add(options.marker_pointer).to_be_bytes());
    };
    for octet in body {
        mark(&mut octets, start);
        start.get_or_insert(octets.len());
        octets.push(octet);
    }
    mark(&mut octets, start);
    let crc = crc32c(&octets);
    octets.extend(match options.crc {
        CrcField::Good => crc.to_le_bytes(),
        CrcField::Bad => (crc ^ 1).to_le_bytes(),
        CrcField::Zero => [0; 4],
    });
    octets
}

/// A received FPDU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fpdu {
    pub ulpdu: Vec<u8>,
    pub crc_good: bool,
    pub pad_zero: bool,
    /// Markers inside of it or directly before it.
    pub markers: u32,
    /// False if a marker points elsewhere or has reserved octets.
    pub markers_right: bool,
    /// A marker stands directly before it.
    pub marker_before: bool,
    /// A marker stands between pad and CRC.
    pub marker_before_crc: bool,
    /// Octets in the stream, markers included.
    pub length: usize,
}

/// Splits a received octet stream into FPDUs, with or without markers. Position 0 is the first octet
/// behind the peer's start frame.
#[derive(Debug, Default)]
pub struct FpduReader {
    buffer: Vec<u8>,
    /// Position of `buffer[0]` in the stream.
    position: u64,
    pub markers: bool,
}

impl FpduReader {
    pub fn push(&mut self, octets: &[u8]) {
        self.buffer.extend(octets);
    }

    /// Octets of an incomplete FPDU.
    pub fn pending(&self) -> &[u8] {
        &self.buffer
    }

    /// The next whole FPDU.
    pub fn next_fpdu(&mut self) -> Option<Fpdu> {
        let mut at = 0;
        // Octets that the CRC covers, markers included.
        let mut covered = Vec::new();
        let mut start = None;
        let mut markers = 0;
        let mut markers_right = true;
        let mut marker_before = false;
        let mut take =
            |covered: &mut Vec<u8>, at: &mut usize, count: usize, start: &mut Option<usize>| {
                let mut octets = Vec::with_capacity(count);
                while octets.len() < count {
                    if self.markers && (self.position + *at as u64).is_multiple_of(MARKER_PERIOD) {
                        let marker: [u8; 4] = self.buffer.get(*at..*at + 4)?.try_into().ok()?;
                        let pointer = start.map_or(0, |start| *at - start);
                        markers += 1;
                        marker_before |= start.is_none();
                        markers_right &= marker[..2] == [0, 0]
                            && usize::from(u16::from_be_bytes([marker[2], marker[3]])) == pointer;
                        covered.extend(marker);
                        *at += 4;
                    }
                    let octet = *self.buffer.get(*at)?;
                    start.get_or_insert(*at);
                    octets.push(octet);
                    covered.push(octet);
                    *at += 1;
                }
                Some(octets)
            };
        let length = take(&mut covered, &mut at, 2, &mut start)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        let ulpdu = take(&mut covered, &mut at, length, &mut start)?;
        let pad = take(&mut covered, &mut at, pad_length(length), &mut start)?;
        // A marker between pad and CRC belongs to the current CRC, so it is covered before the sum.
        let mut field = Vec::new();
        let crc = take(&mut field, &mut at, 4, &mut start)?;
        covered.extend(&field[..field.len() - 4]);
        self.buffer.drain(..at);
        self.position += at as u64;
        Some(Fpdu {
            ulpdu,
            crc_good: crc == crc32c(&covered).to_le_bytes(),
            pad_zero: pad.iter().all(|octet| *octet == 0),
            markers,
            markers_right,
            marker_before,
            marker_before_crc: field.len() > 4,
            length: at,
        })
    }
}

/// Adds markers to a stream of FPDUs, whose CRCs are computed here. For the tests and the reference
/// peer.
pub fn with_markers(ulpdus: &[Vec<u8>]) -> Vec<u8> {
    let mut stream: Vec<u8> = Vec::new();
    for ulpdu in ulpdus {
        let position = stream.len() as u64;
        stream.extend(marked_fpdu(ulpdu, &FpduOptions::default(), position));
    }
    stream
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(payload: &[u8]) -> Segment {
        Segment {
            last: true,
            ddp_version: 1,
            rdmap_version: 1,
            opcode: opcode::SEND,
            msn: 1,
            payload: payload.to_vec(),
            ..Segment::default()
        }
    }

    #[test]
    fn a_segment_survives_encoding() {
        let untagged = Segment {
            stag: 7,
            qn: 1,
            msn: 2,
            mo: 3,
            ..send(b"data")
        };
        let tagged = Segment {
            tagged: true,
            msn: 0,
            stag: 9,
            to: 1 << 40,
            ..send(b"x")
        };
        for segment in [untagged, tagged] {
            assert_eq!(Segment::decode(&segment.encode()), Some(segment));
        }
        assert_eq!(Segment::decode(&[0x41, 0x43, 0]), None);
    }

    #[test]
    fn first_octets_are_those_of_the_rfcs() {
        assert_eq!(send(b"").encode()[..2], [0x41, 0x43]);
        let write = Segment {
            tagged: true,
            opcode: opcode::WRITE,
            ..send(b"")
        };
        assert_eq!(write.encode()[..2], [0xC1, 0x40]);
        let terminate = Terminate {
            layer: 2,
            etype: 0,
            code: 2,
            headers: 0,
            reserved: 0,
            quoted: vec![],
        };
        assert_eq!(terminate.encode(), [0x20, 2, 0, 0]);
        assert_eq!(Terminate::decode(&[0x20, 2, 0, 0]), Some(terminate));
    }

    #[test]
    fn fpdus_of_all_lengths_are_read_back() {
        let mut reader = FpduReader::default();
        for length in 0..70 {
            let ulpdu = vec![length as u8; length];
            reader.push(&fpdu(&ulpdu, &FpduOptions::default()));
        }
        for length in 0..70 {
            let got = reader.next_fpdu().unwrap();
            assert_eq!(got.ulpdu, vec![length as u8; length]);
            assert!(got.crc_good && got.pad_zero);
        }
        assert_eq!(reader.next_fpdu(), None);
    }

    #[test]
    fn a_damaged_fpdu_is_noticed() {
        let good = fpdu(b"abc", &FpduOptions::default());
        for at in 2..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            let mut reader = FpduReader::default();
            reader.push(&bad);
            assert!(!reader.next_fpdu().unwrap().crc_good, "octet {at}");
        }
    }

    #[test]
    fn markers_are_removed_wherever_they_fall() {
        for length in 0..600 {
            let ulpdus = vec![vec![1; length], vec![2; 300], vec![3; 700]];
            let stream = with_markers(&ulpdus);
            assert_eq!(stream[..4], [0; 4]);
            let mut reader = FpduReader {
                markers: true,
                ..FpduReader::default()
            };
            reader.push(&stream);
            for ulpdu in &ulpdus {
                let got = reader.next_fpdu().unwrap();
                assert_eq!(&got.ulpdu, ulpdu, "length {length}");
                assert!(got.crc_good && got.markers_right, "length {length}");
            }
        }
    }

    #[test]
    fn a_reader_notices_wrong_markers() {
        let wrong = [
            FpduOptions {
                marker_pointer: 4,
                ..FpduOptions::default()
            },
            FpduOptions {
                marker_reserved: 1,
                ..FpduOptions::default()
            },
        ];
        for options in wrong {
            let mut reader = FpduReader {
                markers: true,
                ..FpduReader::default()
            };
            reader.push(&marked_fpdu(&[1; 20], &options, 0));
            let got = reader.next_fpdu().unwrap();
            assert!(got.crc_good && got.marker_before && !got.markers_right);
        }
    }

    /// RFC 5044 figures 5 and 6: Sends of 24 zero octets, the first FPDU of a stream behind its marker,
    /// and one with a marker at its octet 20.
    #[test]
    fn crc_is_that_of_the_figures_of_the_rfc() {
        let first = with_markers(&[send(&[0; 24]).encode()]);
        assert_eq!(
            (first.len(), &first[..8]),
            (52, &[0, 0, 0, 0, 0, 0x2A, 0x41, 0x43][..])
        );
        assert_eq!(first[48..], [0x52, 0x23, 0x99, 0x83]);
        let mut second = vec![0, 0x2A];
        second.extend(
            Segment {
                msn: 2,
                ..send(&[0; 24])
            }
            .encode(),
        );
        second.splice(20..20, [0, 0, 0, 20]);
        assert_eq!(crc32c(&second).to_le_bytes(), [0x84, 0x92, 0x58, 0x98]);
    }

    #[test]
    fn an_mpa_frame_survives_encoding() {
        let frame = MpaFrame {
            key: *REQUEST_KEY,
            flags: 0x50,
            revision: 2,
            pd_length: 6,
            private_data: vec![0xC0, 5, 0x40, 9, 1, 2],
        };
        let octets = frame.encode();
        assert_eq!(MpaFrame::decode(&octets), Some((frame.clone(), 26)));
        assert_eq!(MpaFrame::decode(&octets[..25]), None);
        assert_eq!(frame.depths(), Some((5, 9, 0b1101)));
    }
}
