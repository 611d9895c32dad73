//! Contents of rping's messages: the announcement of a buffer, and the data of a ping.

use siw::Mr;

/// rping's smallest buffer: the length of its format with the longest number.
pub const MIN_SIZE: u32 = 26;
/// Largest buffer of this program.
pub const MAX_SIZE: u32 = 1 << 20;
/// Length of an announcement in bytes.
pub const BUFFER_INFO_LEN: usize = 16;

/// The announcement of a buffer: `struct rping_rdma_info`, big-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferInfo {
    pub addr: u64,
    pub rkey: u32,
    pub size: u32,
}

impl BufferInfo {
    /// Announces the first `size` bytes of a region.
    pub fn for_region(mr: &Mr, size: u32) -> BufferInfo {
        BufferInfo {
            addr: mr.addr(),
            rkey: mr.rkey(),
            size,
        }
    }

    /// Encodes it.
    pub fn to_bytes(self) -> [u8; BUFFER_INFO_LEN] {
        let mut bytes = [0; BUFFER_INFO_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        bytes[12..].copy_from_slice(&self.size.to_be_bytes());
        bytes
    }

    /// Decodes it.
    pub fn from_bytes(bytes: [u8; BUFFER_INFO_LEN]) -> BufferInfo {
        let all = u128::from_be_bytes(bytes);
        BufferInfo {
            addr: (all >> 64) as u64,
            rkey: (all >> 32) as u32,
            size: all as u32,
        }
    }
}

/// Data of ping number `number`, exactly as rping writes it: the number, then characters from `A`
/// to `z`, starting one character further with each ping, then a zero.
pub fn ping_data(number: u64, size: usize) -> Vec<u8> {
    const FIRST: u64 = b'A' as u64;
    const SPAN: u64 = b'z' as u64 - FIRST + 1;
    let mut data = format!("rdma-ping-{number}: ").into_bytes();
    let start = number % SPAN;
    let characters = (0..).map(|i| (FIRST + (start + i) % SPAN) as u8);
    data.extend(characters.take(size.saturating_sub(data.len())));
    data.truncate(size);
    if let Some(last) = data.last_mut() {
        *last = 0;
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ping_data_is_that_of_rping() {
        assert_eq!(ping_data(0, 22), b"rdma-ping-0: ABCDEFGH\0");
        assert_eq!(ping_data(1, 22), b"rdma-ping-1: BCDEFGHI\0");
        assert_eq!(ping_data(57, 22), b"rdma-ping-57: zABCDEF\0");
        assert_eq!(ping_data(58, 22), b"rdma-ping-58: ABCDEFG\0");
        let long = ping_data(0, 100);
        assert_eq!((long[13], long[13 + 57], long[13 + 58]), (b'A', b'z', b'A'));
    }

    #[test]
    fn buffer_infos_are_big_endian() {
        let info = BufferInfo {
            addr: 0x0102_0304_0506_0708,
            rkey: 0x090a_0b0c,
            size: 0x0d0e_0f10,
        };
        let bytes = info.to_bytes();
        let expected = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        assert_eq!(bytes, expected);
        assert_eq!(BufferInfo::from_bytes(bytes), info);
    }
}
