//! A hand-written iWARP peer over a Linux TCP socket: it spells out the bytes of RFC 5044, 5040 and
//! 5041 without the crates under test.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use super::PATIENCE;
use super::net::Netns;

/// Flags of an MPA frame.
pub const M: u8 = 0x80;
pub const C: u8 = 0x40;
pub const R: u8 = 0x20;
pub const S: u8 = 0x10;

/// An MPA frame (RFC 5044 section 7.1.1) with the correct PD_Length.
pub fn mpa(key: &[u8; 16], flags: u8, rev: u8, data: &[u8]) -> Vec<u8> {
    let mut f = key.to_vec();
    f.extend([flags, rev]);
    f.extend((data.len() as u16).to_be_bytes());
    f.extend(data);
    f
}

pub fn request(flags: u8, rev: u8, data: &[u8]) -> Vec<u8> {
    mpa(b"MPA ID Req Frame", flags, rev, data)
}

pub fn reply(flags: u8, rev: u8, data: &[u8]) -> Vec<u8> {
    mpa(b"MPA ID Rep Frame", flags, rev, data)
}

/// Adds length, pad and CRC to a ULPDU (RFC 5044 section 4).
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut f = (ulpdu.len() as u16).to_be_bytes().to_vec();
    f.extend(ulpdu);
    while !f.len().is_multiple_of(4) {
        f.push(0);
    }
    let crc = crc32c::crc32c(&f);
    f.extend(crc.to_le_bytes());
    f
}

/// The given FPDU as the first of a stream with markers (RFC 5044 section 4.3): a marker at each
/// multiple of 512 of the stream position, with the distance back to the start of the FPDU. The CRC
/// covers the markers.
pub fn with_markers(fpdu: &[u8]) -> Vec<u8> {
    let (body, _crc) = fpdu.split_at(fpdu.len() - 4);
    let mut f: Vec<u8> = Vec::new();
    for b in body {
        if f.len().is_multiple_of(512) {
            // The first marker directly precedes the FPDU.
            let back = f.len().saturating_sub(4) as u16;
            f.extend([0, 0]);
            f.extend(back.to_be_bytes());
        }
        f.push(*b);
    }
    let crc = crc32c::crc32c(&f);
    f.extend(crc.to_le_bytes());
    f
}

/// A tagged DDP segment with an RDMA Write (RFC 5041 section 4.1, RFC 5040 section 4.3).
pub fn write(last: bool, stag: u32, to: u64, data: &[u8]) -> Vec<u8> {
    let mut u = vec![if last { 0xc1 } else { 0x81 }, 0x40];
    u.extend(stag.to_be_bytes());
    u.extend(to.to_be_bytes());
    u.extend(data);
    fpdu(&u)
}

/// An untagged DDP segment with a Send (RFC 5041 section 4.2, RFC 5040 section 4.6).
pub fn send(last: bool, msn: u32, mo: u32, data: &[u8]) -> Vec<u8> {
    let mut u = vec![if last { 0x41 } else { 0x01 }, 0x43, 0, 0, 0, 0, 0, 0, 0, 0];
    u.extend(msn.to_be_bytes());
    u.extend(mo.to_be_bytes());
    u.extend(data);
    fpdu(&u)
}

/// A tagged DDP segment with these control octets (RFC 5041 section 4.1).
pub fn tagged(control: [u8; 2], stag: u32, to: u64, data: &[u8]) -> Vec<u8> {
    let mut u = control.to_vec();
    u.extend(stag.to_be_bytes());
    u.extend(to.to_be_bytes());
    u.extend(data);
    fpdu(&u)
}

/// An untagged DDP segment with these control octets (RFC 5041 section 4.2). `stag` is the STag to
/// invalidate, or reserved.
pub fn untagged(control: [u8; 2], stag: u32, qn: u32, msn: u32, mo: u32, data: &[u8]) -> Vec<u8> {
    let mut u = control.to_vec();
    for field in [stag, qn, msn, mo] {
        u.extend(field.to_be_bytes());
    }
    u.extend(data);
    fpdu(&u)
}

/// An RDMA Read Request (RFC 5040 section 4.4).
#[derive(Clone, Copy)]
pub struct ReadRequest {
    pub sink_stag: u32,
    pub sink_to: u64,
    pub size: u32,
    pub src_stag: u32,
    pub src_to: u64,
}

impl ReadRequest {
    /// The 28 octets of the request.
    pub fn octets(&self) -> Vec<u8> {
        let mut b = self.sink_stag.to_be_bytes().to_vec();
        b.extend(self.sink_to.to_be_bytes());
        b.extend(self.size.to_be_bytes());
        b.extend(self.src_stag.to_be_bytes());
        b.extend(self.src_to.to_be_bytes());
        b
    }

    /// The request as message number `msn` of queue 1.
    pub fn message(&self, msn: u32) -> Vec<u8> {
        untagged([0x41, 0x41], 0, 1, msn, 0, &self.octets())
    }
}

