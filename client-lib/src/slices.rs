//! Parts of registered memory: local ones for work requests of this side, remote ones that a peer
//! has described.

use crate::{Access, Error, SendData, SendWr, Sge};
use std::ops::Range;

/// Keys and addresses of a region, shared by the kinds of regions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RegionKeys {
    pub addr: u64,
    pub len: usize,
    pub lkey: u32,
    pub rkey: u32,
}

impl RegionKeys {
    /// Element without a check of its bounds. A length of 4 GiB or more, which no element can have,
    /// makes one that is outside of every region.
    #[inline]
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        let (addr, length) = match u32::try_from(len) {
            Ok(length) => (self.addr.wrapping_add(offset as u64), length),
            Err(_) => (u64::MAX, u32::MAX),
        };
        Sge {
            addr,
            length,
            lkey: self.lkey,
        }
    }

    fn check_range(&self, range: &Range<usize>) -> Result<(u64, usize), Error> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::Invalid("outside of the memory region"));
        }
        Ok((self.addr.wrapping_add(range.start as u64), range.len()))
    }

    #[inline]
    pub fn slice(&self, range: &Range<usize>) -> Result<Sge, Error> {
        let (addr, len) = self.check_range(range)?;
        let length = u32::try_from(len).map_err(|_| {
            Error::Invalid("a scatter/gather element has less than 4 GiB: divide the slice")
        })?;
        Ok(Sge {
            addr,
            length,
            lkey: self.lkey,
        })
    }

    pub fn remote(&self) -> RemoteSlice {
        RemoteSlice {
            addr: self.addr,
            len: self.len as u64,
            rkey: self.rkey,
        }
    }

    pub fn window(&self, range: &Range<usize>, access: Access) -> Result<MwBind, Error> {
        let (addr, len) = self.check_range(range)?;
        Ok(MwBind {
            lkey: self.lkey,
            addr,
            length: len as u64,
            access,
        })
    }
}

/// Binding of a window (`struct ibv_mw_bind_info`), as made by [`crate::Mr::window`]. Length 0 unbinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MwBind {
    /// Key of the region, which needs MW_BIND.
    pub lkey: u32,
    /// First address in the region.
    pub addr: u64,
    /// Length in bytes.
    pub length: u64,
    /// Remote access, and ZERO_BASED.
    pub access: Access,
}

impl MwBind {
    /// Unbinds the window.
    pub const NONE: MwBind = MwBind {
        lkey: 0,
        addr: 0,
        length: 0,
        access: Access::NONE,
    };
}

/// Memory of a peer: address, length and key, as [`crate::Mr::remote`] describes them. It travels as
/// bytes in a message or in private data, and makes the work requests that access it.
///
/// ```
/// use siw::{RemoteSlice, SendData};
/// # fn main() -> Result<(), siw::Error> {
/// let sent = RemoteSlice::new(0x1000, 64, 7).to_bytes();
/// let remote = RemoteSlice::from_bytes(&sent)?;
/// let request = remote.slice(8..16)?.write(1, SendData::Inline(b"8 bytes!"))?;
/// assert_eq!((request.remote_addr, request.rkey), (0x1008, 7));
/// assert!(remote.slice(8..16)?.write(1, SendData::Inline(b"9 bytes!!")).is_err());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSlice {
    addr: u64,
    len: u64,
    rkey: u32,
}

impl RemoteSlice {
    /// Length of [`Self::to_bytes`].
    pub const BYTES: usize = 20;

    /// `len` bytes from `addr` on, under a key of the peer.
    pub const fn new(addr: u64, len: u64, rkey: u32) -> RemoteSlice {
        RemoteSlice { addr, len, rkey }
    }

    /// First address at the peer.
    pub const fn addr(&self) -> u64 {
        self.addr
    }

