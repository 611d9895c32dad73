//! Messages of netlink(7): requests of programs, and answers to them. Numbers are in the order of the
//! machine; messages and attributes begin at multiples of four octets.

use std::ffi::c_int;

const HEADER_LEN: usize = size_of::<libc::nlmsghdr>();
const ATTRIBUTE_HEADER_LEN: usize = size_of::<libc::nlattr>();

/// Rounds up to a multiple of four.
const fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// A request. Answers repeat its sequence number.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub kind: u16,
    pub flags: c_int,
    pub sequence: u32,
    header: &'a [u8],
    pub payload: &'a [u8],
}

fn read_u16(octets: &[u8], at: usize) -> Option<u16> {
    let field = octets.get(at..)?.first_chunk()?;
    Some(u16::from_ne_bytes(*field))
}

fn read_u32(octets: &[u8], at: usize) -> Option<u32> {
    let field = octets.get(at..)?.first_chunk()?;
    Some(u32::from_ne_bytes(*field))
}

impl<'a> Request<'a> {
    /// Splits the first message off; `None` if it is incomplete.
    pub fn split_off(octets: &mut &'a [u8]) -> Option<Request<'a>> {
        let length = read_u32(octets, 0)? as usize;
        let (header, payload) = octets.get(..length)?.split_at_checked(HEADER_LEN)?;
        *octets = octets.get(aligned(length)..).unwrap_or_default();
        Some(Request {
            kind: read_u16(header, 4)?,
            flags: c_int::from(read_u16(header, 6)?),
            sequence: read_u32(header, 8)?,
            header,
            payload,
        })
    }

    /// Checks for a request for all objects.
    pub fn is_dump(&self) -> bool {
        self.flags & libc::NLM_F_DUMP == libc::NLM_F_DUMP
    }

    /// An attribute of four octets of a request that consists of attributes.
    pub fn number(&self, kind: u16) -> Option<u32> {
        let mut rest = self.payload;
        loop {
            let length = usize::from(read_u16(rest, 0)?);
            if length < ATTRIBUTE_HEADER_LEN {
                return None;
            }
            if read_u16(rest, 2)? == kind {
                return read_u32(rest.get(..length)?, ATTRIBUTE_HEADER_LEN);
            }
            rest = rest.get(aligned(length)..)?;
        }
    }
}

/// Answers, one behind the other.
pub struct Messages {
    octets: Vec<u8>,
    /// Port of the socket that they go to.
    port: u32,
}

impl Messages {
    pub fn to_port(port: u32) -> Messages {
        Messages {
            octets: Vec::new(),
            port,
        }
    }

    pub fn as_octets(&self) -> &[u8] {
        &self.octets
    }

    /// The messages in pieces that fit into the buffers of programs, as those of the kernel do.
    pub fn datagrams(&self) -> impl Iterator<Item = &[u8]> {
        const LONGEST: usize = 4096;
        let mut rest = self.as_octets();
        std::iter::from_fn(move || {
            let mut end = 0;
            while let Some(length) = read_u32(rest, end) {
                if end > 0 && end + length as usize > LONGEST {
                    break;
                }
                end += length as usize;
            }
            let (datagram, later) = rest.split_at(end);
            rest = later;
            (end > 0).then_some(datagram)
        })
    }

    /// Appends a message whose fixed part is `head`; returns what takes its attributes.
    pub fn add(&mut self, kind: u16, flags: c_int, sequence: u32, head: &[u8]) -> Attributes<'_> {
        let start = self.octets.len();
        let octets = &mut self.octets;
        octets.extend_from_slice(&[0; 4]);
        octets.extend_from_slice(&kind.to_ne_bytes());
        octets.extend_from_slice(&(flags as u16).to_ne_bytes());
        octets.extend_from_slice(&sequence.to_ne_bytes());
        octets.extend_from_slice(&self.port.to_ne_bytes());
        octets.extend_from_slice(head);
        let mut message = Attributes { octets, start };
        message.finish();
        message
    }

    /// Appends the end of a dump.
    pub fn add_done(&mut self, sequence: u32) {
        let done = libc::NLMSG_DONE as u16;
        self.add(done, libc::NLM_F_MULTI, sequence, &0_u32.to_ne_bytes());
    }

    /// Appends the answer of an error, or of none (0).
    pub fn add_error(&mut self, request: &Request<'_>, errno: c_int) {
        let mut body = (-errno).to_ne_bytes().to_vec();
        body.extend_from_slice(request.header);
        self.add(libc::NLMSG_ERROR as u16, 0, request.sequence, &body);
    }
}

/// The end of the last message.
pub struct Attributes<'a> {
    octets: &'a mut Vec<u8>,
    start: usize,
}

impl Attributes<'_> {
    /// Pads the message, and writes its length.
    fn finish(&mut self) {
        let end = aligned(self.octets.len());
        self.octets.resize(end, 0);
        let length = (end - self.start) as u32;
        self.octets[self.start..self.start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    pub fn add(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let length = (ATTRIBUTE_HEADER_LEN + value.len()) as u16;
        self.octets.extend_from_slice(&length.to_ne_bytes());
        self.octets.extend_from_slice(&kind.to_ne_bytes());
        self.octets.extend_from_slice(value);
        self.finish();
        self
    }

    pub fn add_number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.add(kind, &value.to_ne_bytes())
    }

    /// Adds a text with the zero at its end.
    pub fn add_text(&mut self, kind: u16, text: &[u8]) -> &mut Self {
        self.add(kind, &[text, &[0]].concat())
    }
}
