//! What the port reports about a received frame.

/// What the port says about a received frame's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxChecksum {
    /// The IP and TCP checksums are right, or the frame never left this machine.
    Good,
    /// The TCP checksum is right; the IPv4 header is verified in software.
    TcpGood,
    /// Both are verified in software.
    Unknown,
    /// IP or TCP is wrong: the frame is dropped and counted.
    Bad,
}

/// What the port reports beside a received frame.
#[derive(Clone, Copy, Debug)]
pub struct FrameInfo {
    /// What the port verified.
    pub checksum: RxChecksum,
    /// The RSS hash as the port reported it; 0 if it reports none.
    pub rss_hash: u32,
}
