//! Streams whose last descriptor was closed. close(2) does not wait for them: a thread keeps them until
//! the peer's daemon has acknowledged all their data, and ends with the last one. If the process ends
//! before, the daemon goes on sending.
//!
//! The thread looks for completions in shared memory and waits without descriptors: the program may
//! close all descriptors of the process, and use their numbers for its own files.

use super::stream::Stream;
use super::wire::StreamMessage;
use crate::per_process::PerProcess;
use siw::ProcessMutex;
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time after which a stream is given up: TCP's default for connections without an owner.
const CLOSE_LIMIT: Duration = Duration::from_secs(120);
/// Pauses between two looks: the first one, a round trip on most links, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(64);
/// Stack of the thread, which calls into the client library only.
const STACK: usize = 256 << 10;

static CLOSING: PerProcess<Closing> = PerProcess::new();

#[derive(Default)]
struct Closing {
    added: ProcessMutex<Added>,
    /// Notified when a stream is added.
    has_added: Condvar,
}

/// The streams that the thread has yet to take over.
#[derive(Default)]
struct Added {
    streams: Vec<ClosingStream>,
    has_thread: bool,
}

/// A stream with the time of its end.
struct ClosingStream {
    stream: Box<Stream>,
    is_end_sent: bool,
    deadline: Instant,
}

/// Takes over a stream. It ends at once if no thread can be started.
pub fn close_later(stream: Box<Stream>, is_end_sent: bool) {
    let closing = CLOSING.get();
    let mut added = closing.lock();
    added.streams.push(ClosingStream {
        stream,
        is_end_sent,
        deadline: Instant::now() + CLOSE_LIMIT,
    });
    if added.has_thread {
        closing.has_added.notify_one();
        return;
    }
    let thread = std::thread::Builder::new().name("siw-close".into());
    let thread = thread.stack_size(STACK);
    added.has_thread = without_signals(|| thread.spawn(|| closing.close_streams())).is_ok();
    if !added.has_thread {
        let streams = std::mem::take(&mut added.streams);
        drop(added);
        drop(streams);
    }
}

/// Runs `call` with all signals blocked: a thread that it starts handles none of the program's.
fn without_signals<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: sets of signals of this function.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let done = call();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        done
    }
}

impl Closing {
    fn lock(&self) -> MutexGuard<'_, Added> {
        self.added.lock_or_end_call()
    }

    /// The thread: ends streams until there are no more.
    fn close_streams(&self) {
        let mut streams = Vec::new();
        let mut pause = FIRST_PAUSE;
        loop {
            let mut added = self.lock();
            if added.streams.is_empty() && !streams.is_empty() {
                let waited = self.has_added.wait_timeout(added, pause);
                added = waited.unwrap_or_else(PoisonError::into_inner).0;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            if !added.streams.is_empty() {
                pause = FIRST_PAUSE;
                streams.append(&mut added.streams);
            }
            if streams.is_empty() {
                added.has_thread = false;
                return;
            }
            drop(added);
            for closing in streams.extract_if(.., ClosingStream::advance) {
                closing.end();
            }
        }
    }
}

impl ClosingStream {
    /// Processes completions. Returns true if the stream has ended.
    fn advance(&mut self) -> bool {
        self.stream.progress();
        let message = StreamMessage::Disconnect;
        self.is_end_sent = self.is_end_sent || self.stream.send_end(message);
        let is_over = self.is_end_sent && self.stream.is_flushed();
        is_over || Instant::now() >= self.deadline
    }

    /// Frees the stream, unless the program has closed its descriptor.
    fn end(self) {
        if rustix::io::fcntl_getfd(&*self.stream.channel).is_err() {
            std::mem::forget(self);
        }
    }
}
