//! The public face: one device's stack in one worker.

use core::marker::PhantomData;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use crate::{Error, Events, FrameSink, Instant, RecvBuf, StackConfig, Stats};

/// A connection of one stack. Stale ids are harmless: every call with one does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A listener of one stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(pub(crate) u32);

/// RFC 9293 section 3.3.2. LISTEN is no connection here, see [`Stack::listen`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    SynSent,
    SynReceived,
    Established,
    FinWait1,
    FinWait2,
    CloseWait,
    Closing,
    LastAck,
    TimeWait,
    Closed,
}

/// What the port says about a received frame's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RxChecksum {
    /// IP and TCP are good (or the frame never left this machine).
    Good,
    /// Verify in software.
    Unknown,
    Bad,
}

#[derive(Clone, Copy, Debug)]
pub struct FrameInfo {
    pub checksum: RxChecksum,
    /// As the port reported it, 0 when it has none.
    pub rss_hash: u32,
}

/// A connection at one moment.
#[derive(Clone, Copy, Debug)]
pub struct ConnInfo {
    pub state: State,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub user: u64,
    /// Of a passive open.
    pub listener: Option<ListenerId>,
    pub emss: usize,
    pub cwnd: u32,
    pub ssthresh: u32,
    /// The peer's window.
    pub send_window: u32,
    /// Sent and not cumulatively acknowledged.
    pub in_flight: u32,
    /// Queued and never sent.
    pub unsent: u32,
    /// In order and not consumed.
    pub readable: usize,
    pub srtt: Option<Duration>,
    pub rto: Duration,
    pub retransmits: u32,
    pub timeouts: u32,
    /// The peer's FIN was received.
    pub peer_fin: bool,
}

/// In-order received bytes of one connection, in owned buffers.
pub struct RxQueue<B> {
    bytes: usize,
    _b: PhantomData<B>,
}

impl<B: RecvBuf> RxQueue<B> {
    /// Bytes in order and not yet consumed.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
    /// All pieces in order; none is empty.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        let r: Option<&[u8]> = None;
        r.into_iter()
    }
    /// Calls `f` with the pieces of `[offset, offset + len)`; returns how many bytes it saw, less
    /// than `len` only when that much is not here.
    pub fn for_each(&self, _offset: usize, _len: usize, _f: impl FnMut(&[u8])) -> usize {
        todo!()
    }
    /// Copies from `offset`; `false` (and nothing copied) when not all of it is here.
    pub fn peek(&self, _offset: usize, _out: &mut [u8]) -> bool {
        todo!()
    }
    /// Drops the first `n` bytes (at most what is here) and so opens the window; it is advertised
    /// lazily, by the next data, ACK or `poll`. Returns how many were dropped.
    pub fn consume(&mut self, _n: usize) -> usize {
        todo!()
    }
}

/// The stack of one device in one worker. `B` is a received frame, `R` a record to send.
pub struct Stack<B: RecvBuf, R> {
    stats: Stats,
    _b: PhantomData<(B, R)>,
}

#[allow(unused_variables)]
impl<B: RecvBuf, R> Stack<B, R> {
    /// Checks the configuration.
    pub fn new(config: StackConfig, now: Instant) -> Result<Self, Error> {
        todo!()
    }

    /// Takes a whole burst of received frames. ARP, NDP, ICMP are answered inside; the answers
    /// leave with the next `poll`.
    pub fn receive(&mut self, now: Instant, frames: impl Iterator<Item = (B, FrameInfo)>) {
        todo!()
    }

    /// Active open; ends in `CONNECTED`, or `CLOSED` with one of `REFUSED`, `UNREACHABLE`,
    /// `TIMED_OUT`. `local` must be one of the device's addresses. The SYN leaves with `poll`.
    pub fn connect(
        &mut self,
        now: Instant,
        local: Option<IpAddr>,
        local_port: Option<u16>,
        remote: SocketAddr,
        user: u64,
    ) -> Result<ConnId, Error> {
        todo!()
    }

