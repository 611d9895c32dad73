//! The TCP header of a received segment (RFC 9293 section 3.1) and its options, read in place.

use siw_net::bytes::{read_u16, read_u32};
use siw_net::constants::TCP_HEADER_LEN;

use crate::base::sequence::SeqNr;

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
/// ECN-echo and congestion window reduced (RFC 3168 section 6.1).
pub(crate) const ECE: u8 = 0x40;
pub(crate) const CWR: u8 = 0x80;

/// Kinds of options (RFC 9293 section 3.2, RFC 7323, RFC 2018).
const OPTION_END: u8 = 0;
const OPTION_NOP: u8 = 1;
const OPTION_MSS: u8 = 2;
const OPTION_WINDOW_SCALE: u8 = 3;
const OPTION_SACK_PERMITTED: u8 = 4;
const OPTION_SACK: u8 = 5;
const OPTION_TIMESTAMPS: u8 = 8;
/// Bytes of a SACK block.
const SACK_BLOCK_LEN: usize = 8;
/// The largest window scale (RFC 7323 section 2.3).
const MAX_WINDOW_SCALE: u8 = 14;

/// `NOP NOP TIMESTAMPS 10`: layout of the timestamps option of a data segment (RFC 7323 appendix A).
pub(crate) const TS_ALIGNED: u32 = 0x0101_080a;

/// The header of a received segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segment {
    pub seq: SeqNr,
    pub ack: SeqNr,
    pub flags: u8,
    pub window: u16,
    pub header_len: u8,
    /// The IP header is marked Congestion Experienced (RFC 3168).
    pub ce: bool,
    /// The timestamps option is present: `ts_val` and `ts_ecr` are valid.
    pub has_ts: bool,
    pub sack_permitted: bool,
    /// Number of valid entries of `sack`.
    pub sacks: u8,
    pub ts_val: u32,
    pub ts_ecr: u32,
    pub mss: Option<u16>,
    pub wscale: Option<u8>,
    pub sack: [(SeqNr, SeqNr); 4],
}

impl Segment {
    /// Parses the header at the start of `tcp`; `false` if it is incomplete or malformed. Entries of `sack`
    /// beyond `sacks` are not written. A segment with malformed options counts in `bad_options`.
    ///
    /// Why it is fast: the fields are written in place, since moving a value just written field by field
    /// would wait for the stores; and the usual options, timestamps only, are recognised by one compare.
    #[inline]
    pub(crate) fn parse(&mut self, tcp: &[u8], bad_options: &mut u64) -> bool {
        let Some(fixed) = tcp.get(..TCP_HEADER_LEN) else {
            return false;
        };
        let header_len = usize::from(fixed[12] >> 4) * 4;
        if header_len < TCP_HEADER_LEN {
            return false;
        }
        let Some(options) = tcp.get(TCP_HEADER_LEN..header_len) else {
            return false;
        };
        self.seq = SeqNr(read_u32(fixed, 4));
        self.ack = SeqNr(read_u32(fixed, 8));
        self.flags = fixed[13];
        self.window = read_u16(fixed, 14);
        self.header_len = header_len as u8;
        self.sacks = 0;
        if options.len() == 12 && read_u32(options, 0) == TS_ALIGNED {
            self.has_ts = true;
            self.sack_permitted = false;
            self.mss = None;
            self.wscale = None;
            self.ts_val = read_u32(options, 4);
            self.ts_ecr = read_u32(options, 8);
        } else {
            self.has_ts = false;
            self.sack_permitted = false;
            self.mss = None;
            self.wscale = None;
            *bad_options += u64::from(!self.parse_options(options));
        }
        true
    }

