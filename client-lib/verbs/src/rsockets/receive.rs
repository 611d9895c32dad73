//! Received data of a stream. The receive buffer is granted to the peer in two halves, its windows.
//! It grows if much of it is unread at once.

use super::memory::Buffer;
use super::options::Sizes;
use super::stream::Stream;
use super::vectors::DestinationBuffers;
use super::wire::PeerWindow;
use siw::{Access, Pd};
use std::collections::VecDeque;

/// Ratio of a larger buffer to the one before.
const GROWTH: u32 = 4;

/// The receiving side of a stream.
pub struct StreamReceiver {
    /// Unread bytes of each announced message.
    messages: VecDeque<u32>,
    /// Sum of `messages`.
    available: usize,
    /// Maximum of `available` since the last window was granted.
    peak: usize,
    /// Windows of the peer, in the order in which it fills them.
    windows: VecDeque<Buffer>,
    /// Bytes that were read of the first window.
    at: u32,
    /// Length of all windows without these bytes.
    granted: usize,
    /// Windows that were read, to be granted again.
    read: VecDeque<Buffer>,
    /// The second half of a larger buffer, which replaces the next window that was read.
    larger_half: Option<Buffer>,
    /// Length of both halves of the newest buffer, and its maximum.
    capacity: u32,
    most: u32,
    /// Number of messages read, and the number at which the peer is told.
    sequence: u16,
    credits_due: u16,
    queue: u16,
}

impl StreamReceiver {
    /// Creates an empty receiver.
    pub fn new(sizes: &Sizes, buffer: &Buffer) -> StreamReceiver {
        // The private data grants the first half.
        let [first, second] = buffer.halves();
        StreamReceiver {
            messages: VecDeque::with_capacity(sizes.receives() as usize),
            available: 0,
            peak: 0,
            granted: first.len() as usize,
            windows: VecDeque::from([first]),
            at: 0,
            read: VecDeque::from([second]),
            larger_half: None,
            capacity: buffer.len(),
            most: sizes.most_receive_buffer,
            sequence: 0,
            credits_due: sizes.receive_queue / 2,
            queue: sizes.receive_queue,
        }
    }

    /// Length of the buffer in bytes.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The first window, for the connection data.
    pub fn first_window(&self) -> PeerWindow {
        self.windows
            .front()
            .map_or_else(PeerWindow::default, Buffer::as_window)
    }

    /// Records `length` bytes that the peer wrote behind the earlier ones.
    pub fn on_data(&mut self, length: u32) {
        // A peer that writes more than it was granted overwrites its own unread data.
        let length = (length as usize).min(self.granted - self.available);
        self.available += length;
        self.peak = self.peak.max(self.available);
        self.messages.push_back(length as u32);
    }

    /// Counts a received message without data.
    pub fn on_mapping(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
    }

    /// Number of bytes that can be read.
    pub fn available(&self) -> usize {
        self.available
    }

    /// Checks whether half of the buffer was read.
    pub fn owes_window(&self) -> bool {
        !self.read.is_empty()
    }

    /// Checks whether half of the messages that the peer may send were read.
    pub fn owes_credits(&self) -> bool {
        self.sequence.wrapping_sub(self.credits_due) < 1 << 15
    }

    /// Grants credits: returns the number of the last message that the peer may send.
    pub fn grant_credits(&mut self) -> u16 {
        self.credits_due = self.sequence.wrapping_add(self.queue / 2);
        self.sequence.wrapping_add(self.queue)
    }

    /// Grants a half of the buffer that was read, or one of a larger buffer; None if none was read.
    pub fn grant_window(&mut self, pd: &Pd) -> Option<PeerWindow> {
        let read = self.read.pop_front()?;
        let window = match self.larger_half.take() {
            Some(larger) => larger,
            None => self.grow(pd).unwrap_or(read),
        };
        self.peak = self.available;
        self.granted += window.len() as usize;
        let granted = window.as_window();
        self.windows.push_back(window);
        Some(granted)
    }

    /// The first half of a larger buffer, if a quarter of the present one was unread at once: the peer
    /// sends more than the program reads in one turn.
    fn grow(&mut self, pd: &Pd) -> Option<Buffer> {
        if self.peak < self.capacity as usize / 4 || self.capacity >= self.most {
            return None;
        }
        let length = self.capacity.saturating_mul(GROWTH).min(self.most);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let Some(buffer) = Buffer::grow(pd, length, access) else {
            self.most = self.capacity;
            return None;
        };
        let [first, second] = buffer.halves();
        self.capacity = length;
        self.larger_half = Some(second);
        Some(first)
    }

    /// Removes bytes from the front.
    fn consume(&mut self, length: usize) {
        self.available -= length;
        self.granted -= length;
        self.at += length as u32;
        while let Some(window) = self.windows.front()
            && window.len() <= self.at
        {
            self.at -= window.len();
            self.read.extend(self.windows.pop_front());
        }
        let mut left = length as u32;
        while let Some(front) = self.messages.front_mut() {
            if *front > left {
                *front -= left;
                return;
            }
            left -= *front;
            self.messages.pop_front();
            self.sequence = self.sequence.wrapping_add(1);
        }
    }
}

impl Stream {
    /// Copies the available bytes, or as many as fit; with `peek` they stay in the buffer.
    pub fn receive_into(&mut self, to: &mut DestinationBuffers<'_>, peek: bool) -> usize {
        let length = to.left().min(self.receive.available);
        let mut done = 0;
        let mut at = self.receive.at;
        'windows: for window in &self.receive.windows {
            while at < window.len() && done < length {
                let piece = to.take((length - done).min((window.len() - at) as usize));
                if window.read(at, piece).is_err() {
                    break 'windows;
                }
                done += piece.len();
                at += piece.len() as u32;
            }
            at = 0;
        }
        if !peek && done > 0 {
            self.receive.consume(done);
        }
        done
    }

    /// Checks whether there are bytes to read, or the stream has ended.
    pub fn can_receive(&self) -> bool {
        self.receive.available > 0 || !self.readable
    }
}
