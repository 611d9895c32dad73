//! Sending of a stream: data by RDMA WRITE into the peer's window, followed by a message; credits
//! for the peer; the end of the stream.

use super::memory::Buffer;
use super::options::{CONTROL_MESSAGES, MOST_INLINE, Sizes};
use super::stream::Stream;
use super::vectors::SourceBuffers;
use super::wire::{
    ConnectionData, MAPPING_LEN, PeerMapping, PeerWindow, StreamMessage, WINDOW_LEN, WINDOWS,
};
use siw::{Access, Error, SendData, SendWr, Sge, WrFlags};
use std::collections::VecDeque;

/// Receive work requests of the peer reserved for control messages, which use no credits.
const SPARE_CREDITS: u16 = 4;
/// Free bytes of the send buffer from which on there is room.
const LOW_WATER: u32 = 2048;
/// Length of the first piece of a long send. Each further one is twice as long, so that the peer's
/// daemon has work while the rest is copied.
const FIRST_PIECE: usize = 4096;
const LONGEST_PIECE: usize = 1 << 16;

/// Resources that a completion frees, encoded in the id of its work request.
#[derive(Clone, Copy)]
struct Holds {
    /// Bytes of the send buffer.
    bytes: u32,
    /// Slots of the send queue.
    places: u32,
    control: bool,
}

impl Holds {
    const CONTROL: Holds = Holds {
        bytes: 0,
        places: 0,
        control: true,
    };

    fn to_id(self) -> u64 {
        u64::from(self.bytes) | u64::from(self.places) << 32 | u64::from(self.control) << 48
    }

    fn of_id(id: u64) -> Holds {
        Holds {
            bytes: id as u32,
            places: (id >> 32) as u32 & 0xff,
            control: id >> 48 & 1 != 0,
        }
    }
}

/// The sending side of a stream.
pub struct StreamSender {
    /// The send buffer, a ring: offset of the next byte, and free bytes.
    buffer: Buffer,
    at: u32,
    free: u32,
    /// Maximum length of the buffer.
    most: u32,
    /// Smaller buffers before it, with their bytes that are being sent.
    replaced: VecDeque<(Buffer, u32)>,
    places: u32,
    all_places: u32,
    control_left: u32,
    /// Number of the last message with data, and of the last message that the peer allows.
    sequence: u16,
    pub(super) credits: u16,
    /// The peer's current window, and the index of the next one.
    window: PeerWindow,
    next_window: usize,
    /// Connection data of the peer, with its lists.
    peer: Option<ConnectionData>,
    next_peer_window: u32,
    /// Maximum length of the next piece of a long send.
    piece: usize,
}

/// Reason why sending is blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocked {
    /// The peer has no room, or too much data is outstanding.
    Full,
    /// There is no writable connection.
    Closed,
}

impl StreamSender {
    /// Creates a sender without data.
    pub fn new(sizes: &Sizes, buffer: Buffer) -> StreamSender {
        StreamSender {
            at: 0,
            free: buffer.len(),
            buffer,
            most: sizes.most_send_buffer,
            replaced: VecDeque::new(),
            places: sizes.send_queue.into(),
            all_places: sizes.send_queue.into(),
            control_left: CONTROL_MESSAGES,
            sequence: 0,
            credits: 0,
            window: PeerWindow::default(),
            // The connection data had the first window.
            next_window: 1,
            peer: None,
            next_peer_window: 1,
            piece: FIRST_PIECE,
        }
    }

    /// Sets the peer's connection data.
    pub fn open(&mut self, peer: &ConnectionData) {
        self.credits = peer.credits;
        self.window = peer.data;
        self.peer = Some(*peer);
    }

    /// Frees the resources of a completed request, whether successful or failed.
    pub fn on_completion(&mut self, id: u64) {
        let held = Holds::of_id(id);
        let mut bytes = held.bytes;
        // Requests complete in the order of their posting.
        while let Some((_, left)) = self.replaced.front_mut() {
            let freed = bytes.min(*left);
            (*left, bytes) = (*left - freed, bytes - freed);
            if *left > 0 {
                break;
            }
            self.replaced.pop_front();
        }
        self.free += bytes;
        self.places += held.places;
        self.control_left += u32::from(held.control);
    }

    /// Bytes of the send buffer in use. Inline data does not count.
    pub fn outstanding(&self) -> usize {
        let replaced: u32 = self.replaced.iter().map(|(_, left)| left).sum();
        (self.buffer.len() - self.free + replaced) as usize
    }

    /// Length of the send buffer in bytes.
    pub fn capacity(&self) -> u32 {
        self.buffer.len()
    }

    /// Replaces the buffer by a larger one.
    fn replace_buffer(&mut self, buffer: Buffer) {
        let length = buffer.len();
        let old = std::mem::replace(&mut self.buffer, buffer);
        let outstanding = old.len() - self.free;
        if outstanding > 0 {
            self.replaced.push_back((old, outstanding));
        }
        (self.at, self.free) = (0, length);
    }

