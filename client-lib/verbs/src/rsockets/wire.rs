//! Wire protocol of rsockets, that of librdmacm's rsockets over iWARP, so that both can be peers.
//!
//! The private data of the connection ([`ConnectionData`]) gives each side the address of the
//! other's buffer. Data is written there by RDMA WRITE, and a message of four bytes gives its
//! length ([`StreamMessage`]): a SEND, since iWARP has no immediate data. The receiver grants its
//! buffer in halves, by writing a [`PeerWindow`] into a list of two at the sender. With each
//! window, and for each half of the receive queue, it grants credits: the number of the last
//! message that the sender may send.

/// Size of a message.
pub const MESSAGE_LEN: usize = 4;
/// Size of a window in the sender's list.
pub const WINDOW_LEN: usize = 16;
/// Number of windows in that list, used in turn.
pub const WINDOWS: usize = 2;
/// Size of an entry in the list of mapped memory (`riomap`).
pub const MAPPING_LEN: usize = 24;
/// Size of the private data of both sides.
pub const CONNECTION_DATA_LEN: usize = 40;

const VERSION: u8 = 1;
const FLAG_BIG_ENDIAN: u8 = 1 << 0;
const FLAG_MAPPINGS: u8 = 1 << 1;

const OPERATION_SHIFT: u32 = 29;
const OPERATION_DATA: u32 = 0;
const OPERATION_CREDITS: u32 = 4;
const OPERATION_MAPPING: u32 = 6;
const OPERATION_CONTROL: u32 = 7;

const CONTROL_DISCONNECT: u32 = 0;
const CONTROL_KEEPALIVE: u32 = 1;
const CONTROL_SHUTDOWN: u32 = 2;

/// A message, whose upper three bits are its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamMessage {
    /// Number of bytes written behind the earlier ones.
    Data(u32),
    /// Number of the last message that the sender may send; there may be a new window.
    Credits(u16),
    /// An entry of the list of mapped memory was written.
    Mapping(u16),
    /// The peer will neither read nor write any more.
    Disconnect,
    /// The peer will not write any more.
    Shutdown,
    /// A message without effect, or of a kind that only newer peers know.
    Other,
}

impl StreamMessage {
    /// Encodes the message, in the byte order of the host as librdmacm does.
    pub fn encode(self) -> [u8; MESSAGE_LEN] {
        let (operation, value) = match self {
            StreamMessage::Data(length) => (OPERATION_DATA, length),
            StreamMessage::Credits(credits) => (OPERATION_CREDITS, credits.into()),
            StreamMessage::Mapping(index) => (OPERATION_MAPPING, index.into()),
            StreamMessage::Disconnect => (OPERATION_CONTROL, CONTROL_DISCONNECT),
            StreamMessage::Shutdown => (OPERATION_CONTROL, CONTROL_SHUTDOWN),
            StreamMessage::Other => (OPERATION_CONTROL, CONTROL_KEEPALIVE),
        };
        (operation << OPERATION_SHIFT | value).to_ne_bytes()
    }

    /// Decodes a received message.
    pub fn decode(bytes: [u8; MESSAGE_LEN]) -> StreamMessage {
        let word = u32::from_ne_bytes(bytes);
        let value = word & ((1 << OPERATION_SHIFT) - 1);
        match (word >> OPERATION_SHIFT, value) {
            (OPERATION_DATA, length) => StreamMessage::Data(length),
            (OPERATION_CREDITS, credits) => StreamMessage::Credits(credits as u16),
            (OPERATION_MAPPING, index) => StreamMessage::Mapping(index as u16),
            (OPERATION_CONTROL, CONTROL_DISCONNECT) => StreamMessage::Disconnect,
            (OPERATION_CONTROL, CONTROL_SHUTDOWN) => StreamMessage::Shutdown,
            _ => StreamMessage::Other,
        }
    }
}

/// Memory of the peer that may be written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerWindow {
    pub address: u64,
    pub key: u32,
    pub length: u32,
}

impl PeerWindow {
    fn from_be_bytes(bytes: &[u8; WINDOW_LEN]) -> PeerWindow {
        PeerWindow {
            address: u64::from_be_bytes(part(bytes, 0)),
            key: u32::from_be_bytes(part(bytes, 8)),
            length: u32::from_be_bytes(part(bytes, 12)),
        }
    }

    /// Decodes a window that the peer wrote, in the byte order of this host.
    pub fn from_bytes(bytes: &[u8; WINDOW_LEN]) -> PeerWindow {
        PeerWindow {
            address: u64::from_ne_bytes(part(bytes, 0)),
            key: u32::from_ne_bytes(part(bytes, 8)),
            length: u32::from_ne_bytes(part(bytes, 12)),
        }
    }