    /// Passive open on one address or all. `backlog` bounds connections that are not yet
    /// established plus those whose `ACCEPTED` was not yet fetched. `user` becomes the user of
    /// new connections until `set_user`.
    pub fn listen(
        &mut self,
        local: Option<IpAddr>,
        port: u16,
        backlog: usize,
        user: u64,
    ) -> Result<ListenerId, Error> {
        todo!()
    }

    /// Stops listening. Half-open connections are reset; established ones live on.
    pub fn unlisten(&mut self, now: Instant, listener: ListenerId) {
        todo!()
    }

    pub fn conn(&self, id: ConnId) -> Option<ConnInfo> {
        todo!()
    }

    pub fn set_user(&mut self, id: ConnId, user: u64) {
        todo!()
    }

    /// Sends FIN after the queued records. Received data can still be read (half close). No
    /// records can be pushed any more.
    pub fn close(&mut self, now: Instant, id: ConnId) {
        todo!()
    }

    /// Resets the connection at once; queued records stay until `take_unacked` or `release`.
    pub fn abort(&mut self, now: Instant, id: ConnId) {
        todo!()
    }

    /// The owner forgets the connection: no more events. One that is closing lives on until
    /// TIME-WAIT or LAST-ACK ends; one that is open is closed first (reset when received data
    /// was not read, RFC 2525 section 2.17).
    pub fn release(&mut self, now: Instant, id: ConnId) {
        todo!()
    }

    /// The next connection with news, each at most once, flags OR-ed together.
    pub fn next_event(&mut self) -> Option<(ConnId, u64, Events)> {
        todo!()
    }

    /// Received bytes, in order.
    pub fn rx_queue(&mut self, id: ConnId) -> Option<&mut RxQueue<B>> {
        todo!()
    }

    /// Most payload bytes of a segment now: make records no longer than this. 0 for a stale id.
    pub fn emss(&self, id: ConnId) -> usize {
        todo!()
    }

    /// Bytes that may be queued now so that they leave at once: min(cwnd, peer's window) less
    /// what is in flight and queued. At least one segment when nothing is queued on an open
    /// connection, so that a record can wait for the window; 0 when not writable.
    pub fn send_room(&self, id: ConnId) -> usize {
        todo!()
    }

    /// Queues a record of `len` bytes behind the others; `push` ends a message (PSH). Nothing
    /// bounds the queue but the caller's respect for `send_room`. Gives the record back when the
    /// connection cannot send (stale, closing, closed, or `len` 0).
    pub fn push_record(&mut self, id: ConnId, len: u32, record: R, push: bool) -> Result<(), R> {
        todo!()
    }

    /// Emits what the windows allow, repetitions first; data carries an owed ACK.
    pub fn flush(&mut self, now: Instant, id: ConnId, tx: &mut impl FrameSink<R>) {
        todo!()
    }

    /// Hands out the records that are fully acknowledged, in order.
    pub fn take_acked(&mut self, id: ConnId, f: impl FnMut(R)) {
        todo!()
    }

    /// Hands out every record that is still here once the connection is closed (acknowledged or
    /// not), in order; does nothing while it can still send.
    pub fn take_unacked(&mut self, id: ConnId, f: impl FnMut(R)) {
        todo!()
    }

    /// Timers, and everything owed: pure ACKs (at most one per connection and batch),
    /// repetitions, window updates, probes, SYN, RST, ARP, NDP, ICMP.
    pub fn poll(&mut self, now: Instant, tx: &mut impl FrameSink<R>) {
        todo!()
    }

    /// When `poll` must be called though nothing arrives. May be early, never late.
    pub fn next_deadline(&self) -> Option<Instant> {
        todo!()
    }

    /// Nothing is in flight, queued or owed: if the peers' stacks are idle too, only timers and
    /// new work can wake this one.
    pub fn idle(&self) -> bool {
        todo!()
    }

    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}