    /// Length in bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// True for a slice without bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The peer's key.
    pub const fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Address, length and key in network byte order.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..].copy_from_slice(&self.rkey.to_be_bytes());
        bytes
    }

    /// Reads the form of [`Self::to_bytes`]; an error unless there are exactly [`Self::BYTES`]
    /// bytes and the range does not wrap around the address space.
    pub fn from_bytes(bytes: &[u8]) -> Result<RemoteSlice, Error> {
        let malformed = Error::Invalid("the description of the peer's memory is malformed");
        let (Some((addr, rest)), Self::BYTES) = (bytes.split_first_chunk(), bytes.len()) else {
            return Err(malformed);
        };
        let (Some((len, rest)), addr) = (rest.split_first_chunk(), u64::from_be_bytes(*addr))
        else {
            return Err(malformed);
        };
        let (Some(rkey), len) = (rest.first_chunk(), u64::from_be_bytes(*len)) else {
            return Err(malformed);
        };
        if addr.checked_add(len).is_none() {
            return Err(malformed);
        }
        let rkey = u32::from_be_bytes(*rkey);
        Ok(RemoteSlice { addr, len, rkey })
    }

    /// A part of it.
    pub fn slice(&self, range: Range<u64>) -> Result<RemoteSlice, Error> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::Invalid("outside of the peer's memory"));
        }
        Ok(RemoteSlice {
            addr: self.addr.wrapping_add(range.start),
            len: range.end - range.start,
            rkey: self.rkey,
        })
    }

    fn check_fit(&self, bytes: u64) -> Result<(), Error> {
        if bytes > self.len {
            return Err(Error::Invalid("more bytes than the peer's memory has"));
        }
        Ok(())
    }

    fn check_data(&self, data: &SendData<'_>) -> Result<(), Error> {
        self.check_fit(match data {
            SendData::Sges(sges) => total_len(sges),
            SendData::Inline(bytes) => bytes.len() as u64,
            SendData::Atomic(..) | SendData::Local(_) => 0,
        })
    }

    /// A signaled RDMA WRITE to its beginning; an error if the data is longer.
    pub fn write<'a>(&self, wr_id: u64, data: SendData<'a>) -> Result<SendWr<'a>, Error> {
        self.check_data(&data)?;
        Ok(SendWr::write(wr_id, data, self.addr, self.rkey))
    }

    /// As [`Self::write`]; also completes a receive work request of the peer, with `imm`.
    pub fn write_with_imm<'a>(
        &self,
        wr_id: u64,
        data: SendData<'a>,
        imm: u32,
    ) -> Result<SendWr<'a>, Error> {
        self.check_data(&data)?;
        let (addr, rkey) = (self.addr, self.rkey);
        Ok(SendWr::write_with_imm(wr_id, data, addr, rkey, imm))
    }

    /// A signaled RDMA READ from its beginning into `sges`; an error if they are longer.
    pub fn read<'a>(&self, wr_id: u64, sges: &'a [Sge]) -> Result<SendWr<'a>, Error> {
        self.check_fit(total_len(sges))?;
        Ok(SendWr::read(wr_id, sges, self.addr, self.rkey))
    }

    /// Adds to its first 64-bit word; the old value goes to `sge`.
    pub fn fetch_add(&self, wr_id: u64, sge: Sge, add: u64) -> Result<SendWr<'static>, Error> {
        self.check_word()?;
        Ok(SendWr::fetch_add(wr_id, sge, self.addr, self.rkey, add))
    }

    /// Writes `swap` to its first 64-bit word if that holds `compare`; the old value goes to `sge`
    /// either way.
    pub fn cmp_swap(
        &self,
        wr_id: u64,
        sge: Sge,
        compare: u64,
        swap: u64,
    ) -> Result<SendWr<'static>, Error> {
        self.check_word()?;
        let (addr, rkey) = (self.addr, self.rkey);
        Ok(SendWr::cmp_swap(wr_id, sge, addr, rkey, compare, swap))
    }

    fn check_word(&self) -> Result<(), Error> {
        if !self.addr.is_multiple_of(8) {
            return Err(Error::Invalid("an atomic needs an address divisible by 8"));
        }
        self.check_fit(8)
    }
}

