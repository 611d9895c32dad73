//! A connected rsocket: the queue pair and its stream. Sending is in `send.rs`, receiving in
//! `receive.rs`.
//!
//! Nothing here waits: [`Stream::progress`] takes the pending completions, and the callers check
//! again.

use super::memory::StreamMemory;
use super::options::Sizes;
use super::receive::StreamReceiver;
use super::send::StreamSender;
use super::wire::{ConnectionData, PeerWindow, StreamMessage, WINDOWS};
use crate::rdmacm::devices::Devices;
use siw::{CompletionChannel, Cq, Error, Qp, QpInit, RecvWr, Wc, WcStatus};
use std::ffi::c_int;
use std::sync::Arc;

/// Completions taken at once.
const BATCH: usize = 32;

/// Flag of work request ids of receives; the other bits are the index of the message.
const RECEIVE_ID: u64 = 1 << 63;

/// A queue pair with its buffers.
pub struct Stream {
    pub(super) qp: Qp,
    cq: Cq,
    pub(super) channel: Arc<CompletionChannel>,
    pub(super) memory: StreamMemory,
    pub(super) sizes: Sizes,
    pub(super) send: StreamSender,
    pub(super) receive: StreamReceiver,
    /// Receives whose messages were read, to be reposted.
    to_repost: Vec<u32>,
    /// The peer may still send, and this side still reads.
    pub readable: bool,
    /// This side may still send.
    pub writable: bool,
    /// This side has ended its direction by shutdown(2).
    pub is_shut_down: bool,
    /// The queue pair is connected, as far as known.
    pub connected: bool,
    /// The connection was lost: nothing that is outstanding will arrive.
    lost: bool,
    /// Errno of a broken connection; 0 if there is none, or if it was reported.
    pub error: c_int,
    /// The completion queue is armed; the event may have come already.
    armed: bool,
}

impl Stream {
    /// Creates a queue pair with all receives posted, ready to be connected.
    pub fn new(devices: &'static Devices, wanted: &Sizes) -> Result<Box<Stream>, Error> {
        let client = &devices.client;
        let sizes = wanted.within(&client.limits());
        let pd = devices.socket_pd()?;
        let channel = CompletionChannel::new(client)?;
        let completions = sizes.receives() + sizes.send_places();
        let cq = Cq::new(client, completions, Some((&channel, 0)))?;
        let init = QpInit {
            max_send_wr: sizes.send_places(),
            max_recv_wr: sizes.receives(),
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline: sizes.inline.into(),
            sq_sig_all: false,
        };
        // The peer reads the end of the stream, whether this process closes it or ends.
        let farewell = StreamMessage::Disconnect.encode();
        let qp = pd.create_stream_qp(&cq, &cq, &init, &farewell)?;
        let memory = StreamMemory::new(client, pd, &sizes)?;
        let mut stream = Box::new(Stream {
            qp,
            cq,
            channel,
            send: StreamSender::new(&sizes, memory.send_buffer()),
            receive: StreamReceiver::new(&sizes, &memory.receive_buffer()),
            memory,
            to_repost: (0..sizes.receives()).collect(),
            sizes,
            readable: false,
            writable: false,
            is_shut_down: false,
            connected: false,
            lost: false,
            error: 0,
            armed: false,
        });
        stream.post_receives()?;
        Ok(stream)
    }

    /// Connection data for the peer.
    pub fn connection_data(&self) -> ConnectionData {
        let key = self.memory.remote_key();
        ConnectionData {
            big_endian: cfg!(target_endian = "big"),
            credits: self.sizes.receive_queue,
            mappings: self.sizes.mappings,
            windows: PeerWindow {
                address: self.memory.windows_address(),
                key,
                length: WINDOWS as u32,
            },
            data: self.receive.first_window(),
        }
    }

    /// Opens the stream for data, with the connection data of the peer.
    pub fn open(&mut self, peer: &ConnectionData) {
        self.send.open(peer);
        self.connected = true;
        self.readable = true;
        self.writable = true;
    }

    /// Takes the pending completions and grants the peer the credits that are due.
    pub fn progress(&mut self) {
        self.take_completions();
        if self.connected {
            self.give_credits();
        }
    }

    fn take_completions(&mut self) {
        let mut completions = [Wc::default(); BATCH];
        loop {
            match self.cq.poll(&mut completions) {
                Ok(0) => return,
                Ok(count) => {
                    for completion in &completions[..count] {
                        self.on_completion(completion);
                    }
                    if self.connected
                        && let Err(error) = self.post_receives()
                    {
                        self.break_off(error.errno());
                    }
                }
                Err(error) => return self.break_off(error.errno()),
            }
        }
    }

    fn on_completion(&mut self, completion: &Wc) {
        let is_success = completion.status == WcStatus::SUCCESS;
        if completion.wr_id & RECEIVE_ID == 0 {
            self.send.on_completion(completion.wr_id);
        } else if is_success {
            return self.on_message(completion.wr_id as u32);
        }
        if !is_success {
            self.break_off(libc::ECONNRESET);
        }
    }

    fn on_message(&mut self, index: u32) {
        let Ok(bytes) = self.memory.read_message(index) else {
            return;
        };
        self.to_repost.push(index);
        match StreamMessage::decode(bytes) {
            StreamMessage::Data(length) => self.receive.on_data(length),
            StreamMessage::Credits(credits) => self.send.credits = credits,
            StreamMessage::Mapping(_) => self.receive.on_mapping(),
            StreamMessage::Disconnect => self.end(),
            StreamMessage::Shutdown if self.writable => self.readable = false,
            StreamMessage::Shutdown => self.end(),
            StreamMessage::Other => {}
        }
    }

    fn post_receives(&mut self) -> Result<(), Error> {
        if self.to_repost.is_empty() {
            return Ok(());
        }
        let mut posting = self.qp.start_receiving()?;
        for index in self.to_repost.drain(..) {
            posting.push(&RecvWr {
                wr_id: RECEIVE_ID | u64::from(index),
                sges: &[self.memory.message_sge(index)],
            })?;
        }
        Ok(())
    }

    /// Ends the stream in both directions.
    pub(super) fn end(&mut self) {
        self.connected = false;
        self.readable = false;
        self.writable = false;
    }

    /// Ends the stream after the loss of the connection.
    pub(super) fn break_off(&mut self, errno: c_int) {
        self.lost = true;
        if self.connected {
            self.error = errno;
        }
        self.end();
    }

    /// Checks that nothing is outstanding any more, or that the connection was lost.
    pub fn is_flushed(&self) -> bool {
        self.lost || self.send.is_idle()
    }

    /// Resets the connection: the peer loses what it has not received.
    pub fn reset(&mut self) {
        // It fails only if the connection has ended.
        let _ = self.qp.set_error();
        self.break_off(libc::ECONNRESET);
    }

    /// Arms the completion queue. False: it was armed just now, check again before waiting. True:
    /// wait.
    pub fn arm(&mut self) -> bool {
        let was_armed = self.armed;
        if !was_armed {
            // It fails only if the daemon has ended, which waiting notices too.
            let _ = self.cq.req_notify(false);
            self.armed = true;
        }
        was_armed
    }

    /// Takes the pending event: each arming raises at most one.
    pub fn take_events(&mut self) {
        if self.armed && matches!(self.channel.try_get_event(), Ok(Some(_))) {
            self.armed = false;
        }
    }
}
