//! The memory of a stream: one arena with incoming messages, the lists that the peer writes, the
//! receive buffer and the send buffer.

use super::options::Sizes;
use super::wire::{MAPPING_LEN, MESSAGE_LEN, WINDOW_LEN, WINDOWS};
use siw::{Access, Arena, Context, Error, Mr, Pd, Sge};

/// A cache line: areas for bulk copies are aligned to it.
const ALIGN: usize = 64;

/// Offsets of all areas in the arena.
#[derive(Debug, Clone, Copy)]
struct Layout {
    windows: usize,
    mappings: usize,
    receive: usize,
    send: usize,
    end: usize,
}

impl Layout {
    fn new(sizes: &Sizes) -> Layout {
        let windows = (sizes.receives() as usize * MESSAGE_LEN).next_multiple_of(ALIGN);
        let mappings = windows + WINDOWS * WINDOW_LEN;
        let end = mappings + usize::from(sizes.mappings) * MAPPING_LEN;
        let receive = end.next_multiple_of(ALIGN);
        let send = receive + sizes.receive_buffer as usize;
        Layout {
            windows,
            mappings,
            receive,
            send,
            end: send + sizes.send_buffer as usize,
        }
    }
}

/// The memory of a stream.
pub struct StreamMemory {
    layout: Layout,
    /// The whole arena, for requests and copies of this side.
    own: Mr,
    /// Memory that the peer may write: lists and receive buffer.
    remote: Mr,
}

impl StreamMemory {
    /// Allocates and registers memory of the daemon.
    pub fn new(client: &Context, pd: &Pd, sizes: &Sizes) -> Result<StreamMemory, Error> {
        let layout = Layout::new(sizes);
        let arena = Arena::alloc(client, layout.end, false)?;
        let own = pd.reg_mr(&arena, 0..layout.end, Access::LOCAL_WRITE)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let remote = pd.reg_mr(&arena, layout.windows..layout.send, access)?;
        Ok(StreamMemory {
            layout,
            own,
            remote,
        })
    }

    /// Address of a byte of the receive buffer, for the peer.
    pub fn receive_address(&self, offset: u32) -> u64 {
        self.own.addr() + self.layout.receive as u64 + u64::from(offset)
    }

    /// Address of the list of windows, for the peer.
    pub fn windows_address(&self) -> u64 {
        self.own.addr() + self.layout.windows as u64
    }

    /// Key of both, for the peer.
    pub fn remote_key(&self) -> u32 {
        self.remote.rkey()
    }

    /// Buffer of an incoming message.
    pub fn message_sge(&self, index: u32) -> Sge {
        self.own.sge(index as usize * MESSAGE_LEN, MESSAGE_LEN)
    }

    /// Part of the send buffer.
    pub fn send_sge(&self, offset: u32, length: u32) -> Sge {
        let at = self.layout.send + offset as usize;
        self.own.sge(at, length as usize)
    }

    /// Reads a received message.
    pub fn read_message(&self, index: u32) -> Result<[u8; MESSAGE_LEN], Error> {
        let mut bytes = [0; MESSAGE_LEN];
        self.own.read(index as usize * MESSAGE_LEN, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a window that the peer wrote.
    pub fn read_window(&self, index: usize) -> Result<[u8; WINDOW_LEN], Error> {
        let mut bytes = [0; WINDOW_LEN];
        let at = self.layout.windows + index * WINDOW_LEN;
        self.own.read(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Clears a used window, so that the next one is recognised as new.
    pub fn clear_window(&self, index: usize) -> Result<(), Error> {
        let at = self.layout.windows + index * WINDOW_LEN;
        self.own.write(at, &[0; WINDOW_LEN])
    }

    /// Reads an entry of the list of mapped memory that the peer wrote.
    pub fn read_mapping(&self, index: usize) -> Result<[u8; MAPPING_LEN], Error> {
        let mut bytes = [0; MAPPING_LEN];
        let at = self.layout.mappings + index * MAPPING_LEN;
        self.own.read(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies from the receive buffer.
    pub fn read_received(&self, offset: u32, to: &mut [u8]) -> Result<(), Error> {
        self.own.read(self.layout.receive + offset as usize, to)
    }

    /// Copies into the send buffer.
    pub fn write_outgoing(&self, offset: u32, from: &[u8]) -> Result<(), Error> {
        self.own.write(self.layout.send + offset as usize, from)
    }
}
