//! What a stream has received: bytes in the receive buffer, which is a ring whose halves the peer is
//! given in turn.

use super::options::Sizes;
use super::stream::Stream;
use super::vectors::DestinationBuffers;
use std::collections::VecDeque;

/// The receiving side of a stream.
pub struct StreamReceiver {
    /// Bytes that were announced by each message and not read.
    messages: VecDeque<u32>,
    /// Their sum.
    available: usize,
    /// Where the next byte is read.
    at: u32,
    capacity: u32,
    /// Bytes that were read and not handed out again, and where they begin.
    free: u32,
    free_at: u32,
    /// Messages that were read, and at which number the peer is told so.
    sequence: u16,
    credits_due: u16,
    queue: u16,
}

impl StreamReceiver {
    /// Nothing received yet.
    pub fn new(sizes: &Sizes) -> StreamReceiver {
        let half = sizes.receive_buffer / 2;
        StreamReceiver {
            messages: VecDeque::with_capacity(sizes.receives() as usize),
            available: 0,
            at: 0,
            capacity: sizes.receive_buffer,
            // The first half is in the private data.
            free: half,
            free_at: half,
            sequence: 0,
            credits_due: sizes.receive_queue / 2,
            queue: sizes.receive_queue,
        }
    }

    /// The peer wrote so many bytes behind the others.
    pub fn on_data(&mut self, length: u32) {
        // More than it was given: it overwrites what is not read yet, which is its own loss.
        let length = length.min(self.capacity - self.available.min(self.capacity as usize) as u32);
        self.available += length as usize;
        self.messages.push_back(length);
    }

    /// A message was received that has no data, but is counted.
    pub fn on_mapping(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
    }

    /// Bytes that can be read.
    pub fn available(&self) -> usize {
        self.available
    }

    /// Half of the buffer was read.
    pub fn owes_window(&self) -> bool {
        self.free >= self.capacity / 2
    }

    /// Half of what the peer may send was read.
    pub fn owes_credits(&self) -> bool {
        self.sequence.wrapping_sub(self.credits_due) < 1 << 15
    }

    /// The number of the message up to which the peer may send.
    pub fn grant_credits(&mut self) -> u16 {
        self.credits_due = self.sequence.wrapping_add(self.queue / 2);
        self.sequence.wrapping_add(self.queue)
    }

    /// The offset of the half that the peer gets.
    pub fn grant_window(&mut self) -> u32 {
        let (at, half) = (self.free_at, self.capacity / 2);
        self.free -= half;
        self.free_at = (at + half) % self.capacity;
        at
    }

    /// Bytes of the front were read.
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
    /// Copies what is there, or what fits; with `peek` it stays there.
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

    /// There is something to read, or there never will be.
    pub fn can_receive(&self) -> bool {
        self.receive.available > 0 || !self.readable
    }
}
