//! The link that the stack believes in: its frames become IP packets, and whoever it asks for by
//! ARP or NDP is there.

use std::net::{IpAddr, Ipv6Addr};

use siw_tcp::checksum::{self, Sum};
use siw_tcp::{FrameMeta, FrameSink, TxChecksum};

use crate::packet;

const PEER: [u8; 6] = [2, 0, 0, 0, 0, 2];
const HEADER: usize = 14;

/// Collects whole frames, checksums completed.
#[derive(Default)]
pub(crate) struct Sink {
    pub frames: Vec<Vec<u8>>,
    open: Vec<u8>,
    headers: usize,
    sum: Sum,
    meta: Option<FrameMeta>,
}

impl FrameSink<Vec<u8>> for Sink {
    fn begin(&mut self, headers: &[u8], meta: &FrameMeta) -> bool {
        self.open = headers.to_vec();
        self.headers = headers.len();
        self.sum = Sum::new();
        self.meta = Some(*meta);
        true
    }

    fn append(&mut self, _user: u64, record: &Vec<u8>, offset: u32, len: u32) {
        let from = offset as usize;
        self.bytes(&record[from..from + len as usize]);
    }

    fn bytes(&mut self, b: &[u8]) {
        self.sum.add(b);
        self.open.extend_from_slice(b);
    }

    fn end(&mut self) {
        let mut f = std::mem::take(&mut self.open);
        if let Some(meta) = self.meta.take()
            && meta.checksum != TxChecksum::Complete
            && meta.l4_len > 0
        {
            let done = checksum::finish(&f[..self.headers], &meta, self.sum);
            let at = checksum::tcp_field(&meta);
            f[at..at + 2].copy_from_slice(&done);
        }
        self.frames.push(f);
    }
}

/// An IP packet as a frame from the peer to the stack.
pub(crate) fn frame(to: [u8; 6], ip: &[u8]) -> Vec<u8> {
    let kind: [u8; 2] = if ip.first().is_some_and(|v| v >> 4 == 6) {
        [0x86, 0xdd]
    } else {
        [8, 0]
    };
    [&to[..], &PEER, &kind, ip].concat()
}

/// What a frame of the stack is to the link.
pub(crate) enum Sent {
    /// An IP packet for the script.
    Packet(Vec<u8>),
    /// A question, and the frame that answers it.
    Asked(Vec<u8>),
    /// Neighbourhood talk that needs no answer.
    Nothing,
}

pub(crate) fn take(frame_: Vec<u8>) -> Sent {
    let body = &frame_[HEADER..];
    match frame_[12..14] {
        [8, 6] => {
            // RFC 826: a request is answered for whatever address it names, unless its own.
            if body.len() < 28 || body[7] != 1 || body[14..18] == body[24..28] {
                return Sent::Nothing;
            }
            let mut b = [&body[8..14], &PEER, &[8, 6][..], &body[..7], &[2], &PEER].concat();
            b.extend(&body[24..28]);
            b.extend(&body[8..18]);
            Sent::Asked(b)
        }
        [0x86, 0xdd] if body.len() >= 64 && body[6] == 58 && (133..=137).contains(&body[40]) => {
            if body[40] != 135 {
                return Sent::Nothing;
            }
            let mut to = [0; 6];
            to.copy_from_slice(&frame_[6..12]);
            let addr = |at: usize| {
                let mut a = [0; 16];
                a.copy_from_slice(&body[at..at + 16]);
                Ipv6Addr::from(a)
            };
            Sent::Asked(frame(to, &advertisement(addr(48), addr(8))))
        }
        _ => Sent::Packet(body.to_vec()),
    }
}

/// RFC 4861 section 4.4: solicited, override.
fn advertisement(target: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
    let (from, to) = (IpAddr::V6(target), IpAddr::V6(to));
    let mut b = vec![136, 0, 0, 0, 0x60, 0, 0, 0];
    b.extend(target.octets());
    b.extend([2, 1]);
    b.extend(PEER);
    let mut sum = packet::pseudo(from, to, 58, b.len());
    sum.add(&b);
    b[2..4].copy_from_slice(&(!sum.value()).to_be_bytes());
    packet::ip(from, to, 58, 0, &b)
}
