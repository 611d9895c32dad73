//! Sending, receiving and ending: rsend(3), rrecv(3), rshutdown(3), rclose(3) and similar calls.

use super::closing;
use super::send::Blocked;
use super::socket::{Attempt, Patience, Phase, Rsocket, RsocketState, ring};
use super::stream::Stream;
use super::table;
use super::vectors::{DestinationBuffers, SourceBuffers};
use super::wire::StreamMessage;
use crate::waiting::Call;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

/// Time that closing waits for the acknowledgement of all data, before a thread does.
const CLOSE_PATIENCE: Duration = Duration::from_micros(200);

impl RsocketState {
    /// Returns the stream; `Wait` while it is being connected.
    pub fn stream(&mut self) -> Result<&mut Stream, Attempt<Result<usize, c_int>>> {
        match &mut self.phase {
            Phase::Stream(stream) => Ok(stream),
            Phase::Connecting(_) => Err(Attempt::Wait),
            Phase::Failed => Err(Attempt::Done(Err(match std::mem::take(&mut self.error) {
                0 => libc::ENOTCONN,
                errno => errno,
            }))),
            _ => Err(Attempt::Done(Err(libc::ENOTCONN))),
        }
    }

    /// Sends as much as fits.
    fn send_more(&mut self, data: &mut SourceBuffers<'_>) -> Attempt<Result<usize, c_int>> {
        if let Err(attempt) = self.send_mappings() {
            return attempt;
        }
        let stream = match self.stream() {
            Ok(stream) => stream,
            // As in the kernel, where only recv(2) fails with ENOTCONN.
            Err(Attempt::Done(Err(libc::ENOTCONN))) => return Attempt::Done(Err(libc::EPIPE)),
            Err(attempt) => return attempt,
        };
        if data.left() == 0 && !stream.writable {
            return Attempt::Done(Err(stream.write_error()));
        }
        while data.left() > 0 {
            match stream.send_piece(data) {
                Ok(_) => {}
                Err(Blocked::Full) => return Attempt::Wait,
                Err(Blocked::Closed) => return Attempt::Done(Err(stream.write_error())),
            }
        }
        Attempt::Done(Ok(0))
    }

    /// Receives available bytes. With `all` it waits until the buffers are full or the stream ends.
    fn receive_more(
        &mut self,
        to: &mut DestinationBuffers<'_>,
        peek: bool,
        all: bool,
    ) -> Attempt<Result<usize, c_int>> {
        let stream = match self.stream() {
            Ok(stream) => stream,
            Err(attempt) => return attempt,
        };
        if to.left() == 0 && !stream.can_receive() {
            // recv(2) of nothing waits for data nevertheless.
            return Attempt::Wait;
        }
        let received = stream.receive_into(to, peek);
        if received > 0 {
            stream.progress();
        }
        let is_enough = received > 0 && (!all || to.left() == 0);
        if is_enough || to.left() == 0 {
            return Attempt::Done(Ok(0));
        }
        if stream.readable || stream.received() > 0 {
            return Attempt::Wait;
        }
        match std::mem::take(&mut stream.error) {
            0 => Attempt::Done(Ok(0)),
            errno => Attempt::Done(Err(errno)),
        }
    }
}

impl RsocketState {
    /// Ends a listener, as shutdown(2) of one of the kernel does: threads that wait for it return.
    fn end_listening(&mut self) {
        if let Phase::Listening(listening) = std::mem::replace(&mut self.phase, Phase::New) {
            ring(&listening.bell);
        }
    }

    /// Number of bytes that can be read at once (FIONREAD).
    pub fn receivable_bytes(&mut self) -> Result<usize, c_int> {
        self.progress();
        match &self.phase {
            Phase::Stream(stream) => Ok(stream.received()),
            Phase::Listening(_) => Err(libc::EINVAL),
            _ => Ok(0),
        }
    }

    /// Number of bytes sent and not yet acknowledged by the peer's daemon (SIOCOUTQ).
    pub fn outstanding_bytes(&mut self) -> Result<usize, c_int> {
        self.progress();
        match &self.phase {
            Phase::Stream(stream) => Ok(stream.send.outstanding()),
            Phase::Listening(_) => Err(libc::EINVAL),
            _ => Ok(0),
        }
    }
}

impl Stream {
    /// Error of writing to a stream that this side or the peer has ended: the pending one is reported
    /// once.
    pub fn write_error(&mut self) -> c_int {
        match std::mem::take(&mut self.error) {
            0 => libc::EPIPE,
            errno => errno,
        }
    }

    /// Number of bytes that can be read.
    pub fn received(&self) -> usize {
        self.receive.available()
    }
}

/// Result of a call that has moved `moved` bytes before it had to stop.
pub(super) fn moved_or(
    moved: usize,
    outcome: Result<Result<usize, c_int>, c_int>,
) -> Result<usize, c_int> {
    match outcome {
        Ok(Err(errno)) | Err(errno) if moved == 0 => Err(errno),
        _ => Ok(moved),
    }
}

