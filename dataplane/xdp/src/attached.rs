//! Queries the XDP program of an interface with one request of rtnetlink(7): bpf(2) would only say
//! that there is one.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Bytes of a request: the message header and `struct ifinfomsg`.
const REQUEST_BYTES: usize = 16 + 16;
/// Receive buffer: more than the kernel reports for an interface without virtual functions.
const ANSWER_BYTES: usize = 32 << 10;
/// Attributes of linux/if_link.h.
const IFLA_XDP: u16 = 43;
const IFLA_XDP_PROGRAM_ID: u16 = 4;
/// The upper bits of an attribute's type are flags.
const ATTRIBUTE_TYPE_MASK: u16 = 0x3fff;

/// The number of the attached program; `None` if there is none or the kernel does not report it.
pub(crate) fn read_attached_program(interface: u32) -> Option<u32> {
    // SAFETY: takes no address; the result is checked.
    let descriptor = unsafe {
        libc::socket(
            libc::AF_NETLINK,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            libc::NETLINK_ROUTE,
        )
    };
    if descriptor < 0 {
        return None;
    }
    // SAFETY: just opened, and not owned elsewhere.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let request = request_of(interface);
    // SAFETY: the request lives through the call and has the length given.
    let sent = unsafe {
        libc::send(
            socket.as_raw_fd(),
            request.as_ptr().cast(),
            request.len(),
            0,
        )
    };
    if sent < 0 {
        return None;
    }
    let mut answer = vec![0; ANSWER_BYTES];
    // SAFETY: the kernel writes at most `answer.len()` bytes.
    let received = unsafe {
        libc::recv(
            socket.as_raw_fd(),
            answer.as_mut_ptr().cast(),
            answer.len(),
            0,
        )
    };
    let answer = answer.get(..usize::try_from(received).ok()?)?;
    program_in_answer(answer)
}

/// `RTM_GETLINK` for one interface; the kernel answers it with one message.
fn request_of(interface: u32) -> [u8; REQUEST_BYTES] {
    let mut request = [0; REQUEST_BYTES];
    request[..4].copy_from_slice(&(REQUEST_BYTES as u32).to_ne_bytes());
    request[4..6].copy_from_slice(&libc::RTM_GETLINK.to_ne_bytes());
    request[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    request[20..24].copy_from_slice(&interface.to_ne_bytes());
    request
}

fn program_in_answer(answer: &[u8]) -> Option<u32> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    if kind != libc::RTM_NEWLINK {
        return None;
    }
    let xdp = find_attribute(answer.get(REQUEST_BYTES..)?, IFLA_XDP)?;
    let id = find_attribute(xdp, IFLA_XDP_PROGRAM_ID)?;
    Some(u32::from_ne_bytes(id.get(..4)?.try_into().ok()?))
}

/// Returns the value of the first attribute of this type. Each attribute has a length that includes
/// its header, a type, a value, and padding to four bytes.
fn find_attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = u16::from_ne_bytes(attributes.get(..2)?.try_into().ok()?);
        let kind = u16::from_ne_bytes(attributes.get(2..4)?.try_into().ok()?);
        let value = attributes.get(4..usize::from(length))?;
        if kind & ATTRIBUTE_TYPE_MASK == wanted {
            return Some(value);
        }
        attributes = attributes.get(usize::from(length).next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (value.len() as u16 + 4).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn the_program_is_found_among_other_attributes() {
        let mut answer = request_of(7).to_vec();
        answer[4..6].copy_from_slice(&libc::RTM_NEWLINK.to_ne_bytes());
        answer.extend(attribute(3, b"eth0\0"));
        let mut nested = attribute(2, &[1]);
        nested.extend(attribute(IFLA_XDP_PROGRAM_ID, &258u32.to_ne_bytes()));
        answer.extend(attribute(IFLA_XDP, &nested));
        assert_eq!(program_in_answer(&answer), Some(258));
        // A truncated answer yields nothing, and is not read beyond its end.
        for length in 0..answer.len() {
            assert_eq!(program_in_answer(&answer[..length]), None, "{length}");
        }
    }
}