    /// Encodes it for a peer with the given byte order.
    pub fn to_bytes(self, big_endian: bool) -> [u8; WINDOW_LEN] {
        let mut bytes = [0; WINDOW_LEN];
        let (address, key, length) = if big_endian {
            let (key, length) = (self.key.to_be_bytes(), self.length.to_be_bytes());
            (self.address.to_be_bytes(), key, length)
        } else {
            let (key, length) = (self.key.to_le_bytes(), self.length.to_le_bytes());
            (self.address.to_le_bytes(), key, length)
        };
        bytes[..8].copy_from_slice(&address);
        bytes[8..12].copy_from_slice(&key);
        bytes[12..].copy_from_slice(&length);
        bytes
    }
}

/// Memory of the peer mapped at a range of offsets (`riomap`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerMapping {
    pub offset: u64,
    pub memory: PeerWindow,
}

impl PeerMapping {
    /// Decodes an entry that the peer wrote.
    pub fn from_bytes(bytes: &[u8; MAPPING_LEN]) -> PeerMapping {
        PeerMapping {
            offset: u64::from_ne_bytes(part(bytes, 0)),
            memory: PeerWindow::from_bytes(&part(bytes, 8)),
        }
    }

    /// Encodes it for a peer with the given byte order.
    pub fn to_bytes(self, big_endian: bool) -> [u8; MAPPING_LEN] {
        let mut bytes = [0; MAPPING_LEN];
        let offset = if big_endian {
            self.offset.to_be_bytes()
        } else {
            self.offset.to_le_bytes()
        };
        bytes[..8].copy_from_slice(&offset);
        bytes[8..].copy_from_slice(&self.memory.to_bytes(big_endian));
        bytes
    }
}

/// Data exchanged by both sides when they connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionData {
    /// Byte order of data written into memory of that side.
    pub big_endian: bool,
    /// Number of messages that its receive queue has room for.
    pub credits: u16,
    /// Entries of its list of mapped memory.
    pub mappings: u16,
    /// Its list of windows; the length is their number. The list of mapped memory follows.
    pub windows: PeerWindow,
    /// The first window of its buffer.
    pub data: PeerWindow,
}

impl ConnectionData {
    /// Encodes it as private data.
    pub fn encode(&self) -> [u8; CONNECTION_DATA_LEN] {
        let mut bytes = [0; CONNECTION_DATA_LEN];
        bytes[0] = VERSION;
        bytes[1] = FLAG_MAPPINGS | if self.big_endian { FLAG_BIG_ENDIAN } else { 0 };
        bytes[2..4].copy_from_slice(&self.credits.to_be_bytes());
        bytes[7] = to_scale(self.mappings);
        bytes[8..24].copy_from_slice(&self.windows.to_bytes(true));
        bytes[24..40].copy_from_slice(&self.data.to_bytes(true));
        bytes
    }

    /// Decodes private data; None if the peer is not an rsocket.
    pub fn decode(bytes: &[u8]) -> Option<ConnectionData> {
        let bytes: &[u8; CONNECTION_DATA_LEN] = bytes.first_chunk()?;
        if bytes[0] != VERSION {
            return None;
        }
        let has_mappings = bytes[1] & FLAG_MAPPINGS != 0;
        Some(ConnectionData {
            big_endian: bytes[1] & FLAG_BIG_ENDIAN != 0,
            credits: u16::from_be_bytes(part(bytes, 2)),
            mappings: if has_mappings {
                from_scale(bytes[7])
            } else {
                0
            },
            windows: PeerWindow::from_be_bytes(&part(bytes, 8)),
            data: PeerWindow::from_be_bytes(&part(bytes, 24)),
        })
    }
}

/// Returns `N` bytes at an offset; callers use constant offsets.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

const SCALE_BIT: u16 = 1 << 7;

/// Encodes a number of 15 bits in a byte: exact up to 128, in steps of 256 above.
pub fn to_scale(value: u16) -> u8 {
    if value <= SCALE_BIT {
        value as u8
    } else {
        (SCALE_BIT | (value >> 8).min(SCALE_BIT - 1)) as u8
    }
}

/// Decodes a number encoded by [`to_scale`].
pub fn from_scale(byte: u8) -> u16 {
    let value = u16::from(byte);
    if value <= SCALE_BIT {
        value
    } else {
        (value & !SCALE_BIT) << 8
    }
}