    /// Parses the options. Unknown ones are skipped, as are known ones of a wrong length; an impossible
    /// length or one that reaches beyond the header ends them (RFC 9293 section 3.1, MUST-7). Returns
    /// `false` for a wrong or impossible length; options read before keep their values.
    #[cold]
    fn parse_options(&mut self, mut options: &[u8]) -> bool {
        let mut well_formed = true;
        while let Some((&kind, rest)) = options.split_first() {
            match kind {
                OPTION_END => return well_formed,
                OPTION_NOP => {
                    options = rest;
                    continue;
                }
                _ => {}
            }
            let Some(&len) = rest.first() else {
                return false;
            };
            let len = usize::from(len);
            if len < 2 || len > options.len() {
                return false;
            }
            let body = &options[2..len];
            match (kind, body.len()) {
                (OPTION_MSS, 2) if self.flags & SYN != 0 => self.mss = Some(read_u16(body, 0)),
                // RFC 7323 section 2.3: a larger scale counts as 14.
                (OPTION_WINDOW_SCALE, 1) if self.flags & SYN != 0 => {
                    self.wscale = Some(body[0].min(MAX_WINDOW_SCALE));
                }
                (OPTION_SACK_PERMITTED, 0) if self.flags & SYN != 0 => self.sack_permitted = true,
                (OPTION_SACK, len)
                    if len % SACK_BLOCK_LEN == 0 && len <= self.sack.len() * SACK_BLOCK_LEN =>
                {
                    self.sacks = (len / SACK_BLOCK_LEN) as u8;
                    for (index, block) in body.chunks_exact(SACK_BLOCK_LEN).enumerate() {
                        self.sack[index] = (SeqNr(read_u32(block, 0)), SeqNr(read_u32(block, 4)));
                    }
                }
                (OPTION_TIMESTAMPS, 8) => {
                    self.has_ts = true;
                    self.ts_val = read_u32(body, 0);
                    self.ts_ecr = read_u32(body, 4);
                }
                // SYN options in another segment are ignored.
                (OPTION_MSS, 2) | (OPTION_WINDOW_SCALE, 1) | (OPTION_SACK_PERMITTED, 0) => {}
                (OPTION_MSS..=OPTION_SACK | OPTION_TIMESTAMPS, _) => well_formed = false,
                _ => {}
            }
            options = &options[len..];
        }
        well_formed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> Option<Segment> {
        let mut segment = Segment::default();
        segment.parse(bytes, &mut 0).then_some(segment)
    }

    /// Parses a segment with these options and returns 1 if it counts as malformed, else 0.
    fn bad(flags: u8, options: &[u8]) -> u64 {
        let mut count = 0;
        assert!(Segment::default().parse(&header(flags, options), &mut count));
        count
    }

    fn header(flags: u8, options: &[u8]) -> Vec<u8> {
        let mut header = vec![0u8; 20];
        header[4..8].copy_from_slice(&7u32.to_be_bytes());
        header[8..12].copy_from_slice(&9u32.to_be_bytes());
        header[12] = (((20 + options.len()) / 4) as u8) << 4;
        header[13] = flags;
        header[14..16].copy_from_slice(&500u16.to_be_bytes());
        header.extend_from_slice(options);
        header
    }

    #[test]
    fn options_of_a_syn_are_parsed() {
        let segment = parse(&header(
            SYN,
            &[
                2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2, 1, 3, 3, 15,
            ],
        ))
        .unwrap();
        assert_eq!(
            (segment.seq, segment.ack, segment.window),
            (SeqNr(7), SeqNr(9), 500)
        );
        assert_eq!(segment.mss, Some(1460));
        assert_eq!(segment.wscale, Some(14), "RFC 7323 section 2.3");
        assert!(segment.sack_permitted && segment.has_ts);
        assert_eq!((segment.ts_val, segment.ts_ecr), (1, 2));
    }

    #[test]
    fn sack_blocks_are_parsed() {
        let mut options = vec![1, 1, 5, 18];
        for word in [10u32, 20, 30, 40] {
            options.extend_from_slice(&word.to_be_bytes());
        }
        let segment = parse(&header(ACK, &options)).unwrap();
        assert_eq!(segment.sacks, 2);
        assert_eq!(segment.sack[1], (SeqNr(30), SeqNr(40)));
    }

    #[test]
    fn malformed_options_count_and_unknown_ones_do_not() {
        let good: [&[u8]; 6] = [
            &[],
            &[1, 1, 1, 0],
            &[0, 2, 0, 0],
            &[254, 4, 9, 9],
            &[2, 4, 5, 0xb4],
            &[1, 3, 3, 7],
        ];
        for options in good {
            assert_eq!(
                (bad(SYN, options), bad(ACK, options)),
                (0, 0),
                "{options:?}"
            );
        }
        let wrong: [&[u8]; 8] = [
            &[254, 0, 0, 0],
            &[254, 1, 0, 0],
            &[254, 5, 0, 0],
            &[1, 1, 1, 254],
            &[2, 3, 5, 1],
            &[3, 4, 1, 1],
            &[5, 4, 0, 0],
            &[8, 4, 0, 0],
        ];
        for options in wrong {
            assert_eq!(
                (bad(SYN, options), bad(ACK, options)),
                (1, 1),
                "{options:?}"
            );
        }
        // Options before the malformed one count.
        let segment = parse(&header(SYN, &[2, 4, 5, 0xb4, 254, 0, 0, 0])).unwrap();
        assert_eq!(segment.mss, Some(1460));
    }

    #[test]
    fn garbage_options_neither_panic_nor_loop() {
        assert!(parse(&header(SYN, &[2, 0, 0, 0])).unwrap().mss.is_none());
        assert!(parse(&header(SYN, &[8, 255, 0, 0])).is_some());
        assert!(parse(&header(SYN, &[1, 1, 1, 2])).is_some());
        assert!(
            parse(&header(ACK, &[5, 7, 0, 0, 0, 0, 0, 0]))
                .unwrap()
                .sacks
                == 0
        );
        let mut random = 3u64;
        for _ in 0..20_000 {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let len = (random >> 33) as usize % 61;
            let mut bytes: Vec<u8> = (0..len)
                .map(|index| (random.rotate_left(index as u32) >> 7) as u8)
                .collect();
            let _ = parse(&bytes);
            if len > 20 {
                bytes[12] = 0xf0;
                let _ = parse(&bytes);
            }
        }
        let mut short = header(ACK, &[]);
        short[12] = 0x40;
        assert!(parse(&short).is_none(), "data offset below 5");
        short[12] = 0x60;
        assert!(parse(&short).is_none(), "data offset beyond the segment");
    }
}
