//! Destructors that have to wait for the daemon, on a thread.

use crate::locking::ProcessMutex;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, PoisonError};

type Release = Box<dyn FnOnce() + Send>;

/// Runs calls one after the other on a thread, which exists while there are some.
#[derive(Default)]
pub(crate) struct Releaser(Arc<Shared>);

#[derive(Default)]
struct Shared {
    waiting: ProcessMutex<Waiting>,
    /// The thread has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Waiting {
    calls: VecDeque<Release>,
    has_thread: bool,
}

impl Releaser {
    /// Runs `call` on the thread; the caller waits for it only if no thread can be started.
    pub(crate) fn run(&self, call: Release) {
        // A child of fork(2) has no thread, and nothing to free.
        let Ok(mut waiting) = self.0.waiting.lock() else {
            return;
        };
        waiting.calls.push_back(call);
        if waiting.has_thread {
            return;
        }
        let shared = self.0.clone();
        let thread = std::thread::Builder::new().name("siw-release".into());
        waiting.has_thread = thread.spawn(move || run_waiting(&shared)).is_ok();
        if !waiting.has_thread {
            drop(waiting);
            run_waiting(&self.0);
        }
    }

    /// Waits until the calls so far have been run.
    pub(crate) fn finish(&self) {
        let Ok(waiting) = self.0.waiting.lock() else {
            return;
        };
        let has_thread = |waiting: &mut Waiting| waiting.has_thread;
        let ended = self.0.ended.wait_while(waiting, has_thread);
        drop(ended.unwrap_or_else(PoisonError::into_inner));
    }
}

fn run_waiting(shared: &Shared) {
    loop {
        let next = {
            let Ok(mut waiting) = shared.waiting.lock() else {
                return;
            };
            let next = waiting.calls.pop_front();
            waiting.has_thread &= next.is_some();
            next
        };
        match next {
            Some(call) => call(),
            None => return shared.ended.notify_all(),
        }
    }
}