    /// Checks that no request is outstanding.
    pub fn is_idle(&self) -> bool {
        self.places == self.all_places && self.control_left == CONTROL_MESSAGES
    }

    fn has_room(&self) -> bool {
        self.places >= 2
            && self.free >= LOW_WATER.min(self.buffer.len())
            && self.credits.wrapping_sub(self.sequence) > SPARE_CREDITS
            // A credit limit behind the sequence number would wrap around.
            && self.credits.wrapping_sub(self.sequence) < 1 << 15
    }

    fn big_endian(&self) -> bool {
        self.peer.is_some_and(|peer| peer.big_endian)
    }
}

/// Destination of a WRITE in the peer's memory.
#[derive(Clone, Copy)]
struct Target {
    address: u64,
    key: u32,
}

impl Stream {
    /// Checks whether data can be sent.
    pub fn can_send(&mut self) -> bool {
        self.writable && self.send.has_room() && self.find_window()
    }

    /// Finds a window with room. When the current one is full it looks for a new one; the peer
    /// writes a window in ascending order, its length last.
    fn find_window(&mut self) -> bool {
        if self.send.window.length > 0 {
            return true;
        }
        let index = self.send.next_window;
        let Ok(bytes) = self.memory.read_window(index) else {
            return false;
        };
        if PeerWindow::from_bytes(&bytes).length == 0 {
            return false;
        }
        let Ok(bytes) = self.memory.read_window(index) else {
            return false;
        };
        self.send.window = PeerWindow::from_bytes(&bytes);
        self.send.next_window = (index + 1) % WINDOWS;
        self.fit_to_windows();
        self.memory.clear_window(index).is_ok()
    }

    /// Grows the send buffer with the windows of the peer: a call can then send as much as both have
    /// room for.
    fn fit_to_windows(&mut self) {
        let both = self.send.window.length.saturating_mul(2);
        let length = both.min(self.send.most);
        if length <= self.send.capacity() {
            return;
        }
        match Buffer::grow(self.memory.pd(), length, Access::LOCAL_WRITE) {
            Some(buffer) => self.send.replace_buffer(buffer),
            None => self.send.most = self.send.capacity(),
        }
        self.sizes.send_buffer = self.send.capacity();
    }

    /// Sends a piece of the data, as long as possible.
    pub fn send_piece(&mut self, data: &mut SourceBuffers<'_>) -> Result<usize, Blocked> {
        if !self.writable {
            return Err(Blocked::Closed);
        }
        if !self.can_send() {
            return Err(Blocked::Full);
        }
        let most = (self.send.window.length as usize).min(self.send.free as usize);
        let length = data.left().min(self.next_piece(data.left())).min(most);
        let target = Target {
            address: self.send.window.address,
            key: self.send.window.key,
        };
        self.send.window.address += length as u64;
        self.send.window.length -= length as u32;
        self.send.sequence = self.send.sequence.wrapping_add(1);
        let message = StreamMessage::Data(length as u32);
        match self.write_data(data, length, target, Some(message)) {
            Ok(()) => Ok(length),
            Err(error) => {
                self.break_off(error.errno());
                Err(Blocked::Closed)
            }
        }
    }

    /// Length of the next piece: a long send begins with short pieces.
    fn next_piece(&mut self, left: usize) -> usize {
        let piece = self.send.piece;
        self.send.piece = if left > piece {
            (piece * 2).min(LONGEST_PIECE)
        } else {
            FIRST_PIECE
        };
        piece
    }

    /// Writes to memory that the peer has mapped, without a message. False if there is no room.
    pub fn write_mapped(
        &mut self,
        data: &mut SourceBuffers<'_>,
        mapping: &PeerMapping,
        offset: u64,
    ) -> Result<usize, Blocked> {
        if !self.writable {
            return Err(Blocked::Closed);
        }
        if self.send.places < 2 || self.send.free < LOW_WATER.min(self.send.capacity()) {
            return Err(Blocked::Full);
        }
        let within = offset - mapping.offset;
        let most = (u64::from(mapping.memory.length) - within).min(self.send.free.into());
        let length = data
            .left()
            .min(self.next_piece(data.left()))
            .min(usize::try_from(most).unwrap_or(usize::MAX));
        let target = Target {
            address: mapping.memory.address + within,
            key: mapping.memory.key,
        };
        match self.write_data(data, length, target, None) {
            Ok(()) => Ok(length),
            Err(error) => {
                self.break_off(error.errno());
                Err(Blocked::Closed)
            }
        }
    }

    /// Posts a WRITE and its message with one doorbell.
    fn write_data(
        &mut self,
        data: &mut SourceBuffers<'_>,
        length: usize,
        to: Target,
        message: Option<StreamMessage>,
    ) -> Result<(), Error> {
        let places = if message.is_some() { 2 } else { 1 };
        self.send.places -= places;
        let mut holds = Holds {
            bytes: 0,
            places,
            control: false,
        };
        if length <= usize::from(self.sizes.inline) {
            let mut inline = [0; MOST_INLINE];
            data.copy_to(&mut inline[..length]);
            let payload = SendData::Inline(&inline[..length]);
            return self.post_write(payload, to, message, holds);
        }
        holds.bytes = length as u32;
        let sges = self.copy_out(data, length as u32)?;
        let used = if sges[1].length == 0 { 1 } else { 2 };
        self.post_write(SendData::Sges(&sges[..used]), to, message, holds)
    }

