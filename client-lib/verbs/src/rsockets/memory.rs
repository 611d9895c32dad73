//! The memory of a stream: one arena with incoming messages, the lists that the peer writes, the
//! first receive buffer and the first send buffer. Streams that fill their buffers get larger ones, in
//! regions of their own.

use super::options::Sizes;
use super::wire::{MAPPING_LEN, MESSAGE_LEN, PeerWindow, WINDOW_LEN, WINDOWS};
use siw::{Access, Arena, Context, Error, Mr, Pd, Sge};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Maximum length of all larger buffers of the process, in bytes. Streams beyond it keep the buffers
/// that they have.
const MOST_GROWN: usize = 256 << 20;
static GROWN: AtomicUsize = AtomicUsize::new(0);

/// A part of [`MOST_GROWN`], returned when dropped.
struct GrownShare(usize);

impl GrownShare {
    fn take(length: usize) -> Option<GrownShare> {
        let share = GrownShare(length);
        let before = GROWN.fetch_add(length, Ordering::Relaxed);
        (before + length <= MOST_GROWN).then_some(share)
    }
}

impl Drop for GrownShare {
    fn drop(&mut self) {
        GROWN.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// A send or receive buffer, or a part of one; clones are the same memory.
#[derive(Clone)]
pub struct Buffer {
    region: Arc<Mr>,
    /// Offset in the region.
    start: usize,
    length: u32,
    /// Key for the peer.
    key: u32,
    /// None for the buffers that every stream has.
    _share: Option<Arc<GrownShare>>,
}

impl Buffer {
    /// Allocates a larger buffer, in a region of its own. None if there is no memory for it.
    pub fn grow(pd: &Pd, length: u32, access: Access) -> Option<Buffer> {
        let share = Arc::new(GrownShare::take(length as usize)?);
        let region = pd.alloc_mr(length as usize, access).ok()?;
        Some(Buffer {
            key: region.rkey(),
            region: Arc::new(region),
            start: 0,
            length,
            _share: Some(share),
        })
    }

    /// Length in bytes.
    pub fn len(&self) -> u32 {
        self.length
    }

    /// Its two halves.
    pub fn halves(&self) -> [Buffer; 2] {
        let half = self.length / 2;
        [0, half].map(|offset| Buffer {
            start: self.start + offset as usize,
            length: half,
            ..self.clone()
        })
    }

    /// The buffer, for the peer to write to.
    pub fn as_window(&self) -> PeerWindow {
        PeerWindow {
            address: self.region.addr() + self.start as u64,
            key: self.key,
            length: self.length,
        }
    }

    /// A part of the buffer, for a work request.
    pub fn sge(&self, offset: u32, length: u32) -> Sge {
        self.region
            .sge(self.start + offset as usize, length as usize)
    }

    /// Copies from the buffer.
    pub fn read(&self, offset: u32, to: &mut [u8]) -> Result<(), Error> {
        self.region.read(self.start + offset as usize, to)
    }

    /// Copies into the buffer.
    pub fn write(&self, offset: u32, from: &[u8]) -> Result<(), Error> {
        self.region.write(self.start + offset as usize, from)
    }
}

/// The memory of a stream.
pub struct StreamMemory {
    layout: Layout,
    /// The whole arena, for requests and copies of this side.
    own: Arc<Mr>,
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
            own: Arc::new(own),
            remote,
        })
    }

    fn buffer(&self, start: usize, end: usize) -> Buffer {
        Buffer {
            region: self.own.clone(),
            start,
            length: (end - start) as u32,
            key: self.remote.rkey(),
            _share: None,
        }
    }

    /// The receive buffer that the stream begins with.
    pub fn receive_buffer(&self) -> Buffer {
        self.buffer(self.layout.receive, self.layout.send)
    }

    /// The send buffer that the stream begins with.
    pub fn send_buffer(&self) -> Buffer {
        self.buffer(self.layout.send, self.layout.end)
    }

    /// Protection domain of the stream.
    pub fn pd(&self) -> &Pd {
        self.own.pd()
    }

    /// Address of the list of windows, for the peer.
    pub fn windows_address(&self) -> u64 {
        self.own.addr() + self.layout.windows as u64
    }

    /// Key of the lists and the first receive buffer, for the peer.
    pub fn remote_key(&self) -> u32 {
        self.remote.rkey()
    }

    /// Buffer of an incoming message.
    pub fn message_sge(&self, index: u32) -> Sge {
        self.own.sge(index as usize * MESSAGE_LEN, MESSAGE_LEN)
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
}