/// An Atomic Request (RFC 7306 section 5).
#[derive(Clone, Copy, Default)]
pub struct AtomicRequest {
    /// 0 is FetchAdd, 2 is CmpSwap.
    pub op: u32,
    pub id: u32,
    pub stag: u32,
    pub to: u64,
    pub add_or_swap: u64,
    pub mask: u64,
    pub compare: u64,
    pub compare_mask: u64,
}

impl AtomicRequest {
    /// The request as message number `msn` of queue 1.
    pub fn message(&self, msn: u32) -> Vec<u8> {
        let mut b = Vec::new();
        for field in [self.op, self.id, self.stag] {
            b.extend(field.to_be_bytes());
        }
        for field in [
            self.to,
            self.add_or_swap,
            self.mask,
            self.compare,
            self.compare_mask,
        ] {
            b.extend(field.to_be_bytes());
        }
        untagged([0x41, 0x4a], 0, 1, msn, 0, &b)
    }
}

/// The Terminate that this side expects: control words, then the quoted headers.
pub fn terminate(control: [u8; 4], quoted: &[u8]) -> Vec<u8> {
    let mut u = vec![0x41, 0x47, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0];
    u.extend(control);
    u.extend(quoted);
    fpdu(&u)
}

/// One side of a TCP connection of Linux.
pub struct Peer(pub TcpStream);

impl Peer {
    pub fn connect(ns: &Netns, to: SocketAddr) -> Peer {
        Peer::of(
            ns.run(|| TcpStream::connect_timeout(&to, PATIENCE))
                .unwrap(),
        )
    }

    pub fn accept(listener: &TcpListener) -> Peer {
        Peer::of(listener.accept().unwrap().0)
    }

    fn of(stream: TcpStream) -> Peer {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Peer(stream)
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// Sends each byte in a segment of its own, as far as Linux permits.
    pub fn send_bytewise(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.send(&[*b]);
            // Nagle is off, so no byte waits for the peer's acknowledgement.
        }
    }

    /// Reads exactly `n` bytes.
    pub fn take(&mut self, n: usize) -> Vec<u8> {
        let mut b = vec![0; n];
        self.0.read_exact(&mut b).unwrap();
        b
    }

    /// Reads a whole MPA frame: flags, revision, private data.
    pub fn take_mpa(&mut self, key: &[u8; 16]) -> (u8, u8, Vec<u8>) {
        let h = self.take(20);
        assert_eq!(&h[..16], key);
        let n = usize::from(u16::from_be_bytes([h[18], h[19]]));
        (h[16], h[17], self.take(n))
    }

    /// Reads a whole FPDU and verifies its CRC; returns the ULPDU.
    pub fn take_fpdu(&mut self) -> Vec<u8> {
        let head = self.take(2);
        let len = usize::from(u16::from_be_bytes([head[0], head[1]]));
        let rest = self.take((len + 2).next_multiple_of(4) - 2 + 4);
        assert_eq!(fpdu(&rest[..len])[2..], rest, "CRC or pad of the FPDU");
        rest[..len].to_vec()
    }

    /// Like [`take_fpdu`](Self::take_fpdu), but returns the error that ended the stream before the
    /// FPDU was whole.
    pub fn try_fpdu(&mut self) -> std::io::Result<Vec<u8>> {
        let mut head = [0; 2];
        self.0.read_exact(&mut head)?;
        let len = usize::from(u16::from_be_bytes(head));
        let mut rest = vec![0; (len + 2).next_multiple_of(4) - 2 + 4];
        self.0.read_exact(&mut rest)?;
        assert_eq!(fpdu(&rest[..len])[2..], rest, "CRC or pad of the FPDU");
        Ok(rest[..len].to_vec())
    }

    /// Reads until the connection ends; returns the bytes before that.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        let mut b = [0; 4096];
        loop {
            match self.0.read(&mut b) {
                Ok(0) => return all,
                Ok(n) => all.extend(&b[..n]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return all,
                Err(error) => panic!("the peer keeps the connection open: {error}"),
            }
        }
    }

    /// Checks that no data arrives and the connection stays open for `so_long`.
    pub fn is_quiet(&mut self, so_long: Duration) {
        self.0.set_read_timeout(Some(so_long)).unwrap();
        let mut b = [0];
        match self.0.read(&mut b) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            other => panic!("expected silence: {other:?} {b:?}"),
        }
        self.0.set_read_timeout(Some(PATIENCE)).unwrap();
    }

    /// Closes with RST instead of FIN.
    pub fn reset(self) {
        let linger = nix::libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        nix::sys::socket::setsockopt(&self.0, nix::sys::socket::sockopt::Linger, &linger).unwrap();
    }

    /// Sends FIN; the other direction stays open.
    pub fn fin(&self) {
        self.0.shutdown(std::net::Shutdown::Write).unwrap();
    }
}