    /// Copies into the send buffer, a ring; returns two parts, of which the second may be empty.
    fn copy_out(&mut self, data: &mut SourceBuffers<'_>, length: u32) -> Result<[Sge; 2], Error> {
        let at = self.send.at;
        let capacity = self.send.capacity();
        let first = length.min(capacity - at);
        for (offset, part) in [(at, first), (0, length - first)] {
            let mut done = 0;
            while done < part {
                let piece = data.take((part - done) as usize);
                self.send.buffer.write(offset + done, piece)?;
                done += piece.len() as u32;
            }
        }
        self.send.free -= length;
        self.send.at = (at + length) % capacity;
        Ok([
            self.send.buffer.sge(at, first),
            self.send.buffer.sge(0, length - first),
        ])
    }

    fn post_write(
        &self,
        payload: SendData<'_>,
        to: Target,
        message: Option<StreamMessage>,
        holds: Holds,
    ) -> Result<(), Error> {
        let write = SendWr::write(holds.to_id(), payload, to.address, to.key);
        let mut posting = self.qp.start_sending()?;
        let Some(message) = message else {
            return posting.push(&write);
        };
        // The completion of the message covers the WRITE too. If the WRITE fails, it has a
        // completion as well, which frees no resources.
        posting.push(&SendWr {
            wr_id: 0,
            flags: WrFlags::default(),
            ..write
        })?;
        posting.push(&SendWr::send(
            holds.to_id(),
            SendData::Inline(&message.encode()),
        ))
    }

    /// Grants the peer the half of the receive buffer that was read, with new credits.
    pub(super) fn give_credits(&mut self) {
        let is_due = self.receive.owes_window() || self.receive.owes_credits();
        let Some(peer) = self
            .send
            .peer
            .filter(|_| is_due && self.send.control_left > 0)
        else {
            return;
        };
        self.send.control_left -= 1;
        let message = StreamMessage::Credits(self.receive.grant_credits());
        let posted = if let Some(window) = self.receive.grant_window(self.memory.pd()) {
            self.sizes.receive_buffer = self.receive.capacity();
            let index = self.send.next_peer_window;
            self.send.next_peer_window = (index + 1) % peer.windows.length.max(1);
            let to = Target {
                address: peer.windows.address + u64::from(index) * WINDOW_LEN as u64,
                key: peer.windows.key,
            };
            let bytes = window.to_bytes(peer.big_endian);
            self.post_write(SendData::Inline(&bytes), to, Some(message), Holds::CONTROL)
        } else {
            self.post_message(message)
        };
        if let Err(error) = posted {
            self.break_off(error.errno());
        }
    }

    fn post_message(&self, message: StreamMessage) -> Result<(), Error> {
        let bytes = message.encode();
        let send = SendWr::send(Holds::CONTROL.to_id(), SendData::Inline(&bytes));
        self.qp.start_sending()?.push(&send)
    }

    /// Sends the end of this side to the peer. False if that has to wait.
    pub fn send_end(&mut self, message: StreamMessage) -> bool {
        if !self.connected {
            return true;
        }
        if self.send.control_left == 0 {
            return false;
        }
        self.send.control_left -= 1;
        if let Err(error) = self.post_message(message) {
            self.break_off(error.errno());
        }
        true
    }

    /// Tells the peer about memory that it may write. An error if that has to wait.
    pub fn send_mapping(&mut self, index: u16, mapping: &PeerMapping) -> Result<(), Blocked> {
        let Some(peer) = self.send.peer.filter(|_| self.writable) else {
            return Err(Blocked::Closed);
        };
        if !self.send.has_room() {
            return Err(Blocked::Full);
        }
        let list = peer.windows.address + u64::from(peer.windows.length) * WINDOW_LEN as u64;
        let to = Target {
            address: list + u64::from(index) * MAPPING_LEN as u64,
            key: peer.windows.key,
        };
        self.send.sequence = self.send.sequence.wrapping_add(1);
        self.send.places -= 2;
        let holds = Holds {
            bytes: 0,
            places: 2,
            control: false,
        };
        let bytes = mapping.to_bytes(self.send.big_endian());
        let message = Some(StreamMessage::Mapping(index));
        self.post_write(SendData::Inline(&bytes), to, message, holds)
            .map_err(|error| {
                self.break_off(error.errno());
                Blocked::Closed
            })
    }

    /// Number of entries of the peer's list of mapped memory.
    pub fn peer_mappings(&self) -> u16 {
        self.send.peer.map_or(0, |peer| peer.mappings)
    }
}