fn total_len(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.length)).sum()
}

/// The methods that every kind of region has.
macro_rules! region_methods {
    () => {
        /// Scatter/gather element of `len` bytes at `offset`, unchecked: the daemon refuses one
        /// that does not lie in the region. [`Self::slice`] checks at once.
        #[inline]
        pub fn sge(&self, offset: usize, len: usize) -> $crate::Sge {
            self.keys().sge(offset, len)
        }

        /// Scatter/gather element of a part of the region.
        ///
        /// # Errors
        /// The range is not inside the region, or has 4 GiB or more.
        #[inline]
        pub fn slice(&self, range: std::ops::Range<usize>) -> Result<$crate::Sge, $crate::Error> {
            self.keys().slice(&range)
        }

        /// Description of the region for a peer.
        pub fn remote(&self) -> $crate::RemoteSlice {
            self.keys().remote()
        }

        /// Binding of a window to a part of the region, for [`crate::Mw::post_bind`].
        pub fn window(
            &self,
            range: std::ops::Range<usize>,
            access: $crate::Access,
        ) -> Result<$crate::MwBind, $crate::Error> {
            self.keys().window(&range, access)
        }
    };
}
pub(crate) use region_methods;

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: RegionKeys = RegionKeys {
        addr: 0x1000,
        len: 8 << 30,
        lkey: 1,
        rkey: 2,
    };

    #[test]
    fn lengths_of_4_gib_and_more_are_not_truncated() {
        const LONG: usize = (4 << 30) + 64;
        assert!(KEYS.slice(&(0..LONG)).is_err());
        let sge = KEYS.sge(0, LONG);
        assert!(sge.addr.checked_add(sge.length.into()).is_none());
        assert_eq!(
            KEYS.slice(&(LONG..LONG + 64)).unwrap().addr,
            0x1000 + LONG as u64
        );
        assert_eq!(KEYS.remote().len(), 8 << 30);
        let window = KEYS.window(&(0..LONG), Access::REMOTE_READ).unwrap();
        assert_eq!(window.length, LONG as u64);
    }

    #[test]
    fn slices_outside_of_the_region_are_refused() {
        let end = KEYS.len;
        let reversed = Range { start: 5, end: 4 };
        for range in [reversed, end..end + 1, end + 1..end + 1] {
            assert!(KEYS.slice(&range).is_err(), "{range:?}");
            assert!(KEYS.window(&range, Access::NONE).is_err(), "{range:?}");
        }
        assert_eq!(KEYS.slice(&(end..end)).unwrap().length, 0);
        let remote = KEYS.remote();
        assert!(remote.slice(0..remote.len() + 1).is_err());
        assert!(
            remote
                .slice(4..12)
                .unwrap()
                .fetch_add(1, KEYS.sge(0, 8), 1)
                .is_err()
        );
        assert!(
            remote
                .slice(8..12)
                .unwrap()
                .cmp_swap(1, KEYS.sge(0, 8), 0, 1)
                .is_err()
        );
        let short = remote.slice(0..7).unwrap();
        let sges = [KEYS.sge(0, 8)];
        assert!(short.read(1, &sges).is_err());
        assert!(short.write(1, SendData::Sges(&sges)).is_err());
        assert!(short.write_with_imm(1, SendData::Sges(&sges), 0).is_err());
    }

    #[test]
    fn remote_slices_survive_the_wire() {
        let remote = RemoteSlice::new(0xfedc_ba98_7654_3210, 1 << 40, 0x0102_0304);
        let bytes = remote.to_bytes();
        assert_eq!(RemoteSlice::from_bytes(&bytes).unwrap(), remote);
        assert!(RemoteSlice::from_bytes(&bytes[1..]).is_err());
        assert!(RemoteSlice::from_bytes(&[bytes.as_slice(), &[0]].concat()).is_err());
        let wraps = RemoteSlice::new(u64::MAX, 2, 0).to_bytes();
        assert!(RemoteSlice::from_bytes(&wraps).is_err());
    }
}
