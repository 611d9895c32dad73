//! Receive metadata that the port reports with a frame.

/// The port's result of the checksum verification of a received frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxChecksum {
    /// The IP and TCP checksums are correct, or the frame never left this machine.
    Good,
    /// The TCP checksum is correct; the IPv4 header is to be verified in software.
    TcpGood,
    /// Both are to be verified in software.
    Unknown,
    /// The IP or TCP checksum is wrong: the frame is dropped and counted.
    Bad,
}

/// Receive metadata of one frame.
#[derive(Clone, Copy, Debug)]
pub struct FrameInfo {
    /// The port's checksum verification.
    pub checksum: RxChecksum,
    /// The RSS hash reported by the port; 0 if it reports none.
    pub rss_hash: u32,
}