impl Rsocket {
    /// # Safety
    /// The buffers are valid for their lengths.
    pub unsafe fn send(
        self: &Arc<Self>,
        call: &mut Call,
        list: &[libc::iovec],
        flags: c_int,
    ) -> Result<usize, c_int> {
        if flags & libc::MSG_OOB != 0 {
            // Streams have no urgent data.
            return Err(libc::EOPNOTSUPP);
        }
        // SAFETY: as the caller promised.
        let mut source = unsafe { SourceBuffers::new(list) };
        let length = source.left();
        source.skip(call.moved);
        let patience = self.patience(flags, self.lock().options.send_timeout);
        let outcome = self.attempt(call, patience, |state| state.send_more(&mut source));
        call.moved = length - source.left();
        moved_or(call.moved, outcome)
    }

    /// # Safety
    /// The buffers are valid for their lengths, and not used elsewhere meanwhile.
    pub unsafe fn receive(
        self: &Arc<Self>,
        call: &mut Call,
        list: &[libc::iovec],
        flags: c_int,
    ) -> Result<usize, c_int> {
        if flags & libc::MSG_OOB != 0 {
            // There is no urgent data.
            return Err(libc::EINVAL);
        }
        // SAFETY: as the caller promised.
        let mut destination = unsafe { DestinationBuffers::new(list) };
        let length = destination.left();
        destination.skip(call.moved);
        let patience = self.patience(flags, self.lock().options.receive_timeout);
        let peek = flags & libc::MSG_PEEK != 0;
        let all = flags & libc::MSG_WAITALL != 0 && !peek;
        let outcome = self.attempt(call, patience, |state| {
            state.receive_more(&mut destination, peek, all)
        });
        call.moved = length - destination.left();
        moved_or(call.moved, outcome)
    }

    /// rshutdown(3)
    pub fn shut_down(self: &Arc<Self>, how: c_int) -> Result<(), c_int> {
        if !matches!(how, libc::SHUT_RD | libc::SHUT_WR | libc::SHUT_RDWR) {
            return Err(libc::EINVAL);
        }
        let message = {
            let mut state = self.lock();
            state.progress();
            match &mut state.phase {
                // Both sides have ended.
                Phase::Stream(stream) if stream.is_shut_down && !stream.connected => {
                    return Err(libc::ENOTCONN);
                }
                Phase::Stream(stream) => stream.begin_shutdown(how),
                Phase::Listening(_) => {
                    if how != libc::SHUT_WR {
                        state.end_listening();
                    }
                    return Ok(());
                }
                _ => return Err(libc::ENOTCONN),
            }
        };
        if let Some(message) = message {
            // Unlike shutdown(2) of the kernel it may wait, but no signal ends it before the end is sent.
            while self.attempt_here(Patience::Unlimited, |state| {
                let Phase::Stream(stream) = &mut state.phase else {
                    return Attempt::Done(());
                };
                if !stream.send_end(message) {
                    return Attempt::Wait;
                }
                if message == StreamMessage::Disconnect {
                    stream.end();
                }
                Attempt::Done(())
            }) == Err(libc::EINTR)
            {}
        }
        Ok(())
    }

    /// Ends the stream, when the last descriptor is closed. It is reset if the program has not read all
    /// received data (RFC 2525 section 2.17) or has set SO_LINGER to zero. Otherwise its data arrives;
    /// close(2) waits for that only with SO_LINGER.
    pub fn end_stream(self) {
        let socket = Arc::new(self);
        let linger = {
            let mut state = socket.lock();
            state.progress();
            let linger = state.options.linger;
            let Phase::Stream(stream) = &mut state.phase else {
                return;
            };
            if stream.connected && (stream.received() > 0 || linger == Some(0)) {
                stream.reset();
            }
            linger
        };
        let seconds = linger.and_then(|seconds| u64::try_from(seconds).ok());
        let patience = seconds.map_or(CLOSE_PATIENCE, Duration::from_secs);
        let mut is_end_sent = false;
        // After the time, or a signal, the thread goes on.
        let _ = socket.attempt_here(Patience::Timeout(patience), |state| {
            let Phase::Stream(stream) = &mut state.phase else {
                return Attempt::Done(());
            };
            is_end_sent = is_end_sent || stream.send_end(StreamMessage::Disconnect);
            if is_end_sent && stream.is_flushed() {
                return Attempt::Done(());
            }
            Attempt::Wait
        });
        if let Some(Phase::Stream(stream)) = Arc::into_inner(socket).map(Rsocket::into_phase)
            && !(is_end_sent && stream.is_flushed())
        {
            closing::close_later(stream, is_end_sent);
        }
    }
}

impl Stream {
    /// Message to send to the peer, if any.
    fn begin_shutdown(&mut self, how: c_int) -> Option<StreamMessage> {
        self.is_shut_down |= how != libc::SHUT_RD;
        if !self.connected {
            return None;
        }
        let message = match how {
            libc::SHUT_RD if self.writable => None,
            libc::SHUT_WR if self.readable => Some(StreamMessage::Shutdown),
            _ => Some(StreamMessage::Disconnect),
        };
        self.readable &= how == libc::SHUT_WR;
        self.writable &= how == libc::SHUT_RD;
        message
    }
}

/// rclose(3)
pub fn close_rsocket(descriptor: c_int) -> Result<(), c_int> {
    let (number, socket) = table::remove(descriptor).ok_or(libc::EBADF)?;
    socket.watchers.forget(descriptor);
    table::end_if_last(socket);
    drop(number);
    Ok(())
}
