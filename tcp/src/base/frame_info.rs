//! What the port reports about a received frame.

/// What the port says about a received frame's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxChecksum {
    /// IP and TCP are good (or the frame never left this machine).
    Good,
    /// TCP is good; verify the IPv4 header in software.
    TcpGood,
    /// Verify both in software.
    Unknown,
    Bad,
}

#[derive(Clone, Copy, Debug)]
pub struct FrameInfo {
    pub checksum: RxChecksum,
    /// As the port reported it, 0 when it has none.
    pub rss_hash: u32,
}
