//! Received data of a stream. The receive buffer is a ring whose halves are granted to the peer in
//! turn.

use super::options::Sizes;
use super::stream::Stream;
use super::vectors::DestinationBuffers;
use std::collections::VecDeque;

/// The receiving side of a stream.
pub struct StreamReceiver {
    /// Unread bytes of each announced message.
    messages: VecDeque<u32>,
    /// Sum of `messages`.
    available: usize,
    /// Offset of the next byte to read.
    at: u32,
    capacity: u32,
    /// Bytes that were read and not granted again, and their offset.
    free: u32,
    free_at: u32,
    /// Number of messages read, and the number at which the peer is told.
    sequence: u16,
    credits_due: u16,
    queue: u16,
}

impl StreamReceiver {
    /// Creates an empty receiver.
    pub fn new(sizes: &Sizes) -> StreamReceiver {
        let half = sizes.receive_buffer / 2;
        StreamReceiver {
            messages: VecDeque::with_capacity(sizes.receives() as usize),
            available: 0,
            at: 0,
            capacity: sizes.receive_buffer,
            // The private data grants the first half.
            free: half,
            free_at: half,
            sequence: 0,
            credits_due: sizes.receive_queue / 2,
            queue: sizes.receive_queue,
        }
    }

    /// Records `length` bytes that the peer wrote behind the earlier ones.
    pub fn on_data(&mut self, length: u32) {
        // A peer that writes more than it was granted overwrites its own unread data.
        let length = length.min(self.capacity - self.available.min(self.capacity as usize) as u32);
        self.available += length as usize;
        self.messages.push_back(length);
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
        self.free >= self.capacity / 2
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

    /// Grants a half of the buffer: returns its offset.
    pub fn grant_window(&mut self) -> u32 {
        let (at, half) = (self.free_at, self.capacity / 2);
        self.free -= half;
        self.free_at = (at + half) % self.capacity;
        at
    }

    /// Removes bytes from the front.
    fn consume(&mut self, length: usize) {
        self.available -= length;
        self.at = (self.at + length as u32) % self.capacity;
        self.free += length as u32;
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
        while done < length {
            let at = (self.receive.at + done as u32) % self.receive.capacity;
            let until_end = (self.receive.capacity - at) as usize;
            let piece = to.take((length - done).min(until_end));
            if self.memory.read_received(at, piece).is_err() {
                break;
            }
            done += piece.len();
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
